"""Objectives by name: those registered in this process, then those that installed packages offer.

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
from megaenc.objectives.parser import MIXTURE

GROUP = "megaenc.objectives"

_registered: dict[str, type[Objective]] = {}
ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])


def register(objective: ObjectiveClass) -> ObjectiveClass:
    """Class decorator: make an objective known by its `name`. Raises ValueError for a name taken or a class that is none."""
    if complaint := _find_defect(objective):
        raise ValueError(f"{objective!r} {complaint}")
    if objective.name in _registered:
        raise ValueError(f"objective `{objective.name}` is registered twice: {_registered[objective.name]} and {objective}")
    _registered[objective.name] = objective
    return objective


def known() -> list[str]:
    """The names that `find` accepts, sorted; no package is loaded for it."""
    return sorted({*_registered, *_find_entry_points().names})


def find(name: str) -> type[Objective]:
    """The objective called `name`; a package that offers it is loaded now, no other is.

    Raises InputError for an unknown name, for one that two offer, and for a package that does not hold what it offers.
    """
    found = _registered.get(name)
    offers = [offer for offer in _find_entry_points().select(name=name) if found is None or offer.value != _import_path(found)]
    if found is not None and not offers:
        return found
    if not offers:
        near = closest_match(name.lower(), known())
        hint = f"; did you mean `{near}`?" if near else ""
        raise InputError(f"unknown objective `{name}`, expected one of {', '.join(known())}{hint}")
    if found is not None:
        raise InputError(f"objective `{name}`: {_format_package(offers[0])} offers it, but {_import_path(found)} has that name already")
    if len(offers) > 1:
        raise InputError(f"objective `{name}`: offered by {' and by '.join(map(_format_package, offers))}, expected one of them alone")
    return _load_entry_point(offers[0])


def _find_entry_points() -> EntryPoints:
    """What the packages on the module path offer."""
    return _find_entry_points_on(tuple(sys.path))


@cache
def _find_entry_points_on(path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=GROUP)


def _load_entry_point(offer: EntryPoint) -> type[Objective]:
    try:
        objective = offer.load()
    except Exception as error:  # whatever a foreign module raises while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"objective `{offer.name}`: {_format_package(offer)} cannot be loaded: {reason}") from error
    complaint = _find_defect(objective) or ("" if objective.name == offer.name else f"is called `{objective.name}`")
    if complaint:
        raise InputError(f"objective `{offer.name}`: {_format_package(offer)} offers {offer.value}, which {complaint}")
    return objective


def _find_defect(objective: type) -> str:
    """What keeps a class from being an objective; empty where nothing does."""
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        return "is no subclass of megaenc.objectives.Objective"
    if inspect.isabstract(objective):
        return "has no method `targets`"
    if not isinstance(getattr(objective, "name", None), str) or not isinstance(getattr(objective, "attention", None), Attention):
        return "lacks a `name` or an `attention` of type megaenc.objectives.Attention"
    if objective.name == MIXTURE:
        return f"is called `{MIXTURE}`, which is a mixture in a schedule"
    if type(objective.shift) is not int or objective.shift < 0:
        return f"has shift {objective.shift!r}, expected how far before its token a prediction stands: 0 or more"
    if "__dataclass_fields__" not in vars(objective):
        return "is no dataclass, expected @dataclass(frozen=True) above it"
    for field in objective.options():
        if "low" not in field.metadata:
            return f"has a field `{field.name}` that is not declared with megaenc.objectives.option"
        if hasattr(Objective, field.name):
            return f"has an option `{field.name}`, which is the name of something else that every objective has"
    return ""


def package_origin(objective: type[Objective]) -> str | None:
    """For an objective of another package: the package, its version and a hash of the module; None for those of this one."""
    for offer in _find_entry_points().select(name=objective.name):
        if offer.value == _import_path(objective):
            package = f"{offer.dist.name} {offer.dist.version}" if offer.dist else offer.value
            source = Path(inspect.getfile(objective)).read_bytes()
            return f"{package} ({hashlib.sha256(source).hexdigest()[:12]})"
    return None


def _import_path(objective: type[Objective]) -> str:
    return f"{objective.__module__}:{objective.__qualname__}"


def _format_package(offer: EntryPoint) -> str:
    return f"package `{offer.dist.name}`" if offer.dist else f"`{offer.value}`"
