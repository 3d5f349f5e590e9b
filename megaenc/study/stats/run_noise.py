"""Noise between pretraining runs of one recipe.

It is given, or estimated from the curves of scores over mask ratios.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megaenc.errors import InputError
from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import AVERAGE, Score
from megaenc.study.results.groups import ZERO_SHOT, is_average, is_mlm_from_scratch
from megaenc.study.stats.comparisons import ModelSelector

Place = tuple[str, str]
"""Task family and data set."""


@dataclass(frozen=True)
class RunNoise:
    """Noise of scores, as fractions, between pretraining runs of one recipe.

    `estimate_run_noise` builds it from `residuals`, float[K] by (task family, data set), with the
    `finetune_variances` that they contain and K as `df`, the degrees of freedom. `parse_run_noise`
    builds it from `given`, standard deviations by task family, with an infinite `df`; then
    residuals do not count for any family. With neither, as in UNKNOWN_NOISE, variances are NaN.
    `source` is text on the origin for the report.
    """

    residuals: Mapping[Place, np.ndarray] = field(default_factory=dict)
    """float[K] by (task family, data set), as fractions, in the same order for all"""
    finetune_variances: Mapping[Place, float] = field(default_factory=dict)
    """part of the residuals' variance that is due to fine-tuning"""
    df: float = math.nan
    """degrees of freedom: K, or infinity if given"""
    source: str = ""
    given: Mapping[str, float] = field(default_factory=dict)
    """given standard deviations by task family, as fractions, for each of its data sets; they
    replace all residuals"""

    def variance(self, weights: Mapping[Place, float]) -> tuple[float, float]:
        """Return the variance of a weighted sum of scores, and its fine-tuning part.

        Both are in squared fractions, estimated from the residuals; the variance between runs is
        the first less the second. Given standard deviations replace the residuals and count as
        fully correlated; their fine-tuning part is 0. The result is (NaN, NaN) if a data set has no
        residuals, and (NaN, 0) if a task family has no given standard deviation.

        Args:
            weights: Weight of each score by (task family, data set).
        """
        if self.given:
            std = sum(
                abs(weight) * self.given.get(family, math.nan)
                for (family, _), weight in weights.items()
            )
            return std**2, 0.0
        if not set(weights) <= set(self.residuals):
            return math.nan, math.nan
        residuals = sum(weight * self.residuals[place] for place, weight in weights.items())
        variance = float(np.mean(np.square(residuals)))
        finetuning = math.fsum(
            self.finetune_variances[place] * weight**2 for place, weight in weights.items()
        )
        return variance, min(variance, finetuning)

    def describe(self, families: Sequence[str]) -> str:
        """Return text such as "0.50 points on SC, 0.10 on TC, given".

        The numbers are standard deviations between runs, without the part of fine-tuning, of the
        mean over the data sets of a family; the end is `source`. Families without an estimate are
        left out; at least one must have it.

        Args:
            families: Codes of task families, such as SC.
        """
        parts = []
        for family in families:
            if family not in self.given and all(
                family != residual_family for residual_family, _ in self.residuals
            ):
                continue
            places = [
                (family, name)
                for residual_family, name in self.residuals
                if residual_family == family and not is_average(name)
            ]
            weights = {place: 1 / len(places) for place in places} or {(family, AVERAGE): 1.0}
            variance, finetuning = self.variance(weights)
            parts.append(
                f"{100 * math.sqrt(variance - finetuning):.2f}{' points' * (not parts)} on {family}"
            )
        return f"{', '.join(parts)}, {self.source}"


UNKNOWN_NOISE = RunNoise()
"""Noise that is neither given nor estimated; every test with it has p NaN."""


def parse_run_noise(texts: Sequence[str]) -> RunNoise | None:
    """Parse `--run-noise` texts FAMILY=POINTS, such as SC=0.5.

    Points are a standard deviation between pretraining runs, for scores from 0 to 100; the result
    has fractions, here 0.005. Of several texts with the same family, the last counts. None without
    any text.

    Args:
        texts: Texts with the families SC, TC, QA, IR or ZS.

    Raises:
        InputError: A text has another family or no finite number from 0.
    """
    given = {}
    for text in texts:
        family, _, points = text.partition("=")
        try:
            value = float(points)
        except ValueError:
            value = math.nan
        if family not in [*map(str, STUDY_DATASETS), ZERO_SHOT] or not (
            math.isfinite(value) and value >= 0
        ):
            raise InputError(
                f"--run-noise {text}: expected FAMILY=POINTS, such as SC=0.5, with SC, TC, QA, IR "
                "or ZS"
            )
        given[family] = value / 100
    return RunNoise(df=math.inf, source="given", given=given) if given else None


def estimate_run_noise(models: ModelSelector) -> RunNoise:
    """Estimate the noise between runs from MLM scores over the mask ratios.

    It is the residuals around smooth curves: each size has its own line, and all sizes share the
    bend (the quadratic term). A curve has the finished MLM-only models of a size with the largest
    number of steps at which three or more ratios have one, without models that collapsed on any
    data set; of several pretraining seeds of a ratio, the last in `models.model_keys` counts. Data
    sets on which a model of any curve lacks a score are left out. The result is UNKNOWN_NOISE if
    there are no residuals.
    """
    curves: dict[str, dict[float, ModelKey]] = {}
    collapsed = {score.model_key for score in models.evidence.scores if score.is_collapsed}
    mlm_only = [
        key for key in models.model_keys if is_mlm_from_scratch(key) and key not in collapsed
    ]
    for key in sorted(mlm_only, key=lambda key: -key.steps):
        ratios = {
            peer.mask_ratio: peer
            for peer in mlm_only
            if (peer.size, peer.steps) == (key.size, key.steps)
        }
        if len(ratios) > 2:
            curves.setdefault(key.size, dict(sorted(ratios.items())))
    basis = _residual_basis([list(curve) for curve in curves.values()])
    residuals: dict[Place, np.ndarray] = {}
    variances: dict[Place, float] = {}
    for family, name in models.evidence.datasets() if basis.size else ():
        scores = {
            key: models.evidence.find(key, name, family)
            for curve in curves.values()
            for key in curve.values()
        }
        if None not in scores.values():
            place = str(family), name
            residuals[place] = basis.T @ np.array([score.mean for score in scores.values()])
            variances[place] = float(
                np.mean([_finetune_variance(score) for score in scores.values()])
            )
    if not residuals:
        return UNKNOWN_NOISE
    df = basis.shape[1]
    source = f"estimated from {df} residual{'s' * (df > 1)} of the curves over mask ratios"
    return RunNoise(residuals, variances, df, source)


def _residual_basis(curves: Sequence[Sequence[float]]) -> np.ndarray:
    """Return orthonormal columns, float[N, K], that project N scores onto K residuals.

    Scores are by size and mask ratio.
    """
    if not curves:
        return np.zeros((0, 0))
    size = np.repeat(np.eye(len(curves)), list(map(len, curves)), axis=0)
    ratios = np.array([ratio for curve in curves for ratio in curve])[:, None]
    design = np.hstack([size, size * ratios, ratios**2])
    return np.linalg.qr(design, mode="complete")[0][:, np.linalg.matrix_rank(design) :]


def _finetune_variance(score: Score) -> float:
    """Return the variance of a model's mean score due to fine-tuning seeds.

    It is 0 if it is unknown.
    """
    if len(score.seed_scores) > 1:
        return float(np.var(list(score.seed_scores.values()), ddof=1)) / len(score.seed_scores)
    return 0.0 if score.half_width is None else (score.half_width / 1.96) ** 2
