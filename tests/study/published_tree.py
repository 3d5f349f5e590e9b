"""A tree of results that has the published tables as its outcome, to the printed digit: for whatever reads trees.

    published_tree.write(folder)            46 models x 12 data sets x 3 rates x 5 seeds: 8,280 files in the study's own format

The scores of a cell's seeds have the printed mean and 1.96 * sd / sqrt(5). Those of a family's three sets are correlated so that
their mean by seed has the printed interval of the average too; `reachable` says for which averages such scores exist at all.
"""

import json
import math
from pathlib import Path

import numpy as np

from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import AVERAGE, Score
from megaenc.study.results.published import published

RATES = (2e-5, 5e-5, 1e-4)
SEEDS = 5
_SLACK = 0.0000499  # half of the last printed digit, as a fraction


def chosen_rate(model: str, dataset: str) -> float:
    """The rate whose validation scores are the best, not the same everywhere."""
    return RATES[(len(model) + len(dataset)) % len(RATES)]


def write(root: Path, examples: int = 10, models: list[str] | None = None) -> None:
    """Write the tree, or that of some models; `examples` scores a file, of which `score` is the mean.

    A rate that must not be chosen is better on test by a point, another one worse.
    """
    for setting in published().model_keys():
        for family in TaskFamily:
            model, scores = seed_scores(setting, family)
            for dataset, of_seeds in scores.items() if models is None or model in models else ():
                best = RATES.index(chosen_rate(model, dataset))
                place = root / model / family / dataset
                place.mkdir(parents=True)
                for at, rate in enumerate(RATES):
                    away = (at - best) % len(RATES)  # 0: the chosen one, 1: worse on both, 2: worse on validation alone
                    for seed, score in enumerate(of_seeds):
                        test = min(1.0, max(0.0, score + (0.0, -0.02, 0.01)[away]))
                        validation = (0.5, 0.4, 0.45)[away] + score / 10
                        train_on = "msmarco_pairs_" if family == TaskFamily.IR else ""
                        folder = place / f"{train_on}lr{format_learning_rate(rate)}_sd{seed}"
                        folder.mkdir()
                        splits = {"validation": split(validation, examples), "test": split(test, examples)}
                        (folder / "results.json").write_text(json.dumps(splits))


def split(score: float, examples: int) -> dict:
    """A split with this score, and examples as far above and below it as they can be: the same easy and hard ones everywhere."""
    ease = np.cos(np.pi * (np.arange(examples) + 0.5) / max(1, examples))  # adds up to zero
    return {"score": score, "scores_i": (score + min(score, 1 - score) * ease).tolist()}


def seed_scores(setting: ModelKey, family: TaskFamily) -> tuple[str, dict[str, np.ndarray]]:
    """The model's name and by data set float[5]: scores that print as the tables do, their average by seed included if it can."""
    cells, average = _printed(setting, family)
    means, spreads = np.array([(cell.mean, cell.half_width) for cell in cells]).T
    free = means > 0.001  # a model that never answers has no room below
    # Half of what the printed average lacks to be that of the printed means: both stay within their last digit.
    means = means + np.where(free, (average.mean - means.mean()) * 3 / free.sum() / 2, 0)
    wanted = 3 * average.half_width
    largest = spreads == spreads.max()
    if (lacking := wanted - spreads.sum()) > 0:
        spreads = spreads + np.where(free, min(lacking / free.sum(), _SLACK), 0)
    elif (lacking := 2 * spreads.max() - spreads.sum() - wanted) > 0:
        spreads = np.maximum(spreads + np.where(free, np.where(largest, -1, 1) * min(lacking / free.sum(), _SLACK), 0), 0)
    angles = _angles(spreads, wanted)
    sd = spreads * math.sqrt(SEEDS) / 1.96
    random = np.random.default_rng(0)
    for attempt in range(2000):
        first, second = _directions(random, attempt)
        scores = means[:, None] + sd[:, None] * (np.cos(angles)[:, None] * first + np.sin(angles)[:, None] * second)
        if scores.min() >= 0 and scores.max() <= 1:
            break
    else:
        raise AssertionError(f"{cells[0].model} {family}: no five scores from 0 to 1 are found that print so")
    return cells[0].model, {cell.dataset: of_seeds for cell, of_seeds in zip(cells, scores, strict=True)}


def reachable(setting: ModelKey, family: TaskFamily) -> bool:
    """Whether any scores by seed print as the three sets and as the average do.

    The sd of the average is between (largest - others) / 3, or 0, and the mean of the three, within what rounding leaves open.
    """
    cells, average = _printed(setting, family)
    low, high = (np.array([cell.half_width for cell in cells]) + side * _SLACK for side in (-1, 1))
    low = np.maximum(low, 0)
    least = max(0.0, max(2 * low[at] - (high.sum() - high[at] + low[at]) for at in range(3)))
    return least - 3 * _SLACK <= 3 * average.half_width <= high.sum() + 3 * _SLACK


def _printed(setting: ModelKey, family: TaskFamily) -> tuple[list[Score], Score]:
    cells = [published().find(setting, dataset, family) for dataset in STUDY_DATASETS[family]]
    return cells, published().find(setting, AVERAGE, family)


def _angles(lengths: np.ndarray, wanted: float) -> np.ndarray:
    """float[3]: directions of three vectors of these lengths in a plane, whose sum is as long as is wanted or as can be.

    From all alike they turn towards where they cancel, and the sum is as long as wanted on the way: found by halving.
    """
    largest = int(lengths.argmax())
    if 2 * lengths.max() >= lengths.sum():
        end = np.full(3, math.pi)
        end[largest] = 0.0
    else:  # a triangle
        turn = math.acos((lengths[2] ** 2 - lengths[0] ** 2 - lengths[1] ** 2) / (2 * lengths[0] * lengths[1]))
        last = -lengths[0] - lengths[1] * np.exp(1j * turn)
        end = np.array([0.0, turn, np.angle(last)])
    near, far = 0.0, 1.0
    for _ in range(60):
        middle = (near + far) / 2
        longer = abs((lengths * np.exp(1j * middle * end)).sum()) > wanted
        near, far = (middle, far) if longer else (near, middle)
    return near * end


def _directions(random: np.random.Generator, attempt: int) -> tuple[np.ndarray, np.ndarray]:
    """Two float[5] at right angles, each with mean 0 and sd 1; every other time the first has one seed far above the others."""
    first = random.standard_normal(SEEDS) if attempt % 2 else np.array([1.0, 0, 0, 0, 0]) + 0.1 * random.random(SEEDS)
    first = first - first.mean()
    second = random.standard_normal(SEEDS)
    second = second - second.mean()
    second = second - first * (first @ second) / (first @ first)
    return first / first.std(ddof=1), second / second.std(ddof=1)
