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

from megaenc.console import ProgressLine, Row, clock
from megaenc.errors import InputError
from megaenc.processes import Child, how_it_ended, python_environment, usable_cores, visible_devices, with_pdeathsig
from megaenc.study.run import stage_log
from megaenc.study.run.provenance import record
from megaenc.study.run.stage import StageRunner, finished
from megaenc.study.run.stage_log import EtaEstimator

_WRONG_INPUT, _STOPPED = 2, 75  # exit codes: of a wrong input; of a pretraining run that was told to stop, and has saved
_LOOK, _PICTURE = 0.2, 1.0  # seconds between looks at what is running, and between pictures of it on a terminal
_TO_SAVE = 300.0  # seconds that a run is given when it is told to stop


@dataclass
class _Running:
    """A stage under way."""

    node: StageRunner
    command: list[str]
    child: Child
    slots: list[str]
    lock: contextlib.ExitStack
    share: float
    """of the stage, from 0 to 1, that was done before"""
    began: float = field(default_factory=time.monotonic)


class _Screen(ProgressLine):
    """A row for each stage under way and one for the whole, or plain lines where nobody watches.

    Whoever reads may leave, as `| head` or a terminal does: the study goes on, and its logs are files.
    """

    def __exit__(self, *error: object) -> None:
        with _for_whoever_reads():
            super().__exit__(*error)

    def say(self, text: str) -> None:
        with _for_whoever_reads():
            super().say(text)

    def update(self, *done: Any, **more: Any) -> None:
        with _for_whoever_reads():
            super().update(*done, **more)


