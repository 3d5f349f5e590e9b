"""The study as one file: which models, trained how, evaluated on what, and what the plan's hours and bytes are counted with.

docs/study-plan.md has every key.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from megaenc import flags
from megaenc.console import escape_unprintable, truncate_text
from megaenc.errors import InputError
from megaenc.finetune.grid.command import GridConfig
from megaenc.study.manifest.expand import ManifestEntry, PlannedModel, expand_models, format_suggestion
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.pretrain_args import check_pretrain_flags, prefix_errors, resolve_flag_paths
from megaenc.study.run.finetune_stage import TrainingSet, plan_training_sets, resolve_dataset_path

_MAX_SEEDS = 10_000
_MAX_INTEGER = 10**15  # of whole numbers: products of some of them stay finite as floats
_MAX_LENGTH = 10_000  # values of a list, and letters of a text
_COMMAND_LINE_ONLY = {"config", "model", "output", *flags.flatten(GridConfig().local), *flags.flatten(GridConfig().slurm)}


@dataclass(frozen=True)
class CorpusEntry:
    """The text that is pretrained on, where the study makes its own corpus and tokenizer."""

    demo: bool = False
    """the demo corpus, made from what is installed here"""
    text: tuple[str, ...] = ()
    """JSONL, Parquet or text files, or folders of them, to tokenise; relative to the manifest, or to --data"""
    vocab_size: int = 0
    """ids of the tokenizer: of the one to train on that text, or of the one that `pretrain` names (for the costs)"""

    @property
    def is_built_by_study(self) -> bool:
        """Whether the study makes tokenizer and corpus."""
        return self.demo or bool(self.text)


@dataclass(frozen=True)
class HardwareEntry:
    """What the plan's hours are counted with."""

    device: str = "device"
    """what a device is, for the eye"""
    devices: int = 1
    """devices of one pretraining run"""
    tokens_per_second: float = 0.0
    """of one device in pretraining, all sizes together"""
    tokens_per_second_of: dict = field(default_factory=dict)
    """by size, where that is known"""
    finetune_seconds: float = 0.0
    """of one fine-tuning, evaluation included, on one device"""
    source: str = ""
    """where these numbers are from"""

    def rate(self, size: str) -> float:
        """Return tokens a second of one device in pretraining; 0 where nobody said."""
        return float(self.tokens_per_second_of.get(size, self.tokens_per_second))


@dataclass(frozen=True)
class ReportedEntry:
    """What somebody else counted, by group of models; 0 or missing where they said nothing."""

    source: str = ""
    """who"""
    steps: dict = field(default_factory=dict)
    """pretraining steps by group"""
    gpu_hours: dict = field(default_factory=dict)
    """by group; `finetune` for the fine-tuning"""
    fine_tunings: int = 0
    """runs"""


@dataclass(frozen=True)
class Manifest:
    """A study, read and checked."""

    path: Path
    title: str
    models: tuple[PlannedModel, ...]
    """Parents before those that continue them."""
    corpus: CorpusEntry
    data_dir: Path
    """The folder that relative paths of data begin in."""
    finetune: GridConfig | None
    """With neither models nor an output; None where nothing is fine-tuned."""
    finetune_flags: Mapping[str, Any]
    """The flags of `megaenc finetune grid` that say so, data sets where they are."""
    plan_training_sets: tuple[TrainingSet, ...]
    """What it trains each model on."""
    hardware: HardwareEntry
    reported: ReportedEntry

    def model_keys(self) -> dict[str, ModelKey]:
        """Return every evaluated checkpoint by its name, in the manifest's order: models first, then those on the way."""
        return {name: setting for name, setting, *_ in self.checkpoints()}

    def checkpoints(self) -> Iterator[tuple[str, ModelKey, PlannedModel, int]]:
        """Yield name, setting, model and step of every evaluated checkpoint: of models first, then those on the way."""
        yield from ((model.name, model.key, model, model.steps) for model in self.models if model.evaluate)
        for model in self.models:
            for step in model.checkpoints:
                yield model.checkpoint_name(step), model.checkpoint_key(step), model, step

    def vocab_size(self, model: PlannedModel) -> int:
        return model.run.shape.vocab_size or self.corpus.vocab_size


_Section = TypeVar("_Part")


