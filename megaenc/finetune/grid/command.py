"""The grid of a study: every model on every data set with every learning rate and seed, each run in a process of its own."""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from megaenc import flags
from megaenc.atomic_io import exit_on_sigterm
from megaenc.console import capture_messages, format_duration, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import LEARNING_RATES, FinetuneConfig, check_minimums
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.grid.executor import FailedJob, LocalExecution, execute_jobs
from megaenc.finetune.grid.jobs import DatasetFinder, FinetuneJob, build_jobs, check_learning_rate, select_remaining_work
from megaenc.finetune.grid.slurm import SlurmConfig, submit_jobs
from megaenc.finetune.grid.worker import RUN_FUNCTION, log_path
from megaenc.finetune.model.fingerprint import save_fingerprints
from megaenc.output_paths import check_parent_writable, create_parent_dir, remove_new_parents_on_error
from megaenc.processes import check_process_count


@dataclass(frozen=True)
class GridConfig:
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
    data: DatasetConfig = field(default_factory=DatasetConfig)
    local: LocalExecution = field(default_factory=LocalExecution)
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    protocol: FinetuneConfig = field(default_factory=FinetuneConfig)


class GridPlan(NamedTuple):
    """What is to be done for a grid, and what has been."""

    jobs: list[FinetuneJob]
    """Every training, in the order of the work."""
    pending: list[FinetuneJob]
    """Those not finished, with the data sets that they have still to be evaluated on."""
    failed: list[tuple[FinetuneJob, Path]]
    """Failed trainings that are not tried again, with the file that says why."""


def plan_grid(settings: GridConfig, find_dataset: DatasetFinder) -> GridPlan:
    """Look at every model, data set and finished result. Raises InputError for what no run could be made of."""
    settings.protocol.check()
    settings.slurm.check()
    for name in ("model", "datasets", "learning_rates"):
        if not getattr(settings, name):
            raise InputError(f"--{name.replace('_', '-')}: found none, expected at least one")
    check_minimums(settings, seeds=1)
    check_minimums(settings.local, jobs=0, jobs_per_gpu=1, hang_minutes=0)
    if not settings.slurm.slurm:  # whose machines have other cores
        check_process_count("--jobs", settings.local.jobs)
        check_process_count("--jobs-per-gpu", settings.local.jobs_per_gpu)
        check_process_count("--threads", settings.protocol.threads)
    for rate in settings.learning_rates:
        check_learning_rate("--learning-rates", rate)
    check_parent_writable(Path(settings.output, "model"), "--output")
    rates, seeds = settings.learning_rates, range(settings.seeds)
    jobs = build_jobs(settings.model, settings.datasets, rates, seeds, settings.output, settings.protocol, settings.data, find_dataset)
    states = [(job, *select_remaining_work(job, retry_failed=settings.local.retry_failed)) for job in jobs]
    pending = [job_left for _, job_left, _ in states if job_left is not None]
    return GridPlan(jobs, pending, [(job, failure_file) for job, _, failure_file in states if failure_file is not None])


def print_grid_size(settings: GridConfig, plan: GridPlan) -> None:
    """Print how large the grid is, in results and trainings, and what of it is left."""
    trainings, evaluations = len(plan.jobs), sum(len(job.evaluate_on) for job in plan.jobs)
    sizes = {"model": len(settings.model), "data set": len(settings.datasets), "rate": len(settings.learning_rates)}
    size = " x ".join(format_count(number, noun) for noun, number in (sizes | {"seed": settings.seeds}).items())
    once = "" if evaluations == trainings else "; retrieval trains once for all its sets"
    print_rank_0(f"{format_count(evaluations, 'result')} from {format_count(trainings, 'training')}: {size}{once}")
    failed_text = f", {len(plan.failed):,} failed before" if plan.failed else ""
    print_rank_0(f"{trainings - len(plan.pending) - len(plan.failed):,} finished{failed_text}, {len(plan.pending):,} to do")


def format_count(number: int, noun: str) -> str:
    """Format `1 model`, `50 models`."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def print_grid_result(
    output: str, failed: Sequence[FailedJob], failed_before: Sequence[tuple[FinetuneJob, Path]], seconds: float
) -> None:
    """Print what has no result and what to do about it. Ends with exit code 1 if there is any, 2 if all of it is wrong input."""
    by_reason: dict[str, list[FinetuneJob]] = defaultdict(list)
    for failure in failed:
        by_reason[failure.reason].append(failure.job)
    for reason, jobs in by_reason.items():
        more = f" and {len(jobs) - 1:,} more" if len(jobs) > 1 else ""
        print_rank_0(f"without result: {jobs[0].name}{more}: {reason}")
    for job, file in failed_before:
        print_rank_0(f"without result: {job.name}: failed before; {file} says why")
    print_rank_0(f"done in {format_duration(seconds)}; see them with `megaenc finetune summary {output}`")
    if failed or failed_before:
        print_rank_0(
            f"without result: {format_count(len(failed) + len(failed_before), 'training')}; the same command tries those that crashed again, "
            "with --retry-failed those with a failed.json too"
        )
        sys.exit(2 if not failed_before and all(failure.is_input_error for failure in failed) else 1)


@handle_command_errors
def grid_main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc finetune grid`."""
    silence_libraries()
    settings = flags.parse_with_config(GridConfig, argv, prog="megaenc finetune grid", description=__doc__)
    from megaenc.finetune.datasets.registry import find_dataset

    run_grid(settings, find_dataset)


def run_grid(settings: GridConfig, find_dataset: DatasetFinder, run_function: str = RUN_FUNCTION) -> None:
    """Plan, say, and do a grid here or on a cluster; ends with exit code 1 (wrong input: 2) if a run has no result."""
    settings = replace(settings, output=str(Path(settings.output).resolve())) if settings.slurm.slurm else settings
    messages: list[str] = []
    with capture_messages(messages.append):
        plan, start_time = plan_grid(settings, find_dataset), time.monotonic()
    print_grid_size(settings, plan)
    if settings.slurm.slurm:
        submit_jobs(plan.pending, run_function, settings.slurm, settings.local, settings.output)
        return
    logs = [log_path(job) for job in plan.pending]
    with remove_new_parents_on_error(*logs, *(Path(settings.output, job.model.name, ".locks", "run") for job in plan.pending)):
        create_parent_dir(Path(settings.output, "model"), "--output")
        with exit_on_sigterm():
            try:
                failed = execute_jobs(plan.pending, run_function, settings.local, messages)
            except (KeyboardInterrupt, SystemExit):
                print_rank_0("what is finished is kept; the same command goes on with the rest")
                raise
            finally:
                if any(path.is_file() for path in Path(settings.output).rglob("*")):
                    save_fingerprints(settings.output)
        print_grid_result(settings.output, failed, plan.failed, time.monotonic() - start_time)
