"""Registries of objects by name, also of those that installed packages offer."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from megaenc.errors import InputError, closest_match

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes or functions by name, registered here or offered by installed packages.

    A package offers one by an entry point in `group`: its name for `module:object`.

    Args:
        group: Group of entry points, such as `megaenc.objectives`.
        kind: Noun for the objects in messages, such as `objective`.
        find_defect: Function of a name and an object that returns why the object cannot have the
            name, such as `is no dataclass`, or "" if it can.
    """

    def __init__(self, group: str, kind: str, find_defect: Callable[[str, Any], str]) -> None:
        self.group = group
        self.kind = kind
        self._find_defect = find_defect
        self._registered: dict[str, T] = {}

    def register(self, name: str, value: T) -> None:
        """Register `value` under `name` in this process.

        Raises:
            ValueError: `name` is registered already, or `find_defect` refuses the value.
        """
        if defect := self._find_defect(name, value):
            raise ValueError(f"{value!r} {defect}")
        if name in self._registered:
            raise ValueError(
                f"{self.kind} `{name}` is registered twice: {self._registered[name]} and {value}"
            )
        self._registered[name] = value

    def names(self) -> list[str]:
        """Return all names, sorted, without importing the packages that offer some."""
        return sorted({*self._registered, *_find_entry_points(self.group, tuple(sys.path)).names})

    def find(self, name: str) -> T:
        """Return the object called `name`, importing its package.

        Raises:
            InputError: It is unknown, offered twice or invalid, or its import has failed.
        """
        registered = self._registered.get(name)
        offers = [
            offer
            for offer in _find_entry_points(self.group, tuple(sys.path)).select(name=name)
            if registered is None or offer.value != _import_path(registered)
        ]
        if registered is not None and not offers:
            return registered
        title = f"{self.kind} `{name}`"
        if not offers:
            near = closest_match(name.lower(), self.names())
            hint = f"; did you mean `{near}`?" if near else ""
            names = ", ".join(self.names()) or "those of installed packages, and none offers any"
            raise InputError(f"unknown {title}, expected one of {names}{hint}")
        if registered is not None:
            raise InputError(
                f"{title}: {_format_package(offers[0])} offers it, "
                f"but {_import_path(registered)} has that name already"
            )
        if len(offers) > 1:
            packages = " and by ".join(_format_package(offer) for offer in offers)
            raise InputError(f"{title}: offered by {packages}, expected one of them")
        try:
            value = offers[0].load()
        except Exception as error:  # importing a foreign module may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise InputError(
                f"{title}: {_format_package(offers[0])} cannot be loaded: {reason}"
            ) from error
        if defect := self._find_defect(name, value):
            raise InputError(
                f"{title}: {_format_package(offers[0])} offers {offers[0].value}, which {defect}"
            )
        return value

    def package_origin(self, name: str, value: T) -> str | None:
        """Return `PACKAGE VERSION (HASH of the source file)` of what a package offers.

        HASH is the first 12 digits of the SHA-256. None for an object that no installed package
        offers.
        """
        for offer in _find_entry_points(self.group, tuple(sys.path)).select(name=name):
            if offer.value == _import_path(value):
                package = f"{offer.dist.name} {offer.dist.version}" if offer.dist else offer.value
                source = Path(inspect.getfile(value)).read_bytes()
                return f"{package} ({hashlib.sha256(source).hexdigest()[:12]})"
        return None


@cache
def _find_entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points `group` of the packages on the module path `path`."""
    return entry_points(group=group)


def _import_path(value: Any) -> str:
    """Return `module:name` of a class or function."""
    return f"{value.__module__}:{value.__qualname__}"


def _format_package(offer: EntryPoint) -> str:
    """Format the package of an entry point for an error message."""
    return f"package `{offer.dist.name}`" if offer.dist else f"`{offer.value}`"
