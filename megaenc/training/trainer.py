"""Pretraining, as the paragraph that describes it reads: resume or begin, then update, validate and save until the end."""

import contextlib
import gc
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megaenc.backend import Backend
from megaenc.console import print_rank_0
from megaenc.counter_rng import SampleRandomness
from megaenc.errors import InputError
from megaenc.objectives import Objective
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint.manager import CheckpointManager
from megaenc.training.checkpoint_dir import DamagedCheckpointError
from megaenc.training.dist.collectives import abort_all_on_error, broadcast_call, check_alike
from megaenc.training.dist.signals import SignalHandler
from megaenc.training.dist.watchdog import STACKS, Watchdog
from megaenc.training.dry_run import run_footer, run_header, spike_found
from megaenc.training.engine import Engine, StepMetrics
from megaenc.training.logging.metrics_logger import MetricsLogger
from megaenc.training.nonfinite import report_skipped
from megaenc.training.plan import Plan, validated_objectives
from megaenc.training.run_dir import RunDir
from megaenc.training.run_init import PROGRESS, RunInit, digest
from megaenc.training.skip_policy import plan_after_rewind, saw_same_data


class Rewind(Exception):
    """A run goes back to what is saved, on all ranks, and on from there by another `plan`."""

    def __init__(self, plan: Plan):
        super().__init__()
        self.plan = plan


def pretrain(plan: Plan, backend: Backend) -> bool:
    """Train from the newest checkpoint of `--save`, or the plan's start, to the end or the next `--exit-interval`.

    Return False if a signal or `--exit-duration-in-mins` ended it, after a save if there is a `--save`.
    """
    output = plan.settings.output
    checkpoints = None
    if output.save:
        checkpoints = CheckpointManager(Path(output.save) / "checkpoints", output.keep_last, output.keep_every, output.save_steps)
    with abort_all_on_error(clean_up=checkpoints.abandon if checkpoints else lambda: None):
        check_alike(plan)
        watchdog = Watchdog(output.distributed_timeout_minutes, Path(output.save) / STACKS if output.save else None)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_open_folder(plan))
            stack.enter_context(watchdog)
            # Its time begins here: waiting for the folder is no training.
            stop = stack.enter_context(SignalHandler(output.exit_duration_in_mins, backend.device, checkpoints is not None))
            while True:
                try:
                    return _pretrain(plan, backend, folder, checkpoints, stop, watchdog)
                except Rewind as rewind:
                    plan = rewind.plan
                gc.collect()  # the model that was, before there is another


def _open_folder(plan: Plan) -> contextlib.AbstractContextManager[RunDir | None]:
    """Open the run folder on rank 0; every rank leaves with the same InputError if it cannot be used."""
    folders: list[RunDir] = []
    if plan.settings.output.save:
        broadcast_call(lambda: folders.append(RunDir(Path(plan.settings.output.save), plan)))
    return folders[0] if folders else contextlib.nullcontext()


def _pretrain(
    plan: Plan,
    backend: Backend,
    folder: RunDir | None,
    checkpoints: CheckpointManager | None,
    stop: SignalHandler,
    watchdog: Watchdog,
) -> bool:
    """Return what `pretrain` does; Rewind at a spike."""
    settings, output, total = plan.settings, plan.settings.output, plan.settings.total_iters
    saved = None
    if folder:
        checkpoints.last_look = folder.lock.refresh
        checkpoints.clean()
    if checkpoints:
        broadcast_call(lambda: checkpoints.retarget_tracker(plan))
        saved = checkpoints.newest_good(plan)
    if saved and saved["step"] == total:
        print_rank_0(f"{output.save} is complete: step {total} of {total}")
        return True
    run = _Run(plan, backend, folder, checkpoints, watchdog, saved)
    with run.monitor, checkpoints.drain_saves() if checkpoints else contextlib.nullcontext():
        for step in range(run.done + 1, total + 1):
            if shorter := run.update(step):
                break
            last = step == total
            if last or _due(step, settings.eval_every):
                run.validate(step)
            asked = stop.asked()
            leave = asked or _due(step, output.exit_interval)
            if checkpoints and checkpoints.saving:  # take it as far as it has come
                with run.monitor.timing("save"):
                    checkpoints.finish_save(block=False)
            if last or leave or _due(step, output.save_interval) or step in output.save_steps:
                run.save(step, block=last or leave or not output.async_save)
            if leave and not last:
                break
        watchdog.beat("end", step)
    if shorter:
        raise Rewind(shorter)
    print_rank_0(run_footer(step, total, run.result.loss, output.save, asked))
    return last or not asked


