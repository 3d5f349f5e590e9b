"""Fine-tuning runs in processes of their own: forks of a server, locked against each other, gone when the grid is gone."""

import contextlib
import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Literal

from megaenc.console import capture_messages
from megaenc.errors import InputError
from megaenc.finetune.grid.jobs import FinetuneJob, RunProgress, select_remaining_work, try_lock_run
from megaenc.finetune.model.fingerprint import compute_model_stamp
from megaenc.finetune.results import files as result_files
from megaenc.processes import (
    KILL_TIMEOUT,
    ChildProcess,
    accelerator_names,
    describe_exit_code,
    python_environment,
    select_visible_devices,
    set_child_environment,
    set_up_child,
    usable_core_count,
)

RUN_FUNCTION = "megaenc.finetune.train:train_and_evaluate"
"""What does a job: `run(job, report)`, by its name, as it is imported where runs are done. A grid itself needs no torch."""

LOG_FILE = "log.txt"
_REPORT_EVERY = 0.25
_LOG_TAIL_LINES = 5
# One thread each until a run asks torch for more: a pool of threads would not survive the fork. And devices are counted without
# the driver, which would not survive it either.
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


@dataclass(frozen=True)
class JobOutcome:
    """How a try at a job ended.

    `finished`: results are there. `failed`: it has no result and never will. `refused`: wrong input. `busy`: another process is
    at the same run. `crashed`: an exception, a signal, or silence.
    """

    kind: Literal["finished", "failed", "refused", "busy", "crashed"]
    reason: str = ""
    log_tail: str = ""
    """The last lines of what a crashed run wrote on stderr."""


