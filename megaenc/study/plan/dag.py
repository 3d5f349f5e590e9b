"""From a manifest to the stages of the work: corpus, pretraining runs, exports, fine-tunings.

Every shared beginning is trained once. A run of N steps that decays over the last D has the same first N - D steps as any other
that trains the same objectives at the same rate up to there. So each model is a branch of the run with which it shares most, or
all of its own where it shares nothing; longer runs come first and are the trunks. What is continued from a decayed end is a run
of its own, which others can branch.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megaenc.errors import InputError
from megaenc.flags import flatten
from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.manifest.schema import Manifest
from megaenc.study.plan.cost import compute_training_cost
from megaenc.study.run.finetune_stage import FinetuneStage, LabelledData
from megaenc.study.run.pretrain_stage import PretrainStage, read_run_init
from megaenc.study.run.stage import CorpusStage, ExportStage, StageRunner
from megaenc.training.checkpoint_dir import CheckpointDir

PlannedStart = tuple[Literal["new", "branch", "weights"], str, int]
"""How a run begins: with new weights, as a branch, with another's weights; the name of that other; the step of a branch, or 0."""


@dataclass(frozen=True)
class StageGraph:
    """The stages of a study by name, each kind in an order in which everything comes after what it needs."""

    manifest: Manifest
    corpus: CorpusStage | None
    runs: dict[str, PretrainStage]
    exports: dict[str, ExportStage]
    grids: dict[str, FinetuneStage]

    @property
    def stages(self) -> dict[str, StageRunner]:
        """All of them by id, each after what it needs."""
        corpus = [self.corpus] if self.corpus else []
        return {stage.id: stage for stage in (*corpus, *self.runs.values(), *self.exports.values(), *self.grids.values())}


def build_graph(
    manifest: Manifest,
    study: Path | None = None,
    *,
    processes: int = 0,
    grid_jobs: int = 1,
    text: Mapping[str, Any] | None = None,
) -> StageGraph:
    """Work the stages out: what branches where, which checkpoints are kept, what is exported and fine-tuned.

    `study` is the folder that it is made in: the runs there keep the start that they have had, and are branched where they can
    be. `processes` of one pretraining run; 0: the manifest's devices. `grid_jobs`: fine-tuning runs at a time in one grid; 0: as
    many as the machine has room for. `text`: data_path and tokenizer of pretraining in place of the manifest's.
    """
    starts = _plan_starts(manifest.models, study)
    study, hardware = study or Path(), manifest.hardware
    corpus = None
    if manifest.corpus.is_built_by_study:
        paths = tuple(manifest.data_dir / path for path in manifest.corpus.text)
        corpus = CorpusStage(study=study, demo=manifest.corpus.demo, text=paths, vocab_size=manifest.corpus.vocab_size)
        text = corpus.flags
    exports, keep = {}, defaultdict(set)
    for _, parent, at in starts.values():
        keep[parent].update([at] if at else [])
    for name, setting, model, step in manifest.checkpoints():
        run = model.name
        while starts[run][0] == "branch" and step <= starts[run][2]:  # made by what it branches off
            run = starts[run][1]
        exports[name] = ExportStage(study=study, name=name, key=setting, run=run, step=step)
        keep[run].update([] if setting.decayed else [step])
    models, runs = {model.name: model for model in manifest.models}, {}
    for name, (start, parent, at) in starts.items():
        runs[name] = PretrainStage(
            study=study,
            name=name,
            model=models[name],
            start=start,
            parent=parent,
            branch_step=at,
            checkpoint_steps=tuple(sorted(keep[name])),
            has_study_corpus=manifest.corpus.is_built_by_study,
            cost=compute_training_cost(manifest, models[name], at, models[name].steps),
            processes=processes or hardware.devices,
            data_flags=text or {},
        )
    grids = {}
    if manifest.finetune:
        flags = manifest.finetune_flags
        places = {"train_on": flags.get("train_on", ""), "demo_folder": flags.get("demo_folder", str(study / "demo"))}
        grid = FinetuneStage(
            study=study,
            name="",
            training_sets=manifest.training_sets,
            flags=flags,
            protocol=manifest.finetune.protocol,
            data=LabelledData(flags["datasets"], replace(manifest.finetune.data, **places)),
            jobs=grid_jobs,
            run_seconds=hardware.finetune_seconds,
        )
        grids = {name: replace(grid, name=name) for name in exports}
    return StageGraph(manifest, corpus, runs, exports, grids)


