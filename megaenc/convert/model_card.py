"""Model cards of exports, with training history and the positions of predictions."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaenc.convert.families.neobert import HUB_CODE
from megaenc.convert.merge.methods import MergeRecord
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular_file
from megaenc.objectives import Attention, Objective, Schedule
from megaenc.tables import escape_markdown, inline_code
from megaenc.training.run_dir import METRICS_FILE, VALIDATION_FILE
from megaenc.training.run_init import NEW_WEIGHTS, RunInit

_MAX_METRICS_BYTES = 1 << 30
"""Size limit of a run's metrics file in bytes."""


@dataclass(frozen=True)
class ExportProvenance:
    """Facts about the training and the content of an export, for its model card.

    `Exporter` builds it. `schedule` is the objective schedule that `schedule_text` names. `tokens`
    is the number of tokens that the run has read up to `step`, of `total_iters` steps. `start` has
    the earlier runs and models that the first weights come from, `metrics` the result of
    `read_last_metrics`. For weights that no run has trained, `converted` is True (`added_token` is
    then the mask token that was added) or `merge` a MergeRecord. `encoder_only` is True without
    output layer, `sentences` with files of sentence-transformers. `parameters` is 0 if unknown.
    These are texts, empty if unknown: `data` and `tokenizer` (fingerprints), `architecture`
    (transformers' class), `dtype`, `license`, `transformers` (lowest version) and `document` (one
    of training with its special tokens).
    """

    schedule_text: str
    schedule: Schedule
    step: int
    total_iters: int
    tokens: int
    start: RunInit = NEW_WEIGHTS
    parameters: int = 0
    data: str = ""  # fingerprint of the corpora; empty if the model was not trained here
    tokenizer: str = ""  # fingerprint of the tokenizer
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)  # see `read_last_metrics`
    license: str = "unknown"
    sentences: bool = False  # whether the export has the files of sentence-transformers
    architecture: str = ""  # transformers' class that loads the export; empty if there is none
    encoder_only: bool = False  # whether the export has no output layer
    transformers: str = ""  # its lowest version that gives the same numbers; empty if unknown
    dtype: str = "float32"  # of the weights
    # Whether it is a Hugging Face model that was not trained here; `schedule` is then inferred.
    converted: bool = False
    added_token: str = ""  # the mask token that was added when such a model was converted
    # Checkpoints that were merged; `schedule` is then the last objective of one.
    merge: MergeRecord | None = None
    # A document of training with its special tokens, `[CLS] ... [SEP]`; empty if unknown.
    document: str = ""

    @property
    def last_objectives(self) -> tuple[Objective, ...]:
        """Return the `last_objectives` of the export's step, the most frequent first."""
        return last_objectives(self.schedule, self.step, self.total_iters)

    @property
    def is_trained(self) -> bool:
        """Return whether the weights were trained here: after step 0 of a run, or merged."""
        return self.step > 0 or self.merge is not None

    def select_objective(self, attention: Attention) -> Objective:
        """Return the most frequent of the `last_objectives` with this `attention`.

        If none has it, it is the most frequent of all. Objectives whose labels are classes are left
        out before, unless none predicts tokens.
        """
        last = [
            objective for objective in self.last_objectives if not objective.classes
        ] or self.last_objectives
        return next((objective for objective in last if objective.attention == attention), last[0])


