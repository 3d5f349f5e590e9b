"""Tests of the study's claims: the contrasts that each compares, and the p and direction that its verdict depends on."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megaenc.finetune.examples import TaskFamily
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import Score
from megaenc.study.results.groups import format_percent, is_average, is_size_order_known
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import (
    Comparison,
    Contrast,
    ModelPairs,
    ModelSelector,
    Outcome,
    adjust_comparisons,
    build_contrasts,
    family_terms,
    is_clm_only,
    put_better_first,
)
from megaenc.study.stats.inference import LEVEL
from megaenc.study.stats.pooling import between_run_variance, compare_contrasts

EQUALITY_MARGIN = 0.01
"""Largest difference, as a fraction, at which two models count as about equal."""
EARLY_SHARE = 0.25
"""Share of the steps that counts as early."""
QUARTER_RANGE = (0.2, 0.3)
"""CLM shares that count as 25 %; the study's own are 10 of 42, 5 of 22 and 3 of 12 thousand steps."""


@dataclass(frozen=True)
class PendingVerdict:
    """Test result of a claim before p is corrected over all claims: comparisons, the pooled one, p, outcome and note."""

    comparisons: list[Comparison] = field(default_factory=list)
    overall: Comparison | None = None
    p: float = math.nan
    outcome: Outcome = "not resolved"
    """verdict if the corrected p is significant"""
    note: str = ""
    decisive: list[Comparison] = field(default_factory=list)
    """comparisons that must not be significant in the opposite direction"""
    contrasts: list[Contrast] = field(default_factory=list)
    """tested contrasts"""
    requirement: str = ""
    """results that the test needs, if other than the claim's usual requirement"""


def judge_direction(
    contrasts: list[Contrast], interval_draws: int, note: str = "", decisive: Sequence[Contrast] = ()
) -> PendingVerdict:
    """Test each contrast for left above right; p and outcome: `decisive` (default: all) pooled, without collapsed."""
    borrowed, usable = between_run_variance(contrasts), drop_collapsed(decisive or contrasts)
    comparisons = adjust_comparisons([compare_contrasts([contrast], borrowed) for contrast in contrasts])
    draft = PendingVerdict(comparisons, note=note, contrasts=contrasts)
    if not usable:
        return draft
    overall = compare_contrasts(usable, borrowed, draws=interval_draws)
    among = [one for one, contrast in zip(comparisons, contrasts, strict=True) if contrast in usable]
    return replace(draft, overall=overall, p=overall.p, outcome=_direction_outcome(overall), decisive=among)


