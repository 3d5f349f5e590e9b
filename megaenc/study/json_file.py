"""What a file of a study says, where there is one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Mapping[str, Any]:
    """What is in a file; nothing where there is none, or no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
