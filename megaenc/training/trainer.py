"""The training loop: start or resume, then train, validate and save until the last step."""

import contextlib
import dataclasses
import gc
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megaenc.backend import Backend
from megaenc.console import print_rank_0
from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.blended_dataset import BlendedDataset
from megaenc.errors import InputError
from megaenc.objectives import Objective, PseudoPerplexity, compute_perplexity
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint.manager import CheckpointManager
from megaenc.training.checkpoint_dir import DamagedCheckpointError
from megaenc.training.distributed.collectives import abort_all_on_error, broadcast_call, check_same_plan
from megaenc.training.distributed.largest_batch import fill_micro_batches
from megaenc.training.distributed.signals import SignalHandler
from megaenc.training.distributed.watchdog import STACKS_DIR, Watchdog
from megaenc.training.dry_run import format_run_footer, format_run_header, format_spike
from megaenc.training.engine import BatchSums, Engine
from megaenc.training.logging.metrics_logger import MetricsLogger
from megaenc.training.micro_batches import TokenGroups
from megaenc.training.nonfinite import report_skipped_step
from megaenc.training.plan import Plan
from megaenc.training.run_dir import RunDir
from megaenc.training.run_init import PROGRESS_FIELDS, RunInit, identity_digest
from megaenc.training.skip_policy import plan_after_rewind, saw_same_data


