"""Decision on one claim: pooled tests of direction and of equality, by task family, with and without collapsed models."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megaenc.finetune.examples import TaskFamily
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison, Contrast, ModelSelector, Outcome, Unit, adjust_comparisons
from megaenc.study.stats.inference import LEVEL
from megaenc.study.stats.pooling import BetweenRunVariances, between_run_variance, compare_contrasts
from megaenc.study.stats.run_noise import RunNoise

EQUALITY_MARGINS: Mapping[str, float] = {TaskFamily.SC: 0.018, TaskFamily.TC: 0.003, TaskFamily.QA: 0.099, TaskFamily.IR: 0.023}
"""Differences, as fractions, that count as about equal: one standard deviation of the family's averages over the published base
and continued models."""


@dataclass(frozen=True)
class TestScope:
    """Models that a claim is tested on, and the noise if the test is about another run."""

    __test__ = False  # pytest collects classes by name

    models: ModelSelector
    noise: RunNoise | None = None
    """noise between pretraining runs; None to test these trained models only"""

    def compare(self, contrasts: Sequence[Contrast], borrowed: BetweenRunVariances, **options) -> Comparison:
        """Test contrasts against 0 in this scope, as `compare_contrasts` with its `options`.

        Only runs of the same task families lend their variance to contrasts that have one run each.
        """
        is_lent = any(len(one.pretraining_seeds) > 1 or one.family in borrowed for one in contrasts)
        return compare_contrasts(contrasts, borrowed if is_lent else {}, noise=self.noise, **options)


@dataclass(frozen=True)
class PendingVerdict:
    """Test result of a claim before p is corrected over all claims: comparisons, the pooled one, p, outcome and note."""

    comparisons: list[Comparison] = field(default_factory=list)
    overall: Comparison | None = None
    p: float = math.nan
    outcome: Outcome = "not resolved"
    """verdict if the corrected p is significant"""
    note: str = ""
    families: list[Comparison] = field(default_factory=list)
    """pooled comparison of each task family, if there are several; p corrected over them"""
    decisive: list[Comparison] = field(default_factory=list)
    """comparisons of a claim on one task family, which must not be significant in the opposite direction"""
    contrasts: list[Contrast] = field(default_factory=list)
    """tested contrasts"""
    requirement: str = ""
    """results that the test needs, if other than the claim's usual requirement"""

    def decide(self, p: float, tests: int = 1) -> Outcome:
        """Return the outcome for the corrected `p`; mixed if families or decisive comparisons contradict it or each other.

        `tests`: number of claims over which the p of families and comparisons are corrected too.
        """
        clear = [one for one in (*self.families, *self.decisive) if one.p_adjusted * tests < LEVEL]
        outcomes = {one.verdict for one in clear} & {"holds", "reversed"}
        if len(outcomes | ({self.outcome} if p < LEVEL else set())) == 2:
            return "mixed"
        return self.outcome if p < LEVEL else "not resolved"


def format_difference(difference: float, unit: Unit = "points") -> str:
    """Format a difference with its sign, two decimals and unit, such as `+0.12 points`."""
    return f"{difference:+.2f} {'of both variances' if unit == 'share' else unit}"


