"""Tests of the study's claims on objectives, schedules and mask ratios.

Each test builds the contrasts that its claim compares, and decides on them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.claims.decision import (
    PendingVerdict,
    TestScope,
    direction_outcome,
    format_difference,
    judge_direction,
    judge_equality,
)
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.groups import format_percent, is_size_order_known
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import (
    Comparison,
    Contrast,
    ModelPairs,
    ModelSelector,
    adjust_comparisons,
    build_contrasts,
    family_terms,
    is_clm_only,
    put_better_first,
)
from megaenc.study.stats.inference import LEVEL
from megaenc.study.stats.pooling import between_run_variance

EARLY_SHARE = 0.25
"""Share of the steps that counts as early."""
CLM_SHARES = {0.25: (0.2, 0.3), 0.75: (0.7, 0.85)}
"""Ranges of CLM shares that count as a quarter and as three quarters; the study's own are 10 and 32
of 42, 5 and 17 of 22, and 3 and 9 of 12 thousand steps."""
HALF_SHARES = (0.4, 0.6)
"""Range of shares of the longest continuation that count as half; the study's own is 12 of 22
thousand steps."""


def _mlm_minus_clm(models: ModelSelector, family: str) -> list[Contrast]:
    """Build the contrast of MLM less CLM at equal steps for each size."""
    return build_contrasts(
        models.evidence, (models.mlm, models.clm), models.final_pairs().items(), [family]
    )


def judge_mlm_above_clm(scope: TestScope, family: str) -> PendingVerdict:
    """Test claim 1a (SC), 1b (QA) or 1f (ZS): MLM is above CLM at equal steps.

    There is a contrast for each size, and the sizes are pooled.
    """
    return judge_direction(scope, _mlm_minus_clm(scope.models, family))


def judge_mlm_equals_clm(scope: TestScope) -> PendingVerdict:
    """Test claim 1c, MLM and CLM are about equal on TC, each size and pooled."""
    return judge_equality(scope, _mlm_minus_clm(scope.models, TaskFamily.TC))


def judge_gap_trend(scope: TestScope, family: TaskFamily, widens: bool) -> PendingVerdict:
    """Test claim 1d or 1e: the gap between MLM and CLM narrows or widens with size.

    A gap must exist and change with the rank of the size: the larger p of both tests counts. The
    result has no comparisons below two sizes, and only a requirement if the order of the sizes is
    unknown or their data sets differ.

    Args:
        widens: Whether the claim is that the gap widens; else it narrows.
    """
    models = scope.models
    contrasts = _mlm_minus_clm(models, family)
    if len(contrasts) < 2:
        return PendingVerdict()
    if not is_size_order_known(models.model_keys, models.evidence.scope.sizes):
        return PendingVerdict(
            requirement="sizes in a known order: names such as 210M and 1B, or the manifest that "
            "has their shapes"
        )
    if len({contrast.dataset for contrast in contrasts}) > 1:
        return PendingVerdict(
            requirement=f"models of all sizes evaluated on the same {family} data sets"
        )
    borrowed = between_run_variance(contrasts)
    comparisons = adjust_comparisons(
        [scope.compare([contrast], borrowed) for contrast in contrasts]
    )
    gap = scope.compare(contrasts, borrowed)
    # makes a trend in the claimed direction positive
    sign = 1 if (gap.difference > 0) == widens else -1
    weights = [sign * weight for weight in _trend_weights(range(len(contrasts)))]
    trend = scope.compare(contrasts, borrowed, weights)
    overall = replace(
        trend,
        left=f"gap of the {'largest' if widens else 'smallest'}",
        right=f"that of the {'smallest' if widens else 'largest'}",
        where=f"{contrasts[0].where} to {contrasts[-1].where}",
        p=inference.largest_p(trend.p, gap.p),  # a gap must exist before it can change
    )
    note = f"the mean gap is {format_difference(gap.difference)}"
    return PendingVerdict(
        comparisons, overall, overall.p, direction_outcome(overall), note, contrasts=contrasts
    )


def _trend_weights(positions: Sequence[float]) -> list[float]:
    """Return the weights by which values add up to their change along a fitted line.

    The change is from the first to the last of `positions`.
    """
    centred = np.asarray(positions, dtype=np.float64) - np.mean(positions)
    return (centred * (positions[-1] - positions[0]) / np.sum(centred**2)).tolist()


def judge_early_steps(scope: TestScope) -> PendingVerdict:
    """Test claim 2: CLM is above MLM at equal steps early in training.

    Checkpoints in the first quarter of the longest run of their size count.
    """
    models = scope.models
    pairs = models.match_pairs(
        lambda one: not one.decayed and is_clm_only(one),
        lambda one: not one.decayed and models.is_mlm_only(one),
    )
    # of the longest run from scratch, also if only checkpoints of it exist
    ends: dict[str, int] = defaultdict(int)
    for one in models.planned_model_keys:
        if not one.cpt_mlm_steps:
            ends[one.size] = max(ends[one.size], one.steps, 0 if one.decayed else one.budget)
    early_pairs = {
        (size, steps): pair
        for (size, steps), pair in sorted(pairs.items())
        if steps <= EARLY_SHARE * ends[size]
    }
    places = [(f"{size} at {steps:,} steps", pair) for (size, steps), pair in early_pairs.items()]
    contrasts = build_contrasts(models.evidence, (models.clm, models.mlm), places)
    early_steps = ", ".join(f"{steps:,}" for steps in sorted({steps for _, steps in early_pairs}))
    notes = [f"early is step {early_steps}", *_describe_crossovers(models, pairs)]
    return judge_direction(scope, contrasts, "; ".join(notes))


def _describe_crossovers(models: ModelSelector, pairs: dict[tuple, ModelPairs]) -> list[str]:
    """Describe the step from which MLM stays at or above CLM, by size and task family.

    Means of the scores are compared.
    """
    sentences = []
    for size, family in dict.fromkeys((size, family) for size, _ in pairs for family in TaskFamily):
        ahead: dict[int, bool] = {}
        for (of, steps), by_seed in sorted(pairs.items()):
            if of != size:
                continue
            common = family_terms(models.evidence, family, next(iter(by_seed.values())))
            if common is not None:
                means = [
                    math.fsum(weight * score.mean for weight, score in side) for side in common[1]
                ]
                ahead[steps] = means[1] >= means[0]  # CLM is the left side
        since = [
            step
            for step in ahead
            if all(is_ahead for later, is_ahead in ahead.items() if later >= step)
        ]
        if since:
            sentences.append(f"{size} on {family}: MLM is ahead from step {since[0]:,} on")
        elif ahead:
            sentences.append(f"{size} on {family}: CLM is still ahead at step {max(ahead):,}")
    return sentences


def _clm_share_contrasts(
    models: ModelSelector, share: float, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> list[Contrast]:
    """Build the contrasts of CLM and then MLM, less MLM only.

    About `share` of the steps are CLM. Both sides have the same size, steps and mask ratio.
    """

    def budget_key(key: ModelKey) -> tuple[str, int, float]:
        """Return the properties that both sides share: size, steps and mask ratio."""
        return key.size, key.steps, key.mask_ratio or 0.0

    low, high = CLM_SHARES[share]
    candidates = [
        one for one in models.model_keys if one.decayed and not one.cpt_mlm_steps and one.mlm_steps
    ]
    nearest: dict[tuple, float] = {}
    for one in candidates:
        if one.clm_steps:
            nearest[budget_key(one)] = min(
                nearest.get(budget_key(one), 2.0), one.clm_share, key=lambda its: abs(its - share)
            )
    pairs = models.match_pairs(
        lambda one: low <= one.clm_share <= high and one.clm_share == nearest[budget_key(one)],
        lambda one: not one.clm_steps,
        budget_key,
        candidates,
    )
    places = [
        (f"{size}, {steps:,} steps, {format_percent(ratio)}", pair)
        for (size, steps, ratio), pair in sorted(pairs.items())
    ]
    names = (f"{share:.0%} CLM, then MLM".replace("%", " %"), "MLM only")
    return build_contrasts(models.evidence, names, places, families)


def judge_clm_quarter(
    scope: TestScope, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> PendingVerdict:
    """Test claim 4a or 4c (ZS): 20 to 30 % CLM and then MLM is above MLM only.

    Both sides have the same size, steps and mask ratio.
    """
    return judge_direction(scope, _clm_share_contrasts(scope.models, 0.25, families))


def judge_clm_three_quarters(scope: TestScope) -> PendingVerdict:
    """Test claim 4b: 70 to 85 % CLM and then MLM is not lower than MLM only.

    Not lower means by less than the margin, in every task family.
    """
    return judge_equality(scope, _clm_share_contrasts(scope.models, 0.75), at_least=True)


def _continued_contrasts(
    models: ModelSelector, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> dict[tuple, list[Contrast]]:
    """Build the contrasts of MLM continued from a CLM model, less from an MLM model.

    Returns:
        The contrasts by place, in order. A place is (size, steps before, mask ratio, added steps).
    """
    pairs = models.match_pairs(
        lambda one: one.clm_steps > 0 and not one.mlm_steps,
        lambda one: not one.clm_steps and one.mlm_steps > 0,
        lambda one: (
            one.size,
            one.clm_steps + one.mlm_steps,
            one.mask_ratio or 0.0,
            one.cpt_mlm_steps,
        ),
        [one for one in models.model_keys if one.decayed and one.cpt_mlm_steps > 0],
    )
    names = ("MLM on CLM", "more MLM on MLM")
    by_place = {}
    for place, pair in sorted(pairs.items()):
        size, before, _, more = place
        where = f"{size}, {more:,} after {before:,} steps"
        by_place[place] = build_contrasts(models.evidence, names, [(where, pair)], families)
    return by_place


def judge_continued_pretraining(
    scope: TestScope, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> PendingVerdict:
    """Test claim 5a or 5c (ZS): MLM ends higher on a CLM than on an MLM model.

    Both models are finished, and continued with MLM for as many steps. The longest continuation
    decides.
    """
    by_place = _continued_contrasts(scope.models, families)
    # places are sorted, so that the last of each start is the longest
    longest = {place[:3]: place[3] for place in by_place}
    last = []
    by_length = defaultdict(list)
    for place, some in by_place.items():
        if place[3] == longest[place[:3]]:
            last += some
        else:
            by_length[place[3]] += some
    if not last:
        return PendingVerdict()
    shorter = []
    for length, some in sorted(by_length.items()):
        for family in dict.fromkeys(contrast.family for contrast in some):
            of_family = [contrast for contrast in some if contrast.family == family]
            one = scope.compare(of_family, between_run_variance(of_family))
            shorter.append(f"{family} {format_difference(one.difference)} after {length:,} steps")
    return judge_direction(
        scope,
        [contrast for some in by_place.values() for contrast in some],
        "; ".join(shorter),
        last,
    )


def judge_shorter_continuation(scope: TestScope) -> PendingVerdict:
    """Test claim 5b: half of a continuation with MLM makes CLM as good as MLM.

    Both models are continued for the same number of steps, about half of the longest continuation
    (HALF_SHARES). MLM on CLM must not be lower than more MLM on MLM by the margin.
    """
    by_place = _continued_contrasts(scope.models)
    lengths: dict[tuple, list[int]] = defaultdict(list)
    for place in by_place:
        lengths[place[:3]].append(place[3])
    nearest = {
        start: min(each, key=lambda more: abs(more - max(each) / 2))
        for start, each in lengths.items()
    }
    low, high = HALF_SHARES
    halves = {
        start: more for start, more in nearest.items() if low <= more / max(lengths[start]) <= high
    }
    contrasts = []
    for place, some in by_place.items():
        if halves.get(place[:3]) == place[3]:
            contrasts += some
    steps = ", ".join(
        f"{more:,} of {max(lengths[start]):,}" for start, more in sorted(halves.items())
    )
    return judge_equality(scope, contrasts, at_least=True, note=f"after {steps} steps")


def _ratios_by_size(planned: Iterable[ModelKey]) -> dict[str, tuple[int, list[float]]]:
    """Return the steps and the sorted mask ratios of MLM-only models by size.

    The longest budget with several ratios counts; models with other objectives are ignored.
    """
    ratios_by_budget: dict[tuple[str, int], set[float]] = defaultdict(set)
    for key in planned:
        if _is_mlm_from_scratch(key):
            ratios_by_budget[key.size, key.steps].add(key.mask_ratio)
    several = {
        place: sorted(ratios) for place, ratios in ratios_by_budget.items() if len(ratios) > 1
    }
    longest = {size: max(steps for of, steps in several if of == size) for size, _ in several}
    return {size: (steps, several[size, steps]) for size, steps in longest.items()}


def judge_mask_ratios(scope: TestScope) -> PendingVerdict:
    """Test claim 6a: no mask ratio of MLM is best everywhere.

    It holds if each ratio is significantly beaten somewhere; it is reversed if one never is and is
    above each other ratio overall.
    """
    models = scope.models
    contrasts: list[Contrast] = []
    sides: list[tuple[float, float]] = []
    for size, (steps, ratios) in _ratios_by_size(models.planned_model_keys).items():
        evaluated = [
            one
            for one in models.model_keys
            if _is_mlm_from_scratch(one) and (one.size, one.steps) == (size, steps)
        ]
        for pair in itertools.combinations(ratios, 2):
            is_side = (lambda key, ratio=ratio: key.mask_ratio == ratio for ratio in pair)
            places = [
                (size, pairs)
                for pairs in models.match_pairs(*is_side, model_keys=evaluated).values()
            ]
            some = build_contrasts(
                models.evidence, (format_percent(pair[0]), format_percent(pair[1])), places
            )
            contrasts += some
            sides += [pair] * len(some)
    borrowed = between_run_variance(contrasts)
    comparisons = adjust_comparisons(
        [scope.compare([contrast], borrowed) for contrast in contrasts]
    )
    lost: dict[float, list[Comparison]] = {
        ratio: [] for ratio in sorted({ratio for pair in sides for ratio in pair})
    }
    for (first, second), one in zip(sides, comparisons, strict=True):
        if not math.isnan(one.p_adjusted):
            lost[first if one.difference < 0 else second].append(one)
    clearest = {
        ratio: min(of_ratio, key=lambda one: one.p_adjusted, default=None)
        for ratio, of_ratio in lost.items()
    }
    note = "; ".join(
        f"{format_percent(ratio)} {_describe_defeat(one)}" for ratio, one in clearest.items()
    )
    outcome = "holds"
    p = max((one.p_adjusted if one else 1.0 for one in clearest.values()), default=math.nan)
    if all(math.isnan(one.p) for one in comparisons):
        p = math.nan
    unbeaten = [ratio for ratio, one in clearest.items() if one is None or one.p_adjusted >= LEVEL]
    if not p < LEVEL and len(unbeaten) == 1:
        against = []
        for pair in dict.fromkeys(pair for pair in sorted(sides) if unbeaten[0] in pair):
            of_pair = [
                contrast for contrast, names in zip(contrasts, sides, strict=True) if names == pair
            ]
            against.append((judge_direction(scope, of_pair), pair[0] == unbeaten[0]))
        if len(against) == len(lost) - 1 and all(
            (one.outcome == "holds") == first for one, first in against
        ):
            outcome = "reversed"
            p = inference.largest_p(*(one.p for one, _ in against))
    better_first = [put_better_first(one) for one in comparisons]
    return PendingVerdict(better_first, p=p, outcome=outcome, note=note, contrasts=contrasts)


def _describe_defeat(worst: Comparison | None) -> str:
    """Describe the most significant comparison that a mask ratio lost."""
    if worst is None or worst.p_adjusted >= LEVEL:
        return "is not shown to be beaten anywhere"
    better = worst.left if worst.difference > 0 else worst.right
    difference = format_difference(abs(worst.difference))
    return f"is beaten by {better} on {worst.family} at {worst.where} ({difference})"


def judge_high_ratios(scope: TestScope) -> PendingVerdict:
    """Test claim 6b: retrieval prefers high mask ratios.

    A contrast is the change of the IR score from the lowest to the highest ratio along a fitted
    line. Sizes with three or more ratios count.
    """
    evidence = scope.models.evidence
    counted = [
        key
        for key in scope.models.planned_model_keys
        if (key, TaskFamily.IR) not in scope.models.left_out
    ]
    contrasts = []
    for size, (steps, ratios) in _ratios_by_size(counted).items():
        if len(ratios) < 3:
            continue
        by_seed: dict[int, dict[float, ModelKey]] = defaultdict(dict)
        for key in scope.models.model_keys:
            if _is_mlm_from_scratch(key) and (key.size, key.steps) == (size, steps):
                by_seed[key.seed][key.mask_ratio] = key
        complete: dict[int, list[ModelKey]] = {}
        for seed, by_ratio in by_seed.items():
            keys = [by_ratio[ratio] for ratio in ratios if ratio in by_ratio]
            if len(keys) == len(ratios) and family_terms(evidence, TaskFamily.IR, keys) is not None:
                complete[seed] = keys
        common = family_terms(
            evidence, TaskFamily.IR, [key for keys in complete.values() for key in keys]
        )
        if common is None:
            continue
        label, parts = common
        weights = _trend_weights(ratios)
        terms = {}
        for at, seed in enumerate(complete):
            of_seed = parts[at * len(ratios) : (at + 1) * len(ratios)]
            terms[seed] = [
                (sign * weight, score)
                for sign, each in zip(weights, of_seed, strict=True)
                for weight, score in each
            ]
        contrasts.append(
            Contrast(("high mask ratios", "low ones"), size, str(TaskFamily.IR), label, size, terms)
        )
    return judge_direction(scope, contrasts)


def _is_mlm_from_scratch(key: ModelKey) -> bool:
    """Return whether a decayed model was trained with MLM only, at one mask ratio."""
    return key.decayed and bool(key.mask_ratio) and not key.clm_steps and not key.cpt_mlm_steps
