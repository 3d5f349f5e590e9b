"""Submission to Slurm through submitit, for grids and studies."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megaenc.errors import InputError
from megaenc.flags import NonNegativeInt, PositiveInt
from megaenc.processes import python_environment, set_child_environment

_MAX_TIMEOUTS = 1000  # requeues per job: each time it has progressed further


@dataclass(frozen=True)
class ClusterConfig:
    """Flags of submission to Slurm, for commands that run grids and studies.

    Each field is a flag. `slurm` submits the work instead of running it here. A job has
    `slurm_gpus` GPUs and `slurm_cpus` cores on each node of `slurm_partition` ("": the default one)
    for `slurm_minutes` minutes; `slurm_parallel` tasks of an array run at a time, and `slurm_extra`
    is a tuple of options of sbatch as key=value. `slurm_cluster` is submitit's executor, "slurm"
    except in tests.
    """

    slurm: bool = False
    """submit the pending work to Slurm instead of running it on this machine"""
    slurm_partition: str = ""
    """partition; by default the cluster's default"""
    slurm_minutes: PositiveInt = 240
    """time limit of a job in minutes; a job that reaches it is requeued and resumes"""
    slurm_gpus: NonNegativeInt = 1
    """GPUs of a job on each node"""
    slurm_cpus: PositiveInt = 8
    """CPU cores of a job on each node"""
    slurm_parallel: PositiveInt = 256
    """maximum number of concurrent tasks of an array"""
    slurm_extra: tuple[str, ...] = ()
    """further options of sbatch as key=value: account=abc qos=long constraint=MI250"""
    slurm_cluster: Literal["slurm", "local", "debug"] = "slurm"
    """submitit's executor; for tests without a cluster, `local` runs all jobs on this machine in
    the background at once and `debug` runs them in this process"""

    def build_submitit_parameters(self) -> dict[str, Any]:
        """Return Slurm's parameters by submitit's names; {} for any other executor.

        The time limit is not among them: `submit_tasks` sets it.

        Raises:
            InputError: --slurm-extra is not key=value.
        """
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
    """Return the module submitit.

    Raises:
        InputError: It is not installed.
    """
    try:
        import submitit
    except ImportError:
        raise InputError(
            "--slurm: submitit is not installed; install it with `pip install submitit`"
        ) from None
    return submitit


def submit_tasks(
    tasks: Sequence[Callable[[], Any]],
    logs: Path,
    name: str,
    cluster: ClusterConfig,
    parameters: Mapping[str, Any],
) -> list[Any]:
    """Submit picklable `tasks` to Slurm; return a submitit Job for each, in order.

    One task, a function without arguments, is a job; several are a job array. None is waited for.

    Args:
        logs: Directory of submitit's files, one subdirectory for each job; created if missing.
        name: Name of the job.
        cluster: Executor and time limit in minutes; its other flags are not read.
        parameters: Further parameters by submitit's names (see `build_submitit_parameters`).

    Raises:
        InputError: submitit is not installed, or submission fails.
    """
    submitit = import_submitit()
    try:
        executor = submitit.AutoExecutor(
            folder=logs / "%j",
            cluster=cluster.slurm_cluster,
            slurm_max_num_timeout=_MAX_TIMEOUTS,
        )
        executor.update_parameters(name=name, timeout_min=cluster.slurm_minutes, **parameters)
        is_array = len(tasks) > 1
        with (
            set_child_environment(python_environment()),
            executor.batch() if is_array else contextlib.nullcontext(),
        ):
            return [executor.submit(task) for task in tasks]
    except (
        RuntimeError,
        ValueError,
        NameError,
        OSError,
        submitit.core.utils.FailedJobError,
    ) as error:
        raise InputError(f"--slurm: {name} could not be submitted: {error}") from None
