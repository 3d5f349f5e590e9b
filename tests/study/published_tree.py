"""Tree of results that gives the published tables, to the printed digit.

    published_tree.write(directory)

It has 46 models x 12 data sets x 3 rates x 5 seeds: 8,280 files in the study's own format. The
scores of a cell's seeds have the printed mean and 1.96 * sd / sqrt(5), and the averages of a family
the printed mean.
"""

import json
from pathlib import Path

import numpy as np

from megaenc.finetune.config import format_learning_rate
from megaenc.finetune.examples import STUDY_FAMILIES, TaskFamily
from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.manifest.model_key import ModelKey, format_model_name
from megaenc.study.results.evidence import AVERAGE
from megaenc.study.results.published import published

RATES = (2e-5, 5e-5, 1e-4)
SEEDS = 5
# Of the seeds, whose standard deviation is the root of five
_PATTERN = np.array([4, -1, -1, -1, -1])


def chosen_rate(model: str, dataset: str) -> float:
    """The rate whose validation scores are the best, not the same everywhere."""
    return RATES[(len(model) + len(dataset)) % len(RATES)]


def write(root: Path, models: list[str] | None = None, rates: int = 3) -> None:
    """Write the tree, or that of some models, with the chosen rate and others.

    The second is worse on validation and on test, the third better on test by a point.
    """
    for key in published().model_keys():
        model = format_model_name(key)
        if models is not None and model not in models:
            continue
        for family in STUDY_FAMILIES:
            for dataset, of_seeds in seed_scores(key, family).items():
                best = RATES.index(chosen_rate(model, dataset))
                _write_set(root / model / family / dataset, best, of_seeds, rates)


def _write_set(place: Path, best: int, of_seeds: np.ndarray, rates: int) -> None:
    train_on = "msmarco_pairs_" if place.parent.name == TaskFamily.IR else ""
    for away in range(rates):
        rate = format_learning_rate(RATES[(best + away) % len(RATES)])
        for seed, score in enumerate(of_seeds):
            test = min(1.0, max(0.0, score + (0.0, -0.02, 0.01)[away]))
            validation = (0.5, 0.4, 0.45)[away] + score / 10
            directory = place / f"{train_on}lr{rate}_sd{seed}"
            directory.mkdir(parents=True)
            splits = {"validation": split(validation), "test": split(test)}
            (directory / "results.json").write_text(json.dumps(splits))


def split(score: float) -> dict:
    """Return a split with this score and ten examples, as easy and hard as possible."""
    ease = np.cos(np.pi * (np.arange(10) + 0.5) / 10)  # adds up to zero
    return {"score": score, "scores_i": (score + min(score, 1 - score) * ease).tolist()}


def seed_scores(key: ModelKey, family: TaskFamily) -> dict[str, np.ndarray]:
    """Return float[5] by data set: scores that print as the tables do.

    One seed is above the others, in each set another.
    """
    cells = {dataset: published().find(key, dataset, family) for dataset in STUDY_DATASETS[family]}
    # Half of what the printed average lacks to be that of the printed means: both stay within their
    # last digit.
    lack = published().find(key, AVERAGE, family).mean - np.mean(
        [cell.mean for cell in cells.values()]
    )
    scores = {}
    for at, (dataset, cell) in enumerate(cells.items()):
        mean = cell.mean + (lack / 2 if cell.mean > 0.001 else 0)
        scores[dataset] = mean + cell.half_width / 1.96 * np.roll(_PATTERN, at)
    return scores
