"""The endless stream of tokens that packs are cut from: all documents end to end, epoch after epoch, in a new order each time."""

from functools import lru_cache
from typing import Protocol

import numpy as np

from megaenc import randomness
from megaenc.errors import InputError


class Documents(Protocol):
    """Where the tokens come from; a Corpus is one."""

    document_lengths: np.ndarray
    """int64[D] in tokens."""

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int64[stop - start]."""


class Stream:
    """In every epoch all documents are laid end to end in a new random order, and epoch follows epoch without a gap.

    Documents without tokens take no part. A position is a number of tokens from the start of the stream.
    """

    def __init__(self, corpus: Documents, documents: np.ndarray, seed: int):
        """`documents`: int64[D], the numbers of those to use. Raises InputError when they hold no token."""
        lengths = corpus.document_lengths[documents]
        self.corpus = corpus
        self.documents = documents[lengths > 0]
        self.seed = seed
        self._lengths = lengths[lengths > 0]
        self.tokens_per_epoch = int(self._lengths.sum())
        if self.tokens_per_epoch == 0:
            raise InputError(
                f"{getattr(corpus, 'prefix', 'corpus')}: found no tokens in {len(documents)} documents, expected at least one"
            )
        # Two: the last pack of an epoch reaches into the next one, and random order may visit it at any time.
        self.epoch_order = lru_cache(maxsize=2)(self._epoch_order)

    def cut(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64[count] from position `start` on, and the edges int32[D + 1] of the documents, 0 first, `count` last."""
        tokens = np.empty(count, dtype=np.int64)
        edges = [0]
        while edges[-1] < count:
            epoch, begin = divmod(start + edges[-1], self.tokens_per_epoch)
            order, ends = self.epoch_order(epoch)
            end = min(begin + count - edges[-1], self.tokens_per_epoch)
            first, last = np.searchsorted(ends, (begin, end - 1), side="right")  # the places that hold tokens begin and end - 1
            for place in range(first, last + 1):
                at = int(order[place])
                offset = int(ends[place] - self._lengths[at])  # of the document's first token within the epoch
                piece = self.corpus.tokens(int(self.documents[at]), max(begin - offset, 0), min(end, int(ends[place])) - offset)
                tokens[edges[-1] : edges[-1] + len(piece)] = piece
                edges.append(edges[-1] + len(piece))
        return tokens, np.array(edges, dtype=np.int32)

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of `documents` lies at each place of the epoch, and int64[D] where it ends, in tokens from the epoch's start."""
        order = narrow(randomness.permutation(self.seed, "documents", len(self._lengths), counters=(epoch,)))
        return order, np.cumsum(self._lengths[order])


def narrow(order: np.ndarray) -> np.ndarray:
    """int32 wherever it suffices: a hundred million documents are 400 MB less."""
    return order.astype(np.int32) if len(order) < 2**31 else order
