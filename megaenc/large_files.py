"""Files that may be large, read without a buffer of the largest size that they may have."""

import os
from pathlib import Path

from megaenc.files import MAX_TEXT, read_regular

_GROWTH = 1 << 16  # bytes that may be appended while a file is read


def read_large(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes. Raises OSError as `read_regular` does."""
    return read_regular(path, min(limit, os.stat(path).st_size + _GROWTH))
