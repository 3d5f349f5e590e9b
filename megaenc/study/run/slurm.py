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

from megaenc.console import print_rank_0, quiet
from megaenc.errors import InputError
from megaenc.finetune.grid.command import count
from megaenc.finetune.grid.slurm import Cluster, import_submitit
from megaenc.processes import environment_for_children, python_environment, with_pdeathsig
from megaenc.study.run import stage_log
from megaenc.study.run.executor import environment, execute
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.stage import StageRunner, finished

_TIMEOUTS = 1000  # that a job may run into: each time it has come further
_TO_SAVE = 80.0  # seconds: Slurm says so 90 before it ends a job
_LOOK = 1.0  # seconds between looks at the first machine's log
_TO_BE_ENDED = 300.0  # seconds after which nobody seems to want that any more
_FIRST_PORT, _PORTS = 20_000, 20_000


@dataclass(frozen=True)
class StageTask:
    """What a job does. It is pickled; this class goes by its name."""

    node: StageRunner
    study: Path
    machines: int = 1

    def __call__(self) -> None:
        """Do the stage, as on one machine. RuntimeError where it was not done: then Slurm does not begin what needs it.

        So does InputError where what is there does not fit what it needs.
        """
        quiet()
        self.node.check()
        self._with_others() if self.machines > 1 else self._do(self.node)

    def _do(self, node: StageRunner, **how: int) -> None:
        """Do it to its end. Told to stop by another than this process (scancel, preemption), it saves and waits to be ended."""
        while failed := execute([node], self.study, [""] * node.processes, **how):
            if self._tries()[-1].how != stage_log.STOPPED:
                raise RuntimeError(failed[node.id])
            time.sleep(_TO_BE_ENDED)  # an end before that would be a failure in the eyes of Slurm

    def _with_others(self) -> None:
        """One torchrun on each machine; the first keeps log and lock."""
        import submitit

        job, each = submitit.JobEnvironment(), self.node.processes // self.machines
        port = _FIRST_PORT + int(job.raw_job_id) % _PORTS
        where = ("--node-rank", str(job.node), "--master-addr", job.hostnames[0], "--master-port", str(port))
        node = replace(self.node, processes=each, launcher=("--nnodes", str(self.machines), *where))
        if job.node == 0:
            self._do(node, tries=1)
            return
        if not node.done() and (code := subprocess.run(with_pdeathsig(node.command()), env=environment([""], each)).returncode):
            if self._first_was_stopped():
                time.sleep(_TO_BE_ENDED)
            raise RuntimeError(f"{node.id}: exit code {code} on {job.hostname}")

    def _tries(self) -> list[stage_log.Attempt]:
        return stage_log.tries(stage_log.log_of(self.study, self.node.id))

    def _first_was_stopped(self) -> bool:
        """Wait for what the first machine writes in the log."""
        deadline = time.monotonic() + _TO_SAVE
        while time.monotonic() < deadline:
            if (tries := self._tries()) and tries[-1].ended is not None:
                return tries[-1].how == stage_log.STOPPED
            time.sleep(_LOOK)
        return False

    def checkpoint(self) -> Any:
        """What submitit queues when the job's time is over or it is preempted: the same, which goes on from what is saved now."""
        from submitit.helpers import DelayedSubmission

        children = psutil.Process().children()
        for child in children:
            child.terminate()
        psutil.wait_procs(children, timeout=_TO_SAVE)
        return DelayedSubmission(self)


def machines(cluster: Cluster, node: StageRunner) -> int:
    """Of a stage's job: as many as its processes take, without GPUs one. InputError where they cannot be shared out."""
    gpus = cluster.slurm_gpus
    if not gpus or node.processes <= gpus:
        return 1
    if node.processes % gpus:
        raise InputError(f"--slurm-gpus {gpus}: {node.id} has {node.processes} processes, expected a number that divides it")
    return node.processes // gpus


def submit(nodes: Sequence[StageRunner], study: Path, cluster: Cluster) -> dict[str, list[Any]]:
    """Submit what is left of `nodes`, neither done nor queued; returns submitit's jobs by stage. InputError where it cannot be.

    submitit's own executors know no dependencies: with these, a stage is submitted when those that it needs have ended.
    """
    submitit = import_submitit()
    on_slurm = cluster.slurm_cluster == "slurm"
    ids = queued(study) if on_slurm else {}
    jobs: dict[str, list[Any]] = {}
    done = finished(nodes)
    left = [node for node in nodes if node.id not in done]
    before = [node.id for node in left if node.id in ids]
    for node in left:
        if node.id in before:
            continue
        needs = [need for need in node.needs if need in ids]
        if not on_slurm and not all(_ended_well(job) for need in needs for job in jobs[need]):
            print_rank_0(f"{node.id}: not submitted, as what it needs has failed")
            continue
        after = [ids[need] for need in needs]
        try:
            with environment_for_children(python_environment()):
                jobs[node.id] = _submit_one(submitit, node, study, cluster, after)
        except (RuntimeError, ValueError, NameError, OSError, submitit.core.utils.FailedJobError) as error:
            raise InputError(f"--slurm: {node.id} could not be submitted: {error}") from None
        ids[node.id] = jobs[node.id][0].job_id.partition("_")[0]
        print_rank_0(f"{node.id}: job {ids[node.id]}" + (f" after {', '.join(after)}" if after else ""))
    if cluster.slurm_cluster == "debug":
        for job in (job for several in jobs.values() for job in several):
            _ended_well(job)
    waiting = f", {len(before):,} in the queue already" if before else ""
    done = f"{count(len(nodes), 'stage')}: {len(nodes) - len(left):,} done before{waiting}, {len(jobs):,} submitted"
    print_rank_0(f"{done}; what they say: {study / 'logs'}")
    print_rank_0("`megaenc study status` shows how far they are; the same command again submits what is missing then")
    return jobs


def _submit_one(submitit: Any, node: StageRunner, study: Path, cluster: Cluster, after: Sequence[str]) -> list[Any]:
    """Return the job of a stage, or those of the array of a grid's parts."""
    together, asked = machines(cluster, node), cluster.asked()
    parts = [part for part in node.parts() if not part.done()] if isinstance(node, FinetuneStage) else []
    tasks = [StageTask(part, study, together) for part in parts or [node]]  # a grid that is all there is still to be compared
    if cluster.slurm_cluster == "slurm":
        extra = asked.pop("slurm_additional_parameters", {})
        if after:
            extra = {**extra, "dependency": f"afterok:{':'.join(after)}", "kill-on-invalid-dep": "yes"}
        per_machine = min(cluster.slurm_gpus, node.processes) if isinstance(node, PretrainStage) else cluster.slurm_gpus
        asked |= {"gpus_per_node": per_machine} if per_machine else {}
        asked |= {"nodes": together, "tasks_per_node": 1, "slurm_additional_parameters": extra}
    logs, kind = study / ".slurm" / "%j", cluster.slurm_cluster
    executor = submitit.AutoExecutor(folder=logs, cluster=kind, slurm_max_num_timeout=_TIMEOUTS)
    executor.update_parameters(name=job_name(study, node.id), timeout_min=cluster.slurm_minutes, **asked)
    with executor.batch() if len(tasks) > 1 else contextlib.nullcontext():
        return [executor.submit(task) for task in tasks]


def _ended_well(job: Any) -> bool:
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


def queued(study: Path) -> dict[str, str]:
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
