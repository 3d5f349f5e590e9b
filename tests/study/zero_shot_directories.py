"""Zero-shot evaluations of a study, as `megaenc embed` writes them.

Scores follow a rule.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from megaenc.embed.config import RULES
from megaenc.embed.evaluate import METRICS, RetrievalSet, build_rows
from megaenc.embed.evaluation_file import format_evaluation
from megaenc.study.run.embed_stage import PRETRAINED, EmbedStage

QUERIES = 30
DATASETS = ("sci", "demo_ir")


def write_evaluation(
    file: Path,
    values: Mapping[str, Mapping[str, np.ndarray]],
    origin: Mapping[str, dict] | None = None,
) -> None:
    """Write an evaluation's JSON file.

    `values` are NDCG@10, float64[queries], by model and data set.
    """
    rows = []
    for model, by_set in values.items():
        for name, scores in by_set.items():
            count = len(scores)
            data = RetrievalSet(name, [""] * count, [""] * 50, [""] * 50, [{}] * count)
            rows += build_rows(
                data, model, dict(zip(METRICS, (scores, np.minimum(1.0, 2 * scores)), strict=True))
            )
    names = {row.dataset for row in rows}
    known = {
        "queries": {name: [f"q{at}" for at in range(QUERIES)] for name in names},
        "data": dict.fromkeys(names, "digest"),
    }
    known |= {"settings": {}, "fingerprints": {}}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(format_evaluation(rows, {}, known | dict(origin or {})))


def write_study(root: Path, ability: Mapping[str, float], seeds: int = 3) -> Path:
    """Write `root`/embed of models by name, with trained models and baselines.

    `ability` is the mean score of each; training adds 0.1.
    """
    random = np.random.default_rng(0)
    ease = {name: 0.1 * random.standard_normal(QUERIES) for name in DATASETS}
    baselines = {
        model: {name: np.full(QUERIES, mean) for name in DATASETS}
        for model, mean in (("random", 0.02), ("BM25", 0.55))
    }

    def draw(mean: float) -> dict[str, np.ndarray]:
        """Return the scores of each set around `mean`, with noise of run and query."""
        run = 0.003 * random.standard_normal()
        return {
            name: np.clip(mean + run + ease[name] + 0.01 * random.standard_normal(QUERIES), 0, 1)
            for name in DATASETS
        }

    for model, mean in ability.items():
        write_evaluation(
            root / "embed" / model / "pretrained.json", {**baselines, PRETRAINED: draw(mean)}
        )
        for seed in range(seeds):
            write_evaluation(
                root / "embed" / model / f"seed-{seed}.json", {f"seed-{seed}": draw(mean + 0.1)}
            )
    return root


def make_training(stage: EmbedStage, seed: int, **config) -> None:
    """Write the directory of a contrastive training with `seed`.

    `config` has settings other than the manifest's.
    """
    directory = stage.directory / f"seed-{seed}"
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "config.json": "{}",
        "model.safetensors": f"trained {seed}",
        "tokenizer.json": "{}",
    }.items():
        (directory / name).write_text(text)
    training = replace(
        stage.data.entry.training,
        seed=seed,
        pooling="mean",
        attention="bidirectional",
        precision="fp32",
    )
    blank = {name: getattr(training, name) or "" for name in ("query_prefix", "document_prefix")}
    details = {
        "config": asdict(training) | blank | config,
        "fingerprints": _fingerprints(stage.study / "hf" / stage.name),
    }
    (directory / "training.json").write_text(json.dumps(details))


def make_evaluation(stage: EmbedStage, name: str) -> None:
    """Write the evaluation of the model `name` of a stage: pretrained, seed-0, ..."""
    sets = {dataset: np.linspace(0, 1, QUERIES) for dataset in stage.data.directories}
    values = {"random": sets, "BM25": sets, name: sets} if name == PRETRAINED else {name: sets}
    settings = {"query_prefix": None, "document_prefix": None, "max_length": 0, "truncate_dim": 0}
    settings |= {"attention": "", "precision": ""}
    origin = {
        "settings": {
            rule: ({"special_tokens": "", **settings, **stage._rules(name)})[rule] for rule in RULES
        },
        "fingerprints": {name: _fingerprints(stage.models[name])},
        "data": stage.data.fingerprints,
    }
    write_evaluation(stage._file(name), values, origin=origin)


def _fingerprints(directory: Path) -> dict[str, str]:
    """Return the fingerprints of a model's directory, without the stamp."""
    from megaenc.finetune.model.fingerprint import (
        compute_model_fingerprints,
        compute_tokenizer_fingerprint,
    )

    [weights] = compute_model_fingerprints([str(directory)], str(directory.parent))
    return {"model": weights, "tokenizer": compute_tokenizer_fingerprint(str(directory))}
