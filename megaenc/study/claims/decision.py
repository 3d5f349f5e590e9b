"""Decision on one claim by pooled tests of direction and of equality.

Claims are also tested without collapsed models, and by task family.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megaenc.finetune.examples import TaskFamily
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import (
    Comparison,
    Contrast,
    ModelSelector,
    Outcome,
    Unit,
    adjust_comparisons,
)
from megaenc.study.stats.inference import LEVEL
from megaenc.study.stats.pooling import BetweenRunVariances, between_run_variance, compare_contrasts
from megaenc.study.stats.run_noise import RunNoise

EQUALITY_MARGINS: Mapping[str, float] = {
    TaskFamily.SC: 0.018,
    TaskFamily.TC: 0.003,
    TaskFamily.QA: 0.099,
    TaskFamily.IR: 0.023,
}
"""Differences, as fractions, that count as about equal: one standard deviation of the family's
averages over the published base and continued models."""


@dataclass(frozen=True)
class TestScope:
    """Models that a claim is tested on, and the noise between pretraining runs.

    `judge` builds two of the same `models` for each claim: one with `noise` None, for these trained
    models, and one with a RunNoise, for another pretraining run of the same recipes. `compare`
    tests contrasts with this noise.
    """

    __test__ = False  # pytest collects classes by name

    models: ModelSelector
    noise: RunNoise | None = None
    """noise between pretraining runs; None to test these trained models only"""

    def compare(
        self,
        contrasts: Sequence[Contrast],
        borrowed: BetweenRunVariances,
        weights: Sequence[float] | None = None,
        unit: Unit = "points",
    ) -> Comparison:
        """Test a weighted sum of contrasts against 0 in this scope.

        The result is that of `compare_contrasts` with the `noise` of the scope; its p is
        uncorrected.

        Args:
            contrasts: At least one.
            borrowed: Variances by `between_run_variance`. They are ignored if each contrast has one
                pretraining run, and its family no variance among them.
            weights: A weight per contrast, in order, with any sum; None for their mean.
            unit: Unit of the result. Scores are fractions for "points", else already in `unit`.
        """
        is_lent = any(
            len(contrast.pretraining_seeds) > 1 or contrast.family in borrowed
            for contrast in contrasts
        )
        return compare_contrasts(contrasts, borrowed if is_lent else {}, weights, unit, self.noise)


@dataclass(frozen=True)
class PendingVerdict:
    """Test result of a claim before p is corrected over all claims.

    The `judge_...` functions return it; if the results do not suffice for the claim, `comparisons`
    is empty, `overall` None and `p` NaN. `comparisons` has one Comparison per tested contrast
    (`contrasts`), `overall` the deciding ones pooled (None if the claim does not pool), `p` the
    uncorrected p of the claim (NaN if unknown), and `outcome` the verdict if that p is significant
    after correction. `families` has a pooled Comparison per task family; it is empty for a single
    one, and `decisive` then has the comparisons that may contradict the outcome. `note` is text for
    the reason, `requirement` the results that the test needs, "" for the claim's usual ones.
    `decide` returns the verdict by the corrected p.
    """

    comparisons: list[Comparison] = field(default_factory=list)
    overall: Comparison | None = None
    p: float = math.nan
    outcome: Outcome = "not resolved"
    """verdict if the corrected p is significant"""
    note: str = ""
    """text for the reason of the verdict"""
    families: list[Comparison] = field(default_factory=list)
    """pooled comparison of each task family, if there are several; p corrected over them"""
    decisive: list[Comparison] = field(default_factory=list)
    """comparisons of a claim on one task family, which must not be significant in the opposite
    direction"""
    contrasts: list[Contrast] = field(default_factory=list)
    """tested contrasts"""
    requirement: str = ""
    """results that the test needs, if other than the claim's usual requirement"""

    def with_note(self, note: str) -> "PendingVerdict":
        """Return a copy with `note` after its own note.

        They are separated by a semicolon if neither is empty.
        """
        return replace(self, note="; ".join(filter(None, (self.note, note))))

    def decide(self, p: float, tests: int = 1) -> Outcome:
        """Return the verdict of the claim from its corrected `p`.

        It is `outcome` for p below 0.05, else `not resolved`. But it is `mixed`, whatever p is, if
        significant families or decisive comparisons contradict each other, and for p below 0.05
        also if one contradicts `outcome`.

        Args:
            p: p of the claim, corrected over all claims; NaN if unknown.
            tests: Number of claims; p of families and decisive comparisons is multiplied by it.
        """
        clear = [
            comparison
            for comparison in (*self.families, *self.decisive)
            if comparison.p_adjusted * tests < LEVEL
        ]
        outcomes = {comparison.verdict for comparison in clear} & {"holds", "reversed"}
        if len(outcomes | ({self.outcome} if p < LEVEL else set())) == 2:
            return "mixed"
        return self.outcome if p < LEVEL else "not resolved"


ClaimTest = Callable[[TestScope], PendingVerdict]


