"""Child processes of a grid: one forked process per job.

A process locks its job against other grids and is killed with its own grid.
"""

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
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Literal

from megaenc.console import capture_messages
from megaenc.errors import InputError
from megaenc.finetune.grid.jobs import select_remaining_work, try_lock_run
from megaenc.finetune.job import FinetuneJob, RunProgress
from megaenc.finetune.model.fingerprint import compute_model_stamp
from megaenc.finetune.results import files as result_files
from megaenc.machine import accelerator_names, select_visible_devices, usable_core_count
from megaenc.processes import (
    KILL_TIMEOUT,
    ChildProcess,
    describe_exit_code,
    python_environment,
    set_child_environment,
    set_up_child,
)

RUN_FUNCTION = "megaenc.finetune.train:train_and_evaluate"
"""Default run function `run(job, report)`, as module:name: only child processes import torch."""

LOG_FILE = "log.txt"
_REPORT_EVERY = 0.25
_LOG_TAIL_LINES = 5
# Neither thread pools nor an initialized GPU driver survive a fork.
_SERVER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of one attempt at a job, with the reason and the end of the log.

    `kind` is `finished`: results are written; `failed`: failed.json is written, because of NaN or
    inf; `refused`: wrong input; `busy`: another process holds its lock; or `crashed`: an exception,
    a signal, or a timeout without progress. `reason` is empty for `finished` and `busy`;
    `log_tail`, the last 5 lines of the log, is empty for all but `crashed`.
    """

    kind: Literal["finished", "failed", "refused", "busy", "crashed"]
    reason: str = ""
    log_tail: str = ""
    """Last lines of a crashed run's log."""


def start_fork_server(run_function: str) -> ForkServerContext:
    """Start the fork server unless it runs; return the context of its processes.

    The server imports the module of `run_function` once, and processes are forked from it in
    milliseconds. It ends with this process. A server that runs already imports no other module; its
    processes do. A module that cannot be imported raises only there.

    Args:
        run_function: Function that runs a job, as module:name (see RUN_FUNCTION).
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["megaenc.finetune.grid.fork_preload", __name__, run_function.partition(":")[0], "__main__"]
    )
    with set_child_environment(python_environment() | _SERVER_ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def build_slots(jobs: int, jobs_per_gpu: int, threads: int) -> list[dict[str, str]]:
    """Return a slot per concurrent run: the environment variable that selects its GPU.

    It is CUDA_VISIBLE_DEVICES, or HIP_VISIBLE_DEVICES if that is set, and only GPUs in its present
    value are used. Without GPUs each slot is an empty dict. The first slots are on different GPUs.

    Args:
        jobs: Number of slots, with GPUs its maximum. 0: `jobs_per_gpu` on each GPU, without GPUs
            one for every `threads` cores, at least one.
        jobs_per_gpu: Slots on each GPU; no effect without GPUs.
        threads: CPU threads of a run, only to compute the default of `jobs`.
    """
    if device_count := len(accelerator_names()):
        variable, names = select_visible_devices(device_count)
        return [{variable: name} for _ in range(jobs_per_gpu) for name in names][: jobs or None]
    return [{} for _ in range(jobs or max(1, usable_core_count() // threads))]


class ForkedRun(ChildProcess):
    """Child process, forked from the fork server, that attempts a job.

    The constructor starts it, or raises InputError if the fork server was killed. Call `poll` until
    it returns an outcome, or `kill` to end the process; `take_messages` returns its printed lines.
    `progress` is the latest RunProgress, at first of the stage loading.

    Args:
        context: Result of `start_fork_server`.
        run_function: Function that runs the job, as module:name (see RUN_FUNCTION).
        environment: Variables added to those of the process (see `build_slots`).
        retry_failed: Repeat a job with a failed.json.
    """

    def __init__(
        self,
        context: ForkServerContext,
        run_function: str,
        job: FinetuneJob,
        environment: dict[str, str],
        *,
        retry_failed: bool,
    ) -> None:
        """Start the process.

        Raises:
            InputError: The fork server was killed.
        """
        self.job = job
        self.environment = environment
        self.progress = RunProgress("loading")
        self.connection, child_connection = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_run_child, args=(run_function, job, environment, retry_failed, child_connection)
        )
        try:
            # A killed fork server is started again.
            with set_child_environment(python_environment() | _SERVER_ENVIRONMENT):
                self.process.start()
        except ConnectionError:  # it was killed at this moment
            raise InputError(
                "the fork server of the grid was killed; run the same command again to resume"
            ) from None
        child_connection.close()
        self.last_message_time = time.monotonic()
        self._outcome: JobOutcome | None = None
        self._messages: list[str] = []
        self.wait_handles = [self.process.sentinel, self.connection]
        """Objects for `multiprocessing.connection.wait` that become ready at a message or the
        process's end."""

    def exit_code(self) -> int | None:
        """Poll the process and return its exit code, or None while it runs.

        A negative number is the signal that ended the process.
        """
        return self.process.exitcode

    def kill(self) -> None:
        """Kill the process and its children unless it has ended; wait for its end.

        The connection is closed in any case. Files stay, temporary ones too, which the job's next
        attempt removes. `poll` returns `crashed` for a process that was killed.
        """
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have no session of its own yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join(KILL_TIMEOUT)
        self.connection.close()

    def poll(self, patience: float) -> JobOutcome | None:
        """Return the outcome of the process, at each call after its end; None before.

        Pending messages are received, which updates `progress` and the lines of `take_messages`. A
        process that hangs is killed; its outcome, and that of one without a result, is `crashed`.

        Args:
            patience: Seconds without a message after which the process is killed; 0: never.
        """
        exit_code = self.exit_code()  # read before the messages, so that none is missed
        self._receive_messages()
        if exit_code is not None:
            self.kill()
            if exit_code == 0 and self._outcome is not None:
                return self._outcome
            reason = describe_exit_code(exit_code) if exit_code else "ended without a result"
        elif patience and time.monotonic() - self.last_message_time > patience:
            self.kill()
            reason = f"no progress for {patience / 60:g} minutes (--hang-minutes), so it was killed"
        else:
            return None
        log_lines: list[str] = []
        with contextlib.suppress(OSError):  # without a log
            log_lines = (
                log_path(self.job)
                .read_text(encoding="utf-8", errors="replace")
                .strip()
                .splitlines()
            )
        return JobOutcome("crashed", reason, "\n".join(log_lines[-_LOG_TAIL_LINES:]))

    def take_messages(self) -> list[str]:
        """Return, and forget, the lines of `print_rank_0` in the run since the last call.

        They are those that `poll` has received; the log has them too.
        """
        messages = self._messages
        self._messages = []
        return messages

    def _receive_messages(self) -> None:
        """Receive all pending messages: progress, printed lines and the outcome."""
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


