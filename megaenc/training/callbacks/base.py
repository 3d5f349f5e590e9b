"""Base class of callbacks, which observe steps, validations and saves of a run."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from megaenc import flags
from megaenc.errors import InputError
from megaenc.plugins import Registry

if TYPE_CHECKING:
    from megaenc.training.engine import BatchSums, TrainStepResult
    from megaenc.training.trainer import Trainer


@dataclass(frozen=True)
class StepReport:
    """Report of a training step; equal on all ranks but for `seconds`.

    `step` counts from 1. `result` has sums over all ranks, gradient norm, and whether the update
    was applied. The trainer builds it for `Callback.after_step`.
    """

    step: int
    result: "TrainStepResult"
    seconds: float
    """Wall-clock time of this rank."""
    progress: dict[str, Any]
    """Tokens, FLOPs and other counts of the run up to this step (PROGRESS_FIELDS)."""
    deviations: float | None
    """Robust standard deviations of the loss above recent ones; None if they are too few."""
    is_spike: bool
    """True if the loss is a spike by --loss-spike-sigmas."""


class Callback:
    """Observer of a run: override the hooks that are needed.

    All ranks call each hook together, so that a hook may use collectives. It observes: weights,
    gradients and random numbers stay as they are; `self.trainer.request_stop` ends the run. Steps
    count from 1. A callback is also a context manager, which is entered before the first step and
    left after the last one or an error. It is built with the trainer and, as keyword arguments, its
    options of --callbacks, again after a rewind.
    """

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        """Release what the callback holds."""

    def before_step(self, step: int) -> None:
        """Observe that `step` begins."""

    def before_optimizer(self, step: int, metrics: "BatchSums") -> None:
        """Observe sums and gradients of `step` before the optimizer's step.

        Gradients are neither divided nor clipped yet.

        Args:
            metrics: Sums over all ranks.
        """

    def after_step(self, report: StepReport) -> None:
        """Observe the end of a step, also of one whose update was skipped."""

    def before_validation(self, step: int) -> None:
        """Observe that a validation after `step` begins.

        It is called again before each further validation set, and each further pass of a
        pseudo-perplexity.

        Args:
            step: Last trained step; before the first one, 0 or the step that a branch starts from.
        """

    def after_validation(self, step: int, scores: dict[str, Any]) -> None:
        """Observe the `scores` after `step`: `held_out` and `objectives`.

        They are those of a row of validation.jsonl.
        """

    def before_save(self, step: int) -> None:
        """Observe that a save after `step` begins; never called without --save."""

    def after_save(self, step: int) -> None:
        """Observe that the save after `step` is written or, with --async-save, begun."""


def _find_defect(name: str, kind: Any) -> str:
    """Return why an object cannot be a callback; empty if it can."""
    is_callback = isinstance(kind, type) and issubclass(kind, Callback)
    return "" if is_callback else "is no subclass of megaenc.training.callbacks.Callback"


CALLBACKS: Registry[type[Callback]] = Registry("megaenc.callbacks", "callback", _find_defect)


def parse_callbacks(
    texts: Sequence[flags.YamlMapping],
) -> list[tuple[type[Callback], dict[str, Any]]]:
    """Return class and options of each callback of --callbacks, in their order.

    Options are without `name`. Those whose parameters are annotated as bool, int, float or str are
    converted to these types; others are as YAML has them. Nothing is constructed.

    Args:
        texts: YAML mappings such as "{name: stop_at_loss, loss: 3.2}".

    Raises:
        InputError: A text is no mapping with a name, a callback is unknown, or its class does not
            accept the options.
    """
    callbacks = []
    for text in texts:
        options = flags.parse_mapping(text, "--callbacks", "{name: NAME, OPTION: VALUE}")
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise InputError(
                f"--callbacks {text}: found no name, expected {{name: NAME, OPTION: VALUE}}"
            )
        try:
            kind = CALLBACKS.find(name)
            signature = inspect.signature(kind)
            signature.bind(None, **options)
        except (InputError, TypeError) as error:
            raise InputError(f"--callbacks {text}: {error}") from None
        for parameter in signature.parameters.values():
            option = parameter.name
            if option in options and parameter.annotation in (bool, int, float, str):
                place = f"--callbacks {text}: {option}"
                options[option] = flags.convert_value(place, parameter.annotation, options[option])
        callbacks.append((kind, options))
    return callbacks
