"""Token stream in random order, whose memory does not grow with the corpus.

Blocks of documents are shuffled, then documents within groups of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from megaenc import counter_rng
from megaenc.data.packing.token_stream import TokenStream
from megaenc.errors import LocalInputError

# A corpus of more documents is shuffled by blocks, an epoch of more packs by a KeyedPermutation.
MOST_SHUFFLED = 1 << 20
# Each block takes two reads of the index, and some 40 bytes in each process.
_MOST_BLOCKS = 1 << 19
# Documents that are shuffled together, in a fraction of a millisecond, but at least so many blocks:
# those of a pack should not be neighbours.
_GROUP_DOCUMENTS = 1 << 12
_GROUP_BLOCKS = 4


@dataclass(frozen=True, eq=False)
class DocumentBlocks:
    """Part of a corpus, in blocks of `size` consecutive documents.

    `split_corpus` returns it for a large corpus. `indices`, int64[B], are the 0-based indices of
    its blocks in the corpus. Block b has the documents b * size to (b + 1) * size - 1; the last
    block of a corpus may have fewer. `len` is size * B, the number of documents at most.
    """

    size: int
    indices: np.ndarray

    def __len__(self) -> int:
        """Return the number of documents, counting the last block as full."""
        return self.size * len(self.indices)


def choose_block_size(documents: int) -> int:
    """Return the number of documents in a block of a corpus of `documents`.

    It is the smallest power of two that gives at most 2**19 blocks.
    """
    return 1 << max(0, (-(-documents // _MOST_BLOCKS) - 1).bit_length())


class BlockSource(Protocol):
    """Interface of a corpus for BlockStream: `len` in documents, offsets, and tokens."""

    def __len__(self) -> int:
        """Return D, the number of documents."""

    def block_offsets(self, size: int) -> np.ndarray:
        """Return the token offset of each block of `size` documents, then the end.

        Returns:
            int64[blocks + 1], in tokens from the start of the corpus; the last one is its length.
        """

    def document_offsets(self, documents: np.ndarray) -> np.ndarray:
        """Return the token offset of each of `documents`, as int64 of the same shape.

        Offsets are in tokens from the start of the corpus. `documents` are 0-based indices, and D
        means the end of the last document.
        """

    def read_ranges(
        self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Return counts[i] tokens from offset begins[i], concatenated as int64.

        All three arrays are int64[n]. Offsets are in tokens from the start of the corpus, as in
        `document_offsets`. Each range lies within documents[i].
        """


class BlockStream(TokenStream):
    """TokenStream that shuffles blocks, and the documents within a few blocks.

    `BlockStream(corpus, blocks, seed)` takes the documents of `blocks` of a BlockSource, and raises
    InputError if they hold no token. In each epoch, a random order of the blocks is cut into groups
    of some thousand documents. Group lengths are known from the blocks' offsets; the order within a
    group is computed when one of its tokens is read.
    """

    def __init__(self, corpus: BlockSource, blocks: DocumentBlocks, seed: int):
        """Build the stream of the documents of `blocks`.

        Raises:
            InputError: They hold no token.
        """
        super().__init__(corpus, seed)
        lengths = np.diff(corpus.block_offsets(blocks.size))[blocks.indices]
        self._block_indices = blocks.indices[lengths > 0]
        self._lengths = lengths[lengths > 0]
        self._size = blocks.size
        self.tokens_per_epoch = int(lengths.sum())
        self.check_has_tokens(len(blocks))
        self._blocks_per_group = max(_GROUP_BLOCKS, _GROUP_DOCUMENTS // blocks.size)
        self._block_order = lru_cache(maxsize=2)(self._shuffle_blocks)
        # Packs in random order rarely share a group.
        self._group_order = lru_cache(maxsize=4)(self._shuffle_group)

    def _read_piece(self, epoch: int, begin: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens from token `begin` of `epoch`, and their number in each document.

        They end with their group at the latest.
        """
        _, group_ends = self._block_order(epoch)
        group = int(np.searchsorted(group_ends, begin, side="right"))
        documents, offsets, ends = self._group_order(epoch, group)
        begin -= int(group_ends[group - 1]) if group else 0
        end = min(begin + count, int(ends[-1]))
        # Documents of tokens begin and end - 1.
        first, last = np.searchsorted(ends, (begin, end - 1), side="right")
        stops = np.minimum(ends[first : last + 1], end)
        starts = np.append(begin, stops[:-1])
        skipped = begin - (int(ends[first - 1]) if first else 0)  # tokens of the first document
        begins = offsets[first : last + 1].copy()
        begins[0] += skipped
        counts = stops - starts
        return self.corpus.read_ranges(documents[first : last + 1], begins, counts), counts

    def epoch_documents(self, epoch: int) -> np.ndarray:
        """Return the indices of the documents that hold tokens, in the order of `epoch`.

        Epochs are 0, 1, ... Only this method takes memory for each document.

        Returns:
            int64[documents].
        """
        groups = range(len(self._block_order(epoch)[1]))
        return np.concatenate([self._shuffle_group(epoch, group)[0] for group in groups])

    def permute_packs(self, count: int, epoch: int) -> Sequence[int] | np.ndarray:
        """Return a random order of the `count` packs of `epoch` (0, 1, ...).

        It is a permutation of range(count). That of more than 1,048,576 packs is no array but a
        KeyedPermutation, whose entries are computed where they are read.
        """
        if count <= MOST_SHUFFLED:
            return super().permute_packs(count, epoch)
        return counter_rng.KeyedPermutation(self.seed, "packs", count, counters=(epoch,))

    def _shuffle_blocks(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the blocks in `epoch`, and the ends of its groups.

        The ends, int64[groups], are in tokens from the start of the epoch.
        """
        order = counter_rng.permutation(
            self.seed, "blocks", len(self._block_indices), counters=(epoch,)
        )
        firsts = np.arange(0, len(order), self._blocks_per_group)
        return order, np.cumsum(np.add.reduceat(self._lengths[order], firsts))

    def _shuffle_group(self, epoch: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the documents of a group in random order.

        Returns:
            int64[n] each: their numbers, their token offsets in the .bin, and their ends in tokens
            from the start of the group.

        Raises:
            LocalInputError: The index has changed since it was opened.
        """
        order, group_ends = self._block_order(epoch)
        blocks = self._block_indices[
            order[group * self._blocks_per_group : (group + 1) * self._blocks_per_group]
        ]
        boundaries = np.minimum(
            blocks[:, None] * self._size + np.arange(self._size + 1), len(self.corpus)
        )
        boundary_offsets = self.corpus.document_offsets(boundaries)
        documents = boundaries[:, :-1].ravel()
        offsets = boundary_offsets[:, :-1].ravel()
        lengths = np.diff(boundary_offsets).ravel()
        present = np.flatnonzero(lengths)
        order = present[
            counter_rng.permutation(self.seed, "documents", len(present), counters=(epoch, group))
        ]
        ends = np.cumsum(lengths[order])
        if ends[-1] != group_ends[group] - (group_ends[group - 1] if group else 0):
            prefix = getattr(self.corpus, "prefix", "corpus")
            raise LocalInputError(
                f"{prefix}.idx: has changed since it was opened; start the run again"
            )
        return documents[order], offsets[order], ends
