"""What the study claims, each as a test of whatever evidence there is: its own numbers, ours, at any scale.

docs/study-claims.md says in words what is compared, what each verdict means and how often it is wrong.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from megaenc.finetune.examples import Family
from megaenc.study import claim_tests, statistics
from megaenc.study.caveats import caveats
from megaenc.study.claim_tests import Draft, points
from megaenc.study.comparisons import Comparison, Outcome
from megaenc.study.evidence import Evidence
from megaenc.study.models import Models
from megaenc.study.rate_claim import sensitivity
from megaenc.study.ratio_claim import no_best_ratio
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


def judge(evidence: Evidence, draws: int = 2000) -> list[Verdict]:
    """The nine verdicts on the six claims, in their order. `draws` of the bootstrap beside each; 0: none.

    Takes the examples' scores out of the results of every model that it compares.
    """
    models = Models(evidence)
    drafts = [
        claim_tests.mlm_above(models, draws, "a", Family.SC),
        claim_tests.mlm_above(models, draws, "b", Family.QA),
        claim_tests.about_equal(models, draws),
        claim_tests.gap_narrows(models, draws),
        claim_tests.early(models, draws),
        sensitivity(models),
        claim_tests.quarter_first(models, draws),
        claim_tests.continued(models, draws),
        no_best_ratio(models),
    ]
    corrected = statistics.holm([draft.p for draft in drafts])
    claims = sum(not math.isnan(p) for p in corrected)
    return [_verdict(models, draft, p, claims) for draft, p in zip(drafts, corrected, strict=True)]


def _verdict(models: Models, draft: Draft, p: float, claims: int) -> Verdict:
    said = (draft.claim, draft.title, draft.question, draft.comparisons)
    if not draft.comparisons:
        return Verdict(*said, "no data", f"Needs {draft.missing}.", draft.part)
    against = "reversed" if draft.way == "holds" else "holds"
    clear = p < LEVEL
    mixed = clear and any(one.verdict == against for one in draft.decisive)
    verdict = draft.way if clear and not mixed else "not resolved"
    overall = replace(draft.overall, p_adjusted=p, verdict=verdict) if draft.overall else None
    reason = " ".join([_reason(draft, overall, p, claims, mixed), *caveats(models, draft)])
    return Verdict(*said, verdict, reason, draft.part, overall)


def _reason(draft: Draft, overall: Comparison | None, p: float, claims: int, mixed: bool) -> str:
    chance = f"{_chance(p)} corrected over {claims} claims" if claims > 1 and not math.isnan(p) else _chance(p)
    parts = [chance]
    if overall is not None and math.isnan(overall.difference):
        parts = ["no seed that all of the models were fine-tuned with"]
    elif overall is not None:
        interval = "" if math.isnan(overall.low) else f"95 % interval {overall.low:+.2f} to {overall.high:+.2f}, "
        counts = Counter(one.verdict for one in draft.comparisons)
        each = ", ".join(f"{counts[outcome]} {word}" for outcome, word in _WORDS.items() if counts[outcome])
        parts = [
            f"{overall.left} minus {overall.right}: {points(overall.difference)} ({interval}{chance})",
            f"one by one, of {len(draft.comparisons)}: {each}",
        ]
    if mixed:
        parts.append("some of them clearly go against the whole")
    sentence = "; ".join([*parts, draft.note] if draft.note else parts)
    return (sentence if sentence.startswith("p ") else sentence[:1].upper() + sentence[1:]) + "."


_WORDS = {"holds": "hold", "reversed": "reversed", "not resolved": "not resolved"}


def _chance(p: float) -> str:
    if math.isnan(p):
        return "no p, as nothing says what other seeds would give"
    return f"p {said}" if (said := p_value(p)).startswith("<") else f"p = {said}"


def p_value(p: float) -> str:
    """As it is printed: 0.023, or < 0.0001; 1 from 0.995 on."""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.995 else "1"
