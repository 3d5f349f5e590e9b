"""The training loop: start or resume, then train, validate and save."""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from torch.distributed import ReduceOp

from megaenc.backend import Backend
from megaenc.backend.reductions import reduce_over_ranks
from megaenc.console import print_rank_0
from megaenc.errors import InputError, LocalInputError
from megaenc.training.callbacks.base import Callback, StepReport
from megaenc.training.callbacks.loss_spikes import RecentLosses, format_spike
from megaenc.training.callbacks.metrics_logger import MetricsLogger
from megaenc.training.callbacks.profiler import Profiler
from megaenc.training.callbacks.registry import parse_callbacks
from megaenc.training.callbacks.run_messages import format_run_footer, format_run_header
from megaenc.training.callbacks.stragglers import StragglerDetector
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint.manager import CheckpointManager
from megaenc.training.checkpoint_dir import DamagedCheckpointError
from megaenc.training.distributed.collectives import (
    abort_all_on_error,
    broadcast_call,
    check_same_plan,
)
from megaenc.training.distributed.largest_batch import fill_micro_batches
from megaenc.training.distributed.nonfinite import report_skipped_step
from megaenc.training.distributed.signals import SignalHandler
from megaenc.training.distributed.watchdog import ProgressBeats, Watchdog
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan
from megaenc.training.run_dir import STACKS_DIR, PretrainResult, RunDir, list_losses
from megaenc.training.run_init import PROGRESS_FIELDS, RunInit, identity_digest
from megaenc.training.skip_policy import plan_after_rewind, saw_same_data
from megaenc.training.timers import EVALUATION, SAVE, StepTimers
from megaenc.training.validation import Validator


@dataclass(frozen=True)
class RunContext:
    """Devices, watchdog, signals and directories of a run, which outlast a rewind.

    `train_plan` builds it on each rank from its `backend`, a `watchdog` and `signals` whose
    contexts are entered, and two parts of --save, which are None without that flag: `checkpoints`,
    on all ranks, and `run_dir`, None also on ranks other than 0. `callbacks`, by default (), are
    functions from the Trainer to a Callback, which runs after those of --callbacks.
    """

    backend: Backend
    watchdog: Watchdog
    signals: SignalHandler
    checkpoints: CheckpointManager | None
    """Checkpoints of --save, on all ranks."""
    run_dir: RunDir | None
    """Directory of --save, on rank 0."""
    callbacks: tuple[Callable[["Trainer"], Callback], ...] = ()
    """Functions that build callbacks, after those of --callbacks."""


def train_plan(
    plan: Plan,
    backend: Backend,
    callbacks: Sequence[Callable[["Trainer"], Callback]] = (),
    *,
    ends_process: bool = True,
) -> PretrainResult:
    """Train a run, or resume its newest checkpoint in --save, and save it.

    All ranks call this together, after `init_distributed`, and get equal results. Rank 0 prints
    header, progress and last line. The run ends with the last step, by --exit-interval or a
    callback, or if a signal or time limit stops it. Without --save there is no run directory, and
    signals keep their handlers; else see `SignalHandler`.

    Args:
        plan: Run to train.
        backend: Hardware of this process.
        callbacks: Functions that build callbacks of the trainer, after those of --callbacks.
        ends_process: Whether the process ends with the run.

    Raises:
        InputError: Data, directory or checkpoints do not fit, or too many steps were skipped, on
            all ranks; or LocalInputError on one, while all others exit with code 2.
    """
    output = plan.settings.output
    save = Path(output.save) if output.save else None
    checkpoints: CheckpointManager | None = None
    with abort_all_on_error(clean_up=lambda: checkpoints.remove_attempt() if checkpoints else None):
        check_same_plan(plan)
        watchdog = Watchdog(output.distributed_timeout_minutes, save / STACKS_DIR if save else None)
        with contextlib.ExitStack() as stack:
            opened: list[RunDir] = []
            run_dir = None
            if save:
                # All ranks raise the InputError of RunDir.
                broadcast_call(lambda: opened.append(RunDir(save, plan)))
                run_dir = stack.enter_context(opened[0]) if opened else None
                checkpoints = CheckpointManager(
                    save / "checkpoints",
                    output.keep_last,
                    output.keep_every,
                    plan.settings.kept_steps,
                    before_publish=run_dir.lock.refresh if run_dir else None,
                )
            stack.enter_context(watchdog)
            # Entered last: waiting for the run directory does not count towards the run's duration.
            signals = stack.enter_context(
                SignalHandler(
                    output.exit_duration_in_mins, checkpoints is not None, ends_process=ends_process
                )
            )
            run = RunContext(backend, watchdog, signals, checkpoints, run_dir, tuple(callbacks))
            result = train_until_exit(plan, run)
            while isinstance(result, Plan):
                gc.collect()  # frees the old model before the next one is built
                result = train_until_exit(result, run)
            return result


