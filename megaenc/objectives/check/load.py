"""Objectives given to `megaenc objective check`: a name, or a class in a module."""

import importlib
import os
import sys
from collections.abc import Sequence

from megaenc.errors import InputError
from megaenc.objectives.base import Objective
from megaenc.objectives.check.measure import VOCABULARY
from megaenc.objectives.registry import check_class, find, known, register
from megaenc.objectives.schedule import parse_objective


def load_objective(text: str, options: Sequence[str] = ()) -> Objective:
    """Return the objective given to the command, with the made-up VOCABULARY.

    MODULE is imported, also from the current directory, which joins sys.path. CLASS need not be
    registered.

    Args:
        text: NAME, NAME(OPTIONS) or MODULE:CLASS.
        options: NAME=VALUE each, only for MODULE:CLASS.

    Raises:
        InputError: The objective cannot be imported or built, `options` are given with a NAME, or
            another objective has the name of CLASS.
    """
    words = dict(word.partition("=")[::2] for word in options)
    if "(" in text or ":" not in text:
        if options:
            raise InputError(
                f"--options {' '.join(options)}: found with {text}, expected them in it: "
                f"{text}({','.join(options)})"
            )
        return parse_objective(text, VOCABULARY, "--objective")
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        objective = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a foreign module may raise anything
        raise InputError(
            f"{text}: {type(error).__name__}: {error}; expected MODULE:CLASS of an objective"
        ) from None
    finally:
        sys.path.append(sys.path.pop(0))  # last, for imports inside its functions
    check_class(objective, text)
    if objective.name in known() and find(objective.name) is not objective:
        raise InputError(
            f"{text}: is called `{objective.name}`, found another objective of this name; "
            "choose a new one"
        )
    return objective.from_texts(VOCABULARY, words)


def register_objective(text: str, options: Sequence[str]) -> str:
    """Return the schedule text of an objective given to the command.

    The class of a MODULE:CLASS is registered in this process, unless it is known already.

    Args:
        text: As in `load_objective`.
        options: As in `load_objective`.

    Raises:
        InputError: As in `load_objective`.
    """
    objective = load_objective(text, options)
    if objective.name not in known():
        register(type(objective))
    return objective.describe()
