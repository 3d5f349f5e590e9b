"""Pretraining, as the paragraph that describes it reads: resume or begin, then update, validate, log and save until the end."""

import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megaenc.backend import Backend
from megaenc.console import say
from megaenc.errors import InputError
from megaenc.training.checkpoint import Checkpoints, Damaged
from megaenc.training.diagnosis import report_skipped
from megaenc.training.engine import Engine
from megaenc.training.evaluation import Validation
from megaenc.training.introduction import conclusion, introduction, spike_found
from megaenc.training.monitor import Monitor
from megaenc.training.plan import Plan
from megaenc.training.run_folder import RunFolder
from megaenc.training.spikes import RecentLosses, leave_out
from megaenc.training.start import PROGRESS, Start, digest
from megaenc.training.stopping import Stop
from megaenc.training.together import on_rank_0, shared_fate
from megaenc.training.watchdog import STACKS, Watchdog


def pretrain(plan: Plan, backend: Backend) -> bool:
    """Train from the newest checkpoint of `--save`, or the plan's start, to `--train-iters` or the next `--exit-interval`.

    False where a signal or `--exit-duration-in-mins` ended it before; then it is saved too, where there is a `--save`.
    """
    output = plan.settings.output
    checkpoints = Checkpoints(Path(output.save) / "checkpoints", output.keep_last, output.keep_every) if output.save else None
    with shared_fate(clean_up=checkpoints.abandon if checkpoints else lambda: None):
        folder = _open_folder(plan)
        watchdog = Watchdog(output.distributed_timeout_minutes, Path(output.save) / STACKS if output.save else None)
        stop = Stop(output.exit_duration_in_mins, backend.device, by_signals=checkpoints is not None)
        try:
            with watchdog:
                while isinstance(end := _pretrain(plan, backend, folder, checkpoints, stop, watchdog), Plan):
                    plan = end
                    gc.collect()  # the model that was, before there is another
                return end
        finally:
            if folder:
                folder.close()


def _pretrain(
    plan: Plan, backend: Backend, folder: RunFolder | None, checkpoints: Checkpoints | None, stop: Stop, watchdog: Watchdog
) -> bool | Plan:
    """What `pretrain` returns, or at a spike the plan with which the run has to go back and on from what is saved."""
    settings, output = plan.settings, plan.settings.output
    if folder:
        checkpoints.clean()
    if checkpoints:
        on_rank_0(lambda: checkpoints.leave_behind(plan))
    saved = checkpoints.newest_good(plan) if checkpoints else None
    resumed = saved["step"] if saved else 0
    done = resumed or plan.start.step
    if done == settings.total_iters:
        say(f"{output.save} is complete: step {done} of {done}")
        return True
    progress = {name: (saved if resumed else vars(plan.start))[name] for name in PROGRESS}
    engine = Engine(plan, backend)
    watchdog.beat("load", done)
    if resumed:
        checkpoints.load(engine, resumed)
    else:
        saved = _begin(engine, plan.start)
    losses = RecentLosses(saved.get("losses") if saved else None)
    say(introduction(plan, backend, resumed))
    validation = Validation(plan) if plan.validation else None
    monitor = Monitor(plan, backend, engine, folder, done)
    monitor.cut(resumed or -1)
    if validation and not resumed:
        watchdog.beat("validation", done)
        monitor.validation(done, progress, validation)

    with stop, monitor, checkpoints.finished() if checkpoints else nullcontext():
        for step in range(done + 1, settings.total_iters + 1):
            watchdog.beat("step", step)
            with monitor.over(step):
                update = engine.update(step)

            result = update.result
            progress["tokens"] += plan.step_tokens(step)
            progress["predicted_tokens"] += result.predicted
            progress["flops"] += result.flops
            progress["skipped_updates"] += not update.made
            deviations = losses.add(step, plan.schedule.text_at(step), result.loss)
            spike = settings.health.is_spike(deviations)
            progress["loss_spikes"] += spike
            monitor.step(step, update, progress, deviations)
            if not update.made:
                watchdog.beat("diagnosis", step)
                report_skipped(engine, step, result, progress["skipped_updates"])
            if spike:
                say(spike_found(plan, step, result, deviations))
                if len(plan.rewinds) < settings.health.max_rewinds:
                    watchdog.beat("rewind", step)
                    return _leave_out(plan, step, folder, checkpoints)
            last = step == settings.total_iters
            if validation and (_due(step, settings.eval_every) or last):
                watchdog.beat("validation", step)
                monitor.validation(step, progress, validation)

            asked = stop.asked()
            leave = asked or _due(step, output.exit_interval)
            if checkpoints and checkpoints.saving:
                with monitor.timing("save"):
                    checkpoints.finish_save(block=False)
            if checkpoints and (last or leave or _due(step, output.save_interval)):
                watchdog.beat("save", step)
                monitor.sync()
                with monitor.timing("save"):
                    state = progress | {"losses": dict(losses.state)}
                    checkpoints.save(engine, step, state, block=last or leave or not output.async_save)
            if leave and not last:
                break
    say(conclusion(step, settings.total_iters, result, output.save, asked))
    return last or not asked


def _leave_out(plan: Plan, step: int, folder: RunFolder | None, checkpoints: Checkpoints) -> Plan:
    """The plan without the packs that led to the spike at `step`, on the disk before anything else is done with it."""
    checkpoints.finish_save()
    kept = on_rank_0(lambda: [at for at in checkpoints.fitting(plan) if at < step])
    shorter = leave_out(plan, step, kept)
    on_rank_0(lambda: folder.record(shorter))
    return shorter


def _begin(engine: Engine, start: Start) -> dict[str, Any] | None:
    """Load what the run starts from, in whatever layout it was saved; an engine has its new weights already.

    The JSON of the checkpoint that a branch goes on from.
    """
    if not start.run:
        return None
    parent = Checkpoints(Path(start.run) / "checkpoints")
    try:
        saved = parent.check(start.at)
    except Damaged as damage:
        raise InputError(f"{damage}; choose another checkpoint of {start.run}") from None
    if digest(saved["identity"]) != start.parent:
        raise InputError(f"{parent.path(start.at)} is a checkpoint of a different run than that of {start.run}; choose another")
    if start.kind == "branch":
        parent.load(engine, start.at)
        return saved
    parent.load_weights(engine, start.at)
    return None


def _due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0


def _open_folder(plan: Plan) -> RunFolder | None:
    """The run folder on rank 0; every rank leaves with the same InputError if it cannot be used."""
    if not plan.settings.output.save:
        return None
    folders: list[RunFolder] = []
    on_rank_0(lambda: folders.append(RunFolder(Path(plan.settings.output.save), plan)))
    return folders[0] if folders else None
