"""Verdicts on the study's claims, from published results or from any others.

docs/study-claims.md explains the comparisons, the meaning of each verdict, and the error rates.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial

from megaenc.finetune.examples import TaskFamily
from megaenc.study.claims import spread_tests
from megaenc.study.claims import tests as claim_tests
from megaenc.study.claims.decision import (
    EQUALITY_MARGINS,
    ClaimTest,
    PendingVerdict,
    TestScope,
    judge_claim,
)
from megaenc.study.claims.reasons import format_reason
from megaenc.study.claims.tests import CLM_FRACTION_RANGES, EARLY_FRACTION
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import ZERO_SHOT
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison, ModelSelector, Outcome
from megaenc.study.stats.run_noise import RunNoise, estimate_run_noise


@dataclass(frozen=True)
class Verdict:
    """Outcome and reasons of a claim, or of a part of one, as `judge` returns it.

    `claim` is its number, `part` a letter or "", with a `title` and a `question`. `verdict` is the
    outcome for these trained models: `holds`, `reversed`, `mixed`, `not resolved` or `no data`.
    `another_run` is that for another pretraining run of the same recipes; `reason` are sentences on
    both. `comparisons` are single ones; `families` (pooled by task family) and `overall` (over all)
    may be empty and None. `p_adjusted` of `comparisons` and of `families` is corrected over each
    list, that of `overall` over the claims, as is `p_another_run`, NaN if unknown. For `no data`
    the lists are empty, `overall` is None, and `reason` names the missing results.
    """

    claim: int
    title: str
    question: str
    comparisons: list[Comparison]
    """single comparisons, with p corrected over them"""
    verdict: Outcome
    """outcome for these trained models"""
    reason: str
    """sentences with the numbers and caveats; for `no data`, the missing results"""
    part: str = ""
    """a, b, ... if the claim has several parts; else empty"""
    overall: Comparison | None = None
    """all comparisons pooled, with p corrected over the claims; the verdict depends on it"""
    families: list[Comparison] = field(default_factory=list)
    """pooled comparison of each task family if the claim pools several, with p corrected over
    them"""
    another_run: Outcome = "no data"
    """outcome for another pretraining run of the same recipes; equal to `verdict` if models have
    several runs"""
    p_another_run: float = math.nan
    """corrected p of the claim for another pretraining run; NaN if the noise between runs is
    unknown"""

    @property
    def label(self) -> str:
        """Return the verdict, with " for these runs" if it may not hold for new ones.

        That is so if the outcome for another pretraining run of the same recipes, `another_run`,
        differs; `not resolved` and `no data` never have the addition.
        """
        is_general = self.another_run == self.verdict or self.verdict in ("not resolved", "no data")
        return self.verdict if is_general else f"{self.verdict} for these runs"


@dataclass(frozen=True)
class StudyClaim:
    """Claim, or a part of one, with its question and the test that decides it.

    `test` takes a TestScope and returns a PendingVerdict, without comparisons if results are
    missing. The other fields are text: `name`, such as 1a, `title`, `question` (in which `judge`
    replaces `{mlm}` by the name of MLM at the reference ratio), and `requirement`, the results that
    the test needs.
    """

    name: str
    """number and part: 1a, 2, ..."""
    title: str
    question: str
    requirement: str
    test: ClaimTest


_BOTH = "an MLM and a CLM model of one size and as many steps"
_CONTINUED = (
    "models of continued pretraining from a CLM and from an MLM model, of one size and as many "
    "steps before and after"
)


def _format_clm_requirement(clm_fraction: float) -> str:
    low, high = CLM_FRACTION_RANGES[clm_fraction]
    return (
        f"a decayed model with {low:.0%} to {high:.0%} CLM before MLM, and MLM only of the same "
        "size, ratio and steps"
    )


_CLAIMS = [
    StudyClaim(
        name="1a",
        title="MLM is above CLM on SC",
        question="Is {mlm} above CLM on sequence classification, trained for as many steps?",
        requirement=f"{_BOTH}, both decayed and evaluated on SC",
        test=partial(claim_tests.judge_mlm_above_clm, family=TaskFamily.SC),
    ),
    StudyClaim(
        name="1b",
        title="MLM is above CLM on QA",
        question="Is {mlm} above CLM on question answering, trained for as many steps?",
        requirement=f"{_BOTH}, both decayed and evaluated on QA",
        test=partial(claim_tests.judge_mlm_above_clm, family=TaskFamily.QA),
    ),
    StudyClaim(
        name="1c",
        title="MLM and CLM are about equal on TC",
        question=(
            f"Do {{mlm}} and CLM differ by less than {100 * EQUALITY_MARGINS[TaskFamily.TC]:g} "
            "points on token classification?"
        ),
        requirement=f"{_BOTH}, both decayed and evaluated on TC",
        test=claim_tests.judge_mlm_equals_clm,
    ),
    StudyClaim(
        name="1d",
        title="The gap on IR narrows with size",
        question="Is the difference between {mlm} and CLM on retrieval smaller in larger models?",
        requirement="MLM and CLM models of at least two sizes, decayed and evaluated on IR",
        test=partial(claim_tests.judge_gap_trend, family=TaskFamily.IR, widens=False),
    ),
    StudyClaim(
        name="1e",
        title="The gap on SC widens with size",
        question=(
            "Is the difference between {mlm} and CLM on sequence classification larger in larger "
            "models?"
        ),
        requirement="MLM and CLM models of at least two sizes, decayed and evaluated on SC",
        test=partial(claim_tests.judge_gap_trend, family=TaskFamily.SC, widens=True),
    ),
    StudyClaim(
        name="2",
        title="CLM learns faster early",
        question="Is CLM above {mlm} after as many of the first steps?",
        requirement=(
            "intermediate checkpoints of CLM and MLM runs of one size at the same steps, in the "
            f"first {EARLY_FRACTION:.0%} of them"
        ),
        test=claim_tests.judge_early_steps,
    ),
    StudyClaim(
        name="3",
        title="CLM is less sensitive to the fine-tuning rate",
        question=(
            "Are the mean scores of {mlm} further apart over the learning rates than those of CLM?"
        ),
        requirement=f"results of two or more seeds at two or more learning rates, of {_BOTH}",
        test=spread_tests.judge_rate_sensitivity,
    ),
    StudyClaim(
        name="4a",
        title="25 % CLM, then MLM, beats MLM only",
        question="At equal steps, is a quarter of CLM and then MLM above MLM from the start?",
        requirement=_format_clm_requirement(0.25),
        test=claim_tests.judge_clm_quarter,
    ),
    StudyClaim(
        name="4b",
        title="75 % CLM, then MLM, is comparable with MLM only",
        question=(
            "At equal steps, is MLM after three quarters of CLM at least about as good as MLM from "
            "the start?"
        ),
        requirement=_format_clm_requirement(0.75),
        test=claim_tests.judge_clm_three_quarters,
    ),
    StudyClaim(
        name="5a",
        title="MLM on a finished CLM model beats more MLM",
        question=(
            "After as many more MLM steps, the most there are, is a model that began as CLM above "
            "one that began as MLM?"
        ),
        requirement=_CONTINUED,
        test=claim_tests.judge_continued_pretraining,
    ),
    StudyClaim(
        name="5b",
        title="Half of that continuation suffices to match more MLM",
        question=(
            "After about half as many more MLM steps, is a model that began as CLM at least about "
            "as good as one that began as MLM?"
        ),
        requirement="models as for 5a, continued for two or more numbers of steps",
        test=claim_tests.judge_shorter_continuation,
    ),
    StudyClaim(
        name="6a",
        title="There is no single best mask ratio",
        question="Is every mask ratio beaten by another one on some task or at some size?",
        requirement=(
            "MLM models of two or more mask ratios, of one size and as many steps, decayed and "
            "evaluated on the same sets"
        ),
        test=claim_tests.judge_mask_ratios,
    ),
    StudyClaim(
        name="6b",
        title="Retrieval prefers high mask ratios",
        question="Does the score on retrieval rise with the mask ratio?",
        requirement=(
            "MLM models of three or more mask ratios, of one size and as many steps, decayed and "
            "evaluated on IR"
        ),
        test=claim_tests.judge_high_ratios,
    ),
    StudyClaim(
        name="6c",
        title="After CLM, the mask ratio matters less",
        question=(
            "Are scores further apart over the mask ratios for MLM only than for MLM after CLM?"
        ),
        requirement=(
            "two or more seeds of models of three or more mask ratios with CLM before MLM, and of "
            "MLM only, of one size and budget"
        ),
        test=spread_tests.judge_ratio_sensitivity,
    ),
]

_ZERO_SHOT_CLAIMS = [
    StudyClaim(
        name="1f",
        title=f"MLM is above CLM on {ZERO_SHOT}",
        question=(
            f"Is {{mlm}} above CLM in zero-shot retrieval ({ZERO_SHOT}), trained for as many steps?"
        ),
        requirement=f"{_BOTH}, both decayed and evaluated on {ZERO_SHOT}",
        test=partial(claim_tests.judge_mlm_above_clm, family=ZERO_SHOT),
    ),
    StudyClaim(
        name="4c",
        title=f"25 % CLM, then MLM, beats MLM only on {ZERO_SHOT}",
        question=(
            "At equal steps, is a quarter of CLM and then MLM above MLM from the start in "
            f"zero-shot retrieval ({ZERO_SHOT})?"
        ),
        requirement=f"{_format_clm_requirement(0.25)}, evaluated on {ZERO_SHOT}",
        test=partial(claim_tests.judge_clm_quarter, families=[ZERO_SHOT]),
    ),
    StudyClaim(
        name="5c",
        title=f"MLM on a finished CLM model beats more MLM on {ZERO_SHOT}",
        question=(
            "After the most MLM steps, is a model that began as CLM above one begun as MLM in "
            f"zero-shot retrieval ({ZERO_SHOT})?"
        ),
        requirement=f"{_CONTINUED}, evaluated on {ZERO_SHOT}",
        test=partial(claim_tests.judge_continued_pretraining, families=[ZERO_SHOT]),
    ),
]
"""Claims on zero-shot retrieval, apart from the study's: pooled with other families, their seeds
and weights would change those verdicts."""


@dataclass(frozen=True)
class _TestedClaim:
    """Claim with its test for these trained models and for another pretraining run."""

    claim: StudyClaim
    models: ModelSelector
    noise: RunNoise
    these: PendingVerdict
    another: PendingVerdict


def judge(
    evidence: Evidence, noise: RunNoise | None = None, zero_shot: Evidence | None = None
) -> list[Verdict]:
    """Return the verdict on each part of the six claims, sorted by name: 1a to 6c.

    It is `no data` if scores are missing; only those of STUDY_FAMILIES are tested. p is corrected
    by Holm over all parts that have one, those of `zero_shot` too. Example scores of all compared
    models are read from their files, and InputError is raised if one has become missing or invalid.

    Args:
        evidence: Fine-tuning scores, by the function `read_evidence`, `published` or `raw`.
        noise: Noise between pretraining runs for models that were pretrained once; None to estimate
            it from the curves over mask ratios.
        zero_shot: Scores of zero-shot retrieval (`ZeroShotResults.build_evidence`), which add the
            parts 1f, 4c and 5c; None to leave these out.
    """
    drafts: list[_TestedClaim] = []
    study_evidence = evidence.select_study_families()
    for scores, claims in ((study_evidence, _CLAIMS), (zero_shot, _ZERO_SHOT_CLAIMS)):
        if scores is None:
            continue
        models = ModelSelector(scores)
        run_noise = noise or estimate_run_noise(models)
        for claim in claims:
            these = judge_claim(claim.test, TestScope(models))
            another = judge_claim(claim.test, TestScope(models, run_noise))
            drafts.append(_TestedClaim(claim, models, run_noise, these, another))
    drafts.sort(key=lambda tested: tested.claim.name)
    adjusted = inference.holm_adjust([tested.these.p for tested in drafts])
    adjusted_another = inference.holm_adjust(
        [inference.largest_p(tested.these.p, tested.another.p) for tested in drafts]
    )
    claim_count = sum(not math.isnan(p) for p in adjusted)
    verdicts = []
    for tested, p, p_another in zip(drafts, adjusted, adjusted_another, strict=True):
        claim = tested.claim
        draft = tested.these
        verdict = Verdict(
            claim=int(claim.name[0]),
            title=claim.title,
            question=claim.question.format(mlm=tested.models.mlm),
            comparisons=draft.comparisons,
            verdict="no data",
            reason=f"Needs {draft.requirement or claim.requirement}.",
            part=claim.name[1:],
        )
        if draft.comparisons:
            outcome = draft.decide(p)
            another_run = tested.another.decide(p_another, claim_count)
            if another_run != outcome:  # another run is never surer than these
                another_run = "not resolved"
            overall = draft.overall and replace(draft.overall, p_adjusted=p, verdict=outcome)
            verdict = replace(
                verdict,
                verdict=outcome,
                reason=format_reason(
                    tested.models,
                    draft,
                    p,
                    claim_count,
                    outcome,
                    another_run,
                    p_another,
                    tested.noise,
                ),
                overall=overall,
                families=draft.families,
                another_run=another_run,
                p_another_run=p_another,
            )
        verdicts.append(verdict)
    return verdicts
