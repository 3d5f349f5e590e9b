"""Data sets by name: the study's twelve, the demo sets, and whatever a path leads to."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaenc.errors import InputError, closest_match
from megaenc.finetune.datasets import demo, formats, hub, local
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import Dataset, TaskFamily

DATASETS = (*(name for name in hub.HUB_DATASETS if name != hub.TRAINING_PAIRS), *demo.DEMO_DATASETS)
"""What can be fine-tuned for by name alone."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def find_dataset(name_or_path: str, **options: Any) -> Dataset:
    """Return the data set that a command line calls `name_or_path`; `options` are fields of DataFlags.

    It is a name of DATASETS (`sst2`, or `sst2@REVISION` for a commit, branch or tag of the Hub), a path to local data, whose
    folder's name is the set's, or `NAME=PATH`. A name of the study before a path has the study's text for pairs. Raises
    InputError for anything else, with the nearest name.
    """
    flags = DatasetConfig(**options)
    flags.check()
    name, path = parse_dataset_name(name_or_path)
    if path is not None:
        _check_dataset_path(name_or_path, name, path)
        known = hub.HUB_DATASETS.get(name)
        is_pair = known is not None and "text_pair" in known.fields
        found = local.load_local(name, path, flags, known.template if is_pair else flags.pair_template)
    elif name in demo.DEMO_DATASETS:
        made = demo.ensure_demo_datasets(flags.demo_folder, (name,))
        found = local.load_local(name, made / name, replace(flags, task=""), local.PAIR_TEMPLATE)
    else:
        found = hub.load_hub(name, name_or_path.partition("@")[2])
    if not flags.train_on or found.family is not TaskFamily.IR:
        return found
    training = find_dataset(flags.train_on, **(options | {"train_on": ""}))
    if training.family is not TaskFamily.IR:
        raise InputError(f"--train-on {flags.train_on}: {training.name} is {training.family}, expected retrieval data (IR)")
    return replace(
        found,
        train_on=training.train_on,
        train_fingerprint=training.train_fingerprint,
        read_split=lambda split: (training if split == "train" else found).read_split(split),
    )


def parse_dataset_name(given: str) -> tuple[str, Path | None]:
    """Return the name of the data set `given` in results, and where it is unless it is a known name. Nothing is read.

    What is not there is named as a folder would be.
    """
    base = given.partition("@")[0]
    if given in DATASETS or base in hub.HUB_DATASETS:
        return base, None
    name, equals, place = given.partition("=")
    if not equals or "/" in name:
        name, place = "", given
    path = Path(place)  # os.path.isfile is False for a name that is too long
    return name or (formats.strip_format_suffix(path) if os.path.isfile(path) else None) or path.resolve().name, path


def _check_dataset_path(given: str, name: str, path: Path) -> None:
    """Raise InputError for a path that leads to nothing, and for a name that no folder of results can have."""
    if not os.path.exists(path):
        if given.partition("=")[1] or "/" in given:
            raise InputError(f"data set {given}: found no file or folder {path}, expected one with labelled data")
        near = closest_match(given.lower(), [*DATASETS, hub.TRAINING_PAIRS])
        raise InputError(
            f"unknown data set `{given}`, expected one of {', '.join(DATASETS)}, a path or NAME=PATH"
            + (f"; did you mean `{near}`?" if near else "")
        )
    if not _NAME.fullmatch(name):
        raise InputError(f"data set {given}: name {name!r}: expected letters, digits and . _ - (NAME=PATH gives it another)")
