"""The grid of a study: every model on every data set with every learning rate and seed, each run in a process of its own."""

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megaenc import flags
from megaenc.console import clock, overheard, quiet, say
from megaenc.errors import InputError, one_line_errors
from megaenc.files import make_parent, stopped_by_sigterm
from megaenc.finetune.datasets.local import DataFlags
from megaenc.finetune.jobs import Find, Job, check_rate, make_jobs
from megaenc.finetune.options import LEARNING_RATES, Protocol
from megaenc.finetune.progress import Screen
from megaenc.finetune.slurm import SlurmSettings, submit
from megaenc.finetune.unfinished import is_locked, remaining
from megaenc.finetune.workers import Outcome, Run, Worker, fork_server, log_path, slots, wait_for_news

_TRIES = 2
_LOOK_AGAIN = 1.0  # seconds between looks at a run that another process is at


@dataclass(frozen=True)
class Local:
    """Where and how runs go on this machine."""

    jobs: int = 0
    """runs at a time; 0: --jobs-per-gpu on each GPU, without one a run on every --threads cores"""
    jobs_per_gpu: int = 1
    """runs that share a GPU"""
    hang_minutes: float = 60.0
    """a run that makes no progress for so long counts as crashed; 0 waits for ever"""
    retry_failed: bool = False
    """try runs again that are written down as failed, as their loss became NaN"""


@dataclass(frozen=True)
class GridSettings:
    """What `megaenc finetune grid` takes."""

    config: str = ""
    """YAML file of flags; the command line wins over it"""
    model: tuple[str, ...] = ()
    """Hugging Face folders; NAME=FOLDER names the results otherwise than the folder's last part"""
    datasets: tuple[str, ...] = ()
    """data sets by name or path, as --dataset of `megaenc finetune run`"""
    learning_rates: tuple[float, ...] = LEARNING_RATES
    """each model is trained on each set with each of these"""
    seeds: int = 5
    """and with each seed below this"""
    output: str = "results"
    """folder of results; what is finished there is not done again"""
    data: DataFlags = field(default_factory=DataFlags)
    local: Local = field(default_factory=Local)
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    protocol: Protocol = field(default_factory=Protocol)


@dataclass(frozen=True)
class Plan:
    """What is to be done for a grid, and what has been."""

    jobs: list[Job]
    """Every training, in the order of the work."""
    todo: list[Job]
    """Those not finished, with the data sets that they have still to be evaluated on."""
    failed: list[tuple[Job, Path]]
    """Those that are written down as failed and not tried again, with the file that says why."""

    @property
    def results(self) -> int:
        """How many results the whole grid has; retrieval has one for each set that a training is evaluated on."""
        return sum(len(job.evaluate_on) for job in self.jobs)


def plan(settings: GridSettings, find: Find) -> Plan:
    """Look at every model, data set and finished result. Raises InputError for what no run could be made of."""
    _check(settings)
    rates, seeds = settings.learning_rates, range(settings.seeds)
    jobs = make_jobs(settings.model, settings.datasets, rates, seeds, settings.output, settings.protocol, settings.data, find)
    again, todo, failed = settings.local.retry_failed, [], []
    for job in jobs:
        left, why = remaining(job, again=again)
        todo += [left] if left is not None else []
        failed += [(job, why)] if why is not None else []
    return Plan(jobs, todo, failed)


def _check(settings: GridSettings) -> None:
    settings.protocol.check()
    for flag, values in (("--model", settings.model), ("--datasets", settings.datasets)):
        if not values:
            raise InputError(f"{flag}: found none, expected at least one")
    for flag, value, least in (
        ("--seeds", settings.seeds, 1),
        ("--jobs", settings.local.jobs, 0),
        ("--jobs-per-gpu", settings.local.jobs_per_gpu, 1),
        ("--hang-minutes", settings.local.hang_minutes, 0),
        ("--jobs-per-task", settings.slurm.jobs_per_task, 1),
        ("--slurm-minutes", settings.slurm.slurm_minutes, 1),
        ("--slurm-gpus", settings.slurm.slurm_gpus, 0),
        ("--slurm-cpus", settings.slurm.slurm_cpus, 1),
        ("--slurm-parallel", settings.slurm.slurm_parallel, 1),
    ):
        if not value >= least:
            raise InputError(f"{flag}: found {value}, expected at least {least}")
    if not settings.learning_rates:
        raise InputError("--learning-rates: found none, expected at least one")
    for rate in settings.learning_rates:
        check_rate("--learning-rates", rate)
    make_parent(Path(settings.output, "model"), "--output")


