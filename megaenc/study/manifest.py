"""The study as one file: which models, trained how, evaluated on what, and what the plan's hours and bytes are counted with.

    title: what the study asks
    sizes: {610M: {model: 610m}}            a name and the flags of `megaenc pretrain` that make this size
    pretrain: {lr: 5e-4, ...}               flags of every pretraining run
    corpus: {demo: true}                    or text files to make one of; or data_path and tokenizer under `pretrain`
    models:                                 every combination of an entry's lists is a model
      - {size: [210M, 610M], steps: 42000, clm_share: [0, 1], mask: [0.2, 0.4], checkpoints: [1000, 20000]}
      - {after: [610m-clm-42k], steps: [2000, 22000], mask: 0.4}
    finetune: {datasets: [sst2], ...}       flags of `megaenc finetune grid`
    hardware: {devices: 192, ...}           and `reported`: what somebody else counted, to be laid beside the plan's numbers

docs/study-plan.md has every key.
"""

import difflib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megaenc import flags
from megaenc.errors import InputError
from megaenc.finetune.grid import GridSettings
from megaenc.study.entries import Model, models_of
from megaenc.study.entry import Entry
from megaenc.study.manifest_values import check_values, one_line
from megaenc.study.pretrain_flags import check_pretrain_flags, located_flags
from megaenc.study.setting import Setting
from megaenc.study.tasks import Training, located, trainings


@dataclass(frozen=True)
class Corpus:
    """The text that is pretrained on, where the study makes its own corpus and tokenizer."""

    demo: bool = False
    """the demo corpus, made from what is installed here"""
    text: tuple[str, ...] = ()
    """JSONL, Parquet or text files, or folders of them, to tokenise; relative to the manifest, or to --data"""
    vocab_size: int = 0
    """ids of the tokenizer: of the one to train on that text, or of the one that `pretrain` names (for the costs)"""

    @property
    def made(self) -> bool:
        """Whether the study makes tokenizer and corpus."""
        return self.demo or bool(self.text)


@dataclass(frozen=True)
class Hardware:
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
        """Tokens a second of one device in pretraining; 0 where nobody said."""
        return float(self.tokens_per_second_of.get(size, self.tokens_per_second))


@dataclass(frozen=True)
class Reported:
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
    models: tuple[Model, ...]
    """Parents before those that continue them."""
    corpus: Corpus
    data: Path
    """The folder that relative paths of data begin in."""
    finetune: GridSettings | None
    """With neither models nor an output; None where nothing is fine-tuned."""
    finetune_flags: Mapping[str, Any]
    """The flags of `megaenc finetune grid` that say so, data sets where they are."""
    trainings: tuple[Training, ...]
    """What it trains each model on."""
    hardware: Hardware
    reported: Reported

    def settings(self) -> dict[str, Setting]:
        """Every evaluated checkpoint by its name, in the manifest's order: models first, then those on the way."""
        models = [model for model in self.models if model.evaluate]
        found = {model.name: model.setting for model in models}
        for model in self.models:
            found |= {model.checkpoint_name(step): model.checkpoint_setting(step) for step in model.checkpoints}
        return found

    def vocab_size(self, model: Model) -> int:
        """Ids of its tokenizer."""
        return model.run.shape.vocab_size or self.corpus.vocab_size


@dataclass(frozen=True)
class _Top:
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
    """Read and check a manifest; `data` is the folder that relative paths of data begin in, unless given that of the file.

    Raises InputError in one line: file, field, found, expected, and the nearest key where one is not known.
    """
    path = Path(path)
    values = _load(path)
    check_values(path, values)
    top = flags.replace_fields(_Top(), values, source=str(path))
    if not top.models:
        raise InputError(f"{path}: field `models`: found none, expected a list of at least one entry")
    if not top.sizes:
        raise InputError(f"{path}: field `sizes`: found none, expected names of sizes, each with flags such as `model: 610m`")
    check_pretrain_flags(f"{path}: pretrain", top.pretrain)
    for size, given in top.sizes.items():
        if not isinstance(given, dict):
            raise InputError(f"{path}: sizes: field `{size}`: found {given!r}, expected flags such as {{model: 610m}}")
        check_pretrain_flags(f"{path}: sizes: {size}", given)
    folder = (path.parent if data is None else Path(data)).absolute()
    entries = [_entry(path, number, given, folder) for number, given in enumerate(top.models, 1)]
    sizes = {size: located_flags(given, folder) for size, given in top.sizes.items()}
    models = models_of(str(path), entries, sizes, located_flags(top.pretrain, folder))
    corpus = flags.replace_fields(Corpus(), top.corpus, source=f"{path}: corpus")
    _check_corpus(path, corpus, top.pretrain, models)
    hardware = flags.replace_fields(Hardware(), top.hardware, source=f"{path}: hardware")
    hardware = replace(hardware, device=one_line(hardware.device), source=one_line(hardware.source))
    reported = flags.replace_fields(Reported(), top.reported, source=f"{path}: reported")
    reported = replace(reported, source=one_line(reported.source))
    _check_numbers(path, hardware, reported, top.sizes, {model.group for model in models})
    grid = _finetune(path, top.finetune)
    found = _trainings(path, grid, folder)
    given = _grid_flags(grid, top.finetune, folder)
    return Manifest(path, one_line(top.title), models, corpus, folder, grid, given, found, hardware, reported)


