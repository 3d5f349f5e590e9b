"""Units of several tokens that are hidden together.

They are words, or the collocations listed in a file.
"""

import json
import math
import os
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megaenc.atomic_io import atomic_files
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, first_error_line

LONGEST = 5
"""Most tokens of a collocation."""
_FORMAT = "megaenc collocations 1"
_ARRAYS = ("tokens", "pmi", "counts", "facts")


@dataclass(frozen=True, eq=False)
class Collocations:
    """Token n-grams of 2 to 5 tokens, by ascending length, then best first.

    tokens: int32[C, 5], padded with -1; pmi: float32[C], in nats; counts: int64[C], occurrences in
    the corpus; facts: their origin, such as `tokenizer` and `corpus` (fingerprints) and `tokens`
    (the number of tokens that were counted, without special ones). `select_collocations` makes
    them, `save` writes them, and `load_collocations` reads them again.
    """

    tokens: np.ndarray
    pmi: np.ndarray
    counts: np.ndarray
    facts: dict[str, object]

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each collocation, int64[C]."""
        return (self.tokens >= 0).sum(axis=1)

    def save(self, path: Path) -> None:
        """Write the file `path` atomically; equal collocations give equal bytes.

        Its format is npz, whatever its ending. An existing file is replaced. The directory must
        exist.

        Raises:
            InputError: The file cannot be written.
        """
        facts = np.array(json.dumps({"format": _FORMAT, **self.facts}, sort_keys=True))
        with atomic_files(path) as [temporary], open(temporary, "wb") as stream:
            np.savez(stream, tokens=self.tokens, pmi=self.pmi, counts=self.counts, facts=facts)


class TrieLevel(NamedTuple):
    """Level n, 2 or more, of the trie of a CollocationMatcher.

    Its nodes are indexed in the order of their keys. keys: int64, ascending: the node of level n -
    1 times base plus token n, where base is the largest token id of all collocations plus 1. ends:
    bool, whether a collocation ends at the node. At level 1, which is not stored, the node is the
    token id.
    """

    keys: np.ndarray
    ends: np.ndarray


class CollocationMatcher:
    """Trie that finds Collocations in tokens by exact keys.

    It is built from `collocations`, such as those of `load_collocations`. `match` returns first
    positions and lengths of those in a row of tokens, without overlap. `levels` has a TrieLevel for
    each length from 2 on.
    """

    def __init__(self, collocations: Collocations) -> None:
        tokens = collocations.tokens.astype(np.int64)
        lengths = collocations.lengths
        self._base = int(tokens.max(initial=0)) + 1
        self.levels: list[TrieLevel] = []
        nodes = tokens[:, 0]
        for length in range(2, LONGEST + 1):
            longer = lengths >= length
            tokens = tokens[longer]
            lengths = lengths[longer]
            nodes = nodes[longer]
            keys, nodes = np.unique(nodes * self._base + tokens[:, length - 1], return_inverse=True)
            ends = np.zeros(len(keys), dtype=bool)
            ends[nodes[lengths == length]] = True
            self.levels.append(TrieLevel(keys, ends))

    def match(self, tokens: np.ndarray, is_joined: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (first positions, lengths), int64[M] each, of the collocations in tokens.

        They do not overlap; from the left the longest is taken at each place.

        Args:
            tokens: int64[T], token ids.
            is_joined: bool[T - 1], whether a collocation may hold both a token and the next one.
        """
        longest = np.zeros(len(tokens), dtype=np.int64)
        places = np.flatnonzero(is_joined & (tokens[:-1] < self._base))
        nodes = tokens[places]
        for length, (keys, ends) in enumerate(self.levels, 2):
            last = places + length - 1
            inside = last < len(tokens)
            inside[inside] = is_joined[last[inside] - 1] & (tokens[last[inside]] < self._base)
            places = places[inside]
            nodes = nodes[inside]
            last = last[inside]
            if not len(keys) or not len(places):
                break
            next_keys = nodes * self._base + tokens[last]
            nodes = np.minimum(np.searchsorted(keys, next_keys), len(keys) - 1)
            is_node = keys[nodes] == next_keys
            places = places[is_node]
            nodes = nodes[is_node]
            longest[places[ends[nodes]]] = length
        candidates = np.flatnonzero(longest)
        chosen = []
        free = 0
        for place, length in zip(candidates.tolist(), longest[candidates].tolist(), strict=True):
            if place >= free:
                chosen.append(place)
                free = place + length
        selected = np.array(chosen, dtype=np.int64)
        return selected, longest[selected]


