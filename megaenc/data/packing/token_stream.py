"""The endless stream of tokens that packs are cut from: all documents end to end, epoch after epoch, in a new order each time."""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np

from megaenc import counter_rng
from megaenc.data.packing.shared_memory import Arrays, hash_array, share_arrays, has_local_peers
from megaenc.errors import InputError


class DocumentSource(Protocol):
    """Where the tokens come from; a Corpus is one."""

    document_lengths: np.ndarray
    """int64[D] in tokens."""

    def read_spans(self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """int64[sum(stops - starts)]: of each of `documents` its tokens starts..stops-1, at least one, end to end."""


class TokenStream:
    """In every epoch all documents are laid end to end in a new random order, and epoch follows epoch without a gap.

    Documents without tokens take no part. A position is a number of tokens from the start of the stream.
    """

    def __init__(self, corpus: DocumentSource, documents: np.ndarray, seed: int):
        """`documents`: int64[D], the numbers of those to use. Raises InputError when they hold no token."""
        self.corpus = corpus
        self.seed = seed
        self._key = (*corpus.key, hash_array(documents), seed) if has_local_peers() and hasattr(corpus, "key") else None

        def with_tokens() -> tuple[np.ndarray, np.ndarray]:
            lengths = corpus.document_lengths[documents]
            return narrow_to_int32(documents[lengths > 0]), narrow_to_int32(lengths[lengths > 0])

        self.documents, self._lengths = self.shared(("documents",), with_tokens)
        self.tokens_per_epoch = int(self._lengths.sum(dtype=np.int64))
        if self.tokens_per_epoch == 0:
            raise InputError(
                f"{getattr(corpus, 'prefix', 'corpus')}: found no tokens in {len(documents)} documents, expected at least one"
            )
        # Two: the last pack of an epoch reaches into the next one, and random order may visit it at any time.
        self.epoch_order = lru_cache(maxsize=2)(self._epoch_order)

    def shared(self, what: tuple[object, ...], make: Callable[[], Arrays]) -> Arrays:
        """Return `make()`, computed once for all processes of a machine under the key `what`; see `shared_memory`."""
        return make() if self._key is None else share_arrays((*self._key, *what), make)

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64[count] from position `start` on, and the edges int32[D + 1] of the documents, 0 first, `count` last."""
        tokens, edges, done = [], [np.zeros(1, dtype=np.int64)], 0
        while done < count:
            epoch, begin = divmod(start + done, self.tokens_per_epoch)
            order, ends = self.epoch_order(epoch)
            end = min(begin + count - done, self.tokens_per_epoch)
            first, last = np.searchsorted(ends, (begin, end - 1), side="right")  # the places that hold tokens begin and end - 1
            at, theirs = order[first : last + 1], ends[first : last + 1]
            offsets = theirs - self._lengths[at]  # of each document's first token within the epoch
            starts, stops = np.maximum(begin - offsets, 0), np.minimum(end, theirs) - offsets
            tokens.append(self.corpus.read_spans(self.documents[at], starts, stops))
            edges.append(done + np.cumsum(stops - starts))
            done += end - begin
        return tokens[0] if len(tokens) == 1 else np.concatenate(tokens), np.concatenate(edges, dtype=np.int32)

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Which of `documents` lies at each place of the epoch, and int64[D] where it ends, in tokens from the epoch's start."""

        def make() -> tuple[np.ndarray, np.ndarray]:
            order = narrow_to_int32(counter_rng.permutation(self.seed, "documents", len(self._lengths), counters=(epoch,)))
            return order, np.cumsum(self._lengths[order], dtype=np.int64)

        order, ends = self.shared(("order", epoch), make)
        return order, ends


def narrow_to_int32(values: np.ndarray) -> np.ndarray:
    """Numbers from 0 on as int32 where that suffices: of a hundred million documents 400 MB less."""
    return values.astype(np.int32) if not len(values) or values.max() < 2**31 else values
