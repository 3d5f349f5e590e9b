"""Resolution of the packs that a run skips.

They come from flags, run directory, parent run and rewinds.
"""

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
    """Return the packs that a run skips, and the texts of its rewinds.

    They are those of --skip-packs and of rewinds recorded in --save; without the flag those
    recorded in --save, else in the parent run. Files are read; each rank calls it for itself.

    Returns:
        The packs, and the ranges of each rewind recorded in --save, as text.

    Raises:
        InputError: --skip-packs differs from the recorded ones in what has been read already.
    """
    texts = plan.settings.data.skip_packs
    start = plan.start
    recorded, rewinds = (
        _read_recorded_skips(Path(plan.settings.output.save))
        if plan.settings.output.save
        else (None, ())
    )
    parents = SkippedPacks.parse(start.skip_packs)
    inherited = parents if recorded is None else recorded
    # With the ranges of rewinds, so that the same command resumes the run after one.
    skipped = SkippedPacks.parse(texts) | SkippedPacks.parse(rewinds) if texts else inherited
    if not parents.reads_same(skipped, start.skip_samples, plan.samples_read(start.step)):
        raise _difference_error(f"--branch-at {start.step}", start.run, parents, skipped)
    # Only if it matters, as each rank reads the checkpoints for it.
    step = 0 if recorded is None or recorded == skipped else _newest_compatible_step(plan, recorded)
    if step and not recorded.reads_same(skipped, start.skip_samples, plan.samples_read(step)):
        raise _difference_error(
            f"--save {plan.settings.output.save} holds a different run",
            f"its step {step}",
            recorded,
            skipped,
        )
    return skipped, rewinds


def saw_same_data(plan: Plan, state: dict[str, Any]) -> bool:
    """Return whether a checkpoint skipped the same packs as `plan`, up to its step.

    Args:
        state: Content of the checkpoint's state.json.
    """
    checkpoint_skips = SkippedPacks.parse(state.get("skip_packs", ()))
    return checkpoint_skips.reads_same(
        plan.skipped, plan.start.skip_samples, plan.samples_read(state["step"])
    )


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


def _read_recorded_skips(run: Path) -> tuple[SkippedPacks | None, tuple[str, ...]]:
    """Return skipped packs and rewinds in the run.json of `run`.

    (None, ()) if the file is missing or invalid.
    """
    try:
        metadata = read_json_object(run / RUN_FILE)
        return SkippedPacks.parse(metadata.get("skip_packs", ())), tuple(
            metadata.get("rewinds", ())
        )
    except (InputError, TypeError):
        return None, ()


def _newest_compatible_step(plan: Plan, recorded: SkippedPacks) -> int:
    """Return the newest step whose checkpoint skipped the same packs as `recorded`.

    Only complete checkpoints up to the tracker's step count; 0 for none.
    """
    checkpoints = CheckpointDir(Path(plan.settings.output.save) / "checkpoints")
    for step in reversed(checkpoints.steps_up_to_tracker()):
        with contextlib.suppress(DamagedCheckpointError):  # reported on loading
            skipped = SkippedPacks.parse(checkpoints.read_state(step).get("skip_packs", ()))
            if skipped.reads_same(recorded, plan.start.skip_samples, plan.samples_read(step)):
                return step
    return 0


def plan_after_rewind(plan: Plan, step: int, checkpoint_steps: Sequence[int]) -> Plan:
    """Return a copy of `plan` that also skips the packs that led to a spike at `step`.

    They are those of the last --rewind-skip-iters steps, `step` included, but only after the
    earliest checkpoint, or after the run's start if there is none.

    Args:
        step: Step of the spike.
        checkpoint_steps: Steps of the checkpoints to which the run can return, in any order.

    Raises:
        InputError: --blend-max-epochs leaves too few packs for the steps then.
    """
    first = max(step - plan.settings.health.rewind_skip_iters, plan.start.step)
    first = max(first, min(checkpoint_steps, default=0)) + 1
    packs = SkippedPacks.from_ranges(
        [(plan.first_sample(first), plan.sample_at(plan.samples_read(step) - 1))]
    )
    rewound_plan = plan.with_skipped(plan.skipped | packs, (*plan.rewinds, *packs.texts))
    rewound_plan.check_supply()
    return rewound_plan