def train_until_exit(plan: Plan, run: RunContext) -> PretrainResult | Plan:
    """Train from the newest checkpoint to the last step, a stop or a rewind.

    All ranks call this together, and errors are those of `train_plan`. Without a checkpoint the run
    begins at the starting point of `plan`. If the newest checkpoint is that of the last step,
    nothing is trained, and rank 0 prints a line. Checkpoints are saved as the flags say, and at the
    end of the run, but not before a rewind.

    Returns:
        The end of the run; or, for a rewind after a loss spike, the plan by which the last
        checkpoint that it allows is to be resumed.
    """
    settings = plan.settings
    output = settings.output
    total = settings.total_iters
    checkpoints = run.checkpoints
    saved_state = None
    if run.run_dir:
        checkpoints.remove_leftovers()
    if checkpoints:
        broadcast_call(lambda: checkpoints.retarget_tracker(plan))
        saved_state = checkpoints.verify_newest(plan)
    if saved_state and saved_state["step"] == total:
        print_rank_0(f"{output.save} is complete: step {total} of {total}")
        return broadcast_call(lambda: run.run_dir.read_result(total))
    trainer = Trainer(plan, run, saved_state)
    with contextlib.ExitStack() as stack:
        for callback in trainer.callbacks:
            stack.enter_context(callback)
        if checkpoints:
            stack.enter_context(checkpoints.drain_saves())
        if not saved_state:
            trainer.validate(trainer.start_step)
        for step in range(trainer.start_step + 1, total + 1):
            report = trainer.train_step(step)
            rewound_plan = trainer.plan_rewind(step) if report.is_spike else None
            if rewound_plan:
                break
            is_last = step == total
            if is_last or _is_due(step, settings.eval_every):
                trainer.validate(step)
            signal_reason = run.signals.stop_reason(report.result.votes)
            stop_reason = signal_reason or trainer.stop_reason()
            must_exit = stop_reason or _is_due(step, output.exit_interval)
            if checkpoints and checkpoints.is_saving:
                with trainer.pause_timers.measure(SAVE):
                    checkpoints.finish_save(block=False)
            if (
                is_last
                or must_exit
                or _is_due(step, output.save_interval)
                or step in settings.kept_steps
            ):
                trainer.save(step, block=is_last or must_exit or not output.async_save)
            if must_exit:
                break
        run.watchdog.beat("end", step)
    if rewound_plan:
        return rewound_plan
    loss = report.result.metrics.loss
    print_rank_0(format_run_footer(step, total, loss, output.save, stop_reason))
    run.signals.wait_for_launcher()
    return PretrainResult(
        Path(output.save) if output.save else None,
        step,
        loss,
        list_losses(trainer.scores),
        stop_reason="" if is_last else stop_reason or "",
        is_stopped=bool(signal_reason) and not is_last,
    )


def _is_due(step: int, interval: int | None) -> bool:
    """Return whether `step` is a multiple of `interval`; never for None or 0."""
    return bool(interval) and step % interval == 0