def _load(path: Path) -> dict[str, Any]:
    values = flags.read_yaml(path, str(path), "a study's manifest, as configs/study/mini.yaml", _UniqueKeys)
    if not isinstance(values, dict):
        raise InputError(f"{path}: found a {type(values).__name__}, expected `key: value` lines, among them `sizes` and `models`")
    return {str(key): value for key, value in values.items()}


class _UniqueKeys(flags.YamlLoader):
    """A key that is written twice is an error, not the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = set()
        for key in (self.construct_object(key, deep=True) for key, _ in node.value):
            if isinstance(key, Hashable) and key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"key `{key}` is there twice", node.start_mark)
            keys.update([key] if isinstance(key, Hashable) else [])
        return super().construct_mapping(node, deep)


def _entry(path: Path, number: int, given: Any, folder: Path) -> Entry:
    place = f"{path}: models, entry {number}"
    if not isinstance(given, dict):
        raise InputError(f"{place}: found {given!r}, expected keys such as size, steps, clm_share and mask")
    values = {str(key): value for key, value in given.items()}
    entry = flags.replace_fields(Entry(), values, source=place)
    check_pretrain_flags(f"{place}: pretrain", entry.pretrain)
    return replace(entry, place=place, group=one_line(entry.group), pretrain=located_flags(entry.pretrain, folder))


def _check_corpus(path: Path, corpus: Corpus, pretrain: Mapping[str, Any], models: tuple[Model, ...]) -> None:
    if corpus.demo and corpus.text:
        raise InputError(f"{path}: corpus: found `demo` beside `text`, expected one of them")
    given = [name for name in ("data_path", "tokenizer") if name in pretrain]
    if corpus.made and given:
        raise InputError(f"{path}: pretrain: found `{given[0]}` beside a corpus that the study makes, expected one of them")
    if corpus.vocab_size < 1 and any(model.run.shape.vocab_size is None for model in models):
        raise InputError(f"{path}: corpus: field `vocab_size`: found {corpus.vocab_size}, expected the ids of the tokenizer")


def _check_numbers(path: Path, hardware: Hardware, reported: Reported, sizes: Mapping[str, Any], groups: set[str]) -> None:
    if hardware.devices < 1:
        raise InputError(f"{path}: hardware: field `devices`: found {hardware.devices}, expected 1 or more")
    for name in ("tokens_per_second", "finetune_seconds"):
        if getattr(hardware, name) < 0:
            raise InputError(f"{path}: hardware: field `{name}`: found {getattr(hardware, name)}, expected 0 or more")
    named = (
        ("hardware: tokens_per_second_of", hardware.tokens_per_second_of, set(map(str, sizes))),
        ("reported: steps", reported.steps, groups),
        ("reported: gpu_hours", reported.gpu_hours, groups | {"finetune"}),
    )
    for place, values, known in named:
        for key, value in values.items():
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean `{near[0]}`?" if near else f"expected one of {', '.join(sorted(known))}"
                raise InputError(f"{path}: {place}: unknown name `{key}`; {hint}")
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise InputError(f"{path}: {place}: field `{key}`: found {value!r}, expected a number of 0 or more")


_MOST_SEEDS = 10_000
_NOT_HERE = {"config", "model", "output"} | {
    name for group in (GridSettings().local, GridSettings().slurm) for name in (field.name for field in fields(group))
}


def _finetune(path: Path, given: Mapping[str, Any]) -> GridSettings | None:
    if not given:
        return None
    for name in given:
        if name in _NOT_HERE:
            raise InputError(f"{path}: finetune: field `{name}`: found here, expected on the command line of `megaenc study run`")
    settings = flags.replace_fields(GridSettings(), dict(given), source=f"{path}: finetune")
    if not settings.datasets:
        raise InputError(f"{path}: finetune: field `datasets`: found none, expected at least one")
    for name, values in (("datasets", settings.datasets), ("learning_rates", settings.learning_rates)):
        for value in values:
            if values.count(value) > 1:
                raise InputError(f"{path}: finetune: field `{name}`: found {value} twice, expected each once")
    if settings.seeds < 1 or not settings.learning_rates or min(settings.learning_rates) <= 0:
        raise InputError(f"{path}: finetune: expected at least one seed and learning rates above 0")
    if settings.seeds > _MOST_SEEDS:
        raise InputError(f"{path}: finetune: field `seeds`: found {settings.seeds:,}, expected at most {_MOST_SEEDS:,}")
    try:
        settings.protocol.check()
        settings.data.check()
    except InputError as error:
        raise InputError(f"{path}: finetune: {error}") from None
    return settings


def _grid_flags(grid: GridSettings | None, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if grid is None:
        return {}
    values = flags.flatten(grid)
    found = {name.replace("-", "_"): values[name.replace("-", "_")] for name in given}
    found |= {"datasets": tuple(located(dataset, folder) for dataset in grid.datasets)}
    found |= {"train_on": located(grid.data.train_on, folder)} if grid.data.train_on else {}
    found |= {"demo_folder": str(folder / grid.data.demo_folder)} if "demo_folder" in found else {}
    return found | {"learning_rates": grid.learning_rates, "seeds": grid.seeds}


def _trainings(path: Path, grid: GridSettings | None, folder: Path) -> tuple[Training, ...]:
    if grid is None:
        return ()
    try:
        return trainings(grid, folder)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
