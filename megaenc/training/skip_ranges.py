"""Packs that a run leaves out: which sample is read when some are not, and whether two lists have let a run read the same."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from megaenc.errors import InputError

NO_SKIPPED_PACKS = ("none",)
"""What `--skip-packs` says for an empty list; without the flag a run goes on with the list that it has."""

_MAX_LISTED_RANGES = 8  # ranges that a line names


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
    def from_numbers(cls, numbers: Iterable[int]) -> Self:
        """Of single numbers, in any order."""
        return cls.of((number, number) for number in numbers)

    @classmethod
    def read(cls, texts: Iterable[str]) -> Self:
        """Of `1200-1215` and `1300`, or `none`, as `--skip-packs` has them. Raises InputError."""
        ranges = []
        for text in texts if tuple(texts) != NO_SKIPPED_PACKS else ():
            found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
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

    def format_short(self, between: str = " ") -> str:
        """The first _SHOWN of the `texts`."""
        return between.join(self.texts if len(self.texts) <= _MAX_LISTED_RANGES else (*self.texts[:_MAX_LISTED_RANGES], "..."))

    def __or__(self, other: "SkippedPacks") -> "SkippedPacks":
        return SkippedPacks.of(self.ranges + other.ranges)

    def sample(self, first: int, position: int) -> int:
        """Return the sample at `position` (0, 1, ...) of those from number `first` on that are not left out."""
        sample = first + position
        for start, last in self.ranges:
            if start > sample:
                break
            sample += max(0, last + 1 - max(start, first))
        return sample

    def end(self, first: int, count: int) -> int:
        """Return the number after the last of the `count` samples that are read from number `first` on."""
        return self.sample(first, count - 1) + 1 if count else first

    def between(self, start: int, stop: int) -> "SkippedPacks":
        """Return those from number `start` to `stop` - 1."""
        cut = ((max(first, start), min(last, stop - 1)) for first, last in self.ranges)
        return SkippedPacks(tuple((first, last) for first, last in cut if first <= last))

    def describe(self) -> str:
        """For the console: nothing where none is left out."""
        return f"; {self.size:,} pack{'s' * (self.size > 1)} left out: {self.format_short()}" if self.ranges else ""

    @property
    def size(self) -> int:
        """How many they are."""
        return sum(last + 1 - first for first, last in self.ranges)

    def reads_same(self, other: "SkippedPacks", first: int, count: int) -> bool:
        """Return whether with either list the first `count` samples from number `first` on are the same."""
        end = self.end(first, count)
        return self.between(first, end) == other.between(first, end)


NOTHING_SKIPPED = SkippedPacks()
