"""Which packs a run leaves out, by its flags, its folder, its parent and its rewinds, and which checkpoints fit that."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.training.plan import Plan
from megaenc.training.run_folder import FACTS
from megaenc.training.skipped import SkippedPacks


def find_skipped(plan: Plan) -> tuple[SkippedPacks, tuple[str, ...]]:
    """What the run of `plan`, complete but for this, leaves out, and which of it rewinds have added, one text each.

    That is what the run folder says or, for a new branch, its parent's; `--skip-packs` may differ from it where nothing has been
    read yet. InputError, naming what to give, where it differs before.
    """
    given, start = SkippedPacks.read(plan.settings.data.skip_packs), plan.start
    recorded, rewinds = _recorded(Path(plan.settings.output.save)) if plan.settings.output.save else (None, ())
    parents = SkippedPacks.read(start.skip_packs)
    inherited = parents if recorded is None else recorded
    wanted = given | SkippedPacks.read(rewinds) if given.ranges else inherited  # the same command goes on after a rewind
    if not parents.agrees(wanted, start.skip_samples, plan.samples_by(start.step)):
        raise _differs(f"--branch-at {start.step}", start.run, parents, wanted)
    step = 0 if recorded is None else _newest(plan, recorded)
    if step and not recorded.agrees(wanted, start.skip_samples, plan.samples_by(step)):
        raise _differs(f"--save {plan.settings.output.save} holds a different run", f"its step {step}", recorded, wanted)
    return wanted, rewinds


def read_alike(plan: Plan, state: dict[str, Any]) -> bool:
    """Whether the run that saved a checkpoint with the JSON `state` had read what `plan` reads up to there.

    It had not if a rewind has left packs out since.
    """
    there = SkippedPacks.read(state.get("skip_packs", ()))
    return there.agrees(plan.skipped, plan.start.skip_samples, plan.samples_by(state["step"]))


def _differs(where: str, whose: str, there: SkippedPacks, here: SkippedPacks) -> InputError:
    texts = [" ".join(packs.texts) or "not given" for packs in (there, here)]
    return InputError(
        f"{where}: skip_packs is {texts[0]} there, {texts[1]} here; expected the same up to the last pack that {whose} has read"
    )


def _recorded(run: Path) -> tuple[SkippedPacks | None, tuple[str, ...]]:
    """What the run.json of a run folder says; None where there is none, or one that its reader will complain about."""
    try:
        facts = json.loads((run / FACTS).read_text(encoding="utf-8"))
        return SkippedPacks.read(facts.get("skip_packs", ())), tuple(facts.get("rewinds", ()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None, ()


def _newest(plan: Plan, recorded: SkippedPacks) -> int:
    """The newest step with a checkpoint that fits what the folder says, up to the one that its tracker names; 0 for none."""
    folder = Path(plan.settings.output.save) / "checkpoints"
    tracker = folder / "latest_checkpointed_iteration.txt"
    text = tracker.read_text(encoding="utf-8").strip() if tracker.exists() else ""
    for file in sorted(folder.glob("iter_*/state.json"), reverse=True):
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            there, step = SkippedPacks.read(state.get("skip_packs", ())), int(state["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # named when it is to be loaded
        beyond = text.isdecimal() and step > int(text)
        if not beyond and there.agrees(recorded, plan.start.skip_samples, plan.samples_by(step)):
            return step
    return 0


def leave_out(plan: Plan, step: int, kept: Sequence[int]) -> Plan:
    """`plan` without the packs of the `--rewind-skip-iters` updates up to number `step`, to go back to before them.

    `kept` are the steps with a checkpoint. Where all of them lie among those updates, only what was read after the oldest is
    left out: rather that than to make the whole run again.
    """
    first = max(step - plan.settings.health.rewind_skip_iters, plan.start.step)
    first = max(first, min(kept, default=0)) + 1
    packs = SkippedPacks.of([(plan.first_sample(first), plan.sample(plan.samples_by(step) - 1))])
    return plan.leaving_out(plan.skipped | packs, (*plan.rewinds, *packs.texts))
