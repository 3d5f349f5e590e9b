"""The same grid on a cluster: an array of Slurm jobs through submitit, each task with a part of the runs."""

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
    """How work is given to a cluster."""

    slurm: bool = False
    """submit what is left as Slurm jobs instead of doing it here"""
    slurm_partition: str = ""
    """partition; the cluster's own unless given"""
    slurm_minutes: int = 240
    """longest time of a job; one that runs into it is requeued and goes on"""
    slurm_gpus: int = 1
    """GPUs of a job on each machine"""
    slurm_cpus: int = 8
    """cores of a job on each machine"""
    slurm_parallel: int = 256
    """tasks of an array at a time at most"""
    slurm_extra: tuple[str, ...] = ()
    """more for sbatch, as key=value: account=abc qos=long constraint=MI250"""
    slurm_cluster: Literal["slurm", "local", "debug"] = "slurm"
    """submitit's executor; to try it without a cluster: `local` does the jobs on this machine in the background, all at once,
    `debug` in this very process"""

    def check(self) -> None:
        """Raise InputError for a number that is too small."""
        check_minimums(self, slurm_minutes=1, slurm_gpus=0, slurm_cpus=1, slurm_parallel=1)

    def build_submitit_parameters(self) -> dict[str, Any]:
        """Return Slurm's parameters for submitit's executor; none for its own executors. Raises InputError."""
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
    """Return the module submitit. Raises InputError if it is not installed."""
    try:
        import submitit
    except ImportError:
        raise InputError("--slurm: submitit is not installed; install it with `pip install submitit`") from None
    return submitit


@dataclass(frozen=True)
class SlurmConfig(ClusterConfig):
    """How the grid is given to a cluster: as one array."""

    jobs_per_task: int = 30
    """runs of a task, one after another or as many at a time as --jobs and --jobs-per-gpu say"""

    def check(self) -> None:
        """Raise InputError for a number that is too small."""
        super().check()
        check_minimums(self, jobs_per_task=1)


@dataclass(frozen=True)
class SlurmTask:
    """What a task does. It is pickled; `run` and this class go by their names."""

    jobs: tuple[FinetuneJob, ...]
    run_function: str
    local: LocalExecution

    def __call__(self) -> int:
        """Do the runs that are not finished yet as a grid on this machine; return how many have no result."""
        from megaenc.console import silence_libraries

        silence_libraries()
        return len(execute_jobs(self.jobs, self.run_function, self.local))

    def checkpoint(self) -> Any:
        """Return what submitit queues when the time of a task is over: the same again, which resumes."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit_jobs(jobs: Sequence[FinetuneJob], run_function: str, settings: SlurmConfig, local: LocalExecution, output: str) -> list[Any]:
    """Submit `jobs` as one array and say its ids; return submitit's jobs. Raises InputError where that cannot be."""
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
    print_rank_0(f"submitted {len(jobs):,} runs as {len(tasks):,} tasks of up to {size}: {id_range}; what they say: {logs}")
    print_rank_0(
        f"`squeue --me` shows them, `megaenc finetune summary {output}` what is finished; the same command again what is missing"
    )
    return submitted
