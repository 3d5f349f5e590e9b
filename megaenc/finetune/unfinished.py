"""What is left to do of a training, and a lock for whoever does it."""

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from megaenc.errors import InputError
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


@contextlib.contextmanager
def lock(job: Job) -> Iterator[bool]:
    """Try to have a training to oneself, whatever it is to be evaluated on; it is let go when the process ends, however it ends.

    On a file system without locks all get it: the work may then be done twice, with the same results, each written whole.
    """
    path = Path(
        job.output, job.model.name, ".locks", f"{job.family}_{job.train_on}_lr{rate_name(job.learning_rate)}_sd{job.seed}"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise InputError(f"--output {path.parent}: cannot be written to: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        try:
            mine = os.stat(path).st_ino == os.fstat(descriptor).st_ino
        except FileNotFoundError:  # the one before has just finished and removed it
            mine = False
        try:
            yield mine
        finally:
            if mine:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
