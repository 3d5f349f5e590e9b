"""The claims of the study one by one: what each compares, and the p and the direction that its verdict will rest on."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megaenc.finetune.examples import TaskFamily
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.results.evidence import Score
from megaenc.study.results.groups import is_average, format_percent, is_size_order_known
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import (
    Comparison,
    Contrast,
    ModelSelector,
    Outcome,
    ModelPairs,
    adjust_comparisons,
    put_better_first,
    build_contrasts,
    family_terms,
    is_clm_only,
)
from megaenc.study.stats.inference import LEVEL
from megaenc.study.stats.pooling import between_run_variance, compare_contrasts

EQUALITY_MARGIN = 0.01
"""Two models that differ by less than one point (of a hundred) are about equal."""
EARLY_SHARE = 0.25
"""The first quarter of the steps is early."""
QUARTER_RANGE = (0.2, 0.3)
"""CLM shares that count as 25 %: the study's own are 10 of 42, 5 of 22 and 3 of 12 thousand steps."""


@dataclass(frozen=True)
class PendingVerdict:
    """A verdict to be: p is corrected over all claims before it is one."""

    comparisons: list[Comparison] = field(default_factory=list)
    overall: Comparison | None = None
    p: float = math.nan
    way: Outcome = "not resolved"
    """the verdict if p holds after the correction"""
    note: str = ""
    decisive: list[Comparison] = field(default_factory=list)
    """those that must not clearly go the other way"""
    lines: list[Contrast] = field(default_factory=list)
    """what was compared, as the evidence has it"""
    missing: str = ""
    """what it takes, if that is not what the claim says"""


def judge_direction(lines: list[Contrast], draws: int, note: str = "", decisive: Sequence[Contrast] = ()) -> PendingVerdict:
    """Test that the left side is above the right one: the `decisive` lines pooled, or all, and each line alone."""
    lent, sound = between_run_variance(lines), drop_collapsed(decisive or lines)
    comparisons = adjust_comparisons([compare_contrasts([line], lent) for line in lines])
    draft = PendingVerdict(comparisons, note=note, lines=lines)
    if not sound:
        return draft
    overall = compare_contrasts(sound, lent, draws=draws)
    among = [one for one, line in zip(comparisons, lines, strict=True) if line in sound]
    return replace(draft, overall=overall, p=overall.p, way=_direction_outcome(overall), decisive=among)


def drop_collapsed(lines: Sequence[Contrast]) -> list[Contrast]:
    """Return those of which no side has collapsed: only these are pooled."""
    return [line for line in lines if not line.collapsed]


def format_points(difference: float) -> str:
    return f"{difference:+.2f} points"


def _direction_outcome(overall: Comparison) -> Outcome:
    return "holds" if overall.difference > 0 else "reversed"


def _mlm_minus_clm(models: ModelSelector, family: TaskFamily) -> list[Contrast]:
    """Return MLM less CLM at equal steps, a line for each size."""
    return build_contrasts(models.evidence, (models.mlm, models.clm), models.final().items(), [family])


def judge_mlm_above_clm(models: ModelSelector, draws: int, family: TaskFamily) -> PendingVerdict:
    """1a, 1b: MLM less CLM, over sizes."""
    return judge_direction(_mlm_minus_clm(models, family), draws)


def judge_equality(models: ModelSelector, draws: int) -> PendingVerdict:
    """1c: the same on TC, within a margin either way (two one-sided tests)."""
    lines = _mlm_minus_clm(models, TaskFamily.TC)
    lent, sound = between_run_variance(lines), drop_collapsed(lines)
    each = [_with_margin_p(compare_contrasts([line], lent, EQUALITY_MARGIN)) for line in lines]
    corrected = inference.holm_adjust([one.p for one in each])
    comparisons = [replace(one, p_adjusted=p, verdict=_equality_outcome(one, p)) for one, p in zip(each, corrected, strict=True)]
    if not sound:
        return PendingVerdict(comparisons, lines=lines)
    apart = compare_contrasts(sound, lent, EQUALITY_MARGIN, draws)
    overall, way = _with_margin_p(apart), "holds"
    note = f"equal means within {100 * EQUALITY_MARGIN:g} point either way, and p is that of a larger difference"
    if _equality_outcome(overall, math.nan) == "reversed":  # the opposite of what that p is of: of the interval, and of no difference
        note = f"the interval lies beyond the {100 * EQUALITY_MARGIN:g} point that counts as equal"
        overall, way = apart, "reversed"
    return PendingVerdict(comparisons, overall, overall.p, way, note, comparisons, lines)


def _with_margin_p(one: Comparison) -> Comparison:
    """Return the same with the p of a difference beyond the margin; nan where there is no p at all."""
    return replace(one, p=math.nan if math.isnan(one.p) else one.test.margin_p)