def _due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0


class _Run:
    """A run between two updates: the model, and all that is counted, watched and kept beside it; all ranks call it together.

    `folder` is there on rank 0 of a run with `--save` alone, `checkpoints` on all its ranks. `done`: the step that it continues
    after; `result`: what the last update has come to.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        folder: RunDir | None,
        checkpoints: CheckpointManager | None,
        watchdog: Watchdog,
        saved: dict[str, Any] | None,
    ):
        """Go on from the checkpoint whose JSON is `saved`, None to begin as `plan` says. InputError where that cannot be."""
        self.plan, self.done = plan, saved["step"] if saved else plan.start.step
        self.result = StepMetrics()
        self._folder, self._checkpoints, self._watchdog = folder, checkpoints, watchdog
        self._progress = {name: (saved or vars(plan.start))[name] for name in PROGRESS}
        self._engine = Engine(plan, backend)
        if plan.settings.output.save:
            broadcast_call(lambda: folder.record(plan, self._engine.kernels, self._engine.fused))
        watchdog.beat("load", self.done)
        if saved:
            checkpoints.load(self._engine, self.done)
        source = saved or _begin(self._engine, plan.start)
        self._losses = RecentLosses(source.get("losses"))
        print_rank_0(run_header(plan, backend, self._engine.kernels, self._engine.fused, resumed=self.done if saved else 0))
        self._validation = Validation(plan) if plan.validation else None
        self.monitor = MetricsLogger(plan, backend, self._engine, folder, self.done)
        self.monitor.cut(self.done if saved else -1)
        if not saved:
            self.validate(self.done)

    def update(self, step: int) -> Plan | None:
        """Make and report update `step`; return the plan to go back by at a spike. InputError after too many skipped updates."""
        plan, progress = self.plan, self._progress
        self._watchdog.beat("step", step)
        with self.monitor.over(step):
            update = self._engine.update(step)
        self.result = result = update.result
        deviations = self._losses.add(step, plan.schedule.text_at(step), result.loss)
        spike = plan.settings.health.is_spike(deviations)
        progress["tokens"] += plan.step_tokens(step)
        progress["predicted_tokens"] += result.predicted
        progress["flops"] += result.flops
        progress["skipped_updates"] += not update.made
        progress["loss_spikes"] += spike
        self.monitor.step(step, update, progress, deviations)
        if not update.made:
            self._watchdog.beat("diagnosis", step)
            report_skipped(self._engine, step, result, progress["skipped_updates"])
        if spike:
            print_rank_0(spike_found(plan, step, result.loss, deviations))
        return self._without_spike(step) if spike and len(plan.rewinds) < plan.settings.health.max_rewinds else None

    def _without_spike(self, step: int) -> Plan:
        """Return the plan without the packs that led to the spike at `step`, once that is on the disk."""
        self._watchdog.beat("rewind", step)
        self._checkpoints.finish_save()
        kept = broadcast_call(lambda: [at for at in self._checkpoints.fitting(self.plan) if at < step])
        shorter = plan_after_rewind(self.plan, step, kept)
        broadcast_call(lambda: self._folder.record(shorter))
        return shorter

    def validate(self, step: int) -> None:
        """Look at the held-out text after `step`, if there is any."""
        if self._validation:
            self._watchdog.beat("validation", step)
            self.monitor.validation(step, self._progress, self._validation)

    def save(self, step: int, block: bool) -> None:
        """Save the state after `step`, if anywhere; without `block` it is written while training goes on."""
        if self._checkpoints:
            with self.monitor.timing("save"):
                self._watchdog.beat("writing", step)  # of the save before, if that is not done
                self._checkpoints.finish_save()
                self._watchdog.beat("save", step)
                self.monitor.sync()
                state = self._progress | {"losses": dict(self._losses.state)}
                self._checkpoints.save(self._engine, step, state, block)


def _begin(engine: Engine, start: RunInit) -> dict[str, Any]:
    """Load what the run starts from, in whatever layout; return the JSON of the checkpoint of a branch, else nothing."""
    if not start.run:
        return {}
    parent = CheckpointLoader(Path(start.run) / "checkpoints")
    try:
        saved = parent.check(start.at)
    except DamagedCheckpointError as damage:
        raise InputError(f"{damage}; choose another checkpoint of {start.run}") from None
    if digest(saved["identity"]) != start.parent:
        raise InputError(f"{parent.path(start.at)} is a checkpoint of a different run than that of {start.run}; choose another")
    if start.kind == "branch":
        if not saw_same_data(engine.plan, saved):
            raise InputError(f"{parent.path(start.at)} was made again, with other packs; give the same command again")
        parent.load(engine, start.at)
        return saved
    parent.load_weights(engine, start.at)
    return {}


class Validation:
    """Validates under `validated_objectives`, whatever the phase, on packs and masks that follow from the data alone."""

    def __init__(self, plan: Plan):
        self.plan = plan
        size = plan.settings.global_batch_size
        packs = plan.validation.samples_before_repeat  # no held-out token twice, unless one batch needs more than there are
        self.batches = max(1, min(plan.settings.output.eval_iters, packs // size))
        # What tells whether two runs were asked about the same text.
        asked = [plan.data.fingerprint, plan.settings.data.split, plan.settings.data.seq_length, self.batches * size]
        self.held_out = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:12]
        self.objectives = validated_objectives(plan.schedule, plan.vocabulary)
        self.most_frequent = {text: self._most_frequent(objective) for text, objective in self.objectives.items()}

    def __call__(self, engine: Engine) -> dict[str, Any]:
        """Return `held_out`, which differs where the text does, and `objectives`: by text loss, accuracy and most_frequent.

        The last is the accuracy of always guessing the token that is most frequent among the labels.
        """
        found = {}
        for text, objective in self.objectives.items():
            result = engine.evaluate(self.plan.validation, self.batches, objective)
            found[text] = {"loss": result.loss, "accuracy": result.accuracy, "most_frequent": self.most_frequent[text]}
        return {"held_out": self.held_out, "objectives": found}

    def _most_frequent(self, objective: Objective) -> float | None:
        counts = np.zeros(self.plan.vocabulary.size, dtype=np.int64)
        for sample in range(self.batches * self.plan.settings.global_batch_size):
            pack = self.plan.validation[sample]
            labels = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)).labels
            counts += np.bincount(labels, minlength=len(counts))
        return int(counts.max()) / int(counts.sum()) if counts.any() else None


WINDOW, SHORTEST = 128, 32
"""Losses that a new one is compared with, at most and at least."""


def deviations(loss: float, recent: Sequence[float]) -> float:
    """Return how many robust standard deviations `loss` lies above the median of `recent`, which a spike among them hardly moves.

    The deviation is 1.4826 times the median distance from the median, for normal noise the standard deviation, and at least a
    thousandth of the median: losses that are all the same leave room for rounding.
    """
    middle = median(recent)
    spread = 1.4826 * median(abs(other - middle) for other in recent)
    return (loss - middle) / max(spread, 1e-3 * abs(middle), 1e-30)


class RecentLosses:
    """The last losses of each objective by its text: those of another say nothing, and losses leap where objectives change."""

    def __init__(self, state: dict[str, Any] | None = None):
        """`state` is what the attribute was when a checkpoint was saved."""
        self.state: dict[str, Any] = {text: dict(window) for text, window in (state or {}).items()}
        """JSON-ready: by objective its last `step` and its `losses`, at most WINDOW."""

    def add(self, step: int, objective: str, loss: float | None) -> float | None:
        """Add the loss of update `step` and return its `deviations` from those before, None if there are too few.

        An objective that comes back after more than SHORTEST steps of others begins anew: the model has changed meanwhile.
        """
        if loss is None or not math.isfinite(loss):
            return None
        window = self.state.get(objective)
        recent = window["losses"] if window and step - window["step"] <= SHORTEST else []
        found = deviations(loss, recent) if len(recent) >= SHORTEST else None
        self.state[objective] = {"step": step, "losses": [*recent, loss][-WINDOW:]}
        return found
