"""Predict labels, tags or answers with a fine-tuned model that was kept (`megaenc finetune predict`)."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.console import ProgressLine, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets import formats
from megaenc.finetune.examples import Dataset, Examples, Question, TaggedWords, TaskFamily
from megaenc.finetune.results.files import MODEL_DETAILS
from megaenc.json_files import read_json_object
from megaenc.output_paths import check_output_file, create_parent_dir

_TOKENS_PER_FORWARD = 4096


@dataclass(frozen=True)
class PredictConfig:
    """Options of `megaenc finetune predict`: kept model, rows to predict, output file."""

    model: str = ""
    """folder that `megaenc finetune run --save-model` or `grid --keep` wrote"""
    input: str = ""
    """JSONL, CSV, TSV, Parquet, CoNLL or SQuAD file with `text` (and `text_pair`), `tokens`, or `question` and `context`; labels
    are ignored"""
    output: str = ""
    """JSONL file of predictions, one for each row, in order; by default standard output"""
    overwrite: bool = False
    """replace the file of --output if it exists"""


@handle_command_errors
def predict_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc finetune predict`: write the prediction for each row of a file as a line of JSON."""
    silence_libraries()
    settings = flags.parse(PredictConfig, argv, prog="megaenc finetune predict", description=__doc__)
    for name in ("model", "input"):
        if not getattr(settings, name):
            raise InputError(f"--{name}: missing; see `megaenc finetune predict --help`")
    if settings.output:
        inputs = (settings.model, settings.input)
        check_output_file(Path(settings.output), "--output", inputs=inputs, overwrite=settings.overwrite)
    folder = Path(settings.model)
    if not (folder / MODEL_DETAILS).is_file():
        raise InputError(f"--model {folder}: no {MODEL_DETAILS}, expected a folder that --save-model or --keep wrote")
    details = read_json_object(folder / MODEL_DETAILS, "what a run wrote there")
    try:
        family, protocol = TaskFamily(details["family"]), FinetuneConfig(**details["protocol"])
        pair_template = str(details.get("pair_template", ""))
        pair_template.format(text="", text_pair="")
    except (LookupError, TypeError, ValueError, AttributeError):
        raise InputError(f"{folder / MODEL_DETAILS}: not as a run writes it; expected a folder that it has kept") from None
    if family == TaskFamily.IR:
        raise InputError(f"--model {folder}: found a retrieval model; use it with SentenceTransformer, as its README.md shows")
    if not Path(settings.input).is_file():
        raise InputError(f"--input {settings.input}: no such file; expected {formats.EXPECTED_FORMATS}")
    rows = list(formats.read_rows(Path(settings.input)))
    if not rows:
        raise InputError(f"--input {settings.input}: holds no row, expected at least one")
    examples = _build_examples(family, rows, pair_template)
    lines = [
        json.dumps(({"id": row["id"]} if "id" in row else {}) | prediction, ensure_ascii=False, default=str) + "\n"
        for (_, row), prediction in zip(rows, predict(folder, family, protocol, examples), strict=True)
    ]
    if not settings.output:
        sys.stdout.writelines(lines)
        return
    create_parent_dir(Path(settings.output), "--output")
    atomic_write(Path(settings.output), "".join(lines))
    print_rank_0(f"{len(lines):,} predictions: {settings.output}")


def _build_examples(family: TaskFamily, rows: Sequence[tuple[str, dict[str, Any]]], pair_template: str) -> Examples:
    """Return the examples of a family without labels; InputError, naming file and line, for a missing or wrong field.

    `pair_template` joins pairs as in training; it is empty for models of older versions that were trained without pairs.
    """

    def build() -> Iterator[Any]:
        for location, row in rows:
            if family == TaskFamily.SC:
                if row.get("text_pair") and not pair_template:
                    raise InputError(f"{location}: field `text_pair`: expected both texts in `text`, joined as in training")
                yield formats.build_labelled_text(row, location, "", 0, pair_template)
            elif family == TaskFamily.TC:
                words = formats.get_value(row, "tokens", location, list)
                if not words or not all(isinstance(word, str) for word in words):
                    raise InputError(f"{location}: field `tokens`: found {str(words)[:40]}, expected a list of words")
                yield TaggedWords("", tuple(words), (0,) * len(words))
            else:
                question, context = (formats.get_value(row, key, location, str) for key in ("question", "context"))
                yield Question("", question, context, ())

    return list(build())


def predict(folder: Path, family: TaskFamily, protocol: FinetuneConfig, examples: Examples) -> list[dict[str, Any]]:
    """Return the prediction for each of `examples` by the kept model in `folder`: label and probability, tags, or answer."""
    import numpy as np
    import torch

    from megaenc.backend.device import detect_backend
    from megaenc.data.tokenizer.special_tokens import read_template
    from megaenc.data.tokenizer.tokenizer import load_tokenizer
    from megaenc.finetune.model.backbone import batch_by_tokens, pack_texts
    from megaenc.finetune.model.fingerprint import check_model_folder
    from megaenc.finetune.model.task_class import compute_hf_outputs, find_task_class, set_labels
    from megaenc.finetune.tasks import TASKS
    from megaenc.finetune.tasks.question_answering import extract_answer
    from megaenc.finetune.tasks.token_classification import majority_vote
    from megaenc.finetune.tokenized import TextEncoder
    from megaenc.hf.checkpoint import HFCheckpoint
    from megaenc.hf.model import load_hf_config, load_model

    check_model_folder(str(folder))
    names = read_json_object(folder / "config.json")["id2label"]
    labels = tuple(names[key] for key in sorted(names, key=int))
    hf = HFCheckpoint(folder, "--model")
    config = load_hf_config(hf)
    set_labels(config, labels)
    device = detect_backend().device
    model, report = load_model(hf, config, find_task_class(config, family), f"a model of {family}")
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"--model {folder}: no tensor `{missing[0]}`, expected all weights of a {type(model).__name__}")
    model = model.to(device)
    tokenizer = load_tokenizer(folder)
    encoder = TextEncoder(tokenizer, protocol.max_length, read_template(tokenizer))
    task = TASKS[family](Dataset("", family, labels, "", "", "", lambda split: []), protocol)
    data = task.encode(examples, encoder)
    outside = labels.index("O") if "O" in labels else 0
    predictions: list[dict[str, Any]] = [{}] * len(data)
    done = 0
    with torch.inference_mode(), ProgressLine("predicting", total=len(data)) as line:
        for part in batch_by_tokens(data.lengths, _TOKENS_PER_FORWARD):
            outputs = compute_hf_outputs(model, pack_texts(data.gather_rows(part), device)).cpu()
            if family == TaskFamily.SC:
                for row, probabilities in zip(part, outputs.softmax(-1), strict=True):
                    best = int(probabilities.argmax())
                    predictions[row] = {"label": labels[best], "score": round(float(probabilities[best]), 6)}
            else:
                for row, logits in zip(part, outputs.split(data.lengths[part].tolist()), strict=True):
                    values = logits.numpy()
                    if family == TaskFamily.QA:
                        answer = extract_answer(examples[row].context, values[:, 1] - values[:, 0], data, row)
                        predictions[row] = {"answer": answer}
                    else:
                        words = data.columns["words"][data.starts[row] : data.starts[row + 1]]
                        known = words >= 0
                        tags = majority_vote(words[known], values.argmax(1)[known], len(examples[row].words), outside)
                        predictions[row] = {"tags": [labels[tag] for tag in np.asarray(tags)]}
            line.update(done := done + len(part))
    return predictions
