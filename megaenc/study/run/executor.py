"""A study's stages done on this machine, some at a time, each in a process of its own that does not outlive this one."""

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaenc.console import ProgressLine, ProgressRow, format_duration
from megaenc.errors import InputError
from megaenc.processes import (
    ChildProcess,
    describe_exit_code,
    python_environment,
    select_visible_devices,
    usable_core_count,
    with_pdeathsig,
)
from megaenc.study.run import stage_log
from megaenc.study.run.provenance import record_environment
from megaenc.study.run.stage import StageRunner, finished_stages
from megaenc.study.run.stage_log import EtaEstimator

_WRONG_INPUT, _STOPPED = 2, 75  # exit codes: of a wrong input; of a pretraining run that was told to stop, and has saved
_POLL_SECONDS, _REDRAW_SECONDS = 0.2, 1.0  # seconds between looks at what is running, and between pictures of it on a terminal
_SAVE_SECONDS = 300.0  # seconds that a run is given when it is told to stop


@dataclass
class _RunningStage:
    """A stage under way."""

    stage: StageRunner
    command: list[str]
    child: ChildProcess
    slots: list[str]
    lock: contextlib.ExitStack
    share: float
    """of the stage, from 0 to 1, that was done before"""
    start_time: float = field(default_factory=time.monotonic)


class _StudyDisplay(ProgressLine):
    """A row for each stage under way and one for the whole, or plain lines where nobody watches.

    Whoever reads may leave, as `| head` or a terminal does: the study goes on, and its logs are files.
    """

    def __exit__(self, *error: object) -> None:
        with _ignore_closed_output():
            super().__exit__(*error)

    def say(self, text: str) -> None:
        with _ignore_closed_output():
            super().say(text)

    def update(self, *done: Any, **more: Any) -> None:
        with _ignore_closed_output():
            super().update(*done, **more)


