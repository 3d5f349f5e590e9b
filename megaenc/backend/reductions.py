"""Collectives that cost each rank the same bytes for any number of ranks.

All ranks call these functions together. An all-reduce takes O(log n) messages of each of n ranks,
gathering their values O(n).
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


def reduce_over_ranks(
    values: Sequence[float], op: ReduceOp.RedOpType, dtype: torch.dtype = torch.int64
) -> list[float]:
    """Return each of `values` reduced over all ranks, in order and on every rank.

    All ranks of the process group call this together, with equally many values.

    Args:
        op: Reduction such as ReduceOp.SUM, MIN or MAX.
        dtype: Data type of the reduction; with the default, fractions are cut off and results int.
    """
    tensor = torch.tensor(values, dtype=dtype, device=detect_backend().device)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def is_same_on_all_ranks(content: bytes) -> bool:
    """Return on every rank whether all ranks pass the same `content`.

    All ranks of the process group call this together. SHA-256 digests are compared.
    """
    words = struct.unpack("8I", hashlib.sha256(content).digest())
    maxima = reduce_over_ranks([*words, *(-word for word in words)], ReduceOp.MAX)
    return maxima[:8] == [-negated for negated in maxima[8:]]


def gather_lowest(value: Value | None, limit: int = 1) -> tuple[dict[int, Value], int]:
    """Return the values of the `limit` lowest ranks whose `value` is not None.

    All ranks of the process group call this together, with the same `limit`. Values must be
    picklable.

    Returns:
        The values by rank, lowest rank first, and the number of all ranks whose value is not None;
        the same on every rank.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    values = {}
    [count] = reduce_over_ranks([value is not None], ReduceOp.SUM)
    lowest = -1
    while len(values) < min(count, limit):
        [lowest] = reduce_over_ranks(
            [size if value is None or rank <= lowest else rank], ReduceOp.MIN
        )
        values[lowest] = broadcast_object(value, lowest)
    return values, count


def broadcast_object(value: Value, rank: int = 0) -> Value:
    """Return on every rank the `value` of rank `rank`, which must be picklable.

    All ranks of the process group call this together; the values of other ranks are ignored. Rank
    `rank` gets `value` itself, the others a copy.
    """
    values = [value if dist.get_rank() == rank else None]
    dist.broadcast_object_list(values, src=rank)
    return values[0]
