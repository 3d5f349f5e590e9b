"""Registry of objectives by name: those registered in this process, then those of installed packages.

A package offers one through an entry point in the group `megaenc.objectives`: its name, pointing to `module:Class`.
"""

import hashlib
import inspect
import sys
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import TypeVar

from megaenc.errors import InputError, closest_match
from megaenc.objectives.base import Attention, Objective
from megaenc.objectives.parser import COMBINATIONS

GROUP = "megaenc.objectives"

_registered: dict[str, type[Objective]] = {}
ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])


def register(objective: ObjectiveClass) -> ObjectiveClass:
    """Register an objective class under its `name`, return it (decorator); ValueError for a used name or invalid class."""
    if complaint := _find_defect(objective):
        raise ValueError(f"{objective!r} {complaint}")
    if objective.name in _registered:
        raise ValueError(f"objective `{objective.name}` is registered twice: {_registered[objective.name]} and {objective}")
    _registered[objective.name] = objective
    return objective


def check_class(objective: type, source: str) -> None:
    """Raise InputError, naming `source`, if a class cannot be an objective."""
    if complaint := _find_defect(objective):
        raise InputError(f"{source}: {complaint}")


def known() -> list[str]:
    """Return the sorted names of all objectives, registered or offered by installed packages, without importing these."""
    return sorted({*_registered, *_find_entry_points(tuple(sys.path)).names})


def find(name: str) -> type[Objective]:
    """Return the objective class called `name`, importing its package; InputError if unknown, offered twice or invalid."""
    objective = _registered.get(name)
    offers = [
        offer
        for offer in _find_entry_points(tuple(sys.path)).select(name=name)
        if objective is None or offer.value != _import_path(objective)
    ]
    if objective is not None and not offers:
        return objective
    if not offers:
        near = closest_match(name.lower(), known())
        hint = f"; did you mean `{near}`?" if near else ""
        raise InputError(f"unknown objective `{name}`, expected one of {', '.join(known())}{hint}")
    if objective is not None:
        raise InputError(
            f"objective `{name}`: {_format_package(offers[0])} offers it, but {_import_path(objective)} has that name already"
        )
    if len(offers) > 1:
        raise InputError(f"objective `{name}`: offered by {' and by '.join(map(_format_package, offers))}, expected one of them")
    return _load_entry_point(offers[0])


@cache
def _find_entry_points(path: tuple[str, ...]) -> EntryPoints:
    """Return the objectives that packages on the module path `path` offer, cached."""
    return entry_points(group=GROUP)


def _load_entry_point(offer: EntryPoint) -> type[Objective]:
    """Import the objective class of an entry point. Raises InputError if that fails or the class is invalid."""
    try:
        objective = offer.load()
    except Exception as error:  # importing a foreign module may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"objective `{offer.name}`: {_format_package(offer)} cannot be loaded: {reason}") from error
    complaint = _find_defect(objective) or ("" if objective.name == offer.name else f"is called `{objective.name}`")
    if complaint:
        raise InputError(f"objective `{offer.name}`: {_format_package(offer)} offers {offer.value}, which {complaint}")
    return objective


def _find_defect(objective: type) -> str:
    """Return why a class cannot be an objective, or an empty string if it can."""
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        return "is no subclass of megaenc.objectives.Objective"
    if inspect.isabstract(objective):
        return f"has no method `{min(objective.__abstractmethods__)}`"
    if not isinstance(getattr(objective, "name", None), str) or not isinstance(getattr(objective, "attention", None), Attention):
        return "lacks a `name` or an `attention` of type megaenc.objectives.Attention"
    if kind := COMBINATIONS.get(objective.name):
        return f"is called `{objective.name}`, which is a {kind} in a schedule"
    if type(objective.shift) is not int or objective.shift < 0:
        return f"has shift {objective.shift!r}, expected the distance from a prediction to its token, 0 or more"
    if "__dataclass_fields__" not in vars(objective):
        return "is no dataclass, expected @dataclass(frozen=True) above it"
    for field in objective.options():
        if "low" not in field.metadata:
            return f"has a field `{field.name}` that is not declared with megaenc.objectives.option"
        if hasattr(Objective, field.name):
            return f"has an option `{field.name}`, which is a name of the class Objective"
    return ""


def package_origin(objective: type[Objective]) -> str | None:
    """Return `PACKAGE VERSION (HASH of the source file)` of an objective that an installed package offers, else None."""
    for offer in _find_entry_points(tuple(sys.path)).select(name=objective.name):
        if offer.value == _import_path(objective):
            package = f"{offer.dist.name} {offer.dist.version}" if offer.dist else offer.value
            source = Path(inspect.getfile(objective)).read_bytes()
            return f"{package} ({hashlib.sha256(source).hexdigest()[:12]})"
    return None


def _import_path(objective: type[Objective]) -> str:
    """Return `module:Class` of an objective class."""
    return f"{objective.__module__}:{objective.__qualname__}"


def _format_package(offer: EntryPoint) -> str:
    """Format the package of an entry point for an error message."""
    return f"package `{offer.dist.name}`" if offer.dist else f"`{offer.value}`"
