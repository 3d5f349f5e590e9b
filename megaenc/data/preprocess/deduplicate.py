"""Removal of duplicate documents, exact or near (MinHash), with bounded memory.

Workers compute band keys of every document, uint64[bands, words]. Two documents are duplicates if
all words of a band are equal; of documents linked by such pairs, the first of the corpus stays. The
decision needs the keys of the whole corpus, not its texts, and does not depend on workers,
partitions or nodes.

- exact: one band of two words, BLAKE2b of the text.
- MinHash: `buckets` bands of one word, a hash of `hashes_per_bucket` minimum hashes of the
  document's word n-grams, as FineWeb's (https://arxiv.org/abs/2406.17557). A pair of Jaccard
  similarity s shares a band with probability 1 - (1 - s^hashes)^buckets.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megaenc.console import ProgressLine
from megaenc.data.tokenizer.fast_encode import replace_surrogates
from megaenc.errors import InputError

# Characters of scripts written without spaces (Thai to Khmer, kana, Han) are words of their own.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_SEED = 1
_SLICE_DOCUMENTS = 1 << 27  # documents sorted at a time, by ranges of their keys
_PAIRS_AT_ONCE = 1 << 22
_HIGH_BITS = 32


@dataclass(frozen=True)
class Deduplication:
    """Method of removing duplicates, `exact` or `minhash`, with its parameters.

    All fields but `method` are for minhash: `ngram_size` in words, and the number of `buckets` of
    `hashes_per_bucket` hashes each. Called with D texts, it returns their band keys, uint64[bands,
    words, D]: documents of which the keys of any band are equal are duplicates, see
    `find_duplicates`. `minhash` needs the package rensa, without which the call raises InputError.
    It is picklable.
    """

    method: Literal["exact", "minhash"]
    ngram_size: int = 5
    """Number of words of an n-gram."""
    buckets: int = 14
    hashes_per_bucket: int = 8

    @property
    def bands(self) -> int:
        """Return the number of bands: 1 for `exact`, else `buckets`.

        Documents are duplicates if they agree in one.
        """
        return 1 if self.method == "exact" else self.buckets

    @property
    def words(self) -> int:
        """Return the number of 64-bit words of a band's key: 2 for `exact`, else 1."""
        return 2 if self.method == "exact" else 1

    def describe(self) -> dict[str, Any]:
        """Return method and parameters as JSON values, for plan.json and the metadata.

        Keys are `method` and, for minhash, the other fields and `rensa_algorithm`, the version of
        rensa's algorithm.

        Raises:
            InputError: The package rensa is needed and missing.
        """
        if self.method == "exact":
            return {"method": "exact"}
        return {
            "method": "minhash",
            "ngram_size": self.ngram_size,
            "buckets": self.buckets,
            "hashes_per_bucket": self.hashes_per_bucket,
            "rensa_algorithm": self._sketch.ALGORITHM_VERSION,
        }

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return uint64[bands, words, documents], the band keys of `texts`.

        Raises:
            InputError: The package rensa is needed and missing.
        """
        if not texts:
            return np.empty((self.bands, self.words, 0), np.uint64)
        texts = [replace_surrogates(text) for text in texts]
        if self.method == "exact":
            digests = b"".join(
                hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts
            )
            keys = np.frombuffer(digests, "<u8").reshape(len(texts), 1, 2)
        else:
            sketches = self._sketch.digest_matrix_from_token_sets(
                [build_ngrams(text, self.ngram_size) for text in texts],
                self.buckets * self.hashes_per_bucket,
                _SEED,
            )
            keys = _hash_rows(
                np.array(sketches.to_rows(), np.uint32).reshape(len(texts) * self.buckets, -1)
            )
            keys = keys.reshape(len(texts), self.buckets, 1)
        return np.ascontiguousarray(keys.transpose(1, 2, 0).astype(np.uint64))

    @cached_property
    def _sketch(self) -> Any:
        """Return rensa's RMinHash, which is written in Rust.

        Raises:
            InputError: The package is missing or of another version.
        """
        try:
            from rensa import RMinHash

            RMinHash.ALGORITHM_VERSION, RMinHash.digest_matrix_from_token_sets  # noqa: B018
        except (ImportError, AttributeError):
            raise InputError(
                "--deduplicate minhash needs the package rensa: "
                "`pip install 'rensa>=0.5,<0.6'` or the extra dedup"
            ) from None
        return RMinHash


def build_ngrams(text: str, size: int) -> list[str]:
    """Return the n-grams of `size` lower-case words of a text, with repetitions.

    Words are runs of letters, digits and `_`; a character of a script without spaces, such as Han,
    is a word. They are joined by spaces. A text of `size` words or fewer is one n-gram; one without
    any word is itself one, unchanged.
    """
    words = _WORD.findall(text.lower())
    if len(words) <= size:
        return [" ".join(words) or text]
    return [" ".join(words[start : start + size]) for start in range(len(words) - size + 1)]


def _hash_rows(values: np.ndarray) -> np.ndarray:
    """Return uint64[rows], a hash of each row of uint32[rows, columns].

    It uses splitmix64's mixing function.
    """
    result = np.zeros(len(values), np.uint64)
    for column in values.T:
        result += column + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            result = (result ^ (result >> np.uint64(shift))) * np.uint64(factor)
        result ^= result >> np.uint64(31)
    return result


def find_duplicates(
    documents: int,
    bands: int,
    read_band: Callable[[int], Iterator[np.ndarray]],
    label: str = "finding duplicates",
) -> np.ndarray:
    """Return bool[documents], True for each document that is to be removed.

    Documents with an equal key in some band are linked. Of those that are linked, also through
    others, the first stays. It takes 9 bytes a document, and 50 for each of up to 134 million, or
    of as many as have the same key.

    Args:
        documents: Number of documents.
        bands: Number of bands.
        read_band: Function of a band's 0-based index that yields uint64[words, n], the keys of
            successive documents; called several times for each band of a large corpus.
        label: Name of the progress line, which is printed.
    """
    parents = np.arange(documents, dtype=np.int64)
    slices = max(1, -(-documents // _SLICE_DOCUMENTS))
    boundaries = np.linspace(0, 1 << _HIGH_BITS, slices + 1).astype(np.uint64)
    with ProgressLine(label, bands * slices) as progress:
        for step in range(bands * slices):
            band, part = divmod(step, slices)
            _link_equal_keys(parents, read_band(band), boundaries[part], boundaries[part + 1])
            progress.update(step + 1)
    duplicates = np.empty(documents, bool)
    for start in range(0, documents, _SLICE_DOCUMENTS):
        part = parents[start : start + _SLICE_DOCUMENTS]
        duplicates[start : start + len(part)] = part != np.arange(start, start + len(part))
    return duplicates


def _select_keys(
    chunks: Iterator[np.ndarray], low: np.uint64, high: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """Select the keys whose first word has high bits low..high-1.

    Returns:
        uint64[words, n], the keys, and int64[n], the indices of their documents.
    """
    keys = [np.empty((1, 0), np.uint64)]
    documents = [np.empty(0, np.int64)]
    before = 0
    for chunk in chunks:
        high_bits = chunk[0] >> np.uint64(64 - _HIGH_BITS)
        places = np.flatnonzero((high_bits >= low) & (high_bits < high))
        keys.append(chunk[:, places])
        documents.append(places + before)
        before += chunk.shape[1]
    words = keys[-1].shape[0]
    keys = [chunk_keys for chunk_keys in keys if chunk_keys.shape[0] == words]
    return np.concatenate(keys, axis=1), np.concatenate(documents)


def _link_equal_keys(
    parents: np.ndarray, chunks: Iterator[np.ndarray], low: np.uint64, high: np.uint64
) -> None:
    """Unite documents with equal keys in the forest `parents`.

    Only the keys that `_select_keys` selects count. Roots are the smallest indices of their trees.
    """
    keys, documents = _select_keys(chunks, low, high)
    # Numbers ascend within equal keys.
    order = np.lexsort(keys) if len(keys) > 1 else np.argsort(keys[0], kind="stable")
    same = np.ones(max(0, len(order) - 1), bool)
    for word in keys:
        in_order = word[order]
        same &= in_order[1:] == in_order[:-1]
    del keys, word, in_order
    documents = documents[order]
    del order
    for start in range(0, len(same), _PAIRS_AT_ONCE):
        places = start + np.flatnonzero(same[start : start + _PAIRS_AT_ONCE])
        _unite(parents, documents[places], documents[places + 1])


def _unite(parents: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    """Unite the trees of documents `first[i]` and `second[i]` in the forest `parents`.

    The smallest number becomes the root.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first = _find_roots(parents, first)
    second = _find_roots(parents, second)
    apart = first != second
    roots, places = np.unique(np.concatenate([first[apart], second[apart]]), return_inverse=True)
    half = len(places) // 2
    graph = coo_array(
        (np.ones(half, np.int8), (places[:half], places[half:])), shape=(len(roots), len(roots))
    )
    if half:
        _, components = connected_components(graph, directed=False)
        _, smallest = np.unique(components, return_index=True)  # roots are ascending
        parents[roots] = roots[smallest[components]]


def _find_roots(parents: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Return the roots of the documents `numbers` in the forest `parents`.

    The paths to them are shortened.
    """
    roots = parents[documents]
    while (above := parents[roots]).size and (above != roots).any():
        roots = above
    parents[documents] = roots
    return roots
