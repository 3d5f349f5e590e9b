"""A study on a cluster: a Slurm job for each stage that is left, each after those it needs, through submitit."""

import contextlib
import hashlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError
from megaenc.finetune.grid.command import format_count
from megaenc.finetune.grid.slurm import ClusterConfig, import_submitit
from megaenc.processes import python_environment, set_child_environment, with_pdeathsig
from megaenc.study.run import stage_log
from megaenc.study.run.executor import execute_stages, stage_environment
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.stage import StageRunner, finished_stages

_MAX_TIMEOUTS = 1000  # that a job may run into: each time it has come further
_SAVE_SECONDS = 80.0  # seconds: Slurm says so 90 before it ends a job
_POLL_SECONDS = 1.0  # seconds between looks at the first machine's log
_REQUEUE_SECONDS = 300.0  # seconds after which nobody seems to want that any more
_FIRST_PORT, _PORT_COUNT = 20_000, 20_000


@dataclass(frozen=True)
class StageTask:
    """What a job does. It is pickled; this class goes by its name."""

    stage: StageRunner
    study: Path
    count_machines: int = 1

    def __call__(self) -> None:
        """Do the stage, as on one machine. RuntimeError where it was not done: then Slurm does not begin what needs it.

        So does InputError where what is there does not fit what it needs.
        """
        silence_libraries()
        self.stage.check()
        self._with_others() if self.machines > 1 else self._do(self.stage)

    def _do(self, stage: StageRunner, **how: int) -> None:
        """Do it to its end. Told to stop by another than this process (scancel, preemption), it saves and waits to be ended."""
        while failed := execute_stages([stage], self.study, [""] * stage.processes, **how):
            if self._tries()[-1].how != stage_log.STOPPED:
                raise RuntimeError(failed[stage.id])
            time.sleep(_REQUEUE_SECONDS)  # an end before that would be a failure in the eyes of Slurm

    def _with_others(self) -> None:
        """One torchrun on each machine; the first keeps log and lock."""
        import submitit

        job, each = submitit.JobEnvironment(), self.stage.processes // self.machines
        port = _FIRST_PORT + int(job.raw_job_id) % _PORT_COUNT
        where = ("--node-rank", str(job.node), "--master-addr", job.hostnames[0], "--master-port", str(port))
        stage = replace(self.stage, processes=each, launcher=("--nnodes", str(self.machines), *where))
        if job.node == 0:
            self._do(stage, tries=1)
            return
        if not stage.is_done() and (
            code := subprocess.run(with_pdeathsig(stage.next_command()), env=stage_environment([""], each)).returncode
        ):
            if self._first_was_stopped():
                time.sleep(_REQUEUE_SECONDS)
            raise RuntimeError(f"{stage.id}: exit code {code} on {job.hostname}")

    def _tries(self) -> list[stage_log.Attempt]:
        return stage_log.read_attempts(stage_log.log_path(self.study, self.stage.id))

    def _first_was_stopped(self) -> bool:
        """Wait for what the first machine writes in the log."""
        deadline = time.monotonic() + _SAVE_SECONDS
        while time.monotonic() < deadline:
            if (tries := self._tries()) and tries[-1].end_time is not None:
                return tries[-1].outcome == stage_log.STOPPED
            time.sleep(_POLL_SECONDS)
        return False

    def checkpoint(self) -> Any:
        """What submitit queues when the job's time is over or it is preempted: the same, which goes on from what is saved now."""
        from submitit.helpers import DelayedSubmission

        children = psutil.Process().children()
        for child in children:
            child.terminate()
        psutil.wait_procs(children, timeout=_SAVE_SECONDS)
        return DelayedSubmission(self)


def count_machines(cluster: ClusterConfig, stage: StageRunner) -> int:
    """Of a stage's job: as many as its processes take, without GPUs one. InputError where they cannot be shared out."""
    gpus = cluster.slurm_gpus
    if not gpus or stage.processes <= gpus:
        return 1
    if stage.processes % gpus:
        raise InputError(f"--slurm-gpus {gpus}: {stage.id} has {stage.processes} processes, expected a number that divides it")
    return stage.processes // gpus


