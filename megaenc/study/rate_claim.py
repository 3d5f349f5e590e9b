"""The claim that CLM is less sensitive to the fine-tuning rate: how far the rates are apart beyond chance, by objective."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from megaenc.study import statistics
from megaenc.study.claim_tests import Draft, directional
from megaenc.study.comparisons import Line
from megaenc.study.models import Models
from megaenc.study.score import Score
from megaenc.study.setups import is_average


def sensitivity(models: Models) -> Draft:
    """3: the variance between rates, by data set, MLM less CLM, as a difference of standard deviations."""
    draft = Draft(
        3,
        "",
        "CLM is less sensitive to the fine-tuning rate",
        f"Are the mean scores of {models.mlm} further apart over the learning rates than those of CLM?",
        "results of two or more seeds at two or more learning rates, of an MLM and a CLM model of one size and as many steps",
    )
    lines, variances, failed, unfinished, floors = [], [], [0, 0], 0, set()
    for size, by_seed in models.final().items():
        for family, dataset in models.evidence.datasets():
            terms, values = {}, {}
            for seed, pair in by_seed.items():
                sides = [models.evidence.find(setting, dataset, family) for setting in pair]
                if is_average(dataset) or None in sides or (grids := _grids(sides)) is None:
                    continue
                terms[seed], values[seed] = [(1.0, sides[0]), (-1.0, sides[1])], grids
                failed = [before + _failed(side) for before, side in zip(failed, sides, strict=True)]
                floors |= {side.floor is None for side in sides if side.rates_failed}
                unfinished += len({rate for side in sides for rate in {*side.rates, *side.rates_failed}}) - grids[0].shape[0]
            if values:
                left, right, apart = _values(values)
                lines.append(Line((models.mlm, models.clm), size, family, dataset, size, terms, left, right))
                variances.append(apart)
    notes = []
    if lines:
        spreads = [100 * math.sqrt(max(0.0, float(np.mean(side)))) for side in zip(*variances, strict=True)]
        notes = [f"standard deviation over the rates, without what seeds do: {spreads[0]:.2f} and {spreads[1]:.2f} points"]
    if any(failed):
        names = " and ".join(f"{count} of {name}" for count, name in zip(failed, (models.mlm, models.clm), strict=True) if count)
        floor = "the worst run there" if True in floors else "the trivial baseline"
        notes.append(f"failed runs count as {floor}: {names}")
    if unfinished:
        notes.append(f"rates left out, as not finished with every seed of both: {unfinished}")
    return directional(draft, lines, 0, "; ".join(notes))


def _failed(score: Score) -> int:
    return sum(map(len, score.rates_failed.values()))


def _grids(sides: Sequence[Score]) -> list[np.ndarray] | None:
    """float[R, S] of each side at the rates that both have done with all of their seeds; None below two rates or seeds.

    A run that failed scores what the family's trivial baseline does; where results do not say that, the worst of both sides.
    """
    scores = [score for side in sides for by_seed in side.rates.values() for score in by_seed.values()]
    grids: list[Mapping[float, Mapping[int, float]]] = []
    for side in sides:
        floor = min(scores, default=0.0) if side.floor is None else side.floor
        every = {rate: dict.fromkeys(side.rates_failed.get(rate, ()), floor) for rate in {*side.rates, *side.rates_failed}}
        every = {rate: {**failed, **side.rates.get(rate, {})} for rate, failed in every.items()}
        most = max(map(len, every.values()), default=0)
        grids.append({rate: by_seed for rate, by_seed in every.items() if len(by_seed) == most})
    rates = sorted(set(grids[0]) & set(grids[1]))
    if len(rates) < 2:
        return None
    seeds = sorted(set.intersection(*(set(grid[rate]) for grid in grids for rate in rates)))
    if len(seeds) < 2:
        return None
    return [np.array([[grid[rate][seed] for seed in seeds] for rate in rates]) for grid in grids]


_BySeed = dict[int, dict[int, float]]


def _values(grids: Mapping[int, Sequence[np.ndarray]]) -> tuple[_BySeed, _BySeed, tuple[float, float]]:
    """Of both sides, by seed of the pretraining and number of the fine-tuning seed, in points; and their variances between rates.

    In points, as a difference of variances over twice the root mean square spread of both, noise included, is nearly that of
    standard deviations; noise moves what it is divided by for both sides alike.
    """
    whole = float(np.mean([np.var(grid, axis=0, ddof=1).mean() for pair in grids.values() for grid in pair]))
    scale = 2 * math.sqrt(whole) if whole > 0 else 1.0
    found: tuple[_BySeed, _BySeed] = {}, {}
    means: tuple[list[float], list[float]] = [], []
    for seed, pair in grids.items():
        for side, grid in enumerate(pair):
            values = statistics.between(grid)
            found[side][seed] = dict(enumerate(values / scale))
            means[side].append(float(values.mean()))
    return found[0], found[1], (float(np.mean(means[0])), float(np.mean(means[1])))
