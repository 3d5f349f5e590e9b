"""Zero-shot retrieval as a stage of a study.

A model is evaluated as pretrained, and after contrastive training with each seed.
"""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.embed.config import RULES, TRAINING_DETAILS, EmbeddingFlags
from megaenc.embed.evaluation_file import read_evaluation
from megaenc.errors import InputError
from megaenc.finetune.datasets.beir import compute_test_fingerprint
from megaenc.finetune.datasets.registry import parse_dataset_name
from megaenc.finetune.model.fingerprint import compute_model_stamp
from megaenc.json_files import read_json_or_empty
from megaenc.study.manifest.embed_entry import DEMO_SET, EmbedEntry
from megaenc.study.run.finetune_stage import fingerprint_model
from megaenc.study.run.stage import (
    StageRunner,
    StaleArtifactError,
    compute_size,
    format_flags,
    megaenc_command,
)
from megaenc.training.run_dir import describe_difference

PRETRAINED = "pretrained"
"""Name of the model without contrastive training in an evaluation, and of its file."""
_PAIRS = "pairs.json"  # record of the pairs that were there before the trainings


@dataclass(frozen=True)
class EmbedData:
    """Paths of a study's retrieval sets and training pairs; fingerprints of the sets.

    `entry` is the manifest's section `embed` with paths resolved. demo_ir, the set that the study
    builds, is in the directory `demo_folder`. Data need not exist: `fingerprints`, those of the
    test data of each set, leaves out what cannot be read.
    """

    entry: EmbedEntry
    demo_folder: str

    @cached_property
    def directories(self) -> dict[str, Path]:
        """Return the directory in BEIR's layout of each retrieval set by name.

        It need not exist.
        """
        paths = {
            name: parse_dataset_name(text)[1]
            for name, text in zip(self.entry.names, self.entry.datasets, strict=True)
        }
        return {name: path or Path(self.demo_folder, name) for name, path in paths.items()}

    @property
    def pairs(self) -> Path:
        """Return the path of the pairs of contrastive training.

        It is meaningless if the manifest has none (`train` is "").
        """
        return Path(self.demo_folder if self.entry.train == DEMO_SET else "", self.entry.train)

    @property
    def demo(self) -> Path | None:
        """Return the directory of demo_ir, which the study builds.

        It is None if the manifest names demo_ir neither as retrieval set nor as pairs.
        """
        return (
            Path(self.demo_folder, DEMO_SET)
            if DEMO_SET in (*self.entry.datasets, self.entry.train)
            else None
        )

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of the test data of each retrieval set, by name.

        The sets are read once. Those that cannot be read, such as ones that do not exist yet, are
        left out.
        """
        fingerprints = {}
        for name, directory in self.directories.items():
            with contextlib.suppress(InputError):
                fingerprints[name] = compute_test_fingerprint(directory)
        return fingerprints


@dataclass(frozen=True, kw_only=True)
class EmbedStage(StageRunner):
    """Stage of `megaenc embed`: zero-shot retrieval of an exported model.

    The model is evaluated, then trained on pairs and evaluated again for each seed. `build_graph`
    builds the stage from `data` (EmbedData), which all stages share, from the manifest's `flags` of
    contrastive training, and from the `seconds` planned for such a training with its evaluation, 0
    if unknown.

    STUDY/embed/NAME/pretrained.json    scores of the exported model
    STUDY/embed/NAME/seed-S             model after contrastive training with seed S
    STUDY/embed/NAME/seed-S.json        its scores
    """

    data: EmbedData = field(repr=False)
    flags: Mapping[str, Any] = field(repr=False)
    """flags of contrastive training in the manifest"""
    seconds: float
    """planned seconds of a contrastive training with its evaluation; 0 if unknown"""
    kind = "embed"
    subfolder = "embed"
    unit = "evaluations"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return (`export/NAME`,), the id of the stage that exports the evaluated model."""
        return (f"export/{self.name}",)

    @property
    def run_count(self) -> int:
        """Return the number of planned contrastive trainings, one for each training seed."""
        return len(self.data.entry.training_seeds)

    @property
    def work(self) -> float:
        """Return the number of evaluations, to which run times are proportional."""
        return 1.0 + self.run_count

    @property
    def planned_seconds(self) -> float | None:
        """Return the planned seconds of all contrastive trainings; None if unknown.

        Their evaluations are included. Without trainings, it is the 30 s of `StageRunner`.
        """
        if not self.run_count:
            return StageRunner.planned_seconds
        return self.run_count * self.seconds or None

    @property
    def models(self) -> dict[str, Path]:
        """Return the directory of each evaluated model by name: pretrained, seed-0, ...

        The names are those in the evaluations.
        """
        trained = {
            f"seed-{seed}": self.directory / f"seed-{seed}"
            for seed in self.data.entry.training_seeds
        }
        return {PRETRAINED: self.study / "hf" / self.name, **trained}

    def prepare(self) -> None:
        """Write the training pairs' name and size in bytes to pairs.json, for `check`.

        The size is left out before the pairs exist. Nothing is written once a training has
        finished, or if the stage trains no model.
        """
        trained = [directory for name, directory in self.models.items() if name != PRETRAINED]
        if trained and not any((directory / TRAINING_DETAILS).is_file() for directory in trained):
            self.directory.mkdir(parents=True, exist_ok=True)
            atomic_write(
                self.directory / _PAIRS, json.dumps(self._describe_pairs(), indent=1) + "\n"
            )

    def _describe_pairs(self) -> dict[str, Any]:
        """Return the name of the pairs, and their size in bytes.

        The size is left out if there are no pairs, as before the study builds them.
        """
        pairs = {"train": self.data.pairs.name, "bytes of train": compute_size(self.data.pairs)}
        return {name: value for name, value in pairs.items() if value is not None}

    def remaining_commands(self) -> list[list[str]]:
        """Return the command lines whose output is missing or incomplete, in order.

        They build the demo set, train, and evaluate. An evaluation that lacks scores, such as those
        of a retrieval set that is new in the manifest, is repeated.
        """
        commands = []
        demo = self.data.demo
        if demo is not None and not os.path.isdir(demo) and not self.is_done():
            commands.append(megaenc_command("finetune", "demo", "--output", str(demo.parent)))
        for seed, (name, directory) in enumerate(self.models.items(), -1):
            if self._is_evaluated(name):
                continue
            if name != PRETRAINED and not (directory / TRAINING_DETAILS).is_file():
                paths = {
                    "model": self.study / "hf" / self.name,
                    "data": self.data.pairs,
                    "output": directory,
                    "seed": seed,
                }
                commands.append(
                    megaenc_command("embed", "train", *format_flags({**paths, **self.flags}))
                )
            evaluation = {
                "model": f"{name}={directory}",
                "data": [f"{dataset}={path}" for dataset, path in self.data.directories.items()],
                "output": self._file(name),
                # The file may lack scores, such as those of a set added to the manifest.
                "overwrite": True,
                **self._rules(name),
                "bm25": None if self._needs_bm25(name) else False,
            }
            commands.append(megaenc_command("embed", "eval", *format_flags(evaluation)))
        return commands

    def _rules(self, name: str) -> dict[str, Any]:
        """Return the flags of an evaluation.

        A trained model's directory has its own attention, length and prefixes.
        """
        given = RULES if name == PRETRAINED else ("precision",)
        return {rule: self.flags[rule] for rule in given if rule in self.flags}

    def _needs_bm25(self, name: str) -> bool:
        """Return whether an evaluation ranks by BM25: only the pretrained model's does."""
        return self.data.entry.bm25 and name == PRETRAINED

    def _file(self, name: str) -> Path:
        """Return the path of a model's evaluation."""
        return self.directory / f"{name}.json"

    def _is_evaluated(self, name: str) -> bool:
        """Return whether a model's evaluation has the scores of every data set.

        Those of BM25 must exist too if the evaluation ranks by it.
        """
        evaluation = read_evaluation(self._file(name))
        if evaluation is None:
            return False
        needed = [name, "BM25"] if self._needs_bm25(name) else [name]
        return all(
            evaluation.datasets_of(model) >= self.data.directories.keys() for model in needed
        )

    def progress(self) -> tuple[float, float]:
        """Return (finished evaluations, all evaluations).

        There is one of the pretrained model and one for each training seed.
        """
        return sum(map(self._is_evaluated, self.models)), len(self.models)

    def check(self) -> None:
        """Raise StaleArtifactError if an evaluation or a training is out of date.

        It is if it was made from another model, other data or other settings. Missing ones pass,
        and so does what was not recorded.
        """
        evaluations = {
            name: read_evaluation(self._file(name))
            for name in self.models
            if self._is_evaluated(name)
        }
        fingerprints = {}
        for name, directory in self.models.items():
            if name in evaluations:
                fingerprints[name] = _read_fingerprints(
                    directory, evaluations[name].fingerprints.get(name, {})
                )
            elif name == PRETRAINED and self.directory.is_dir():
                fingerprints[name] = _read_fingerprints(directory, {})
        if self.run_count:
            self._compare(
                _PAIRS, read_json_or_empty(self.directory / _PAIRS), self._describe_pairs()
            )
        for seed in self.data.entry.training_seeds:
            self._check_training(seed, fingerprints.get(PRETRAINED, {}))
        for name, evaluation in evaluations.items():
            rules = {rule: getattr(EmbeddingFlags(), rule) for rule in RULES} | self._rules(name)
            self._compare(name, evaluation.settings, rules)
            self._compare(name, evaluation.fingerprints.get(name, {}), fingerprints[name])
            self._compare(name, evaluation.data, self.data.fingerprints)

    def _check_training(self, seed: int, origin: Mapping[str, str]) -> None:
        """Raise StaleArtifactError if the training with `seed` is out of date.

        It is if it had other settings, or another model than the one with the fingerprints
        `origin`.
        """
        name = f"seed-{seed}"
        recorded = read_json_or_empty(self.directory / name / TRAINING_DETAILS)
        planned = flags.flatten(self.data.entry.training) | {"seed": seed}
        # Those of an export.
        defaults = {
            "pooling": "mean",
            "attention": "bidirectional",
            "query_prefix": "",
            "document_prefix": "",
        }
        planned |= {rule: planned[rule] or default for rule, default in defaults.items()}
        if not planned["precision"]:  # depends on the machine
            del planned["precision"]
        planned = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in planned.items()
        }
        self._compare(name, _get_object(recorded, "config"), planned)
        self._compare(name, _get_object(recorded, "fingerprints"), origin)

    def _compare(self, name: str, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        """Raise StaleArtifactError if a recorded value differs from the current one.

        Values are compared by name, and only if both are known.
        """
        values = {key: recorded[key] for key in current if key in recorded}
        difference = describe_difference(values, {key: current[key] for key in values})
        if difference:
            raise StaleArtifactError(
                self.directory, f"made with other settings: embed: {difference} ({name})"
            )


def _get_object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the JSON object under `name` in `values`; empty if there is none."""
    value = values.get(name)
    return value if isinstance(value, dict) else {}


def _read_fingerprints(directory: Path, recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fingerprints of a model and its tokenizer; {} if there is none.

    If the files have the recorded sizes and times, the `recorded` fingerprints are returned without
    reading the weights.
    """
    if not (directory / "config.json").is_file():
        return {}
    stamp = compute_model_stamp(str(directory))
    if recorded.get("stamp") == stamp:
        return {name: value for name, value in recorded.items() if name != "stamp"}
    return fingerprint_model(str(directory), str(directory.parent), stamp)


def check_embed_data(stages: Sequence[StageRunner], manifest: str) -> None:
    """Raise InputError if a remaining stage lacks its retrieval sets or pairs.

    demo_ir, which the study builds, may be missing.

    Args:
        manifest: Path of the manifest, for the message.
    """
    remaining = [stage for stage in stages if isinstance(stage, EmbedStage) and not stage.is_done()]
    for data in [stage.data for stage in remaining][:1]:  # all stages read the same
        for name, directory in data.directories.items():
            # Unlike Path's, os.path.isdir is False for a name that is too long.
            if directory != data.demo and not os.path.isdir(directory):
                place = f"{manifest}: embed: field `datasets`: {name}"
                raise InputError(
                    f"{place}: {directory}: no such directory; expected BEIR's layout (see --data)"
                )
        if data.entry.train and data.pairs != data.demo and not os.path.exists(data.pairs):
            place = f"{manifest}: embed: field `train`: {data.pairs}"
            raise InputError(
                f"{place}: no such file or directory; expected pairs to train on (see --data)"
            )