def format_difference(difference: float, unit: Unit = "points") -> str:
    """Format a difference with sign, two decimals and unit, such as `+0.12 points`.

    NaN in points becomes `+nan points`.

    Args:
        difference: Difference in `unit`, printed as it is; a point is 0.01 of a score from 0 to 1.
        unit: "share" is printed as `of both variances`, the others as they are.
    """
    return f"{difference:+.2f} {'of both variances' if unit == 'share' else unit}"


def format_p_value(p: float) -> str:
    """Format p, from 0 to 1, with two significant digits, such as 0.023.

    The text is `< 0.0001` for p below 0.0001, and `1` from 0.995. p must not be NaN, see
    `format_p`.
    """
    if p < 0.0001:
        return "< 0.0001"
    return f"{p:.2g}" if p < 0.995 else "1"


def format_p(p: float) -> str:
    """Format p as `p = 0.023`, `p < 0.0001`, or `no p` for NaN."""
    if math.isnan(p):
        return "no p"
    text = format_p_value(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def direction_outcome(overall: Comparison) -> Outcome:
    """Return `holds` for a positive difference, else `reversed`, whatever its p.

    A difference of 0 or NaN is `reversed` too.
    """
    return "holds" if overall.difference > 0 else "reversed"


def family_weights(contrasts: Sequence[Contrast]) -> list[float]:
    """Return a weight per contrast by which task families count equally.

    Within a family, its contrasts count equally. Weights are in the order of `contrasts` and add up
    to 1; there are none without contrasts.
    """
    counts = Counter(contrast.family for contrast in contrasts)
    return [1 / (len(counts) * counts[contrast.family]) for contrast in contrasts]


def judge_claim(test: ClaimTest, scope: TestScope) -> PendingVerdict:
    """Test a claim and, if compared models have collapsed, also without them.

    A model has collapsed on a data set if half or more of its fine-tuning runs give worthless
    predictions; the second test leaves out its scores in that task family. The result is that of
    the first test, with a note on the second if there is one. Its p is then the larger of both (NaN
    if either is, else 1 if the outcomes differ), but if nothing is left for the second, that of the
    first.

    Args:
        test: A `judge_...` function of this package, which gets the scope as its only argument;
            `functools.partial` can bind others.
        scope: Models of the first test, and the noise between pretraining runs in both.
    """
    draft = test(scope)
    compared = [
        score
        for contrast in draft.contrasts
        for terms in contrast.weighted_scores
        for _, score in terms
    ]
    collapsed = {(score.model_key, score.family) for score in compared if score.is_collapsed}
    if not collapsed:
        return draft
    without = test(replace(scope, models=scope.models.without(collapsed)))
    if not without.comparisons:
        return draft.with_note(
            "nothing is left without the collapsed models, which count with their scores"
        )
    by_family = {
        comparison.family: comparison
        for comparison in without.families or [without.overall]
        if comparison
    }
    families = [
        _combine_tests(comparison, by_family.get(comparison.family, comparison))
        for comparison in draft.families
    ]
    p = inference.largest_p(draft.p, without.p)
    if draft.outcome != without.outcome and not math.isnan(p):
        p = 1.0
    outcome = without.outcome if without.p < LEVEL else "not resolved"
    return replace(draft, p=p, families=families).with_note(
        f"without the collapsed models {outcome} ({format_p(without.p)})"
    )


def _combine_tests(first: Comparison, second: Comparison) -> Comparison:
    """Return `first` with the larger p of both, and a verdict only if both have it."""
    p_adjusted = inference.largest_p(first.p_adjusted, second.p_adjusted)
    verdict = first.verdict
    if first.verdict != second.verdict:
        verdict = "not resolved"
        if "not resolved" not in (first.verdict, second.verdict):
            p_adjusted = 1.0
    p = inference.largest_p(first.p, second.p)
    return replace(first, p=p, p_adjusted=p_adjusted, verdict=verdict)


def _split_by_family(contrasts: Sequence[Contrast]) -> dict[str, list[Contrast]]:
    by_family: dict[str, list[Contrast]] = {}
    for contrast in contrasts:
        by_family.setdefault(contrast.family, []).append(contrast)
    return by_family


def judge_direction(
    scope: TestScope,
    contrasts: list[Contrast],
    note: str = "",
    decisive: Sequence[Contrast] = (),
    unit: Unit = "points",
) -> PendingVerdict:
    """Test that the left side is above the right, for each contrast and pooled.

    p is that of the pooled difference, two-sided and uncorrected; the outcome is `holds` if that
    difference is positive, else `reversed`. Without contrasts there are no comparisons, p is NaN
    and the outcome `not resolved`. Task families count equally; several in points are pooled in
    standard deviations over the study's models, or, with a note, in points if a standard deviation
    is unknown.

    Args:
        note: Text for the reason of the verdict.
        decisive: Those of `contrasts` that are pooled for p and outcome; empty for all.
        unit: Unit of the differences of `contrasts`.
    """
    borrowed = between_run_variance(contrasts)
    comparisons = adjust_comparisons(
        [scope.compare([contrast], borrowed, unit=unit) for contrast in contrasts]
    )
    draft = PendingVerdict(comparisons, note=note, contrasts=contrasts)
    chosen = list(decisive or contrasts)
    if not chosen:
        return draft
    by_family = _split_by_family(chosen)
    weights = family_weights(chosen)
    if len(by_family) == 1:
        [overall] = adjust_comparisons([scope.compare(chosen, borrowed, weights, unit)])
        single = [
            comparison
            for comparison, contrast in zip(comparisons, contrasts, strict=True)
            if contrast in chosen and not comparison.collapsed
        ]
        return replace(
            draft, overall=overall, p=overall.p, outcome=direction_outcome(overall), decisive=single
        )
    standardised = (
        [scope.models.standardise(contrast) for contrast in chosen] if unit == "points" else []
    )
    if unit == "points" and None in standardised:
        draft = draft.with_note("pooled in points, as fewer than three decayed models have scores")
        standardised = []
    if standardised:
        overall = scope.compare(standardised, between_run_variance(standardised), weights, "SD")
    else:
        overall = scope.compare(chosen, borrowed, weights, unit)
    families = adjust_comparisons(
        [
            scope.compare(family_contrasts, borrowed, unit=unit)
            for family_contrasts in by_family.values()
        ]
    )
    return replace(
        draft, overall=overall, p=overall.p, outcome=direction_outcome(overall), families=families
    )


def judge_equality(
    scope: TestScope, contrasts: list[Contrast], at_least: bool = False, note: str = ""
) -> PendingVerdict:
    """Test that each task family differs by less than its margin in EQUALITY_MARGINS.

    The outcome is `holds`, and p the largest of two one-sided tests of each family; if a family is
    significantly beyond its margin, the outcome is `reversed`, and p that of the clearest such
    family. p is uncorrected over claims. Without contrasts there are no comparisons, p is NaN and
    the outcome `not resolved`.

    Args:
        contrasts: Only of SC, TC, QA and IR, which have margins, as fractions of a score.
        at_least: Test only that left is not lower than right by the margin.
        note: Text for the reason of the verdict, before one on the margins.
    """
    if not contrasts:
        return PendingVerdict(note=note)
    borrowed = between_run_variance(contrasts)
    by_family = _split_by_family(contrasts)
    comparisons = _test_margins(
        [scope.compare([contrast], borrowed) for contrast in contrasts], at_least
    )
    families = _test_margins(
        [scope.compare(family_contrasts, borrowed) for family_contrasts in by_family.values()],
        at_least,
    )
    margins = ", ".join(
        f"{100 * EQUALITY_MARGINS[family]:g}{' points' * (not index)} on {family}"
        for index, family in enumerate(by_family)
    )
    beyond = [comparison for comparison in families if comparison.verdict == "reversed"]
    if beyond:  # here p is that of a smaller difference
        outcome = "reversed"
        p = min(comparison.p_adjusted for comparison in beyond)
        names = ", ".join(comparison.family for comparison in beyond)
        meaning = f"beyond the margin on {names} ({margins})"
    else:
        outcome = "holds"
        p = inference.largest_p(*(comparison.p for comparison in families))
        relation = "not lower by" if at_least else "equal within"
        meaning = f"{relation} {margins}, and p is that of a larger difference"
    draft = PendingVerdict(
        comparisons, p=p, outcome=outcome, note=note, contrasts=contrasts
    ).with_note(meaning)
    if len(families) == 1:
        decisive = [comparison for comparison in comparisons if not comparison.collapsed]
        return replace(draft, overall=replace(families[0], p=p), decisive=decisive)
    return replace(
        draft, overall=replace(judge_direction(scope, contrasts).overall, p=p), families=families
    )


def _test_margins(comparisons: Sequence[Comparison], at_least: bool) -> list[Comparison]:
    """Return comparisons with p and verdict of a difference within their margin.

    `p_adjusted` is that of a difference beyond the margin if it is significant.
    """
    within = []
    beyond = []
    for comparison in comparisons:
        margin = EQUALITY_MARGINS[comparison.family]
        not_lower = comparison.test.p_above(-margin)
        lower = comparison.test.p_below(-margin)
        if at_least:
            within.append(not_lower)
            beyond.append(lower)
        else:
            within.append(max(not_lower, comparison.test.p_below(margin)))
            beyond.append(min(lower, comparison.test.p_above(margin)))
    tested = []
    adjusted = zip(
        comparisons,
        within,
        inference.holm_adjust(within),
        inference.holm_adjust(beyond),
        strict=True,
    )
    for comparison, p, p_within, p_beyond in adjusted:
        if p_beyond < LEVEL:
            p_adjusted = p_beyond
            verdict = "reversed"
        else:
            p_adjusted = p_within
            verdict = "holds" if p_within < LEVEL else "not resolved"
        tested.append(replace(comparison, p=p, p_adjusted=p_adjusted, verdict=verdict))
    return tested
