"""Which run each model's run begins with, so that every shared beginning is trained once.

A run of N steps that decays over the last D has the same first N - D steps as any other that trains the same objectives at the
same rate up to there. So each model is a branch of the run with which it shares most, or all of its own where it shares nothing;
longer runs come first and are the trunks. What is continued from a decayed end is a run of its own, which others can branch.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from megaenc.errors import InputError
from megaenc.flags import flatten
from megaenc.study.entries import Model
from megaenc.study.pretrain_stage import read_start
from megaenc.training.checkpoint_folder import CheckpointFolder

Start = tuple[Literal["new", "branch", "weights"], str, int]
"""How a run begins: with new weights, as a branch, with another's weights; the name of that other; the step of a branch, or 0."""


def starts_of(models: Iterable[Model], study: Path | None = None) -> dict[str, Start]:
    """Return how the run of each model begins, parents before children.

    Runs that are in the folder `study` keep the start that they have had, and are branched at steps that they have kept. What is
    left for each model to train does not depend on the order, only which run is the trunk does: the longest, of equals the one
    with the fewest objectives, which checkpoints on the way are named after.
    """
    families: dict[tuple, list[Model]] = defaultdict(list)
    for model in models:
        families[_family(model)].append(model)
    kept = _kept_starts([model for members in families.values() for model in members], study)
    found = dict(kept)
    for members in families.values():
        placed: list[Model] = []
        for model in sorted(members, key=lambda model: (model.name not in kept, -model.undecayed, len(model.phases))):
            if model.name not in kept:
                found[model.name] = _best_start(model, placed, found, study)
            placed.append(model)
    ordered: dict[str, Start] = {}
    for name in found:  # in this order, but for parents that come later: what is continued may be a branch
        line = [name]
        while parent := found[line[-1]][1]:
            line.append(parent)
        ordered |= {each: found[each] for each in reversed(line)}
    return ordered


def _family(model: Model) -> tuple:
    """Return what runs that can share a beginning have in common."""
    # Not as flags are spelled: a default that is written down changes nothing. The schedule has its own comparison.
    flags = {name: value for name, value in flatten(model.run).items() if not name.startswith(("lr_warmup", "lr_wsd_decay"))}
    return model.after, model.warmup, model.setting.seed, model.setting.size, repr(flags)


def _best_start(model: Model, placed: Iterable[Model], starts: Mapping[str, Start], study: Path | None) -> Start:
    """As a branch of the one of its family that it shares most with, if any; of equals the first."""
    best, at = "", 0
    for other in placed:
        common = shared_steps(model, other)
        common = _branch_point(study / "runs" / other.name, common) if study else common
        kind, _, its_own = starts[other.name]
        if common > at and (kind != "branch" or common > its_own):  # steps that it makes itself
            best, at = other.name, common
    return ("branch", best, at) if best else _own_start(model)


def _kept_starts(models: Iterable[Model], study: Path | None) -> dict[str, Start]:
    """Return how runs have begun, where that makes what the manifest says of them now."""
    by_name = {model.name: model for model in models}
    said = {name: start for name in by_name if study and (start := _begun(study / "runs" / name))}

    def fits(name: str) -> bool:
        children: set[str] = set()
        while said[name][0] == "branch":
            children.add(name)
            model, (_, parent, at) = by_name[name], said[name]
            if parent not in said or parent in children or _family(model) != _family(by_name[parent]):
                return False
            if not 0 < at <= shared_steps(model, by_name[parent]):
                return False
            name = parent
        return said[name] == _own_start(by_name[name])

    return {name: said[name] for name in said if fits(name)}


def _own_start(model: Model) -> Start:
    """Return how a run begins that is no branch."""
    return ("weights", model.after, 0) if model.after else ("new", "", 0)


def _begun(run: Path) -> Start | None:
    """Return how a run began; None for one that has not, and for a damaged run.json, which the check of its stage names."""
    try:
        start = read_start(run)
    except InputError:
        return None
    return start and (start.kind, Path(start.run).name, start.step)


def _branch_point(run: Path, step: int) -> int:
    """Return the last step up to `step` to branch a run at: `step` while it is not there yet, then one that it has kept, or 0."""
    checkpoints = CheckpointFolder(run / "checkpoints")
    latest = checkpoints.latest()
    if latest is None or latest < step:
        return step
    return max((kept for kept in checkpoints.steps() if kept <= step and checkpoints.is_whole(kept)), default=0)


def shared_steps(one: Model, other: Model) -> int:
    """Return the first steps that two models of the same flags, warm-up and start have in common, none of them decayed.

    A phase within which an option changes is the same only as a whole.
    """
    here, there = one.phases, other.phases
    mine = theirs = step = 0
    while mine < len(here) and theirs < len(there) and here[mine].text == there[theirs].text:
        ends = here[mine].last, there[theirs].last
        if ends[0] != ends[1] and "->" in here[mine].text:
            break
        step = min(ends)
        mine, theirs = mine + (ends[0] == step), theirs + (ends[1] == step)
    return min(step, one.undecayed, other.undecayed)


def maker(starts: Mapping[str, Start], name: str, step: int) -> str:
    """Return the run that makes `step` of the run `name`."""
    while starts[name][0] == "branch" and step <= starts[name][2]:
        name = starts[name][1]
    return name
