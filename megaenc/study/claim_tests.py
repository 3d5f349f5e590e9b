"""The claims of the study one by one: what each compares, and the p and the direction that its verdict will rest on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megaenc.finetune.examples import Family
from megaenc.study import statistics
from megaenc.study.comparisons import Comparison, Line, Outcome, adjusted, lines_of, of_family, pooled
from megaenc.study.models import Models, Pair, only_clm
from megaenc.study.pooling import lending, test
from megaenc.study.setting import Setting
from megaenc.study.setups import percent
from megaenc.study.statistics import LEVEL

MARGIN = 0.01
"""Two models that differ by less than one point (of a hundred) are about equal."""
EARLY = 0.25
"""The first quarter of the steps is early."""
QUARTER = (0.2, 0.3)
"""CLM shares that count as 25 %: the study's own are 10 of 42, 5 of 22 and 3 of 12 thousand steps."""

FAMILIES = tuple(str(family) for family in Family)


@dataclass(frozen=True)
class Draft:
    """A verdict to be: p is corrected over all claims before it is one."""

    claim: int
    part: str
    title: str
    question: str
    missing: str
    """what it takes, said where it is not there"""
    comparisons: list[Comparison] = field(default_factory=list)
    overall: Comparison | None = None
    p: float = math.nan
    way: Outcome = "not resolved"
    """the verdict if p holds after the correction"""
    note: str = ""
    decisive: list[Comparison] = field(default_factory=list)
    """those that must not clearly go the other way"""
    lines: list[Line] = field(default_factory=list)
    """what was compared, as the evidence has it"""


def _gaps(models: Models, family: Family) -> list[Line]:
    """MLM less CLM, a line for each size."""
    names = (models.mlm, models.clm)
    found = [lines_of(models.evidence, names, size, pair, [family]) for size, pair in models.final().items()]
    return [line for of_size in found for line in of_size]


def mlm_above(models: Models, draws: int, part: str, family: Family) -> Draft:
    """1a, 1b: MLM less CLM at equal steps, over sizes."""
    draft = Draft(
        1,
        part,
        f"MLM is above CLM on {family}",
        f"Is {models.mlm} above CLM on {_WORDS[family]}, trained for as many steps?",
        f"an MLM and a CLM model of one size and as many steps, both decayed and evaluated on {family}",
    )
    return directional(draft, _gaps(models, family), draws)


def about_equal(models: Models, draws: int) -> Draft:
    """1c: the same on TC, within a margin either way (two one-sided tests)."""
    draft = Draft(
        1,
        "c",
        "MLM and CLM are about equal on TC",
        f"Do {models.mlm} and CLM differ by less than {100 * MARGIN:g} point on token classification?",
        "an MLM and a CLM model of one size and as many steps, both decayed and evaluated on TC",
    )
    if not (lines := _gaps(models, Family.TC)):
        return draft
    lent, sound = lending(lines), comparable(lines)
    each = [test(line, lent, MARGIN) for line in lines]
    corrected = statistics.holm([_inside(one) for one in each])
    comparisons = [
        replace(one, p=_inside(one), p_adjusted=p, verdict=_equal(one, p)) for one, p in zip(each, corrected, strict=True)
    ]
    draft = replace(draft, lines=lines, comparisons=comparisons)
    if not sound:
        return draft
    overall = test(pooled(sound), lent, MARGIN, draws)
    note = f"equal means within {100 * MARGIN:g} point either way, and p is that of a larger difference"
    p, way = _inside(overall), "holds"
    if _equal(overall, math.nan) == "reversed":  # the opposite of what that p is of: of the interval, and of no difference
        note, p, way = f"the interval lies beyond the {100 * MARGIN:g} point that counts as equal", overall.p, "reversed"
    return replace(draft, overall=replace(overall, p=p), p=p, way=way, note=note, decisive=comparisons)


def _inside(one: Comparison) -> float:
    """p of a difference beyond the margin; nan where there is no p at all."""
    return math.nan if math.isnan(one.p) else one.test.margin_p


def _equal(one: Comparison, p: float) -> Outcome:
    if math.isnan(one.p):
        return "not resolved"
    if p < LEVEL:
        return "holds"
    return "reversed" if one.low > 100 * MARGIN or one.high < -100 * MARGIN else "not resolved"


