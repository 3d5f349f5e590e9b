"""What is left to do of a training, and a lock for whoever does it."""

import contextlib
import dataclasses
from pathlib import Path

from megaenc.files import locked
from megaenc.finetune import results
from megaenc.finetune.jobs import Job, rate_name


def remaining(job: Job, *, again: bool) -> tuple[Job | None, Path | None]:
    """`job` with the data sets that it has still to be evaluated on, None for none; and the file that says why it failed.

    A training that failed has failed for every set: it is to be done only if it is tried `again`. There is one or the other, or
    neither. Raises InputError for results of another protocol.
    """
    states = [(dataset, results.state(job, dataset.name)) for dataset in job.evaluate_on]
    failed = next((dataset for dataset, state in states if state == "failed"), None)
    if failed is not None and not again:
        return None, results.folder(job, failed.name) / results.FAILED
    missing = tuple(dataset for dataset, state in states if state != "finished")
    return dataclasses.replace(job, evaluate_on=missing) if missing else None, None


def is_locked(job: Job) -> bool:
    """Whether some process is at this run."""
    with lock(job) as got:
        return not got


def lock(job: Job) -> contextlib.AbstractContextManager[bool]:
    """Try to have a training to oneself, whatever it is to be evaluated on (see `megaenc.files.locked`).

    On a file system without locks the work may be done twice, with the same results, each written whole.
    """
    name = f"{job.family}_{job.train_on}_lr{rate_name(job.learning_rate)}_sd{job.seed}"
    return locked(Path(job.output, job.model.name, ".locks", name))
