"""Submission of a grid to Slurm through submitit, as a job array whose tasks run a part of the jobs each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.finetune.config import check_minimums
from megaenc.finetune.grid.executor import LocalExecution, execute_jobs
from megaenc.finetune.grid.jobs import FinetuneJob
from megaenc.processes import python_environment, set_child_environment


@dataclass(frozen=True)
class ClusterConfig:
    """Options of submission to Slurm: partition, time limit, GPUs and cores of a job, concurrent tasks, sbatch options."""

    slurm: bool = False
    """submit the pending work to Slurm instead of running it on this machine"""
    slurm_partition: str = ""
    """partition; by default the cluster's default"""
    slurm_minutes: int = 240
    """time limit of a job in minutes; a job that reaches it is requeued and resumes"""
    slurm_gpus: int = 1
    """GPUs of a job on each node"""
    slurm_cpus: int = 8
    """CPU cores of a job on each node"""
    slurm_parallel: int = 256
    """maximum number of concurrent tasks of an array"""
    slurm_extra: tuple[str, ...] = ()
    """further options of sbatch as key=value: account=abc qos=long constraint=MI250"""
    slurm_cluster: Literal["slurm", "local", "debug"] = "slurm"
    """submitit's executor; for tests without a cluster, `local` runs all jobs on this machine in the background at once and
    `debug` runs them in this process"""

    def check(self) -> None:
        """Raise InputError if the minutes, CPU cores or concurrent tasks are below 1, or the GPUs below 0."""
        check_minimums(self, slurm_minutes=1, slurm_gpus=0, slurm_cpus=1, slurm_parallel=1)

    def build_submitit_parameters(self) -> dict[str, Any]:
        """Return Slurm's parameters by submitit's names, {} for its other executors; InputError for bad --slurm-extra."""
        if self.slurm_cluster != "slurm":
            return {}
        for text in self.slurm_extra:
            if text.find("=") < 1:
                raise InputError(f"--slurm-extra: found {text!r}, expected key=value")
        extra = dict(text.split("=", 1) for text in self.slurm_extra)
        return {
            "cpus_per_task": self.slurm_cpus,
            "gpus_per_node": self.slurm_gpus,
            "slurm_array_parallelism": self.slurm_parallel,
            **({"slurm_partition": self.slurm_partition} if self.slurm_partition else {}),
            **({"slurm_additional_parameters": extra} if extra else {}),
        }


def import_submitit() -> Any:
    """Import the package submitit and return the module; InputError if it is not installed."""
    try:
        import submitit
    except ImportError:
        raise InputError("--slurm: submitit is not installed; install it with `pip install submitit`") from None
    return submitit


@dataclass(frozen=True)
class SlurmConfig(ClusterConfig):
    """Options of submission of a grid to Slurm as one job array: those of any submission, and the runs of a task."""

    jobs_per_task: int = 30
    """runs of a task; --jobs and --jobs-per-gpu limit how many are concurrent"""

    def check(self) -> None:
        """Raise InputError if runs of a task, minutes, CPU cores or concurrent tasks are below 1, or GPUs below 0."""
        super().check()
        check_minimums(self, jobs_per_task=1)


@dataclass(frozen=True)
class SlurmTask:
    """Picklable task of a job array: a call runs its unfinished jobs and returns the number of jobs without results."""

    jobs: tuple[FinetuneJob, ...]
    run_function: str
    local: LocalExecution

    def __call__(self) -> int:
        """Run the unfinished jobs on this machine; return the number of jobs without results."""
        from megaenc.console import silence_libraries

        silence_libraries()
        return len(execute_jobs(self.jobs, self.run_function, self.local))

    def checkpoint(self) -> Any:
        """Return submitit's DelayedSubmission of the same task, to requeue at the time limit; finished jobs stay."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_jobs(
    jobs: Sequence[FinetuneJob], run_function: str, settings: SlurmConfig, local: LocalExecution, output: str
) -> list[Any]:
    """Submit `jobs` to Slurm as one array and print its ids; return submitit's job of each task. InputError if it fails."""
    if not jobs:
        print_rank_0("nothing to submit")
        return []
    submitit, size = import_submitit(), settings.jobs_per_task
    tasks = [SlurmTask(tuple(jobs[at : at + size]), run_function, local) for at in range(0, len(jobs), size)]
    logs, parameters = Path(output, ".slurm"), settings.build_submitit_parameters()
    try:
        executor = submitit.AutoExecutor(folder=logs / "%j", cluster=settings.slurm_cluster)
        executor.update_parameters(name="megaenc-finetune", timeout_min=settings.slurm_minutes, **parameters)
        with set_child_environment(python_environment()), executor.batch():
            submitted = [executor.submit(part) for part in tasks]
        ids = [job.job_id for job in submitted]
    except (RuntimeError, ValueError, NameError, OSError, submitit.core.utils.FailedJobError) as error:
        raise InputError(f"--slurm: could not be submitted: {error}") from None
    id_range = ids[0] if len(ids) == 1 else f"{ids[0]} to {ids[-1]}"
    print_rank_0(f"submitted {len(jobs):,} runs as {len(tasks):,} tasks of up to {size}: {id_range}; logs: {logs}")
    print_rank_0(
        f"`squeue --me` lists them, `megaenc finetune summary {output}` prints finished results; run the same command again to "
        "submit missing ones"
    )
    return submitted