def gap_narrows(models: Models, draws: int) -> Draft:
    """1d: the linear trend of the gap over the sizes by rank, from the smallest to the largest."""
    draft = Draft(
        1,
        "d",
        "The gap on IR narrows with size",
        f"Is the difference between {models.mlm} and CLM on retrieval smaller in larger models?",
        "MLM and CLM models of at least two sizes, decayed and evaluated on IR",
    )
    if len(lines := _gaps(models, Family.IR)) < 2:
        return draft
    if not models.ordered:
        return replace(draft, missing="sizes in a known order: names such as 210M and 1B, or the manifest that has their shapes")
    lent, sound = lending(lines), comparable(lines)
    draft = replace(draft, lines=lines, comparisons=adjusted([test(line, lent) for line in lines]))
    if len(sound) < 2:
        return draft
    gap, middle = test(pooled(sound), lent), (len(sound) - 1) / 2
    ranks = [at - middle for at in range(len(sound))]
    sign = -1 if gap.difference > 0 else 1  # the trend of its size, turned so that narrowing is above 0
    weights = [sign * rank * (len(sound) - 1) / math.fsum(rank**2 for rank in ranks) for rank in ranks]
    names = ("gap of the smallest", "that of the largest")
    trend = replace(pooled(sound, weights), where=f"{sound[0].where} to {sound[-1].where}", names=names)
    overall = test(trend, lent, draws=draws)
    p = greatest([overall.p, gap.p])  # without a gap there is nothing to narrow
    way = "holds" if overall.difference > 0 else "reversed"
    return replace(draft, overall=overall, p=p, way=way, note=f"the mean gap is {points(gap.difference)}")


def early(models: Models, draws: int) -> Draft:
    """2: CLM less MLM at each intermediate checkpoint that is early."""
    draft = Draft(
        2,
        "",
        "CLM learns faster early",
        f"Is CLM above {models.mlm} after as many of the first steps?",
        f"intermediate checkpoints of CLM and MLM runs of one size at the same steps, in the first {EARLY:.0%} of them",
    )
    pairs = models.pairs(
        lambda one: not one.decayed and only_clm(one),
        lambda one: not one.decayed and models.only_mlm(one),
        lambda one: (one.size, one.steps),
    )
    ends = models.ends()
    lines = [
        line
        for (size, steps), pair in sorted(pairs.items())
        if steps <= EARLY * ends[size]
        for line in lines_of(models.evidence, (models.clm, models.mlm), f"{size} at {steps:,} steps", pair, FAMILIES)
    ]
    steps = sorted({at for size, at in pairs if at <= EARLY * ends[size]})
    crossing = "; ".join(_crossings(models, pairs))
    first = f"early is step {', '.join(f'{at:,}' for at in steps)}"
    return directional(draft, lines, draws, f"{first}; {crossing}" if crossing else first)


def _crossings(models: Models, pairs: dict[tuple, Pair]) -> list[str]:
    """For each size and family, from which step on the mean of MLM is no longer below that of CLM."""
    found = []
    for size in dict.fromkeys(size for size, _ in pairs):
        for family in FAMILIES:
            ahead: dict[int, bool] = {}
            for (of, steps), by_seed in pairs.items():
                clm, mlm = next(iter(by_seed.values()))
                if of == size and (standing := of_family(models.evidence, family, (clm, mlm))) is not None:
                    means = [math.fsum(weight * score.mean for weight, score in side) for side in standing[1]]
                    ahead[steps] = means[1] >= means[0]
            steps = sorted(ahead)
            since = next((at for here, at in enumerate(steps) if all(ahead[later] for later in steps[here:])), None)
            if steps:
                when = (
                    f"MLM is ahead from step {since:,} on" if since is not None else f"CLM is still ahead at step {steps[-1]:,}"
                )
                found.append(f"{size} on {family}: {when}")
    return found


