"""Kernels by name: what a command line asks for, and which others are worth comparing with it."""

import dataclasses
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

from megaenc.backend.parallel_config import KernelConfig
from megaenc.errors import InputError

FIRST = ("fused_kernels", "fp8_format")
"""Fields whose change is compared first: more follows from it than from another attention."""


def given(words: Sequence[str], flag: str) -> dict[str, Any]:
    """Read FIELD=VALUE words, of the fields of Kernels. Raises InputError, naming `flag`."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in VALUES or not text:
            raise InputError(f"{flag} {word}: expected FIELD=VALUE, FIELD being one of {', '.join(VALUES)}")
        known = {written(value): value for value in VALUES[name]}
        if text.lower() not in known:
            raise InputError(f"{flag} {word}: expected one of {', '.join(known)}")
        found[name] = known[text.lower()]
    return found


def _values(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return (True, False)
    return (None,) if hint is NoneType else tuple(value for part in get_args(hint) for value in (_values(part) or (part,)))


VALUES = {name: _values(hint) for name, hint in get_type_hints(KernelConfig).items()}
"""The values that each field of Kernels may have."""


def plain() -> dict[str, Any]:
    """Return torch's own operations, which run anywhere: what others are checked against."""
    return {"attention_backend": "sdpa"} | {name: False for name, allowed in VALUES.items() if allowed == (True, False)}


def others(base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every change of one field from `base` over the defaults, what changes most first."""
    usual = dataclasses.asdict(KernelConfig()) | base
    names = sorted(VALUES, key=lambda name: name not in FIRST)
    return [base | {name: value} for name in names for value in VALUES[name] if value != usual[name]]


def candidate_variants(
    base: dict[str, Any], computed: dict[str, Any] | None, lacking: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return those of `others` to be tried, and by title why the rest is not.

    `computed`: what the defaults over `base` have come to, all fields, where that is measured already; `lacking`: by FIELD=VALUE,
    what cannot be had.
    """
    left_out = {}
    for kernels in others(base):
        missing = [lacking[word] for word in title(kernels).split() if word in lacking]
        if computed == dataclasses.asdict(KernelConfig()) | kernels:
            missing = ["what is measured above"]
        if missing:
            left_out[title(kernels)] = missing[0]
    return [kernels for kernels in others(base) if title(kernels) not in left_out], left_out


def title(kernels: dict[str, Any]) -> str:
    """Return `kernels` for a table."""
    return " ".join(f"{name}={written(value)}" for name, value in kernels.items()) or "defaults"


def written(value: Any) -> str:
    """Return a value as the command line has it."""
    return str(value).lower()
