"""Bounds for the values of a manifest, checked before anything is worked out from them."""

import math
from pathlib import Path
from typing import Any

from megaenc.console import printable
from megaenc.errors import InputError

_LARGEST = 10**15  # of whole numbers: products of some of them stay finite as floats
_LONGEST = 10_000  # values of a list, and letters of a text


def check_values(path: Path, values: dict[str, Any]) -> None:
    """Raise InputError, naming the field, for a number, text or list that no study can mean; each shared value is seen once."""
    left: list[tuple[str, Any]] = [(str(name), value) for name, value in values.items()]
    seen: set[int] = set()
    while left:
        place, value = left.pop()
        if isinstance(value, dict | list):
            if id(value) in seen:
                continue
            seen.add(id(value))
            pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)
            left += [(f"{place}.{_short(key)}" if isinstance(value, dict) else f"{place} {key}", part) for key, part in pairs]
            left += [(place, key) for key in value] if isinstance(value, dict) else []
        if (expected := _expected(value)) is not None:
            raise InputError(f"{path}: field `{place}`: found {_short(value)}, expected {expected}")


def _expected(value: Any) -> str | None:
    """Return the values that are expected in place of one that is out of bounds; None for one within."""
    if isinstance(value, list | dict) and len(value) > _LONGEST:
        return f"at most {_LONGEST:,} values"
    if isinstance(value, str) and (len(value) > _LONGEST or value != printable(value, keep="\n\t")):
        return f"a text of at most {_LONGEST:,} printable letters"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"a number of at most {_LARGEST:,}"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    return None


def _short(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{len(value):,} values"
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(text: str) -> str:
    """Return a text with its lines joined."""
    return " ".join(text.split())
