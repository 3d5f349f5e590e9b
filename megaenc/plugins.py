"""Registries of objects by name, also of those that installed packages offer."""

import hashlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar

from megaenc.errors import InputError, suggest_closest

T = TypeVar("T")


class Registry(Generic[T]):
    """Classes or functions by name, registered here or offered by installed packages.

    A package offers one by an entry point in `group`, `NAME = "module:object"`. A name that is both
    registered and offered is an error of `find`, unless both are the same object.

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
            ValueError: `name` is registered already, even for this value, or `find_defect` refuses
                it.
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
        return sorted({*self._registered, *self._offers.names})

    def find(self, name: str) -> T:
        """Return the object called `name`, importing its package.

        Raises:
            InputError: It is unknown, offered twice or invalid, or its import has failed.
        """
        offer = self._select_offer(name)
        if offer is not None:
            return self._load(name, offer)
        if name in self._registered:
            return self._registered[name]
        hint = suggest_closest(name.lower(), self.names())
        names = ", ".join(self.names()) or "those of installed packages, and none offers any"
        raise InputError(f"unknown {self.kind} `{name}`, expected one of {names}{hint}")

    def _select_offer(self, name: str) -> EntryPoint | None:
        """Return the only entry point called `name`, or None without one.

        The entry point of the object that is registered under `name` does not count.

        Raises:
            InputError: Several packages offer the name, or another object is registered under it.
        """
        registered = self._registered.get(name)
        offers = [
            offer
            for offer in self._offers.select(name=name)
            if registered is None or offer.value != _import_path(registered)
        ]
        if not offers:
            return None
        if registered is not None:
            raise InputError(
                f"{self.kind} `{name}`: package `{offers[0].dist.name}` offers it, "
                f"but {_import_path(registered)} has that name already"
            )
        if len(offers) > 1:
            packages = " and by ".join(f"package `{offer.dist.name}`" for offer in offers)
            raise InputError(f"{self.kind} `{name}`: offered by {packages}, expected one of them")
        return offers[0]

    def _load(self, name: str, offer: EntryPoint) -> T:
        """Return the object of an entry point called `name`.

        Raises:
            InputError: Its import fails, or the object is invalid.
        """
        place = f"{self.kind} `{name}`: package `{offer.dist.name}`"
        try:
            value = offer.load()
        except Exception as error:  # importing a foreign module may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{place} cannot be loaded: {reason}") from error
        if defect := self._find_defect(name, value):
            raise InputError(f"{place} offers {offer.value}, which {defect}")
        return value

    def package_origin(self, name: str, value: T) -> str | None:
        """Return `PACKAGE VERSION (HASH)` of the package that offers `value` as `name`.

        HASH is the first 12 digits of the SHA-256 of the value's source file. None if no installed
        package offers it.

        Raises:
            OSError: The source file cannot be read.
        """
        for offer in self._offers.select(name=name):
            if offer.value == _import_path(value):
                source = Path(inspect.getfile(value)).read_bytes()
                digest = hashlib.sha256(source).hexdigest()[:12]
                return f"{offer.dist.name} {offer.dist.version} ({digest})"
        return None

    @property
    def _offers(self) -> EntryPoints:
        """Return the entry points of installed packages in `group`."""
        return _find_entry_points(self.group, tuple(sys.path))


@cache
def _find_entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return the entry points `group` of the packages on `sys.path`, which is `path`."""
    # `path` is only the key of the cache: the packages change with it.
    return entry_points(group=group)


def _import_path(value: Any) -> str:
    """Return `module:name` of a class or function."""
    return f"{value.__module__}:{value.__qualname__}"
