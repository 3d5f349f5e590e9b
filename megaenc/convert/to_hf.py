"""A run's checkpoint, saved in any layout, as a Hugging Face folder that loads without custom code and proves itself."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megaenc import __version__
from megaenc.convert.card import Provenance, card, check_license, last_rows
from megaenc.convert.certificate import LENGTH, Probe, certify, core_outputs
from megaenc.convert.export_names import study_name
from megaenc.convert.families import FAMILIES, Family, config_of
from megaenc.convert.hf_folder import GENERATION
from megaenc.convert.mapping import HEAD, VOCABULARY_ROWS, lines
from megaenc.convert.saved_run import SavedRun, open_run
from megaenc.convert.shards import dtype_of, size_of, write_shards
from megaenc.convert.tokenizer_files import certify_tokenizer, fit_beside, write_tokenizer
from megaenc.data.tokenizer import load_tokenizer, vocabulary_of
from megaenc.data.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.files import whole_folder
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention, Schedule
from megaenc.output_paths import make_parent, refuse_existing
from megaenc.training.run_folder import TOKENIZER
from megaenc.training.start import digest

CERTIFICATE = "conversion.json"
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@dataclass(frozen=True)
class Export:
    """How a model is written down."""

    architecture: str | None = None
    """The name of a family, `source` for the one that it came as, or None: EuroBERT where that can say what the model is, else
    the source's. EuroBERT and the last two are bidirectional, a decoder family by its name is causal."""
    dtype: Literal["run", "bf16", "fp32"] = "run"
    """Of the weights: that of the run unless given."""
    max_shard_size: str = "5GB"
    sentence_transformers: bool = False
    """Without the output layer, with what sentence-transformers needs to take the mean of the tokens' states."""
    license: str = "unknown"

    def family(self, run: SavedRun) -> tuple[Family, Attention]:
        """The family and the attention of this export of `run`. InputError for a family that is not known."""
        if self.architecture in FAMILIES and not FAMILIES[self.architecture].written_as:
            family = FAMILIES[self.architecture]
            return family, Attention.BIDIRECTIONAL if family.encoder else Attention.CAUSAL
        if self.architecture not in (None, "source"):
            raise InputError(f"--as {self.architecture}: unknown family, expected source or one of {', '.join(_WRITTEN)}")
        source = FAMILIES[run.origin.family] if run.origin else FAMILIES["eurobert"]
        source = FAMILIES[source.written_as or source.model_type]
        if self.architecture == "source":
            return source, Attention.BIDIRECTIONAL
        order = (FAMILIES["eurobert"], source, *(FAMILIES[name] for name in _WRITTEN))
        able = (family for family in order if not family.lacks(run.model, Attention.BIDIRECTIONAL))
        return next(able, FAMILIES["eurobert"]), Attention.BIDIRECTIONAL


_WRITTEN = [name for name, family in FAMILIES.items() if not family.written_as]


def to_hf(load: Path, output: Path, *, step: int | None = None, **how: Any) -> int:
    """Write the checkpoint of `step` (None: the newest) of run `load` to folder `output`; returns the step. `how`: see `Export`.

    The folder holds config.json, safetensors, the tokenizer, a card (README.md) and its certificate, conversion.json.
    `prediction_shift` in config.json says how far before its token a prediction stands. Raises InputError for anything missing or
    any difference to the model of the run, and then leaves no folder.
    """
    refuse_existing(output, "--output")
    run = open_run(load)
    exporter = Exporter(run, Export(**how))
    make_parent(output, "--output")
    with whole_folder(output) as folder:
        return exporter.write(folder, output.resolve().name, step)


def to_hf_all(load: Path, output: Path, **how: Any) -> list[str]:
    """Write each kept checkpoint of run `load`, and step 0 where it follows from the seed, to a folder in `output`.

    Returns the folders' names, those of the study, in the order of the steps. All of them are written or none. Raises InputError
    as `to_hf` does.
    """
    refuse_existing(output, "--output")
    run = open_run(load)
    steps = run.steps()
    exporter = Exporter(run, Export(**how))
    names = [study_name(run, exporter.schedule, step) for step in steps]
    make_parent(output, "--output")
    with whole_folder(output) as folder:
        for name, step in zip(names, steps, strict=True):
            (folder / name).mkdir()
            exporter.write(folder / name, name, step)
    return names


