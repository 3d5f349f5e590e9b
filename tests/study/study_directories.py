"""A study that never ran: results and runs whose scores follow a rule."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from run_directories import write_run

from megaenc.study.manifest.model_key import ModelKey, format_model_name, parse_model_name

RATES = (2e-4, 1e-3)
SEEDS = 3
EXAMPLES = 40
DATASETS = {"demo_sc": "SC", "demo_qa": "QA"}
_METRICS = {"SC": ("accuracy",), "QA": ("exact_match", "f1")}


_MODELS = (
    *(
        "mini-mlm40-300",
        "mini-clm-75-mlm40-300",
        "mini-clm-150-mlm40-300",
        "mini-clm-225-mlm40-300",
        "mini-clm-300",
    ),
    *(
        "mini-mlm20-300",
        "mini-clm-75-mlm20-300",
        "mini-mlm40-150",
        "mini-clm-75-mlm40-150",
        "mini-clm-150",
    ),
    *(
        "mini-clm-dec300-mlm40-330",
        "mini-clm-dec300-mlm40-450",
        "mini-mlm40-dec300-mlm40-330",
        "mini-mlm40-dec300-mlm40-450",
    ),
    *("mini-clm-300-50", "mini-clm-300-150", "mini-mlm40-300-50", "mini-mlm40-300-150"),
)


def settings() -> dict[str, ModelKey]:
    """A study in miniature: every figure has something to show."""
    return {name: parse_model_name(name) for name in _MODELS}


def ability(setting: ModelKey) -> float:
    """More steps are better, and a quarter of CLM best."""
    return 0.5 + 0.2 * min(1.0, setting.steps / 450) - 0.1 * abs(setting.clm_share - 0.25)


def write_results(root: Path, models: Mapping[str, ModelKey]) -> Path:
    """Write the tree of `megaenc finetune grid`, with one collapse at the second rate.

    There are SEEDS runs of each model, set and rate.
    """
    random = np.random.default_rng(0)
    for name, setting in models.items():
        for dataset, family in DATASETS.items():
            ease = random.normal(size=EXAMPLES)
            for number, rate in enumerate(RATES):
                for seed in range(SEEDS):
                    directory = root / name / family / dataset / f"lr{rate:.0e}_sd{seed}"
                    directory.mkdir(parents=True)
                    mean = (
                        ability(setting)
                        - 0.05 * number * (1 + (not setting.clm_steps))
                        + 0.01 * random.normal()
                    )
                    right = 1 / (1 + np.exp(-(np.log(mean / (1 - mean)) + ease)))
                    collapsed = (
                        "constant prediction 0"
                        if number == 1 and seed == 0 and not setting.clm_steps
                        else None
                    )
                    (directory / "results.json").write_text(
                        json.dumps(_result(family, right, collapsed))
                    )
                    (directory / "timing.json").write_text(
                        json.dumps({"loading": 1.0, "training": 6.0, "evaluation": 2.0})
                    )
    return root


def _result(family: str, right: np.ndarray, collapsed: str | None) -> dict:
    metrics = dict.fromkeys(_METRICS[family], float(right.mean()))
    split = {
        "score": float(right.mean()),
        "metrics": metrics,
        "collapsed": collapsed,
        "baseline": {"score": 0.5},
    }
    return {name: {**split, "scores_i": right.tolist()} for name in ("validation", "test")}


def write_result(directory: Path, score: float, **more) -> None:
    """The file of one run with two examples, and more of what a split has."""
    directory.mkdir(parents=True)
    split = {"score": score, "scores_i": [score / 2, score * 1.5], **more}
    (directory / "results.json").write_text(json.dumps({"validation": split, "test": split}))


def write_runs(root: Path, models: Mapping[str, ModelKey]) -> Path:
    """Write a run directory for every model that is no intermediate checkpoint.

    Two-stage models branch off the CLM run of 300 steps.
    """
    for name, one in models.items():
        if not one.decayed:
            continue
        masked = f"mlm(mask={one.mask_ratio})"
        before = one.clm_steps + one.mlm_steps
        if one.cpt_mlm_steps:
            parent = format_model_name(
                replace(one, cpt_mlm_steps=0, mask_ratio=one.mask_ratio if one.mlm_steps else None)
            )
            start = {"kind": "weights", "run": f"/made/elsewhere/runs/{parent}", "at": before}
            write_run(
                root / name,
                one.cpt_mlm_steps,
                phases=[(masked, one.cpt_mlm_steps)],
                start=start,
                every=5,
            )
        elif one.clm_steps and one.mlm_steps:
            start = {"kind": "branch", "run": "/made/elsewhere/runs/mini-clm-300"}
            phases = [("clm", one.clm_steps), (masked, before)]
            write_run(root / name, before, phases=phases, begun=one.clm_steps, start=start, every=5)
        else:
            write_run(
                root / name, before, phases=[("clm" if one.clm_steps else masked, before)], every=5
            )
    return root