@contextlib.contextmanager
def _for_whoever_reads() -> Iterator[None]:
    """Have what is still said go nowhere once nobody reads any more."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def amount(done: float, total: float, unit: str) -> str:
    """Return `120 of 300 steps`."""
    return f"{done:,.0f} of {total:,.0f} {unit}"


def execute(nodes: Sequence[StageRunner], study: Path, slots: Sequence[str], *, tries: int = 2) -> dict[str, str]:
    """Do `nodes`, each when what it needs is done; returns why some were not done, by id. study.json says where and when.

    A slot is a place for one process: the device that it sees, or "". Of those that can begin, the one goes first after which
    most is still to come. What crashes is tried `tries` times in all. However this ends, no process is left; those that are told
    to stop save first.
    """
    widest = max((node.processes for node in nodes), default=1)
    if len(_different(slots, widest)) < widest:
        has = f"{len(set(slots))} devices and " if slots[0] else ""
        raise InputError(f"--jobs: found {has}{len(slots)}, expected as many as one pretraining run has processes: {widest}")
    with _Screen("study", total=None, every=30.0, closing=False, rows=(0, 20)) as screen:
        work = _Work(nodes, study, list(slots), tries, screen)
        if work.waiting:
            record(study)
        try:
            while work.running or work.ready():
                work.begin()
                if screen.is_due(_PICTURE):
                    work.show()
                time.sleep(_LOOK)
                for running in list(work.running.values()):
                    if (code := running.child.code()) is not None:
                        running.child.kill()
                        work.ended(running, code)
        finally:
            work.stop()
    return work.failed


class _Work:
    """What is waiting, running and done."""

    def __init__(self, nodes: Sequence[StageRunner], study: Path, slots: list[str], tries: int, screen: _Screen) -> None:
        self.study, self.free, self.places, self.tries, self.screen = study, slots, len(slots), tries, screen
        self.finished = finished(nodes)
        self.remaining = EtaEstimator(nodes, study)
        after = self.remaining.chains()
        order = sorted((node for node in nodes if node.id not in self.finished), key=lambda node: -after[node.id])
        self.waiting = {node.id: node for node in order}
        self.known = {node.id for node in nodes}
        self.running: dict[str, _Running] = {}
        self.failed: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        """Stages that another process was seen at."""
        self._tried: dict[str, int] = defaultdict(int)

    def ready(self) -> list[StageRunner]:
        """Return those for which all that they need is done. What is not among the nodes is taken for done."""
        return [node for node in self.waiting.values() if self.finished.issuperset(self.known.intersection(node.needs))]

    def begin(self) -> None:
        """Begin what can begin and has room."""
        for node in self.ready():
            slots = _different(self.free, node.processes)
            if len(slots) < node.processes:
                return  # it is its turn: smaller ones behind it would keep it waiting for ever
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(stage_log.lock(self.study, node.id)):
                    if node.id not in self.elsewhere:
                        self.screen.say(f"{node.id}: another process is at it; waiting for that")
                    self.elsewhere.add(node.id)
                    continue
                del self.waiting[node.id]
                try:
                    node.check()  # against what it needs, which may have been made meanwhile
                except InputError as error:
                    self._fail(node, str(error))
                    continue
                if node.done():  # before, or by that other
                    self.finished.add(node.id)
                    continue
                node.prepare()
                for slot in slots:
                    self.free.remove(slot)
                self._launch(node, slots, stack.pop_all())

    def _fail(self, node: StageRunner, why: str) -> None:
        self.failed[node.id] = why
        self.screen.say(f"{node.id}: failed: {why}")

    def _launch(self, node: StageRunner, slots: list[str], lock: contextlib.ExitStack) -> None:
        command, log = node.command(), stage_log.log_of(self.study, node.id)
        stage_log.begin(log, command)
        with open(log, "ab") as stream:
            child = Child(with_pdeathsig(command), environment(slots, self.places), stream)
        done, total = node.progress()
        self.running[node.id] = _Running(node, command, child, slots, lock, done / total if total else 0.0)

    def ended(self, running: _Running, code: int) -> None:
        """See to one that has ended with the exit code `code`."""
        node = running.node
        seconds, log = time.monotonic() - running.began, stage_log.log_of(self.study, node.id)
        done = node.done()
        more = not done and not code and node.command() != running.command  # this was one of several commands
        last = stage_log.tries(log)[-1]
        stopped = code == _STOPPED or (code != 0 and last.told)
        how = how_it_ended(code).removeprefix("ended with ").removeprefix("was ")  # exit code 1, killed by SIGKILL
        how = how if code else "ended well, but what it makes is not there"
        how = stage_log.FINISHED if done or more else stage_log.STOPPED if stopped else how
        stage_log.end(log, how)
        if more:
            self._launch(node, running.slots, running.lock)
            return
        del self.running[node.id]
        running.lock.close()
        self.free += running.slots
        if done:
            self.finished.add(node.id)
            self.remaining.measured(node, seconds, 1 - running.share)
            self.screen.say(f"{node.id}: done in {clock(seconds)}")
            return
        self._tried[node.id] += 1
        refused = stopped or code == _WRONG_INPUT
        refused |= node.processes > 1 and last.said.startswith("error: ")  # torchrun makes a 1 of every code
        if not refused and self._tried[node.id] < self.tries:
            self.waiting[node.id] = node  # behind the others
            self.screen.say(f"{node.id}: {how}: {last.said}; is tried once more")
            return
        why = "was told to stop, and has saved" if stopped else last.said if refused else f"{how}: {last.said}"
        self._fail(node, f"{why} ({log})")

    def show(self) -> None:
        """Show how far those under way are, and the whole."""
        share, rows, parts = float(len(self.finished)), {}, []
        for id, running in self.running.items():
            done, total = running.node.progress()
            part = done / total if total else 0.0
            self.remaining.under_way(running.node, part)
            share += part
            words = amount(done, total, running.node.unit)
            rows[id] = Row(id, done, total, f"{words}  {clock(time.monotonic() - running.began)}")
            parts.append(f"{id} {words}")
        left, stages = self.remaining.seconds(self.places), len(self.known)
        tail = "" if left is None else f"about {clock(left)} left"
        words = f"study: {len(self.finished):,} of {stages:,} stages" + (f", {len(self.failed):,} failed" if self.failed else "")
        whole = {None: Row(words, share, stages, tail)}
        self.screen.update(share, description="  ".join(filter(None, [words, tail, *parts])), rows=whole | rows)

    def stop(self) -> None:
        """Tell what is running to stop, wait until it has saved, and kill what has not ended then."""
        if not self.running:
            return
        for running in self.running.values():
            running.child.terminate()
        deadline = time.monotonic() + _TO_SAVE
        try:
            self.screen.say(f"stopping: {', '.join(self.running)}; what can be saved is saved first (again Ctrl-C: at once)")
            for running in self.running.values():
                running.child.wait(deadline - time.monotonic())
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            for id, running in self.running.items():
                running.child.kill()
                stage_log.end(stage_log.log_of(self.study, id), stage_log.STOPPED)
                running.lock.close()


def _different(slots: Sequence[str], count: int) -> list[str]:
    """Return `count` of `slots`, or as many as there are, no two of the same device."""
    return (list(dict.fromkeys(slots)) if slots and slots[0] else list(slots))[:count]


def environment(slots: Sequence[str], places: int) -> dict[str, str]:
    """Return that of a process in `slots` of `places` on this machine: its devices, its share of the cores, this code."""
    devices = {visible_devices(0)[0]: ",".join(dict.fromkeys(slots))} if slots[0] else {}
    return {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // places)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{_TO_SAVE:.0f}",  # of torchrun, when told to stop; read from torch 2.12 on
        **python_environment(),
        "PYTHONUNBUFFERED": "1",
        **devices,
    }


def needed(nodes: Mapping[str, StageRunner], wanted: Iterable[str]) -> list[StageRunner]:
    """Return those that are wanted and all that they need, in the order of `nodes`: each after what it needs."""
    found = set(wanted)
    for id, node in reversed(nodes.items()):
        found.update(node.needs if id in found else ())
    return [node for id, node in nodes.items() if id in found]