def execute(jobs: Sequence[Job], run: Run, local: Local, heard: Iterable[str] = ()) -> list[tuple[Job, str]]:
    """Do `jobs`, each in a process of its own, and return those without results, with the reason.

    A crashed run is tried once more when the others have had their turn; one that another process is at is waited for. However
    this ends, no process is left and what is finished stays. What runs say is said once, unless it is among `heard`.
    """
    if not jobs:
        return []
    context = fork_server(run)
    free = slots(context, local.jobs, local.jobs_per_gpu, jobs[0].protocol.threads)
    say(f"{len(free)} at a time; the first begin when torch is loaded")
    waiting, tries = list(reversed(jobs)), defaultdict(int)
    running: dict[Job, tuple[Worker, dict[str, str]]] = {}
    elsewhere: list[Job] = []
    failed: list[tuple[Job, str]] = []
    finished, looked, told = 0, time.monotonic(), set(heard)
    with Screen(len(jobs)) as screen:
        try:
            while waiting or running or elsewhere:
                while waiting and free:
                    job, place = waiting.pop(), free.pop(0)
                    running[job] = (Worker(context, run, job, place, again=local.retry_failed), place)
                wait_for_news([worker for worker, _ in running.values()], 0.5)
                for job, (worker, place) in list(running.items()):
                    outcome = worker.poll(60 * local.hang_minutes)
                    for notice in worker.notices():
                        if notice not in told:
                            told.add(notice)
                            screen.say(notice)
                    if outcome is None:
                        continue
                    del running[job]
                    free.append(place)
                    tries[job] += outcome.kind != "busy"
                    if outcome.kind == "finished":
                        finished += 1
                    elif outcome.kind == "busy":
                        elsewhere.append(job)
                    elif outcome.kind == "crashed" and tries[job] < _TRIES:
                        screen.say(f"{job.name}: {outcome.why}; is tried once more when the others have had their turn")
                        waiting.insert(0, job)
                    else:
                        why = _told(job, outcome)
                        if why not in [said for _, said in failed]:
                            screen.say(f"{job.name}: {why.splitlines()[0]}")
                        failed.append((job, why))
                if elsewhere and time.monotonic() - looked > _LOOK_AGAIN:
                    looked = time.monotonic()
                    released = [job for job in elsewhere if not is_locked(job)]
                    elsewhere = [job for job in elsewhere if job not in released]
                    waiting = released + waiting
                screen.show({job: worker.progress for job, (worker, _) in running.items()}, finished, len(failed))
        finally:
            for worker, _ in running.values():
                worker.kill()
    order = {job: at for at, job in enumerate(jobs)}
    return sorted(failed, key=lambda job_and_why: order[job_and_why[0]])


def _told(job: Job, outcome: Outcome) -> str:
    if outcome.kind in ("failed", "refused"):
        return outcome.why
    last = f":\n    {outcome.log.replace(chr(10), chr(10) + '    ')}" if outcome.log else ""
    return f"crashed twice, {outcome.why}; {log_path(job)}{last}"


def announce(settings: GridSettings, planned: Plan) -> None:
    """Say how large the grid is, counted both ways, and what of it is left."""
    whole = len(planned.jobs)
    axes = (
        (settings.model, "model"),
        (settings.datasets, "data set"),
        (settings.learning_rates, "rate"),
        (range(settings.seeds), "seed"),
    )
    size = " x ".join(count(len(values), noun) for values, noun in axes)
    once = "" if planned.results == whole else "; retrieval trains once for all its sets"
    say(f"{count(planned.results, 'result')} from {count(whole, 'training')}: {size}{once}")
    done = whole - len(planned.todo) - len(planned.failed)
    before = f", {len(planned.failed):,} failed before" if planned.failed else ""
    say(f"{done:,} finished{before}, {len(planned.todo):,} to do")


def count(number: int, noun: str) -> str:
    """`1 model`, `50 models`."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def conclude(output: str, failed: Sequence[tuple[Job, str]], before: Sequence[tuple[Job, Path]], seconds: float) -> None:
    """Say what has no result and what to do about it. Ends with exit code 1 if there is any."""
    by_reason: dict[str, list[Job]] = defaultdict(list)
    for job, why in failed:
        by_reason[why].append(job)
    for why, jobs in by_reason.items():
        more = f" and {len(jobs) - 1:,} more" if len(jobs) > 1 else ""
        say(f"without result: {jobs[0].name}{more}: {why}")
    for job, where in before:
        say(f"without result: {job.name}: failed before; {where} says why")
    say(f"done in {clock(seconds)}; see them with `megaenc finetune summary {output}`")
    if failed or before:
        say(
            f"without result: {count(len(failed) + len(before), 'training')}; the same command tries those that crashed again, "
            "with --retry-failed those with a failed.json too"
        )
        sys.exit(1)


@one_line_errors
def grid_main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc finetune grid`."""
    quiet()
    settings = flags.parse_with_config(GridSettings, argv, prog="megaenc finetune grid", description=__doc__)
    from megaenc.finetune.datasets.registry import find
    from megaenc.finetune.run import run

    run_grid(settings, find, run)


def run_grid(settings: GridSettings, find: Find, run: Run) -> None:
    """Plan, say, and do a grid here or on a cluster; ends with exit code 1 if a run has no result."""
    settings = replace(settings, output=str(Path(settings.output).resolve())) if settings.slurm.slurm else settings
    heard: list[str] = []
    with overheard(heard.append):
        planned, began = plan(settings, find), time.monotonic()
    announce(settings, planned)
    if settings.slurm.slurm:
        submit(planned.todo, run, settings.slurm, settings.local, settings.output)
        return
    with stopped_by_sigterm():
        try:
            failed = execute(planned.todo, run, settings.local, heard)
        except (KeyboardInterrupt, SystemExit):
            say("what is finished is kept; the same command goes on with the rest")
            raise
    conclude(settings.output, failed, planned.failed, time.monotonic() - began)
