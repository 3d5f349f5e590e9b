"""Models, data sets and runs that take no time, to test grids.

A run does what `behaviour.json` in its model's directory tells for `lr2e-05_sd0`, else for `all`:
write results only; wait `seconds`; print `says`; `crash`, `kill` itself, be `refused` or `hang` the
first `times`; or write that the loss is `nan`.
"""

import functools
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import Dataset, TaskFamily
from megaenc.finetune.job import FinetuneJob, RunProgress
from megaenc.finetune.results import files as result_files

FAMILIES = {"sc": TaskFamily.SC, "tc": TaskFamily.TC, "qa": TaskFamily.QA, "ir": TaskFamily.IR}


@dataclass(frozen=True)
class Scores:
    score: float
    metrics: dict
    collapsed: str | None
    baseline: dict
    scores_i: list
    metrics_i: dict


@functools.cache
def _tokenizer() -> str:
    # A grid's processes import this file and do without
    from megaenc.data.tokenizer.tokenizer import (
        train_tokenizer,
    )

    return train_tokenizer(["a text of few words"], vocab_size=300).backend_tokenizer.to_str()


def make_model(directory: Path, **behaviour) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "fake"}')
    (directory / "model.safetensors").write_bytes(b"weights of " + directory.name.encode())
    # A grid asks it for the special tokens of a text
    (directory / "tokenizer.json").write_text(_tokenizer())
    (directory / "behaviour.json").write_text(json.dumps(behaviour))
    return directory


class FakeGrid:
    """A grid of the fake model `toy`, with two rates and two seeds."""

    FLAGS = ("--learning-rates", "1e-5", "5e-4", "--seeds", "2", "--jobs", "2")

    def __init__(self, directory: Path, **behaviour) -> None:
        self.model = make_model(directory / "toy", **behaviour)
        self.output = directory / "out"

    def settings(self, *more):
        """The flags of a grid; those in `more` hold, such as data sets."""
        from megaenc import flags
        from megaenc.finetune.grid.command import GridConfig

        argv = ["--model", self.model, "--output", self.output, *self.FLAGS, "--datasets", *more]
        return flags.parse(
            GridConfig, [str(word) for word in argv], prog="grid", description="a grid"
        )

    def plan(self, *more):
        from megaenc.finetune.grid.command import plan_grid

        return plan_grid(self.settings(*more), find)

    def run(self, *more, code: int = 0) -> None:
        """Do the grid, which must end with `code`."""
        from megaenc.finetune.grid.command import run_grid

        ended = 0
        try:
            run_grid(self.settings(*more), find, "fake_runs:run")
        except SystemExit as stop:
            ended = stop.code
        assert ended == code

    def calls(self) -> list[str]:
        return calls(self.model)

    def files(self, name: str = "results.json") -> list[Path]:
        return sorted(self.output.rglob(name))


def find(text: str, **options) -> Dataset:
    """Return the data set of a name such as `sc1`, whose family is its first letters.

    Retrieval is trained on `pairs`.
    """
    if text.endswith("_said"):
        print_rank_0(f"{text}: 5 % of train validate")
    if text[:2] not in FAMILIES:
        raise InputError(f"unknown data set `{text}`, expected sc1 or the like")
    family = FAMILIES[text[:2]]
    train_on, trained = ("pairs", "p" * 64) if family == TaskFamily.IR else (text, text * 8)
    return Dataset(text, family, (), train_on, text * 8, trained, read_split=None)


def scores(job: FinetuneJob, dataset: str, split: str) -> Scores:
    value = (
        hash_of(f"{job.model.name}{dataset}{split}{job.learning_rate}{job.seed}") % 1000
    ) / 1000
    baseline = {"score": 0.5, "accuracy": 0.25}
    return Scores(
        value, {"accuracy": value}, None, baseline, [value] * 3 + [1.0], {"accuracy": [value]}
    )


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[-7:], "big") * 2654435761 % 2**31


def calls(model: Path) -> list[str]:
    """The runs that were begun with a model, in order."""
    path = model / "calls"
    return path.read_text().split() if path.exists() else []


def run(job: FinetuneJob, report) -> None:
    model = Path(job.model.location)
    name = f"lr{format_learning_rate(job.learning_rate)}_sd{job.seed}"
    with open(model / "calls", "a") as stream:
        stream.write(f"{job.train_on}_{name}\n")
    behaviour = json.loads((model / "behaviour.json").read_text())
    what = behaviour.get(name, behaviour.get("all", {}))
    (model / "environment").write_text(json.dumps(dict(os.environ)))
    report(RunProgress("loading"))
    if what.get("says"):
        print_rank_0(what["says"])
    for step in range(1, 11):
        report(RunProgress("training", step, 10, {"loss": 1 / step}))
        time.sleep(what.get("seconds", 0) / 10)
    if calls(model).count(f"{job.train_on}_{name}") <= what.get("times", 1000):
        do(what.get("do"), job)
    if what.get("do") == "nan" and not (model / "cured").exists():
        result_files.write_failure(job, "the loss is nan in step 3", step=3, protocol=job.protocol)
        return
    for dataset in job.evaluate_on:
        report(RunProgress("test", 1, 1, {"data set": dataset.name}))
        splits = {split: scores(job, dataset.name, split) for split in ("validation", "test")}
        result = result_files.DatasetResult(
            dataset.name, splits, 10, job.protocol, "0" * 64, {"training": 0.0}
        )
        result_files.write_result(job, result)


def do(what: str | None, job: FinetuneJob) -> None:
    if what == "crash":
        raise ZeroDivisionError("this is what went wrong")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "refused":
        raise InputError(f"{job.train_on}: no column `text`")
    if what == "hang":
        time.sleep(600)
    if what == "nothing":
        os._exit(0)
