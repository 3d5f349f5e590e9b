"""Counter-based random numbers: pure functions of (seed, purpose, counters).

They are the same on every rank, layout, restart and machine. The random words are NumPy's
Philox-4x64-10 (Salmon et al. 2011), whose raw stream is guaranteed not to change. There is no state
to save, broadcast or restore.
"""

import hashlib
import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_THREAD = threading.local()
_CHUNK = 1 << 24  # words that are processed together, so that intermediates are small
# Rounds of the Feistel network; four make it pseudorandom (Luby and Rackoff 1988), more help in
# small ranges.
_ROUNDS = 12
_WALKED = 1 << 10  # places of a KeyedPermutation that are computed together


def random_words(
    seed: int, purpose: str, count: int, *, counters: tuple[int, ...] = (), block: int = 0
) -> np.ndarray:
    """Return uint64[count], words of the random stream (seed, purpose, counters).

    Each word has 64 uniform random bits. Equal arguments give equal words, everywhere.

    Args:
        purpose: Name of the use, so that different uses have independent streams.
        count: Number of words.
        counters: Whole numbers such as sample and epoch; each tuple has a stream of its own.
        block: The first word is that of 0-based index 4 * `block` in the stream. Words before it
            cost nothing.
    """
    name = "\x1f".join([str(int(seed)), purpose, *(str(int(counter)) for counter in counters)])
    key = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype="<u8")
    # It is reused by setting its state: creating one takes five times as long.
    if not hasattr(_THREAD, "philox"):
        _THREAD.philox = np.random.Philox(key=0)
    _THREAD.philox.state = {
        "bit_generator": "Philox",
        "state": {"key": key, "counter": np.array([block, 0, 0, 0], dtype=np.uint64)},
        "buffer": np.zeros(4, dtype=np.uint64),
        "buffer_pos": 4,  # the buffer is empty
        "has_uint32": 0,
        "uinteger": 0,
    }
    return _THREAD.philox.random_raw(count)


def uniforms(seed: int, purpose: str, count: int, *, counters: tuple[int, ...] = ()) -> np.ndarray:
    """Return float64[count], uniform in [0, 1) with 53 random bits each.

    They are of the random stream (seed, purpose, counters), see `random_words`.
    """
    return (random_words(seed, purpose, count, counters=counters) >> np.uint64(11)) * 2.0**-53


def bernoulli(
    seed: int, purpose: str, count: int, probability: float, *, counters: tuple[int, ...] = ()
) -> np.ndarray:
    """Return bool[count], each True with `probability`, independently of the others.

    Equal to `uniforms(seed, purpose, count, ...) < probability`, but computed faster.
    """
    words = random_words(seed, purpose, count, counters=counters)
    if probability >= 1:
        return np.ones(count, dtype=bool)
    return words < np.uint64(max(0, math.ceil(probability * 2**53)) << 11)


def permutation(
    seed: int, purpose: str, count: int, *, counters: tuple[int, ...] = ()
) -> np.ndarray:
    """Return range(count) in a random order, int64[count].

    The order is determined by (seed, purpose, counters), see `random_words`.
    """
    return _stable_argsort(random_words(seed, purpose, count, counters=counters))


