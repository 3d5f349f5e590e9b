"""Runs done on this machine, as many at a time as it takes; what crashes is tried once more."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megaenc.console import print_rank_0
from megaenc.finetune.grid.jobs import FinetuneJob, is_run_locked
from megaenc.finetune.grid.progress import GridProgress
from megaenc.finetune.grid.worker import ForkedRun, JobOutcome, build_slots, log_path, start_fork_server, wait_for_messages

_MAX_ATTEMPTS = 2
_POLL_SECONDS = 0.5  # seconds between looks at what waits and what is under way


@dataclass(frozen=True)
class LocalExecution:
    """Where and how runs go on this machine."""

    jobs: int = 0
    """runs at a time; 0: --jobs-per-gpu on each GPU, without one a run on every --threads cores"""
    jobs_per_gpu: int = 1
    """runs that share a GPU"""
    hang_minutes: float = 60.0
    """a run that makes no progress for so long counts as crashed; 0 waits for ever"""
    retry_failed: bool = False
    """try runs again that are written down as failed, as their loss became NaN"""


class FailedJob(NamedTuple):
    """A job without result."""

    job: FinetuneJob
    reason: str
    is_input_error: bool
    """for wrong input: trying again changes nothing"""


def execute_jobs(jobs: Sequence[FinetuneJob], run: str, local: LocalExecution, heard: Iterable[str] = ()) -> list[FailedJob]:
    """Do `jobs`, each in a process of its own, and return those without results, with the reason.

    A crashed run is tried once more when the others have had their turn; one that another process is at is waited for. However
    this ends, no process is left and what is finished stays. What runs say is said once, unless it is among `heard`.
    """
    if not jobs:
        return []
    context = start_fork_server(run)
    free = build_slots(local.jobs, local.jobs_per_gpu, jobs[0].protocol.threads)
    print_rank_0(f"{len(free)} at a time; the first begin when torch is loaded")
    waiting, tries = list(jobs), defaultdict(int)
    running: list[ForkedRun] = []
    failed: list[FailedJob] = []
    finished, told = 0, set(heard)
    with GridProgress(len(jobs)) as screen:
        try:
            while waiting or running:
                for job in list(waiting):
                    if not free:
                        break
                    if not is_run_locked(job):  # by another process, which is waited for
                        waiting.remove(job)
                        running.append(ForkedRun(context, run, job, free.pop(0), retry_failed=local.retry_failed))
                wait_for_messages(running, _POLL_SECONDS)
                for worker in list(running):
                    outcome, job = worker.poll(60 * local.hang_minutes), worker.job
                    for notice in worker.take_messages():
                        if notice not in told:
                            told.add(notice)
                            screen.say(notice)
                    if outcome is None:
                        continue
                    running.remove(worker)
                    free.append(worker.environment)
                    tries[job] += outcome.kind != "busy"
                    if outcome.kind == "finished":
                        finished += 1
                    elif outcome.kind == "busy":
                        waiting.append(job)
                    elif outcome.kind == "crashed" and tries[job] < _MAX_ATTEMPTS:
                        screen.say(f"{job.name}: {outcome.reason}; is tried once more when the others have had their turn")
                        waiting.append(job)
                    else:
                        why = _describe_failure(job, outcome)
                        if why not in [one.reason for one in failed]:
                            screen.say(f"{job.name}: {why.splitlines()[0]}")
                        failed.append(FailedJob(job, why, outcome.kind == "refused"))
                screen.show({worker.job: worker.progress for worker in running}, finished, len(failed))
        finally:
            for worker in running:
                worker.kill()
    order = {job: at for at, job in enumerate(jobs)}
    return sorted(failed, key=lambda one: order[one.job])


def _describe_failure(job: FinetuneJob, outcome: JobOutcome) -> str:
    if outcome.kind in ("failed", "refused"):
        return outcome.reason
    last = f":\n    {outcome.log_tail.replace(chr(10), chr(10) + '    ')}" if outcome.log_tail else ""
    return f"crashed twice, {outcome.reason}; {log_path(job)}{last}"