@contextlib.contextmanager
def _ignore_closed_output() -> Iterator[None]:
    """Have what is still said go nowhere once nobody reads any more."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_progress(done: float, total: float, unit: str) -> str:
    """Return `120 of 300 steps`."""
    return f"{done:,.0f} of {total:,.0f} {unit}"


def execute_stages(stages: Sequence[StageRunner], study: Path, slots: Sequence[str], *, tries: int = 2) -> dict[str, str]:
    """Do `stages`, each when what it needs is done; returns why some were not done, by id. study.json says where and when.

    A slot is a place for one process: the device that it sees, or "". Of those that can begin, the one goes first after which
    most is still to come. What crashes is tried `tries` times in all. However this ends, no process is left; those that are told
    to stop save first.
    """
    widest = max((stage.processes for stage in stages), default=1)
    if len(_pick_slots(slots, widest)) < widest:
        has = f"{len(set(slots))} devices and " if slots[0] else ""
        raise InputError(f"--jobs: found {has}{len(slots)}, expected as many as one pretraining run has processes: {widest}")
    with _StudyDisplay("study", total=None, every=30.0, closing=False, rows=(0, 20)) as screen:
        work = _Executor(stages, study, list(slots), tries, screen)
        if work.waiting:
            record_environment(study)
        try:
            while work.running or work.ready():
                work.begin()
                if screen.is_due(_REDRAW_SECONDS):
                    work.show()
                time.sleep(_POLL_SECONDS)
                for running in list(work.running.values()):
                    if (code := running.child.code()) is not None:
                        running.child.kill()
                        work.ended(running, code)
        finally:
            work.stop()
    return work.failed


class _Executor:
    """What is waiting, running and done."""

    def __init__(self, stages: Sequence[StageRunner], study: Path, slots: list[str], tries: int, screen: _StudyDisplay) -> None:
        self.study, self.free, self.places, self.tries, self.screen = study, slots, len(slots), tries, screen
        self.finished = finished_stages(stages)
        self.remaining = EtaEstimator(stages, study)
        after = self.remaining.chains()
        order = sorted((stage for stage in stages if stage.id not in self.finished), key=lambda stage: -after[stage.id])
        self.waiting = {stage.id: stage for stage in order}
        self.known = {stage.id for stage in stages}
        self.running: dict[str, _RunningStage] = {}
        self.failed: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        """Stages that another process was seen at."""
        self._tried: dict[str, int] = defaultdict(int)

    def ready(self) -> list[StageRunner]:
        """Return those for which all that they need is done. What is not among the stages is taken for done."""
        return [stage for stage in self.waiting.values() if self.finished.issuperset(self.known.intersection(stage.needs))]

    def begin(self) -> None:
        """Begin what can begin and has room."""
        for stage in self.ready():
            slots = _pick_slots(self.free, stage.processes)
            if len(slots) < stage.processes:
                return  # it is its turn: smaller ones behind it would keep it waiting for ever
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(stage_log.lock_stage(self.study, stage.id)):
                    if stage.id not in self.elsewhere:
                        self.screen.say(f"{stage.id}: another process is at it; waiting for that")
                    self.elsewhere.add(stage.id)
                    continue
                del self.waiting[stage.id]
                try:
                    stage.check()  # against what it needs, which may have been made meanwhile
                except InputError as error:
                    self._fail(stage, str(error))
                    continue
                if stage.is_done():  # before, or by that other
                    self.finished.add(stage.id)
                    continue
                stage.prepare()
                for slot in slots:
                    self.free.remove(slot)
                self._launch(stage, slots, stack.pop_all())

    def _fail(self, stage: StageRunner, why: str) -> None:
        self.failed[stage.id] = why
        self.screen.say(f"{stage.id}: failed: {why}")

    def _launch(self, stage: StageRunner, slots: list[str], lock: contextlib.ExitStack) -> None:
        command, log = stage.next_command(), stage_log.log_path(self.study, stage.id)
        stage_log.log_start(log, command)
        with open(log, "ab") as stream:
            child = ChildProcess(with_pdeathsig(command), stage_environment(slots, self.places), stream)
        done, total = stage.progress()
        self.running[stage.id] = _RunningStage(stage, command, child, slots, lock, done / total if total else 0.0)

    def ended(self, running: _RunningStage, code: int) -> None:
        """See to one that has ended with the exit code `code`."""
        stage = running.stage
        seconds, log = time.monotonic() - running.start_time, stage_log.log_path(self.study, stage.id)
        done = stage.is_done()
        more = not done and not code and stage.next_command() != running.command  # this was one of several commands
        last = stage_log.read_attempts(log)[-1]
        stopped = code == _STOPPED or (code != 0 and last.told)
        how = describe_exit_code(code).removeprefix("ended with ").removeprefix("was ")  # exit code 1, killed by SIGKILL
        how = how if code else "ended well, but what it makes is not there"
        how = stage_log.FINISHED if done or more else stage_log.STOPPED if stopped else how
        stage_log.log_end(log, how)
        if more:
            self._launch(stage, running.slots, running.lock)
            return
        del self.running[stage.id]
        running.lock.close()
        self.free += running.slots
        if done:
            self.finished.add(stage.id)
            self.remaining.measured(stage, seconds, 1 - running.share)
            self.screen.say(f"{stage.id}: done in {format_duration(seconds)}")
            return
        self._tried[stage.id] += 1
        refused = stopped or code == _WRONG_INPUT
        refused |= stage.processes > 1 and last.message.startswith("error: ")  # torchrun makes a 1 of every code
        if not refused and self._tried[stage.id] < self.tries:
            self.waiting[stage.id] = stage  # behind the others
            self.screen.say(f"{stage.id}: {how}: {last.message}; is tried once more")
            return
        why = "was told to stop, and has saved" if stopped else last.message if refused else f"{how}: {last.message}"
        self._fail(stage, f"{why} ({log})")

    def show(self) -> None:
        """Show how far those under way are, and the whole."""
        share, rows, parts = float(len(self.finished)), {}, []
        for id, running in self.running.items():
            done, total = running.stage.progress()
            part = done / total if total else 0.0
            self.remaining.under_way(running.stage, part)
            share += part
            words = format_progress(done, total, running.stage.unit)
            rows[id] = ProgressRow(id, done, total, f"{words}  {format_duration(time.monotonic() - running.start_time)}")
            parts.append(f"{id} {words}")
        left, stages = self.remaining.seconds(self.places), len(self.known)
        tail = "" if left is None else f"about {format_duration(left)} left"
        words = f"study: {len(self.finished):,} of {stages:,} stages" + (f", {len(self.failed):,} failed" if self.failed else "")
        whole = {None: ProgressRow(words, share, stages, tail)}
        self.screen.update(share, description="  ".join(filter(None, [words, tail, *parts])), rows=whole | rows)

    def stop(self) -> None:
        """Tell what is running to stop, wait until it has saved, and kill what has not ended then."""
        if not self.running:
            return
        for running in self.running.values():
            running.child.terminate()
        deadline = time.monotonic() + _SAVE_SECONDS
        try:
            self.screen.say(f"stopping: {', '.join(self.running)}; what can be saved is saved first (again Ctrl-C: at once)")
            for running in self.running.values():
                running.child.wait(deadline - time.monotonic())
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            for id, running in self.running.items():
                running.child.kill()
                stage_log.log_end(stage_log.log_path(self.study, id), stage_log.STOPPED)
                running.lock.close()


def _pick_slots(slots: Sequence[str], count: int) -> list[str]:
    """Return `count` of `slots`, or as many as there are, no two of the same device."""
    return (list(dict.fromkeys(slots)) if slots and slots[0] else list(slots))[:count]


def stage_environment(slots: Sequence[str], places: int) -> dict[str, str]:
    """Return that of a process in `slots` of `places` on this machine: its devices, its share of the cores, this code."""
    devices = {select_visible_devices(0)[0]: ",".join(dict.fromkeys(slots))} if slots[0] else {}
    return {
        "OMP_NUM_THREADS": str(max(1, usable_core_count() // places)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{_SAVE_SECONDS:.0f}",  # of torchrun, when told to stop; read from torch 2.12 on
        **python_environment(),
        "PYTHONUNBUFFERED": "1",
        **devices,
    }


def with_dependencies(stages: Mapping[str, StageRunner], wanted: Iterable[str]) -> list[StageRunner]:
    """Return those that are wanted and all that they need, in the order of `stages`: each after what it needs."""
    found = set(wanted)
    for id, stage in reversed(stages.items()):
        found.update(stage.needs if id in found else ())
    return [stage for id, stage in stages.items() if id in found]