def quarter_first(models: Models, draws: int) -> Draft:
    """4: at each budget, CLM for about a quarter of the steps and then MLM, less MLM alone."""
    draft = Draft(
        4,
        "",
        "25 % CLM, then MLM, beats MLM alone",
        "At equal steps, is a quarter of CLM and then MLM above MLM from the start?",
        f"a decayed model with {QUARTER[0]:.0%} to {QUARTER[1]:.0%} CLM before MLM, and MLM alone of that size, ratio and steps",
    )
    shares = {one for one in models.settings if one.decayed and not one.cpt_mlm_steps and one.mlm_steps}
    nearest: dict[tuple, float] = {}
    for one in shares:
        if one.clm_steps:
            nearest[_run(one)] = min(nearest.get(_run(one), 1.0), one.clm_share, key=lambda share: abs(share - 0.25))
    pairs = models.pairs(
        lambda one: one in shares and QUARTER[0] <= one.clm_share <= QUARTER[1] and one.clm_share == nearest[_run(one)],
        lambda one: one in shares and not one.clm_steps,
        _run,
    )
    lines = [
        line
        for (size, steps, ratio), pair in sorted(pairs.items())
        for line in lines_of(models.evidence, ("25 % CLM, then MLM", "MLM alone"), _place(size, steps, ratio), pair, FAMILIES)
    ]
    return directional(draft, lines, draws)


def continued(models: Models, draws: int) -> Draft:
    """5: at equal lengths; the longest decides, as a model that changes its objective needs time to."""
    draft = Draft(
        5,
        "",
        "MLM on a finished CLM model beats more MLM",
        "After as many more MLM steps, the most there are, is a model that began as CLM above one that began as MLM?",
        "models of continued pretraining from a CLM and from an MLM model, of one size and as many steps before and after",
    )
    pairs = models.pairs(
        lambda one: one.decayed and one.cpt_mlm_steps > 0 and one.clm_steps > 0 and not one.mlm_steps,
        lambda one: one.decayed and one.cpt_mlm_steps > 0 and not one.clm_steps and one.mlm_steps > 0,
        lambda one: (one.size, one.clm_steps + one.mlm_steps, one.cpt_mlm_steps, one.mask_ratio or 0.0),
    )
    names = ("MLM on CLM", "more MLM on MLM")
    lines: list[Line] = []
    lengths: list[tuple[int, bool]] = []
    for key, pair in sorted(pairs.items()):
        size, before, more, ratio = key
        longest = more == max(of for *start, of, mask in pairs if (*start, mask) == (size, before, ratio))
        some = lines_of(models.evidence, names, f"{size}, {more:,} after {before:,} steps", pair, FAMILIES)
        lines, lengths = lines + some, lengths + [(more, longest)] * len(some)
    last = [line for line, (_, longest) in zip(lines, lengths, strict=True) if longest]
    shorter = []
    for length in sorted({more for more, longest in lengths if not longest}):
        of_length = comparable([line for line, found in zip(lines, lengths, strict=True) if found == (length, False)])
        if of_length:
            shorter.append(f"after {length:,} steps it is {points(test(pooled(of_length)).difference)}")
    return directional(draft, lines, draws, "; ".join(shorter), last)


def directional(draft: Draft, lines: Sequence[Line], draws: int, note: str = "", decisive: Sequence[Line] = ()) -> Draft:
    """The claim that the left side is above the right one: the `decisive` lines pooled, or all, and each line alone."""
    if not lines:
        return draft
    lent = lending(lines)
    comparisons = adjusted([test(line, lent) for line in lines])
    sound = comparable(decisive or lines)
    draft = replace(draft, lines=list(lines), comparisons=comparisons, note=note)
    if not sound:
        return draft
    overall = test(pooled(sound), lent, draws=draws)
    way = "holds" if overall.difference > 0 else "reversed"
    among = [one for one, line in zip(comparisons, lines, strict=True) if line in sound]
    return replace(draft, overall=overall, p=overall.p, way=way, decisive=among)


def comparable(lines: Sequence[Line]) -> list[Line]:
    """Those of which no side has collapsed: only these are pooled."""
    return [line for line in lines if not line.collapsed]


def greatest(p: Sequence[float]) -> float:
    """What all of several tests say together; nan if one says nothing."""
    return math.nan if any(math.isnan(one) for one in p) else max(p)


def points(difference: float) -> str:
    return f"{difference:+.2f} points"


def _run(one: Setting) -> tuple[str, int, float]:
    return one.size, one.steps, one.mask_ratio or 0.0


def _place(size: str, steps: int, ratio: float) -> str:
    return f"{size}, {steps:,} steps, {percent(ratio)}"


_WORDS = {
    Family.SC: "sequence classification",
    Family.TC: "token classification",
    Family.QA: "question answering",
    Family.IR: "retrieval",
}
