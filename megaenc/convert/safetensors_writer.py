"""Safetensors written as the weights come, one at a time: memory need not hold a file before it is on the disk."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaenc.convert.hf_checkpoint import INDEX, WEIGHTS
from megaenc.errors import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_dtype(name: str, own: str, default: torch.dtype) -> torch.dtype:
    """What `--dtype name` asks for: one of DTYPES, or the `default`, which is called `own`. InputError for another."""
    if name not in (own, *DTYPES):
        raise InputError(f"--dtype: found {name!r}, expected {own}, {' or '.join(DTYPES)}")
    return DTYPES.get(name, default)


def parse_size(text: str, flag: str) -> int:
    """Bytes that `text` (500MB, 5GB) says. Raises InputError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise InputError(f"{flag}: found {text!r}, expected a size such as 500MB or 5GB")
    return size


def write_shards(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]], largest: int
) -> dict[str, str]:
    """Write `tensors`, which come in the order of `shapes`, to one file of `folder`, or several of at most `largest` bytes.

    A weight that is larger has a file of its own. Returns the SHA-256 of each weight's bytes in `dtype`, which it is written in.
    """
    bytes_of = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files = _assign_shards(bytes_of, largest)
    coming, digests = iter(tensors), {}
    for file, names in files.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        ends = [0, *accumulate(bytes_of[name] for name in names)]
        for name, offsets in zip(names, pairwise(ends), strict=True):
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shapes[name]), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the numbers begin where their type likes to
        with open(folder / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                given, tensor = next(coming)
                if given != name or tuple(tensor.shape) != tuple(shapes[name]):
                    raise ValueError(f"found {given} of shape {tuple(tensor.shape)}, expected {name} of {shapes[name]}")
                content = memoryview(tensor_bytes(tensor.to(dtype)))
                stream.write(content)
                digests[name] = hashlib.sha256(content).hexdigest()
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(bytes_of.values())}}
        index["weight_map"] = {name: file for file, names in files.items() for name in names}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return digests


def tensor_bytes(tensor: Tensor):
    """The bytes of a tensor as numpy's uint8[bytes], without a copy where it lies in one piece of this machine's memory."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _assign_shards(bytes_of: Mapping[str, int], largest: int) -> dict[str, list[str]]:
    parts: list[list[str]] = []
    room = 0
    for name, size in bytes_of.items():
        if not parts or size > room:
            parts.append([])
            room = largest
        parts[-1].append(name)
        room -= size
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}
