"""Verdicts on the study's claims, from published results or from any others.

docs/study-claims.md explains the comparisons, the meaning of each verdict, and the error rates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from megaenc.finetune.examples import TaskFamily
from megaenc.study.claims import spread_tests
from megaenc.study.claims import tests as claim_tests
from megaenc.study.claims.decision import EQUALITY_MARGINS, PendingVerdict, TestScope
from megaenc.study.claims.reasons import format_reason
from megaenc.study.claims.tests import CLM_SHARES, EARLY_SHARE
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import FAMILY_LABELS, ZERO_SHOT
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison, ModelSelector, Outcome
from megaenc.study.stats.run_noise import RunNoise, estimate_run_noise


@dataclass(frozen=True)
class Verdict:
    """Outcome of testing a claim, or a part of one, for these trained models and for another pretraining run, with reasons."""

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
    """pooled comparison of each task family if the claim pools several, with p corrected over them"""
    another_run: Outcome = "no data"
    """outcome for another pretraining run of the same recipes; equal to `verdict` if models have several runs"""
    p_another_run: float = math.nan
    """corrected p of the claim for another pretraining run; NaN if the noise between runs is unknown"""

    @property
    def label(self) -> str:
        """Return the verdict, with " for these runs" if it is not shown for another pretraining run."""
        is_general = self.another_run == self.verdict or self.verdict in ("not resolved", "no data")
        return self.verdict if is_general else f"{self.verdict} for these runs"


_BOTH = "an MLM and a CLM model of one size and as many steps"

_CLAIMS: dict[str, tuple[str, str, str, Callable[[TestScope], PendingVerdict]]] = {
    **{
        name: (
            f"MLM is above CLM on {family}",
            f"Is {{mlm}} above CLM on {FAMILY_LABELS[family].lower()}, trained for as many steps?",
            f"{_BOTH}, both decayed and evaluated on {family}",
            partial(claim_tests.judge_mlm_above_clm, family=family),
        )
        for name, family in (("1a", TaskFamily.SC), ("1b", TaskFamily.QA))
    },
    "1c": (
        "MLM and CLM are about equal on TC",
        f"Do {{mlm}} and CLM differ by less than {100 * EQUALITY_MARGINS[TaskFamily.TC]:g} points on token classification?",
        f"{_BOTH}, both decayed and evaluated on TC",
        claim_tests.judge_mlm_equals_clm,
    ),
    "1d": (
        "The gap on IR narrows with size",
        "Is the difference between {mlm} and CLM on retrieval smaller in larger models?",
        "MLM and CLM models of at least two sizes, decayed and evaluated on IR",
        partial(claim_tests.judge_gap_trend, family=TaskFamily.IR, widens=False),
    ),
    "1e": (
        "The gap on SC widens with size",
        "Is the difference between {mlm} and CLM on sequence classification larger in larger models?",
        "MLM and CLM models of at least two sizes, decayed and evaluated on SC",
        partial(claim_tests.judge_gap_trend, family=TaskFamily.SC, widens=True),
    ),
    "2": (
        "CLM learns faster early",
        "Is CLM above {mlm} after as many of the first steps?",
        f"intermediate checkpoints of CLM and MLM runs of one size at the same steps, in the first {EARLY_SHARE:.0%} of them",
        claim_tests.judge_early_steps,
    ),
    "3": (
        "CLM is less sensitive to the fine-tuning rate",
        "Are the mean scores of {mlm} further apart over the learning rates than those of CLM?",
        f"results of two or more seeds at two or more learning rates, of {_BOTH}",
        spread_tests.judge_rate_sensitivity,
    ),
    **{
        name: (
            title,
            question,
            f"a decayed model with {CLM_SHARES[share][0]:.0%} to {CLM_SHARES[share][1]:.0%} CLM before MLM, "
            "and MLM only of the same size, ratio and steps",
            test,
        )
        for name, share, title, question, test in (
            (
                "4a",
                0.25,
                "25 % CLM, then MLM, beats MLM only",
                "At equal steps, is a quarter of CLM and then MLM above MLM from the start?",
                claim_tests.judge_clm_quarter,
            ),
            (
                "4b",
                0.75,
                "75 % CLM, then MLM, is comparable with MLM only",
                "At equal steps, is MLM after three quarters of CLM at least about as good as MLM from the start?",
                claim_tests.judge_clm_three_quarters,
            ),
        )
    },
    "5a": (
        "MLM on a finished CLM model beats more MLM",
        "After as many more MLM steps, the most there are, is a model that began as CLM above one that began as MLM?",
        "models of continued pretraining from a CLM and from an MLM model, of one size and as many steps before and after",
        claim_tests.judge_continued_pretraining,
    ),
    "5b": (
        "Half of that continuation suffices to match more MLM",
        "After about half as many more MLM steps, is a model that began as CLM at least about as good as one that began as MLM?",
        "models as for 5a, continued for two or more numbers of steps",
        claim_tests.judge_shorter_continuation,
    ),
    "6a": (
        "There is no single best mask ratio",
        "Is every mask ratio beaten by another one on some task or at some size?",
        "MLM models of two or more mask ratios, of one size and as many steps, decayed and evaluated on the same sets",
        claim_tests.judge_mask_ratios,
    ),
    "6b": (
        "Retrieval prefers high mask ratios",
        "Does the score on retrieval rise with the mask ratio?",
        "MLM models of three or more mask ratios, of one size and as many steps, decayed and evaluated on IR",
        claim_tests.judge_high_ratios,
    ),
    "6c": (
        "After CLM, the mask ratio matters less",
        "Are scores further apart over the mask ratios for MLM only than for MLM after CLM?",
        "two or more seeds of models of three or more mask ratios with CLM before MLM, and of MLM only, of one size and budget",
        spread_tests.judge_ratio_sensitivity,
    ),
}
"""Title, question (`{mlm}` is MLM at the reference ratio), required results and test of each claim, by number and part."""


_ZERO_SHOT_CLAIMS: dict[str, tuple[str, str, str, Callable[[TestScope], PendingVerdict]]] = {
    "1f": (
        f"MLM is above CLM on {ZERO_SHOT}",
        f"Is {{mlm}} above CLM in zero-shot retrieval ({ZERO_SHOT}), trained for as many steps?",
        f"{_BOTH}, both decayed and evaluated on {ZERO_SHOT}",
        partial(claim_tests.judge_mlm_above_clm, family=ZERO_SHOT),
    ),
    "4c": (
        f"25 % CLM, then MLM, beats MLM only on {ZERO_SHOT}",
        f"At equal steps, is a quarter of CLM and then MLM above MLM from the start in zero-shot retrieval ({ZERO_SHOT})?",
        f"{_CLAIMS['4a'][2]}, evaluated on {ZERO_SHOT}",
        partial(claim_tests.judge_clm_quarter, families=[ZERO_SHOT]),
    ),
    "5c": (
        f"MLM on a finished CLM model beats more MLM on {ZERO_SHOT}",
        f"After the most MLM steps, is a model that began as CLM above one begun as MLM in zero-shot retrieval ({ZERO_SHOT})?",
        f"{_CLAIMS['5a'][2]}, evaluated on {ZERO_SHOT}",
        partial(claim_tests.judge_continued_pretraining, families=[ZERO_SHOT]),
    ),
}
"""Claims on zero-shot retrieval, apart from the study's: pooled with other families, their seeds and weights would change
those verdicts."""
_ALL_CLAIMS = _CLAIMS | _ZERO_SHOT_CLAIMS


def judge(evidence: Evidence, noise: RunNoise | None = None, zero_shot: Evidence | None = None) -> list[Verdict]:
    """Test the six claims; return a Verdict for each of their parts (1a to 6c), p corrected by Holm over all of them.

    `noise`: noise between pretraining runs for models that were pretrained once; by default estimated from the curves over mask
    ratios. `zero_shot`: scores of zero-shot retrieval, which add claims of their own. Reads the example scores of all compared
    models.
    """
    settings: dict[str, tuple[ModelSelector, RunNoise]] = {}
    for scores, claims in ((evidence, _CLAIMS), (zero_shot, _ZERO_SHOT_CLAIMS)):
        if scores is not None:
            models = ModelSelector(scores)
            settings |= dict.fromkeys(claims, (models, noise or estimate_run_noise(models)))
    settings = dict(sorted(settings.items()))
    these = {name: _ALL_CLAIMS[name][-1](TestScope(models)) for name, (models, _) in settings.items()}
    another = {name: _ALL_CLAIMS[name][-1](TestScope(models, noise)) for name, (models, noise) in settings.items()}
    corrected = inference.holm_adjust([draft.p for draft in these.values()])
    larger = [
        max(one.p, other.p) if not math.isnan(one.p + other.p) else math.nan
        for one, other in zip(these.values(), another.values(), strict=True)
    ]
    corrected_another = inference.holm_adjust(larger)
    return [
        _build_verdict(*settings[name], name, these[name], p, another[name], p_another, sum(not math.isnan(p) for p in corrected))
        for name, p, p_another in zip(settings, corrected, corrected_another, strict=True)
    ]


def _build_verdict(
    models: ModelSelector,
    noise: RunNoise,
    name: str,
    draft: PendingVerdict,
    p: float,
    another: PendingVerdict,
    p_another: float,
    claims: int,
) -> Verdict:
    """Build the verdict of the claim `name`, given the p of its draft and of the one for `another` run, over all `claims`."""
    title, question, requirement, _ = _ALL_CLAIMS[name]
    base = Verdict(int(name[0]), title, question.format(mlm=models.mlm), draft.comparisons, "no data", "", name[1:])
    if not draft.comparisons:
        return replace(base, reason=f"Needs {draft.requirement or requirement}.")
    verdict, another_run = draft.decide(p), another.decide(p_another, claims)
    if another_run != verdict:  # another run is never surer than these
        another_run = "not resolved"
    return replace(
        base,
        verdict=verdict,
        reason=format_reason(models, draft, p, claims, verdict, (another_run, p_another, noise)),
        overall=replace(draft.overall, p_adjusted=p, verdict=verdict) if draft.overall else None,
        families=draft.families,
        another_run=another_run,
        p_another_run=p_another,
    )