class Rewind(Exception):
    """Request, raised on all ranks after a loss spike, to continue from the last checkpoint under the plan it holds."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan


def pretrain(plan: Plan, backend: Backend) -> bool:
    """Train or resume `plan` to its last step or --exit-interval; return False only if a signal or time limit stopped it.

    The newest checkpoint in --save is resumed, and a stopped run saved first if --save is given.
    """
    output = plan.settings.output
    checkpoints = None
    if output.save:
        checkpoints = CheckpointManager(Path(output.save) / "checkpoints", output.keep_last, output.keep_every, output.save_steps)
    with abort_all_on_error(clean_up=checkpoints.remove_attempt if checkpoints else lambda: None):
        check_same_plan(plan)
        watchdog = Watchdog(output.distributed_timeout_minutes, Path(output.save) / STACKS_DIR if output.save else None)
        with contextlib.ExitStack() as stack:
            run_dir = stack.enter_context(_open_run_dir(plan))
            stack.enter_context(watchdog)
            # Entered last: waiting for the run directory does not count towards the run's duration.
            signals = stack.enter_context(SignalHandler(output.exit_duration_in_mins, checkpoints is not None))
            while True:
                try:
                    return _train_until_exit(plan, backend, run_dir, checkpoints, signals, watchdog)
                except Rewind as rewind:
                    plan = rewind.plan
                gc.collect()  # frees the old model before the next one is built


def _open_run_dir(plan: Plan) -> contextlib.AbstractContextManager[RunDir | None]:
    """Open and lock the run directory on rank 0; all ranks raise the same InputError if it cannot be used."""
    run_dirs: list[RunDir] = []
    if plan.settings.output.save:
        broadcast_call(lambda: run_dirs.append(RunDir(Path(plan.settings.output.save), plan)))
    return run_dirs[0] if run_dirs else contextlib.nullcontext()


def _train_until_exit(
    plan: Plan,
    backend: Backend,
    run_dir: RunDir | None,
    checkpoints: CheckpointManager | None,
    signals: SignalHandler,
    watchdog: Watchdog,
) -> bool:
    """Run the training loop once; return False if a signal or the time limit ended it. Raises Rewind at a loss spike."""
    settings, output, total = plan.settings, plan.settings.output, plan.settings.total_iters
    saved_state = None
    if run_dir:
        checkpoints.before_publish = run_dir.lock.refresh
        checkpoints.remove_leftovers()
    if checkpoints:
        broadcast_call(lambda: checkpoints.retarget_tracker(plan))
        saved_state = checkpoints.verify_newest(plan)
    if saved_state and saved_state["step"] == total:
        print_rank_0(f"{output.save} is complete: step {total} of {total}")
        return True
    trainer = _Trainer(plan, backend, run_dir, checkpoints, watchdog, saved_state, signals.votes)
    with trainer.logger, checkpoints.drain_saves() if checkpoints else contextlib.nullcontext():
        for step in range(trainer.start_step + 1, total + 1):
            if rewound_plan := trainer.train_step(step):
                break
            is_last = step == total
            if is_last or _is_due(step, settings.eval_every):
                trainer.validate(step)
            stop_reason = signals.stop_reason(trainer.votes)
            must_exit = stop_reason or _is_due(step, output.exit_interval)
            if checkpoints and checkpoints.is_saving:
                with trainer.logger.measure_pause("save"):
                    checkpoints.finish_save(block=False)
            if is_last or must_exit or _is_due(step, output.save_interval) or step in output.save_steps:
                trainer.save(step, block=is_last or must_exit or not output.async_save)
            if must_exit and not is_last:
                break
        watchdog.beat("end", step)
    if rewound_plan:
        raise Rewind(rewound_plan)
    print_rank_0(format_run_footer(step, total, trainer.metrics.loss, output.save, stop_reason))
    signals.wait_for_launcher()
    return is_last or not stop_reason


def _is_due(step: int, interval: int | None) -> bool:
    """Return whether `step` is a multiple of `interval`; never for None or 0."""
    return bool(interval) and step % interval == 0


class _Trainer:
    """Model, counters, logging and checkpoints of a run between two steps; all ranks call its methods together.

    `run_dir` is set on rank 0 of a run with `--save`, `checkpoints` on all of its ranks. `start_step`: the last step before the
    first one to train; `metrics`: those of the last step.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        run_dir: RunDir | None,
        checkpoints: CheckpointManager | None,
        watchdog: Watchdog,
        saved_state: dict[str, Any] | None,
        local_votes: Callable[[], Sequence[int]],
    ):
        """Build the engine and load the checkpoint with the JSON `saved_state`, or, without one, the plan's initial weights."""
        self.plan, self.start_step = plan, saved_state["step"] if saved_state else plan.start.step
        self.metrics, self.votes = BatchSums(), ()
        self._run_dir, self._checkpoints, self._watchdog = run_dir, checkpoints, watchdog
        self._progress = {name: (saved_state or vars(plan.start))[name] for name in PROGRESS_FIELDS}
        self._engine = Engine(plan, backend, init_weights=not (saved_state or plan.start.run))
        self._local_votes = local_votes
        if plan.settings.has_auto_micro_batches:
            self.plan = fill_micro_batches(plan, self._engine)
            self._engine.use_plan(self.plan)
        kernels = self._engine.kernel_metadata
        if plan.settings.output.save:
            broadcast_call(lambda: run_dir.write_plan(plan, kernels))
        watchdog.beat("load", self.start_step)
        if saved_state:
            checkpoints.load(self._engine, self.start_step)
        state = saved_state or _load_initial_state(self._engine, plan.start)
        self._losses = RecentLosses(state.get("losses"))
        print_rank_0(format_run_header(plan, backend, kernels, resumed=self.start_step if saved_state else 0))
        self._validator: Validator | None = None
        self.logger = MetricsLogger(plan, backend, self._engine, run_dir, self.start_step)
        self.logger.drop_rows_after(self.start_step if saved_state else -1)
        if not saved_state:
            self.validate(self.start_step)

    def train_step(self, step: int) -> Plan | None:
        """Train and log `step`; after a loss spike, return the plan to rewind with if `max_rewinds` allows it, else None.

        InputError after too many skipped steps.
        """
        plan, progress = self.plan, self._progress
        self._watchdog.beat("step", step)
        with self.logger.measure_step(step):
            result = self._engine.train_step(step, self._local_votes)
        self.metrics, self.votes = result.metrics, result.votes
        metrics = result.metrics
        deviations = self._losses.add(step, plan.schedule.text_at(step), metrics.loss)
        is_spike = plan.settings.health.is_spike(deviations)
        progress["tokens"] += plan.step_tokens(step)
        progress["predicted_tokens"] += metrics.predicted
        progress["flops"] += metrics.flops
        progress["skipped_updates"] += not result.is_applied
        progress["loss_spikes"] += is_spike
        self.logger.log_step(step, result, progress, deviations)
        if not result.is_applied:
            self._watchdog.beat("diagnosis", step)
            report_skipped_step(self._engine, step, metrics, progress["skipped_updates"])
        if is_spike:
            print_rank_0(format_spike(plan, step, metrics.loss, deviations))
        return self._plan_rewind(step) if is_spike and len(plan.rewinds) < plan.settings.health.max_rewinds else None

    def _plan_rewind(self, step: int) -> Plan | None:
        """Return the plan that skips the packs leading to the spike at `step`, after writing it to the run directory.

        None if the run would then have too few packs.
        """
        self._watchdog.beat("rewind", step)
        self._checkpoints.finish_save()
        checkpoint_steps = broadcast_call(lambda: [at for at in self._checkpoints.compatible_steps(self.plan) if at < step])
        try:
            plan = plan_after_rewind(self.plan, step, checkpoint_steps)
        except InputError as error:
            print_rank_0(f"step {step}: no rewind, as the packs left would be too few: {error}")
            return None
        broadcast_call(lambda: self._run_dir.write_plan(plan))
        return plan

    def validate(self, step: int) -> None:
        """Evaluate the model after `step` on the packs of its phase and log the scores.

        Does nothing if validation is turned off or the phase has no text for it.
        """
        if not self.plan.has_validation:
            return
        self._watchdog.beat("validation", step)
        if not self._validator or self._validator.phase is not self.plan.settings.phase_at(step):
            self._validator = Validator(self.plan, step)
        if not self._validator.parts:
            return
        beat = partial(self._watchdog.beat, "validation", step)
        self.logger.log_validation(step, self._progress, partial(self._validator, before_pass=beat))

    def save(self, step: int, block: bool) -> None:
        """Save a checkpoint after `step`, after any running save, without waiting unless `block`; nothing without --save."""
        if self._checkpoints:
            with self.logger.measure_pause("save"):
                self._watchdog.beat("writing", step)  # the previous save, if it is still running
                self._checkpoints.finish_save()
                self._watchdog.beat("save", step)
                self.logger.sync()
                state = self._progress | {"losses": dict(self._losses.state)}
                self._checkpoints.save(self._engine, step, state, block)


