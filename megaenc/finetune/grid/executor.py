"""Local execution of a grid: a pool of child processes, and retries after crashes."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaenc.console import print_rank_0
from megaenc.finetune.grid.jobs import is_run_locked
from megaenc.finetune.grid.progress import GridProgress
from megaenc.finetune.grid.worker import (
    ForkedRun,
    build_slots,
    log_path,
    start_fork_server,
    wait_for_messages,
)
from megaenc.finetune.job import FinetuneJob
from megaenc.flags import NonNegativeFloat, NonNegativeInt, PositiveInt

_MAX_ATTEMPTS = 2
_POLL_SECONDS = 0.5  # longest wait between checks of running and waiting jobs


@dataclass(frozen=True)
class LocalExecution:
    """Options of a grid on this machine: concurrent runs, hang timeout and retries.

    Each field is a flag. `jobs` limits concurrent runs; 0 is `jobs_per_gpu` on each GPU or, without
    GPUs, as many as the cores allow. `hang_minutes` without progress end a run, 0 for never;
    `retry_failed` repeats runs that failed with a NaN loss.
    """

    jobs: NonNegativeInt = 0
    """maximum number of concurrent runs; 0: --jobs-per-gpu on each GPU or, without GPUs, one run
    for every --threads cores"""
    jobs_per_gpu: PositiveInt = 1
    """number of runs that share a GPU"""
    hang_minutes: NonNegativeFloat = 60.0
    """minutes without progress after which a run is killed and counts as crashed; 0 disables
    this"""
    retry_failed: bool = False
    """repeat runs that failed with a NaN loss and left failed.json"""


class FailedJob(NamedTuple):
    """Job that ended without results, and the reason as text.

    `execute_jobs` collects them. `is_input_error` is True if the `reason` is wrong input, so that a
    retry of `job` is useless.
    """

    job: FinetuneJob
    reason: str
    is_input_error: bool
    """whether the reason is wrong input, so that a retry is useless"""


def execute_jobs(
    jobs: Sequence[FinetuneJob],
    run_function: str,
    local: LocalExecution,
    printed_messages: Iterable[str] = (),
) -> list[FailedJob]:
    """Run `jobs` in child processes; return a FailedJob for each without results.

    These are in the order of `jobs`. A crashed job is retried once, after the others; one locked by
    another process is waited for. Progress and each different message of the runs are printed. All
    processes are killed at the end; finished results stay.

    Args:
        run_function: Function that runs a job, as module:name (see RUN_FUNCTION).
        local: Options; its `jobs` and the threads of the first job give the concurrent runs.
        printed_messages: Messages that are not printed again.

    Raises:
        InputError: A lock's file cannot be created, or the fork server was killed.
    """
    if not jobs:
        return []
    context = start_fork_server(run_function)
    free_slots = build_slots(local.jobs, local.jobs_per_gpu, jobs[0].protocol.threads)
    print_rank_0(f"{len(free_slots)} runs at a time; the first start when torch is imported")
    waiting = list(jobs)
    attempts = defaultdict(int)
    running: list[ForkedRun] = []
    failed: list[FailedJob] = []
    finished = 0
    printed = set(printed_messages)
    with GridProgress(len(jobs)) as display:
        try:
            while waiting or running:
                for job in list(waiting):
                    if not free_slots:
                        break
                    if not is_run_locked(job):  # another process runs it
                        waiting.remove(job)
                        running.append(
                            ForkedRun(
                                context,
                                run_function,
                                job,
                                free_slots.pop(0),
                                retry_failed=local.retry_failed,
                            )
                        )
                wait_for_messages(running, _POLL_SECONDS)
                for worker in list(running):
                    outcome = worker.poll(60 * local.hang_minutes)
                    job = worker.job
                    for message in worker.take_messages():
                        if message not in printed:
                            printed.add(message)
                            display.print_line(message)
                    if outcome is None:
                        continue
                    running.remove(worker)
                    free_slots.append(worker.environment)
                    attempts[job] += outcome.kind != "busy"
                    if outcome.kind == "finished":
                        finished += 1
                    elif outcome.kind == "busy":
                        waiting.append(job)
                    elif outcome.kind == "crashed" and attempts[job] < _MAX_ATTEMPTS:
                        display.print_line(
                            f"{job.name}: {outcome.reason}; is retried once, after the others"
                        )
                        waiting.append(job)
                    else:
                        reason = outcome.reason
                        if outcome.kind == "crashed":
                            log_tail = outcome.log_tail.replace("\n", "\n    ")
                            last = f":\n    {log_tail}" if log_tail else ""
                            reason = f"crashed twice, {outcome.reason}; {log_path(job)}{last}"
                        if reason not in [failure.reason for failure in failed]:
                            display.print_line(f"{job.name}: {reason.splitlines()[0]}")
                        failed.append(FailedJob(job, reason, outcome.kind == "refused"))
                display.show(
                    {worker.job: worker.progress for worker in running}, finished, len(failed)
                )
        finally:
            for worker in running:
                worker.kill()
    order = {job: index for index, job in enumerate(jobs)}
    return sorted(failed, key=lambda failure: order[failure.job])
