"""Registry of objectives by name.

Objectives are registered in this process or offered by installed packages, each name only once. A
package offers one by an entry point in the group `megaenc.objectives`, `NAME = "module:Class"`.
"""

import inspect
from typing import Any, TypeVar

from megaenc.errors import InputError
from megaenc.objectives.base import Attention, Objective
from megaenc.objectives.parser import COMBINATIONS
from megaenc.plugins import Registry

ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])


def register(objective: ObjectiveClass) -> ObjectiveClass:
    """Register an objective class under its `name` and return it, as a decorator.

    It is registered in this process only. The class is a frozen dataclass, so that
    `@dataclass(frozen=True)` stands below `@register`.

    Raises:
        ValueError: The name is registered in this process already, or the class is invalid.
    """
    OBJECTIVES.register(getattr(objective, "name", ""), objective)
    return objective


def check_class(objective: type, source: str) -> None:
    """Check that a class can be an objective, whether or not its name is used.

    It must be a dataclass under Objective with all of its methods, valid `name`, `attention`,
    `shift` and `classes`, and no fields but options that `option` declares.

    Args:
        source: Origin of the class, with which the error begins, such as MODULE:CLASS.

    Raises:
        InputError: It cannot.
    """
    if defect := _find_defect(getattr(objective, "name", ""), objective):
        raise InputError(f"{source}: {defect}")


def _find_defect(name: str, objective: Any) -> str:
    """Return why a class cannot be the objective `name`, or an empty string if it can."""
    if not (isinstance(objective, type) and issubclass(objective, Objective)):
        return "is no subclass of megaenc.objectives.Objective"
    if inspect.isabstract(objective):
        return f"has no method `{min(objective.__abstractmethods__)}`"
    if not isinstance(getattr(objective, "name", None), str) or not isinstance(
        getattr(objective, "attention", None), Attention
    ):
        return "lacks a `name` or an `attention` of type megaenc.objectives.Attention"
    if kind := COMBINATIONS.get(objective.name):
        return f"is called `{objective.name}`, which is a {kind} in a schedule"
    if type(objective.shift) is not int or objective.shift < 0:
        return (
            f"has shift {objective.shift!r}, expected the distance from a prediction to its token, "
            "0 or more"
        )
    if type(objective.classes) is not int or objective.classes == 1 or objective.classes < 0:
        return f"has {objective.classes!r} classes, expected 2 or more, or 0 for tokens"
    if objective.classes and objective.shift:
        return (
            f"has classes and shift {objective.shift}, expected 0: a class is predicted where it is"
        )
    if "__dataclass_fields__" not in vars(objective):
        return "is no dataclass, expected @dataclass(frozen=True) above it"
    for field in objective.options():
        if "bounds" not in field.metadata:
            return f"has a field `{field.name}` that is not declared with megaenc.objectives.option"
        if hasattr(Objective, field.name):
            return f"has an option `{field.name}`, which is a name of the class Objective"
    return "" if objective.name == name else f"is called `{objective.name}`"


OBJECTIVES: Registry[type[Objective]] = Registry("megaenc.objectives", "objective", _find_defect)


def known() -> list[str]:
    """Return the sorted names of all objectives.

    They include those that installed packages offer, which are not imported.
    """
    return OBJECTIVES.names()


def find(name: str) -> type[Objective]:
    """Return the objective class called `name`, such as `mlm`.

    The package that offers it is imported if necessary.

    Raises:
        InputError: It is unknown, offered twice or invalid, or its import has failed.
    """
    return OBJECTIVES.find(name)