@dataclass(frozen=True)
class _ManifestFile:
    """The keys of the file."""

    title: str = ""
    sizes: dict = field(default_factory=dict)
    pretrain: dict = field(default_factory=dict)
    corpus: dict = field(default_factory=dict)
    models: list = field(default_factory=list)
    finetune: dict = field(default_factory=dict)
    hardware: dict = field(default_factory=dict)
    reported: dict = field(default_factory=dict)


def read_manifest(path: str | Path, data: str | Path | None = None) -> Manifest:
    """Read and check a manifest; `data_dir` is the folder that relative paths of data begin in, unless given that of the file.

    Raises InputError in one line: file, field, found, expected, and the nearest key where one is not known.
    """
    path = Path(path)
    values = flags.read_yaml(path, str(path), "a study's manifest, as configs/study/mini.yaml", _UniqueKeys)
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a {type(values).__name__}, expected `key: value` lines, among them `sizes` and `models`")
    values = {str(key): value for key, value in values.items()}
    with prefix_errors(str(path)):
        _check_values(values)
    top = _build_section(_ManifestFile(), values, str(path))
    folder = (path.parent if data is None else Path(data)).absolute()
    with prefix_errors(str(path)):
        return _build_manifest(path, top, folder)


def _build_section(empty: _Section, values: Mapping[str, Any], place: str) -> _Section:
    """Return `empty` with `values`, its texts on one line."""
    part = flags.replace_fields(empty, dict(values), source=place)
    texts = {name: " ".join(text.split()) for name, text in vars(part).items() if isinstance(text, str)}
    return replace(part, **texts)


def _build_manifest(path: Path, top: _ManifestFile, folder: Path) -> Manifest:
    """Check the values of the keys and work out what they stand for."""
    if not top.models:
        raise InputError("field `models`: found none, expected a list of at least one entry")
    if not top.sizes:
        raise InputError("field `sizes`: found none, expected names of sizes, each with flags such as `model: 610m`")
    check_pretrain_flags("pretrain", top.pretrain)
    for size, given in top.sizes.items():
        if not isinstance(given, dict):
            raise InputError(f"sizes: field `{size}`: found {given!r}, expected flags such as {{model: 610m}}")
        check_pretrain_flags(f"sizes: {size}", given)
    entries = [_build_entry(number, given, folder) for number, given in enumerate(top.models, 1)]
    sizes = {str(size): resolve_flag_paths(given, folder) for size, given in top.sizes.items()}
    models = expand_models(entries, sizes, resolve_flag_paths(top.pretrain, folder))
    corpus = _build_section(CorpusEntry(), top.corpus, "corpus")
    if corpus.demo and corpus.text:
        raise InputError("corpus: found `demo` beside `text`, expected one of them")
    for name in ("data_path", "tokenizer"):
        if corpus.is_built_by_study and name in top.pretrain:
            raise InputError(f"pretrain: found `{name}` beside a corpus that the study makes, expected one of them")
    if corpus.vocab_size < 1 and any(model.run.shape.vocab_size is None for model in models):
        raise InputError(f"corpus: field `vocab_size`: found {corpus.vocab_size}, expected the ids of the tokenizer")
    hardware, reported = (
        _build_section(HardwareEntry(), top.hardware, "hardware"),
        _build_section(ReportedEntry(), top.reported, "reported"),
    )
    _check_hardware_and_reported(hardware, reported, sizes, {model.group for model in models})
    grid = _build_grid(top.finetune) if top.finetune else None
    return Manifest(
        path=path,
        title=top.title,
        models=models,
        corpus=corpus,
        data_dir=folder,
        finetune=grid,
        finetune_flags=_build_grid_flags(grid, top.finetune, folder) if grid else {},
        training_sets=plan_training_sets(grid, folder) if grid else (),
        hardware=hardware,
        reported=reported,
    )


