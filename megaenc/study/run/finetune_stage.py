"""Fine-tuning of a model on one data set as a stage of a study."""

import contextlib
import functools
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets import demo
from megaenc.finetune.datasets.local import STUDY_PAIRS, DatasetConfig
from megaenc.finetune.datasets.registry import find_dataset
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.model.fingerprint import (
    compute_model_fingerprints,
    compute_model_stamp,
    compute_tokenizer_fingerprint,
)
from megaenc.finetune.results import files as result_files
from megaenc.study.manifest.training_sets import TrainingSet
from megaenc.study.run.stage import StageRunner, StaleArtifactError, format_flags, megaenc_command


def choose_study_texts(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the study's format of texts for the flags that `flags` leaves open.

    They are the study's pair_template, and unless `flags` has special_tokens, add_bos False and
    add_eos True. `flags` and the result are flags of `megaenc finetune grid` by field name.
    """
    texts = {"pair_template": STUDY_PAIRS}
    if "special_tokens" not in flags:
        texts = {"add_bos": False, "add_eos": True, **texts}
    return {name: value for name, value in texts.items() if name not in flags}


@dataclass(frozen=True)
class LabelledData:
    """Labelled data sets of a study's grid, and the flags that locate them.

    `LabelledData(datasets, flags)` takes the data sets of the manifest with paths resolved, each a
    name, PATH or NAME=PATH, and the DatasetConfig to find them with. `fingerprints` reads those
    that exist.
    """

    datasets: tuple[str, ...]
    flags: DatasetConfig

    @cached_property
    def fingerprints(self) -> dict[str, dict[str, str]]:
        """Return two fingerprints of each data set by its name in results; cached.

        They are {"dataset": that of the set, "train_on": that of its training set}. Data sets that
        cannot be read and demo sets that do not exist yet are left out.
        """
        fingerprints = {}
        for text in self.datasets:
            demo_names = {text, self.flags.train_on}.intersection(demo.DEMO_DATASETS)
            # Finding a demo set would create it.
            if all(Path(self.flags.demo_folder, name).is_dir() for name in demo_names):
                with contextlib.suppress(InputError):
                    dataset = find_dataset(text, **asdict(self.flags))
                    fingerprints[dataset.name] = {
                        "dataset": dataset.fingerprint,
                        "train_on": dataset.train_fingerprint,
                    }
        return fingerprints


@dataclass(frozen=True, kw_only=True)
class FinetuneStage(StageRunner):
    """Stage of `megaenc finetune grid`: an exported model on one training set.

    `build_graph` builds it. `flags` are the grid's flags in the manifest, with the data sets of
    `training` (TrainingSet); `protocol` (FinetuneConfig) and `data` (LabelledData) are the same for
    all stages. `jobs` is the number of parallel runs, 0 for as many as the machine has room for;
    `run_seconds` the planned seconds per run, 0 if unknown.
    """

    training: TrainingSet
    flags: Mapping[str, Any] = field(repr=False)
    """Flags of the grid in the manifest, always with learning_rates, seeds, and the datasets of
    `training`.
    """
    protocol: FinetuneConfig
    data: LabelledData
    jobs: int
    """runs in parallel; 0: as many as the machine has room for"""
    run_seconds: float
    """planned seconds per run; 0 if unknown"""
    kind = "finetune"
    subfolder = "results"
    unit = "results"

    @property
    def id(self) -> str:
        """Return `finetune/NAME@SET`; SET is the data set to train on."""
        return f"{super().id}@{self.training.train_on}"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return (`export/NAME`,), the id of the stage that exports the model."""
        return (f"export/{self.name}",)

    @property
    def run_count(self) -> int:
        """Return the number of training runs: learning rates x seeds."""
        return len(self.flags["learning_rates"]) * self.flags["seeds"]

    @property
    def result_count(self) -> int:
        """Return the number of all results: data sets x learning rates x seeds."""
        return len(self.training.datasets) * self.run_count

    @property
    def work(self) -> float:
        """Return the number of training runs, to which run times are proportional."""
        return float(self.run_count)

    @property
    def planned_seconds(self) -> float | None:
        """Return the planned seconds of all training runs, one at a time.

        They are None if the manifest has no seconds per run.
        """
        return self.run_count * self.run_seconds or None

    @property
    def _export(self) -> Path:
        """Return the directory of the exported model."""
        return self.study / "hf" / self.name

    def remaining_commands(self) -> list[list[str]]:
        """Return the command line of `megaenc finetune grid` unless all results exist.

        It computes only missing results.
        """
        if self.is_done():
            return []
        flags = {
            "model": self._export,
            "output": self.directory.parent,
            "jobs": self.jobs,
            "demo_folder": self.data.flags.demo_folder,
            **choose_study_texts(self.flags),
            **self.flags,
        }
        return [megaenc_command("finetune", "grid", *format_flags(flags))]

    def progress(self) -> tuple[float, float]:
        """Return (existing results, all results).

        A failed.json, of a run whose loss was NaN, is a result.
        """
        return len(self._result_files()), self.result_count

    def describe_failed_runs(self) -> str:
        """Return a sentence on runs without a score; "" if there are none.

        It has no full stop. These are the runs with a failed.json, whose loss was NaN.
        """
        count = sum(file.name == result_files.FAILED for file in self._result_files())
        return f"{count} runs have no score: their learning rate made the loss NaN" if count else ""

    def _result_files(self) -> list[Path]:
        """Return the path of results.json or failed.json of each run that has one."""
        if not self.directory.is_dir():
            return []
        results = []
        families = [self.training.family] if self.training.family else TaskFamily
        rates = map(float, self.flags["learning_rates"])
        for dataset, rate, seed in itertools.product(
            self.training.datasets, rates, range(self.flags["seeds"])
        ):
            run = (dataset, self.training.train_on, rate, seed)
            directories = [
                result_files.run_directory(self.directory, family, *run) for family in families
            ]
            candidates = (
                directory / name
                for directory in directories
                for name in (result_files.RESULTS, result_files.FAILED)
            )
            results += [file for file in candidates if file.is_file()][:1]
        return results

    def check(self) -> None:
        """Raise StaleArtifactError if an existing result is out of date.

        It is if it was made by another protocol, model, tokenizer or data set. Missing results
        pass; what does not exist now, such as the export, is not compared.
        """
        files = self._result_files()
        model_fingerprints = {}
        if files and (self._export / "config.json").is_file():
            model = str(self._export)
            model_fingerprints = fingerprint_model(
                model, str(self.directory.parent), compute_model_stamp(model)
            )
        for file in files:
            fingerprints = {
                **model_fingerprints,
                **self.data.fingerprints.get(file.parent.parent.name, {}),
            }
            difference = result_files.find_protocol_difference(file, self.protocol, fingerprints)
            if difference:
                place = file.relative_to(self.directory)
                raise StaleArtifactError(
                    self.directory, f"made with other settings: finetune: {difference} ({place})"
                )


@functools.lru_cache(maxsize=10_000)
def fingerprint_model(directory: str, results: str, stamp: str) -> dict[str, str]:
    """Return {"model": fingerprint of a model, "tokenizer": that of its tokenizer}.

    Further calls in this process with the same arguments read no file.

    Args:
        directory: Directory of the model.
        results: Directory of results; its .fingerprints.json is used, but not written.
        stamp: Text of `compute_model_stamp`, which differs if the model's files have changed.

    Raises:
        InputError: A file cannot be read.
    """
    [weights] = compute_model_fingerprints([directory], results)
    return {"model": weights, "tokenizer": compute_tokenizer_fingerprint(directory)}
