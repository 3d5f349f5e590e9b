"""Tests of single and pooled contrasts, paired by seeds and examples.

Weights of a score that several pooled contrasts share add up before the test. docs/study-claims.md
has the rules and their false alarm rates.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megaenc.study.results.evidence import Score
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison, Contrast, Terms, Unit
from megaenc.study.stats.inference import TestResult, VarianceComponents
from megaenc.study.stats.run_noise import RunNoise

# tables are rounded to 0.01 percent: an interval of 0.00 may be half a digit
_PRINTED_DIGIT = 0.00005

WeightedContrasts = Sequence[tuple[float, Contrast]]
Seeds = tuple[int, ...]
"""Pretraining seeds; empty for contrasts with one pretraining run each."""
ExampleScores = Mapping[tuple[str, str], np.ndarray]
"""float[S, N] by family and data set; empty if example scores are missing or differ in number."""
BetweenRunVariances = Mapping[str, Mapping[Seeds, float]]
"""Variance of a contrast between pretraining runs, by family ("" for any other) and by the seeds it
was estimated from."""


@dataclass(frozen=True)
class ScoreRows:
    """Summed scores of the left and the right side, by seed and by example.

    `compare_contrasts` builds it. `left` and `right` are float[S], in the unit of the scores times
    their weights, by pretraining seed, or by fine-tuning seed if each contrast has only one run.
    `examples` are the weighted differences of example scores, float[S, N], by (task family, data
    set), without data sets for which a model has no example scores or another number of them.
    """

    left: np.ndarray
    right: np.ndarray
    examples: ExampleScores
    """example scores of the left less the right side"""

    @property
    def scores(self) -> np.ndarray:
        """Return the scores of the left less the right side, float[S] by seed."""
        return self.left - self.right


def between_run_variance(contrasts: Sequence[Contrast]) -> BetweenRunVariances:
    """Return the variance of contrasts between their pretraining runs, by task family.

    Each family has a dict from a tuple of pretraining seeds to its part of the variance: the mean
    over the family's contrasts with these seeds, divided by the family's number of tuples, so that
    the parts add up to the mean variance, in squared units of the scores. "" stands for all
    families together. Contrasts with one pretraining run or with a collapsed side do not count;
    families that have no other contrasts are left out. The result is the `borrowed` of
    `compare_contrasts`.
    """
    variances: dict[str, dict[Seeds, list[float]]] = defaultdict(lambda: defaultdict(list))
    for contrast in contrasts:
        seeds = contrast.pretraining_seeds
        if len(seeds) < 2 or contrast.collapsed:
            continue
        rows = _sum_contrasts([(1.0, contrast)], seeds, False)
        if rows is not None:
            for family in (contrast.family, ""):
                variances[family][seeds].append(float(np.var(rows.scores, ddof=1)))
    return {
        family: {
            seeds: float(np.mean(seed_variances)) / len(by_seeds)
            for seeds, seed_variances in by_seeds.items()
        }
        for family, by_seeds in variances.items()
    }


def compare_contrasts(
    contrasts: Sequence[Contrast],
    borrowed: BetweenRunVariances,
    weights: Sequence[float] | None = None,
    unit: Unit = "points",
    noise: RunNoise | None = None,
) -> Comparison:
    """Test one contrast, or a weighted sum of several, against 0.

    `p_adjusted` of the result is the uncorrected p and `verdict` "not resolved"; the caller sets
    both. Difference and p are NaN if the scores have no fine-tuning seed in common.

    Args:
        contrasts: At least one.
        borrowed: Variances by `between_run_variance`, for contrasts with one pretraining run each.
        weights: A weight per contrast, in order, not all 0; None for their mean.
        unit: Unit of the result. Scores are fractions for "points", else already in `unit`.
        noise: Noise between runs, used only if all contrasts have one run and `borrowed` is empty,
            or if scores are published; None to test these models only.
    """
    weights = weights or [1 / len(contrasts)] * len(contrasts)
    pool = [
        (weight, contrast) for weight, contrast in zip(weights, contrasts, strict=True) if weight
    ]
    result, effect, has_borrowed_variance = _test_pool(pool, borrowed, noise)
    run_count = min(len(contrast.pretraining_seeds) for _, contrast in pool)
    places = {contrast.where for contrast in contrasts}
    families = {contrast.family for contrast in contrasts}
    datasets = {contrast.dataset for contrast in contrasts}
    where = contrasts[0].where if len(places) == 1 else f"{len(places)} pairs"
    collapsed = contrasts[0].collapsed if len(contrasts) == 1 else ()
    left, right = contrasts[0].names
    return Comparison(
        left=left,
        right=right,
        where=f"{where} ({' and '.join(collapsed)} collapsed)" if collapsed else where,
        family=contrasts[0].family if len(families) == 1 else "",
        dataset=contrasts[0].dataset if len(families) == 1 and len(datasets) == 1 else "all",
        test=result,
        p=result.p,
        p_adjusted=result.p,
        effect=effect,
        pretraining_runs=1 if math.isnan(result.difference) else run_count,
        has_borrowed_variance=has_borrowed_variance,
        collapsed=collapsed,
        unit=unit,
    )


def _test_pool(
    pool: WeightedContrasts, borrowed: BetweenRunVariances, noise: RunNoise | None
) -> tuple[TestResult, float, bool]:
    """Test a weighted sum of contrasts against 0.

    Contrasts with the same pretraining seeds are summed by seed; such groups, and the contrasts
    with one pretraining run, are combined by Welch and Satterthwaite. The latter vary between
    fine-tuning seeds and by the `borrowed` variance, or by `noise` if nothing can be borrowed.
    Published scores have neither seeds nor examples and get Welch's test of their intervals.

    Returns:
        The result, its effect size (NaN if unknown), and whether it has borrowed variance. The
        difference is NaN if the scores have no fine-tuning seed in common.
    """
    if not all(
        score.seed_scores
        for _, contrast in pool
        for terms in contrast.terms.values()
        for _, score in terms
    ):
        return *_test_published(pool, _run_variances(pool, noise)), False
    groups: dict[Seeds, list[tuple[float, Contrast]]] = defaultdict(list)
    for weight, contrast in pool:
        groups[contrast.pretraining_seeds if len(contrast.pretraining_seeds) > 1 else ()].append(
            (weight, contrast)
        )
    rows = {seeds: _sum_contrasts(members, seeds) for seeds, members in groups.items()}
    if None in rows.values():
        return TestResult(math.nan, (), VarianceComponents(math.nan, math.nan)), math.nan, False
    is_single_run = () in rows
    if len(rows) == 1 and not (is_single_run and borrowed):
        [sides] = rows.values()
        run_variances = _run_variances(pool, noise) if is_single_run else []
        result = inference.contrast_t_test(
            sides.scores, list(sides.examples.values()), run_variances
        )
        return result, inference.hedges_g(sides.left, sides.right), False
    difference = math.fsum(float(score_rows.scores.mean()) for score_rows in rows.values())
    seed_variances = _variances_by_seeds(groups, rows, borrowed)
    result = inference.welch_satterthwaite_test(
        difference, seed_variances, _pooled_example_variance(rows.values())
    )
    return result, math.nan, is_single_run


def _run_variances(pool: WeightedContrasts, noise: RunNoise | None) -> list[tuple[float, float]]:
    """Return the variances that `noise` adds to contrasts with one pretraining run.

    Models of one trunk (same size and seed, begun with CLM, or with MLM of the same ratio) count as
    fully correlated, except across the two sides of the contrasts, where correlation would make the
    variance smaller.

    Returns:
        The (variance, degrees of freedom) of each part; empty without noise.
    """
    if noise is None:
        return []
    trunks: dict[tuple, dict[tuple[str, str], float]] = defaultdict(lambda: defaultdict(float))
    for weight, contrast in pool:
        for part, score in contrast.terms[contrast.pretraining_seeds[0]]:
            key = score.model_key
            trunk = (
                key.size,
                key.seed,
                "clm" if key.clm_steps else key.mask_ratio,
                weight * part > 0,
            )
            trunks[trunk][score.family, score.dataset] += weight * part
    pairs = [noise.variance(trunk_weights) for trunk_weights in trunks.values()]
    total = math.fsum(variance for variance, _ in pairs)
    finetuning = math.fsum(variance for _, variance in pairs)
    return [(total, noise.df), (-finetuning, math.inf)]


def _variances_by_seeds(
    groups: Mapping[Seeds, WeightedContrasts],
    rows: Mapping[Seeds, ScoreRows],
    borrowed: BetweenRunVariances,
) -> list[tuple[float, float]]:
    """Return the variance of a pooled contrast in parts, by set of pretraining seeds.

    Parts with a common model size may share runs, so each variance counts once for every such part,
    as under full correlation. Contrasts with one run of the same size count as correlated for the
    same reason.

    Returns:
        The (variance, degrees of freedom) of each part.
    """
    single_run_by_size: dict[str, list[tuple[float, Contrast]]] = defaultdict(list)
    for weight, contrast in groups.get((), ()):
        single_run_by_size[contrast.size].append((weight, contrast))
    parts = [
        {contrast.size for _, contrast in members} for seeds, members in groups.items() if seeds
    ] + [{size} for size in single_run_by_size]
    variances: dict[Seeds, float] = defaultdict(float)
    for seeds, members in groups.items():
        overlapping = 1
        if seeds:
            group_sizes = {contrast.size for _, contrast in members}
            overlapping = sum(bool(group_sizes & sizes) for sizes in parts)
        variances[seeds] += overlapping * inference.variance_of_mean(rows[seeds].scores)
    for size, members in single_run_by_size.items():
        overlapping = sum(size in sizes for sizes in parts)
        total_weight = math.fsum(abs(weight) for weight, _ in members)
        for weight, contrast in members:
            known = borrowed.get(contrast.family) or borrowed.get("") or {(): math.nan}
            for seeds, variance in known.items():
                variances[seeds] += overlapping * total_weight * abs(weight) * variance
    return [
        (variance, (len(seeds) or len(rows[()].scores)) - 1)
        for seeds, variance in variances.items()
    ]


def _pooled_example_variance(rows: Collection[ScoreRows]) -> float:
    """Return the variance that the choice of examples adds to a pooled contrast.

    It is NaN if some rows lack example scores or have other examples.
    """
    by_dataset: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    for score_rows in rows:
        for dataset, block in score_rows.examples.items():
            by_dataset[dataset].append(block)
    is_inconsistent = any(
        len({block.shape[1] for block in blocks}) > 1 for blocks in by_dataset.values()
    )
    if is_inconsistent or any(not score_rows.examples for score_rows in rows):
        return math.nan
    return math.fsum(inference.example_variance(blocks) for blocks in by_dataset.values())


def _sum_contrasts(
    contrasts: WeightedContrasts, seeds: Seeds, with_examples: bool = True
) -> ScoreRows | None:
    """Sum the contrasts of one set of pretraining seeds.

    Args:
        seeds: Seeds that all contrasts have; empty for contrasts with one run each.

    Returns:
        The summed rows; None without a common fine-tuning seed.
    """
    if not seeds:
        return _sum_run_contrasts(
            [(weight, contrast, contrast.pretraining_seeds[0]) for weight, contrast in contrasts],
            with_examples,
        )
    runs = [
        _sum_run_contrasts(
            [(weight, contrast, seed) for weight, contrast in contrasts], with_examples
        )
        for seed in seeds
    ]
    if None in runs:
        return None
    left = np.array([run.left.mean() for run in runs])
    right = np.array([run.right.mean() for run in runs])
    blocks = {}
    if all(run.examples.keys() == runs[0].examples.keys() for run in runs):
        means = {
            dataset: [run.examples[dataset].mean(0) for run in runs] for dataset in runs[0].examples
        }
        if all(
            len({example_means.shape for example_means in run_means}) == 1
            for run_means in means.values()
        ):
            blocks = {dataset: np.stack(run_means) for dataset, run_means in means.items()}
    return ScoreRows(left, right, blocks)


def _sum_run_contrasts(
    contrasts: Sequence[tuple[float, Contrast, int]], with_examples: bool
) -> ScoreRows | None:
    """Sum (weight, contrast, pretraining seed) by fine-tuning seed.

    Returns:
        The summed rows; None if the scores have no seed in common.
    """
    terms = _merge_terms(
        [
            (weight * part, score)
            for weight, contrast, seed in contrasts
            for part, score in contrast.terms[seed]
        ]
    )
    seeds = sorted(set.intersection(*(set(score.seed_scores) for _, score in terms)))
    if not seeds:
        return None
    sides = (
        np.array(
            [
                math.fsum(
                    sign * part * score.seed_scores[seed]
                    for part, score in terms
                    if sign * part > 0
                )
                for seed in seeds
            ]
        )
        for sign in (1, -1)
    )
    return ScoreRows(*sides, _sum_example_scores(terms, seeds) if with_examples else {})


def _merge_terms(terms: Terms) -> list[tuple[float, Score]]:
    """Replace averages by their members and add up the weights of repeated scores."""
    merged: dict[int, tuple[float, Score]] = {}
    for weight, score in terms:
        for member in score.members or (score,):
            earlier, _ = merged.get(id(member), (0.0, member))
            merged[id(member)] = (earlier + weight / max(1, len(score.members)), member)
    return [(weight, score) for weight, score in merged.values() if abs(weight) > 1e-12]


def _sum_example_scores(terms: Terms, seeds: Sequence[int]) -> ExampleScores:
    """Return the weighted sum of example scores, float[S, N], by (family, data set).

    Only data sets that all models can pair are summed.
    """
    by_dataset: dict[tuple[str, str], list[tuple[float, np.ndarray | None]]] = defaultdict(list)
    for weight, score in terms:
        by_dataset[score.family, score.dataset].append((weight, score.stack_examples(seeds)))
    sums = {}
    for dataset, weighted_blocks in by_dataset.items():
        shapes = {None if block is None else block.shape for _, block in weighted_blocks}
        if len(shapes) == 1 and None not in shapes:
            sums[dataset] = sum(weight * block for weight, block in weighted_blocks)
    return sums


def _test_published(
    pool: WeightedContrasts, run_variances: Sequence[tuple[float, float]]
) -> tuple[TestResult, float]:
    """Test a weighted sum of contrasts of published means.

    Returns:
        The result and its effect size.
    """
    terms = _merge_terms(
        [
            (weight * part, score)
            for weight, contrast in pool
            for part, score in contrast.terms[contrast.pretraining_seeds[0]]
        ]
    )
    weights = [weight for weight, _ in terms]
    half_widths = [
        math.nan if score.half_width is None else max(score.half_width, _PRINTED_DIGIT)
        for _, score in terms
    ]
    means = [score.mean for _, score in terms]
    result = inference.welch_from_intervals(
        means, half_widths, weights, run_variances=run_variances
    )
    # of one seed, on each side; pooled by their mean
    spread = 5 * (np.array(weights) * half_widths / 1.96) ** 2
    return result, inference.standardised_difference(
        result.difference, math.sqrt(spread.sum() / 2), 8
    )