def _equality_outcome(one: Comparison, p: float) -> Outcome:
    if math.isnan(one.p):
        return "not resolved"
    if p < LEVEL:
        return "holds"
    return "reversed" if one.low > 100 * EQUALITY_MARGIN or one.high < -100 * EQUALITY_MARGIN else "not resolved"


def judge_gap_narrowing(models: ModelSelector, draws: int) -> PendingVerdict:
    """1d: the linear trend of the gap over the sizes by rank, from the smallest to the largest."""
    if len(lines := _mlm_minus_clm(models, TaskFamily.IR)) < 2:
        return PendingVerdict()
    if not is_size_order_known(models.settings, models.evidence.scope.sizes):
        return PendingVerdict(missing="sizes in a known order: names such as 210M and 1B, or the manifest that has their shapes")
    lent, sound = between_run_variance(lines), drop_collapsed(lines)
    draft = PendingVerdict(adjust_comparisons([compare_contrasts([line], lent) for line in lines]), lines=lines)
    if len(sound) < 2:
        return draft
    gap, middle = compare_contrasts(sound, lent), (len(sound) - 1) / 2
    ranks = [at - middle for at in range(len(sound))]
    sign = -1 if gap.difference > 0 else 1  # the trend of its size, turned so that narrowing is above 0
    weights = [sign * rank * (len(sound) - 1) / math.fsum(rank**2 for rank in ranks) for rank in ranks]
    trend = compare_contrasts(sound, lent, draws=draws, weights=weights)
    where = f"{sound[0].where} to {sound[-1].where}"
    overall = replace(trend, left="gap of the smallest", right="that of the largest", where=where)
    p = float(np.max([overall.p, gap.p]))  # without a gap there is nothing to narrow; nan if one is
    return replace(draft, overall=overall, p=p, way=_direction_outcome(overall), note=f"the mean gap is {format_points(gap.difference)}")


def judge_early_steps(models: ModelSelector, draws: int) -> PendingVerdict:
    """2: CLM less MLM at each intermediate checkpoint that is early."""
    pairs = models.pairs(
        lambda one: not one.decayed and is_clm_only(one),
        lambda one: not one.decayed and models.only_mlm(one),
    )
    ends: dict[str, int] = defaultdict(int)  # of the longest run from scratch, be it one that has only checkpoints yet
    for one in models.planned:
        if not one.cpt_mlm_steps:
            ends[one.size] = max(ends[one.size], one.steps, 0 if one.decayed else one.budget)
    early = {(size, steps): pair for (size, steps), pair in sorted(pairs.items()) if steps <= EARLY_SHARE * ends[size]}
    places = [(f"{size} at {steps:,} steps", pair) for (size, steps), pair in early.items()]
    lines = build_contrasts(models.evidence, (models.clm, models.mlm), places)
    first = f"early is step {', '.join(f'{steps:,}' for steps in sorted({steps for _, steps in early}))}"
    return judge_direction(lines, draws, "; ".join([first, *_describe_crossovers(models, pairs)]))


def _describe_crossovers(models: ModelSelector, pairs: dict[tuple, ModelPairs]) -> list[str]:
    """Return for each size and family from which step on the mean of MLM is no longer below that of CLM."""
    found = []
    for size, family in dict.fromkeys((size, family) for size, _ in pairs for family in TaskFamily):
        ahead: dict[int, bool] = {}
        for (of, steps), by_seed in sorted(pairs.items()):
            if of == size and (standing := family_terms(models.evidence, family, next(iter(by_seed.values())))) is not None:
                clm, mlm = (math.fsum(weight * score.mean for weight, score in side) for side in standing[1])
                ahead[steps] = mlm >= clm
        since = [step for step in ahead if all(is_ahead for later, is_ahead in ahead.items() if later >= step)]
        if ahead:
            when = f"MLM is ahead from step {since[0]:,} on" if since else f"CLM is still ahead at step {max(ahead):,}"
            found.append(f"{size} on {family}: {when}")
    return found