class KeyedPermutation:
    """Random permutation of range(count) in constant memory: `permutation[index]`.

    `KeyedPermutation(seed, purpose, count, counters=())` is determined by its arguments (see
    `random_words`), and differs from what `permutation` returns for them. `count`, its `len`, is
    from 1 to 2**62, else the constructor raises ValueError; an index outside range(count) is an
    IndexError. It is a Feistel network over the bits of count - 1, repeated for results outside the
    range until they are inside (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite
    Domains, 2002).
    """

    def __init__(self, seed: int, purpose: str, count: int, *, counters: tuple[int, ...] = ()):
        """Draw the keys of the permutation of range(`count`); `count` is from 1 to 2**62.

        Raises:
            ValueError: `count` is out of that range.
        """
        if not 1 <= count <= 1 << 62:
            raise ValueError(f"count: found {count}, expected 1 to 2**62")
        self._count = count
        bits = max(2, (count - 1).bit_length())
        self._low_bits = np.uint64(bits // 2)
        # They keep the bits of a low or high half.
        self._shifts = (
            np.uint64(64 - bits // 2),
            np.uint64(64 - (bits - bits // 2)),
        )
        self._keys = random_words(seed, purpose, _ROUNDS, counters=counters)
        self._chunk = lru_cache(maxsize=4)(self._compute_chunk)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        """Return the value at `index` of the permutation, both in range(count).

        Raises:
            IndexError: `index` is out of range.
        """
        if not 0 <= index < self._count:
            raise IndexError(f"places are 0 to {self._count - 1}, found {index}")
        chunk, offset = divmod(index, _WALKED)
        return int(self._chunk(chunk)[offset])

    def apply(self, indices: np.ndarray) -> np.ndarray:
        """Return int64[n], the values at `indices`, int[n] in range(count), not checked."""
        values = self._encrypt(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(values >= np.uint64(self._count))):
            values[outside] = self._encrypt(values[outside])
        return values.view(np.int64)

    def _compute_chunk(self, chunk: int) -> np.ndarray:
        """Return the numbers at the `chunk`-th _WALKED places."""
        return self.apply(np.arange(chunk * _WALKED, min((chunk + 1) * _WALKED, self._count)))

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        """Return uint64[n], `values` permuted within the next power of two.

        Each round changes one half of the bits.
        """
        low_shift, high_shift = self._shifts
        high = values >> self._low_bits
        low = values & ((np.uint64(1) << self._low_bits) - np.uint64(1))
        for round_index, key in enumerate(self._keys):
            if round_index % 2:
                low = low ^ (_mix(high ^ key) >> low_shift)
            else:
                high = high ^ (_mix(low ^ key) >> high_shift)
        return (high << self._low_bits) | low


def _mix(words: np.ndarray) -> np.ndarray:
    """Return uint64 words of which each bit depends on all bits of `words`.

    This is the finalizer of SplitMix64 (Steele et al. 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _stable_argsort(words: np.ndarray) -> np.ndarray:
    """Return int64, equal to `np.argsort(words, kind="stable")` of uint64 words.

    Several times faster: values are sorted, which is faster than argsort, with the high bits of a
    word and its index in the low bits. The few words with equal high bits are sorted again
    afterwards.
    """
    bits = np.uint64(max(len(words) - 1, 1).bit_length())
    order = words >> bits
    order <<= bits
    for start in range(0, len(words), _CHUNK):
        chunk = order[start : start + _CHUNK]
        chunk |= np.arange(start, start + len(chunk), dtype=np.uint64)
    order.sort()
    has_tie = np.zeros(len(words), dtype=bool)
    for start in range(0, len(words) - 1, _CHUNK):
        current = order[start : start + _CHUNK]
        next_words = order[start + 1 : start + _CHUNK + 1]
        equal = ((current[: len(next_words)] ^ next_words) >> bits) == 0
        has_tie[start : start + len(equal)] |= equal
        has_tie[start + 1 : start + 1 + len(equal)] |= equal
    order &= (np.uint64(1) << bits) - np.uint64(1)
    order = order.view(np.int64)
    tied = order[has_tie]
    order[has_tie] = tied[np.argsort(words[tied], kind="stable")]
    return order


def normal_rows(seed: int, name: str, rows: range, columns: int) -> np.ndarray:
    """Return float32[len(rows), columns], rows of a random standard normal matrix.

    The matrix, a weight called `name`, is determined by `seed` and `name`. A row depends only on
    (seed, name, row index, columns), so that a rank can draw only the rows that it holds.
    Box-Muller in float64, rounded once.

    Args:
        rows: Global 0-based indices of the rows to draw.

    Raises:
        ValueError: The step of `rows` is not 1.
    """
    if rows.step != 1:
        raise ValueError(f"rows must be contiguous, found step {rows.step}")
    pairs = (columns + 1) // 2
    blocks = (pairs + 3) // 4  # Philox generates four words per block; each row starts a new block
    out = np.empty((len(rows), columns), dtype=np.float32)
    # Rows; bounds the float64 intermediates to some tens of megabytes.
    chunk = max(1, (1 << 20) // (4 * blocks))
    for start in range(0, len(rows), chunk):
        count = min(chunk, len(rows) - start)
        raw = random_words(
            seed, "weights:" + name, count * blocks * 4, block=(rows.start + start) * blocks
        )
        raw = raw.reshape(count, -1)[:, :pairs]
        radius = np.sqrt(-2.0 * np.log(((raw >> np.uint64(32)) + 0.5) * 2.0**-32))
        angle = (raw & np.uint64(0xFFFFFFFF)) * (2.0 * np.pi * 2.0**-32)
        normals = np.empty((count, 2 * pairs))
        normals[:, 0::2] = radius * np.cos(angle)
        normals[:, 1::2] = radius * np.sin(angle)
        out[start : start + count] = normals[:, :columns]
    return out


def truncate_normals(values: np.ndarray, cutoff: float) -> np.ndarray:
    """Return standard normal `values` mapped to a truncated normal distribution.

    Both are float32. It is cut at -`cutoff` and `cutoff` (standard deviations), and the order
    stays: the quantile of a value among all normals becomes its quantile among those that are not
    cut off. It is not scaled, so that its standard deviation is below 1. `values` are not changed.
    """
    from scipy.special import erf, erfinv  # slow to import

    # Probability within the value's distance of 0, with its sign.
    inside = erf(values / math.sqrt(2), dtype=np.float64)
    return (math.sqrt(2) * erfinv(inside * math.erf(cutoff / math.sqrt(2)))).astype(np.float32)


@dataclass(frozen=True)
class SampleRandomness:
    """Random numbers that a run with `seed` has for one `sample` in one `epoch`.

    An objective draws from it. Each purpose, a text that names the use, has an independent stream,
    which is the same at each call and on every rank.
    """

    seed: int
    sample: int
    epoch: int

    def words(self, purpose: str, count: int) -> np.ndarray:
        """Return uint64[count], the first random words of the stream `purpose`.

        Equal calls return the same words.
        """
        return random_words(self.seed, purpose, count, counters=(self.sample, self.epoch))

    def uniforms(self, purpose: str, count: int) -> np.ndarray:
        """Return the first `count` numbers of the stream `purpose`, float64 in [0, 1).

        Equal calls return the same numbers.
        """
        return uniforms(self.seed, purpose, count, counters=(self.sample, self.epoch))

    def bernoulli(self, purpose: str, count: int, probability: float) -> np.ndarray:
        """Return bool[count] of the stream `purpose`, each True with `probability`.

        A value is True if that of `uniforms(purpose, count)` is below `probability`. Equal calls
        return the same values.
        """
        return bernoulli(self.seed, purpose, count, probability, counters=(self.sample, self.epoch))
