"""Kernels by name: what a command line asks for, and which others are worth comparing with it."""

import dataclasses
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from megaenc.backend.kernels import Kernels
from megaenc.errors import InputError

FIRST = ("fused_kernels", "fp8_format")
"""Fields whose change is compared first: more follows from it than from another attention."""


def given(words: Sequence[str], flag: str) -> dict[str, Any]:
    """FIELD=VALUE words, of the fields of Kernels. Raises InputError, naming `flag`."""
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        name = name.replace("-", "_")
        known = values()
        if name not in known or not equals:
            raise InputError(f"{flag} {word}: expected FIELD=VALUE, FIELD being one of {', '.join(known)}")
        value = _read(text)
        if known[name] and value not in known[name]:
            raise InputError(f"{flag} {word}: expected one of {', '.join(map(written, known[name]))}")
        found[name] = value
    return found


def values() -> dict[str, tuple[Any, ...]]:
    """The values that each field of Kernels may have; none where its type does not say."""
    hints = get_type_hints(Kernels)
    return {field.name: _values(hints[field.name]) for field in dataclasses.fields(Kernels)}


def _values(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return (True, False)
    if hint is NoneType:
        return (None,)
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(value for part in get_args(hint) for value in _values(part))
    return ()


def plain() -> dict[str, Any]:
    """torch's own operations, which run anywhere: what others are checked against."""
    return {"attention_backend": "sdpa"} | {name: False for name, allowed in values().items() if allowed == (True, False)}


def others(base: dict[str, Any]) -> list[dict[str, Any]]:
    """Every change of one field from `base` over the defaults."""
    usual = dataclasses.asdict(Kernels()) | base
    return [base | {name: value} for name, allowed in values().items() for value in allowed if value != usual[name]]


def worth_a_trial(
    base: dict[str, Any], computed: dict[str, Any] | None, lacking: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Those of `others` to be tried, what changes most first, and by title why the rest is not.

    `computed`: what the defaults over `base` have come to, all fields, where that is measured already; `lacking`: by FIELD=VALUE,
    what cannot be had.
    """
    tried, left_out = [], {}
    for kernels in sorted(others(base), key=lambda each: not any(each.get(name) != base.get(name) for name in FIRST)):
        why = next((lacking[one] for one in (title({name: value}) for name, value in kernels.items()) if one in lacking), "")
        if computed == dataclasses.asdict(Kernels()) | kernels:
            why = "what is measured above"
        if why:
            left_out[title(kernels)] = why
        else:
            tried.append(kernels)
    return tried, left_out


def title(kernels: dict[str, Any]) -> str:
    """For a table."""
    return " ".join(f"{name}={written(value)}" for name, value in kernels.items()) or "defaults"


def written(value: Any) -> str:
    """As the command line has it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _read(text: str) -> Any:
    return None if text.lower() == "none" else yaml.safe_load(text)
