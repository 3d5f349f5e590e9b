"""Average document lengths in packs.

Attention FLOPs and predicted positions follow from them.
"""

import glob
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaenc.data.indexed.corpus import check_index, check_index_arrays
from megaenc.data.indexed.indexed_dataset import IndexArrays
from megaenc.data.indexed.metadata import metadata_path, read_corpus_metadata
from megaenc.data.packing.data_path import (
    CorpusSource,
    find_corpora,
    is_pattern,
    list_prefixes,
    parse_data_path,
    weigh_corpora,
)
from megaenc.data.packing.packed_dataset import (
    SHORTEST_CHUNK,
    check_two_chunks_fit,
    mean_squared_chunk_lengths,
)
from megaenc.data.packing.sentence_packing import check_has_sentences
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.model.config import visible_pairs
from megaenc.training.config_groups import DataConfig

_LISTED_CORPORA = 6
# Probably, if nothing says what surrounds a document.
_ONE_EOS = SpecialTokens("eod", after=(0,))


@dataclass(frozen=True)
class LengthModel:
    """Averages per pack that follow from the lengths of documents.

    `build_length_model` builds it. Attention is within documents, and within pieces of documents
    that are cut at the ends of packs. `pieces` is the number of both, `squares` the sum of their
    squared lengths. `local_pairs` is the number of ordered token pairs within the window of local
    layers, each token with itself included; 0 without such layers. `special` counts special tokens,
    which are never masked, `special_starts` those that begin a document. `source` is text for the
    report.
    """

    squares: float
    """sum of the squared lengths of documents and pieces of documents"""
    pieces: float
    """number of documents and pieces of documents"""
    special: float
    """special tokens, which are never masked"""
    source: str
    local_pairs: float = 0.0
    """sum over documents and pieces of the ordered pairs of tokens within the window of local
    layers; 0 without a window"""
    special_starts: float = 0.0
    """special tokens that begin a document"""


def build_length_model(
    data: DataConfig, document_tokens: tuple[int, ...], window: int | None = None
) -> LengthModel:
    """Return the LengthModel of given document lengths, or else of corpora.

    If --data-path is empty or a corpus of it is not on this disk, a pack is one document. With
    random-length packing it is two chunks, whatever the documents are.

    Args:
        data: Packing, sequence length and corpora.
        document_tokens: Lengths of documents with an EOS, equally likely; () to read the corpora.
        window: Largest distance in the model's local layers; None without any.

    Raises:
        InputError: A corpus or --data-path is invalid, or a pack too short for two chunks.
    """
    if data.packing == "random-length":
        check_two_chunks_fit(data.seq_length)
        squares = mean_squared_chunk_lengths(data.seq_length)
        pairs = mean_chunk_pairs(data.seq_length, window)
        return LengthModel(
            squares, 2.0, 0.0, "two chunks per pack, cut at random", local_pairs=pairs
        )
    if document_tokens:
        lengths = np.array(document_tokens, dtype=np.int64)
        text = (
            f"{len(document_tokens)} lengths given"
            if len(document_tokens) > 1
            else "one length given"
        )
        source = f"documents of {lengths.mean():,.0f} tokens on average, {text}"
        return _concat_length_model(lengths, data.seq_length, _ONE_EOS, source, window)
    sources = _find_local_corpora(data)
    prefixes = list_prefixes(sources)
    if not prefixes or not all(os.path.isfile(f"{prefix}.idx") for prefix in prefixes):
        pairs = float(window is not None and visible_pairs(data.seq_length, window))
        source = "document lengths unknown: assuming one document per pack"
        return LengthModel(float(data.seq_length) ** 2, 1.0, 0.0, source, local_pairs=pairs)
    tokens, parts = zip(
        *(_read_corpus_lengths(prefix, data, window) for prefix in prefixes), strict=True
    )
    weights = list(map(float, weigh_corpora(sources, tokens, data.blend_temperature)))
    names = ("squares", "pieces", "special", "local_pairs", "special_starts")
    means = {
        name: float(np.average([getattr(part, name) for part in parts], weights=weights))
        for name in names
    }
    source = ", ".join(part.source for part in parts[:_LISTED_CORPORA])
    if len(parts) > _LISTED_CORPORA:
        source += f", and {len(parts) - _LISTED_CORPORA:,} more corpora"
    return LengthModel(source=source, **means)


