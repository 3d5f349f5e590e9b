"""Counter-based random numbers: pure functions of (seed, purpose, counters), the same on every rank, layout, restart and machine.

The words come from Philox-4x64-10 (Salmon et al. 2011), whose raw stream NumPy guarantees not to change; everything else here is
arithmetic on them. There is no state to save, broadcast or restore.
"""

import hashlib
import math
import threading
from dataclasses import dataclass

import numpy as np

_THREAD = threading.local()
_AT_ONCE = 1 << 24  # words of an order that are looked at together, so that intermediates are small


def random_words(seed: int, purpose: str, count: int, *, counters: tuple[int, ...] = (), block: int = 0) -> np.ndarray:
    """uint64[count]: the random words of one stream.

    `seed`, `purpose` and `counters` (say, sample and epoch) choose the stream; `block` skips 4 * block words of it at no cost.
    """
    name = "\x1f".join([str(int(seed)), purpose, *(str(int(counter)) for counter in counters)])
    key = np.frombuffer(hashlib.blake2b(name.encode(), digest_size=16).digest(), dtype="<u8")
    if not hasattr(_THREAD, "philox"):  # told where to begin each time: making one takes five times as long
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
    """float64[count] in [0, 1), 53 random bits each."""
    return (random_words(seed, purpose, count, counters=counters) >> np.uint64(11)) * 2.0**-53


def bernoulli(seed: int, purpose: str, count: int, probability: float, *, counters: tuple[int, ...] = ()) -> np.ndarray:
    """bool[count], `uniforms(...) < probability`, without making numbers of the words first."""
    drawn = random_words(seed, purpose, count, counters=counters)
    if probability >= 1:
        return np.ones(count, dtype=bool)
    return drawn < np.uint64(max(0, math.ceil(probability * 2**53)) << 11)


def permutation(seed: int, purpose: str, count: int, *, counters: tuple[int, ...] = ()) -> np.ndarray:
    """int64[count]: a random order of range(count); equal words (one chance in 2**64 a pair) keep theirs, so it is unique."""
    return _stable_order(random_words(seed, purpose, count, counters=counters))


def _stable_order(drawn: np.ndarray) -> np.ndarray:
    """`np.argsort(drawn, kind="stable")` of uint64, several times faster: NumPy sorts numbers quicker than it sorts places.

    A number is the high bits of a word with its place in the low ones; the few words that are alike in their high bits are put
    right afterwards.
    """
    bits = np.uint64(max(len(drawn) - 1, 1).bit_length())
    order = drawn >> bits
    order <<= bits
    for start in range(0, len(drawn), _AT_ONCE):
        some = order[start : start + _AT_ONCE]
        some |= np.arange(start, start + len(some), dtype=np.uint64)
    order.sort()
    alike = np.zeros(len(drawn), dtype=bool)
    for start in range(0, len(drawn) - 1, _AT_ONCE):
        here, following = order[start : start + _AT_ONCE], order[start + 1 : start + _AT_ONCE + 1]
        same = ((here[: len(following)] ^ following) >> bits) == 0
        alike[start : start + len(same)] |= same
        alike[start + 1 : start + 1 + len(same)] |= same
    order &= (np.uint64(1) << bits) - np.uint64(1)
    order = order.view(np.int64)
    places = order[alike]
    order[alike] = places[np.argsort(drawn[places], kind="stable")]
    return order


def normal_rows(seed: int, name: str, rows: range, columns: int) -> np.ndarray:
    """float32[len(rows), columns]: standard normal rows of the matrix called `name`.

    A row depends on (seed, name, its number) alone, so that a rank draws just the rows it holds. Box-Muller in float64,
    rounded once.
    """
    if rows.step != 1:
        raise ValueError(f"rows must be contiguous, found step {rows.step}")
    pairs = (columns + 1) // 2
    blocks = (pairs + 3) // 4  # Philox gives four words a block; a row starts on a fresh one
    out = np.empty((len(rows), columns), dtype=np.float32)
    chunk = max(1, (1 << 20) // (4 * blocks))  # rows at a time: bounds the float64 intermediates to some tens of megabytes
    for start in range(0, len(rows), chunk):
        count = min(chunk, len(rows) - start)
        raw = random_words(seed, "weights:" + name, count * blocks * 4, block=(rows.start + start) * blocks)
        raw = raw.reshape(count, -1)[:, :pairs]
        radius = np.sqrt(-2.0 * np.log(((raw >> np.uint64(32)) + 0.5) * 2.0**-32))
        angle = (raw & np.uint64(0xFFFFFFFF)) * (2.0 * np.pi * 2.0**-32)
        normals = np.empty((count, 2 * pairs))
        normals[:, 0::2] = radius * np.cos(angle)
        normals[:, 1::2] = radius * np.sin(angle)
        out[start : start + count] = normals[:, :columns]
    return out


@dataclass(frozen=True)
class SampleRandomness:
    """The random numbers that belong to one sample of one run; `purpose` keeps independent uses apart."""

    seed: int
    sample: int
    epoch: int

    def uniforms(self, purpose: str, count: int) -> np.ndarray:
        """float64[count] in [0, 1)."""
        return uniforms(self.seed, purpose, count, counters=(self.sample, self.epoch))

    def chances(self, purpose: str, count: int, probability: float) -> np.ndarray:
        """bool[count], each true with `probability`: `uniforms(purpose, count) < probability`."""
        return bernoulli(self.seed, purpose, count, probability, counters=(self.sample, self.epoch))
