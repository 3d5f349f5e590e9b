"""Worker processes that run jobs one at a time, are killed after a timeout and replaced after a failure."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from megaenc.bench.gpu.worker import JobFailed, run_job
from megaenc.processes import Worker, WorkerDied, python_environment


class WorkerPool:
    """Context manager that runs a job at a time in a worker process, a new one each if `fresh`, with output in `log`.

    `fresh`: run each job in a new process, so that device memory starts empty; the next process imports its libraries meanwhile.
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
        """Start a worker that imports its libraries."""
        with open(self._log, "ab") as stream:
            worker = Worker(run_job, python_environment() | self._environment, stream)
        worker.send({})  # imports libraries
        return worker

    def run(self, job: dict[str, Any], seconds: float, seconds_left: float) -> Iterator[tuple[list[str], Any]]:
        """Yield a job's (keys, value) results as they come; JobFailed if it fails or exceeds `seconds` or `seconds_left`.

        The job's deadline is 0.9 `seconds` and it is killed after `seconds`, counted from when its process is ready, and at the
        latest `seconds_left` from now.
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
            worker.send(job | {"deadline": ends - 0.1 * seconds})  # time.monotonic is common to all processes of a machine
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
        """Keep a worker that ended its job for the next one, unless each job needs a new process."""
        if not self._fresh:
            self._ready, self._working = worker, None
