"""How long the documents of a corpus are."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bin:
    """The documents of `low` to `high` tokens, both included."""

    low: int
    high: int
    documents: int
    tokens: int
    """Of these documents together."""


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens, over all documents, empty ones included."""

    mean: float
    median: float
    p5: float
    """One document in twenty is shorter."""
    p95: float
    longest: int
    longest_document: int
    """Its number; the first where there are several."""
    empty: int
    bins: tuple[Bin, ...]
    """From the shortest documents to the longest without a gap: none, 1, 2 to 3, 4 to 7, 8 to 15, ... tokens."""


def lengths_of(document_lengths: np.ndarray) -> Lengths:
    """The Lengths of documents, int64[D] in tokens, D at least 1."""
    p5, median, p95 = np.percentile(document_lengths, [5, 50, 95])
    longest = int(document_lengths.argmax())
    empty = int((document_lengths == 0).sum())
    return Lengths(
        mean=float(document_lengths.mean()),
        median=float(median),
        p5=float(p5),
        p95=float(p95),
        longest=int(document_lengths[longest]),
        longest_document=longest,
        empty=empty,
        bins=_bins(document_lengths),
    )


def _bins(document_lengths: np.ndarray) -> tuple[Bin, ...]:
    # frexp's exponent is exact: 0 for no token, 1 for 1, 2 for 2 and 3, 3 for 4 to 7.
    exponents = np.frexp(document_lengths.astype(np.float64))[1]
    documents = np.bincount(exponents)
    tokens = np.bincount(exponents, weights=document_lengths)
    return tuple(
        Bin(1 << exponent >> 1, (1 << exponent) - 1, int(documents[exponent]), int(tokens[exponent]))
        for exponent in range(int(exponents.min()), len(documents))
    )