def last_objectives(schedule: Schedule, step: int, total_iters: int) -> tuple[Objective, ...]:
    """Return the objectives of the last steps up to `step`, the most frequent first.

    These are the last 5 % of `total_iters` steps, rounded down, and at least one. Equally frequent
    objectives are in the order of the schedule. Those with different options in its text are
    counted apart; the options of each are those of its last such step. At step 0 it is the
    objective of step 1.
    """
    last = max(step, 1)
    first = max(1, last + 1 - max(1, total_iters // 20))
    steps: Counter[str] = Counter()
    objectives: dict[str, Objective] = {}
    for phase in schedule.phases:
        start = max(phase.first_step, first)
        end = min(phase.last_step, last)
        for choice, fraction in zip(phase.choices, phase.fractions, strict=True):
            if start <= end:
                steps[choice.text] += fraction * (end - start + 1)
                objectives[choice.text] = phase.objective(choice, end)
    return tuple(objectives[text] for text, _ in steps.most_common())


def build_model_card(name: str, provenance: ExportProvenance, attention: Attention) -> str:
    """Return the model card (README.md, with the Hub's metadata) of an export.

    Args:
        name: Name of the model, for the heading.
        attention: Attention of the export, which may differ from that of training.
    """
    objective = provenance.select_objective(attention)
    causal = attention == Attention.CAUSAL
    last = [
        (inline_code(last_objective.describe(), cell=True), last_objective)
        for last_objective in provenance.last_objectives
    ]
    rows = "\n".join(
        f"| {name} | {last_objective.attention} | {_format_label(last_objective)} |"
        for name, last_objective in last
    )
    loader = (
        "megaenc's own NeoBERT" if provenance.architecture.startswith("NeoBERT") else "transformers"
    )
    if provenance.converted:
        trained = "made for"
    else:
        trained = "last trained" if provenance.is_trained else "trained first"
    # transformers' fill-mask pipeline supports only masked-LM classes.
    if provenance.sentences:
        tag = "sentence-similarity"
    elif provenance.encoder_only or (_is_decoder(provenance) and not causal):
        tag = "feature-extraction"
    else:
        tag = "text-generation" if causal else "fill-mask"
    return f"""---
library_name: {"sentence-transformers" if provenance.sentences else "transformers"}
pipeline_tag: {tag}
license: {provenance.license}
tags: [megaenc]
---

# {escape_markdown(name)}

A text {"decoder" if causal else "encoder"}{_format_training(provenance)} \
{_format_ancestry(provenance)}Attention in this
export: {attention}.{_format_loading_class(provenance, attention)}

{_format_metrics(provenance)}## Where predictions stand

| {trained} | under attention | the output at position i predicts |
|---|---|---|
{rows}

{_format_prediction_shift(objective, attention, provenance)}

{_format_texts(provenance, attention)}## Proof

`conversion.json` holds the SHA-256 of each weight, and how far the numbers of this directory, \
as {loader} loads it, are
from those of megatron-core's model.
"""


def _format_label(objective: Objective) -> str:
    """Return the cell that names what `objective` predicts at position i."""
    if objective.classes:
        return f"one of {objective.classes} classes"
    return f"token i + {objective.shift}" if objective.shift else "token i"


def _format_texts(provenance: ExportProvenance, attention: Attention) -> str:
    """Return the card's section about the special tokens around a text.

    Empty if they are unknown.
    """
    if not provenance.document:
        return ""
    text = f"In training a document was {inline_code(provenance.document)}. "
    if attention == Attention.CAUSAL:
        text += (
            "`tokenizer(text)` gives the same without its end, "
            "so that the model can go on with a prompt."
        )
    else:
        text += "`tokenizer(text)` gives the same, and `tokenizer(first, second)` a pair."
    return f"## Texts\n\n{text}\n\n"


def check_license(text: str) -> None:
    """Raise InputError if `text` is not a license identifier such as apache-2.0.

    An identifier has letters, digits, points, + and -, with a letter or digit first. Whether the
    Hub knows it is not checked.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", text):
        raise InputError(
            f"--license: found {text!r}, expected an identifier of the Hub such as apache-2.0"
        )


def read_last_metrics(directory: Path, step: int) -> dict[str, dict[str, Any]]:
    """Return the last metrics of a run up to `step`, by the data that they are of.

    They are of the last rows of metrics.jsonl and validation.jsonl, however old. The keys are
    `training` and `held out, OBJECTIVE`, the objective as Markdown code; the values are metrics by
    name, with `step`. Files that are missing or incomplete are left out.

    Args:
        directory: Run directory.
    """
    row = _read_last_row(directory / METRICS_FILE, step)
    metrics = {"training": row} if row else {}
    row = _read_last_row(directory / VALIDATION_FILE, step)
    objectives = row.get("objectives")
    for name, values in objectives.items() if isinstance(objectives, dict) else ():
        if isinstance(values, dict):
            metrics[f"held out, {inline_code(name, cell=True)}"] = {"step": row["step"], **values}
    return metrics


def _read_last_row(file: Path, step: int) -> dict[str, Any]:
    """Return the last row up to `step` of a JSON-lines file.

    Empty if the file is missing or incomplete.
    """
    try:
        rows = [
            parse_json(line) for line in read_regular_file(file, _MAX_METRICS_BYTES).splitlines()
        ]
        return [row for row in rows if type(row["step"]) is int and row["step"] <= step][-1]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def _format_metrics(provenance: ExportProvenance) -> str:
    """Return the card's section with the known metrics, parameters and fingerprints."""
    lines = []
    if provenance.metrics:
        lines += ["## Figures", "", "| at step | of | loss | accuracy |", "|---|---|---|---|"]
        for name, row in provenance.metrics.items():
            cells = [
                f"{row[key]:.4g}" if isinstance(row.get(key), int | float) else ""
                for key in ("loss", "accuracy")
            ]
            lines.append(f"| {row['step']:,} | {name} | {' | '.join(cells)} |")
        lines.append("")
    known = [f"{provenance.parameters:,} parameters"] if provenance.parameters else []
    for name in ("data", "tokenizer"):
        if fingerprint := getattr(provenance, name):
            known.append(f"{name} {inline_code(fingerprint[:16])}")
    if known:
        lines += [f"{'; '.join(known)} (fingerprints).", ""]
    return "\n".join([*lines, ""]) if lines else ""


def _format_training(provenance: ExportProvenance) -> str:
    """Return the card's sentence about the schedule, steps and tokens."""
    if provenance.merge:
        merge = provenance.merge
        names = [inline_code(checkpoint.describe()) for checkpoint in merge.checkpoints]
        base = (
            f", relative to {inline_code(merge.base.label)} with density {merge.density:g}"
            if merge.base
            else ""
        )
        return (
            f" whose weights are merged by {merge.method} from {', '.join(names)}{base}; "
            "nothing\nwas trained since."
        )
    if provenance.converted:
        return " as it came in: nothing was trained since."
    return (
        f" pretrained on {inline_code(provenance.schedule_text)} over {provenance.total_iters:,} "
        f"steps;\nthis is step {provenance.step:,}, after {provenance.tokens:,} tokens."
    )


def _format_ancestry(provenance: ExportProvenance) -> str:
    """Return the card's sentences about the source model and earlier runs.

    They are named by directory, as paths are private.
    """
    start = provenance.start
    whose = "weights" if provenance.converted else "first weights"
    parts = [
        f"Its {whose} are those of {inline_code(Path(stage.run).name)}, "
        f"a Hugging Face model of type {stage.family}. "
        for stage in start.before
        if stage.family
    ]
    if provenance.added_token:
        parts.append(
            f"The row of its mask token, {inline_code(provenance.added_token)}, was added: "
            "the mean of the others. "
        )
    stages = [
        f"{inline_code(Path(stage.run).name)} to step {stage.step:,} "
        f"({inline_code(stage.schedule)}, {stage.tokens:,} tokens)"
        for stage in start.before
        if not stage.family
    ]
    if stages:
        parts.append(
            f"{'They' if parts else f'Its {whose}'} were trained in other runs: "
            f"{', then '.join(stages)}. "
        )
    if start.kind == "branch":
        run = inline_code(Path(start.run).name)
        parts.append(
            f"It is a branch of the run {run} at step {start.at:,}, and the same run up to there. "
        )
    return "".join(parts)


def _is_decoder(provenance: ExportProvenance) -> bool:
    """Return whether the export is loaded by a causal-LM class."""
    return provenance.architecture.endswith("ForCausalLM")


def _format_loading_class(provenance: ExportProvenance, attention: Attention) -> str:
    """Return the card's sentence about the class that loads the export."""
    if not provenance.architecture:
        return ""
    if provenance.architecture.startswith("NeoBERT"):
        loader = "AutoModel" if provenance.encoder_only else "AutoModelForMaskedLM"
        return (
            f" It loads with `{loader}` and `trust_remote_code=True`, "
            f"which runs the code of {HUB_CODE} on the Hub, "
            "written for transformers 4: under 5 it computes other outputs, without an error. "
            "`megaenc finetune`, `megaenc embed` and `megaenc fill-mask` run none."
        )
    version = f" {provenance.transformers} or later" if provenance.transformers else ""
    text = f" It loads with `{provenance.architecture}` of transformers{version}"
    if provenance.encoder_only:
        text += " and has no output layer"
    if attention == Attention.BIDIRECTIONAL and _is_decoder(provenance):
        text += (
            ", which reads both ways here, and not with `AutoModelForMaskedLM`; "
            "`megaenc fill-mask` fills masks with it"
        )
    if provenance.sentences:
        text += (
            ". `SentenceTransformer` gives the mean of its hidden states, "
            "in float32 unless `model_kwargs` has another `dtype`"
        )
    if provenance.dtype != "float32":
        text += (
            f". The weights are in {provenance.dtype}: "
            "to fine-tune them or to export them to ONNX, give `from_pretrained` "
            '`dtype="float32"`, as small steps of an optimizer are lost otherwise'
        )
    return f"{text}."


def _format_prediction_shift(
    objective: Objective, attention: Attention, provenance: ExportProvenance
) -> str:
    """Return the card's paragraph about the positions of predictions.

    It also tells whether the attention of the export differs from that of training.
    """
    shift = objective.shift
    name = inline_code(objective.describe())
    parts = []
    if provenance.encoder_only:
        parts.append("The output layer is left out: this export gives hidden states.")
    elif attention == Attention.CAUSAL and shift == 1:
        parts.append(
            "The output at position i predicts token i + 1, "
            "as transformers' causal language models do."
        )
    elif shift:
        pipeline = (
            '`transformers.pipeline("fill-mask")` reads position i and would answer for another '
            "token; "
        )
        parts.append(
            f"**Predictions are moved by {shift} position{'s' if shift > 1 else ''}.** {name} "
            "predicts a token from the output "
            f"{shift} before it: for the mask token at position i read the logits at position i - "
            f"{shift}. "
            f"{'' if _is_decoder(provenance) else pipeline}`megaenc fill-mask` moves the logits by "
            "itself."
        )
    else:
        parts.append(
            f"{name} predicts a token where it stands: the output at position i is for token i."
        )
    if objective.attention != attention:
        if provenance.converted:
            was = "came in reading"
        else:
            was = "was trained" if provenance.is_trained else "is first trained"
        parts.append(
            f"It {was} under {objective.attention} attention, "
            f"and this export reads its text under {attention}."
        )
    if not provenance.encoder_only:
        parts.append(f"`config.json` holds the same as `prediction_shift: {shift}`.")
    return "\n".join(parts)
