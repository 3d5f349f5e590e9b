"""Files that are never half-written."""

import os
import uuid
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Write `text` so that a crash leaves the old content or the new: another name, flushed to disk, renamed."""
    attempt = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with open(attempt, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(attempt, path)
