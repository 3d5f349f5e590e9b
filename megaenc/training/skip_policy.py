"""Which packs a run leaves out, by its flags, its folder, its parent and its rewinds, and which checkpoints fit that."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.json_files import read_json_object
from megaenc.training.checkpoint_dir import CheckpointDir, DamagedCheckpointError
from megaenc.training.plan import Plan
from megaenc.training.run_dir import RUN_FILE
from megaenc.training.skip_ranges import SkippedPacks


def resolve_skip_ranges(plan: Plan) -> tuple[SkippedPacks, tuple[str, ...]]:
    """Return what the run of `plan` leaves out, and which of it rewinds have added, one text each.

    That is what the run folder says or, for a new branch, its parent's; InputError, naming what to give, where `--skip-packs`
    differs from it in what has been read.
    """
    texts, start = plan.settings.data.skip_packs, plan.start
    recorded, rewinds = _read_recorded_skips(Path(plan.settings.output.save)) if plan.settings.output.save else (None, ())
    parents = SkippedPacks.read(start.skip_packs)
    inherited = parents if recorded is None else recorded
    # With what rewinds have added, so that the same command goes on after one.
    wanted = SkippedPacks.read(texts) | SkippedPacks.read(rewinds) if texts else inherited
    if not parents.reads_same(wanted, start.skip_samples, plan.samples_read(start.step)):
        raise _difference_error(f"--branch-at {start.step}", start.run, parents, wanted)
    step = 0 if recorded is None else _newest_compatible_step(plan, recorded)
    if step and not recorded.reads_same(wanted, start.skip_samples, plan.samples_read(step)):
        raise _difference_error(f"--save {plan.settings.output.save} holds a different run", f"its step {step}", recorded, wanted)
    return wanted, rewinds


def saw_same_data(plan: Plan, state: dict[str, Any]) -> bool:
    """Return whether the checkpoint of `read_state` has read what `plan` reads up to there: not if a rewind left packs out since."""
    there = SkippedPacks.read(state.get("skip_packs", ()))
    return there.reads_same(plan.skipped, plan.start.skip_samples, plan.samples_read(state["step"]))


def _difference_error(where: str, whose: str, there: SkippedPacks, here: SkippedPacks) -> InputError:
    texts = [" ".join(packs.texts) or "not given" for packs in (there, here)]
    return InputError(
        f"{where}: skip_packs is {texts[0]} there, {texts[1]} here; expected the same up to the last pack that {whose} has read"
    )


def _read_recorded_skips(run: Path) -> tuple[SkippedPacks | None, tuple[str, ...]]:
    """Return what the run.json of a run folder says; None where there is none, or one that its reader will complain about."""
    try:
        facts = read_json_object(run / RUN_FILE)
        return SkippedPacks.read(facts.get("skip_packs", ())), tuple(facts.get("rewinds", ()))
    except (InputError, TypeError):
        return None, ()


def _newest_compatible_step(plan: Plan, recorded: SkippedPacks) -> int:
    """Return the newest step with a whole checkpoint that fits what the folder says, up to its tracker's; 0 for none."""
    checkpoints = CheckpointDir(Path(plan.settings.output.save) / "checkpoints")
    for step in reversed(checkpoints.steps_up_to_tracker()):
        with contextlib.suppress(DamagedCheckpointError):  # named when it is to be loaded
            there = SkippedPacks.read(checkpoints.read_state(step).get("skip_packs", ()))
            if there.reads_same(recorded, plan.start.skip_samples, plan.samples_read(step)):
                return step
    return 0


def plan_after_rewind(plan: Plan, step: int, kept: Sequence[int]) -> Plan:
    """Return `plan` without the packs of the `--rewind-skip-iters` updates up to `step`, to go back to before them.

    `kept`: steps with a checkpoint. If all are among those updates, only what came after the oldest is left out.
    """
    first = max(step - plan.settings.health.rewind_skip_iters, plan.start.step)
    first = max(first, min(kept, default=0)) + 1
    packs = SkippedPacks.of([(plan.first_sample(first), plan.sample(plan.samples_read(step) - 1))])
    return plan.with_skipped(plan.skipped | packs, (*plan.rewinds, *packs.texts))
