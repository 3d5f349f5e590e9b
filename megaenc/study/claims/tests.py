"""Tests of the study's claims on objectives, schedules and mask ratios.

Each test builds the contrasts that its claim compares, and decides on them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from megaenc.finetune.examples import STUDY_FAMILIES, TaskFamily
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
from megaenc.study.results.groups import (
    format_percent,
    is_mlm_from_scratch,
    is_size_order_known,
)
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

EARLY_FRACTION = 0.25
"""Fraction of the steps that counts as early."""
CLM_FRACTION_RANGES = {0.25: (0.2, 0.3), 0.75: (0.7, 0.85)}
"""Lowest and highest CLM fraction of the steps that count as a quarter and as three quarters; the
study's own are 10 and 32 of 42, 5 and 17 of 22, and 3 and 9 of 12 thousand steps."""
HALF_FRACTION_RANGE = (0.4, 0.6)
"""Range of fractions of the longest continuation that count as half; the study's own is 12 of 22
thousand steps."""


def _mlm_minus_clm(models: ModelSelector, family: str) -> list[Contrast]:
    """Build the contrast of MLM less CLM at equal steps for each size."""
    return build_contrasts(
        models.evidence, (models.mlm, models.clm), models.final_pairs().items(), [family]
    )


def judge_mlm_above_clm(scope: TestScope, family: str) -> PendingVerdict:
    """Test claim 1a (SC), 1b (QA) or 1f (ZS): MLM is above CLM at equal steps.

    There is a contrast for each size, of the finished models of `ModelSelector.final_pairs`, and
    the sizes are pooled. Without a pair the result has no comparisons. Its p is uncorrected.

    Args:
        family: SC (sequence classification), QA (question answering) or ZS (zero-shot retrieval);
            other codes of task families are tested too.
    """
    return judge_direction(scope, _mlm_minus_clm(scope.models, family))


def judge_mlm_equals_clm(scope: TestScope) -> PendingVerdict:
    """Test claim 1c: MLM and CLM are about equal on token classification.

    Each size is compared, and all sizes pooled decide: the difference must be less than the TC
    margin of EQUALITY_MARGINS. Models are the pairs of `ModelSelector.final_pairs`, of equal steps;
    without a pair the result has no comparisons. Its p is uncorrected.
    """
    return judge_equality(scope, _mlm_minus_clm(scope.models, TaskFamily.TC))


