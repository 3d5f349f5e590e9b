"""Questions to all ranks whose answer costs each rank the same bytes for any number of ranks.

All ranks call these functions together. An all-reduce takes O(log n) messages of each of n ranks, gathering their values O(n).
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megaenc.backend.device import detect_backend

Value = TypeVar("Value")


def reduce_over_ranks(values: Sequence[float], op: ReduceOp.RedOpType, dtype: torch.dtype = torch.int64) -> list[float]:
    """Return each of `values`, as many on every rank, reduced over all ranks by `op`, in `dtype`."""
    tensor = torch.tensor(values, dtype=dtype, device=detect_backend().device)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def is_same_on_all_ranks(content: bytes) -> bool:
    """Return whether all ranks pass the same `content`, which is compared by its SHA-256."""
    words = struct.unpack("8I", hashlib.sha256(content).digest())
    maxima = reduce_over_ranks([*words, *(-word for word in words)], ReduceOp.MAX)
    return maxima[:8] == [-negated for negated in maxima[8:]]


def gather_lowest(value: Value | None, limit: int = 1) -> tuple[dict[int, Value], int]:
    """Return the values of the `limit` lowest ranks whose `value` is not None, by rank, and the number of such ranks."""
    rank, size, values = dist.get_rank(), dist.get_world_size(), {}
    [count] = reduce_over_ranks([value is not None], ReduceOp.SUM)
    lowest = -1
    while len(values) < min(count, limit):
        [lowest] = reduce_over_ranks([size if value is None or rank <= lowest else rank], ReduceOp.MIN)
        values[lowest] = broadcast_object(value, lowest)
    return values, count


def broadcast_object(value: Value, rank: int = 0) -> Value:
    """Return on all ranks the picklable `value` of `rank`."""
    values = [value if dist.get_rank() == rank else None]
    dist.broadcast_object_list(values, src=rank)
    return values[0]


def median_low(values_M: Sequence[float | None]) -> list[float]:
    """Return the lower median over the ranks of each of `values_M`, float32 numbers from 0 on; None for a rank without one.

    Such numbers are ordered as their bits are. Of these each of eight rounds finds four, by the numbers of ranks with each of the
    sixteen possible values. The result is 0 if no rank has a number.
    """
    known = torch.tensor([value is not None for value in values_M])
    bits_M = torch.tensor([value or 0.0 for value in values_M], dtype=torch.float32).view(torch.int32).long()
    place_M = prefix_M = torch.zeros_like(bits_M)
    for shift in range(28, -1, -4):
        is_candidate_M = known & (bits_M >> (shift + 4) == prefix_M)
        digits_M16 = torch.nn.functional.one_hot(bits_M >> shift & 15, 16) * is_candidate_M[:, None]
        counts = reduce_over_ranks(digits_M16.flatten().tolist(), ReduceOp.SUM)
        counts_M16 = torch.tensor(counts).view(-1, 16)
        if shift == 28:
            place_M = (counts_M16.sum(1) - 1).clamp(min=0) // 2  # of the median among the sorted candidates
        ends_M16 = counts_M16.cumsum(1)
        digit_M = (ends_M16 <= place_M[:, None]).sum(1).clamp(max=15)
        place_M = place_M - (ends_M16 - counts_M16).gather(1, digit_M[:, None])[:, 0]
        prefix_M = prefix_M << 4 | digit_M
    has_any_M = counts_M16.sum(1) > 0
    return torch.where(has_any_M, prefix_M, 0).int().view(torch.float32).tolist()