class Exporter:
    """What is the same for all exports of one run."""

    def __init__(self, run: SavedRun, how: Export):
        """InputError for what cannot be before any weight is read."""
        self.run, self.how = run, how
        self.largest = size_of(how.max_shard_size, "--max-shard-size")
        check_license(how.license)
        self.dtype = dtype_of(how.dtype, "run", run.dtype)
        self.family, self.attention = how.family(run)
        self.tokenizer = load_tokenizer(run.folder / TOKENIZER)
        vocabulary = vocabulary_of(self.tokenizer)
        _check_tokenizer(run, vocabulary)
        self.tokenizer.model_max_length = run.seq_length
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.schedule: Schedule = run.schedule(vocabulary)
        self.config = self._config()
        fit_beside(self.config.model_type, self.tokenizer)

    def _config(self) -> Any:
        """transformers' config; InputError where the family cannot say what the model is."""
        run = self.run
        config = config_of(
            self.family,
            self.attention,
            run.model,
            vocab_size=run.vocab_size,
            context=run.context,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
        )
        if self.how.sentence_transformers:
            config.architectures = [self.family.architecture.split("For")[0] + "Model"]
        return config

    def write(self, folder: Path, name: str, step: int | None) -> int:
        """Fill `folder` with the export of `step`, which is called `name`; returns the step."""
        run, how = self.run, self.how
        probe = Probe.of(run.vocab_size, run.context)
        tokens = self._write_tokenizer(folder)
        with run.loaded(step, LENGTH) as (found, encoder):
            provenance = self._provenance(found)
            self.config.prediction_shift = provenance.read_as(self.attention).shift
            self.config.save_pretrained(folder)
            if self.attention == Attention.CAUSAL and run.generation and not how.sentence_transformers:
                (folder / GENERATION).write_text(json.dumps(run.generation, indent=2) + "\n", encoding="utf-8")
            _store_in(encoder, self.dtype)
            digests = self._write_weights(folder, dict(encoder.named_parameters()))
            expected = core_outputs(encoder, probe, self.attention, head=not how.sentence_transformers)
            del encoder  # before there is another
        (folder / "README.md").write_text(card(name, provenance, self.attention), encoding="utf-8")
        if how.sentence_transformers:
            _write_sentence_layout(folder, run.model.hidden_size, run.seq_length)
        try:
            proof = certify(folder, probe, expected, self.attention, digests)
        except InputError as error:
            raise InputError(f"step {found} of {run.folder}: the export is not the model: {error}; nothing is written") from None
        origin = {"megaenc": __version__, "run": run.folder.resolve().name, "step": found, "family": self.family.model_type}
        origin["identity"] = digest(run.identity)
        origin["dtype"] = str(self.dtype).removeprefix("torch.")
        (folder / CERTIFICATE).write_text(json.dumps(origin | proof | {"tokenizer": tokens}, indent=1) + "\n", encoding="utf-8")
        return found

    def _write_tokenizer(self, folder: Path) -> dict[str, Any]:
        """Write it, and compare what its users get with what training had; returns what conversion.json says."""
        self.config.save_pretrained(folder)  # which has a say in the class that it is loaded as
        write_tokenizer(self.tokenizer, folder)
        try:
            proof = certify_tokenizer(folder, self.tokenizer, self.config.model_type)
        except InputError as error:
            family = self.config.model_type
            able = [name for name in _WRITTEN if name != family and not FAMILIES[name].lacks(self.run.model, self.attention)]
            others = f"; expected --as {' or '.join(able)}" if able else ""
            raise InputError(f"--as {family}: {error}{others}; nothing is written") from None
        return proof | {"fingerprint": self.run.identity["tokenizer"]}

    def _provenance(self, step: int) -> Provenance:
        run, settings = self.run, self.run.settings
        facts = dict(
            parameters=run.model.parameters(run.vocab_size),
            data=str(run.identity.get("data", "")),
            tokenizer=str(run.identity.get("tokenizer", "")),
            metrics=last_rows(run.folder, step),
            license=self.how.license,
            sentences=self.how.sentence_transformers,
            architecture=self.config.architectures[0],
            converted=run.converted,
            added_token=run.added_token,
        )
        tokens = settings.tokens_after(step)
        return Provenance(settings.objective_schedule, self.schedule, step, settings.total_iters, tokens, run.start, **facts)

    def _write_weights(self, folder: Path, parameters: dict[str, Tensor]) -> dict[str, str]:
        """The SHA-256 of each weight."""
        model = dataclasses.replace(self.run.model, vocab_size=self.run.vocab_size)
        base = self.how.sentence_transformers
        empty = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in _hf_tensors(empty, model, self.family, base)}
        tensors = _hf_tensors(parameters, model, self.family, base)
        return write_shards(folder, shapes, self.dtype, tensors, self.largest)


def _check_tokenizer(run: SavedRun, vocabulary: Vocabulary) -> None:
    """InputError if the tokenizer in the run folder is not the one that the run was trained with."""
    where, expected = run.folder / TOKENIZER, str(run.identity.get("tokenizer"))
    if vocabulary.fingerprint != expected:
        raise InputError(
            f"{where}: found another tokenizer than the run's (fingerprint {vocabulary.fingerprint[:12]}, run.json says "
            f"{expected[:12]}); put the one back that the run wrote there"
        )
    if vocabulary.size > run.vocab_size:
        raise InputError(f"{where}: found {vocabulary.size} ids, expected at most the {run.vocab_size} rows that run.json says")


def _write_sentence_layout(folder: Path, hidden_size: int, length: int) -> None:
    """Add what makes sentence-transformers take the mean of the states of a text's tokens, `length` at most."""
    (folder / "1_Pooling").mkdir()
    files = {
        "modules.json": _MODULES,
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
        "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
        | {f"pooling_mode_{other}": False for other in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _store_in(encoder: torch.nn.Module, dtype: torch.dtype) -> None:
    """One weight after the other, so that memory holds them once."""
    for parameter in encoder.parameters():
        parameter.data = parameter.data.to(dtype)


def _hf_tensors(parameters: dict[str, Tensor], model: ModelConfig, family: Family, base: bool) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model under Hugging Face's names, one after the other; those of a `base` model have no output layer."""
    for rule, core, names in lines(model):
        tensor = parameters[core][: model.vocab_size] if core in VOCABULARY_ROWS else parameters[core]
        for name, part in zip(names, rule.to_hf(tensor, model), strict=True):
            if not base:
                yield name, part
            elif name != HEAD:
                yield name.removeprefix("model."), part
    for name in family.zero_biases(model):
        like = next(iter(parameters.values()))
        yield name.removeprefix("model.") if base else name, torch.zeros(model.hidden_size, dtype=like.dtype, device=like.device)
