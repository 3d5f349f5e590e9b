"""How documents lie in packs on average: what attention costs and how many positions predict follow from it."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaenc.data.indexed.corpus import check_index_arrays, check_index
from megaenc.data.indexed.indexed_dataset import IndexArrays
from megaenc.data.indexed.metadata import read_corpus_metadata, metadata_path
from megaenc.data.packing.blended_dataset import parse_data_path
from megaenc.data.packing.packed_dataset import check_two_chunks_fit, mean_squared_chunk_lengths
from megaenc.data.packing.sentence_packing import check_has_sentences
from megaenc.errors import InputError
from megaenc.training.config_groups import DataConfig

_LONGEST = 1 << 40  # tokens of a document


@dataclass(frozen=True)
class LengthModel:
    """What a pack holds on average."""

    squares: float
    """sum of the squared lengths of its documents and pieces"""
    pieces: float
    """documents and pieces"""
    special: float
    """tokens that end documents: no objective hides them"""
    source: str
    lengths: tuple[int, ...] = ()
    """some lengths of documents, equally likely, to make packs like these of; none: see `source`"""


def documents(data: DataConfig, given: tuple[int, ...]) -> LengthModel:
    """Return how `given` lengths, equally likely, lie in packs; else the corpora's, if they are here; else one document a pack.

    Packs of random length have two chunks whatever the documents are. InputError for a length or corpus that cannot be.
    """
    for length in given:
        if not 1 <= length <= _LONGEST:
            raise InputError(f"--document-tokens: found {str(length)[:40]}, expected lengths of 1 to {_LONGEST:,} tokens")
    if data.packing == "random-length":
        check_two_chunks_fit(data.seq_length)
        return LengthModel(mean_squared_chunk_lengths(data.seq_length), 2.0, 0.0, "two chunks a pack, cut at random")
    if given:
        lengths = np.array(given, dtype=np.int64)
        text = f"{len(given)} lengths given" if len(given) > 1 else "one length given"
        return _laid_end_to_end(lengths, data.seq_length, 1.0, f"documents of {lengths.mean():,.0f} tokens on average, {text}")
    found = parse_data_path(data.data_path) if data.data_path else []
    if not found or not all(os.path.isfile(f"{prefix}.idx") for _, prefix in found):
        return LengthModel(float(data.seq_length) ** 2, 1.0, 0.0, "lengths of documents not known: as if each pack were one")
    tokens, parts = zip(*(_of_corpus(prefix, data) for _, prefix in found), strict=True)
    shares = [weight for weight, _ in found if weight is not None]
    weights = [float(share / sum(shares)) for share in shares] or tokens
    mean = [np.average([getattr(part, name) for part in parts], weights=weights) for name in ("squares", "pieces", "special")]
    source = ", ".join(part.source for part in parts)
    return LengthModel(*map(float, mean), source, parts[int(np.argmax(weights))].lengths)


def vocabulary(data: DataConfig) -> int | None:
    """Return the ids of the tokenizer that made the corpora, as their .json says; None where they are not on this disk."""
    prefixes = [prefix for _, prefix in parse_data_path(data.data_path)] if data.data_path else []
    sizes = [read_corpus_metadata(prefix).vocab_size for prefix in prefixes if os.path.isfile(metadata_path(prefix))]
    return max(sizes, default=None)


def _of_corpus(prefix: str, data: DataConfig) -> tuple[int, LengthModel]:
    """Return the tokens of a corpus, and how its documents lie in packs."""
    token_type = check_index(prefix)
    index = IndexArrays.map(f"{prefix}.idx")
    check_index_arrays(prefix, index, token_type)
    ends = np.concatenate([[0], np.cumsum(index.lengths[:], dtype=np.int64)])
    lengths = np.diff(ends[index.documents[:]])
    sidecar = read_corpus_metadata(prefix) if metadata_path(prefix).exists() else None
    if data.packing == "sentences":
        check_has_sentences(prefix, sidecar, sequences=len(index.lengths), documents=len(lengths))
    lengths = lengths[lengths > 0]
    ended = 1.0 if sidecar is None or sidecar.append_eod else 0.0
    source = f"{Path(prefix).name}: {len(lengths):,} documents of {lengths.mean():,.0f} tokens on average"
    return int(lengths.sum()), _laid_end_to_end(lengths, data.seq_length, ended, source)


def _laid_end_to_end(lengths: np.ndarray, pack: int, ended: float, source: str) -> LengthModel:
    """Average documents of `lengths`, int64[D], in any order, cut wherever a pack ends, over all places of a document.

    A document of d tokens meets d + L - 1 windows of L tokens, with the shorter of both, m, for |d - L| + 1 of them, and with
    1, 2, ..., m - 1 twice; each place in a pack is as likely, so a document has 1 / L of these sums, and a pack L / mean(d)
    documents.
    """
    d, mean = lengths.astype(np.float64), float(lengths.mean(dtype=np.float64))
    m = np.minimum(d, pack)
    squares = m * m * (np.abs(d - pack) + 1) + (m - 1) * m * (2 * m - 1) / 3
    few = lengths if len(lengths) <= 512 else np.sort(lengths)[np.linspace(0, len(lengths) - 1, 512).astype(int)]
    pieces, special = (mean + pack - 1) / mean, ended * pack / mean
    return LengthModel(float(squares.mean() / mean), pieces, special, source, tuple(few.tolist()))