def mean_chunk_pairs(seq_length: int, window: int | None) -> float:
    """Return the mean number of ordered token pairs in a random-length pack.

    Pairs are in one chunk, at most `window` apart; a token and itself are a pair, too. The mean is
    over all cuts of `seq_length` tokens in two chunks of at least SHORTEST_CHUNK tokens, which must
    fit (not checked). The result is 0 if `window` is None.
    """
    lengths = range(SHORTEST_CHUNK, seq_length - SHORTEST_CHUNK + 1)
    return (
        0.0
        if window is None
        else 2 * sum(visible_pairs(length, window) for length in lengths) / len(lengths)
    )


def read_vocab_size(data: DataConfig) -> int | None:
    """Return the largest vocabulary size in the metadata of --data-path's corpora.

    It is None if no corpus with metadata is on this disk.

    Raises:
        InputError: Metadata are invalid.
    """
    sizes = [
        read_corpus_metadata(prefix).vocab_size
        for prefix in list_prefixes(_find_local_corpora(data))
        if os.path.isfile(metadata_path(prefix))
    ]
    return max(sizes, default=None)


def _find_local_corpora(data: DataConfig) -> list[CorpusSource]:
    """Return the sources of --data-path, none if a pattern matches nothing.

    An estimate needs no corpus on this disk.
    """
    for _, word in parse_data_path(data.data_path):
        if is_pattern(word) and not glob.glob(f"{word}.idx"):
            return []
    return find_corpora(data.data_path)


def _read_corpus_lengths(
    prefix: str, data: DataConfig, window: int | None
) -> tuple[int, LengthModel]:
    """Return a corpus's number of tokens and its length model."""
    token_type = check_index(prefix)
    index = IndexArrays.map(f"{prefix}.idx")
    check_index_arrays(prefix, index, token_type)
    ends = np.concatenate([[0], np.cumsum(index.lengths[:], dtype=np.int64)])
    lengths = np.diff(ends[index.documents[:]])
    metadata = read_corpus_metadata(prefix) if metadata_path(prefix).exists() else None
    if data.packing == "sentences":
        check_has_sentences(prefix, metadata, sequences=len(index.lengths), documents=len(lengths))
    lengths = lengths[lengths > 0]
    special = _ONE_EOS if metadata is None else metadata.surrounding_tokens
    source = (
        f"{Path(prefix).name}: {len(lengths):,} documents of {lengths.mean():,.0f} tokens on "
        "average"
    )
    return int(lengths.sum()), _concat_length_model(
        lengths, data.seq_length, special, source, window
    )


def _concat_length_model(
    lengths: np.ndarray, pack: int, special_tokens: SpecialTokens, source: str, window: int | None
) -> LengthModel:
    """Return the averages of documents that are concatenated and cut at pack ends.

    Documents are in random order. A document of d tokens overlaps d + L - 1 windows of L tokens: |d
    - L| + 1 of them by m = min(d, L) tokens, and two each by 1, 2, ..., m - 1. Offsets are equally
    likely: a document contributes 1 / L of these sums, a pack has L / mean(d) documents.

    Args:
        lengths: int64[D].
        pack: Tokens of a pack, L.
    """
    d = lengths.astype(np.float64)
    mean = float(lengths.mean(dtype=np.float64))
    m = np.minimum(d, pack)
    squares = m * m * (np.abs(d - pack) + 1) + (m - 1) * m * (2 * m - 1) / 3
    pieces = (mean + pack - 1) / mean
    documents = pack / mean
    special = special_tokens.count * documents
    pairs = 0.0
    if window is not None:
        by_length = np.array(
            [visible_pairs(length, window) for length in range(pack + 1)], dtype=np.float64
        )
        shorter = np.cumsum(by_length) - by_length  # of pieces of 1 to m - 1 tokens
        longest = m.astype(np.int64)
        pairs = float(
            (by_length[longest] * (np.abs(d - pack) + 1) + 2 * shorter[longest]).mean() / mean
        )
    starts = documents if special_tokens.before else 0.0
    return LengthModel(float(squares.mean() / mean), pieces, special, source, pairs, starts)
