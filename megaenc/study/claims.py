"""What the study claims, each as a test of whatever evidence there is: its own numbers, ours, at any scale.

docs/study-claims.md says in words what is compared, what each verdict means and how often it is wrong.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megaenc.finetune.examples import Family
from megaenc.study import claim_tests, statistics
from megaenc.study.caveats import caveats
from megaenc.study.claim_tests import EARLY, MARGIN, QUARTER, Draft, points
from megaenc.study.comparisons import Comparison, Outcome
from megaenc.study.evidence import Evidence
from megaenc.study.models import Models
from megaenc.study.statistics import LEVEL


@dataclass(frozen=True)
class Verdict:
    """A claim, or a part of one, and what the evidence says of it."""

    claim: int
    title: str
    question: str
    comparisons: list[Comparison]
    """p corrected over these"""
    verdict: Outcome
    reason: str
    """a sentence with the numbers and what they leave open; of `no data`, what is missing"""
    part: str = ""
    """a, b, ... where a claim says several things"""
    overall: Comparison | None = None
    """what the verdict rests on: all comparisons pooled; p corrected over the claims"""


@dataclass(frozen=True)
class Claim:
    """A sentence of the study, and how it is asked of any evidence."""

    name: str
    """its number, and a letter where it says several things"""
    title: str
    question: str
    """`{mlm}` is MLM at the ratio that stands for it"""
    missing: str
    """what it takes, for evidence that lacks it"""
    draft: Callable[[Models, int], Draft]
    """from the models and the draws of the bootstrap"""


_BOTH = "an MLM and a CLM model of one size and as many steps"

CLAIMS = (
    Claim(
        "1a",
        "MLM is above CLM on SC",
        "Is {mlm} above CLM on sequence classification, trained for as many steps?",
        f"{_BOTH}, both decayed and evaluated on SC",
        partial(claim_tests.mlm_above, family=Family.SC),
    ),
    Claim(
        "1b",
        "MLM is above CLM on QA",
        "Is {mlm} above CLM on question answering, trained for as many steps?",
        f"{_BOTH}, both decayed and evaluated on QA",
        partial(claim_tests.mlm_above, family=Family.QA),
    ),
    Claim(
        "1c",
        "MLM and CLM are about equal on TC",
        f"Do {{mlm}} and CLM differ by less than {100 * MARGIN:g} point on token classification?",
        f"{_BOTH}, both decayed and evaluated on TC",
        claim_tests.about_equal,
    ),
    Claim(
        "1d",
        "The gap on IR narrows with size",
        "Is the difference between {mlm} and CLM on retrieval smaller in larger models?",
        "MLM and CLM models of at least two sizes, decayed and evaluated on IR",
        claim_tests.gap_narrows,
    ),
    Claim(
        "2",
        "CLM learns faster early",
        "Is CLM above {mlm} after as many of the first steps?",
        f"intermediate checkpoints of CLM and MLM runs of one size at the same steps, in the first {EARLY:.0%} of them",
        claim_tests.early,
    ),
    Claim(
        "3",
        "CLM is less sensitive to the fine-tuning rate",
        "Are the mean scores of {mlm} further apart over the learning rates than those of CLM?",
        f"results of two or more seeds at two or more learning rates, of {_BOTH}",
        claim_tests.sensitivity,
    ),
    Claim(
        "4",
        "25 % CLM, then MLM, beats MLM alone",
        "At equal steps, is a quarter of CLM and then MLM above MLM from the start?",
        f"a decayed model with {QUARTER[0]:.0%} to {QUARTER[1]:.0%} CLM before MLM, and MLM alone of that size, ratio and steps",
        claim_tests.quarter_first,
    ),
    Claim(
        "5",
        "MLM on a finished CLM model beats more MLM",
        "After as many more MLM steps, the most there are, is a model that began as CLM above one that began as MLM?",
        "models of continued pretraining from a CLM and from an MLM model, of one size and as many steps before and after",
        claim_tests.continued,
    ),
    Claim(
        "6",
        "There is no single best mask ratio",
        "Is every mask ratio beaten by another one on some task or at some size?",
        "MLM models of two or more mask ratios, of one size and as many steps, decayed and evaluated on the same sets",
        claim_tests.no_best_ratio,
    ),
)


def judge(evidence: Evidence, draws: int = 2000) -> list[Verdict]:
    """Return the nine verdicts on the six claims, in their order. `draws` of the bootstrap next to each; 0: none.

    Takes the examples' scores out of the results of every model that it compares.
    """
    models = Models(evidence)
    drafts = [claim.draft(models, draws) for claim in CLAIMS]
    corrected = statistics.holm([draft.p for draft in drafts])
    count = sum(not math.isnan(p) for p in corrected)
    return [_verdict(models, *each, count) for each in zip(CLAIMS, drafts, corrected, strict=True)]


def _verdict(models: Models, claim: Claim, draft: Draft, p: float, claims: int) -> Verdict:
    made = Verdict(
        int(claim.name[0]), claim.title, claim.question.format(mlm=models.mlm), draft.comparisons, "no data", "", claim.name[1:]
    )
    if not draft.comparisons:
        return replace(made, reason=f"Needs {draft.missing or claim.missing}.")
    against = "reversed" if draft.way == "holds" else "holds"
    mixed = p < LEVEL and any(one.verdict == against for one in draft.decisive)
    verdict = draft.way if p < LEVEL and not mixed else "not resolved"
    overall = replace(draft.overall, p_adjusted=p, verdict=verdict) if draft.overall else None
    reason = " ".join([_reason(draft, overall, p, claims, mixed), *caveats(models, draft)])
    return replace(made, verdict=verdict, reason=reason, overall=overall)


def _reason(draft: Draft, overall: Comparison | None, p: float, claims: int, mixed: bool) -> str:
    chance = f"{_chance(p)} corrected over {claims} claims" if claims > 1 and not math.isnan(p) else _chance(p)
    parts = [chance]
    if overall is not None and math.isnan(overall.difference):
        parts = ["no seed that all of the models were fine-tuned with"]
    elif overall is not None:
        interval = "" if math.isnan(overall.low) else f"95 % interval {overall.low:+.2f} to {overall.high:+.2f}, "
        counts = Counter("hold" if one.verdict == "holds" else one.verdict for one in draft.comparisons)
        each = ", ".join(f"{counts[word]} {word}" for word in ("hold", "reversed", "not resolved") if counts[word])
        parts = [
            f"{overall.left} minus {overall.right}: {points(overall.difference)} ({interval}{chance})",
            f"one by one, of {len(draft.comparisons)}: {each}",
        ]
    if mixed:
        parts.append("some of them clearly go against the whole")
    sentence = "; ".join([*parts, draft.note] if draft.note else parts)
    return (sentence if sentence.startswith("p ") else sentence[:1].upper() + sentence[1:]) + "."


def _chance(p: float) -> str:
    if math.isnan(p):
        return "no p, as nothing says what other seeds would give"
    return f"p {said}" if (said := p_value(p)).startswith("<") else f"p = {said}"


def p_value(p: float) -> str:
    """Return p as it is printed: 0.023, or < 0.0001; 1 from 0.995 on."""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.995 else "1"