class Trainer:
    """Model, counters, callbacks and checkpoints of a run between two steps.

    The constructor takes `plan`, `run` (RunContext) and `saved_state`, state.json of the checkpoint
    to resume, or None for a new run; it builds the engine, loads the weights and writes to the run
    directory (`RunDir.begin`). All ranks call it and the methods together, except `request_stop`.
    Callbacks may read `plan`, `backend`, `engine`, `watchdog`, `start_step` (the step before the
    first one to train), `progress` (PROGRESS_FIELDS by name, summed over ranks), `scores` of the
    last validation, `pause_timers` (a StepTimers of validations and saves since the last logged
    row), `logger` (MetricsLogger of metrics) and `callbacks`.
    """

    def __init__(self, plan: Plan, run: RunContext, saved_state: dict[str, Any] | None):
        """Build the engine; load the checkpoint after `saved_state`, or initial weights.

        All ranks call this together.

        Args:
            run: Directories and devices of the run.
            saved_state: state.json of the checkpoint to resume; None for a new run.

        Raises:
            InputError: A checkpoint is damaged or of another run, or a callback fails.
        """
        self.plan = plan
        self.backend = run.backend
        self.watchdog = run.watchdog
        self.start_step: int = saved_state["step"] if saved_state else plan.start.step
        """The last step before the first one to train."""
        self.progress = {name: (saved_state or vars(plan.start))[name] for name in PROGRESS_FIELDS}
        """Tokens, FLOPs and other counts of the run."""
        self._stop_reason = ""
        self.pause_timers = StepTimers()
        """Seconds of validations and saves since the last logged row."""
        self._run = run
        self.engine = Engine(plan, run.backend, init_weights=not (saved_state or plan.start.run))
        if plan.settings.has_auto_micro_batches:
            self.plan = fill_micro_batches(plan, self.engine)
        kernels = self.engine.kernel_metadata
        run.watchdog.beat("load", self.start_step)
        if saved_state:
            run.checkpoints.load(self.engine, self.start_step)
        state = saved_state or _load_initial_state(self.engine, plan.start)
        self._losses = RecentLosses(state.get("losses"))
        print_rank_0(
            format_run_header(
                plan, run.backend, kernels, resumed=self.start_step if saved_state else 0
            )
        )
        self._validator: Validator | None = None
        self.scores: dict[str, Any] = {}
        """Scores of the last validation, as in `Callback.after_validation`; {} before it."""
        last_step = self.start_step if saved_state else -1
        if run.checkpoints:
            broadcast_call(lambda: run.run_dir.begin(plan, kernels, last_step))
        self.logger = MetricsLogger(self, run.run_dir)
        self.logger.drop_rows_after(last_step)
        monitoring = plan.settings.monitoring
        self.callbacks: list[Callback] = [ProgressBeats(self)]
        """Callbacks of the run: its own, those of --callbacks, then those of the caller."""
        if monitoring.profile:
            self.callbacks.append(Profiler(self))
        self.callbacks.append(self.logger)
        if monitoring.log_straggler:
            self.callbacks.append(StragglerDetector(self))
        for callback_class, options in parse_callbacks(monitoring.callbacks):
            self.callbacks.append(callback_class(self, **options))
        for build in run.callbacks:
            callback = build(self)
            if not isinstance(callback, Callback):
                raise InputError(
                    f"callbacks: {getattr(build, '__name__', build)} returned a "
                    f"{type(callback).__name__}, expected a Callback"
                )
            self.callbacks.append(callback)

    def request_stop(self, reason: str) -> None:
        """End the run after the present step, with a checkpoint; for any single rank.

        The checkpoint needs --save. Unlike a signal, it ends the run with exit code 0. A request
        before the first step counts after it; one at a save after a step, after the next. The last
        request on a rank counts. Requests have no effect in a run without callbacks of its user.

        Args:
            reason: Text that the last line of the run gives as the reason, if it is rank 0's.
        """
        self._stop_reason = reason

    def stop_reason(self) -> str:
        """Return the reason of a callback on any rank to end the run; empty without one.

        All ranks call this together. On ranks other than the callback's, the text is "a callback on
        another rank".
        """
        if not (self.plan.settings.monitoring.callbacks or self._run.callbacks):
            return ""
        [is_requested] = reduce_over_ranks([bool(self._stop_reason)], ReduceOp.MAX)
        return self._stop_reason or "a callback on another rank" * is_requested

    def call(self, hook: str, *arguments: Any) -> None:
        """Call a hook of this rank's callbacks, in their order, until one fails.

        All ranks call this together, but nothing is communicated.

        Args:
            hook: Name of the method of Callback, such as before_step.
            arguments: All arguments of the hook, such as the step.

        Raises:
            LocalInputError: A callback of this rank raised an InputError; other ranks are not told.
        """
        for callback in self.callbacks:
            try:
                getattr(callback, hook)(*arguments)
            except InputError as error:
                raise LocalInputError(str(error)) from None

    def train_step(self, step: int) -> StepReport:
        """Train `step` (1, 2, ...), update `progress` and report to the callbacks.

        All ranks call this together. Rank 0 prints a skipped step or a loss spike. The report is
        equal on all ranks but for its `seconds`; the MetricsLogger, a callback, logs it.

        Raises:
            InputError: The run has skipped more steps in all than --max-skipped-updates allows.
            LocalInputError: A callback of this rank raised an InputError; other ranks are not told.
        """
        plan = self.plan
        progress = self.progress
        self.call("before_step", step)
        start = perf_counter()
        result = self.engine.train_step(
            step, self._run.signals.votes, partial(self.call, "before_optimizer", step)
        )
        seconds = perf_counter() - start
        metrics = result.metrics
        deviations = self._losses.add(step, plan.schedule.text_at(step), metrics.loss)
        is_spike = plan.settings.health.is_spike(deviations)
        progress["tokens"] += plan.step_tokens(step)
        progress["predicted_tokens"] += metrics.predicted
        progress["flops"] += metrics.flops
        progress["skipped_updates"] += not result.is_applied
        progress["loss_spikes"] += is_spike
        report = StepReport(step, result, seconds, dict(progress), deviations, is_spike)
        self.call("after_step", report)
        if not result.is_applied:
            self.watchdog.beat("diagnosis", step)
            report_skipped_step(self.engine, step, metrics, progress["skipped_updates"])
        if is_spike:
            print_rank_0(format_spike(plan, step, metrics.loss, deviations))
        return report

    def plan_rewind(self, step: int) -> Plan | None:
        """Plan a rewind that skips the packs leading to the spike at `step`.

        All ranks call this together; a running save is finished first. The plan is written to the
        run directory, but nothing is loaded. --max-rewinds requires --save.

        Returns:
            The plan by which `train_until_exit` continues; None if --max-rewinds is 0 or used up,
            or if the run would then have too few packs. Only the last is printed.

        Raises:
            InputError: The save fails or the plan cannot be written, on all ranks.
        """
        if len(self.plan.rewinds) >= self.plan.settings.health.max_rewinds:
            return None
        checkpoints = self._run.checkpoints
        self.watchdog.beat("rewind", step)
        checkpoints.finish_save()
        checkpoint_steps = broadcast_call(
            lambda: [
                checkpoint_step
                for checkpoint_step in checkpoints.compatible_steps(self.plan)
                if checkpoint_step < step
            ]
        )
        try:
            plan = plan_after_rewind(self.plan, step, checkpoint_steps)
        except InputError as error:
            print_rank_0(f"step {step}: no rewind, as the packs left would be too few: {error}")
            return None
        broadcast_call(lambda: self._run.run_dir.write_plan(plan, self.engine.kernel_metadata))
        return plan

    def validate(self, step: int) -> None:
        """Evaluate the model after `step`, and give the scores to the callbacks.

        All ranks call this together, at steps of validations, which it does not check. The packs
        are those of the phase that trains `step`. Nothing is done if validation is turned off or
        the phase has no text for it. The MetricsLogger, a callback, writes the row of
        validation.jsonl.

        Raises:
            LocalInputError: A callback of this rank raised an InputError; other ranks are not told.
        """
        if not self.plan.has_validation:
            return
        self.watchdog.beat("validation", step)
        if not self._validator or self._validator.phase is not self.plan.settings.phase_at(step):
            self._validator = Validator(self.plan, step)
        if not self._validator.parts:
            return
        before_pass = partial(self.call, "before_validation", step)
        before_pass()
        with self.pause_timers.measure(EVALUATION):
            self.scores = self._validator(self.engine, before_pass)
        self.call("after_validation", step, self.scores)

    def save(self, step: int, block: bool) -> None:
        """Save a checkpoint after `step`; do nothing without --save.

        All ranks call this together. A running save is finished first. Callbacks are told before
        (the MetricsLogger then flushes metrics) and after. Old checkpoints are deleted as the flags
        say.

        Args:
            block: True to finish this save; False to let it run in the background, so that its
                error is raised by the next save or the loop.

        Raises:
            InputError: This or the running save fails, on all ranks; LocalInputError on one.
        """
        checkpoints = self._run.checkpoints
        if not checkpoints:
            return
        with self.pause_timers.measure(SAVE):
            self.watchdog.beat("writing", step)  # the previous save, if it is still running
            checkpoints.finish_save()
            self.call("before_save", step)
            checkpoints.save(
                self.engine, step, self.progress | {"losses": dict(self._losses.state)}, block
            )
        self.call("after_save", step)


def _load_initial_state(engine: Engine, start: RunInit) -> dict[str, Any]:
    """Load the checkpoint or weights that `start` names into `engine`.

    Returns:
        The state.json of a branch's checkpoint, otherwise {}.

    Raises:
        InputError: The checkpoint is damaged, or is not the one that `start` names.
    """
    if not start.run:
        return {}
    parent = CheckpointLoader(Path(start.run) / "checkpoints")
    try:
        saved_state = parent.verify(start.at)
    except DamagedCheckpointError as damage:
        raise InputError(
            f"{damage}; choose another checkpoint of {start.run} (--branch-at or --init-at)"
        ) from None
    if identity_digest(saved_state["identity"]) != start.parent:
        raise InputError(
            f"{parent.path(start.at)} is a checkpoint of a different run than {start.run}; choose "
            "another"
        )
    if start.kind == "branch":
        if not saw_same_data(engine.plan, saved_state):
            raise InputError(
                f"{parent.path(start.at)} was replaced by one trained on other packs; give the "
                "same command again"
            )
        parent.load(engine, start.at)
        return saved_state
    parent.load_weights(engine, start.at)
    return {}
