"""Resolution of the packs that a run skips.

They come from flags, run directory, parent run and rewinds.
"""

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
    """Return the packs that a run skips, and the texts of its rewinds.

    They are those of --skip-packs and of rewinds recorded in --save. Without the flag they are all
    those recorded in --save or, if it has no valid run.json, those of the parent run. Files are
    read; each rank calls it for itself.

    Returns:
        The packs, and the ranges of each rewind recorded in --save, such as ("1200-1215",).

    Raises:
        InputError: --skip-packs differs from the packs recorded by the run or its parent, among
            those up to the checkpoint that it continues.
    """
    save = plan.settings.output.save
    recorded = None
    rewinds = ()
    if save:
        recorded, rewinds = _read_recorded_skips(Path(save))
    start = plan.start
    parent_skips = SkippedPacks.parse(start.skip_packs)
    texts = plan.settings.data.skip_packs
    if texts:
        # With the ranges of rewinds, so that the same command resumes the run after one.
        skipped = SkippedPacks.parse(texts) | SkippedPacks.parse(rewinds)
    elif recorded is not None:
        skipped = recorded
    else:
        skipped = parent_skips
    if not _reads_same(plan, parent_skips, skipped, start.step):
        raise _difference_error(f"--branch-at {start.step}", start.run, parent_skips, skipped)
    # Only if it matters, as each rank reads the checkpoints for it.
    if recorded is not None and recorded != skipped:
        _check_recorded(plan, recorded, skipped)
    return skipped, rewinds


def saw_same_data(plan: Plan, state: dict[str, Any]) -> bool:
    """Return whether a checkpoint skipped the same packs as `plan`, up to its step.

    Args:
        state: Content of the checkpoint's state.json, with `step` and perhaps `skip_packs`.
    """
    return _reads_same(plan, SkippedPacks.from_record(state), plan.skipped, state["step"])


def plan_after_rewind(plan: Plan, step: int, checkpoint_steps: Sequence[int]) -> Plan:
    """Return a copy of `plan` that also skips the packs that led to a spike at `step`.

    They are those of the last --rewind-skip-iters steps, `step` included, but only after the
    earliest checkpoint, or after the run's start if there is none. They are added to
    `Plan.rewinds`, too.

    Args:
        step: Step of the spike.
        checkpoint_steps: Steps before `step` to whose checkpoints the run can return, in any order.

    Raises:
        InputError: --blend-max-epochs leaves too few packs for the steps then.
    """
    window = plan.settings.health.rewind_skip_iters
    first_step = max(step - window, plan.start.step, min(checkpoint_steps, default=0)) + 1
    packs = SkippedPacks.from_ranges(
        [(plan.first_sample(first_step), plan.sample_at(plan.samples_read(step) - 1))]
    )
    rewound_plan = plan.with_skipped(plan.skipped | packs, (*plan.rewinds, *packs.texts))
    rewound_plan.check_supply()
    return rewound_plan


def _read_recorded_skips(run: Path) -> tuple[SkippedPacks | None, tuple[str, ...]]:
    """Return skipped packs and rewinds in the run.json of `run`.

    (None, ()) if the file is missing or invalid.
    """
    try:
        metadata = read_json_object(run / RUN_FILE)
        return SkippedPacks.from_record(metadata), tuple(metadata.get("rewinds", ()))
    except (InputError, TypeError):
        return None, ()


def _check_recorded(plan: Plan, recorded: SkippedPacks, skipped: SkippedPacks) -> None:
    """Check that the run in --save has read no other packs than `skipped` leaves.

    It has read those up to its newest complete checkpoint. A checkpoint that read packs which a
    rewind has skipped since does not count.

    Args:
        recorded: Skipped packs in the run.json of --save.

    Raises:
        InputError: It has read others.
    """
    save = plan.settings.output.save
    checkpoints = CheckpointDir(Path(save) / "checkpoints")
    for step in reversed(checkpoints.steps_up_to_tracker()):
        try:
            state = checkpoints.read_state(step)
        except DamagedCheckpointError:  # reported on loading
            continue
        if not _reads_same(plan, SkippedPacks.from_record(state), recorded, step):
            continue
        if _reads_same(plan, recorded, skipped, step):
            return
        raise _difference_error(
            f"--save {save} holds a different run", f"its step {step}", recorded, skipped
        )


def _reads_same(plan: Plan, one: SkippedPacks, other: SkippedPacks, step: int) -> bool:
    """Return whether steps 1 to `step` read the same with two sets of skipped packs."""
    return one.reads_same(other, plan.start.skip_samples, plan.samples_read(step))


def _difference_error(
    source: str, reader: str, recorded: SkippedPacks, skipped: SkippedPacks
) -> InputError:
    """Return the error that `source` recorded other packs than `skipped`.

    They differ among those that `reader` has read.
    """
    texts = [" ".join(packs.texts) or "not given" for packs in (recorded, skipped)]
    return InputError(
        f"{source}: skip_packs is {texts[0]} there, {texts[1]} here; "
        f"expected the same --skip-packs up to the last pack that {reader} has read"
    )
