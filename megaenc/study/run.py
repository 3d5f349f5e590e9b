"""A study's stages done on this machine, some at a time, each in a process of its own that does not outlive this one."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaenc.console import clock
from megaenc.errors import InputError
from megaenc.processes import Child, below, how_it_ended, python_environment, usable_cores, visible_devices
from megaenc.study import journal
from megaenc.study.journal import Remaining
from megaenc.study.node import Node, finished
from megaenc.study.record import record
from megaenc.study.screen import StudyProgress

_TRIES = 2
_WRONG_INPUT, _STOPPED = 2, 75  # exit codes: of a wrong input; of a pretraining run that was told to stop, and has saved
_LOOK, _PICTURE = 0.2, 1.0  # seconds between looks at what is running, and between pictures of it on a terminal
_TO_SAVE = 300.0  # seconds that a run is given when it is told to stop


@dataclass
class _Running:
    """A stage under way."""

    node: Node
    command: list[str]
    child: Child
    slots: list[str]
    lock: contextlib.ExitStack
    share: float
    """of the stage, from 0 to 1, that was done before"""
    began: float = field(default_factory=time.monotonic)


def execute(nodes: Sequence[Node], study: Path, slots: Sequence[str], *, tries: int = _TRIES) -> dict[str, str]:
    """Do `nodes`, each when what it needs is done; returns why some were not done, by id. study.json says where and when.

    A slot is a place for one process: the device that it sees, or "". Of those that can begin, the one goes first after which
    most is still to come. What crashes is tried `tries` times in all. However this ends, no process is left; those that are told
    to stop save first.
    """
    widest = max((node.processes for node in nodes), default=1)
    if len(_different(slots, widest)) < widest:
        has = f"{len(set(slots))} devices and " if slots[0] else ""
        raise InputError(f"--jobs: found {has}{len(slots)}, expected as many as one pretraining run has processes: {widest}")
    work = _Work(nodes, study, list(slots), tries)
    if work.waiting:
        record(study)
    with StudyProgress(len(nodes)) as screen:
        try:
            while work.running or work.can_go_on():
                for said in work.begin():
                    screen.say(said)
                if screen.is_due(_PICTURE):
                    left = work.remaining.seconds(len(slots))
                    screen.show(work.progress(), len(work.finished), len(work.failed), left)
                time.sleep(_LOOK)
                for said in work.look():
                    screen.say(said)
        finally:
            work.stop(screen.say)
    return work.failed


class _Work:
    """What is waiting, running and done."""

    def __init__(self, nodes: Sequence[Node], study: Path, slots: list[str], tries: int) -> None:
        self.study, self.free, self.places, self.tries = study, slots, len(slots), tries
        self.finished = finished(nodes)
        self.remaining = Remaining(nodes, study)
        after = self.remaining.chains()
        order = sorted((node for node in nodes if node.id not in self.finished), key=lambda node: -after[node.id])
        self.waiting = {node.id: node for node in order}
        self.known = {node.id for node in nodes}
        self.running: dict[str, _Running] = {}
        self.failed: dict[str, str] = {}
        self.elsewhere: set[str] = set()
        """Stages that another process was seen at."""
        self._tried: dict[str, int] = defaultdict(int)

    def can_go_on(self) -> bool:
        """Whether anything that waits is not waiting for what has failed."""
        return any(True for _ in self._next())

    def _next(self) -> Iterator[Node]:
        """Those for which all that they need is done. What is not among the nodes is taken for done."""
        for node in list(self.waiting.values()):
            if all(need in self.finished or need not in self.known for need in node.needs):
                yield node

    def begin(self) -> Iterator[str]:
        """Begin what can begin and has room; what there is to say of it."""
        for node in list(self._next()):
            slots = _different(self.free, node.processes)
            if len(slots) < node.processes:
                return  # it is its turn: smaller ones behind it would keep it waiting for ever
            with contextlib.ExitStack() as stack:
                if not stack.enter_context(journal.lock(self.study, node.id)):
                    if node.id not in self.elsewhere:
                        yield f"{node.id}: another process is at it; waiting for that"
                    self.elsewhere.add(node.id)
                    continue
                del self.waiting[node.id]
                try:
                    node.check()  # against what it needs, which may have been made meanwhile
                except InputError as error:
                    self.failed[node.id] = str(error)
                    yield f"{node.id}: failed: {error}"
                    continue
                if node.done():  # before, or by that other
                    self.finished.add(node.id)
                    continue
                node.prepare()
                for slot in slots:
                    self.free.remove(slot)
                self._launch(node, slots, stack.pop_all())

    def _launch(self, node: Node, slots: list[str], lock: contextlib.ExitStack) -> None:
        command, log = node.command(), journal.log_of(self.study, node.id)
        journal.begin(log, command)
        with open(log, "ab") as stream:
            child = Child(below(command), environment(slots, self.places), stream)
        self.running[node.id] = _Running(node, command, child, slots, lock, _share(node))

    def look(self) -> Iterator[str]:
        """See to those that have ended; what there is to say of them."""
        for running in list(self.running.values()):
            if (code := running.child.code()) is not None:
                running.child.kill()
                yield from self._ended(running, code)

    def _ended(self, running: _Running, code: int) -> Iterator[str]:
        node = running.node
        seconds, log = time.monotonic() - running.began, journal.log_of(self.study, node.id)
        done = node.done()
        more = not done and not code and node.command() != running.command  # this was one of several commands
        last = journal.tries(log)[-1]
        stopped = code == _STOPPED or (code != 0 and last.told)
        how = journal.FINISHED if done or more else journal.STOPPED if stopped else _failure(code)
        journal.end(log, how)
        if more:
            self._launch(node, running.slots, running.lock)
            return
        del self.running[node.id]
        running.lock.close()
        self.free += running.slots
        if done:
            self.finished.add(node.id)
            self.remaining.measured(node, seconds, 1 - running.share)
            yield f"{node.id}: done in {clock(seconds)}"
            return
        self._tried[node.id] += 1
        refused = stopped or code == _WRONG_INPUT
        refused |= node.processes > 1 and last.said.startswith("error: ")  # torchrun makes a 1 of every code
        if not refused and self._tried[node.id] < self.tries:
            self.waiting[node.id] = node  # behind the others
            yield f"{node.id}: {how}: {last.said}; is tried once more"
            return
        why = "was told to stop, and has saved" if stopped else last.said if refused else f"{how}: {last.said}"
        self.failed[node.id] = f"{why} ({log})"
        yield f"{node.id}: failed: {self.failed[node.id]}"

    def progress(self) -> Mapping[str, tuple[float, float, str, float]]:
        """Of those under way: done, of how much, the unit, and seconds."""
        now = time.monotonic()
        found = {}
        for id, running in self.running.items():
            done, total = running.node.progress()
            self.remaining.under_way(running.node, done / total if total else 0.0)
            found[id] = (done, total, running.node.unit, now - running.began)
        return found

    def stop(self, say: Callable[[str], None]) -> None:
        """Tell what is running to stop, wait until it has saved, and kill what has not ended then."""
        if not self.running:
            return
        for running in self.running.values():
            running.child.terminate()
        deadline = time.monotonic() + _TO_SAVE
        try:
            say(f"stopping: {', '.join(self.running)}; what can be saved is saved first (again Ctrl-C: at once)")
            for running in self.running.values():
                running.child.wait(deadline - time.monotonic())
        except (KeyboardInterrupt, SystemExit):
            pass
        finally:
            for id, running in self.running.items():
                running.child.kill()
                journal.end(journal.log_of(self.study, id), journal.STOPPED)
                running.lock.close()


def _share(node: Node) -> float:
    done, total = node.progress()
    return done / total if total else 0.0


def _different(slots: Sequence[str], count: int) -> list[str]:
    """`count` of `slots`, or as many as there are, no two of the same device."""
    return (list(dict.fromkeys(slots)) if slots and slots[0] else list(slots))[:count]


def environment(slots: Sequence[str], places: int) -> dict[str, str]:
    """That of a process in `slots` where `places` are in use on this machine: its devices, its share of the cores, this code."""
    threads = str(max(1, usable_cores() // places))
    devices = {visible_devices(0)[0]: ",".join(dict.fromkeys(slots))} if slots[0] else {}
    torchrun = {
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{_TO_SAVE:.0f}"
    }  # for which it waits when told to stop; read from torch 2.12 on
    return {"OMP_NUM_THREADS": threads, **torchrun, **python_environment(), "PYTHONUNBUFFERED": "1", **devices}


def _failure(code: int) -> str:
    """How what has not done its work ended: `exit code 1`, `killed by SIGKILL, as the kernel does when memory runs out`."""
    how = how_it_ended(code).removeprefix("ended with ").removeprefix("was ")
    return how if code else "ended well, but what it makes is not there"


def needed(nodes: Mapping[str, Node], wanted: Iterable[str]) -> list[Node]:
    """Those that are wanted and all that they need, in the order of `nodes`."""
    found, left = set(), list(wanted)
    while left:
        if (id := left.pop()) not in found:
            found.add(id)
            left += nodes[id].needs
    return [node for id, node in nodes.items() if id in found]