def judge_gap_trend(scope: TestScope, family: TaskFamily, widens: bool) -> PendingVerdict:
    """Test claim 1d or 1e: the gap between MLM and CLM narrows or widens with size.

    The gap is the score of MLM less that of CLM at equal steps, or CLM less MLM if CLM is ahead on
    average over the sizes. It must exist and change with the rank of the size: the larger p of both
    tests counts, uncorrected; the outcome of the opposite trend is `reversed`. There are no
    comparisons below two sizes; nor, with a text in `requirement`, if the order of the sizes is
    unknown or their data sets differ.

    Args:
        family: Code of the task family of the scores.
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

    There is a contrast for each size, step and family of SC, TC, QA and IR; all are pooled. Early
    are intermediate checkpoints in the first quarter of the longest planned run of their size;
    without a pair of them the result has no comparisons. Its p is uncorrected. Its note has the
    step from which MLM stays ahead, by size and family, or that CLM is still ahead.
    """
    models = scope.models
    pairs = models.match_pairs(
        lambda key: not key.decayed and is_clm_only(key),
        lambda key: not key.decayed and models.is_mlm_only(key),
    )
    # of the longest run from scratch, also if only checkpoints of it exist
    ends: dict[str, int] = defaultdict(int)
    for key in models.planned_model_keys:
        if not key.cpt_mlm_steps:
            ends[key.size] = max(ends[key.size], key.steps, 0 if key.decayed else key.budget)
    early_pairs = {
        (size, steps): pair
        for (size, steps), pair in sorted(pairs.items())
        if steps <= EARLY_FRACTION * ends[size]
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
    sizes = dict.fromkeys(size for size, _ in pairs)
    for size, family in itertools.product(sizes, STUDY_FAMILIES):
        ahead: dict[int, bool] = {}
        for (pair_size, steps), by_seed in sorted(pairs.items()):
            if pair_size != size:
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


def _clm_fraction_contrasts(
    models: ModelSelector, target_fraction: float, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> list[Contrast]:
    """Build the contrasts of CLM and then MLM, less MLM only.

    About `target_fraction` of the steps are CLM. Both sides have the same size, steps and mask
    ratio.
    """

    def budget_key(key: ModelKey) -> tuple[str, int, float]:
        """Return the properties that both sides share: size, steps and mask ratio."""
        return key.size, key.steps, key.mask_ratio or 0.0

    low, high = CLM_FRACTION_RANGES[target_fraction]
    candidates = [
        key for key in models.model_keys if key.decayed and not key.cpt_mlm_steps and key.mlm_steps
    ]
    nearest: dict[tuple, float] = {}
    for key in candidates:
        if key.clm_steps:
            nearest[budget_key(key)] = min(
                nearest.get(budget_key(key), 2.0),
                key.clm_share,
                key=lambda clm_fraction: abs(clm_fraction - target_fraction),
            )
    pairs = models.match_pairs(
        lambda key: low <= key.clm_share <= high and key.clm_share == nearest[budget_key(key)],
        lambda key: not key.clm_steps,
        budget_key,
        candidates,
    )
    places = [
        (f"{size}, {steps:,} steps, {format_percent(ratio)}", pair)
        for (size, steps, ratio), pair in sorted(pairs.items())
    ]
    names = (f"{target_fraction:.0%} CLM, then MLM".replace("%", " %"), "MLM only")
    return build_contrasts(models.evidence, names, places, families)


def judge_clm_quarter(
    scope: TestScope, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> PendingVerdict:
    """Test claim 4a, or 4c for ["ZS"]: 20 to 30 % CLM, then MLM is above MLM only.

    The percentage is that of the steps; the nearest to 25 % counts. Both sides are finished models
    without continued pretraining, with the same size, steps, mask ratio and seed; without a pair
    the result has no comparisons. Its p is uncorrected.

    Args:
        families: Codes of the task families to compare: SC, TC, QA and IR, the default, for 4a;
            ["ZS"], zero-shot retrieval, for 4c.
    """
    return judge_direction(scope, _clm_fraction_contrasts(scope.models, 0.25, families))


def judge_clm_three_quarters(scope: TestScope) -> PendingVerdict:
    """Test claim 4b: 70 to 85 % CLM and then MLM is not lower than MLM only.

    The percentage is that of the steps; the nearest to 75 % counts. Not lower means by less than
    EQUALITY_MARGINS, in each of SC, TC, QA and IR. Both sides are finished models without continued
    pretraining, with the same size, steps, mask ratio and seed; without a pair the result has no
    comparisons. Its p is uncorrected.
    """
    return judge_equality(scope, _clm_fraction_contrasts(scope.models, 0.75), at_least=True)


def _continued_contrasts(
    models: ModelSelector, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> dict[tuple, list[Contrast]]:
    """Build the contrasts of MLM continued from a CLM model, less from an MLM model.

    Returns:
        The contrasts by place, in order. A place is (size, steps before, mask ratio, added steps).
    """
    pairs = models.match_pairs(
        lambda key: key.clm_steps > 0 and not key.mlm_steps,
        lambda key: not key.clm_steps and key.mlm_steps > 0,
        lambda key: (
            key.size,
            key.clm_steps + key.mlm_steps,
            key.mask_ratio or 0.0,
            key.cpt_mlm_steps,
        ),
        [key for key in models.model_keys if key.decayed and key.cpt_mlm_steps > 0],
    )
    names = ("MLM on CLM", "more MLM on MLM")
    by_place = {}
    for place, pair in sorted(pairs.items()):
        size, before, _, added_steps = place
        where = f"{size}, {added_steps:,} after {before:,} steps"
        by_place[place] = build_contrasts(models.evidence, names, [(where, pair)], families)
    return by_place


def judge_continued_pretraining(
    scope: TestScope, families: Sequence[str] = tuple(STUDY_DATASETS)
) -> PendingVerdict:
    """Test claim 5a, or 5c for ["ZS"]: MLM ends higher on a CLM than on an MLM model.

    Both models are finished, with the same number of steps before the continuation, the same number
    of steps in it and the same mask ratio. All continuations are compared; for each size, steps
    before and ratio, the longest decides, and the note has the differences of shorter ones. Without
    a pair the result has no comparisons. Its p is uncorrected.

    Args:
        families: Codes of the task families: SC, TC, QA and IR for 5a; ["ZS"] for 5c.
    """
    by_place = _continued_contrasts(scope.models, families)
    # places are sorted, so that the last of each start is the longest
    longest = {place[:3]: place[3] for place in by_place}
    last = []
    by_length = defaultdict(list)
    for place, place_contrasts in by_place.items():
        if place[3] == longest[place[:3]]:
            last += place_contrasts
        else:
            by_length[place[3]] += place_contrasts
    if not last:
        return PendingVerdict()
    shorter = []
    for length, length_contrasts in sorted(by_length.items()):
        for family in dict.fromkeys(contrast.family for contrast in length_contrasts):
            family_contrasts = [
                contrast for contrast in length_contrasts if contrast.family == family
            ]
            comparison = scope.compare(family_contrasts, between_run_variance(family_contrasts))
            shorter.append(
                f"{family} {format_difference(comparison.difference)} after {length:,} steps"
            )
    return judge_direction(
        scope,
        [contrast for place_contrasts in by_place.values() for contrast in place_contrasts],
        "; ".join(shorter),
        last,
    )


def judge_shorter_continuation(scope: TestScope) -> PendingVerdict:
    """Test claim 5b: half of a continuation with MLM makes CLM as good as MLM.

    Both models are continued for the same number of steps, about half (0.4 to 0.6) of the longest
    continuation with their size, steps before and mask ratio. MLM on CLM must not be lower than
    more MLM on MLM by EQUALITY_MARGINS, in each of SC, TC, QA and IR. Without such a pair the
    result has no comparisons. Its p is uncorrected.
    """
    by_place = _continued_contrasts(scope.models)
    lengths: dict[tuple, list[int]] = defaultdict(list)
    for place in by_place:
        lengths[place[:3]].append(place[3])
    nearest = {
        start: min(start_lengths, key=lambda added_steps: abs(added_steps - max(start_lengths) / 2))
        for start, start_lengths in lengths.items()
    }
    low, high = HALF_FRACTION_RANGE
    halves = {
        start: added_steps
        for start, added_steps in nearest.items()
        if low <= added_steps / max(lengths[start]) <= high
    }
    contrasts = []
    for place, place_contrasts in by_place.items():
        if halves.get(place[:3]) == place[3]:
            contrasts += place_contrasts
    steps = ", ".join(
        f"{added_steps:,} of {max(lengths[start]):,}"
        for start, added_steps in sorted(halves.items())
    )
    return judge_equality(scope, contrasts, at_least=True, note=f"after {steps} steps")


def _ratios_by_size(planned: Iterable[ModelKey]) -> dict[str, tuple[int, list[float]]]:
    """Return the steps and the sorted mask ratios of MLM-only models by size.

    The longest budget with several ratios counts; models with other objectives are ignored.
    """
    ratios_by_budget: dict[tuple[str, int], set[float]] = defaultdict(set)
    for key in planned:
        if is_mlm_from_scratch(key):
            ratios_by_budget[key.size, key.steps].add(key.mask_ratio)
    several = {
        place: sorted(ratios) for place, ratios in ratios_by_budget.items() if len(ratios) > 1
    }
    longest = {
        size: max(steps for budget_size, steps in several if budget_size == size)
        for size, _ in several
    }
    return {size: (steps, several[size, steps]) for size, steps in longest.items()}


def judge_mask_ratios(scope: TestScope) -> PendingVerdict:
    """Test claim 6a: no mask ratio of MLM is best everywhere.

    It holds if each ratio is significantly beaten by another one in some task family at some size;
    it is reversed if one never is beaten and is above each other ratio overall. Models are
    finished, MLM only and, for each size, of the most steps with several ratios; without two ratios
    there are no comparisons. The better ratio is the left side of each comparison, and `overall` is
    None. p is uncorrected over claims.
    """
    models = scope.models
    contrasts: list[Contrast] = []
    sides: list[tuple[float, float]] = []
    for size, (steps, ratios) in _ratios_by_size(models.planned_model_keys).items():
        evaluated = [
            key
            for key in models.model_keys
            if is_mlm_from_scratch(key) and (key.size, key.steps) == (size, steps)
        ]
        for pair in itertools.combinations(ratios, 2):
            is_side = (lambda key, ratio=ratio: key.mask_ratio == ratio for ratio in pair)
            places = [
                (size, pairs)
                for pairs in models.match_pairs(*is_side, model_keys=evaluated).values()
            ]
            pair_contrasts = build_contrasts(
                models.evidence, (format_percent(pair[0]), format_percent(pair[1])), places
            )
            contrasts += pair_contrasts
            sides += [pair] * len(pair_contrasts)
    borrowed = between_run_variance(contrasts)
    comparisons = adjust_comparisons(
        [scope.compare([contrast], borrowed) for contrast in contrasts]
    )
    lost: dict[float, list[Comparison]] = {
        ratio: [] for ratio in sorted({ratio for pair in sides for ratio in pair})
    }
    for (first, second), comparison in zip(sides, comparisons, strict=True):
        if not math.isnan(comparison.p_adjusted):
            lost[first if comparison.difference < 0 else second].append(comparison)
    clearest = {
        ratio: min(defeats, key=lambda comparison: comparison.p_adjusted, default=None)
        for ratio, defeats in lost.items()
    }
    note = "; ".join(
        f"{format_percent(ratio)} {_describe_defeat(comparison)}"
        for ratio, comparison in clearest.items()
    )
    outcome = "holds"
    p = max(
        (comparison.p_adjusted if comparison else 1.0 for comparison in clearest.values()),
        default=math.nan,
    )
    if all(math.isnan(comparison.p) for comparison in comparisons):
        p = math.nan
    unbeaten = [
        ratio
        for ratio, comparison in clearest.items()
        if comparison is None or comparison.p_adjusted >= LEVEL
    ]
    if not p < LEVEL and len(unbeaten) == 1:
        against = []
        for pair in dict.fromkeys(pair for pair in sorted(sides) if unbeaten[0] in pair):
            chosen = [
                contrast for contrast, names in zip(contrasts, sides, strict=True) if names == pair
            ]
            against.append((judge_direction(scope, chosen), pair[0] == unbeaten[0]))
        if len(against) == len(lost) - 1 and all(
            (draft.outcome == "holds") == first for draft, first in against
        ):
            outcome = "reversed"
            p = inference.largest_p(*(draft.p for draft, _ in against))
    better_first = [put_better_first(comparison) for comparison in comparisons]
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

    A contrast, for each size with three or more ratios, is the change of the IR (retrieval) score
    from the lowest to the highest ratio along a least-squares line. Models are finished, MLM only
    and of the most steps with several ratios; without them the result has no comparisons. Its p is
    uncorrected.
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
            if is_mlm_from_scratch(key) and (key.size, key.steps) == (size, steps):
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
        for index, seed in enumerate(complete):
            seed_terms = parts[index * len(ratios) : (index + 1) * len(ratios)]
            terms[seed] = [
                (sign * weight, score)
                for sign, model_terms in zip(weights, seed_terms, strict=True)
                for weight, score in model_terms
            ]
        contrasts.append(
            Contrast(("high mask ratios", "low ones"), size, str(TaskFamily.IR), label, size, terms)
        )
    return judge_direction(scope, contrasts)
