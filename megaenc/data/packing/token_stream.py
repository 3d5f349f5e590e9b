"""Endless streams of tokens from which packs are cut.

All documents are concatenated, in a new random order each epoch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from megaenc import counter_rng
from megaenc.errors import InputError


class DocumentSource(Protocol):
    """Protocol of a corpus for DocumentStream: `document_lengths` and `read_spans`."""

    document_lengths: np.ndarray
    """int64[D], length of each document in tokens."""

    def read_spans(
        self, documents: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> np.ndarray:
        """Return tokens starts[i]..stops[i]-1 of each documents[i], joined, as int64.

        All three are int64[n]; positions are 0-based within each document. Each span has at least
        one token.
        """


class TokenStream(ABC):
    """Base class of an endless token sequence of a corpus, readable at any position.

    Documents of `corpus` are joined in a random order that `seed` and the epoch determine; those
    without tokens are left out. A position is a number of tokens from the start of the stream.
    Epochs are 0-based and have `tokens_per_epoch` tokens each, which the subclass sets; it also
    implements `_read_piece`, for `read`, and `epoch_documents`.
    """

    def __init__(self, corpus: object, seed: int):
        self.corpus = corpus
        self.seed = seed
        self.tokens_per_epoch: int

    def check_has_tokens(self, documents: int) -> None:
        """Raise InputError if an epoch of the stream has no token.

        `documents` is the number of its documents, for the error.
        """
        if self.tokens_per_epoch == 0:
            raise InputError(
                f"{getattr(self.corpus, 'prefix', 'corpus')}: "
                f"found no tokens in {documents} documents, expected at least one"
            )

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` tokens from position `start`, with the boundaries of documents.

        They may reach over several documents and epochs; the first and last document may be cut.
        `count` is at least 1.

        Returns:
            int64[count] token ids, and int32[D + 1] cumulative lengths of the D pieces of documents
            among them, from 0 to `count` (`cu_seqlens`).
        """
        tokens = []
        cu_seqlens = [np.zeros(1, dtype=np.int64)]
        done = 0
        while done < count:
            epoch, begin = divmod(start + done, self.tokens_per_epoch)
            piece, lengths = self._read_piece(epoch, begin, count - done)
            tokens.append(piece)
            cu_seqlens.append(done + np.cumsum(lengths))
            done += len(piece)
        joined = tokens[0] if len(tokens) == 1 else np.concatenate(tokens)
        return joined, np.concatenate(cu_seqlens, dtype=np.int32)

    @abstractmethod
    def _read_piece(self, epoch: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return 1 to `count` tokens from token `begin` of `epoch`, as int64.

        The second array has the number of them in each document.
        """

    @abstractmethod
    def epoch_documents(self, epoch: int) -> np.ndarray:
        """Return the stream's documents that hold tokens, in the order of `epoch`.

        Returns:
            int64 or int32[documents], indices in the corpus.
        """

    def permute_packs(self, count: int, epoch: int) -> Sequence[int] | np.ndarray:
        """Return a random order of the `count` packs of the 0-based `epoch`.

        It is a permutation of range(count) that `seed` and `epoch` determine: int32 or
        int64[count], or for a large BlockStream a KeyedPermutation.
        """
        return narrow_to_int32(
            counter_rng.permutation(self.seed, "packs", count, counters=(epoch,))
        )


class DocumentStream(TokenStream):
    """TokenStream that shuffles all documents of an epoch.

    `DocumentStream(corpus, documents, seed)` takes int64[D] indices of documents in the corpus, and
    raises InputError if they hold no token. It takes some 20 bytes of memory for each document.
    """

    def __init__(self, corpus: DocumentSource, documents: np.ndarray, seed: int):
        """Build the stream of `documents`, int64[D] indices of documents in the corpus.

        Raises:
            InputError: They hold no token.
        """
        super().__init__(corpus, seed)
        lengths = corpus.document_lengths[documents]
        self.documents = narrow_to_int32(documents[lengths > 0])
        self._lengths = narrow_to_int32(lengths[lengths > 0])
        self.tokens_per_epoch = int(self._lengths.sum(dtype=np.int64))
        self.check_has_tokens(len(documents))
        # Two epochs: the last pack of one reaches into the next and may be read at any time.
        self.epoch_order = lru_cache(maxsize=2)(self._epoch_order)

    def _read_piece(self, epoch: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return up to `count` tokens from token `begin` of `epoch`.

        The second array has the number of them in each document.
        """
        order, ends = self.epoch_order(epoch)
        end = min(begin + count, self.tokens_per_epoch)
        # Documents of tokens begin and end - 1.
        first, last = np.searchsorted(ends, (begin, end - 1), side="right")
        indices = order[first : last + 1]
        document_ends = ends[first : last + 1]
        offsets = document_ends - self._lengths[indices]  # of the first tokens, within the epoch
        starts = np.maximum(begin - offsets, 0)
        stops = np.minimum(end, document_ends) - offsets
        return self.corpus.read_spans(self.documents[indices], starts, stops), stops - starts

    def epoch_documents(self, epoch: int) -> np.ndarray:
        """Return the stream's documents that hold tokens, in the order of `epoch`.

        Returns:
            int32[documents], indices in the corpus; int64 if one of them does not fit.
        """
        return self.documents[self.epoch_order(epoch)[0]]

    def _epoch_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute the order of `documents` in `epoch`, and their ends.

        The ends, int64[D], are in tokens from the start of the epoch.
        """
        order = narrow_to_int32(
            counter_rng.permutation(self.seed, "documents", len(self._lengths), counters=(epoch,))
        )
        return order, np.cumsum(self._lengths[order], dtype=np.int64)


def narrow_to_int32(values: np.ndarray) -> np.ndarray:
    """Return non-negative integers as an int32 copy if they all fit, else `values`.

    It saves 400 MB for 100 million documents.
    """
    return values.astype(np.int32) if not len(values) or values.max() < 2**31 else values
