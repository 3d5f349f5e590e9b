"""Registry of data sets: lookup by name or by path.

Names are the study's twelve and the demo sets.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaenc.errors import InputError, suggest_closest
from megaenc.finetune.datasets import demo, formats, hub, hub_repository, local
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import Dataset, TaskFamily

DATASETS = (*(name for name in hub.HUB_DATASETS if name != hub.TRAINING_PAIRS), *demo.DEMO_DATASETS)
"""Names of the data sets that need no path."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def find_dataset(name_or_path: str, **options: Any) -> Dataset:
    """Return the Dataset of a known name, a local path or a repository of the Hub.

    A missing demo set is written, which takes minutes. Local data and repositories are read to find
    labels; other data is downloaded by `load_split`. A wrong name, file or `pair_template` is an
    InputError, as are options that do not fit the data.

    Args:
        name_or_path: A name of DATASETS (`sst2`, or `sst2@REVISION` of the Hub); a path to local
            data, named after its directory or file; a repository ORG/NAME, ORG/NAME:CONFIG or
            hf:NAME, each with @REVISION or not. `NAME=` before a path or repository gives a name.
            Under the name of a study's set of pairs, its template replaces `pair_template`.
        options: Fields of DatasetConfig.
    """
    flags = DatasetConfig(**options)
    flags.check()
    if flags.pair_template == local.STUDY_PAIRS:
        flags = replace(flags, pair_template=local.PAIR_TEMPLATE)
    name, path = parse_dataset_name(name_or_path)
    location = _split_name(name_or_path)[1]
    reference = None if path is None else hub_repository.parse_hub_reference(location)
    if flags.validation_fraction and (path is None or reference):
        content = "a named data set" if path is None else "a repository of the Hub"
        raise InputError(local.format_split_error(flags.validation_fraction, location, content))
    if path is not None:
        known = hub.HUB_DATASETS.get(name)
        is_pair = known is not None and "text_pair" in known.fields
        template = known.template if is_pair else flags.pair_template
        if reference:
            _check_name(name_or_path, name)
            start = f"data set {name_or_path}: " + f"found no file or directory {path}; " * (
                not location.startswith("hf:")
            )
            dataset = hub_repository.load_hub_repository(
                name, reference, replace(flags, pair_template=template), start
            )
        else:
            _check_dataset_path(name_or_path, name, path)
            dataset = local.load_local(name, path, flags, template)
    elif name in demo.DEMO_DATASETS:
        directory = demo.ensure_demo_datasets(flags.demo_folder, (name,))
        dataset = local.load_local(
            name, directory / name, replace(flags, task=""), local.PAIR_TEMPLATE
        )
    else:
        dataset = hub.load_hub(name, name_or_path.partition("@")[2])
    if not flags.train_on or dataset.family is not TaskFamily.IR:
        return dataset
    training = find_dataset(flags.train_on, **(options | {"train_on": ""}))
    if training.family is not TaskFamily.IR:
        raise InputError(
            f"--train-on {flags.train_on}: {training.name} is {training.family}, "
            "expected retrieval data (IR)"
        )
    return replace(
        dataset,
        train_on=training.train_on,
        train_fingerprint=training.train_fingerprint,
        read_split=lambda split: (training if split == "train" else dataset).read_split(split),
    )


def parse_dataset_name(name_or_path: str) -> tuple[str, Path | None]:
    """Return (name in results, path) of a data set, neither of them checked.

    `NAME` and `NAME@REVISION` of DATASETS give (NAME, None). The path of `PATH` or `NAME=PATH` need
    not exist; a bare path is named after its directory, or its file without suffixes. A repository
    of the Hub gives its text as path, and `HubReference.name`.
    """
    base = name_or_path.partition("@")[0]
    if name_or_path in DATASETS or base in hub.HUB_DATASETS:
        return base, None
    name, location = _split_name(name_or_path)
    path = Path(location)  # os.path.isfile is False for a name that is too long
    if not name and (reference := hub_repository.parse_hub_reference(location)):
        name = reference.name
    return name or (
        formats.strip_format_suffix(path) if os.path.isfile(path) else None
    ) or path.resolve().name, path


def _split_name(name_or_path: str) -> tuple[str, str]:
    """Return (name or "", location) of `LOCATION` or `NAME=LOCATION`."""
    name, equals, location = name_or_path.partition("=")
    return (name, location) if equals and "/" not in name else ("", name_or_path)


def _check_dataset_path(name_or_path: str, name: str, path: Path) -> None:
    """Check that the path exists, and that the name is valid in results.

    Raises:
        InputError: The path is missing, or the name is invalid.
    """
    if not os.path.exists(path):
        if name_or_path.partition("=")[1] or "/" in name_or_path:
            raise InputError(
                f"data set {name_or_path}: found no file or directory {path}, "
                "expected one with labelled data"
            )
        hint = suggest_closest(name_or_path.lower(), [*DATASETS, hub.TRAINING_PAIRS])
        raise InputError(
            f"unknown data set `{name_or_path}`, expected one of {', '.join(DATASETS)}, "
            f"ORG/NAME of the Hub, a path or NAME=PATH{hint}"
        )
    _check_name(name_or_path, name)


def _check_name(name_or_path: str, name: str) -> None:
    """Check that `name` is valid as a directory's name in results.

    Raises:
        InputError: The name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"data set {name_or_path}: name {name!r}: "
            "expected letters, digits and . _ - (NAME=PATH gives it another)"
        )
