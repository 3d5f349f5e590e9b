"""Tests of claims on the spread of scores.

Spreads are over fine-tuning learning rates, and over mask ratios after CLM and without it.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy import stats

from megaenc.finetune.examples import STUDY_FAMILIES, TaskFamily
from megaenc.study.claims.decision import PendingVerdict, TestScope, family_weights, judge_direction
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.groups import is_average
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Contrast, Terms, family_terms

MIN_SEEDS = 3
"""Fine-tuning seeds below which a difference of spreads has no p."""


def judge_rate_sensitivity(scope: TestScope) -> PendingVerdict:
    """Test claim 3: scores vary more over the fine-tuning rates for MLM than for CLM.

    There is a contrast for each size and data set: the variance between learning rates of MLM, less
    that of CLM, over the sum of both sides' variances (unit "share"), so that no data set counts
    with more than 1. Models are the pairs of `ModelSelector.final_pairs`; without results at two
    rates and two fine-tuning seeds that both models share, the result has no comparisons. Its p is
    uncorrected. With one pretraining run of each model, it is NaN if only two fine-tuning seeds are
    shared, and with `scope.noise` if there is only one size.
    """
    models = scope.models
    evidence = models.evidence
    names = (models.mlm, models.clm)
    contrasts: list[Contrast] = []
    spreads = []
    dropped_rates = 0
    dropped_seeds = 0
    places = [
        (family, dataset) for family, dataset in evidence.datasets() if not is_average(dataset)
    ]
    for (size, by_seed), (family, dataset) in itertools.product(
        models.final_pairs().items(), places
    ):
        sides = {}
        grids = {}
        for seed, pair in by_seed.items():
            scores = [evidence.find(key, dataset, family) for key in pair]
            if None not in scores and (grid_pair := _common_rate_grids(scores)) is not None:
                sides[seed] = list(zip((1.0, -1.0), scores, strict=True))
                grids[seed], without_rates, without_seeds = grid_pair
                dropped_rates += without_rates
                dropped_seeds += without_seeds
        if grids:
            contrasts.append(_spread_contrast(names, size, family, dataset, size, grids, sides))
            run_variances = [
                [inference.rate_variance_pseudo_values(grid).mean() for grid in pair]
                for pair in grids.values()
            ]
            spreads.append(np.mean(run_variances, axis=0).tolist())
    notes = []
    if contrasts:
        points = [
            100 * math.sqrt(max(0.0, float(np.mean(side)))) for side in zip(*spreads, strict=True)
        ]
        notes = [
            "standard deviation over the rates, without the seeds' part: "
            f"{points[0]:.2f} and {points[1]:.2f} points"
        ]
    compared = [
        [score for _, score in pair] for contrast in contrasts for pair in contrast.source.values()
    ]
    failed = [
        sum(len(seeds) for pair in compared for seeds in pair[side].failed_seeds.values())
        for side in (0, 1)
    ]
    if any(failed):
        counts = " and ".join(
            f"{count} of {name}" for count, name in zip(failed, names, strict=True) if count
        )
        unknown = any(
            score.failed_seeds and score.baseline is None for pair in compared for score in pair
        )
        score_of_failed = "the worst run of that data set" if unknown else "the trivial baseline"
        notes.append(f"failed runs count as {score_of_failed}: {counts}")
    if dropped_seeds:
        notes.append(
            f"fine-tuning seeds left out because a side lacks one of their rates: {dropped_seeds}"
        )
    if dropped_rates:
        notes.append(
            f"rates left out because the sides share fewer than {MIN_SEEDS} seeds there: "
            f"{dropped_rates}"
        )
    return _judge_spreads(scope, contrasts, "; ".join(notes))


def _common_rate_grids(sides: Sequence[Score]) -> tuple[list[np.ndarray], int, int] | None:
    """Return the scores of both sides at the learning rates and seeds that they share.

    The most rates at which both sides have three seeds in common (else two) count, with all seeds
    that both have at each of them. A failed run scores the trivial baseline, or the worst run of
    both sides if the results do not contain it.

    Returns:
        Scores float[R, S] of both sides, and the numbers of rates and of seeds left out. None below
        two rates or seeds.
    """
    scores = [
        score
        for side in sides
        for by_seed in side.rate_scores.values()
        for score in by_seed.values()
    ]
    grids: list[Mapping[float, Mapping[int, float]]] = [
        replace(
            side, baseline=min(scores, default=0.0) if side.baseline is None else side.baseline
        ).rate_scores_with_failures
        for side in sides
    ]
    tried = sorted(set(grids[0]) | set(grids[1]))
    common = {rate: set(grids[0].get(rate, ())) & set(grids[1].get(rate, ())) for rate in tried}
    for needed, count in itertools.product((MIN_SEEDS, 2), range(len(tried), 1, -1)):
        chosen = [
            (set.intersection(*(common[rate] for rate in rates)), rates)
            for rates in itertools.combinations(tried, count)
        ]
        seeds, rates = max(chosen, key=lambda pair: len(pair[0]))
        if len(seeds) >= needed:
            values = [
                np.array([[grid[rate][seed] for seed in sorted(seeds)] for rate in rates])
                for grid in grids
            ]
            most = max(len(by_seed) for grid in grids for by_seed in grid.values())
            return values, len(tried) - count, most - len(seeds)
    return None


def judge_ratio_sensitivity(scope: TestScope) -> PendingVerdict:
    """Test claim 6c: scores vary less over the mask ratios after CLM than without CLM.

    There is a contrast for each task family, size, number of all steps and number of CLM steps: the
    variance between mask ratios of MLM only, less that of CLM then MLM, over the sum of both sides'
    variances (unit "share"). Models are finished, and both sides have the same three or more ratios
    and two or more fine-tuning seeds; without them the result has no comparisons. Its p is
    uncorrected. With one pretraining run of each model, it is NaN if only two fine-tuning seeds are
    shared, and with `scope.noise` if there is only one size.
    """
    models = scope.models
    by_schedule: dict[tuple[str, int, int], dict[int, dict[float, ModelKey]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for key in models.model_keys:
        if key.decayed and key.mask_ratio and not key.cpt_mlm_steps:
            by_schedule[key.size, key.steps, key.clm_steps][key.seed][key.mask_ratio] = key
    contrasts: list[Contrast] = []
    for (size, steps, clm_steps), after_clm in sorted(by_schedule.items()):
        alone = by_schedule.get((size, steps, 0), {}) if clm_steps else {}
        for family in STUDY_FAMILIES:
            shared: dict[int, dict[float, tuple[ModelKey, ModelKey]]] = defaultdict(dict)
            for seed, by_ratio in after_clm.items():
                for ratio in sorted(set(by_ratio) & set(alone.get(seed, ()))):
                    sides = (alone[seed][ratio], by_ratio[ratio])
                    if not any((key, family) in models.left_out for key in sides):
                        shared[seed][ratio] = sides
            ratios = list(max(shared.values(), key=len, default=()))
            if len(ratios) < 3:
                continue
            pairs = {
                seed: list(zip(*(by_ratio[ratio] for ratio in ratios), strict=True))
                for seed, by_ratio in shared.items()
                if set(ratios) <= set(by_ratio)
            }
            grid_pair = _ratio_grids(models.evidence, family, pairs)
            if grid_pair is not None:
                label, grids, terms = grid_pair
                where = f"{size}, {clm_steps:,} of {steps:,} steps of CLM"
                names = ("MLM only", "CLM, then MLM")
                contrasts.append(
                    _spread_contrast(names, where, str(family), label, size, grids, terms)
                )
    return _judge_spreads(scope, contrasts, "")


def _ratio_grids(
    evidence: Evidence, family: TaskFamily, pairs: Mapping[int, Sequence[Sequence[ModelKey]]]
) -> tuple[str, dict[int, list[np.ndarray]], dict[int, Terms]] | None:
    """Return the scores of both sides over their mask ratios and fine-tuning seeds.

    A side is R models, one for each mask ratio, whose mean over the family's data sets is taken for
    each of S common fine-tuning seeds.

    Args:
        pairs: Models of both sides by pretraining seed.

    Returns:
        A label, scores float[R, S] of both sides by pretraining seed, and their terms. None without
        a common data set or with fewer than two common seeds.
    """
    by_seed = {seed: [key for keys in sides for key in keys] for seed, sides in pairs.items()}
    pairs = {
        seed: pairs[seed]
        for seed, keys in by_seed.items()
        if family_terms(evidence, family, keys) is not None
    }
    model_keys = [key for seed in pairs for key in by_seed[seed]]
    common = family_terms(evidence, family, model_keys)
    if common is None:
        return None
    label, parts = common
    grids: dict[int, list[np.ndarray]] = {}
    terms: dict[int, Terms] = {}
    rest = iter(parts)
    for seed, sides in pairs.items():
        models = [[next(rest) for _ in keys] for keys in sides]
        seeds = set.intersection(
            *(
                set(score.seed_scores)
                for side in models
                for model_terms in side
                for _, score in model_terms
            )
        )
        if len(seeds) < 2:
            return None
        grids[seed] = []
        for side in models:
            rows = [
                [
                    math.fsum(
                        weight * score.seed_scores[finetuning_seed] for weight, score in model_terms
                    )
                    for finetuning_seed in sorted(seeds)
                ]
                for model_terms in side
            ]
            grids[seed].append(np.array(rows))
        signed = zip((1.0, -1.0), models, strict=True)
        terms[seed] = [
            (sign * weight, score)
            for sign, side in signed
            for model_terms in side
            for weight, score in model_terms
        ]
    return label, grids, terms


def _spread_contrast(
    names: tuple[str, str],
    where: str,
    family: str,
    dataset: str,
    size: str,
    grids: Mapping[int, Sequence[np.ndarray]],
    sides: Mapping[int, Terms],
) -> Contrast:
    """Build the contrast of the spreads of two sides.

    Args:
        grids: Scores float[R, S] of both sides by pretraining seed.
        sides: Terms of those scores by pretraining seed.
    """
    variances = [np.var(grid, axis=0, ddof=1).mean() for pair in grids.values() for grid in pair]
    total = 2 * float(np.mean(variances)) or 1.0
    terms = {}
    for seed, pair in grids.items():
        values = [
            dict(enumerate(inference.rate_variance_pseudo_values(grid) / total)) for grid in pair
        ]
        scores = [
            next(score for weight, score in sides[seed] if weight * sign > 0) for sign in (1, -1)
        ]
        valued = [
            replace(score, seed_scores=by_seed, load_examples=dict, members=())
            for score, by_seed in zip(scores, values, strict=True)
        ]
        terms[seed] = [(1.0, valued[0]), (-1.0, valued[1])]
    return Contrast(names, where, family, dataset, size, terms, sides)


def _judge_spreads(scope: TestScope, contrasts: list[Contrast], note: str) -> PendingVerdict:
    """Test that the left spread is above the right one, for each contrast and pooled.

    Task families have equal weight. For another run, models of one run each are tested over sizes,
    by t; below two sizes p is NaN.
    """
    testable = [
        contrast
        for contrast in contrasts
        if all(
            len(score.seed_scores) > 1 for terms in contrast.terms.values() for _, score in terms
        )
    ]
    draft = judge_direction(replace(scope, noise=None), contrasts, note, testable, unit="share")
    if (
        scope.noise is None
        or draft.overall is None
        or draft.overall.pretraining_runs > 1
        or draft.overall.has_borrowed_variance
    ):
        return draft
    by_size: dict[str, list[Contrast]] = defaultdict(list)
    for contrast in contrasts:
        by_size[contrast.size].append(contrast)
    means = [
        scope.compare(size_contrasts, {}, family_weights(size_contrasts), "share").difference
        for size_contrasts in by_size.values()
    ]
    over_sizes = math.nan
    if len(means) > 1 and np.ptp(means) > 0:
        over_sizes = float(stats.ttest_1samp(means, 0.0).pvalue)
    return replace(draft, p=inference.largest_p(draft.p, over_sizes), families=[], decisive=[])
