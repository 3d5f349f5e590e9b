"""Submission of a study to Slurm through submitit.

Each remaining stage is a job, after the jobs that it needs.
"""

import hashlib
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from megaenc.console import format_count, print_rank_0, silence_libraries
from megaenc.errors import InputError
from megaenc.finetune.grid.cluster import ClusterConfig, import_submitit, submit_tasks
from megaenc.processes import with_pdeathsig
from megaenc.study.run import stage_log
from megaenc.study.run.embed_stage import EmbedStage
from megaenc.study.run.executor import execute_stages, stage_environment
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.stage import (
    StageRunner,
    finished_stages,
    format_flags,
    strip_training_set,
)

_SAVE_SECONDS = 80.0  # submitit signals 90 seconds before the end of a job
_POLL_SECONDS = 1.0  # interval of reading the first machine's log
_REQUEUE_SECONDS = 300.0  # time for Slurm to requeue or cancel a stopped job
_FIRST_PORT = 20_000
_PORT_COUNT = 20_000


@dataclass(frozen=True)
class StageTask:
    """Callable of a Slurm job that runs one stage on one or several machines.

    submitit pickles it, calls it on each of the `machines`, and requeues it at a timeout. A failed
    stage raises RuntimeError, stale output InputError.
    """

    stage: StageRunner
    study: Path
    machines: int = 1

    def __call__(self) -> None:
        """Run the stage as `execute_stages` does.

        After an error, Slurm starts no stage that needs this one.

        Raises:
            RuntimeError: The stage has failed.
            InputError: The output is stale.
        """
        silence_libraries()
        self.stage.check()
        if self.machines > 1:
            self._run_with_other_machines()
        else:
            self._run_to_end(self.stage)

    def _run_to_end(self, stage: StageRunner, **options: int) -> None:
        """Run `stage` until it is done.

        After a stop by Slurm (scancel, preemption), wait to be ended.
        """
        while failed := execute_stages([stage], self.study, [""] * stage.processes, **options):
            if self._attempts()[-1].outcome != stage_log.STOPPED:
                raise RuntimeError(failed[stage.id])
            time.sleep(_REQUEUE_SECONDS)  # Slurm would count an earlier exit as a failure

    def _run_with_other_machines(self) -> None:
        """Run the torchrun of this machine, one of several.

        The first machine writes the log and holds the lock.
        """
        import submitit

        job = submitit.JobEnvironment()
        local_processes = self.stage.processes // self.machines
        port = _FIRST_PORT + int(job.raw_job_id) % _PORT_COUNT
        rendezvous = {
            "nnodes": self.machines,
            "node_rank": job.node,
            "master_addr": job.hostnames[0],
            "master_port": port,
        }
        stage = replace(
            self.stage, processes=local_processes, launcher=tuple(format_flags(rendezvous))
        )
        if job.node == 0:
            self._run_to_end(stage, max_attempts=1)
            return
        for command in stage.remaining_commands():
            code = subprocess.run(
                with_pdeathsig(command), env=stage_environment([""], local_processes)
            ).returncode
            if code:
                if self._is_first_machine_stopped():
                    time.sleep(_REQUEUE_SECONDS)
                raise RuntimeError(f"{stage.id}: exit code {code} on {job.hostname}")

    def _attempts(self) -> list[stage_log.Attempt]:
        return stage_log.read_attempts(stage_log.log_path(self.study, self.stage.id))

    def _is_first_machine_stopped(self) -> bool:
        """Wait for the first machine's outcome, and return whether it was stopped.

        The outcome is read from the log.
        """
        deadline = time.monotonic() + _SAVE_SECONDS
        while time.monotonic() < deadline:
            attempts = self._attempts()
            if attempts and attempts[-1].end_time is not None:
                return attempts[-1].outcome == stage_log.STOPPED
            time.sleep(_POLL_SECONDS)
        return False

    def checkpoint(self) -> Any:
        """Terminate the child processes and return a submission to requeue.

        submitit calls it at timeout or preemption. The children get SIGTERM and up to 80 s to save.
        The result is submitit's DelayedSubmission of this task.
        """
        from submitit.helpers import DelayedSubmission

        children = psutil.Process().children()
        for child in children:
            child.terminate()
        psutil.wait_procs(children, timeout=_SAVE_SECONDS)
        return DelayedSubmission(self)


def count_machines(cluster: ClusterConfig, stage: StageRunner) -> int:
    """Return the number of machines of a stage: processes / --slurm-gpus.

    It is 1 if the processes fit one machine, or if --slurm-gpus is 0.

    Raises:
        InputError: More processes than --slurm-gpus are no multiple of it.
    """
    gpus = cluster.slurm_gpus
    if not gpus or stage.processes <= gpus:
        return 1
    if stage.processes % gpus:
        raise InputError(
            f"--slurm-gpus {gpus}: {stage.id} has {stage.processes} processes (--processes), "
            "expected a divisor"
        )
    return stage.processes // gpus