def judge_rate_sensitivity(models: ModelSelector, draws: int = 0) -> PendingVerdict:
    """3: the variance between rates, by data set, MLM less CLM, as a difference of standard deviations."""
    names, evidence = (models.mlm, models.clm), models.evidence
    lines, variances, unfinished = [], [], 0
    places = [(family, dataset) for family, dataset in evidence.datasets() if not is_average(dataset)]
    for (size, by_seed), (family, dataset) in ((one, place) for one in models.final().items() for place in places):
        every = {seed: [evidence.find(setting, dataset, family) for setting in pair] for seed, pair in by_seed.items()}
        grids = {seed: found for seed, pair in every.items() if None not in pair and (found := _common_rate_grids(pair)) is not None}
        if not grids:
            continue
        sides = {seed: every[seed] for seed in grids}
        values, apart = _scaled_rate_variances(grids)
        valued = {
            seed: [replace(side, seeds=of, examples=dict) for side, of in zip(pair, values[seed], strict=True)]
            for seed, pair in sides.items()
        }
        source, terms = ({seed: [(1.0, mlm), (-1.0, clm)] for seed, (mlm, clm) in of.items()} for of in (sides, valued))
        lines.append(Contrast(names, size, family, dataset, size, terms, source))
        variances.append(apart)
        for seed, pair in sides.items():
            unfinished += len({rate for side in pair for rate in (*side.rates, *side.failed_seeds)}) - len(grids[seed][0])
    notes = []
    if lines:
        spreads = [100 * math.sqrt(max(0.0, float(np.mean(side)))) for side in zip(*variances, strict=True)]
        notes = [f"standard deviation over the rates, without what seeds do: {spreads[0]:.2f} and {spreads[1]:.2f} points"]
    compared = [[score for _, score in pair] for line in lines for pair in line.source.values()]
    failed = [sum(len(seeds) for pair in compared for seeds in pair[side].failed_seeds.values()) for side in (0, 1)]
    if any(failed):
        counts = " and ".join(f"{count} of {name}" for count, name in zip(failed, names, strict=True) if count)
        unknown = any(score.failed_seeds and score.baseline is None for pair in compared for score in pair)
        notes.append(f"failed runs count as {'the worst run there' if unknown else 'the trivial baseline'}: {counts}")
    if unfinished:
        notes.append(f"rates left out, as not finished with every seed of both: {unfinished}")
    return judge_direction(lines, 0, "; ".join(notes))


def _common_rate_grids(sides: Sequence[Score]) -> list[np.ndarray] | None:
    """Return float[R, S] of each side at the rates both have done with all their seeds; None below two rates or seeds.

    A run that failed scores what the family's trivial baseline does; where results do not say that, the worst of both sides.
    """
    scores = [score for side in sides for by_seed in side.rates.values() for score in by_seed.values()]
    grids: list[Mapping[float, Mapping[int, float]]] = []
    for side in sides:
        every = replace(side, baseline=min(scores, default=0.0) if side.baseline is None else side.baseline).rate_scores_with_failures
        most = max(map(len, every.values()), default=0)
        grids.append({rate: by_seed for rate, by_seed in every.items() if len(by_seed) == most})
    rates = sorted(set(grids[0]) & set(grids[1]))
    seeds = sorted(set.intersection(*(set(grid[rate]) for grid in grids for rate in rates))) if rates else []
    if min(len(rates), len(seeds)) < 2:
        return None
    return [np.array([[grid[rate][seed] for seed in seeds] for rate in rates]) for grid in grids]


def _scaled_rate_variances(grids: Mapping[int, Sequence[np.ndarray]]) -> tuple[dict[int, list[dict[int, float]]], list[float]]:
    """Return by pretraining seed, of both sides, by number of the fine-tuning seed, points; and both variances between rates.

    In points, as a difference of variances over twice the root mean square spread of both, noise included, is nearly that of
    standard deviations; noise moves what it is divided by for both sides alike.
    """
    whole = float(np.mean([np.var(grid, axis=0, ddof=1).mean() for pair in grids.values() for grid in pair]))
    scale = 2 * math.sqrt(whole) if whole > 0 else 1.0
    between = {seed: [inference.rate_variance_pseudo_values(grid) for grid in pair] for seed, pair in grids.items()}
    means = np.mean([[values.mean() for values in pair] for pair in between.values()], axis=0).tolist()
    return {seed: [dict(enumerate(values / scale)) for values in pair] for seed, pair in between.items()}, means


def judge_clm_quarter(models: ModelSelector, draws: int) -> PendingVerdict:
    """4: at each budget, CLM for about a quarter of the steps and then MLM, less MLM alone."""

    def budget(one: ModelKey) -> tuple[str, int, float]:
        return one.size, one.steps, one.mask_ratio or 0.0

    shares = [one for one in models.settings if one.decayed and not one.cpt_mlm_steps and one.mlm_steps]
    nearest: dict[tuple, float] = {}
    for one in shares:
        if one.clm_steps:
            nearest[budget(one)] = min(nearest.get(budget(one), 1.0), one.clm_share, key=lambda share: abs(share - 0.25))
    pairs = models.pairs(
        lambda one: QUARTER_RANGE[0] <= one.clm_share <= QUARTER_RANGE[1] and one.clm_share == nearest[budget(one)],
        lambda one: not one.clm_steps,
        budget,
        shares,
    )
    places = [(f"{size}, {steps:,} steps, {format_percent(ratio)}", pair) for (size, steps, ratio), pair in sorted(pairs.items())]
    return judge_direction(build_contrasts(models.evidence, ("25 % CLM, then MLM", "MLM alone"), places), draws)


