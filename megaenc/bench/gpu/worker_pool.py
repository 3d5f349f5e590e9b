"""Processes that do the jobs, one at a time: killed when a job takes too long, and replaced when one has failed."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from megaenc.bench.gpu.worker import JobFailed, run_job
from megaenc.processes import Worker, WorkerDied, python_environment


class WorkerPool:
    """Use as a context manager.

    `fresh`: each job has a process of its own, since what one does to an accelerator's memory the next would suffer from; the
    process after it loads its libraries meanwhile. `log`: what they and their libraries say.
    """

    def __init__(self, environment: dict[str, str], fresh: bool, log: Path) -> None:
        self._environment, self._fresh, self._log = environment, fresh, log
        self._ready: Worker | None = None
        self._working: Worker | None = None
        self._loaded: Worker | None = None

    def __enter__(self) -> Self:
        self._ready = self._start_worker()
        return self

    def __exit__(self, *error: object) -> None:
        for worker in filter(None, (self._working, self._ready)):
            worker.kill()

    def _start_worker(self) -> Worker:
        with open(self._log, "ab") as stream:
            worker = Worker(run_job, python_environment() | self._environment, stream)
        worker.send({})  # to load its libraries
        return worker

    def run(self, job: dict[str, Any], seconds: float, seconds_left: float) -> Iterator[tuple[list[str], Any]]:
        """What the job finds, as it finds it. Raises JobFailed.

        It is told to end after 0.9 `seconds` and killed after `seconds`, counted from when its process is ready; and killed in
        any case `left` seconds from now.
        """
        latest = time.monotonic() + seconds_left
        worker = self._working = self._ready or self._start_worker()
        self._ready = None
        try:
            if worker is not self._loaded:
                list(worker.results(latest))
                self._loaded = worker
            if self._fresh:
                self._ready = self._start_worker()
            ends = min(latest, time.monotonic() + seconds)
            worker.send(job | {"deadline": ends - 0.1 * seconds})  # by the clock that all processes of a machine have
            try:
                yield from worker.results(ends)
            except JobFailed:
                self._return_worker(worker)
                raise
            self._return_worker(worker)
        except TimeoutError:
            raise JobFailed("its time was over") from None
        except WorkerDied as error:
            raise JobFailed(f"its process {error}") from None
        finally:
            if self._working:
                self._working.kill()
            self._working = None

    def _return_worker(self, worker: Worker) -> None:
        """Leave a process that has ended its job to the next one, if that may be."""
        if not self._fresh:
            self._ready, self._working = worker, None
