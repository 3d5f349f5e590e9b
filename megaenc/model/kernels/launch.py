"""Launch parameters of Triton kernels: block sizes, warps and number of programs."""

import functools

import torch
from torch import Tensor

_TILE_ELEMENTS = 2048
"""Elements of each tensor that a program holds at a time: eight per thread with eight warps, four
on AMD."""

DO_NOT_SPECIALIZE = (
    "rows",
    "heads",
    "groups",
    "per_group",
    "first",
    "columns",
    "labels",
    "highest",
    "total",
)
"""Kernel arguments that vary between micro-batches or ranks and do not affect vectorized loads.

Triton compiles variants of a kernel for numbers that are 1 or a multiple of 16, and for aligned
addresses. For these arguments it must not: a variant that the self-test has not run would be
compiled in the middle of training.
"""


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`.

    It is a valid size of a Triton block. `number` is at least 1, which is not checked.
    """
    return 1 << (number - 1).bit_length()


def row_tile_constants(width: int) -> dict[str, int]:
    """Return the constants of kernels whose programs take several full rows.

    They are keyword arguments of a launch: ROWS and COLUMNS of a program's block, powers of two
    with COLUMNS of at least `width`, the elements of a row; and num_warps.
    """
    columns = next_power_of_2(width)
    rows = max(1, _TILE_ELEMENTS // columns)
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": min(max(rows * columns // 256, 1), 16)}


def column_block_constants(width: int) -> dict[str, int]:
    """Return the constants of kernels whose programs take some columns of one row.

    They are keyword arguments of a launch: COLUMNS of a program's block, a power of two of at most
    2048, and num_warps. `width` is the elements of a row.
    """
    columns = min(next_power_of_2(width), _TILE_ELEMENTS)
    return {"COLUMNS": columns, "num_warps": min(max(columns // 256, 1), 8)}


def flatten_rows(x: Tensor) -> Tensor:
    """Return a tensor [..., W] as [rows, W] with contiguous rows.

    The elements of a row are adjacent; rows may have gaps between them (see their stride). It is a
    view if possible, else a copy.
    """
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(1) == 1 or rows.numel() == 0 else rows.contiguous()


@functools.cache
def resident_programs(device: torch.device) -> int:
    """Return about how many Triton programs a device runs at the same time.

    It is 4 for each multiprocessor, or 4 on a CPU, for kernels whose programs loop over blocks.
    """
    return (
        4
        if device.type == "cpu"
        else 4 * torch.cuda.get_device_properties(device).multi_processor_count
    )
