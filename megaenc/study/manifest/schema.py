"""Schema and reader of the manifest of a study.

A manifest has models, training flags, evaluation and cost assumptions. docs/study-plan.md has every
key.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from megaenc import flags
from megaenc.console import escape_unprintable, truncate_text
from megaenc.errors import InputError
from megaenc.finetune.grid.command import GridConfig
from megaenc.flags import NonNegativeFloat, NonNegativeInt, PositiveInt
from megaenc.study.manifest.embed_entry import EmbedEntry, build_embed_entry
from megaenc.study.manifest.expand import (
    ManifestEntry,
    PlannedModel,
    expand_models,
    format_suggestion,
)
from megaenc.study.manifest.ladder import (
    LADDER,
    TRIED_RATES,
    LadderEntry,
    build_ladder_entry,
    expand_ladder,
)
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.pretrain_args import (
    build_run_config,
    check_pretrain_flags,
    prefix_errors,
    resolve_flag_paths,
)
from megaenc.study.manifest.training_sets import (
    TrainingSet,
    plan_training_sets,
    resolve_dataset_path,
)

_MAX_SEEDS = 10_000
_MAX_RESULTS = 1_000_000
_MAX_FILE_NAME = 255  # bytes
_MAX_INTEGER = 10**15  # products of several integers stay finite as floats
_MAX_LENGTH = 10_000  # items of a list, characters of a text
_COMMAND_LINE_ONLY = {
    "config",
    "model",
    "output",
    *flags.flatten(GridConfig().local),
    *flags.flatten(GridConfig().slurm),
}


@dataclass(frozen=True)
class CorpusEntry:
    """Manifest section `corpus`: text of the study's corpus, and vocabulary size.

    `text` are files, and `demo` is whether the demo corpus is built; without both, the study builds
    no corpus. `vocab_size` is that of the tokenizer to train, or of the one in `pretrain`.
    """

    demo: bool = False
    """build the demo corpus from packages installed here"""
    text: tuple[str, ...] = ()
    """JSONL, CSV, TSV, Parquet or text files, or directories of them, to tokenize; relative to the
    manifest or to --data
    """
    vocab_size: NonNegativeInt = 0
    """vocabulary size of the tokenizer to train, or of the one in `pretrain` (for the costs)"""

    @property
    def is_built_by_study(self) -> bool:
        """Return whether the study builds its own tokenizer and corpus."""
        return self.demo or bool(self.text)


@dataclass(frozen=True)
class HardwareEntry:
    """Manifest section `hardware`: devices and throughputs for planned hours.

    A pretraining run has `devices` devices of the name `device`, each with `tokens_per_second`, or
    by size with `tokens_per_second_of`. `finetune_seconds` and `embed_seconds` are for one training
    with its evaluation. 0 is unknown. `source` is the origin of the numbers, for display.
    """

    device: str = "device"
    """name of a device, for display"""
    devices: PositiveInt = 1
    """number of devices per pretraining run"""
    tokens_per_second: NonNegativeFloat = 0.0
    """pretraining throughput of one device, for all sizes"""
    tokens_per_second_of: dict = field(default_factory=dict)
    """pretraining throughput of one device by size; takes precedence"""
    finetune_seconds: NonNegativeFloat = 0.0
    """seconds of one fine-tuning run on one device, including evaluation"""
    embed_seconds: NonNegativeFloat = 0.0
    """seconds of one contrastive training of `embed` on one device, including evaluation"""
    source: str = ""
    """origin of these numbers, for display"""

    def rate(self, size: str) -> float:
        """Return the pretraining tokens per second of one device; 0.0 if unknown.

        It is that of `size` in `tokens_per_second_of`, else that of all sizes.
        """
        return float(self.tokens_per_second_of.get(size, self.tokens_per_second))


@dataclass(frozen=True)
class Manifest:
    """Checked content of the manifest `path`, as of `read_manifest`.

    `title` is that of the study. `models` has all PlannedModels, parents before those that continue
    them. Data paths in `models`, `finetune_flags` and `embed` are resolved; those in `corpus`
    (CorpusEntry) and `finetune` are as written, and relative ones start from `data_dir`. `finetune`
    (GridConfig) and `embed` (EmbedEntry) are None if the manifest lacks the section;
    `training_sets` (TrainingSet) are the data sets to fine-tune on, and `embed_flags` the flags of
    contrastive training that are set. `hardware` (HardwareEntry) is for the costs.
    """

    path: Path
    title: str
    models: tuple[PlannedModel, ...]
    """All models, parents before the models that continue them."""
    corpus: CorpusEntry
    data_dir: Path
    """Directory that relative data paths start from."""
    finetune: GridConfig | None
    """Fine-tuning grid without model and output; None if nothing is fine-tuned."""
    finetune_flags: Mapping[str, Any]
    """Flags of `megaenc finetune grid` that describe `finetune`, with data set paths resolved."""
    training_sets: tuple[TrainingSet, ...]
    """Data sets that each model is fine-tuned on."""
    hardware: HardwareEntry
    embed: EmbedEntry | None = None
    """Zero-shot retrieval with paths resolved; None if there is none."""
    embed_flags: Mapping[str, Any] = field(default_factory=dict)
    """Flags of contrastive training that the manifest sets."""
    ladder: LadderEntry | None = None
    """Sizes, budgets and objectives of a scaling law; None if there is none."""

    def model_keys(self) -> dict[str, ModelKey]:
        """Return the ModelKey of every evaluated checkpoint by its name in the study.

        A name need not be that of `format_model_name`: an entry may set `name` or learning rates.
        Ends of models come first, then intermediate checkpoints; models with `evaluate` false have
        only the latter.
        """
        return {name: key for name, key, *_ in self.checkpoints()}

    def checkpoints(self) -> Iterator[tuple[str, ModelKey, PlannedModel, int]]:
        """Yield (name, key, model, step) of every evaluated checkpoint.

        First come the ends of all models with `evaluate`, then the intermediate checkpoints of each
        model. `step` counts from 1 in the model's own run, also if it continues a parent.
        """
        for model in self.models:
            if model.evaluate:
                yield model.name, model.key, model, model.steps
        for model in self.models:
            for step in model.checkpoints:
                yield model.checkpoint_name(step), model.checkpoint_key(step), model, step

    def vocab_size(self, model: PlannedModel) -> int:
        """Return the vocabulary size of `model`, without the padding of training.

        It is that of its flag, else that of `corpus`; `read_manifest` ensures that there is one.
        """
        return model.config.shape.vocab_size or self.corpus.vocab_size


_Section = TypeVar("_Section")


@dataclass(frozen=True)
class _ManifestFile:
    """Top-level keys of the YAML file."""

    title: str = ""
    sizes: dict = field(default_factory=dict)
    pretrain: dict = field(default_factory=dict)
    corpus: dict = field(default_factory=dict)
    models: list = field(default_factory=list)
    ladder: dict = field(default_factory=dict)
    finetune: dict = field(default_factory=dict)
    embed: dict = field(default_factory=dict)
    hardware: dict = field(default_factory=dict)


def read_manifest(path: str | Path, data_dir: str | Path | None = None) -> Manifest:
    """Return the checked manifest in a YAML file.

    Data are not read, and need not exist.

    Args:
        path: Path, or name of a packaged manifest (`find_config_file`).
        data_dir: Directory that relative data paths start from; None: that of the file, or the
            current one for a packaged manifest.

    Raises:
        InputError: The file cannot be read or the manifest is invalid. The message is one line with
            file, field, found and expected; for an unknown key with the nearest known one.
    """
    path = Path(path)
    values = flags.read_yaml(path, str(path), "a study's manifest, as configs/study/mini.yaml")
    if not isinstance(values, dict):
        raise InputError(
            f"{path}: found a {type(values).__name__}, expected `key: value` lines, among them "
            "`sizes` and `models`"
        )
    values = {str(key): value for key, value in values.items()}
    with prefix_errors(str(path)):
        for name, value in values.items():
            _check_values(name, value)
    sections = _build_section(_ManifestFile(), values, str(path))
    if data_dir is None:
        data_dir = path.parent if path.is_file() else ""
    data_root = Path(data_dir).absolute()
    with prefix_errors(str(path)):
        return _build_manifest(path, sections, data_root)


def _build_section(empty: _Section, values: Mapping[str, Any], place: str) -> _Section:
    """Return `empty` with `values` filled in, texts joined to one line."""
    part = flags.replace_fields(empty, dict(values), source=place)
    texts = {
        name: " ".join(text.split()) for name, text in vars(part).items() if isinstance(text, str)
    }
    return replace(part, **texts)


def _build_manifest(path: Path, sections: _ManifestFile, data_dir: Path) -> Manifest:
    """Return the Manifest of the parsed top-level keys.

    Raises:
        InputError: Values are missing or inconsistent.
    """
    if not sections.models and not sections.ladder:
        raise InputError("field `models`: found none, expected a list of at least one entry")
    if not sections.sizes and not sections.ladder:
        raise InputError(
            "field `sizes`: found none, expected names of sizes, each with flags such as "
            "`model: 610m`"
        )
    check_pretrain_flags("pretrain", sections.pretrain)
    corpus = _build_section(CorpusEntry(), sections.corpus, "corpus")
    ladder = build_ladder_entry(sections.ladder) if sections.ladder else None
    models = _build_models(sections, ladder, corpus.vocab_size, data_dir)
    if corpus.demo and corpus.text:
        raise InputError("corpus: found `demo` together with `text`, expected one of them")
    for name in ("data_path", "tokenizer"):
        if corpus.is_built_by_study and name in sections.pretrain:
            raise InputError(
                f"pretrain: found `{name}`, but `corpus` builds its own; expected one of them"
            )
    if corpus.vocab_size < 1 and any(model.config.shape.vocab_size is None for model in models):
        raise InputError(
            f"corpus: field `vocab_size`: found {corpus.vocab_size}, expected the vocabulary size "
            "of the tokenizer"
        )
    hardware = _build_section(HardwareEntry(), sections.hardware, "hardware")
    _check_hardware(hardware, {*map(str, sections.sizes), *(model.key.size for model in models)})
    grid = _build_grid(sections.finetune) if sections.finetune else None
    embed = None
    embed_flags = {}
    if sections.embed:
        embed, embed_flags = build_embed_entry(sections.embed, data_dir)
    manifest = Manifest(
        path=path,
        title=sections.title,
        models=models,
        corpus=corpus,
        data_dir=data_dir,
        finetune=grid,
        finetune_flags=_build_grid_flags(grid, sections.finetune, data_dir) if grid else {},
        training_sets=plan_training_sets(grid, data_dir) if grid else (),
        hardware=hardware,
        embed=embed,
        embed_flags=embed_flags,
        ladder=ladder,
    )
    _check_log_names(manifest)
    return manifest


def _build_models(
    sections: _ManifestFile, ladder: LadderEntry | None, vocab_size: int, data_dir: Path
) -> tuple[PlannedModel, ...]:
    """Return the models of the entries of `models` and of the ladder.

    Raises:
        InputError: Flags of a size, or an entry, are wrong.
    """
    sizes: dict[str, Mapping[str, Any]] = {}
    for size, flag_values in sections.sizes.items():
        if not isinstance(flag_values, dict):
            text = truncate_text(repr(flag_values))
            raise InputError(
                f"sizes: field `{size}`: found {text}, expected flags such as {{model: 610m}}"
            )
        check_pretrain_flags(f"sizes: {size}", flag_values)
        sizes[str(size)] = resolve_flag_paths(flag_values, data_dir)
    entries = [
        _build_entry(index, flag_values, data_dir)
        for index, flag_values in enumerate(sections.models, 1)
    ]
    pretrain = resolve_flag_paths(sections.pretrain, data_dir)
    if ladder:
        for index, entry in enumerate(entries, 1):
            if entry.group in (LADDER, TRIED_RATES):
                raise InputError(
                    f"models, entry {index}: field `group`: found {entry.group}, a group of the "
                    "section `ladder`; expected another"
                )
        vocab_size = build_run_config(pretrain).shape.vocab_size or vocab_size
        is_evaluated = bool(sections.finetune or sections.embed)
        ladder_sizes, ladder_entries = expand_ladder(ladder, pretrain, vocab_size, is_evaluated)
        for size in sorted(sizes.keys() & ladder_sizes.keys()):
            raise InputError(f"sizes: field `{size}`: found a size of `ladder`, expected another")
        sizes |= ladder_sizes
        entries += ladder_entries
    return expand_models(entries, sizes, pretrain)


def _check_values(place: str, value: Any) -> None:
    """Raise InputError for an absurdly large, non-finite or unprintable value.

    Values within `value` are checked too; `place` is its field.
    """
    expected = ""
    if isinstance(value, list | dict) and len(value) > _MAX_LENGTH:
        expected = f"at most {_MAX_LENGTH:,} values"
    elif isinstance(value, str) and (
        len(value) > _MAX_LENGTH or value != escape_unprintable(value, keep="\n\t")
    ):
        expected = f"a text of at most {_MAX_LENGTH:,} printable letters"
    elif isinstance(value, int) and abs(value) > _MAX_INTEGER:
        expected = f"a number of at most {_MAX_INTEGER:,}"
    elif isinstance(value, float) and not math.isfinite(value):
        expected = "a finite number"
    if expected:
        raise InputError(f"field `{place}`: found {_format_value(value)}, expected {expected}")
    if isinstance(value, dict):
        for key, part in value.items():
            _check_values(place, key)
            _check_values(f"{place}.{_format_value(key)}", part)
    elif isinstance(value, list):
        for index, part in enumerate(value, 1):
            _check_values(f"{place} {index}", part)


def _format_value(value: Any) -> str:
    """Return a short text for a value in an error message."""
    if isinstance(value, list | dict):
        return f"{len(value):,} values"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return truncate_text(text, 60)


def _build_entry(index: int, values: Any, data_dir: Path) -> ManifestEntry:
    place = f"models, entry {index}"
    if not isinstance(values, dict):
        raise InputError(
            f"{place}: found {truncate_text(repr(values))}, expected keys such as size, steps, "
            "clm_share and mask"
        )
    entry = flags.replace_fields(
        ManifestEntry(), {str(key): value for key, value in values.items()}, source=place
    )
    check_pretrain_flags(f"{place}: pretrain", entry.pretrain)
    return replace(
        entry,
        place=place,
        group=" ".join(entry.group.split()),
        pretrain=resolve_flag_paths(entry.pretrain, data_dir),
    )


def _check_hardware(hardware: HardwareEntry, sizes: Iterable[str]) -> None:
    """Raise InputError for an unknown size or a negative throughput of one."""
    place = "hardware: tokens_per_second_of"
    for size, value in hardware.tokens_per_second_of.items():
        if size not in sizes:
            raise InputError(
                f"{place}: unknown name `{size}`{format_suggestion(str(size), sorted(sizes))}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InputError(
                f"{place}: field `{size}`: found {value!r}, expected a number of 0 or more"
            )


def _build_grid(keys: Mapping[str, Any]) -> GridConfig:
    for name in keys:
        if name in _COMMAND_LINE_ONLY:
            raise InputError(
                f"finetune: field `{name}`: found here, expected on the command line of "
                "`megaenc study run`"
            )
    grid = flags.replace_fields(GridConfig(), dict(keys), source="finetune")
    for name, values in (("datasets", grid.datasets), ("learning_rates", grid.learning_rates)):
        if not values:
            raise InputError(f"finetune: field `{name}`: found none, expected at least one")
        for value, times in Counter(values).items():
            if times > 1:
                raise InputError(
                    f"finetune: field `{name}`: found {value} twice, expected each once"
                )
    if grid.seeds > _MAX_SEEDS:
        raise InputError(
            f"finetune: field `seeds`: found {grid.seeds:,}, expected at most {_MAX_SEEDS:,}"
        )
    count = len(grid.datasets) * len(grid.learning_rates) * grid.seeds
    if count > _MAX_RESULTS:
        product = "datasets x learning_rates x seeds"
        raise InputError(
            f"finetune: found {count:,} results per model ({product}), expected at most "
            f"{_MAX_RESULTS:,}"
        )
    with prefix_errors("finetune"):
        grid.protocol.check()
        grid.data.check()
    return grid


def _check_log_names(manifest: Manifest) -> None:
    """Raise InputError if CHECKPOINT@DATASET.log would be too long a file name.

    It is the longest file name of the study.
    """

    def count_bytes(name: str) -> int:
        return len(name.encode())

    model = max(manifest.model_keys(), key=count_bytes, default="")
    datasets = [training.train_on for training in manifest.training_sets]
    dataset = max(datasets, key=count_bytes, default="")
    length = count_bytes(dataset)
    excess = count_bytes(f"{model}@{dataset}.log") - _MAX_FILE_NAME
    if dataset and excess > 0:
        raise InputError(
            f"finetune: field `datasets`: found {truncate_text(dataset, 40)} of {length} bytes, "
            f"expected at most {length - excess} with the model {truncate_text(model, 40)} "
            "(both name a log); shorten either name"
        )


def _build_grid_flags(
    grid: GridConfig, manifest_values: Mapping[str, Any], data_dir: Path
) -> dict[str, Any]:
    """Return the flags of `megaenc finetune grid` that the manifest sets.

    Relative paths of data sets start from `data_dir`.
    """
    values = flags.flatten(grid)
    grid_flags = {name: values[name] for name in manifest_values}
    grid_flags["datasets"] = tuple(
        resolve_dataset_path(dataset, data_dir) for dataset in grid.datasets
    )
    if grid.data.train_on:
        grid_flags["train_on"] = resolve_dataset_path(grid.data.train_on, data_dir)
    if "demo_folder" in grid_flags:
        grid_flags["demo_folder"] = str(data_dir / grid.data.demo_folder)
    return grid_flags | {"learning_rates": grid.learning_rates, "seeds": grid.seeds}
