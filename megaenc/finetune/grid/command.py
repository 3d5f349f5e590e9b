"""Fine-tune every model on every data set (`megaenc finetune grid`).

A grid has a run for each learning rate and seed.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from megaenc import flags
from megaenc.console import (
    capture_messages,
    format_count,
    format_duration,
    print_rank_0,
    silence_libraries,
)
from megaenc.errors import InputError, handle_command_errors
from megaenc.finetune.config import LEARNING_RATES, FinetuneConfig
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.grid.executor import FailedJob, LocalExecution, execute_jobs
from megaenc.finetune.grid.jobs import DatasetFinder, build_jobs, select_remaining_work
from megaenc.finetune.grid.slurm import SlurmConfig, submit_jobs
from megaenc.finetune.grid.worker import RUN_FUNCTION, log_path
from megaenc.finetune.job import FinetuneJob
from megaenc.finetune.model.fingerprint import save_fingerprints
from megaenc.finetune.results import files as result_files
from megaenc.flags import PositiveFloat, PositiveInt
from megaenc.machine import check_process_count
from megaenc.output_paths import (
    check_parent_writable,
    create_parent_dir,
    remove_new_parents_on_error,
)
from megaenc.processes import exit_on_sigterm


@dataclass(frozen=True)
class GridConfig:
    """Options of `megaenc finetune grid`: models, data sets, rates, seeds, execution.

    Each field, and each of the nested `data`, `local` (LocalExecution), `slurm` and `protocol`
    (FinetuneConfig), is a flag, read by `flags.parse_with_config`. `model`, directories,
    `datasets`, names or paths, and `learning_rates` are tuples that must not stay empty, which only
    `plan_grid` checks. `config` is a YAML file of flags. There is a run for each of the rates and
    of `seeds`, a number: 5 stands for 0 to 4. `output` is the directory of results, whose finished
    runs are not repeated, and `keep` tells which models are written there: "none", "best" or "all".
    """

    config: str = ""
    """YAML file of flags, or name of a packaged one; flags on the command line override it"""
    model: tuple[str, ...] = ()
    """Hugging Face directories of encoders or decoders; the last part names the results,
    NAME=DIRECTORY gives another name"""
    datasets: tuple[str, ...] = ()
    """data sets by name or path, like --dataset of `megaenc finetune run`"""
    learning_rates: tuple[PositiveFloat, ...] = LEARNING_RATES
    """peak learning rates; every model is fine-tuned on every data set with each"""
    seeds: PositiveInt = 5
    """number of seeds, from 0, for each learning rate"""
    output: str = "results"
    """directory of results; runs that are finished there are not repeated"""
    keep: Literal["none", "best", "all"] = "none"
    """models to write, in Hugging Face's format, to `model` in the results of their run: none, all,
    or best, the one of the best validation score for each model and training set; runs that were
    finished before have none"""
    data: DatasetConfig = field(default_factory=DatasetConfig)
    """how local data is read"""
    local: LocalExecution = field(default_factory=LocalExecution)
    """processes of a grid on this machine"""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """submission of a grid to Slurm"""
    protocol: FinetuneConfig = field(default_factory=FinetuneConfig)
    """fine-tuning protocol, the same for all runs of a comparison"""


class GridPlan(NamedTuple):
    """All jobs of a grid, the unfinished ones, and those that failed before.

    `jobs` has all. `pending` has the jobs to run, with only the data sets that lack results, and so
    also failed jobs that are to be repeated. `failed` has (job, path of failed.json) of other
    failed jobs.
    """

    jobs: list[FinetuneJob]
    """All jobs, in order of execution."""
    pending: list[FinetuneJob]
    """Unfinished jobs, with the data sets that they lack results for."""
    failed: list[tuple[FinetuneJob, Path]]
    """Failed jobs that are not to be repeated, with their failed.json."""


def plan_grid(settings: GridConfig, find_dataset: DatasetFinder) -> GridPlan:
    """Return the jobs of a grid, and which of them remain by their results so far.

    Model weights are read to fingerprint them, unless a cache, which is not written here, has their
    fingerprints.

    Args:
        find_dataset: Function like `registry.find_dataset`.

    Raises:
        InputError: A flag, model or data set is wrong, or results in the output directory are of
            other settings, models or data.
    """
    settings.protocol.check()
    for name in ("model", "datasets", "learning_rates"):
        if not getattr(settings, name):
            raise InputError(f"--{name.replace('_', '-')}: found none, expected at least one")
    if not settings.slurm.slurm:  # the cluster's machines may have more cores
        check_process_count("--jobs", settings.local.jobs)
        check_process_count("--jobs-per-gpu", settings.local.jobs_per_gpu)
        check_process_count("--threads", settings.protocol.threads)
    check_parent_writable(Path(settings.output, "model"), "--output")
    jobs = build_jobs(
        settings.model,
        settings.datasets,
        settings.learning_rates,
        range(settings.seeds),
        settings.output,
        settings.protocol,
        settings.data,
        find_dataset,
    )
    jobs = [replace(job, keep=settings.keep) for job in jobs]
    pending = []
    failed = []
    for job in jobs:
        unfinished, failure_file = select_remaining_work(
            job, retry_failed=settings.local.retry_failed
        )
        if unfinished is not None:
            pending.append(unfinished)
        if failure_file is not None:
            failed.append((job, failure_file))
    return GridPlan(jobs, pending, failed)


def print_grid_size(settings: GridConfig, plan: GridPlan) -> None:
    """Print how many trainings a grid has, and how many are finished, failed or to do.

    A further line gives the number of finished trainings that lack a model that --keep asks for.
    """
    trainings = len(plan.jobs)
    evaluations = sum(len(job.evaluate_on) for job in plan.jobs)
    sizes = {
        "model": len(settings.model),
        "data set": len(settings.datasets),
        "rate": len(settings.learning_rates),
    }
    size = " x ".join(
        format_count(count, noun) for noun, count in (sizes | {"seed": settings.seeds}).items()
    )
    once = "" if evaluations == trainings else "; retrieval trains once for all its sets"
    print_rank_0(
        f"{format_count(evaluations, 'result')} from {format_count(trainings, 'training')}: "
        f"{size}{once}"
    )
    failed_text = f", {len(plan.failed):,} failed before" if plan.failed else ""
    print_rank_0(
        f"{trainings - len(plan.pending) - len(plan.failed):,} finished{failed_text}, "
        f"{len(plan.pending):,} to do"
    )
    if unkept := _count_unkept(plan):
        print_rank_0(
            f"--keep {settings.keep}: {format_count(unkept, 'finished run')} without a model; "
            "choose another --output"
        )


def _count_unkept(plan: GridPlan) -> int:
    """Return the number of finished runs that lack a model that --keep asks for."""
    unfinished = {job.name for job in (*plan.pending, *(job for job, _ in plan.failed))}
    kept: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for job in plan.jobs:
        if job.keep != "none" and job.name not in unfinished:
            directories = (
                result_files.job_directory(job, dataset.name) for dataset in job.evaluate_on
            )
            has_model = any(
                (directory / result_files.KEPT_MODEL).is_dir() for directory in directories
            )
            kept[job.name if job.keep == "all" else job.model.name, job.train_on].append(has_model)
    return sum(len(group) for group in kept.values() if not any(group))


def print_grid_result(
    output: str,
    failed: Sequence[FailedJob],
    failed_before: Sequence[tuple[FinetuneJob, Path]],
    seconds: float,
) -> None:
    """Print jobs without result by reason, and the time; exit if there is such a job.

    The exit code is 2 if none failed before and all had wrong input, else 1.

    Args:
        output: Directory of results, for the printed command.
        failed: Jobs that ended without results now.
        failed_before: Jobs that were not repeated, with their failed.json.
        seconds: Duration of the grid.
    """
    by_reason: dict[str, list[FinetuneJob]] = defaultdict(list)
    for failure in failed:
        by_reason[failure.reason].append(failure.job)
    for reason, jobs in by_reason.items():
        more = f" and {len(jobs) - 1:,} more" if len(jobs) > 1 else ""
        print_rank_0(f"without result: {jobs[0].name}{more}: {reason}")
    for job, file in failed_before:
        print_rank_0(f"without result: {job.name}: failed before; {file} says why")
    print_rank_0(
        f"done in {format_duration(seconds)}; "
        f"print the results with `megaenc finetune summary {output}`"
    )
    if failed or failed_before:
        trainings = format_count(len(failed) + len(failed_before), "training")
        print_rank_0(
            f"without result: {trainings}; the same command repeats those that crashed, "
            "with --retry-failed also those with a failed.json"
        )
        sys.exit(
            2 if not failed_before and all(failure.is_input_error for failure in failed) else 1
        )


@handle_command_errors
def grid_main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc finetune grid`: do the missing trainings, locally or on Slurm.

    Wrong input exits with 2; see `run_grid` for other exit codes.

    Args:
        argv: Arguments after `megaenc finetune grid`; None: `sys.argv[1:]`.
    """
    silence_libraries()
    settings = flags.parse_with_config(
        GridConfig, argv, prog="megaenc finetune grid", description=__doc__
    )
    from megaenc.finetune.datasets.registry import find_dataset

    run_grid(settings, find_dataset)


