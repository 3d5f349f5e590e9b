"""Pretraining, as the paragraph that describes it reads: resume or begin, then update, validate and save until the end."""

import gc
from pathlib import Path

from megaenc.backend import Backend
from megaenc.console import say
from megaenc.training.alike import check_alike
from megaenc.training.introduction import conclusion
from megaenc.training.plan import Plan
from megaenc.training.run import Run
from megaenc.training.run_folder import RunFolder
from megaenc.training.saving import OwnCheckpoints
from megaenc.training.stopping import Stop
from megaenc.training.together import on_rank_0, shared_fate
from megaenc.training.watchdog import STACKS, Watchdog


def pretrain(plan: Plan, backend: Backend) -> bool:
    """Train from the newest checkpoint of `--save`, or the plan's start, to `--train-iters` or the next `--exit-interval`.

    False where a signal or `--exit-duration-in-mins` ended it before; then it is saved too, where there is a `--save`.
    """
    output = plan.settings.output
    checkpoints = None
    if output.save:
        checkpoints = OwnCheckpoints(Path(output.save) / "checkpoints", output.keep_last, output.keep_every, output.save_steps)
    with shared_fate(clean_up=checkpoints.abandon if checkpoints else lambda: None):
        check_alike(plan)
        folder = _open_folder(plan)
        watchdog = Watchdog(output.distributed_timeout_minutes, Path(output.save) / STACKS if output.save else None)
        stop = Stop(output.exit_duration_in_mins, backend.device, by_signals=checkpoints is not None)
        try:
            with watchdog, stop:
                while isinstance(end := _pretrain(plan, backend, folder, checkpoints, stop, watchdog), Plan):
                    plan = end
                    gc.collect()  # the model that was, before there is another
                return end
        finally:
            if folder:
                folder.close()


def _pretrain(
    plan: Plan, backend: Backend, folder: RunFolder | None, checkpoints: OwnCheckpoints | None, stop: Stop, watchdog: Watchdog
) -> bool | Plan:
    """What `pretrain` returns, or at a spike the plan with which the run has to go back and on from what is saved."""
    settings, output, total = plan.settings, plan.settings.output, plan.settings.total_iters
    if folder:
        checkpoints.clean()
    if checkpoints:
        on_rank_0(lambda: checkpoints.leave_behind(plan))
    saved = checkpoints.newest_good(plan) if checkpoints else None
    if saved and saved["step"] == total:
        say(f"{output.save} is complete: step {total} of {total}")
        return True
    run = Run(plan, backend, folder, checkpoints, watchdog, saved)
    with run.monitor, run.saves_finished():
        for step in range(run.done + 1, total + 1):
            if run.update(step):
                return run.without_spike(step)
            last = step == total
            if last or _due(step, settings.eval_every):
                run.validate(step)
            asked = stop.asked()
            leave = asked or _due(step, output.exit_interval)
            run.go_on_saving()
            if last or leave or _due(step, output.save_interval) or step in output.save_steps:
                run.save(step, block=last or leave or not output.async_save)
            if leave and not last:
                break
        watchdog.beat("end", step)
    say(conclusion(step, total, run.result, output.save, asked))
    return last or not asked


def _due(step: int, interval: int | None) -> bool:
    return bool(interval) and step % interval == 0


def _open_folder(plan: Plan) -> RunFolder | None:
    """The run folder on rank 0; every rank leaves with the same InputError if it cannot be used."""
    if not plan.settings.output.save:
        return None
    folders: list[RunFolder] = []
    on_rank_0(lambda: folders.append(RunFolder(Path(plan.settings.output.save), plan)))
    return folders[0] if folders else None