def _load_initial_state(engine: Engine, start: RunInit) -> dict[str, Any]:
    """Load the checkpoint or weights that `start` names into `engine`; return a branch's checkpoint JSON, otherwise {}."""
    if not start.run:
        return {}
    parent = CheckpointLoader(Path(start.run) / "checkpoints")
    try:
        saved_state = parent.verify(start.at)
    except DamagedCheckpointError as damage:
        raise InputError(f"{damage}; choose another checkpoint of {start.run} (--branch-at or --init-at)") from None
    if identity_digest(saved_state["identity"]) != start.parent:
        raise InputError(f"{parent.path(start.at)} is a checkpoint of a different run than {start.run}; choose another")
    if start.kind == "branch":
        if not saw_same_data(engine.plan, saved_state):
            raise InputError(f"{parent.path(start.at)} was replaced by one trained on other packs; give the same command again")
        parent.load(engine, start.at)
        return saved_state
    parent.load_weights(engine, start.at)
    return {}


class Validator:
    """Callable that scores an engine in the phase of a step, always on the same packs and masks."""

    def __init__(self, plan: Plan, step: int = 0):
        self.plan = plan
        self.step = step
        self.phase = plan.settings.phase_at(step)
        self.objectives = plan.validation_objectives
        self.parts: list[ValidationPart] = []
        for name, packs in plan.validation_packs(step).items():
            samples = self._count_named_samples(packs) if name else self._count_own_samples(packs)
            most_frequent = {
                text: _compute_most_frequent_share(objective, packs, samples) for text, objective in self.objectives.items()
            }
            self.parts.append(ValidationPart(name, packs, samples, TokenGroups.from_packs(packs), most_frequent))
        # What the tokens of the validation depend on.
        data = self.phase.settings.data
        texts = [held_out.identity for held_out in plan.validation_sets]
        texts = texts or [plan.data_at(step).held_out_fingerprint, data.split]
        text_identity = [*texts, data.seq_length, *(part.samples for part in self.parts)]
        self.held_out = hashlib.sha256(json.dumps(text_identity).encode()).hexdigest()[:12]

    def _count_own_samples(self, packs: BlendedDataset) -> int:
        """Return the packs to read of the phase's own held-out text, in whole batches.

        No token is read twice, unless the text is smaller than one batch.
        """
        batch_size = self.phase.settings.global_batch_size
        samples = batch_size * max(1, min(self.plan.settings.output.eval_iters, packs.samples_before_repeat // batch_size))
        return samples if packs.samples is None else min(samples, packs.samples)

    def _count_named_samples(self, packs: BlendedDataset) -> int:
        """Return the packs to read of a named set: the same text in each phase, and no token twice.

        There is at least one pack, which repeats the text of a set that is smaller.
        """
        first = self.plan.settings.phase_configs[0].settings
        tokens = self.plan.settings.output.eval_iters * first.global_batch_size * first.data.seq_length
        [dataset] = packs.datasets
        return max(1, min(tokens, dataset.tokens_per_epoch) // packs.seq_length)

    def __call__(self, engine: Engine, before_pass: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Return `held_out`, a digest of the validation text, and `objectives`: loss, accuracy and most_frequent of each.

        An objective on a named set is `NAME/OBJECTIVE`. most_frequent is the accuracy of always predicting the most frequent
        label. If the validation text has several ranges of positions or corpora, `by_position` and `by_corpus` are the losses of
        each (`TokenGroups`). A pseudo-perplexity also has `perplexity`. `before_pass` is called before each set and each pass
        of a pseudo-perplexity after the first.
        """
        engine.enter_phase(self.step)
        scores = {}
        for number, part in enumerate(self.parts):
            if number:
                before_pass()
            for text, objective in self.objectives.items():
                name = f"{part.name}/{text}" if part.name else text
                scores[name] = part.score(engine, text, objective, before_pass)
        return {"held_out": self.held_out, "objectives": scores}


@dataclass(frozen=True)
class ValidationPart:
    """Packs of one validation set, cut for a phase."""

    name: str
    """Name of the set, empty for the phase's own held-out text."""
    packs: BlendedDataset
    samples: int
    """Number of packs that are read."""
    groups: TokenGroups
    most_frequent: dict[str, float | None]
    """Share of the most frequent label by objective."""

    def score(
        self, engine: Engine, text: str, objective: Objective, before_pass: Callable[[], object]
    ) -> dict[str, float | dict[str, float] | None]:
        """Return the scores of `engine` under the objective `text`, see `Validator`."""
        metrics = BatchSums()
        for number, part in enumerate(objective.parts if isinstance(objective, PseudoPerplexity) else (objective,)):
            if number:
                before_pass()
            metrics += engine.evaluate(self.packs, self.samples, part, self.groups)
        scores = {"loss": metrics.loss, "accuracy": metrics.accuracy, "most_frequent": self.most_frequent[text]}
        if isinstance(objective, PseudoPerplexity):
            scores["perplexity"] = None if metrics.loss is None else compute_perplexity(metrics.loss)
        return scores | self.groups.mean_losses(metrics.group_sums)


def _compute_most_frequent_share(objective: Objective, packs: BlendedDataset, samples: int) -> float | None:
    """Return the share of the most frequent label among the labels of the first `samples` packs; None without labels."""
    counts = np.zeros(objective.vocabulary.size, dtype=np.int64)
    if isinstance(objective, PseudoPerplexity):
        objective = dataclasses.replace(objective, passes=1)  # one pass over all labels is faster
    for sample in range(samples):
        pack = packs[sample]
        labels = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)).labels
        counts += np.bincount(labels, minlength=len(counts))
    return int(counts.max()) / int(counts.sum()) if counts.any() else None


MAX_RECENT_LOSSES, MIN_RECENT_LOSSES = 128, 32
"""Largest and smallest number of earlier losses that a new loss is compared with."""


def compute_deviations(loss: float, recent: Sequence[float]) -> float:
    """Return by how many robust standard deviations `loss` lies above the median of `recent`, negative below it.

    The deviation is 1.4826 times the median absolute deviation (the standard deviation of normal noise), and at least a
    thousandth of the median, so that equal losses leave room for rounding. Earlier spikes hardly change either.
    """
    center = median(recent)
    spread = 1.4826 * median(abs(other - center) for other in recent)
    return (loss - center) / max(spread, 1e-3 * abs(center), 1e-30)


class RecentLosses:
    """Up to 128 most recent losses of each objective, with its last step, to which new losses are compared for spikes."""

    def __init__(self, state: dict[str, Any] | None = None):
        """Restore the `state` attribute of an earlier instance, or start empty."""
        self.state: dict[str, Any] = {text: dict(window) for text, window in (state or {}).items()}
        """JSON-ready: for each objective its last `step` and up to MAX_RECENT_LOSSES `losses`."""

    def add(self, step: int, objective: str, loss: float | None) -> float | None:
        """Add a finite loss; return its deviations above recent ones of `objective`; None with under 32 or if not finite.

        The window of an objective that returns after more than MIN_RECENT_LOSSES steps of others is cleared first: the model
        has changed in the meantime.
        """
        if loss is None or not math.isfinite(loss):
            return None
        window = self.state.get(objective)
        recent = window["losses"] if window and step - window["step"] <= MIN_RECENT_LOSSES else []
        deviations = compute_deviations(loss, recent) if len(recent) >= MIN_RECENT_LOSSES else None
        self.state[objective] = {"step": step, "losses": [*recent, loss][-MAX_RECENT_LOSSES:]}
        return deviations
