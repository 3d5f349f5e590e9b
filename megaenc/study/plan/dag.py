"""Graph of a study's stages, in which shared prefixes are trained once.

Stages are the corpus, pretraining runs, exports, fine-tuning grids and zero-shot retrieval.

A run of N steps that decays over the last D shares its first N - D steps with every run that trains
the same objectives at the same learning rate up to there. Each model branches off the run with
which it shares most, or starts anew if it shares nothing; longer runs come first and are the
trunks. A model that continues from a decayed end is a run of its own, which others can branch off.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megaenc.errors import InputError
from megaenc.flags import flatten
from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.manifest.schema import Manifest
from megaenc.study.manifest.training_sets import dataset_result_name
from megaenc.study.plan.training_cost import compute_training_cost
from megaenc.study.run.embed_stage import EmbedData, EmbedStage
from megaenc.study.run.finetune_stage import FinetuneStage, LabelledData, choose_study_texts
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.stage import CorpusStage, ExportStage, StageRunner
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.run_dir import RUN_FILE
from megaenc.training.run_init import read_run_metadata

PlannedStart = tuple[Literal["new", "branch", "weights"], str, int]
"""Start of a run: with new weights, as a branch, or with another run's weights; that run's name;
the branch step or 0.
"""


@dataclass(frozen=True)
class StageGraph:
    """Stages of a study, as of `build_graph`, each after those that it needs.

    `manifest` is that of the study. `runs` (PretrainStage), branches too, are by name of the model
    at the end, `exports` (ExportStage) and `embeds` (EmbedStage) by name of the evaluated
    checkpoint, `grids` (FinetuneStage) by stage id, as a checkpoint has one for each training set.
    `corpus` (CorpusStage) is None if the study builds no corpus.
    """

    manifest: Manifest
    corpus: CorpusStage | None
    """None if the study builds no corpus"""
    runs: dict[str, PretrainStage]
    """by name of the model at the end"""
    exports: dict[str, ExportStage]
    """by name of the evaluated checkpoint"""
    grids: dict[str, FinetuneStage]
    """by id, as a model has one for each training set"""
    embeds: dict[str, EmbedStage]
    """by name of the evaluated checkpoint"""

    @property
    def stages(self) -> dict[str, StageRunner]:
        """Return all stages by id, each after those that it needs.

        An id is `corpus`, `finetune/NAME@SET` for a grid, or else `KIND/NAME`, such as
        `pretrain/610m-mlm40-42k`, with the kind `pretrain`, `export` or `embed`.
        """
        stages: list[StageRunner] = [self.corpus] if self.corpus else []
        for stages_by_name in (self.runs, self.exports, self.grids, self.embeds):
            stages += stages_by_name.values()
        return {stage.id: stage for stage in stages}


def build_graph(
    manifest: Manifest,
    study: Path | None = None,
    *,
    processes: int = 0,
    grid_jobs: int = 1,
    data_flags: Mapping[str, Any] | None = None,
) -> StageGraph:
    """Return the graph of a study, whose runs branch off others with the same steps.

    Finished stages are included; nothing is written.

    Args:
        study: Study directory; its existing runs keep their start, and others branch off these only
            at checkpoints that exist. None: read no directory, as for a plan.
        processes: Processes per pretraining run; 0: the manifest's devices.
        grid_jobs: Fine-tuning runs in parallel per grid; 0: as many as the machine has room for.
        data_flags: data_path and tokenizer of pretraining by field name, replacing the manifest's;
            unused if the study builds its corpus.
    """
    starts = _plan_starts(manifest.models, study)
    study = study or Path()
    hardware = manifest.hardware
    corpus = None
    if manifest.corpus.is_built_by_study:
        paths = tuple(manifest.data_dir / path for path in manifest.corpus.text)
        corpus = CorpusStage(
            study=study,
            demo=manifest.corpus.demo,
            text=paths,
            vocab_size=manifest.corpus.vocab_size,
        )
        data_flags = corpus.flags
    exports = {}
    checkpoint_steps = defaultdict(set)
    for _, parent, branch_step in starts.values():
        if branch_step:
            checkpoint_steps[parent].add(branch_step)
    for name, key, model, step in manifest.checkpoints():
        run = model.name
        # Steps before a branch are trained by the run that it branches off.
        while starts[run][0] == "branch" and step <= starts[run][2]:
            run = starts[run][1]
        exports[name] = ExportStage(study=study, name=name, key=key, run=run, step=step)
        if not key.decayed:
            checkpoint_steps[run].add(step)
    models = {model.name: model for model in manifest.models}
    runs = {}
    for name, (start, parent, branch_step) in starts.items():
        runs[name] = PretrainStage(
            study=study,
            name=name,
            model=models[name],
            start=start,
            parent=parent,
            branch_step=branch_step,
            checkpoint_steps=tuple(sorted(checkpoint_steps[name])),
            has_study_corpus=manifest.corpus.is_built_by_study,
            cost=compute_training_cost(manifest, models[name], branch_step, models[name].steps),
            processes=processes or hardware.devices,
            data_flags=data_flags or {},
        )
    demo_folder = manifest.finetune_flags.get("demo_folder", str(study / "demo"))
    grids = {}
    if manifest.finetune:
        for grid in _build_grids(manifest, study, exports, demo_folder, grid_jobs):
            grids[grid.id] = grid
    embeds = {}
    if manifest.embed:
        data = EmbedData(manifest.embed, demo_folder)
        for name in exports:
            embeds[name] = EmbedStage(
                study=study,
                name=name,
                data=data,
                flags=manifest.embed_flags,
                seconds=hardware.embed_seconds,
            )
    return StageGraph(manifest, corpus, runs, exports, grids, embeds)


def _build_grids(
    manifest: Manifest, study: Path, models: Iterable[str], demo_folder: str, jobs: int
) -> Iterator[FinetuneStage]:
    """Yield the stage of each of `models` and each training set of the manifest."""
    flags = manifest.finetune_flags
    texts = choose_study_texts(flags)
    labelled_flags = {"train_on": flags.get("train_on", ""), "demo_folder": demo_folder}
    if "pair_template" in texts:
        labelled_flags["pair_template"] = texts.pop("pair_template")
    protocol = replace(manifest.finetune.protocol, **texts).normalize_special_tokens()
    data = LabelledData(flags["datasets"], replace(manifest.finetune.data, **labelled_flags))
    flags_by_training = {}
    for training in manifest.training_sets:
        datasets = tuple(
            text for text in flags["datasets"] if dataset_result_name(text) in training.datasets
        )
        flags_by_training[training] = {**flags, "datasets": datasets}
    for name, (training, training_flags) in itertools.product(models, flags_by_training.items()):
        yield FinetuneStage(
            study=study,
            name=name,
            training=training,
            flags=training_flags,
            protocol=protocol,
            data=data,
            jobs=jobs,
            run_seconds=manifest.hardware.finetune_seconds,
        )


def _plan_starts(models: Iterable[PlannedModel], study: Path | None) -> dict[str, PlannedStart]:
    """Return the start of each model's run by name, parents before children.

    Runs that exist in `study` keep their start and are branched at checkpoints that they have. The
    total number of steps does not depend on the order, only the choice of the trunk does: the
    longest run, of equals the one with the fewest objectives, after which intermediate checkpoints
    are named.
    """
    families: dict[tuple, list[PlannedModel]] = defaultdict(list)
    for model in models:
        families[_sharing_key(model)].append(model)
    existing = _read_existing_starts(
        {model.name: model for members in families.values() for model in members}, study
    )
    starts = dict(existing)
    for members in families.values():
        planned: list[PlannedModel] = []
        members.sort(
            key=lambda model: (
                model.name not in existing,
                -model.last_undecayed_step,
                len(model.phases),
            )
        )
        for model in members:
            if model.name not in existing:
                starts[model.name] = _choose_start(model, planned, starts, study)
            planned.append(model)
    ordered: dict[str, PlannedStart] = {}
    for name in starts:  # parents may come later: a continued model may be a branch
        ancestry = [name]
        while parent := starts[ancestry[-1]][1]:
            ancestry.append(parent)
        for ancestor in reversed(ancestry):
            ordered[ancestor] = starts[ancestor]
    return ordered


def _sharing_key(model: PlannedModel) -> tuple:
    """Return a key that runs have in common if they can share a prefix."""
    # Compares resolved values, so that an explicit default makes no difference. Schedules are
    # compared by count_shared_steps.
    flags = {
        name: value
        for name, value in flatten(model.config).items()
        if not name.startswith(("lr_warmup", "lr_wsd_decay"))
    }
    return model.after, model.warmup, model.key.seed, model.key.size, repr(flags)


def _unshared_start(model: PlannedModel) -> PlannedStart:
    """Return the start of a run that is no branch."""
    return ("weights", model.after, 0) if model.after else ("new", "", 0)


def _choose_start(
    model: PlannedModel,
    candidates: Iterable[PlannedModel],
    starts: Mapping[str, PlannedStart],
    study: Path | None,
) -> PlannedStart:
    """Return the start as a branch of the candidate that shares most steps.

    Of candidates that share as many, it is the first; if none shares steps, the run is no branch.
    """
    parent = ""
    branch_step = 0
    for candidate in candidates:
        shared = count_shared_steps(model, candidate)
        shared = _find_branch_step(study / "runs" / candidate.name, shared) if study else shared
        kind, _, candidate_branch_step = starts[candidate.name]
        # Only at a step that the other run trains itself.
        if shared > branch_step and (kind != "branch" or shared > candidate_branch_step):
            parent = candidate.name
            branch_step = shared
    return ("branch", parent, branch_step) if parent else _unshared_start(model)


def _read_existing_starts(
    models: Mapping[str, PlannedModel], study: Path | None
) -> dict[str, PlannedStart]:
    """Return the starts of existing runs by name.

    Those that contradict the manifest are left out.
    """
    starts: dict[str, PlannedStart] = {}
    for name in models if study else ():
        # There may be no run; the stage's check reports a damaged run.json.
        with contextlib.suppress(InputError):
            _, start = read_run_metadata(study / "runs" / name / RUN_FILE)
            starts[name] = (start.kind, Path(start.run).name, start.step)

    def is_consistent(name: str) -> bool:
        children: set[str] = set()
        while starts[name][0] == "branch":
            children.add(name)
            model = models[name]
            _, parent, branch_step = starts[name]
            if (
                parent not in starts
                or parent in children
                or _sharing_key(model) != _sharing_key(models[parent])
            ):
                return False
            if not 0 < branch_step <= count_shared_steps(model, models[parent]):
                return False
            name = parent
        return starts[name] == _unshared_start(models[name])

    return {name: starts[name] for name in starts if is_consistent(name)}


def _find_branch_step(run: Path, step: int) -> int:
    """Return the last step up to `step` at which a run can be branched.

    It is a step that the run has not reached yet, or a kept checkpoint; 0 if there is none.
    """
    checkpoints = CheckpointDir(run / "checkpoints")
    latest = checkpoints.tracked_step()
    if latest is None or latest < step:
        return step
    return max(
        (
            saved_step
            for saved_step in checkpoints.steps()
            if saved_step <= step and checkpoints.is_complete(saved_step)
        ),
        default=0,
    )


def count_shared_steps(first: PlannedModel, second: PlannedModel) -> int:
    """Return the number of first steps that the runs of two models can share.

    These have the same objectives and come before either run's decay. A phase within which an
    option changes is shared completely or not at all. Flags, warm-up, seed and parent must be the
    same, which is not checked.
    """
    first_phases = first.phases
    second_phases = second.phases
    first_index = second_index = step = 0
    while (
        first_index < len(first_phases)
        and second_index < len(second_phases)
        and first_phases[first_index].text == second_phases[second_index].text
    ):
        first_end = first_phases[first_index].last
        second_end = second_phases[second_index].last
        if first_end != second_end and "->" in first_phases[first_index].text:
            break
        step = min(first_end, second_end)
        first_index += first_end == step
        second_index += second_end == step
    return min(step, first.last_undecayed_step, second.last_undecayed_step)
