"""Submission of a grid to Slurm through submitit, as a job array.

Each task of the array runs a part of the jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.console import print_rank_0
from megaenc.finetune.grid.cluster import ClusterConfig, submit_tasks
from megaenc.finetune.grid.executor import LocalExecution, execute_jobs
from megaenc.finetune.job import FinetuneJob
from megaenc.flags import PositiveInt


@dataclass(frozen=True)
class SlurmConfig(ClusterConfig):
    """Options of the submission of a grid to Slurm as one job array.

    Each field is a flag, also those of ClusterConfig. A task of the array has `jobs_per_task` runs.
    """

    jobs_per_task: PositiveInt = 30
    """runs of a task; --jobs and --jobs-per-gpu limit how many are concurrent"""


@dataclass(frozen=True)
class SlurmTask:
    """Picklable task of a job array: a function without arguments that runs `jobs`.

    It returns the number of jobs without results. `run_function`, as module:name, runs a job, and
    `local` has the options on the task's machine.
    """

    jobs: tuple[FinetuneJob, ...]
    run_function: str
    local: LocalExecution

    def __call__(self) -> int:
        """Run the unfinished jobs on this machine; return the number without results."""
        from megaenc.console import silence_libraries

        silence_libraries()
        return len(execute_jobs(self.jobs, self.run_function, self.local))

    def checkpoint(self) -> Any:
        """Return submitit's DelayedSubmission of the same task.

        submitit requeues the task with it at the time limit. Results of finished jobs stay.
        """
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_jobs(
    jobs: Sequence[FinetuneJob],
    run_function: str,
    settings: SlurmConfig,
    local: LocalExecution,
    output: str,
) -> list[Any]:
    """Submit `jobs` to Slurm as one array, without waiting, and print its ids.

    Args:
        run_function: Function that runs a job, as module:name (see RUN_FUNCTION).
        settings, local: Options of Slurm (`jobs_per_task` jobs share a task), and of each task.
        output: Directory of results, whose directory .slurm gets the logs.

    Returns:
        submitit's job of each task; [] without jobs.

    Raises:
        InputError: The submission fails.
    """
    if not jobs:
        print_rank_0("nothing to submit")
        return []
    size = settings.jobs_per_task
    tasks = [
        SlurmTask(tuple(jobs[start : start + size]), run_function, local)
        for start in range(0, len(jobs), size)
    ]
    logs = Path(output, ".slurm")
    submitted = submit_tasks(
        tasks, logs, "megaenc-finetune", settings, settings.build_submitit_parameters()
    )
    ids = [job.job_id for job in submitted]
    id_range = ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]}"
    print_rank_0(
        f"submitted {len(jobs):,} runs as {len(tasks):,} tasks of up to {size}: {id_range}; "
        f"logs: {logs}"
    )
    print_rank_0(
        f"`squeue --me` lists them, `megaenc finetune summary {output}` prints finished results; "
        "run the same command again to submit missing ones"
    )
    return submitted