def submit_stages(
    stages: Sequence[StageRunner], study: Path, cluster: ClusterConfig
) -> dict[str, list[Any]]:
    """Submit the stages neither done nor queued, each after those that it needs.

    The stages of a model's grid are one job array. submitit's local and debug executors know no
    dependencies: this call then waits for needed stages to end, with debug for all. A stage whose
    needed stage fails meanwhile is not submitted.

    Returns:
        New Job objects of submitit by stage id, those of a model's grid under `finetune/NAME`.

    Raises:
        InputError: submitit is missing, squeue fails, or a stage does not fit --slurm-gpus.
    """
    import_submitit()
    on_slurm = cluster.slurm_cluster == "slurm"
    ids = read_queue(study) if on_slurm else {}
    jobs: dict[str, list[Any]] = {}
    done = finished_stages(stages)
    batches: dict[str, list[StageRunner]] = defaultdict(list)
    for stage in stages:
        if stage.id not in done:
            batches[strip_training_set(stage.id)].append(stage)
    queued = ids.keys() & batches.keys()
    left_out: set[str] = set()
    for id, batch in batches.items():
        if id in queued:
            continue
        needs = [need for need in batch[0].needs if need in ids]
        if left_out.intersection(batch[0].needs) or (
            not on_slurm and not all(_wait_for_success(job) for need in needs for job in jobs[need])
        ):
            left_out.add(id)
            print_rank_0(f"{id}: not submitted, because a stage that it needs has failed")
            continue
        after = [ids[need] for need in needs]
        jobs[id] = _submit_batch(job_name(study, id), batch, study, cluster, after)
        ids[id] = jobs[id][0].job_id.partition("_")[0]
        print_rank_0(f"{id}: job {ids[id]}" + (f" after {', '.join(after)}" if after else ""))
    if cluster.slurm_cluster == "debug":
        for batch_jobs in jobs.values():
            for job in batch_jobs:
                _wait_for_success(job)
    queued_count = sum(len(batches[id]) for id in queued)
    waiting = f", {queued_count:,} already queued" if queued else ""
    submitted = sum(len(batches[id]) for id in jobs)
    summary = f"{format_count(len(stages), 'stage')}: {len(done):,} done{waiting}"
    print_rank_0(f"{summary}, {submitted:,} submitted; logs: {study / 'logs'}")
    print_rank_0(
        "`megaenc study status` shows the progress; rerun the same command to submit stages that "
        "failed"
    )
    return jobs


def _submit_batch(
    name: str,
    stages: Sequence[StageRunner],
    study: Path,
    cluster: ClusterConfig,
    after: Sequence[str],
) -> list[Any]:
    """Submit a stage as a job, or those of a grid as an array; return the jobs."""
    stage = stages[0]
    machine_count = count_machines(cluster, stage)
    parameters = cluster.build_submitit_parameters()
    tasks = [StageTask(stage, study, machine_count) for stage in stages]
    if cluster.slurm_cluster == "slurm":
        extra = parameters.pop("slurm_additional_parameters", {})
        if after:
            dependency = f"afterok:{':'.join(after)}"
            extra = {**extra, "dependency": dependency, "kill-on-invalid-dep": "yes"}
        gpus = cluster.slurm_gpus
        if gpus and isinstance(stage, PretrainStage | EmbedStage):
            gpus = min(gpus, stage.processes)
        if gpus:
            parameters["gpus_per_node"] = gpus
        parameters["nodes"] = machine_count
        parameters["tasks_per_node"] = 1
        parameters["slurm_additional_parameters"] = extra
    return submit_tasks(tasks, study / ".slurm", name, cluster, parameters)


def _wait_for_success(job: Any) -> bool:
    """Wait for a job of a local or debug executor, and return whether it succeeded."""
    try:
        job.result()
    except Exception as error:
        print_rank_0(f"job {job.job_id}: {str(error).strip().splitlines()[-1]}")
        return False
    return True


def job_name(study: Path, stage: str) -> str:
    """Return `STAGE:HASH`, the name of a stage's job in Slurm's queue.

    `stage` is the id; the 8 hex digits HASH identify the path `study` as it is spelled.
    """
    return f"{stage}:{hashlib.sha256(str(study).encode()).hexdigest()[:8]}"


def read_queue(study: Path) -> dict[str, str]:
    """Return the Slurm ids of the study's waiting and running jobs by stage id.

    Jobs are this user's, found by `job_name`: `study` must be spelled as when they were submitted.
    The job array of a model's grid has one id, under `finetune/NAME`.

    Raises:
        InputError: squeue fails.
    """
    try:
        result = subprocess.run(
            ["squeue", "--me", "--noheader", "--format=%F %j"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"--slurm: squeue failed: {error}; expected to run on a Slurm cluster"
        ) from None
    if result.returncode:
        raise InputError(f"--slurm: squeue failed: {result.stderr.strip()}")
    mark = job_name(study, "")
    jobs = (line.strip().partition(" ") for line in result.stdout.splitlines())
    return {name.removesuffix(mark): id for id, _, name in jobs if name.endswith(mark)}
