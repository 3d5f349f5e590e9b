"""What the stages of a study leave, without doing them: as much of it as is looked at."""

import json
from dataclasses import asdict
from pathlib import Path

import manifests

from megaenc.finetune.results import files as result_files
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.stage import ExportStage, StageRunner, read_identity
from megaenc.training.checkpoint_dir import json_digest
from megaenc.training.run_init import RunInit, identity_digest

STUDY = "study"
TWO = [
    {"size": "toy", "steps": 100, "mask": 0.4, "name": "base", "pretrain": {"weight_decay": 0.1}},
    {"after": "base", "steps": 60, "mask": 0.4, "name": "more"},
]
"""A model, and one that continues it."""
GRID = {"datasets": ["demo_sc"], "learning_rates": [1e-3], "seeds": 1}


def nodes(folder: Path, **changes) -> dict[str, StageRunner]:
    """Of a small manifest with changes, for the study in `folder`/study as it is."""
    study = folder / STUDY
    return build_graph(read_manifest(manifests.write(folder, **changes)), study).stages


def make(*made: StageRunner, identity: dict | None = None) -> None:
    """All that `made` makes; `identity`: more of that of runs."""
    for node in made:
        if isinstance(node, PretrainStage):
            make_run(node, node.model.steps, identity or {})
        elif isinstance(node, ExportStage):
            make_export(node)
        elif isinstance(node, FinetuneStage):
            make_results(node)
        else:
            node.prepare()
            for made in node.commands:
                made.touch()


def make_run(node: PretrainStage, step: int, identity: dict | None = None) -> None:
    """A run that has come to `step`, with the checkpoints that it keeps."""
    parent = read_identity(node.study / "runs" / node.parent)
    start = RunInit()
    if node.parent:
        at = node.branch_step or parent["train_iters"]
        start = RunInit(node.start, str(node.study / "runs" / node.parent), at, identity_digest(parent))
    facts = {"identity": node._identity() | start.identity | (identity or {}), "start": asdict(start)}
    checkpoints = node.folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    (node.folder / "run.json").write_text(json.dumps(facts))
    for kept in {step, *(kept for kept in node.checkpoint_steps if kept <= step)}:
        folder = checkpoints / f"iter_{kept:07d}"
        folder.mkdir()
        (folder / "weights").write_text("x")
        state = {"identity": facts["identity"], "step": kept, "files": {"weights": {"bytes": 1, "sha256": "0"}}}
        (folder / "state.json").write_text(json.dumps(state | {"sha256": json_digest(state)}))
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))


def make_export(node: ExportStage, weights: str = "weights", **facts) -> None:
    """An export of the run that is there."""
    node.folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"config.json": "{}", "model.safetensors": weights, "tokenizer.json": "{}"}.items():
        (node.folder / name).write_text(text)
    said = {"run": node.run, "step": node.step, "identity": identity_digest(read_identity(node.study / "runs" / node.run))}
    (node.folder / "conversion.json").write_text(json.dumps(said | facts))


def make_results(node: FinetuneStage) -> None:
    """Every result, of the model and the data that are there."""
    for training in node.training_sets:
        for dataset in training.datasets:
            for rate in node.flags["learning_rates"]:
                for seed in range(node.flags["seeds"]):
                    folder = result_files.run_folder(node.folder, training.family, dataset, training.train_on, rate, seed)
                    fingerprints = node._model_fingerprints() | node.data.fingerprints.get(dataset, {})
                    made = {"protocol": asdict(node.protocol), "fingerprints": fingerprints}
                    split = {"score": 0.5, "metrics": {}, "scores_i": [0.0, 1.0] * 5000}
                    result_files._write_json(folder / result_files.RESULTS, made | {"validation": split, "test": split})