def drop_collapsed(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Return the contrasts that have no collapsed side, in the same order."""
    return [contrast for contrast in contrasts if not contrast.collapsed]


def format_p_value(p: float) -> str:
    """Format p with two significant digits, such as 0.023; `< 0.0001` if it is smaller, and 1 from 0.995."""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.995 else "1"


def format_p(p: float) -> str:
    """Format p as `p = 0.023`, `p < 0.0001`, or `no p` for NaN."""
    text = format_p_value(p)
    return "no p" if math.isnan(p) else f"p {text}" if text.startswith("<") else f"p = {text}"


def direction_outcome(overall: Comparison) -> Outcome:
    """Return `holds` for a positive difference, else `reversed`."""
    return "holds" if overall.difference > 0 else "reversed"


def family_weights(contrasts: Sequence[Contrast]) -> list[float]:
    """Return weights by which each task family counts equally, and each contrast of a family."""
    counts = Counter(contrast.family for contrast in contrasts)
    return [1 / (len(counts) * counts[one.family]) for one in contrasts]


def judge_direction(
    scope: TestScope,
    contrasts: list[Contrast],
    note: str = "",
    decisive: Sequence[Contrast] = (),
    unit: Unit = "points",
    twice: bool = True,
) -> PendingVerdict:
    """Test each contrast for left above right; p and outcome: `decisive` (default: all) pooled.

    Contrasts of several task families in points are pooled in standard deviations over the study's models, of each data set, so
    that no wide data set decides; each family counts equally. Collapsed models count with their scores, and the claim must also
    hold without them, which the caller tests if `twice` is False.
    """
    borrowed, chosen = between_run_variance(contrasts), list(decisive or contrasts)
    pool_all = pool_twice if twice else lambda some, pool: (pool(some), pool(some).p, "")
    comparisons = adjust_comparisons([scope.compare([contrast], borrowed, unit=unit) for contrast in contrasts])
    draft = PendingVerdict(comparisons, note=note, contrasts=contrasts)
    if not chosen:
        return draft
    by_family = _split_by_family(chosen)
    standard = [scope.models.standardise(one) for one in chosen] if len(by_family) > 1 and unit == "points" else [None]
    is_standardised = None not in standard
    pooled_borrowed = between_run_variance(standard) if is_standardised else borrowed

    def pool(some: Sequence[Contrast]) -> Comparison:
        """Pool contrasts with equal weight of each family."""
        unit_of_pool = "SD" if is_standardised else unit
        return scope.compare(some, pooled_borrowed, weights=family_weights(some), unit=unit_of_pool)

    overall, p, caveat = pool_all(standard if is_standardised else chosen, pool)
    if len(by_family) > 1 and unit == "points" and not is_standardised:
        note = "; ".join(filter(None, (note, "pooled in points, as fewer than three decayed models have scores")))
    families = [
        pool_twice(of_family, lambda some: scope.compare(some, borrowed, unit=unit))[:2]
        for of_family in by_family.values()
        if len(by_family) > 1
    ]
    single = [one for one, contrast in zip(comparisons, contrasts, strict=True) if contrast in chosen and not one.collapsed]
    return replace(
        draft,
        overall=overall,
        p=p,
        outcome=direction_outcome(overall),
        note="; ".join(filter(None, (note, caveat))),
        families=adjust_comparisons([replace(one, p=family_p) for one, family_p in families]),
        decisive=[] if families else single,
    )


def pool_twice(
    contrasts: Sequence[Contrast], pool: Callable[[Sequence[Contrast]], Comparison | None], one_sign: bool = True
) -> tuple[Comparison, float, str]:
    """Pool all contrasts, and those without a collapsed side; return the first comparison, the larger p, and a note.

    `one_sign`: p is 1 if the signs differ. Only the first test counts if every contrast has a collapsed side, or if `pool`
    returns None for the others.
    """
    overall, kept = pool(contrasts), drop_collapsed(contrasts)
    if len(kept) == len(contrasts):
        return overall, overall.p, ""
    other = pool(kept) if kept else None
    if other is None:
        return overall, overall.p, "nothing is left without the collapsed models, which count with their scores"
    is_same = not one_sign or (overall.difference > 0) == (other.difference > 0)
    p = math.nan if math.isnan(overall.p + other.p) else max(overall.p, other.p) if is_same else 1.0
    difference = format_difference(other.difference, other.unit)
    return overall, p, f"without the collapsed models {difference} ({format_p(other.p)})"


def test_without_collapsed(test: Callable[[TestScope], PendingVerdict]) -> Callable[[TestScope], PendingVerdict]:
    """Wrap a claim's test to run it also without the collapsed models, and take the larger p (1 if the outcomes differ)."""

    @functools.wraps(test)
    def test_twice(scope: TestScope) -> PendingVerdict:
        draft = test(scope)
        used = [score for contrast in draft.contrasts for terms in contrast.weighted_scores for _, score in terms]
        collapsed = {score.model_key for score in used if score.is_collapsed}
        if not collapsed:
            return draft
        without = test(replace(scope, models=scope.models.without(collapsed)))
        if not without.comparisons:
            return replace(draft, note="; ".join(filter(None, (draft.note, "nothing is left without the collapsed models"))))
        p = math.nan if math.isnan(draft.p + without.p) else max(draft.p, without.p) if draft.outcome == without.outcome else 1.0
        caveat = (
            f"without the collapsed models {without.outcome if without.p < LEVEL else 'not resolved'} ({format_p(without.p)})"
        )
        return replace(draft, p=p, note="; ".join(filter(None, (draft.note, caveat))))

    return test_twice


def _split_by_family(contrasts: Sequence[Contrast]) -> dict[str, list[Contrast]]:
    """Return the contrasts by task family, in order of appearance."""
    by_family: dict[str, list[Contrast]] = {}
    for contrast in contrasts:
        by_family.setdefault(contrast.family, []).append(contrast)
    return by_family


def judge_equality(scope: TestScope, contrasts: list[Contrast], at_least: bool = False, note: str = "") -> PendingVerdict:
    """Test that each task family differs by less than its EQUALITY_MARGINS; `at_least`: that left is not lower by as much.

    Two one-sided tests for each family, of which all must be significant. Reversed if a family differs by more than its margin,
    by a one-sided test. Collapsed models count with their scores, and both outcomes must also hold without them.
    """
    borrowed, by_family = between_run_variance(contrasts), _split_by_family(contrasts)

    def pool(some: Sequence[Contrast]) -> Comparison:
        """Pool contrasts of one family, with the p of the margin; NaN if the test against 0 has none."""
        one, margin = scope.compare(some, borrowed), EQUALITY_MARGINS[some[0].family]
        above, below = one.test.p_above(-margin), one.test.p_below(margin)
        return replace(one, p=above if at_least else max(above, below))

    def pool_beyond(some: Sequence[Contrast]) -> Comparison:
        """Pool contrasts of one family, with the p of a difference within the margin."""
        one, margin = scope.compare(some, borrowed), EQUALITY_MARGINS[some[0].family]
        below, above = one.test.p_below(-margin), one.test.p_above(margin)
        return replace(one, p=below if at_least else min(below, above))

    def adjust(each: Sequence[Comparison], beyond: Sequence[float]) -> list[Comparison]:
        """Correct p by Holm and set the verdicts; `beyond`: p of a difference within the margin, which counts if significant."""
        corrected = zip(each, inference.holm_adjust([one.p for one in each]), inference.holm_adjust(beyond), strict=True)
        verdicts = [
            (one, other, "reversed") if other < LEVEL else (one, p, "holds" if p < LEVEL else "not resolved")
            for one, p, other in corrected
        ]
        return [replace(one, p_adjusted=p, verdict=verdict) for one, p, verdict in verdicts]

    if not contrasts:
        return PendingVerdict(note=note)
    comparisons = adjust([pool([contrast]) for contrast in contrasts], [pool_beyond([contrast]).p for contrast in contrasts])
    tests = [pool_twice(of_family, pool, one_sign=False) for of_family in by_family.values()]
    p_beyond = [pool_twice(of_family, pool_beyond, one_sign=False)[1] for of_family in by_family.values()]
    families = adjust([replace(one, p=p) for one, p, _ in tests], p_beyond)
    margins = ", ".join(
        f"{100 * EQUALITY_MARGINS[family]:g}{' points' * (not at)} on {family}" for at, family in enumerate(by_family)
    )
    meaning = f"{'not lower by' if at_least else 'equal within'} {margins}, and p is that of a larger difference"
    p, outcome = max((one.p for one in families), key=lambda value: math.inf if math.isnan(value) else value), "holds"
    if beyond := [one for one in families if one.verdict == "reversed"]:  # here p is that of a smaller difference
        outcome, p = "reversed", min(one.p_adjusted for one in beyond)
        meaning = f"beyond the margin on {', '.join(one.family for one in beyond)} ({margins})"
    is_single = len(families) == 1
    return PendingVerdict(
        comparisons,
        replace(families[0] if is_single else judge_direction(scope, contrasts).overall, p=p),
        p,
        outcome,
        "; ".join(filter(None, (note, meaning, *dict.fromkeys(caveat for *_, caveat in tests)))),
        [] if is_single else families,
        [one for one in comparisons if not one.collapsed] if is_single else [],
        contrasts,
    )
