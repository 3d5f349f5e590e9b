"""Readers of files that hold settings or facts: regular, bounded in size, and JSON."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from megaenc.errors import InputError

MAX_TEXT = 64 << 20
"""The most bytes that are read of a file of settings or facts, which by rights take kilobytes."""


def read_regular_file(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises OSError, with a reason in `strerror`, for anything else: a FIFO or a device, which could block or never end, and a
    larger file, which could exhaust the memory.
    """
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(stream.fileno(), True)  # a file that an archive brings back first must not be read as empty
        content = stream.read(min(limit, max(status.st_size, 1 << 16)) + 1)  # a buffer of all that is allocated at once
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes, the most that is read of such a file", str(path))
    return content


def parse_json(content: bytes | str, *, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError, with the reason, for anything else, deep nesting included.

    `unique_keys`: raise ValueError also for an object that has a key twice.
    """
    try:
        return json.loads(content, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"key {key!r} twice")
        values[key] = value
    return values


def read_json_object(path: Path, expected: str = "a JSON object", limit: int = MAX_TEXT) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises InputError with one line, `PATH: REASON; expected EXPECTED`, for a file that is missing, unreadable, not a regular
    file, larger than `limit` bytes, not UTF-8, not JSON, nested too deeply or not an object.
    """
    try:
        values = parse_json(read_regular_file(path, limit))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected {expected}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected {expected}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: found {type(values).__name__}; expected {expected}")
    return values


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds; nothing if it is missing, unreadable or no object."""
    try:
        return read_json_object(path)
    except InputError:
        return {}
