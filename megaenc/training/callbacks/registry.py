"""Registry of callbacks by name, and the callbacks of --callbacks.

A package offers one by an entry point in the group `megaenc.callbacks`, `NAME = "module:Class"`.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from megaenc import flags
from megaenc.errors import InputError
from megaenc.plugins import Registry
from megaenc.training.callbacks.base import Callback


def _find_defect(name: str, callback_class: Any) -> str:
    """Return why an object cannot be a callback; empty if it can."""
    if isinstance(callback_class, type) and issubclass(callback_class, Callback):
        return ""
    return "is no subclass of megaenc.training.callbacks.Callback"


CALLBACKS: Registry[type[Callback]] = Registry("megaenc.callbacks", "callback", _find_defect)
_OPTION_TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}


def parse_callbacks(
    texts: Sequence[flags.YamlMapping],
) -> list[tuple[type[Callback], dict[str, Any]]]:
    """Return class and options of each callback of --callbacks, in their order.

    Classes are found in CALLBACKS by `name`, which the options leave out. Options whose parameters
    are annotated as bool, int, float or str are converted to these types; others are as YAML has
    them. Nothing is constructed.

    Args:
        texts: YAML mappings such as "{name: stop_at_loss, loss: 3.2}".

    Raises:
        InputError: A text is no mapping with a name, a callback is unknown, or its class does not
            accept the options.
    """
    callbacks = []
    for text in texts:
        place = f"--callbacks {text}"
        options = flags.parse_mapping(text, "--callbacks", "{name: NAME, OPTION: VALUE}")
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise InputError(f"{place}: found no name, expected {{name: NAME, OPTION: VALUE}}")
        try:
            callback_class = CALLBACKS.find(name)
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
        callbacks.append((callback_class, _convert_options(place, callback_class, options)))
    return callbacks


def _convert_options(
    place: str, callback_class: type[Callback], options: dict[str, Any]
) -> dict[str, Any]:
    """Return `options` in the types of the parameters of `callback_class`."""
    signature = inspect.signature(callback_class)
    try:
        signature.bind(None, **options)  # None stands for the trainer
    except TypeError as error:
        raise InputError(f"{place}: {error}") from None
    converted = dict(options)
    for option, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, str):  # the module may import annotations from __future__
            kind = _OPTION_TYPES.get(kind)
        if option in options and kind in _OPTION_TYPES.values():
            converted[option] = flags.convert_value(f"{place}: {option}", kind, options[option])
    return converted
