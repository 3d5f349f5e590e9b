"""What a run tells while it trains: a row a step and one a validation, the same numbers in the folder and on the console."""

from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from megaenc.backend import Backend
from megaenc.console import ProgressLine
from megaenc.training.engine import BatchResult
from megaenc.training.plan import Plan
from megaenc.training.run_folder import METRICS, VALIDATION, RunFolder


class Monitor:
    """Makes the rows, on all ranks alike, and shows them; `folder` is there on rank 0 of a run with `--save` alone.

    As a context it holds the progress line, which begins at step `done`.
    """

    def __init__(self, plan: Plan, backend: Backend, folder: RunFolder | None, done: int):
        self._plan, self._folder = plan, folder
        self._peak = _total_peak_flops(backend, plan.dtype)
        self._line = ProgressLine(plan.schedule.text_at(done + 1), total=plan.settings.total_iters)

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.__exit__(kind, error, trace)

    def step(
        self,
        step: int,
        result: BatchResult,
        grad_norm: float,
        seconds: float,
        progress: dict[str, Any],
        deviations: float | None,
        notable: bool,
    ) -> None:
        """Update number `step` took `seconds`; `progress` is that of the run so far.

        `deviations`: see `spikes.RecentLosses.add`. A `notable` row is logged whatever the interval.
        """
        row = self._row(step, result, grad_norm, seconds, progress) | {"loss_deviations": deviations}
        if self._folder and (notable or step % self._plan.log_every == 0 or step == self._plan.settings.total_iters):
            self._folder.log(METRICS, row)
        self._line.update(step, description=row["objective"], **_shown(row))

    def validation(self, step: int, progress: dict[str, Any], found: dict[str, Any]) -> None:
        """A validation after `step` has `found` this (see `Validation`)."""
        if self._folder:
            self._folder.log(VALIDATION, {"step": step, **progress, **found})

    def _row(self, step: int, result: BatchResult, grad_norm: float, seconds: float, progress: dict[str, Any]) -> dict[str, Any]:
        """What is said of one step; tokens, predicted_tokens and flops are those of the run so far."""
        plan = self._plan
        return {
            "step": step,
            "objective": plan.schedule.text_at(step),
            "phase": plan.schedule.at(step).index,
            "loss": result.loss,
            "accuracy": result.accuracy,
            "learning_rate": plan.learning_rate(step),
            "grad_norm": grad_norm,
            **progress,
            "tokens_per_second": plan.step_tokens(step) / seconds,
            "model_flops_utilization": result.flops / seconds / self._peak if self._peak else None,
            "step_seconds": seconds,
        }


def _total_peak_flops(backend: Backend, dtype: torch.dtype) -> float:
    """FLOP/s that all processes of the run reach together; 0 if that of one is unknown."""
    peaks = torch.tensor([backend.peak_flops(dtype)], dtype=torch.float64, device=backend.device)
    lowest = peaks.clone()
    dist.all_reduce(peaks)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return float(peaks) if float(lowest) > 0 else 0.0


def _shown(row: dict[str, Any]) -> dict[str, str]:
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    return {"loss": loss, "tokens/s": f"{row['tokens_per_second']:,.0f}"}