def judge_continued_pretraining(models: ModelSelector, draws: int) -> PendingVerdict:
    """5: at equal lengths; the longest decides, as a model that changes its objective needs time to."""
    pairs = models.pairs(
        lambda one: one.clm_steps > 0 and not one.mlm_steps,
        lambda one: not one.clm_steps and one.mlm_steps > 0,
        lambda one: (one.size, one.clm_steps + one.mlm_steps, one.cpt_mlm_steps, one.mask_ratio or 0.0),
        [one for one in models.settings if one.decayed and one.cpt_mlm_steps > 0],
    )
    longest: dict[tuple, int] = defaultdict(int)
    for size, before, more, ratio in pairs:
        longest[size, before, ratio] = max(more, longest[size, before, ratio])
    lines, last, by_length = [], [], defaultdict(list)
    for (size, before, more, ratio), pair in sorted(pairs.items()):
        place = (f"{size}, {more:,} after {before:,} steps", pair)
        some = build_contrasts(models.evidence, ("MLM on CLM", "more MLM on MLM"), [place])
        lines += some
        if more == longest[size, before, ratio]:
            last += some
        else:
            by_length[more] += drop_collapsed(some)
    pooled = [(length, compare_contrasts(some).difference) for length, some in sorted(by_length.items()) if some]
    shorter = [f"after {length:,} steps it is {format_points(difference)}" for length, difference in pooled]
    return judge_direction(lines, draws, "; ".join(shorter), last)


def judge_mask_ratios(models: ModelSelector, draws: int = 0) -> PendingVerdict:
    """6: every two ratios against each other, by size and family.

    Holds where each ratio is clearly beaten somewhere; reversed where one is never and is above each other one overall.
    """
    alone = [one for one in models.planned if one.decayed and not one.clm_steps and not one.cpt_mlm_steps and one.mask_ratio]
    found: dict[tuple[str, int], set[float]] = defaultdict(set)
    for one in alone:
        found[one.size, one.steps].add(one.mask_ratio)
    several = {place: sorted(ratios) for place, ratios in found.items() if len(ratios) > 1}
    longest = {size: max(steps for of, steps in several if of == size) for size, _ in several}
    lines: list[Contrast] = []
    sides: list[tuple[float, float]] = []
    for size, steps in longest.items():
        here = [one for one in models.settings if one in alone and (one.size, one.steps) == (size, steps)]
        for first, second in itertools.combinations(several[size, steps], 2):
            of = (lambda one, ratio=ratio: one.mask_ratio == ratio for ratio in (first, second))
            places = [(size, pair) for pair in models.pairs(*of, among=here).values()]
            some = build_contrasts(models.evidence, (format_percent(first), format_percent(second)), places)
            lines += some
            sides += [(first, second)] * len(some)
    lent = between_run_variance(lines)
    comparisons = adjust_comparisons([compare_contrasts([line], lent) for line in lines])
    lost: dict[float, list[Comparison]] = {ratio: [] for ratio in sorted({ratio for pair in sides for ratio in pair})}
    for (first, second), one in zip(sides, comparisons, strict=True):
        if not math.isnan(one.p_adjusted):
            lost[first if one.difference < 0 else second].append(one)
    clearest = {ratio: min(of_ratio, key=lambda one: one.p_adjusted, default=None) for ratio, of_ratio in lost.items()}
    note = "; ".join(f"{format_percent(ratio)} {_describe_defeat(one)}" for ratio, one in clearest.items())
    p, way = max((one.p_adjusted if one else 1.0 for one in clearest.values()), default=math.nan), "holds"
    if all(math.isnan(one.p) for one in comparisons):
        p = math.nan
    unbeaten = [ratio for ratio, one in clearest.items() if one is None or one.p_adjusted >= LEVEL]
    if not p < LEVEL and len(unbeaten) == 1:
        against = []
        for pair in dict.fromkeys(pair for pair in sorted(sides) if unbeaten[0] in pair):
            if of_pair := drop_collapsed([line for line, names in zip(lines, sides, strict=True) if names == pair]):
                against.append((compare_contrasts(of_pair, lent), pair[0] == unbeaten[0]))
        if len(against) == len(lost) - 1 and all((one.difference > 0) == first for one, first in against):
            p, way = float(np.max([one.p for one, _ in against])), "reversed"
    return PendingVerdict([put_better_first(one) for one in comparisons], p=p, way=way, note=note, lines=lines)


def _describe_defeat(worst: Comparison | None) -> str:
    if worst is None or worst.p_adjusted >= LEVEL:
        return "is not shown to be beaten anywhere"
    better = worst.left if worst.difference > 0 else worst.right
    return f"is beaten by {better} on {worst.family} at {worst.where} ({format_points(abs(worst.difference))})"
