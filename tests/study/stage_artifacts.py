"""Output directories of study stages, written without running them."""

import json
from dataclasses import asdict
from pathlib import Path

import manifests
import pytest

from megaenc.finetune.model.fingerprint import (
    compute_model_fingerprints,
    compute_tokenizer_fingerprint,
)
from megaenc.finetune.results import files as result_files
from megaenc.study.plan.dag import build_graph
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.pretrain_stage import PretrainStage
from megaenc.study.run.stage import ExportStage, StageRunner, StaleArtifactError, read_identity
from megaenc.training.checkpoint_dir import json_digest
from megaenc.training.run_init import RUN_FORMAT, RunInit, identity_digest

STUDY = "study"
TWO = [
    manifests.TOY | {"steps": 100, "name": "base", "pretrain": {"weight_decay": 0.1}},
    {"after": "base", "steps": 60, "mask": 0.4, "name": "more"},
]
"""Entries of a model and one that continues it."""
GRID = {"datasets": ["demo_sc"], "learning_rates": [1e-3], "seeds": 1}


def build_stages(directory: Path, **changes) -> dict[str, StageRunner]:
    """Return the stages of a small manifest with changes.

    The study is in `directory`/study.
    """
    study = directory / STUDY
    return build_graph(manifests.read(directory, **changes), study).stages


def make(*stages: StageRunner, identity: dict | None = None) -> None:
    """Write the output of `stages`; `identity`: further entries of the runs' identity."""
    for stage in stages:
        if isinstance(stage, PretrainStage):
            make_run(stage, stage.model.steps, identity or {})
        elif isinstance(stage, ExportStage):
            make_export(stage)
        elif isinstance(stage, FinetuneStage):
            make_results(stage)
        else:
            stage.prepare()
            for output in stage.commands:
                output.touch()


def make_run(stage: PretrainStage, step: int, identity: dict | None = None) -> None:
    """Write a run that has reached `step`, with its checkpoints."""
    parent = read_identity(stage.study / "runs" / stage.parent)
    start = RunInit()
    if stage.parent:
        at = stage.branch_step or parent["train_iters"]
        start = RunInit(
            stage.start, str(stage.study / "runs" / stage.parent), at, identity_digest(parent)
        )
    identity = stage._identity() | start.identity | (identity or {})
    facts = {"format": RUN_FORMAT, "identity": identity, "start": asdict(start)}
    checkpoints = stage.directory / "checkpoints"
    checkpoints.mkdir(parents=True)
    (stage.directory / "run.json").write_text(json.dumps(facts))
    for saved_step in {
        step,
        *(saved_step for saved_step in stage.checkpoint_steps if saved_step <= step),
    }:
        directory = checkpoints / f"iter_{saved_step:07d}"
        directory.mkdir()
        (directory / "weights").write_text("x")
        state = {
            "identity": facts["identity"],
            "step": saved_step,
            "files": {"weights": {"bytes": 1, "sha256": "0"}},
        }
        (directory / "state.json").write_text(json.dumps(state | {"sha256": json_digest(state)}))
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))


def make_export(stage: ExportStage, weights: str = "weights", **facts) -> None:
    """Write an export of the existing run."""
    stage.directory.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "config.json": "{}",
        "model.safetensors": weights,
        "tokenizer.json": "{}",
    }.items():
        (stage.directory / name).write_text(text)
    certificate = {
        "run": stage.run,
        "step": stage.step,
        "identity": identity_digest(read_identity(stage.study / "runs" / stage.run)),
    }
    (stage.directory / "conversion.json").write_text(json.dumps(certificate | facts))


def make_results(stage: FinetuneStage) -> None:
    """Write every result, for the existing export and data."""
    training = stage.training
    [weights] = compute_model_fingerprints([str(stage._export)], str(stage.directory.parent))
    model = {"model": weights, "tokenizer": compute_tokenizer_fingerprint(str(stage._export))}
    for dataset in training.datasets:
        for rate in stage.flags["learning_rates"]:
            for seed in range(stage.flags["seeds"]):
                directory = result_files.run_directory(
                    stage.directory, training.family, dataset, training.train_on, rate, seed
                )
                fingerprints = model | stage.data.fingerprints.get(dataset, {})
                origin = {"protocol": asdict(stage.protocol), "fingerprints": fingerprints}
                split = {"score": 0.5, "metrics": {}, "scores_i": [0.0, 1.0] * 5000}
                result_files._write_json(
                    directory / result_files.RESULTS, origin | {"validation": split, "test": split}
                )


def assert_stale(stage: StageRunner, words: str) -> None:
    """Fail unless a stage refuses its output with an error that matches `words`."""
    with pytest.raises(StaleArtifactError, match=words):
        stage.check()