def drop_collapsed(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return the contrasts that have no collapsed side, in the same order; only these are pooled."""
    return [contrast for contrast in contrasts if not contrast.collapsed]


def format_points(difference: float) -> str:
    """Format a difference in points with its sign and two decimals, such as `+0.12 points`."""
    return f"{difference:+.2f} points"


def _direction_outcome(overall: Comparison) -> Outcome:
    """Return `holds` for a positive difference, else `reversed`."""
    return "holds" if overall.difference > 0 else "reversed"


def _mlm_minus_clm(models: ModelSelector, family: TaskFamily) -> list[Contrast]:
    """Build the contrast MLM less CLM at equal steps on a task family, one for each size."""
    return build_contrasts(models.evidence, (models.mlm, models.clm), models.final_pairs().items(), [family])


def judge_mlm_above_clm(models: ModelSelector, interval_draws: int, family: TaskFamily) -> PendingVerdict:
    """Test claim 1a (SC) or 1b (QA), MLM above CLM at equal steps on `family`, by size and pooled over the sizes."""
    return judge_direction(_mlm_minus_clm(models, family), interval_draws)


def judge_equality(models: ModelSelector, interval_draws: int) -> PendingVerdict:
    """Test claim 1c, MLM and CLM differ by less than 1 point on TC, by two one-sided tests, each size and pooled."""
    contrasts = _mlm_minus_clm(models, TaskFamily.TC)
    borrowed, usable = between_run_variance(contrasts), drop_collapsed(contrasts)
    each = [_with_margin_p(compare_contrasts([contrast], borrowed, EQUALITY_MARGIN)) for contrast in contrasts]
    corrected = inference.holm_adjust([one.p for one in each])
    comparisons = [replace(one, p_adjusted=p, verdict=_equality_outcome(one, p)) for one, p in zip(each, corrected, strict=True)]
    if not usable:
        return PendingVerdict(comparisons, contrasts=contrasts)
    pooled = compare_contrasts(usable, borrowed, EQUALITY_MARGIN, interval_draws)
    overall, outcome = _with_margin_p(pooled), "holds"
    note = f"equal means within {100 * EQUALITY_MARGIN:g} point either way, and p is that of a larger difference"
    if _equality_outcome(overall, math.nan) == "reversed":  # here p is that of no difference
        note = f"the interval lies beyond the {100 * EQUALITY_MARGIN:g} point that counts as equal"
        overall, outcome = pooled, "reversed"
    return PendingVerdict(comparisons, overall, overall.p, outcome, note, comparisons, contrasts)


def _with_margin_p(one: Comparison) -> Comparison:
    """Return the comparison with the p of the equivalence test; NaN if its test has no p."""
    return replace(one, p=math.nan if math.isnan(one.p) else one.test.margin_p)


def _equality_outcome(one: Comparison, p: float) -> Outcome:
    """Return `holds` for a significant p, `reversed` if the interval lies beyond the margin, else `not resolved`."""
    if math.isnan(one.p):
        return "not resolved"
    if p < LEVEL:
        return "holds"
    return "reversed" if one.low > 100 * EQUALITY_MARGIN or one.high < -100 * EQUALITY_MARGIN else "not resolved"


def judge_gap_narrowing(models: ModelSelector, interval_draws: int) -> PendingVerdict:
    """Test claim 1d, an MLM-CLM gap on IR exists and narrows with size rank (larger p of both); empty below two sizes."""
    if len(contrasts := _mlm_minus_clm(models, TaskFamily.IR)) < 2:
        return PendingVerdict()
    if not is_size_order_known(models.model_keys, models.evidence.scope.sizes):
        return PendingVerdict(
            requirement="sizes in a known order: names such as 210M and 1B, or the manifest that has their shapes"
        )
    borrowed, usable = between_run_variance(contrasts), drop_collapsed(contrasts)
    draft = PendingVerdict(
        adjust_comparisons([compare_contrasts([contrast], borrowed) for contrast in contrasts]), contrasts=contrasts
    )
    if len(usable) < 2:
        return draft
    gap, middle = compare_contrasts(usable, borrowed), (len(usable) - 1) / 2
    ranks = [at - middle for at in range(len(usable))]
    sign = -1 if gap.difference > 0 else 1  # makes a narrowing gap positive
    weights = [sign * rank * (len(usable) - 1) / math.fsum(rank**2 for rank in ranks) for rank in ranks]
    trend = compare_contrasts(usable, borrowed, draws=interval_draws, weights=weights)
    where = f"{usable[0].where} to {usable[-1].where}"
    overall = replace(trend, left="gap of the smallest", right="that of the largest", where=where)
    p = float(np.max([overall.p, gap.p]))  # a gap must exist before it can narrow; NaN if either is
    return replace(
        draft, overall=overall, p=p, outcome=_direction_outcome(overall), note=f"the mean gap is {format_points(gap.difference)}"
    )


def judge_early_steps(models: ModelSelector, interval_draws: int) -> PendingVerdict:
    """Test claim 2, CLM is above MLM at equal steps, on checkpoints in the first quarter of their size's longest run."""
    pairs = models.match_pairs(
        lambda one: not one.decayed and is_clm_only(one),
        lambda one: not one.decayed and models.is_mlm_only(one),
    )
    ends: dict[str, int] = defaultdict(int)  # of the longest run from scratch, also if only checkpoints of it exist
    for one in models.planned_model_keys:
        if not one.cpt_mlm_steps:
            ends[one.size] = max(ends[one.size], one.steps, 0 if one.decayed else one.budget)
    early_pairs = {(size, steps): pair for (size, steps), pair in sorted(pairs.items()) if steps <= EARLY_SHARE * ends[size]}
    places = [(f"{size} at {steps:,} steps", pair) for (size, steps), pair in early_pairs.items()]
    contrasts = build_contrasts(models.evidence, (models.clm, models.mlm), places)
    first = f"early is step {', '.join(f'{steps:,}' for steps in sorted({steps for _, steps in early_pairs}))}"
    return judge_direction(contrasts, interval_draws, "; ".join([first, *_describe_crossovers(models, pairs)]))


def _describe_crossovers(models: ModelSelector, pairs: dict[tuple, ModelPairs]) -> list[str]:
    """Describe for each size and family the step from which the mean of MLM stays at or above that of CLM."""
    sentences = []
    for size, family in dict.fromkeys((size, family) for size, _ in pairs for family in TaskFamily):
        ahead: dict[int, bool] = {}
        for (of, steps), by_seed in sorted(pairs.items()):
            if of == size and (common := family_terms(models.evidence, family, next(iter(by_seed.values())))) is not None:
                clm, mlm = (math.fsum(weight * score.mean for weight, score in side) for side in common[1])
                ahead[steps] = mlm >= clm
        since = [step for step in ahead if all(is_ahead for later, is_ahead in ahead.items() if later >= step)]
        if ahead:
            when = f"MLM is ahead from step {since[0]:,} on" if since else f"CLM is still ahead at step {max(ahead):,}"
            sentences.append(f"{size} on {family}: {when}")
    return sentences


def judge_rate_sensitivity(models: ModelSelector, interval_draws: int = 0) -> PendingVerdict:
    """Test claim 3, scores vary more over the fine-tuning rates for MLM than for CLM; `interval_draws` is unused."""
    names, evidence = (models.mlm, models.clm), models.evidence
    contrasts, variances, unfinished = [], [], 0
    places = [(family, dataset) for family, dataset in evidence.datasets() if not is_average(dataset)]
    for (size, by_seed), (family, dataset) in ((one, place) for one in models.final_pairs().items() for place in places):
        scores_by_seed = {seed: [evidence.find(key, dataset, family) for key in pair] for seed, pair in by_seed.items()}
        grids = {
            seed: rate_grids
            for seed, pair in scores_by_seed.items()
            if None not in pair and (rate_grids := _common_rate_grids(pair)) is not None
        }
        if not grids:
            continue
        sides = {seed: scores_by_seed[seed] for seed in grids}
        values, rate_variances = _scaled_rate_variances(grids)
        valued = {
            seed: [
                replace(side, seed_scores=values_by_side, load_examples=dict)
                for side, values_by_side in zip(pair, values[seed], strict=True)
            ]
            for seed, pair in sides.items()
        }
        source, terms = (
            {seed: [(1.0, mlm), (-1.0, clm)] for seed, (mlm, clm) in values_by_side.items()} for values_by_side in (sides, valued)
        )
        contrasts.append(Contrast(names, size, family, dataset, size, terms, source))
        variances.append(rate_variances)
        for seed, pair in sides.items():
            unfinished += len({rate for side in pair for rate in (*side.rate_scores, *side.failed_seeds)}) - len(grids[seed][0])
    notes = []
    if contrasts:
        spreads = [100 * math.sqrt(max(0.0, float(np.mean(side)))) for side in zip(*variances, strict=True)]
        notes = [f"standard deviation over the rates, without the seeds' part: {spreads[0]:.2f} and {spreads[1]:.2f} points"]
    compared = [[score for _, score in pair] for contrast in contrasts for pair in contrast.source.values()]
    failed = [sum(len(seeds) for pair in compared for seeds in pair[side].failed_seeds.values()) for side in (0, 1)]
    if any(failed):
        counts = " and ".join(f"{count} of {name}" for count, name in zip(failed, names, strict=True) if count)
        unknown = any(score.failed_seeds and score.baseline is None for pair in compared for score in pair)
        notes.append(f"failed runs count as {'the worst run of that data set' if unknown else 'the trivial baseline'}: {counts}")
    if unfinished:
        notes.append(f"rates left out because runs of either model are not finished: {unfinished}")
    return judge_direction(contrasts, 0, "; ".join(notes))


def _common_rate_grids(sides: Sequence[Score]) -> list[np.ndarray] | None:
    """Return the scores of each side, float[R, S], at the rates that both have finished; None below two rates or seeds.

    A failed run scores the trivial baseline, or the worst run of both sides if the results do not contain it.
    """
    scores = [score for side in sides for by_seed in side.rate_scores.values() for score in by_seed.values()]
    grids: list[Mapping[float, Mapping[int, float]]] = []
    for side in sides:
        every = replace(
            side, baseline=min(scores, default=0.0) if side.baseline is None else side.baseline
        ).rate_scores_with_failures
        most = max(map(len, every.values()), default=0)
        grids.append({rate: by_seed for rate, by_seed in every.items() if len(by_seed) == most})
    rates = sorted(set(grids[0]) & set(grids[1]))
    seeds = sorted(set.intersection(*(set(grid[rate]) for grid in grids for rate in rates))) if rates else []
    if min(len(rates), len(seeds)) < 2:
        return None
    return [np.array([[grid[rate][seed] for seed in seeds] for rate in rates]) for grid in grids]


def _scaled_rate_variances(grids: Mapping[int, Sequence[np.ndarray]]) -> tuple[dict[int, list[dict[int, float]]], list[float]]:
    """Return variances between rates of both sides, scaled to points, by pretraining and fine-tuning seed; and their raw means.

    `grids`: float[R, S] of both sides by pretraining seed. Divided by twice the root mean square spread of both sides, noise
    included, a difference of variances is nearly one of standard deviations.
    """
    mean_variance = float(np.mean([np.var(grid, axis=0, ddof=1).mean() for pair in grids.values() for grid in pair]))
    scale = 2 * math.sqrt(mean_variance) if mean_variance > 0 else 1.0
    between = {seed: [inference.rate_variance_pseudo_values(grid) for grid in pair] for seed, pair in grids.items()}
    means = np.mean([[values.mean() for values in pair] for pair in between.values()], axis=0).tolist()
    return {seed: [dict(enumerate(values / scale)) for values in pair] for seed, pair in between.items()}, means


def judge_clm_quarter(models: ModelSelector, interval_draws: int) -> PendingVerdict:
    """Test claim 4, 20 to 30 % CLM and then MLM is above MLM alone at equal size, steps and mask ratio."""

    def budget_key(key: ModelKey) -> tuple[str, int, float]:
        """Return the properties that both sides share: size, steps and mask ratio."""
        return key.size, key.steps, key.mask_ratio or 0.0

    shares = [one for one in models.model_keys if one.decayed and not one.cpt_mlm_steps and one.mlm_steps]
    nearest: dict[tuple, float] = {}
    for one in shares:
        if one.clm_steps:
            nearest[budget_key(one)] = min(nearest.get(budget_key(one), 1.0), one.clm_share, key=lambda share: abs(share - 0.25))
    pairs = models.match_pairs(
        lambda one: QUARTER_RANGE[0] <= one.clm_share <= QUARTER_RANGE[1] and one.clm_share == nearest[budget_key(one)],
        lambda one: not one.clm_steps,
        budget_key,
        shares,
    )
    places = [(f"{size}, {steps:,} steps, {format_percent(ratio)}", pair) for (size, steps, ratio), pair in sorted(pairs.items())]
    return judge_direction(build_contrasts(models.evidence, ("25 % CLM, then MLM", "MLM alone"), places), interval_draws)


def judge_continued_pretraining(models: ModelSelector, interval_draws: int) -> PendingVerdict:
    """Test claim 5, continued MLM ends higher from a CLM than from an MLM model; the longest continuations decide."""
    pairs = models.match_pairs(
        lambda one: one.clm_steps > 0 and not one.mlm_steps,
        lambda one: not one.clm_steps and one.mlm_steps > 0,
        lambda one: (one.size, one.clm_steps + one.mlm_steps, one.cpt_mlm_steps, one.mask_ratio or 0.0),
        [one for one in models.model_keys if one.decayed and one.cpt_mlm_steps > 0],
    )
    longest: dict[tuple, int] = defaultdict(int)
    for size, before, more, ratio in pairs:
        longest[size, before, ratio] = max(more, longest[size, before, ratio])
    contrasts, last, by_length = [], [], defaultdict(list)
    for (size, before, more, ratio), pair in sorted(pairs.items()):
        place = (f"{size}, {more:,} after {before:,} steps", pair)
        some = build_contrasts(models.evidence, ("MLM on CLM", "more MLM on MLM"), [place])
        contrasts += some
        if more == longest[size, before, ratio]:
            last += some
        else:
            by_length[more] += drop_collapsed(some)
    pooled = [(length, compare_contrasts(some).difference) for length, some in sorted(by_length.items()) if some]
    shorter = [f"after {length:,} steps it is {format_points(difference)}" for length, difference in pooled]
    return judge_direction(contrasts, interval_draws, "; ".join(shorter), last)


def judge_mask_ratios(models: ModelSelector, interval_draws: int = 0) -> PendingVerdict:
    """Test claim 6, no MLM mask ratio is best everywhere: each is clearly beaten somewhere; `interval_draws` is unused.

    Holds if each ratio is significantly beaten somewhere; reversed if one never is and is above each other ratio overall.
    """
    decayed = [key for key in models.planned_model_keys if key.decayed and not key.clm_steps and not key.cpt_mlm_steps]
    mlm_only = [key for key in decayed if key.mask_ratio]
    ratios_by_budget: dict[tuple[str, int], set[float]] = defaultdict(set)
    for key in mlm_only:
        ratios_by_budget[key.size, key.steps].add(key.mask_ratio)
    several = {place: sorted(ratios) for place, ratios in ratios_by_budget.items() if len(ratios) > 1}
    longest = {size: max(steps for of, steps in several if of == size) for size, _ in several}
    contrasts: list[Contrast] = []
    sides: list[tuple[float, float]] = []
    for size, steps in longest.items():
        evaluated = [one for one in models.model_keys if one in mlm_only and (one.size, one.steps) == (size, steps)]
        for first, second in itertools.combinations(several[size, steps], 2):
            is_side = (lambda key, ratio=ratio: key.mask_ratio == ratio for ratio in (first, second))
            places = [(size, pair) for pair in models.match_pairs(*is_side, model_keys=evaluated).values()]
            some = build_contrasts(models.evidence, (format_percent(first), format_percent(second)), places)
            contrasts += some
            sides += [(first, second)] * len(some)
    borrowed = between_run_variance(contrasts)
    comparisons = adjust_comparisons([compare_contrasts([contrast], borrowed) for contrast in contrasts])
    lost: dict[float, list[Comparison]] = {ratio: [] for ratio in sorted({ratio for pair in sides for ratio in pair})}
    for (first, second), one in zip(sides, comparisons, strict=True):
        if not math.isnan(one.p_adjusted):
            lost[first if one.difference < 0 else second].append(one)
    clearest = {ratio: min(of_ratio, key=lambda one: one.p_adjusted, default=None) for ratio, of_ratio in lost.items()}
    note = "; ".join(f"{format_percent(ratio)} {_describe_defeat(one)}" for ratio, one in clearest.items())
    p, outcome = max((one.p_adjusted if one else 1.0 for one in clearest.values()), default=math.nan), "holds"
    if all(math.isnan(one.p) for one in comparisons):
        p = math.nan
    unbeaten = [ratio for ratio, one in clearest.items() if one is None or one.p_adjusted >= LEVEL]
    if not p < LEVEL and len(unbeaten) == 1:
        against = []
        for pair in dict.fromkeys(pair for pair in sorted(sides) if unbeaten[0] in pair):
            if of_pair := drop_collapsed([contrast for contrast, names in zip(contrasts, sides, strict=True) if names == pair]):
                against.append((compare_contrasts(of_pair, borrowed), pair[0] == unbeaten[0]))
        if len(against) == len(lost) - 1 and all((one.difference > 0) == first for one, first in against):
            p, outcome = float(np.max([one.p for one, _ in against])), "reversed"
    return PendingVerdict([put_better_first(one) for one in comparisons], p=p, outcome=outcome, note=note, contrasts=contrasts)


def _describe_defeat(worst: Comparison | None) -> str:
    """Describe the most significant comparison that a mask ratio lost."""
    if worst is None or worst.p_adjusted >= LEVEL:
        return "is not shown to be beaten anywhere"
    better = worst.left if worst.difference > 0 else worst.right
    return f"is beaten by {better} on {worst.family} at {worst.where} ({format_points(abs(worst.difference))})"