def run_grid(
    settings: GridConfig, find_dataset: DatasetFinder, run_function: str = RUN_FUNCTION
) -> None:
    """Run a grid's unfinished jobs on this machine, or submit them to Slurm.

    A submission is not waited for. On this machine SystemExit is raised if a job has no result:
    with 2 if each of these had wrong input in this call, else with 1.

    Args:
        find_dataset: Function like `registry.find_dataset`.
        run_function: Function that runs a job, as module:name (see RUN_FUNCTION).

    Raises:
        InputError: A flag, model or data set is wrong, or the submission fails.
    """
    if settings.slurm.slurm:
        settings = replace(settings, output=str(Path(settings.output).resolve()))
    messages: list[str] = []
    with capture_messages(messages.append):
        plan = plan_grid(settings, find_dataset)
        start_time = time.monotonic()
    print_grid_size(settings, plan)
    if settings.slurm.slurm:
        submit_jobs(plan.pending, run_function, settings.slurm, settings.local, settings.output)
        save_fingerprints(settings.output)
        return
    logs = [log_path(job) for job in plan.pending]
    with remove_new_parents_on_error(
        *logs, *(Path(settings.output, job.model.name, ".locks", "run") for job in plan.pending)
    ):
        create_parent_dir(Path(settings.output, "model"), "--output")
        with exit_on_sigterm():
            try:
                failed = execute_jobs(plan.pending, run_function, settings.local, messages)
            except (KeyboardInterrupt, SystemExit):
                print_rank_0(
                    "stopped; finished runs are kept, and the same command resumes the rest"
                )
                raise
            finally:
                if any(path.is_file() for path in Path(settings.output).rglob("*")):
                    save_fingerprints(settings.output)
        print_grid_result(settings.output, failed, plan.failed, time.monotonic() - start_time)
