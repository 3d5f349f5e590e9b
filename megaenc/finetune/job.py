"""A fine-tuning job, its fingerprints, and the progress of its run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megaenc.finetune.config import FinetuneConfig, format_learning_rate
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.examples import TaskFamily

TOKENIZED_CACHE = ".tokenised"
"""Name of the cache directory of tokenized data in the results directory."""


@dataclass(frozen=True)
class NamedSource:
    """Model or data set of a job: its `name` in results, and its `location`.

    The location is a model's directory, or a data set's name or path as given to `find_dataset`.
    """

    name: str
    location: str


@dataclass(frozen=True)
class Fingerprints:
    """SHA-256 fingerprints (hex) of a job's model, tokenizer and data sets.

    `model` is that of the model's files, `tokenizer` that of its tokenizer, `train_on` that of the
    training set, and `datasets` has those of the evaluation data sets by name. `model_stamp` is a
    digest of the sizes and times of model files; results do not record it.
    """

    model: str
    tokenizer: str
    train_on: str
    datasets: Mapping[str, str] = field(hash=False)
    """Fingerprint of each evaluation data set, by name."""
    model_stamp: str
    """Digest of the model files' sizes and times, to detect changes during a grid; not recorded."""

    def for_dataset(self, dataset: str) -> dict[str, str]:
        """Return the fingerprints that results on `dataset` record, by role.

        The roles are model, tokenizer, train_on (training set) and dataset.
        """
        of_training = {"model": self.model, "tokenizer": self.tokenizer, "train_on": self.train_on}
        return of_training | {"dataset": self.datasets[dataset]}


@dataclass(frozen=True)
class FinetuneJob:
    """Planned training of a model, and the data sets to evaluate it on.

    `build_jobs` builds it, `train_and_evaluate` runs it by the hyperparameters `protocol` and the
    data options `data`. Results, which record `fingerprints`, are written below `output`, in
    directories named after model, family, data set, learning rate and seed (`job_directory`).
    `train_on` is the name of the training set, which is the only data set of `evaluate_on` except
    in retrieval; `learning_rate` is the peak. The trained model is written to the directory
    `save_model` unless it is "", and to the results if `keep` is "all", or "best" and no run scores
    better; by default, "none", it is not.
    """

    model: NamedSource
    family: TaskFamily
    train_on: str
    evaluate_on: tuple[NamedSource, ...]
    """Several in retrieval, else the training set."""
    learning_rate: float
    seed: int
    output: str
    """Root directory of the results."""
    protocol: FinetuneConfig
    data: DatasetConfig
    fingerprints: Fingerprints
    keep: Literal["none", "best", "all"] = "none"
    """Rule for writing the model to its results: never, if its validation score is the best of all
    learning rates and seeds of its model and data set, or always."""
    save_model: str = ""
    """Directory to write the model to, or ""."""

    @property
    def keeps_model(self) -> bool:
        """Return whether the trained model may be written: always, or only if it is best."""
        return bool(self.save_model) or self.keep != "none"

    @property
    def name(self) -> str:
        """Return the job's display name, such as `toy sst2 2e-05 sd0`.

        Its parts are model, training set, learning rate and seed.
        """
        return (
            f"{self.model.name} {self.train_on} {format_learning_rate(self.learning_rate)} "
            f"sd{self.seed}"
        )


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run in its `stage`, and `fields` to display by name.

    Stages are loading, training, validation and test. `done` of `total` work is finished: steps of
    training, or texts of the part that is tokenized or evaluated, so that `done` falls back at the
    next part. `total` is 0 if unknown.
    """

    stage: Literal["loading", "training", "validation", "test"]
    """Stages in order; retrieval repeats the last two for each evaluation set. Evaluations between
    steps belong to training; a validation that is known from them is skipped."""
    done: float = 0
    total: float = 0
    fields: Mapping[str, float | str] = field(default_factory=dict)
    """Further values to display: loss, data set."""