def submit_stages(stages: Sequence[StageRunner], study: Path, cluster: ClusterConfig) -> dict[str, list[Any]]:
    """Submit what is left of `stages`, neither done nor queued; returns submitit's jobs by stage. InputError where it cannot be.

    submitit's own executors know no dependencies: with these, a stage is submitted when those that it needs have ended.
    """
    submitit = import_submitit()
    on_slurm = cluster.slurm_cluster == "slurm"
    ids = read_queue(study) if on_slurm else {}
    jobs: dict[str, list[Any]] = {}
    done = finished_stages(stages)
    left = [stage for stage in stages if stage.id not in done]
    before = [stage.id for stage in left if stage.id in ids]
    for stage in left:
        if stage.id in before:
            continue
        needs = [need for need in stage.needs if need in ids]
        if not on_slurm and not all(_has_succeeded(job) for need in needs for job in jobs[need]):
            print_rank_0(f"{stage.id}: not submitted, as what it needs has failed")
            continue
        after = [ids[need] for need in needs]
        try:
            with set_child_environment(python_environment()):
                jobs[stage.id] = _submit_stage(submitit, stage, study, cluster, after)
        except (RuntimeError, ValueError, NameError, OSError, submitit.core.utils.FailedJobError) as error:
            raise InputError(f"--slurm: {stage.id} could not be submitted: {error}") from None
        ids[stage.id] = jobs[stage.id][0].job_id.partition("_")[0]
        print_rank_0(f"{stage.id}: job {ids[stage.id]}" + (f" after {', '.join(after)}" if after else ""))
    if cluster.slurm_cluster == "debug":
        for job in (job for several in jobs.values() for job in several):
            _has_succeeded(job)
    waiting = f", {len(before):,} in the queue already" if before else ""
    done = f"{format_count(len(stages), 'stage')}: {len(stages) - len(left):,} done before{waiting}, {len(jobs):,} submitted"
    print_rank_0(f"{done}; what they say: {study / 'logs'}")
    print_rank_0("`megaenc study status` shows how far they are; the same command again submits what is missing then")
    return jobs


def _submit_stage(submitit: Any, stage: StageRunner, study: Path, cluster: ClusterConfig, after: Sequence[str]) -> list[Any]:
    """Return the job of a stage, or those of the array of a grid's parts."""
    together, asked = count_machines(cluster, stage), cluster.build_submitit_parameters()
    parts = [part for part in stage.split_by_training_set() if not part.is_done()] if isinstance(stage, FinetuneStage) else []
    tasks = [StageTask(part, study, together) for part in parts or [stage]]  # a grid that is all there is still to be compared
    if cluster.slurm_cluster == "slurm":
        extra = asked.pop("slurm_additional_parameters", {})
        if after:
            extra = {**extra, "dependency": f"afterok:{':'.join(after)}", "kill-on-invalid-dep": "yes"}
        per_machine = min(cluster.slurm_gpus, stage.processes) if isinstance(stage, PretrainStage) else cluster.slurm_gpus
        asked |= {"gpus_per_node": per_machine} if per_machine else {}
        asked |= {"nodes": together, "tasks_per_node": 1, "slurm_additional_parameters": extra}
    logs, kind = study / ".slurm" / "%j", cluster.slurm_cluster
    executor = submitit.AutoExecutor(folder=logs, cluster=kind, slurm_max_num_timeout=_MAX_TIMEOUTS)
    executor.update_parameters(name=job_name(study, stage.id), timeout_min=cluster.slurm_minutes, **asked)
    with executor.batch() if len(tasks) > 1 else contextlib.nullcontext():
        return [executor.submit(task) for task in tasks]


def _has_succeeded(job: Any) -> bool:
    """Wait for a job of submitit's own executors."""
    try:
        job.result()
    except Exception as error:
        print_rank_0(f"job {job.job_id}: {str(error).strip().splitlines()[-1]}")
        return False
    return True


def job_name(study: Path, stage: str) -> str:
    """Return what a stage's job is called in the queue, unlike those of other studies."""
    return f"{stage}:{hashlib.sha256(str(study).encode()).hexdigest()[:8]}"


def read_queue(study: Path) -> dict[str, str]:
    """The jobs of a study that wait or run: job ids by stage. Raises InputError where the queue cannot be asked."""
    try:
        asked = subprocess.run(["squeue", "--me", "--noheader", "--format=%F %j"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--slurm: squeue cannot be asked: {error}; expected to be on a cluster") from None
    if asked.returncode:
        raise InputError(f"--slurm: squeue cannot be asked: {asked.stderr.strip()}")
    mark = job_name(study, "")
    jobs = (line.strip().partition(" ") for line in asked.stdout.splitlines())
    return {name.removesuffix(mark): id for id, _, name in jobs if name.endswith(mark)}