def _plan_starts(models: Iterable[PlannedModel], study: Path | None) -> dict[str, PlannedStart]:
    """Return how the run of each model begins, parents before children.

    Runs that are in the folder `study` keep the start that they have had, and are branched at steps that they have kept. What is
    left for each model to train does not depend on the order, only which run is the trunk does: the longest, of equals the one
    with the fewest objectives, which checkpoints on the way are named after.
    """
    families: dict[tuple, list[PlannedModel]] = defaultdict(list)
    for model in models:
        families[_sharing_key(model)].append(model)
    kept = _read_existing_starts({model.name: model for members in families.values() for model in members}, study)
    found = dict(kept)
    for members in families.values():
        placed: list[PlannedModel] = []
        for model in sorted(members, key=lambda model: (model.name not in kept, -model.last_undecayed_step, len(model.phases))):
            if model.name not in kept:
                found[model.name] = _choose_start(model, placed, found, study)
            placed.append(model)
    ordered: dict[str, PlannedStart] = {}
    for name in found:  # in this order, but for parents that come later: what is continued may be a branch
        line = [name]
        while parent := found[line[-1]][1]:
            line.append(parent)
        ordered |= {each: found[each] for each in reversed(line)}
    return ordered


def _sharing_key(model: PlannedModel) -> tuple:
    """Return what runs that can share a beginning have in common."""
    # Not as flags are spelled: a default that is written down changes nothing. The schedule has its own comparison.
    flags = {name: value for name, value in flatten(model.run).items() if not name.startswith(("lr_warmup", "lr_wsd_decay"))}
    return model.after, model.warmup, model.key.seed, model.key.size, repr(flags)


def _unshared_start(model: PlannedModel) -> PlannedStart:
    """Return how a run begins that is no branch."""
    return ("weights", model.after, 0) if model.after else ("new", "", 0)


def _choose_start(
    model: PlannedModel, placed: Iterable[PlannedModel], starts: Mapping[str, PlannedStart], study: Path | None
) -> PlannedStart:
    """As a branch of the one of its family that it shares most with, if any; of equals the first."""
    best, at = "", 0
    for other in placed:
        common = count_shared_steps(model, other)
        common = _find_branch_step(study / "runs" / other.name, common) if study else common
        kind, _, its_own = starts[other.name]
        if common > at and (kind != "branch" or common > its_own):  # steps that it makes itself
            best, at = other.name, common
    return ("branch", best, at) if best else _unshared_start(model)


def _read_existing_starts(models: Mapping[str, PlannedModel], study: Path | None) -> dict[str, PlannedStart]:
    """Return how runs have begun, where that makes what the manifest says of them now."""
    said: dict[str, PlannedStart] = {}
    for name in models if study else ():
        with contextlib.suppress(InputError):  # a damaged run.json, which the check of its stage names
            if start := read_run_init(study / "runs" / name):
                said[name] = (start.kind, Path(start.run).name, start.step)

    def fits(name: str) -> bool:
        children: set[str] = set()
        while said[name][0] == "branch":
            children.add(name)
            model, (_, parent, at) = models[name], said[name]
            if parent not in said or parent in children or _sharing_key(model) != _sharing_key(models[parent]):
                return False
            if not 0 < at <= count_shared_steps(model, models[parent]):
                return False
            name = parent
        return said[name] == _unshared_start(models[name])

    return {name: said[name] for name in said if fits(name)}


def _find_branch_step(run: Path, step: int) -> int:
    """Return the last step up to `step` to branch a run at: `step` while it is not there yet, then one that it has kept, or 0."""
    checkpoints = CheckpointDir(run / "checkpoints")
    latest = checkpoints.tracked_step()
    if latest is None or latest < step:
        return step
    return max((kept for kept in checkpoints.steps() if kept <= step and checkpoints.is_complete(kept)), default=0)


def count_shared_steps(one: PlannedModel, other: PlannedModel) -> int:
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
    return min(step, one.last_undecayed_step, other.last_undecayed_step)
