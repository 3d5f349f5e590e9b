"""Logging of metrics, validations and straggler reports."""

from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megaenc.backend import Backend
from megaenc.backend.reductions import reduce_over_ranks
from megaenc.console import ProgressLine
from megaenc.training.callbacks.backends import open_loggers
from megaenc.training.callbacks.base import Callback, StepReport
from megaenc.training.run_dir import METRICS_FILE, STRAGGLERS_FILE, VALIDATION_FILE, RunDir
from megaenc.training.timers import EVALUATION, SAVE, StepTimers, memory_usage

if TYPE_CHECKING:
    from megaenc.training.trainer import Trainer

_GROUPS = {METRICS_FILE: "train", VALIDATION_FILE: "validation", STRAGGLERS_FILE: "stragglers"}


class MetricsLogger(Callback):
    """Callback that logs steps and validations of a run.

    Rank 0 writes them to the files of the run directory, to TensorBoard and Weights & Biases, and
    to a progress line on the console. All ranks build it together, from the trainer and the run
    directory (None on ranks except 0 and without --save), and call `drop_rows_after` first. The
    callback's context shows the progress line, and closes the loggers at the end.
    """

    def __init__(self, trainer: "Trainer", run_dir: RunDir | None):
        """Open the loggers. All ranks call this together.

        Args:
            run_dir: Run directory; None on ranks except 0 and without --save.
        """
        super().__init__(trainer)
        plan = trainer.plan
        self._run_dir = run_dir
        self._loggers = open_loggers(plan, run_dir)
        monitoring = plan.settings.monitoring
        save = plan.settings.output.save
        # The same on all ranks.
        self._has_outputs = bool(save or monitoring.tensorboard_dir or monitoring.wandb_project)
        peak = trainer.backend.peak_flops(plan.dtype)
        total_peak, unknown_count = reduce_over_ranks([peak, not peak], ReduceOp.SUM, torch.float64)
        # FLOP/s of the devices of all ranks; 0 if one is unknown.
        self._peak = 0.0 if unknown_count else total_peak
        self._line = ProgressLine(
            plan.schedule.text_at(trainer.start_step + 1), total=plan.settings.total_iters
        )

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._line.__exit__(*error)
        for logger in self._loggers:
            logger.close()

    def after_step(self, report: StepReport) -> None:
        """Update the progress line, and log a row of metrics.jsonl if one is due.

        All ranks call this together, as timings are reduced. A row is due at each multiple of
        --log-interval, at the last step, and at a spike or skipped step. Errors are those of `log`.
        """
        plan = self.trainer.plan
        step = report.step
        result = report.result
        metrics = result.metrics
        seconds = report.seconds
        row = {
            "step": step,
            "objective": plan.schedule.text_at(step),
            "phase": plan.schedule.phase_at(step).index,
            "loss": metrics.loss,
            "accuracy": metrics.accuracy,
            "learning_rate": plan.learning_rate(step),
            "grad_norm": result.grad_norm,
            **report.progress,
            "tokens_per_second": plan.step_tokens(step) / seconds,
            "tflops_per_second": metrics.flops / seconds / dist.get_world_size() / 1e12,
            "model_flops_utilization": metrics.flops / seconds / self._peak if self._peak else None,
            "step_seconds": seconds,
            "loss_deviations": report.deviations,
        }
        is_notable = not result.is_applied or report.is_spike
        is_due = is_notable or step % plan.log_interval == 0 or step == plan.settings.total_iters
        if is_due and self._has_outputs:
            self.log(METRICS_FILE, row | self._reduce_over_ranks())
        self._line.update(
            step, description=row["objective"], **progress_fields(row, self.trainer.backend)
        )

    def after_validation(self, step: int, scores: dict[str, Any]) -> None:
        """Log a row of validation.jsonl: step, the run's counters, and `scores`.

        All ranks may call it; only rank 0 writes, with the errors of `log`.
        """
        self.log(VALIDATION_FILE, {"step": step, **self.trainer.progress, **scores})

    def log(self, file: str, row: dict[str, Any]) -> None:
        """Write `row` to a metrics file and to the loggers; do nothing on ranks except 0.

        Without --save only the loggers get it.

        Args:
            file: METRICS_FILE, VALIDATION_FILE or STRAGGLERS_FILE.
            row: Values by name, JSON-ready, with the `step`.

        Raises:
            LocalInputError: The file cannot be written, or the run directory's lock is lost.
        """
        if self._run_dir:
            self._run_dir.append_row(file, row)
        for logger in self._loggers:
            logger.submit("log", _GROUPS[file], row)

    def drop_rows_after(self, step: int) -> None:
        """Invalidate rows of steps after `step` in TensorBoard and Weights & Biases.

        Those steps are repeated. It must be called once, before the first row, with -1 for a new
        run. The run directory's files are left to `RunDir.drop_rows_after`.
        """
        for logger in self._loggers:
            logger.submit("drop_rows_after", step)

    def before_save(self, step: int) -> None:
        """Sync rows to the disk, so that no checkpoint is newer than its rows.

        TensorBoard and Weights & Biases are flushed too, waiting up to 5 seconds for each.

        Raises:
            LocalInputError: A file cannot be written, or the run directory's lock is lost.
        """
        if self._run_dir:
            self._run_dir.sync()
        for logger in self._loggers:
            logger.flush()

    def _reduce_over_ranks(self) -> dict[str, Any]:
        """Return timings and memory usage, as maxima over all ranks."""
        pauses = self.trainer.pause_timers.wall
        seconds = self.trainer.engine.step_timers.seconds() | {
            name: pauses[name] for name in (EVALUATION, SAVE)
        }
        self.trainer.pause_timers = StepTimers()
        local_values = {f"{name}_seconds": value for name, value in seconds.items()} | memory_usage(
            self.trainer.backend
        )
        maxima = reduce_over_ranks([*local_values.values()], ReduceOp.MAX, torch.float64)
        return dict(zip(local_values, maxima, strict=True))


def progress_fields(row: dict[str, Any], backend: Backend) -> dict[str, str]:
    """Return the texts of the progress line by name: loss, tokens/s and MFU.

    MFU, model FLOPs utilization, is in percent; it is left out if unknown, and on a CPU. A loss of
    None is "-".

    Args:
        row: Row of metrics.jsonl.
    """
    loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
    utilization = row["model_flops_utilization"]
    fields = {"loss": loss, "tokens/s": f"{row['tokens_per_second']:,.0f}"}
    # A CPU's peak is measured as the run begins, beside whatever else runs then.
    if utilization is not None and not backend.is_cpu:
        fields["MFU"] = f"{100 * utilization:.1f} %"
    return fields
