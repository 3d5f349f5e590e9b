"""Verdicts on the study's claims, from published results or from any others.

docs/study-claims.md explains the comparisons, the meaning of each verdict, and the error rates.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megaenc.finetune.examples import TaskFamily
from megaenc.study.claims import tests as claim_tests
from megaenc.study.claims.tests import EARLY_SHARE, EQUALITY_MARGIN, QUARTER_RANGE, PendingVerdict, format_points
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.groups import FAMILY_LABELS
from megaenc.study.stats import inference
from megaenc.study.stats.comparisons import Comparison, Contrast, ModelSelector, Outcome
from megaenc.study.stats.inference import LEVEL


@dataclass(frozen=True)
class Verdict:
    """Outcome of testing a claim, or a part of one: holds, reversed, not resolved or no data, with the reason."""

    claim: int
    title: str
    question: str
    comparisons: list[Comparison]
    """single comparisons, with p corrected over them"""
    verdict: Outcome
    reason: str
    """sentences with the numbers and caveats; for `no data`, the missing results"""
    part: str = ""
    """a, b, ... if the claim has several parts; else empty"""
    overall: Comparison | None = None
    """all comparisons pooled, with p corrected over the claims; the verdict depends on it"""


_BOTH = "an MLM and a CLM model of one size and as many steps"

_CLAIMS: dict[str, tuple[str, str, str, Callable[[ModelSelector, int], PendingVerdict]]] = {
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
        f"Do {{mlm}} and CLM differ by less than {100 * EQUALITY_MARGIN:g} point on token classification?",
        f"{_BOTH}, both decayed and evaluated on TC",
        claim_tests.judge_equality,
    ),
    "1d": (
        "The gap on IR narrows with size",
        "Is the difference between {mlm} and CLM on retrieval smaller in larger models?",
        "MLM and CLM models of at least two sizes, decayed and evaluated on IR",
        claim_tests.judge_gap_narrowing,
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
        claim_tests.judge_rate_sensitivity,
    ),
    "4": (
        "25 % CLM, then MLM, beats MLM alone",
        "At equal steps, is a quarter of CLM and then MLM above MLM from the start?",
        f"a decayed model with {QUARTER_RANGE[0]:.0%} to {QUARTER_RANGE[1]:.0%} CLM before MLM, "
        "and MLM alone of the same size, ratio and steps",
        claim_tests.judge_clm_quarter,
    ),
    "5": (
        "MLM on a finished CLM model beats more MLM",
        "After as many more MLM steps, the most there are, is a model that began as CLM above one that began as MLM?",
        "models of continued pretraining from a CLM and from an MLM model, of one size and as many steps before and after",
        claim_tests.judge_continued_pretraining,
    ),
    "6": (
        "There is no single best mask ratio",
        "Is every mask ratio beaten by another one on some task or at some size?",
        "MLM models of two or more mask ratios, of one size and as many steps, decayed and evaluated on the same sets",
        claim_tests.judge_mask_ratios,
    ),
}
"""Title, question (`{mlm}` is MLM at the reference ratio), required results and test of each claim, by number and part. Tests get
the models and the number of bootstrap draws."""


def judge(evidence: Evidence, draws: int = 2000) -> list[Verdict]:
    """Test the six claims; return nine Verdicts (1a to 1d, 2 to 6), p corrected by Holm; `draws` only for intervals.

    `draws`: bootstrap samples for the intervals shown next to each verdict; 0 for none. Reads the example scores of all
    compared models.
    """
    models = ModelSelector(evidence)
    drafts = {name: draft(models, draws) for name, (*_, draft) in _CLAIMS.items()}
    corrected = inference.holm_adjust([draft.p for draft in drafts.values()])
    count = sum(not math.isnan(p) for p in corrected)
    return [_build_verdict(models, name, draft, p, count) for (name, draft), p in zip(drafts.items(), corrected, strict=True)]


def _build_verdict(models: ModelSelector, name: str, draft: PendingVerdict, p: float, claims: int) -> Verdict:
    """Build the verdict of the claim `name`, given its p corrected over the number of tested `claims`."""
    title, question, requirement, _ = _CLAIMS[name]
    verdict_draft = Verdict(int(name[0]), title, question.format(mlm=models.mlm), draft.comparisons, "no data", "", name[1:])
    if not draft.comparisons:
        return replace(verdict_draft, reason=f"Needs {draft.requirement or requirement}.")
    against = "reversed" if draft.outcome == "holds" else "holds"
    mixed = p < LEVEL and any(one.verdict == against for one in draft.decisive)
    verdict = draft.outcome if p < LEVEL and not mixed else "not resolved"
    overall = replace(draft.overall, p_adjusted=p, verdict=verdict) if draft.overall else None
    sentences = (
        _format_reason(draft, p, claims, mixed),
        _collapse_caveat(draft.comparisons),
        _single_run_caveat(draft.comparisons),
        _excluded_models_caveat(models, draft.contrasts),
        _incomplete_grid_caveat(draft.contrasts),
    )
    return replace(verdict_draft, verdict=verdict, reason=" ".join(filter(None, sentences)), overall=overall)


def _format_reason(draft: PendingVerdict, p: float, claims: int, mixed: bool) -> str:
    """Format difference, interval, p and counts of a claim as a sentence; `mixed`: some comparisons contradict the pooled one."""
    overall, chance = draft.overall, "no p, as the variation between seeds is unknown"
    if not math.isnan(p):
        p_text = format_p_value(p)
        chance = f"p {p_text}" if p_text.startswith("<") else f"p = {p_text}"
        chance += f" corrected over {claims} claims" if claims > 1 else ""
    parts = [chance]
    if overall is not None and math.isnan(overall.difference):
        parts = ["no fine-tuning seed that all of these models have"]
    elif overall is not None:
        interval = "" if math.isnan(overall.low) else f"95 % interval {overall.low:+.2f} to {overall.high:+.2f}, "
        counts = Counter("hold" if one.verdict == "holds" else one.verdict for one in draft.comparisons)
        each = ", ".join(f"{counts[word]} {word}" for word in ("hold", "reversed", "not resolved") if counts[word])
        parts = [
            f"{overall.left} minus {overall.right}: {format_points(overall.difference)} ({interval}{chance})",
            f"one by one, of {len(draft.comparisons)}: {each}",
        ]
    if mixed:
        parts.append("some of them significantly contradict the pooled difference")
    sentence = "; ".join([*parts, draft.note] if draft.note else parts)
    return (sentence if sentence.startswith("p ") else sentence[:1].upper() + sentence[1:]) + "."


def format_p_value(p: float) -> str:
    """Format p with two significant digits, such as 0.023; `< 0.0001` if it is smaller, and 1 from 0.995."""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.995 else "1"


_MAX_LISTED_PLACES = 3  # in one sentence


def _collapse_caveat(comparisons: Sequence[Comparison]) -> str:
    """Return a sentence that names comparisons with a collapsed side; "" if there are none."""
    locations = [f"{one.family} at {one.where}" for one in comparisons if one.collapsed]
    if not locations:
        return ""
    more = f" and {len(locations) - _MAX_LISTED_PLACES} more" if len(locations) > _MAX_LISTED_PLACES else ""
    return f"Not compared, as a side has collapsed: {', '.join(locations[:_MAX_LISTED_PLACES])}{more}."


def _single_run_caveat(comparisons: Sequence[Comparison]) -> str:
    """Return a sentence on comparisons with only one pretraining run a side; "" if there are none."""
    usable = [one for one in comparisons if not one.collapsed]
    count = sum(one.pretraining_runs == 1 for one in usable)
    if not count:
        return ""
    if not any(one.has_borrowed_variance for one in usable):
        return "This holds for these trained models; another pretraining run may differ by more."
    single = f"{count} of {len(usable)} comparisons have one pretraining run a side"
    return f"{single}; the variance between runs is taken from the others."


def _excluded_models_caveat(models: ModelSelector, contrasts: Sequence[Contrast]) -> str:
    """Return a sentence that counts models left out because the other side lacks their pretraining seed; "" if none."""
    used = {score.model_key for contrast in contrasts for run_scores in contrast.weighted_scores for _, score in run_scores}
    recipes = {replace(key, seed=0) for key in used}
    count = sum(key not in used and replace(key, seed=0) in recipes for key in models.model_keys)
    models_are = "1 model is" if count == 1 else f"{count} models are"
    return f"{models_are} left out because the other side lacks the same pretraining seed." if count else ""


def _incomplete_grid_caveat(contrasts: Sequence[Contrast]) -> str:
    """Return a sentence on fine-tuning seeds and learning rates that only one side has; "" if both have the same."""
    seeds: Counter[tuple[int, int]] = Counter()
    rates: set[int] = set()
    for members in (run_scores for contrast in contrasts for run_scores in contrast.weighted_scores):
        seed_sets = [set(member.seed_scores) for _, member in members]
        if all(seed_sets):
            seeds[len(set.intersection(*seed_sets)), len(set.union(*seed_sets))] += 1
            if len(tried := {_count_finished_rates(member) for _, member in members}) > 1:
                rates |= tried
    parts = []
    if fewer := {place: count for place, count in seeds.items() if place[0] < place[1]}:
        worst = min(fewer, key=lambda place: place[0] / place[1])
        incomplete = f"{sum(fewer.values())} of {seeds.total()} pairs of models lack fine-tuning seeds"
        parts.append(f"{incomplete} ({worst[0]} of {worst[1]})")
    if rates:
        parts.append(f"sides chose among unequal numbers of learning rates ({min(rates)} to {max(rates)})")
    return f"Not complete: {'; '.join(parts)}." if parts else ""


def _count_finished_rates(score: Score) -> int:
    """Return the number of learning rates at which every seed has finished or failed."""
    every = {*score.rate_scores, *score.failed_seeds}
    ended = [len(score.rate_scores.get(rate, ())) + len(score.failed_seeds.get(rate, ())) for rate in every]
    return sum(count >= len(score.seed_scores) for count in ended)
