"""Kernel variants: parsing of --kernels and --compare, and selection of variants worth comparing."""

import dataclasses
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args, get_type_hints

from megaenc.backend.parallel_config import KernelConfig
from megaenc.errors import InputError

PRIORITY_FIELDS = ("fused_kernels", "fp8_format")
"""Fields compared first, since they have the largest effect."""


def parse_kernels(words: Sequence[str], flag: str) -> dict[str, Any]:
    """Return the KernelConfig fields that FIELD=VALUE words set, by name; raise InputError that names `flag`."""
    kernels: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in FIELD_VALUES or not text:
            raise InputError(f"{flag} {word}: expected FIELD=VALUE with FIELD one of {', '.join(FIELD_VALUES)}")
        allowed = {format_value(value): value for value in FIELD_VALUES[name]}
        if text.lower() not in allowed:
            raise InputError(f"{flag} {word}: expected one of {', '.join(allowed)}")
        kernels[name] = allowed[text.lower()]
    return kernels


def _allowed_values(hint: Any) -> tuple[Any, ...]:
    """Return all values of a type hint of booleans, literals and None."""
    if hint is bool:
        return (True, False)
    return (
        (None,) if hint is NoneType else tuple(value for part in get_args(hint) for value in (_allowed_values(part) or (part,)))
    )


FIELD_VALUES = {name: _allowed_values(hint) for name, hint in get_type_hints(KernelConfig).items()}
"""Allowed values of each field of KernelConfig."""


def reference_kernels() -> dict[str, Any]:
    """Return the KernelConfig fields that select torch's own operations, the reference of all checks, by name."""
    return {"attention_backend": "sdpa"} | {name: False for name, allowed in FIELD_VALUES.items() if allowed == (True, False)}


def list_variants(base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a copy of `base` for each other value of each KernelConfig field; fused kernels and float8 first."""
    usual = dataclasses.asdict(KernelConfig()) | base
    names = sorted(FIELD_VALUES, key=lambda name: name not in PRIORITY_FIELDS)
    return [base | {name: value} for name in names for value in FIELD_VALUES[name] if value != usual[name]]


def candidate_variants(
    base: dict[str, Any], computed: dict[str, Any] | None, missing_requirements: dict[str, str]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return variants of `base` to compare, and by name why others are not: unavailable or measured (`computed`).

    `computed`: all fields of the kernels measured already, if any; `missing_requirements`: unavailable values by FIELD=VALUE.
    """
    skipped = {}
    for kernels in list_variants(base):
        reasons = [missing_requirements[word] for word in format_kernels(kernels).split() if word in missing_requirements]
        if computed == dataclasses.asdict(KernelConfig()) | kernels:
            reasons = ["measured already"]
        if reasons:
            skipped[format_kernels(kernels)] = reasons[0]
    return [kernels for kernels in list_variants(base) if format_kernels(kernels) not in skipped], skipped


def format_kernels(kernels: dict[str, Any]) -> str:
    """Return kernel fields as FIELD=VALUE words in one string, or "defaults" if there are none."""
    return " ".join(f"{name}={format_value(value)}" for name, value in kernels.items()) or "defaults"


def format_value(value: Any) -> str:
    """Return the value of a kernel field in lower case as on the command line: "true", "none" or a name."""
    return str(value).lower()
