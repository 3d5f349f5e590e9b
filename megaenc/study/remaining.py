"""How long a study still takes: by the plan, corrected by what its stages took here."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from megaenc.study import journal
from megaenc.study.node import Node, kind_of


class Remaining:
    """Seconds of what is left of some stages."""

    def __init__(self, nodes: Iterable[Node], study: Path) -> None:
        """Reads the logs of what is done."""
        self._nodes = {node.id: node for node in nodes}
        self._share = {}
        self._measured: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])  # by kind: seconds, work
        self._needed_by: dict[str, list[str]] = defaultdict(list)
        for node in self._nodes.values():
            for need in node.needs:
                self._needed_by[need].append(node.id)
            done = node.done()
            self._share[node.id] = float(done)
            tries = journal.tries(journal.log_of(study, node.id))
            killed = any(one.ended is None for one in tries)  # how long that took nobody knows
            if done and not killed and (seconds := spent(tries)):
                self.measured(node, seconds)

    def measured(self, node: Node, seconds: float, share: float = 1.0) -> None:
        """A stage is done, of which so much, from 0 to 1, took so long."""
        self._share[node.id] = 1.0
        sums = self._measured[kind_of(node)]
        sums[0] += seconds
        sums[1] += share * node.work

    def under_way(self, node: Node, share: float) -> None:
        """So much of a stage is done, from 0 to 1."""
        self._share[node.id] = share

    def of(self, node: Node) -> float | None:
        """Of one stage from its beginning: what others of its kind took, otherwise the plan's; None where neither is known."""
        seconds, work = self._measured[kind_of(node)]
        return seconds * node.work / work if work else node.planned

    def seconds(self, places: int) -> float | None:
        """Of all, `places` at a time: the sum of them, or the longest chain, whichever is more; None where one is not known."""
        left = [node for id, node in self._nodes.items() if self._share[id] < 1]
        if any(self.of(node) is None for node in left):
            return None
        each = sum(self._left(node) * node.processes for node in left) / places
        return max([each, *map(self.after, left)])

    def _left(self, node: Node) -> float:
        return (self.of(node) or 0.0) * (1 - self._share[node.id])

    def after(self, node: Node) -> float:
        """From the beginning of a stage to the end of the longest chain of stages that need it; 0 for what is not known."""
        longest: dict[str, float] = {}
        left = [node.id]
        while left:  # no recursion: a chain of branches may be long
            id = left[-1]
            if unknown := [other for other in self._needed_by[id] if other not in longest]:
                left += unknown
                continue
            longest[left.pop()] = self._left(self._nodes[id]) + max((longest[it] for it in self._needed_by[id]), default=0.0)
        return longest[node.id]


def spent(tries: Iterable[journal.Try]) -> float:
    """Seconds of those that have ended."""
    return sum(one.ended - one.began for one in tries if one.ended is not None)
