"""Packs that a run leaves out: which sample is read when some are not, and whether two lists have let a run read the same."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megaenc.errors import InputError
from megaenc.training.run_folder import FACTS

if TYPE_CHECKING:
    from megaenc.training.plan import Plan


@dataclass(frozen=True)
class SkippedPacks:
    """Samples that are left out: the first and the last of each range, in order, no two ranges touching."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Of ranges in any order, which may overlap."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return cls(tuple(merged))

    @classmethod
    def read(cls, texts: Iterable[str]) -> Self:
        """Of `1200-1215` and `1300`, as `--skip-packs` has them. Raises InputError."""
        ranges = []
        for text in texts:
            found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
            if not found or int(found[2] or found[1]) < int(found[1]):
                raise InputError(
                    f"--skip-packs {text}: expected the number of a pack, 1300, or the first and last of some, 1200-1215"
                )
            ranges.append((int(found[1]), int(found[2] or found[1])))
        return cls.of(ranges)

    @property
    def texts(self) -> tuple[str, ...]:
        """What `read` reads."""
        return tuple(f"{first}-{last}" if last > first else f"{first}" for first, last in self.ranges)

    def __or__(self, other: "SkippedPacks") -> "SkippedPacks":
        return SkippedPacks.of(self.ranges + other.ranges)

    @cached_property
    def _before(self) -> list[int]:
        """Samples left out before each range, and by all."""
        return [0, *accumulate(last - first + 1 for first, last in self.ranges)]

    @cached_property
    def _places(self) -> list[int]:
        """Where each range would begin if no sample of it or of those before counted."""
        return [first - before for (first, _), before in zip(self.ranges, self._before, strict=False)]

    def sample(self, first: int, position: int) -> int:
        """The sample at `position` (0, 1, ...) of those from number `first` on that are not left out."""
        place = first - self.between(0, first).size + position
        return place + self._before[bisect_right(self._places, place)]

    def end(self, first: int, count: int) -> int:
        """The number after the last of the `count` samples that are read from number `first` on."""
        return self.sample(first, count - 1) + 1 if count else first

    def between(self, start: int, stop: int) -> "SkippedPacks":
        """Those from number `start` to `stop` - 1."""
        cut = ((max(first, start), min(last, stop - 1)) for first, last in self.ranges)
        return SkippedPacks(tuple((first, last) for first, last in cut if first <= last))

    def describe(self) -> str:
        """For the console: nothing where none is left out."""
        if not self.ranges:
            return ""
        more = " ..." if len(self.ranges) > 8 else ""
        return f"; {self.size:,} pack{'s' * (self.size > 1)} left out: {' '.join(self.texts[:8])}{more}"

    @property
    def size(self) -> int:
        """How many they are."""
        return self._before[-1]

    def agrees(self, other: "SkippedPacks", first: int, count: int) -> bool:
        """Whether with either list the first `count` samples from number `first` on are the same."""
        end = self.end(first, count)
        return self.between(first, end) == other.between(first, end)


NOTHING_SKIPPED = SkippedPacks()


def find_skipped(plan: "Plan") -> tuple[SkippedPacks, tuple[str, ...]]:
    """What the run of `plan`, complete but for this, leaves out, and which of it rewinds have added, one text each.

    That is what the run folder says or, for a new branch, its parent's; `--skip-packs` may differ from it where nothing has been
    read yet. InputError, naming what to give, where it differs before.
    """
    given, start = SkippedPacks.read(plan.settings.data.skip_packs), plan.start
    recorded, rewinds = _recorded(Path(plan.settings.output.save)) if plan.settings.output.save else (None, ())
    parents = SkippedPacks.read(start.skip_packs)
    inherited = parents if recorded is None else recorded
    wanted = given | SkippedPacks.read(rewinds) if given.ranges else inherited  # the same command goes on after a rewind
    if not parents.agrees(wanted, start.skip_samples, plan.samples_by(start.step)):
        raise _differs(f"--branch-at {start.step}", start.run, parents, wanted)
    step = 0 if recorded is None else _newest(plan, recorded)
    if step and not recorded.agrees(wanted, start.skip_samples, plan.samples_by(step)):
        raise _differs(f"--save {plan.settings.output.save} holds a different run", f"its step {step}", recorded, wanted)
    return wanted, rewinds


def read_alike(plan: "Plan", state: dict[str, Any]) -> bool:
    """Whether the run that saved a checkpoint with the JSON `state` had read what `plan` reads up to there.

    It had not if a rewind has left packs out since.
    """
    there = SkippedPacks.read(state.get("skip_packs", ()))
    return there.agrees(plan.skipped, plan.start.skip_samples, plan.samples_by(state["step"]))


def _differs(where: str, whose: str, there: SkippedPacks, here: SkippedPacks) -> InputError:
    texts = [" ".join(packs.texts) or "not given" for packs in (there, here)]
    return InputError(
        f"{where}: skip_packs is {texts[0]} there, {texts[1]} here; expected the same up to the last pack that {whose} has read"
    )


def _recorded(run: Path) -> tuple[SkippedPacks | None, tuple[str, ...]]:
    """What the run.json of a run folder says; None where there is none, or one that its reader will complain about."""
    try:
        facts = json.loads((run / FACTS).read_text(encoding="utf-8"))
        return SkippedPacks.read(facts.get("skip_packs", ())), tuple(facts.get("rewinds", ()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None, ()


def _newest(plan: "Plan", recorded: SkippedPacks) -> int:
    """The newest step with a checkpoint that fits what the folder says, up to the one that its tracker names; 0 for none."""
    folder = Path(plan.settings.output.save) / "checkpoints"
    tracker = folder / "latest_checkpointed_iteration.txt"
    text = tracker.read_text(encoding="utf-8").strip() if tracker.exists() else ""
    for file in sorted(folder.glob("iter_*/state.json"), reverse=True):
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            there, step = SkippedPacks.read(state.get("skip_packs", ())), int(state["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # named when it is to be loaded
        beyond = text.isdecimal() and step > int(text)
        if not beyond and there.agrees(recorded, plan.start.skip_samples, plan.samples_by(step)):
            return step
    return 0
