"""Base class of callbacks, which observe steps, validations and saves of a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from megaenc.training.engine import BatchSums, TrainStepResult
    from megaenc.training.trainer import Trainer


@dataclass(frozen=True)
class StepReport:
    """Report of a training step; equal on all ranks but for `seconds`.

    The trainer builds it for `Callback.after_step`. `result` has sums over all ranks (`metrics`),
    the gradient norm, and whether the update of `step` was applied; `seconds` is wall-clock time,
    and `progress` the run's counts up to this step by name (PROGRESS_FIELDS). `deviations` tells by
    how many robust standard deviations the loss is above recent ones, None if they are too few;
    `is_spike` is True if that is a spike by --loss-spike-sigmas.
    """

    step: int
    """Index of the step, from 1."""
    result: "TrainStepResult"
    """Sums over all ranks, gradient norm, and whether the update was applied."""
    seconds: float
    """Wall-clock time of this rank."""
    progress: dict[str, Any]
    """Tokens, FLOPs and other counts of the run up to this step (PROGRESS_FIELDS)."""
    deviations: float | None
    """Robust standard deviations of the loss above recent ones; None if they are too few."""
    is_spike: bool
    """True if the loss is a spike by --loss-spike-sigmas."""


class Callback:
    """Observer of a run: override the hooks that are needed; the others do nothing.

    All ranks call each hook together, so that a hook may use collectives. It observes: weights,
    gradients and random numbers stay as they are; `self.trainer.request_stop(reason)` ends the run
    after the present step. Steps count from 1. A callback is also a context manager, which is
    entered before the first step and left after the last one or an error. It is built with the
    trainer and, as keyword arguments, its options of --callbacks. A rewind leaves it and builds a
    new one. An error in a hook ends the run.
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

        Gradients are reduced over ranks (with the distributed optimizer, those of weights that this
        rank updates), but neither divided nor clipped yet. It is also called before an update that
        is then skipped.

        Args:
            metrics: Sums over all ranks of loss, counts and FLOPs.
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
        """Observe the result of a validation after `step`, on all ranks.

        It is called once, after all validation sets. `scores` always has `held_out`, a digest of
        the validation text, and `objectives`, the scores by objective, as in a row of
        validation.jsonl (see `Validator`).
        """

    def before_save(self, step: int) -> None:
        """Observe that a save after `step` begins; all ranks call it, only with --save."""

    def after_save(self, step: int) -> None:
        """Observe that the save after `step` is written or, with --async-save, begun.

        All ranks call it, unless the save raises.
        """