def start_fork_server(run: str) -> ForkServerContext:
    """Where processes come from that have the module of `run` imported; started once in a process, and then kept."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megaenc.finetune.grid.fork_preload", __name__, run.partition(":")[0], "__main__"])
    with set_child_environment(python_environment() | _SERVER_ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def _start_process(process: ForkServerProcess) -> None:
    """Have it forked, by a new server like the first should that have died."""
    deadline = time.monotonic() + KILL_TIMEOUT
    with set_child_environment(python_environment() | _SERVER_ENVIRONMENT):
        while True:
            try:
                return process.start()
            except ConnectionError:  # the server is dying: it does not answer, and has not ended yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def build_slots(jobs: int, jobs_per_gpu: int, threads: int) -> list[dict[str, str]]:
    """The environment of each place that a run can take, as many as run at a time.

    With accelerators `jobs_per_gpu` on each, or `jobs` at most, the first on different ones. Without: `jobs`, or one for every
    `threads` cores. For 0 `jobs` stands for as many as fit.
    """
    if devices := len(accelerator_names()):
        variable, names = select_visible_devices(devices)
        return [{variable: name} for _ in range(jobs_per_gpu) for name in names][: jobs or None]
    return [{} for _ in range(jobs or max(1, usable_core_count() // threads))]


class ForkedRun(ChildProcess):
    """A process that tries one job, forked by a server. `poll` it until there is an outcome."""

    def __init__(self, context: ForkServerContext, run: str, job: FinetuneJob, place: dict[str, str], *, retry_failed: bool) -> None:
        """`place` is added to the environment. `again`: what was written as failed is tried again."""
        self.job, self.environment, self.progress = job, place, RunProgress("loading")
        self.connection, there = context.Pipe(duplex=False)
        self.process = context.Process(target=_run_child, args=(run, job, place, retry_failed, there))
        _start_process(self.process)
        there.close()
        self.last_message_time = time.monotonic()
        self._outcome: JobOutcome | None = None
        self._messages: list[str] = []
        self.wait_handles = [self.process.sentinel, self.connection]
        """What becomes ready when there is news."""

    def code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self.process.exitcode

    def kill(self) -> None:
        """End the process at once, with all that it has started; what it has written whole stays."""
        if self.code() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have no session of its own yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join(KILL_TIMEOUT)
        self.connection.close()

    def poll(self, patience: float) -> JobOutcome | None:
        """The outcome if the process has ended. One that has not made itself heard for `patience` seconds is ended (0: never)."""
        code = self.code()  # asked first: what it said before is in the connection
        self._receive_messages()
        if code is not None:
            self.kill()
            if code == 0 and self._outcome is not None:
                return self._outcome
            how = describe_exit_code(code) if code else "ended without a result"
        elif patience and time.monotonic() - self.last_message_time > patience:
            self.kill()
            how = f"no progress for {patience / 60:g} minutes, so it was ended"
        else:
            return None
        return JobOutcome("crashed", how, _read_log_tail(self.job))

    def take_messages(self) -> list[str]:
        """What the run has said to people since this was asked last."""
        said, self._messages = self._messages, []
        return said

    def _receive_messages(self) -> None:
        try:
            while self.connection in self.wait_handles and self.connection.poll():
                message = self.connection.recv()
                self.last_message_time = time.monotonic()
                if isinstance(message, RunProgress):
                    self.progress = message
                elif isinstance(message, str):
                    self._messages.append(message)
                else:
                    self._outcome = message
        except (EOFError, OSError):
            self.wait_handles.remove(self.connection)


def _read_log_tail(job: FinetuneJob) -> str:
    try:
        text = log_path(job).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.strip().splitlines()[-_LOG_TAIL_LINES:])


def log_path(job: FinetuneJob) -> Path:
    """Where what a run writes on stdout and stderr goes; there is no file after a run that wrote nothing."""
    return result_files.job_folder(job, job.evaluate_on[0].name) / LOG_FILE


def _run_child(run: str, job: FinetuneJob, environment: dict[str, str], retry_failed: bool, connection: Connection) -> None:
    from megaenc.finetune.grid import fork_preload

    set_up_child(fork_preload.PROCESS)
    os.setsid()
    os.environ.update(environment, RAYON_NUM_THREADS=str(job.protocol.threads))
    with contextlib.suppress(BrokenPipeError):  # the grid is gone, and this process with it in a moment
        try:
            connection.send(_attempt_job(run, job, retry_failed, connection))
        except InputError as error:
            connection.send(JobOutcome("refused", " ".join(str(error).split())))


def _attempt_job(run: str, job: FinetuneJob, retry_failed: bool, connection: Connection) -> JobOutcome:
    with try_lock_run(job) as got:
        if not got:
            return JobOutcome("busy")
        todo, failed = select_remaining_work(job, retry_failed=retry_failed)  # another grid may have been here since it was planned
        if todo is None:
            return _build_outcome(failed)
        if compute_model_stamp(job.model.location) != job.fingerprints.model_stamp:
            raise InputError(f"{job.model.location}: has changed since the grid began; give the same command again")
        result_files.remove_partial_files(todo)
        log = log_path(todo)
        log.parent.mkdir(parents=True, exist_ok=True)
        _redirect_output(log)
        module, _, function = run.partition(":")
        try:
            with capture_messages(connection.send):
                getattr(importlib.import_module(module), function)(todo, _throttle_progress(connection))
        except InputError:
            log.unlink(missing_ok=True)  # the message says all
            raise
        left, failed = select_remaining_work(todo, retry_failed=False)
        if left is not None:
            raise RuntimeError(f"the run ended without results on {', '.join(dataset.name for dataset in left.evaluate_on)}")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if log.stat().st_size == 0:
            log.unlink()
        return _build_outcome(failed)


def _build_outcome(failed: Path | None) -> JobOutcome:
    return JobOutcome("finished") if failed is None else JobOutcome("failed", f"failed; {failed} says why")


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _throttle_progress(connection: Connection) -> Callable[[RunProgress], None]:
    last: tuple[str, float] = ("", 0.0)

    def report(progress: RunProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.stage != last[0] or now - last[1] >= _REPORT_EVERY:
            last = (progress.stage, now)
            connection.send(progress)

    return report


def wait_for_messages(workers: Sequence[ForkedRun], seconds: float) -> None:
    """Return when one of `workers` has said something or ended, after `seconds` at the latest."""
    if workers:
        multiprocessing.connection.wait([source for worker in workers for source in worker.wait_handles], timeout=seconds)
    else:
        time.sleep(seconds)
