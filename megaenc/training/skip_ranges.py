"""Ranges of samples that a run skips, and the order of the remaining ones."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from megaenc.errors import InputError

NO_SKIPPED_PACKS = ("none",)
"""Value of `--skip-packs` for an empty list; without the flag a resumed run keeps its list."""

_MAX_LISTED_RANGES = 8  # in a console line


@dataclass(frozen=True)
class SkippedPacks:
    """Set of sample indices, the packs of the data order that a run skips.

    Samples are indexed from 0. `ranges` are (first, last), both inclusive, sorted, disjoint and not
    adjacent; `from_ranges`, `from_indices` and `parse` ensure that. `|` is the union.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_ranges(cls, ranges: Iterable[tuple[int, int]]) -> Self:
        """Return the set of inclusive ranges (first, last), given in any order.

        Overlapping and adjacent ranges are merged. `first` must not exceed `last`, which is not
        checked.
        """
        merged: list[tuple[int, int]] = []
        for first, last in sorted(ranges):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return cls(tuple(merged))

    @classmethod
    def from_indices(cls, indices: Iterable[int]) -> Self:
        """Return the set of sample indices, given in any order, also repeatedly."""
        return cls.from_ranges((index, index) for index in indices)

    @classmethod
    def parse(cls, texts: Collection[str]) -> Self:
        """Return the set of --skip-packs values such as `1200-1215` or `1300`.

        Ranges are inclusive. `none` as the only value is the empty set, as are no values.

        Raises:
            InputError: A value is no number or range (also `none` among others), or a range ends
                before it begins.
        """
        ranges = []
        for text in texts if tuple(texts) != NO_SKIPPED_PACKS else ():
            match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
            if not match or int(match[2] or match[1]) < int(match[1]):
                raise InputError(
                    f"--skip-packs {text}: expected the number of a pack (1300) or a range of "
                    "numbers (1200-1215)"
                )
            ranges.append((int(match[1]), int(match[2] or match[1])))
        return cls.from_ranges(ranges)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the set that the content of a run.json or state.json has.

        It is that of the field `skip_packs`, a list of --skip-packs values that includes those of
        rewinds; empty without the field. Errors of values are those of `parse`.
        """
        return cls.parse(record.get("skip_packs", ()))

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the ranges as values of --skip-packs, such as ("1200-1215", "1300").

        There are none for the empty set.
        """
        return tuple(
            f"{first}-{last}" if last > first else f"{first}" for first, last in self.ranges
        )

    def format_short(self, separator: str = " ") -> str:
        """Return the ranges as one text such as `1200-1215 1300`.

        `separator` joins them; of more than 8 ranges the first 8 and `...` are joined. The text of
        the empty set is empty.
        """
        return separator.join(
            self.texts
            if len(self.texts) <= _MAX_LISTED_RANGES
            else (*self.texts[:_MAX_LISTED_RANGES], "...")
        )

    def __or__(self, other: "SkippedPacks") -> "SkippedPacks":
        return SkippedPacks.from_ranges(self.ranges + other.ranges)

    def sample_at(self, first: int, position: int) -> int:
        """Return the index of the sample at `position` among the unskipped ones.

        Positions 0, 1, ... count the unskipped samples from index `first` on.
        """
        sample = first + position
        for start, last in self.ranges:
            if start > sample:
                break
            sample += max(0, last + 1 - max(start, first))
        return sample

    def end_sample(self, first: int, count: int) -> int:
        """Return the index after the last of the first `count` unskipped samples.

        They count from index `first` on, which is returned if `count` is 0.
        """
        return self.sample_at(first, count - 1) + 1 if count else first

    def clip(self, start: int, stop: int) -> "SkippedPacks":
        """Return the set of skipped indices from `start` to `stop` - 1."""
        clipped = ((max(first, start), min(last, stop - 1)) for first, last in self.ranges)
        return SkippedPacks(tuple((first, last) for first, last in clipped if first <= last))

    def describe(self) -> str:
        """Return the end of a console line about the skipped packs.

        It is such as `; 17 packs left out: 1200-1215 1300`, with the ranges of `format_short`, and
        empty for the empty set.
        """
        return (
            f"; {self.pack_count:,} pack{'s' * (self.pack_count > 1)} left out: "
            f"{self.format_short()}"
            if self.ranges
            else ""
        )

    @property
    def pack_count(self) -> int:
        """Return the number of skipped packs (samples) in all ranges."""
        return sum(last + 1 - first for first, last in self.ranges)

    def reads_same(self, other: "SkippedPacks", first: int, count: int) -> bool:
        """Return whether two sets skip the same samples among those that are read.

        Samples are read from index `first` on, until `count` samples that this set does not skip
        are read.
        """
        end = self.end_sample(first, count)
        return self.clip(first, end) == other.clip(first, end)


NOTHING_SKIPPED = SkippedPacks()
