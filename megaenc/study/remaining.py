"""How long a study still takes: by the plan, corrected by what its stages took here."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megaenc.study import journal
from megaenc.study.node import Node


class Remaining:
    """Seconds of what is left of some stages, each after what it needs."""

    def __init__(self, nodes: Iterable[Node], study: Path) -> None:
        """Reads the logs of what is done."""
        self._nodes = {node.id: node for node in nodes}
        self._share: dict[str, float] = {}
        self._measured: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by kind: seconds, work
        for node in self._nodes.values():
            self._share[node.id] = float(node.done())
            tries = journal.tries(journal.log_of(study, node.id)) if self._share[node.id] else []
            killed = any(one.ended is None for one in tries)  # how long that took nobody knows
            if not killed and (seconds := spent(tries)):
                self.measured(node, seconds)

    def measured(self, node: Node, seconds: float, share: float = 1.0) -> None:
        """Note that a stage is done, of which so much, from 0 to 1, took so long."""
        self._share[node.id] = 1.0
        sums = self._measured[_kind(node)]
        sums[0] += seconds
        sums[1] += share * node.work

    def under_way(self, node: Node, share: float) -> None:
        """Note that so much of a stage is done, from 0 to 1."""
        self._share[node.id] = share

    def _left(self, node: Node) -> float | None:
        """Return seconds of one stage by what others of its kind took, otherwise the plan's; None where neither is known."""
        seconds, work = self._measured[_kind(node)]
        whole = seconds * node.work / work if work else node.planned
        return None if whole is None else whole * (1 - self._share[node.id])

    def seconds(self, places: int) -> float | None:
        """Of all, `places` at a time: the sum of them, or the longest chain, whichever is more; None where one is not known."""
        left = [(node.processes, self._left(node)) for id, node in self._nodes.items() if self._share[id] < 1]
        if any(seconds is None for _, seconds in left):
            return None
        return max([sum(processes * seconds for processes, seconds in left) / places, *self.chains().values()])

    def chains(self) -> dict[str, float]:
        """Return, by id, seconds from a stage's beginning to the end of the longest chain that needs it; unknown ones are 0."""
        found: dict[str, float] = {}
        behind: dict[str, float] = defaultdict(float)
        for id, node in reversed(self._nodes.items()):
            found[id] = behind[id] + (self._left(node) or 0.0)
            for need in node.needs:
                behind[need] = max(behind[need], found[id])
        return found


def _kind(node: Node) -> str:
    return node.id.partition("/")[0]


def spent(tries: Iterable[journal.Try]) -> float:
    """Return the seconds of those that have ended."""
    return sum(one.ended - one.began for one in tries if one.ended is not None)
