"""Safe readers of small files, in particular JSON.

They read only regular files up to a size limit.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from megaenc.errors import InputError

MAX_TEXT = 64 << 20
"""Default size limit in bytes of configuration and metadata files, which normally take
kilobytes."""


def read_regular_file(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Return the bytes of a regular file.

    Args:
        limit: Maximum size in bytes; MAX_TEXT is 64 MiB.

    Raises:
        OSError: It is missing or unreadable, is a FIFO or device, which could block, or has more
            than `limit` bytes; the reason is in `strerror`.
    """
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        os.set_blocking(stream.fileno(), True)  # files on archive storage must not be read as empty
        # read() allocates the whole buffer at once.
        content = stream.read(min(limit, max(status.st_size, 1 << 16)) + 1)
    if len(content) > limit:
        raise OSError(
            errno.EFBIG, f"larger than {limit:,} bytes, the limit for such a file", str(path)
        )
    return content


def parse_json(content: bytes | str, *, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text.

    NaN and Infinity, which are not JSON, are accepted as numbers. Of equal keys the last counts,
    unless `unique_keys`.

    Raises:
        ValueError: It is no JSON, nested too deeply, or undecodable bytes.
        DuplicateKeyError: A key of an object is given twice, and `unique_keys` is True.
    """
    try:
        return json.loads(content, object_pairs_hook=_build_unique if unique_keys else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None


class DuplicateKeyError(ValueError):
    """ValueError of `parse_json` with `unique_keys`: a JSON object has a key twice.

    `read_json_object` raises InputError instead.
    """


def _build_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from key-value pairs.

    Raises:
        DuplicateKeyError: A key is there twice.
    """
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise DuplicateKeyError(f"key {key!r} twice")
        values[key] = value
    return values


def read_json_object(
    path: Path, expected: str = "a JSON object", limit: int = MAX_TEXT, *, unique_keys: bool = False
) -> dict[str, Any]:
    """Return the JSON object in the file `path`.

    Args:
        expected: Description of the file, for errors (`...; expected {expected}`).
        limit: Maximum size in bytes.
        unique_keys: Refuse duplicate keys.

    Raises:
        InputError: The file is unreadable, too large or holds anything else.
    """
    try:
        values = parse_json(read_regular_file(path, limit), unique_keys=unique_keys)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected {expected}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected {expected}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: found {type(values).__name__}; expected {expected}")
    return values


def read_json_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file `path`, or {} if there is none.

    There is none if the file is missing, unreadable, larger than MAX_TEXT, or holds anything else.
    """
    try:
        return read_json_object(path)
    except InputError:
        return {}
