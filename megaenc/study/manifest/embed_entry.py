"""Manifest section `embed`: zero-shot retrieval and contrastive training."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from megaenc import flags
from megaenc.console import truncate_text
from megaenc.embed.config import RULES, ContrastiveConfig
from megaenc.errors import InputError
from megaenc.finetune.datasets.registry import parse_dataset_name
from megaenc.flags import Bounds
from megaenc.study.manifest.pretrain_args import prefix_errors
from megaenc.study.manifest.training_sets import dataset_result_name, resolve_dataset_path

DEMO_SET = "demo_ir"
"""Retrieval set that the study builds."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,179}")


@dataclass(frozen=True)
class EmbedEntry:
    """Manifest section `embed`: retrieval sets, training pairs, seeds and flags.

    `datasets` are BEIR directories, as PATH or NAME=PATH, or demo_ir, for evaluation. `train` is
    the path of training pairs (a file, SQuAD JSON or a BEIR directory), or demo_ir; "" is no
    training. `seeds` is the number of trainings with the flags `training` (ContrastiveConfig).
    `bm25` also ranks by BM25.
    """

    datasets: tuple[str, ...] = ()
    """BEIR directories as PATH or NAME=PATH, or demo_ir, evaluated without training on them"""
    train: str = ""
    """pairs for contrastive training (a file, SQuAD JSON or a BEIR directory); none: only the
    pretrained models are evaluated
    """
    seeds: Annotated[int, Bounds(low=1, high=1_000)] = 3
    """seeds of contrastive training"""
    bm25: bool = True
    """rank by BM25 too"""
    training: ContrastiveConfig = field(default_factory=ContrastiveConfig)

    @property
    def training_seeds(self) -> range:
        """Return the seeds from 0 of contrastive training; empty without pairs."""
        return range(self.seeds if self.train else 0)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that `datasets` have in results, in their order.

        They are those of `dataset_result_name`.
        """
        return tuple(map(dataset_result_name, self.datasets))


def build_embed_entry(
    values: Mapping[str, Any], data_dir: Path
) -> tuple[EmbedEntry, dict[str, Any]]:
    """Return (section `embed` of a manifest, flags of contrastive training).

    The section has `data_dir` before its relative paths, but not before demo_ir; files need not
    exist yet. The flags are those that the manifest sets, by field name.

    Args:
        values: Values of the section by key, `datasets` among them.
        data_dir: Directory that relative paths start from.

    Raises:
        InputError: A value is unknown, repeated, missing or impossible.
    """
    if "seed" in values:
        raise InputError("embed: field `seed`: found here, expected `seeds`, the number of seeds")
    entry = flags.replace_fields(EmbedEntry(), dict(values), source="embed")
    if not entry.datasets:
        raise InputError(
            "embed: field `datasets`: found none, expected at least one BEIR directory, or demo_ir"
        )
    for dataset in entry.datasets:
        if parse_dataset_name(dataset)[1] is None and dataset != DEMO_SET:
            text = truncate_text(dataset, 60)
            raise InputError(
                f"embed: field `datasets`: found {text}, expected BEIR directories as PATH or "
                "NAME=PATH, or demo_ir"
            )
    for name, times in Counter(entry.names).items():
        if not _NAME.fullmatch(name):
            message = f"embed: field `datasets`: found the name {name[:60]!r}"
            raise InputError(
                f"{message}, expected letters, digits and . _ -; name the directory with NAME=PATH"
            )
        if times > 1:
            raise InputError(
                f"embed: field `datasets`: found {name} twice, expected each once; name a "
                "directory with NAME=PATH"
            )
    with prefix_errors("embed"):
        entry.training.check()
    training = flags.flatten(entry.training)
    set_flags = {name: training[name] for name in values if name in training}
    training_keys = [
        name for name in values if name == "seeds" or (name in set_flags and name not in RULES)
    ]
    if training_keys and not entry.train:
        raise InputError(
            f"embed: field `{training_keys[0]}`: found without `train`, the pairs of contrastive "
            "training; expected both"
        )
    datasets = tuple(resolve_dataset_path(dataset, data_dir) for dataset in entry.datasets)
    train = entry.train if entry.train in ("", DEMO_SET) else str(data_dir / entry.train)
    return replace(entry, datasets=datasets, train=train), set_flags
