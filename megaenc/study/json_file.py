"""Files of a study that may be missing or damaged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.files import read_json_object


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object that a file holds; nothing if it is missing, unreadable or no object."""
    try:
        return read_json_object(path)
    except InputError:
        return {}
