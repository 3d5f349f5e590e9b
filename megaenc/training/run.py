"""A run between two updates: the model, and all that is counted, watched and kept beside it."""

import contextlib
from pathlib import Path
from typing import Any

from megaenc.backend import Backend
from megaenc.console import say
from megaenc.errors import InputError
from megaenc.training.checkpoint import Checkpoints
from megaenc.training.checkpoint_folder import Damaged
from megaenc.training.diagnosis import report_skipped
from megaenc.training.engine import Engine
from megaenc.training.evaluation import Validation
from megaenc.training.introduction import introduction, spike_found
from megaenc.training.leaving_out import leave_out, read_alike
from megaenc.training.monitor import Monitor
from megaenc.training.plan import Plan
from megaenc.training.results import BatchResult
from megaenc.training.run_folder import RunFolder
from megaenc.training.saving import OwnCheckpoints
from megaenc.training.spikes import RecentLosses
from megaenc.training.start import PROGRESS, Start, digest
from megaenc.training.together import on_rank_0
from megaenc.training.watchdog import Watchdog


class Run:
    """What `plan` says, on this rank; all ranks call each method together.

    `folder` is there on rank 0 of a run with `--save` alone, `checkpoints` on all ranks of it. `done`: the step it goes on after;
    `result`: what the last update has come to.
    """

    def __init__(
        self,
        plan: Plan,
        backend: Backend,
        folder: RunFolder | None,
        checkpoints: OwnCheckpoints | None,
        watchdog: Watchdog,
        saved: dict[str, Any] | None,
    ):
        """Go on from the checkpoint whose JSON is `saved`, None to begin as `plan` says. InputError where that cannot be."""
        self.plan, self.done = plan, saved["step"] if saved else plan.start.step
        self.result = BatchResult()
        self._folder, self._checkpoints, self._watchdog = folder, checkpoints, watchdog
        self._progress = {name: (saved or vars(plan.start))[name] for name in PROGRESS}
        self._engine = Engine(plan, backend)
        if plan.settings.output.save:
            on_rank_0(lambda: folder.record(plan, self._engine.kernels, self._engine.fused))
        watchdog.beat("load", self.done)
        if saved:
            checkpoints.load(self._engine, self.done)
        source = saved or _begin(self._engine, plan.start)
        self._losses = RecentLosses(source.get("losses"))
        say(introduction(plan, backend, self._engine.kernels, self._engine.fused, resumed=self.done if saved else 0))
        self._validation = Validation(plan) if plan.validation else None
        self.monitor = Monitor(plan, backend, self._engine, folder, self.done)
        self.monitor.cut(self.done if saved else -1)
        if not saved:
            self.validate(self.done)

    def update(self, step: int) -> bool:
        """Make update number `step` and tell of it: True where it is a spike from which the run has to go back.

        InputError where it was skipped, and one more than `--max-skipped-updates`.
        """
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
            say(spike_found(plan, step, result, deviations))
        return spike and len(plan.rewinds) < plan.settings.health.max_rewinds

    def without_spike(self, step: int) -> Plan:
        """The plan without the packs that led to the spike at `step`, on the disk before anything else is done with it."""
        self._watchdog.beat("rewind", step)
        self._checkpoints.finish_save()
        kept = on_rank_0(lambda: [at for at in self._checkpoints.fitting(self.plan) if at < step])
        shorter = leave_out(self.plan, step, kept)
        on_rank_0(lambda: self._folder.record(shorter))
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

    def go_on_saving(self) -> None:
        """Take a save that is being written as far as it has come."""
        if self._checkpoints and self._checkpoints.saving:
            with self.monitor.timing("save"):
                self._checkpoints.finish_save(block=False)

    def saves_finished(self) -> contextlib.AbstractContextManager[None]:
        """However the block ends, no save is being written after it."""
        return self._checkpoints.finished() if self._checkpoints else contextlib.nullcontext()


def _begin(engine: Engine, start: Start) -> dict[str, Any]:
    """Load what the run starts from, in whatever layout it was saved; an engine has its new weights already.

    The JSON of the checkpoint that a branch goes on from, else nothing.
    """
    if not start.run:
        return {}
    parent = Checkpoints(Path(start.run) / "checkpoints")
    try:
        saved = parent.check(start.at)
    except Damaged as damage:
        raise InputError(f"{damage}; choose another checkpoint of {start.run}") from None
    if digest(saved["identity"]) != start.parent:
        raise InputError(f"{parent.path(start.at)} is a checkpoint of a different run than that of {start.run}; choose another")
    if start.kind == "branch":
        if not read_alike(engine.plan, saved):
            raise InputError(f"{parent.path(start.at)} was made again, with other packs; give the same command again")
        parent.load(engine, start.at)
        return saved
    parent.load_weights(engine, start.at)
    return {}