def _find_too_large_array(path: str) -> str:
    """Return a complaint about an array that is larger than its file, or ''.

    Only headers are read: a damaged shape or a compressed array could take any amount of memory.
    """
    file_size = os.path.getsize(path)
    with zipfile.ZipFile(path) as archive:
        for name in _ARRAYS:
            with archive.open(f"{name}.npy") as stream:
                version = np.lib.format.read_magic(stream)
                is_first = version == (1, 0)
                read_header = (
                    np.lib.format.read_array_header_1_0
                    if is_first
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read_header(stream)
            array_size = math.prod(shape) * dtype.itemsize
            if array_size > file_size:
                complaint = f"array `{name}` of shape {list(shape)} takes {array_size:,} bytes"
                return (
                    f"{complaint}, expected at most the {file_size:,} of the file, "
                    "without compression"
                )
    return ""


@lru_cache(maxsize=8)
def load_collocations(path: str) -> Collocations:
    """Return the Collocations in a file that `Collocations.save` wrote.

    The last 8 paths stay in memory: callers share a result and must not change it, and a file that
    changes later is not read again.

    Raises:
        InputError: The file is missing, of another kind or damaged.
    """
    written_by = "expected a file of `megaenc objective collocations`"
    if not os.path.isfile(path):
        raise InputError(f"{path}: no such file; {written_by}")
    try:
        if too_large := _find_too_large_array(path):
            raise InputError(f"{path}: {too_large}; {written_by}")
        with np.load(path, allow_pickle=False) as arrays:
            tokens = arrays["tokens"]
            pmi = arrays["pmi"]
            counts = arrays["counts"]
            facts = json.loads(str(arrays["facts"]))
        if facts.pop("format") != _FORMAT:
            raise ValueError("another format")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror or first_error_line(error)}; {written_by}"
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError, EOFError, zipfile.BadZipFile):
        raise InputError(f"{path}: no collocations, or damaged; {written_by}") from None
    lengths = (tokens >= 0).sum(axis=1) if tokens.ndim == 2 else np.zeros(1)
    is_valid = (
        tokens.shape == (len(pmi), LONGEST)
        and tokens.dtype == np.int32
        and len(pmi) == len(counts) > 0
    )
    # All padding follows the tokens.
    if (
        not is_valid
        or lengths.min() < 2
        or not np.array_equal(tokens >= 0, np.arange(LONGEST) < lengths[:, None])
    ):
        raise InputError(f"{path}: holds no token n-grams of 2 to {LONGEST} tokens; {written_by}")
    return Collocations(tokens, pmi, counts, facts)


@lru_cache(maxsize=8)
def _get_matcher(path: str) -> CollocationMatcher:
    """Return the matcher of the collocations in a file, built once in a process."""
    return CollocationMatcher(load_collocations(path))


def check_collocations(path: str, vocabulary: Vocabulary) -> None:
    """Check that a file holds collocations of a vocabulary's tokenizer.

    A vocabulary without a tokenizer (no fingerprint), as in checks, fits any.

    Raises:
        InputError: It does not, or is missing or damaged.
    """
    fingerprint = str(load_collocations(path).facts.get("tokenizer"))
    if vocabulary.fingerprint and not vocabulary.is_of_tokenizer(fingerprint):
        raise InputError(
            f"{path}: collocations of another tokenizer ({fingerprint[:12]}), "
            "expected the one of the run "
            f"({vocabulary.fingerprint[:12]}); make them with `megaenc objective collocations`"
        )
    _get_matcher(path)


def find_unit_starts(
    unit: str, pack: Pack, eligible: np.ndarray, vocabulary: Vocabulary
) -> np.ndarray:
    """Return for each of the T tokens of a pack whether a unit begins there, bool[T].

    A unit is a word (by `Vocabulary.starts_words`) or a collocation, or one token outside of them.
    One also begins at each document, at a token that is not eligible, and after it.

    Args:
        unit: `word`, or the path of a file of collocations.
        eligible: bool[T], whether a token may be in a unit of several.

    Raises:
        InputError: The file cannot be used (see `load_collocations`).
    """
    is_joined = eligible[1:] & eligible[:-1]
    is_joined[pack.cu_seqlens[1:-1] - 1] = False
    starts = np.ones(len(pack.tokens), dtype=bool)
    if unit == "word":
        starts[1:] = vocabulary.starts_words(pack.tokens)[1:] | ~is_joined
        return starts
    places, lengths = _get_matcher(unit).match(pack.tokens, is_joined)
    changes = np.zeros(len(starts) + 1, dtype=np.int8)
    changes[places + 1] = 1  # the tokens after the first one
    changes[places + lengths] -= 1
    return np.cumsum(changes[:-1], dtype=np.int8) == 0
