"""Execution of a study's stages on this machine, several at a time.

Commands are child processes that end with this one.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaenc.console import ProgressLine, ProgressRow, format_duration
from megaenc.dist_env import EXIT_CODE_FILE
from megaenc.errors import InputError
from megaenc.machine import select_visible_devices, usable_core_count
from megaenc.processes import ChildProcess, describe_exit_code, python_environment, with_pdeathsig
from megaenc.study.run import stage_log
from megaenc.study.run.eta import EtaEstimator
from megaenc.study.run.provenance import record_environment
from megaenc.study.run.stage import StageRunner, finished_stages

_INPUT_ERROR = 2  # exit code
_STOPPED = 75  # exit code of pretraining that was stopped by a signal, after saving
_POLL_SECONDS = 0.2  # interval of checking the children
_REDRAW_SECONDS = 1.0  # interval of redrawing the terminal
_SAVE_SECONDS = 300.0  # granted to a run between SIGTERM and SIGKILL


@dataclass
class _RunningStage:
    """Stage whose command runs in a child process."""

    stage: StageRunner
    command: list[str]
    child: ChildProcess
    slots: list[str]
    lock: contextlib.ExitStack
    initial_fraction: float
    """fraction of the stage, from 0 to 1, that was done before"""
    start_time: float = field(default_factory=time.monotonic)


def format_progress(done: float, total: float, unit: str) -> str:
    """Return `DONE of TOTAL UNIT`, such as `120 of 3,000 steps`.

    Numbers are rounded to whole ones.
    """
    return f"{done:,.0f} of {total:,.0f} {unit}"


def execute_stages(
    stages: Sequence[StageRunner], study: Path, slots: Sequence[str], *, max_attempts: int = 2
) -> dict[str, str]:
    """Run stages in parallel, each after its needs; return reasons of failures by id.

    A stage that waits for a failed one is not run, and has no reason. The stage with the longest
    remaining chain starts first. No child process outlives this call. Logs and study.json are
    written, and progress is shown. Fewer slots than a stage has processes are an InputError.

    Args:
        stages: Each after those that it needs. Needs outside them count as done.
        slots: For each process that can run at a time, the GPU that it sees, or "" for all that
            this process sees. At least one item.
        max_attempts: Attempts of a stage that crashes; wrong input and stops are not retried.
    """
    widest = max((stage.processes for stage in stages), default=1)
    if len(_pick_slots(slots, widest)) < widest:
        devices = f"{len(set(slots))} devices and " if slots[0] else ""
        raise InputError(
            f"--jobs: found {devices}{len(slots)}, expected at least {widest}, one per process of "
            "a pretraining run"
        )
    with ProgressLine(
        "study", total=None, interval=30.0, closing=False, row_widths=(0, 20), outlives_reader=True
    ) as display:
        executor = _Executor(stages, study, list(slots), max_attempts, display)
        if executor.waiting:
            record_environment(study)
        try:
            while executor.running or executor.ready_stages():
                executor.start_ready_stages()
                if display.is_due(_REDRAW_SECONDS):
                    executor.update_display()
                time.sleep(_POLL_SECONDS)
                for running in list(executor.running.values()):
                    code = running.child.exit_code()
                    if code is not None:
                        running.child.kill()
                        executor.handle_exit(running, code)
        finally:
            executor.stop()
    return executor.failed


class _Executor:
    """Waiting, running and finished stages."""

    def __init__(
        self,
        stages: Sequence[StageRunner],
        study: Path,
        slots: list[str],
        max_attempts: int,
        display: ProgressLine,
    ) -> None:
        self.study = study
        self.free_slots = slots
        self.slot_count = len(slots)
        self.max_attempts = max_attempts
        self.display = display
        self.finished = finished_stages(stages)
        self.eta = EtaEstimator(stages, study)
        chains = self.eta.longest_chains()
        order = sorted(
            (stage for stage in stages if stage.id not in self.finished),
            key=lambda stage: -chains[stage.id],
        )
        self.waiting = {stage.id: stage for stage in order}
        self.stage_ids = {stage.id for stage in stages}
        self.running: dict[str, _RunningStage] = {}
        self.failed: dict[str, str] = {}
        self.locked_elsewhere: set[str] = set()
        """Stages that another process has locked."""
        self._attempt_counts: dict[str, int] = defaultdict(int)

    def ready_stages(self) -> list[StageRunner]:
        """Return the waiting stages whose needed stages are done.

        Needed stages outside this execution count as done.
        """
        return [
            stage
            for stage in self.waiting.values()
            if self.finished.issuperset(self.stage_ids.intersection(stage.needs))
        ]

    def start_ready_stages(self) -> None:
        """Start ready stages in order, up to the first for which too few slots are free.

        A stage that another process has locked is skipped. Stages whose output turns out complete
        or stale are recorded as done or failed.
        """
        for stage in self.ready_stages():
            slots = _pick_slots(self.free_slots, stage.processes)
            if len(slots) < stage.processes:
                return  # keep the slots free: smaller stages would make it wait forever
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(stage_log.lock_stage(self.study, stage.id)):
                    if stage.id not in self.locked_elsewhere:
                        self.display.print_line(
                            f"{stage.id}: waiting for another process that runs it"
                        )
                    self.locked_elsewhere.add(stage.id)
                    continue
                del self.waiting[stage.id]
                try:
                    stage.check()  # the needed stages may have run in the meantime
                except InputError as error:
                    self._fail(stage, str(error))
                    continue
                commands = stage.remaining_commands()
                if not commands:  # done already, or by another process
                    self.finished.add(stage.id)
                    continue
                stage.prepare()
                for slot in slots:
                    self.free_slots.remove(slot)
                self._launch(stage, commands[0], slots, stack.pop_all())

    def _fail(self, stage: StageRunner, reason: str) -> None:
        """Record and print that a stage has failed."""
        self.failed[stage.id] = reason
        self.display.print_line(f"{stage.id}: failed: {reason}")

    def _launch(
        self, stage: StageRunner, command: list[str], slots: list[str], lock: contextlib.ExitStack
    ) -> None:
        """Start a command of a stage in `slots`, with its output in the log."""
        log = stage_log.log_path(self.study, stage.id)
        stage_log.log_start(log, command)
        stage_log.pop_exit_code(log)  # of an attempt that was killed
        with open(log, "ab") as stream:
            environment = stage_environment(slots, self.slot_count) | {
                EXIT_CODE_FILE: str(stage_log.exit_code_file(log))
            }
            child = ChildProcess(with_pdeathsig(command), environment, stream)
        done, total = stage.progress()
        self.running[stage.id] = _RunningStage(
            stage, command, child, slots, lock, done / total if total else 0.0
        )

    def handle_exit(self, running: _RunningStage, code: int) -> None:
        """Log the exit code of a command, and continue its stage.

        The stage's next command starts, or the stage is recorded as done, failed or to be retried.
        """
        stage = running.stage
        log = stage_log.log_path(self.study, stage.id)
        seconds = time.monotonic() - running.start_time
        recorded_code = stage_log.pop_exit_code(log)
        if code and recorded_code:  # torchrun itself exits with 1
            code = recorded_code
        message = stage_log.read_attempts(log)[-1].message
        commands = stage.remaining_commands()
        if not code and commands and commands[0] != running.command:
            stage_log.log_end(log, stage_log.FINISHED)
            self._launch(stage, commands[0], running.slots, running.lock)
            return
        if not commands:
            outcome = stage_log.FINISHED
        elif code == _STOPPED:
            outcome = stage_log.STOPPED
        elif code:
            # As `exit code 1` or `killed by SIGKILL`.
            outcome = describe_exit_code(code).removeprefix("ended with ").removeprefix("was ")
        else:
            outcome = "exit code 0, but its output is missing"
        stage_log.log_end(log, outcome)
        del self.running[stage.id]
        running.lock.close()
        self.free_slots += running.slots
        if not commands:
            self.finished.add(stage.id)
            self.eta.record_duration(stage, seconds, 1 - running.initial_fraction)
            self.display.print_line(f"{stage.id}: done in {format_duration(seconds)}")
        elif code == _STOPPED:
            self._fail(stage, f"stopped by a signal, after saving ({log})")
        elif code == _INPUT_ERROR:
            self._fail(stage, f"{message} ({log})")
        else:
            self._attempt_counts[stage.id] += 1
            if self._attempt_counts[stage.id] == self.max_attempts:
                self._fail(stage, f"{outcome}: {message} ({log})")
            else:
                self.waiting[stage.id] = stage  # behind the others
                self.display.print_line(f"{stage.id}: {outcome}: {message}; trying once more")

    def update_display(self) -> None:
        """Redraw the rows of the running stages and the row of the study.

        The row of the study has the numbers of finished and failed stages, and the time left.
        """
        done_stages = float(len(self.finished))
        rows = {}
        parts = []
        for id, running in self.running.items():
            done, total = running.stage.progress()
            fraction = done / total if total else 0.0
            self.eta.record_progress(running.stage, fraction)
            done_stages += fraction
            words = format_progress(done, total, running.stage.unit)
            rows[id] = ProgressRow(
                id,
                done,
                total,
                f"{words}  {format_duration(time.monotonic() - running.start_time)}",
            )
            parts.append(f"{id} {words}")
        remaining = self.eta.remaining_seconds(self.slot_count)
        stages = len(self.stage_ids)
        tail = "" if remaining is None else f"about {format_duration(remaining)} left"
        words = f"study: {len(self.finished):,} of {stages:,} stages"
        if self.failed:
            words += f", {len(self.failed):,} failed"
        summary = {None: ProgressRow(words, done_stages, stages, tail)}
        self.display.update(
            done_stages,
            description="  ".join(filter(None, [words, tail, *parts])),
            rows=summary | rows,
        )

    def stop(self) -> None:
        """Stop all running stages, and log them as stopped.

        They get SIGTERM and up to 300 s to save; then they are killed.
        """
        if not self.running:
            return
        for running in self.running.values():
            running.child.terminate()
        deadline = time.monotonic() + _SAVE_SECONDS
        try:
            self.display.print_line(
                f"stopping: {', '.join(self.running)}; pretraining saves first (press Ctrl-C again "
                "to skip that)"
            )
            for running in self.running.values():
                running.child.wait(deadline - time.monotonic())
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            for id, running in self.running.items():
                running.child.kill()
                log = stage_log.log_path(self.study, id)
                stage_log.pop_exit_code(log)
                stage_log.log_end(log, stage_log.STOPPED)
                running.lock.close()


def _pick_slots(slots: Sequence[str], count: int) -> list[str]:
    """Return up to `count` of `slots`, each on a device of its own."""
    if slots and slots[0]:
        slots = list(dict.fromkeys(slots))
    return list(slots[:count])


def stage_environment(slots: Sequence[str], slot_count: int) -> dict[str, str]:
    """Return all environment variables of a stage's process, also those of os.environ.

    Set are the visible GPUs (`select_visible_devices`), the path of this package
    (`python_environment`) and unbuffered output. Unless os.environ has them, OMP_NUM_THREADS is 1 /
    `slot_count` of the cores, at least 1, and torchrun's workers get time to save before they are
    killed.

    Args:
        slots: GPUs that the process sees, at least one item; if the first is "", the process sees
            those that os.environ lets it see.
        slot_count: Number of processes on this machine.
    """
    devices = {select_visible_devices(0)[0]: ",".join(dict.fromkeys(slots))} if slots[0] else {}
    return {
        "OMP_NUM_THREADS": str(max(1, usable_core_count() // slot_count)),
        # Before torchrun kills its workers; needs torch 2.12.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{_SAVE_SECONDS:.0f}",
        **python_environment(),
        "PYTHONUNBUFFERED": "1",
        **devices,
    }


def with_dependencies(stages: Mapping[str, StageRunner], ids: Iterable[str]) -> list[StageRunner]:
    """Return the stages with these ids and all that they need, directly or not.

    They are in the order of the mapping `stages`, in which each stage is after those that it needs.
    Unknown ids are ignored.
    """
    selected = set(ids)
    for id, stage in reversed(stages.items()):
        if id in selected:
            selected.update(stage.needs)
    return [stage for id, stage in stages.items() if id in selected]