def log_path(job: FinetuneJob) -> Path:
    """Return the path of log.txt (stdout and stderr) in the job's results directory.

    A job of several data sets has its log in the directory of the first one. The file is missing
    after a run without output.
    """
    return result_files.job_directory(job, job.evaluate_on[0].name) / LOG_FILE


def _run_child(
    run_function: str,
    job: FinetuneJob,
    environment: dict[str, str],
    retry_failed: bool,
    connection: Connection,
) -> None:
    """Attempt the job in the child process and send its outcome through `connection`."""
    from megaenc.finetune.grid import fork_preload

    set_up_child(fork_preload.PROCESS)
    os.setsid()
    os.environ.update(environment, RAYON_NUM_THREADS=str(job.protocol.threads))
    with contextlib.suppress(BrokenPipeError):  # the grid has ended, and kills this process
        try:
            connection.send(_attempt_job(run_function, job, retry_failed, connection))
        except InputError as error:
            connection.send(JobOutcome("refused", " ".join(str(error).split())))


def _attempt_job(
    run_function: str, job: FinetuneJob, retry_failed: bool, connection: Connection
) -> JobOutcome:
    """Run the job under its lock, unless it is done already; return the outcome.

    Output is redirected to the job's log.
    """
    with try_lock_run(job) as is_locked:
        if not is_locked:
            return JobOutcome("busy")
        # Another grid may have run it meanwhile.
        pending, failed = select_remaining_work(job, retry_failed=retry_failed)
        if pending is None:
            return _build_outcome(failed)
        if compute_model_stamp(job.model.location) != job.fingerprints.model_stamp:
            raise InputError(
                f"{job.model.location}: has changed since the grid began; "
                "run the same command again"
            )
        result_files.remove_partial_files(pending)
        log = log_path(pending)
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        module, _, function = run_function.partition(":")
        try:
            with capture_messages(connection.send):
                getattr(importlib.import_module(module), function)(
                    pending, _throttle_progress(connection)
                )
        except InputError:
            log.unlink(missing_ok=True)  # the message says all
            raise
        unfinished, failed = select_remaining_work(pending, retry_failed=False)
        if unfinished is not None:
            raise RuntimeError(
                "the run ended without results on "
                f"{', '.join(dataset.name for dataset in unfinished.evaluate_on)}"
            )
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if log.stat().st_size == 0:
            log.unlink()
        return _build_outcome(failed)


def _build_outcome(failed: Path | None) -> JobOutcome:
    """Return the outcome of a completed job: finished, or failed as `failed` explains."""
    return (
        JobOutcome("finished")
        if failed is None
        else JobOutcome("failed", f"failed; {failed} says why")
    )


def _throttle_progress(connection: Connection) -> Callable[[RunProgress], None]:
    """Return a callback that sends progress at most every 0.25 seconds.

    The first progress of each stage is sent too.
    """
    last: tuple[str, float] = ("", 0.0)

    def report(progress: RunProgress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.stage != last[0] or now - last[1] >= _REPORT_EVERY:
            last = (progress.stage, now)
            connection.send(progress)

    return report


def wait_for_messages(workers: Sequence[ForkedRun], seconds: float) -> None:
    """Wait until one of `workers` has sent a message or ended, at most `seconds`.

    Without workers, sleep for `seconds`.
    """
    if workers:
        multiprocessing.connection.wait(
            [source for worker in workers for source in worker.wait_handles], timeout=seconds
        )
    else:
        time.sleep(seconds)