class _UniqueKeys(flags.YamlLoader):
    """A key that is written twice is an error, not the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value):
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is there twice", node.start_mark)
            keys.update([key] if isinstance(key, Hashable) else [])
        return super().construct_mapping(node, deep)


def _check_values(values: Mapping[str, Any]) -> None:
    """Raise InputError, naming the field, for a number, text or list that no study can mean; each shared value is seen once."""
    left: list[tuple[str, Any]] = list(values.items())
    seen: set[int] = set()
    while left:
        place, value = left.pop()
        if isinstance(value, dict | list):
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, dict):
            left += [(f"{place}.{_format_value(key)}", part) for key, part in value.items()] + [(place, key) for key in value]
        elif isinstance(value, list):
            left += [(f"{place} {number}", part) for number, part in enumerate(value, 1)]
        for wrong, expected in (
            (isinstance(value, list | dict) and len(value) > _MAX_LENGTH, f"at most {_MAX_LENGTH:,} values"),
            (
                isinstance(value, str) and (len(value) > _MAX_LENGTH or value != escape_unprintable(value, keep="\n\t")),
                f"a text of at most {_MAX_LENGTH:,} printable letters",
            ),
            (isinstance(value, int) and abs(value) > _MAX_INTEGER, f"a number of at most {_MAX_INTEGER:,}"),
            (isinstance(value, float) and not math.isfinite(value), "a finite number"),
        ):
            if wrong:
                raise InputError(f"field `{place}`: found {_format_value(value)}, expected {expected}")


def _format_value(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{len(value):,} values"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return truncate_text(text, 60)


def _build_entry(number: int, given: Any, folder: Path) -> ManifestEntry:
    place = f"models, entry {number}"
    if not isinstance(given, dict):
        raise InputError(f"{place}: found {given!r}, expected keys such as size, steps, clm_share and mask")
    entry = flags.replace_fields(ManifestEntry(), {str(key): value for key, value in given.items()}, source=place)
    check_pretrain_flags(f"{place}: pretrain", entry.pretrain)
    return replace(entry, place=place, group=" ".join(entry.group.split()), pretrain=resolve_flag_paths(entry.pretrain, folder))


def _check_hardware_and_reported(
    hardware: HardwareEntry, reported: ReportedEntry, sizes: Iterable[str], groups: set[str]
) -> None:
    for name, least in (("devices", 1), ("tokens_per_second", 0), ("finetune_seconds", 0)):
        if (value := getattr(hardware, name)) < least:
            raise InputError(f"hardware: field `{name}`: found {value}, expected {least} or more")
    for place, values, known in (
        ("hardware: tokens_per_second_of", hardware.tokens_per_second_of, sizes),
        ("reported: steps", reported.steps, groups),
        ("reported: gpu_hours", reported.gpu_hours, groups | {"finetune"}),
    ):
        for key, value in values.items():
            if key not in known:
                raise InputError(f"{place}: unknown name `{key}`{format_suggestion(str(key), sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise InputError(f"{place}: field `{key}`: found {value!r}, expected a number of 0 or more")


def _build_grid(given: Mapping[str, Any]) -> GridConfig:
    for name in given:
        if name in _COMMAND_LINE_ONLY:
            raise InputError(f"finetune: field `{name}`: found here, expected on the command line of `megaenc study run`")
    settings = flags.replace_fields(GridConfig(), dict(given), source="finetune")
    if not settings.datasets:
        raise InputError("finetune: field `datasets`: found none, expected at least one")
    for name, values in (("datasets", settings.datasets), ("learning_rates", settings.learning_rates)):
        for value in values:
            if values.count(value) > 1:
                raise InputError(f"finetune: field `{name}`: found {value} twice, expected each once")
    if settings.seeds < 1 or not settings.learning_rates or min(settings.learning_rates) <= 0:
        raise InputError("finetune: expected at least one seed and learning rates above 0")
    if settings.seeds > _MAX_SEEDS:
        raise InputError(f"finetune: field `seeds`: found {settings.seeds:,}, expected at most {_MAX_SEEDS:,}")
    with prefix_errors("finetune"):
        settings.protocol.check()
        settings.data.check()
    return settings


def _build_grid_flags(grid: GridConfig, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    values = flags.flatten(grid)
    found = {name: values[name] for name in given}
    found |= {"datasets": tuple(resolve_dataset_path(dataset, folder) for dataset in grid.datasets)}
    found |= {"train_on": resolve_dataset_path(grid.data.train_on, folder)} if grid.data.train_on else {}
    found |= {"demo_folder": str(folder / grid.data.demo_folder)} if "demo_folder" in found else {}
    return found | {"learning_rates": grid.learning_rates, "seeds": grid.seeds}
