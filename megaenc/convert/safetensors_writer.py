"""Streaming writer of sharded safetensors: weights are written one at a time."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from megaenc.errors import InputError
from megaenc.hf.checkpoint import INDEX, WEIGHTS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_dtype(name: str, default_name: str, default: torch.dtype) -> torch.dtype:
    """Return the torch dtype of `name`, the value of --dtype.

    Args:
        name: fp32, bf16 or `default_name`.
        default_name: Name that stands for `default`, such as run or source.
        default: Dtype of `default_name`.

    Raises:
        InputError: `name` is another.
    """
    if name not in (default_name, *DTYPES):
        raise InputError(f"--dtype: found {name!r}, expected {default_name}, {' or '.join(DTYPES)}")
    return DTYPES.get(name, default)


def parse_size(text: str, flag: str) -> int:
    """Return the bytes of a size such as 500MB or 5GB (powers of 1000).

    The unit is KB, MB or GB, in any case, directly after the number or after a space. Fractions
    such as 1.5GB are rounded down to bytes.

    Args:
        flag: Flag that errors name.

    Raises:
        InputError: The text is no such size, has no unit, or is less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise InputError(f"{flag}: found {text!r}, expected a size such as 500MB or 5GB")
    return size


def write_shards(
    directory: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    tensors: Iterable[tuple[str, Tensor]],
    max_bytes: int,
) -> dict[str, str]:
    """Write `tensors` to safetensors files; return each tensor's SHA-256, by its name.

    The files have transformers' names; existing ones are replaced, and several get an index. The
    hash is of the bytes after the cast. A tensor that does not fit `shapes` is a ValueError, which
    leaves incomplete files.

    Args:
        directory: Existing directory.
        shapes: Shape of each tensor by name, in the order of `tensors`.
        dtype: float32 or bfloat16, to which each tensor is cast.
        tensors: (name, tensor) of each, possibly lazy: a tensor is needed only until the next one.
        max_bytes: Maximum bytes of the tensors in a file; a larger tensor has a file of its own.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files = _assign_shards(sizes, max_bytes)
    remaining = iter(tensors)
    digests = {}
    for file, names in files.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = [0, *accumulate(sizes[name] for name in names)]
        for name, offsets in zip(names, pairwise(ends), strict=True):
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shapes[name]),
                "data_offsets": offsets,
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # aligns the data
        with open(directory / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                tensor_name, tensor = next(remaining)
                if tensor_name != name or tuple(tensor.shape) != tuple(shapes[name]):
                    raise ValueError(
                        f"found {tensor_name} of shape {tuple(tensor.shape)}, "
                        f"expected {name} of {shapes[name]}"
                    )
                content = memoryview(tensor_bytes(tensor.to(dtype)))
                stream.write(content)
                digests[name] = hashlib.sha256(content).hexdigest()
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}}
        index["weight_map"] = {name: file for file, names in files.items() for name in names}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return digests


def compute_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each weight in a directory, by name, as of `write_shards`.

    Raises:
        OSError, SafetensorError: A file cannot be read.
    """
    digests = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  a safe_open is no dictionary
                content = memoryview(tensor_bytes(file.get_tensor(name)))
                digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def tensor_bytes(tensor: Tensor):
    """Return the bytes of a tensor, in row-major order, as a flat numpy uint8 array.

    They are not copied if the tensor is contiguous and on the CPU. Tensors that require gradients
    are accepted.
    """
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _assign_shards(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Return the names of the weights in each file, for `sizes` in bytes."""
    parts: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not parts or size > room:
            parts.append([])
            room = max_bytes
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {
        f"{stem}-{index:05d}-of-{len(parts):05d}.safetensors": names
        for index, names in enumerate(parts, 1)
    }
