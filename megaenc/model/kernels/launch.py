"""How much one program of a kernel takes on, and how many programs there are."""

import functools

import torch
from torch import Tensor

_TILE_ELEMENTS = 2048
"""Numbers that a program holds of each tensor at a time: eight of them in each thread of eight warps, four on AMD."""

DO_NOT_SPECIALIZE = ("rows", "heads", "first", "columns", "labels", "top", "total")
"""Arguments of kernels that differ from one micro-batch or rank to the next, and that no vector of loads hangs on.

For others triton makes a variant where a number is 1 or a multiple of 16, or an address one of 16 bytes. Of these it must not:
the check at the start would not have seen it, and it would be compiled in the middle of training.
"""


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`: what a block of Triton's can be."""
    return 1 << (number - 1).bit_length()


def row_tile_constants(width: int) -> dict[str, int]:
    """Constants of kernels that take whole rows: how many rows of `width` numbers make a tile, and its warps."""
    columns = next_power_of_2(width)
    rows = max(1, _TILE_ELEMENTS // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(max(rows * columns // 256, 1), 16)}


def column_block_constants(width: int) -> dict[str, int]:
    """Constants of kernels that take a part of one row: its columns, and its warps."""
    columns = min(next_power_of_2(width), _TILE_ELEMENTS)
    return {"COLUMNS": columns, "num_warps": min(max(columns // 256, 1), 8)}


def flatten_rows(x: Tensor) -> Tensor:
    """x [..., W] as [rows, W], each row in one piece; a copy only where its memory cannot be seen so."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(1) == 1 or rows.numel() == 0 else rows.contiguous()


@functools.cache
def resident_programs(device: torch.device) -> int:
    """Programs that a device runs at once, about; a few where an interpreter runs them one by one."""
    return 4 if device.type == "cpu" else 4 * torch.cuda.get_device_properties(device).multi_processor_count
