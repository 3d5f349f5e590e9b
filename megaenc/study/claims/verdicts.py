"""What the study claims, each as a test of whatever evidence there is: its own numbers, ours, at any scale.

docs/study-claims.md says in words what is compared, what each verdict means and how often it is wrong.
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
        f"a decayed model with {QUARTER_RANGE[0]:.0%} to {QUARTER_RANGE[1]:.0%} CLM before MLM, and MLM alone of that size, ratio and steps",
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
"""By number and part: title, question (`{mlm}` is MLM at the ratio that stands for it), what it takes, and how it is judged from
the models with so many draws of the bootstrap."""


def judge(evidence: Evidence, draws: int = 2000) -> list[Verdict]:
    """Return the nine verdicts on the six claims, in their order. `draws` of the bootstrap next to each; 0: none.

    Takes the examples' scores out of the results of every model that it compares.
    """
    models = ModelSelector(evidence)
    drafts = {name: draft(models, draws) for name, (*_, draft) in _CLAIMS.items()}
    corrected = inference.holm_adjust([draft.p for draft in drafts.values()])
    count = sum(not math.isnan(p) for p in corrected)
    return [_build_verdict(models, name, draft, p, count) for (name, draft), p in zip(drafts.items(), corrected, strict=True)]


def _build_verdict(models: ModelSelector, name: str, draft: PendingVerdict, p: float, claims: int) -> Verdict:
    title, question, missing, _ = _CLAIMS[name]
    made = Verdict(int(name[0]), title, question.format(mlm=models.mlm), draft.comparisons, "no data", "", name[1:])
    if not draft.comparisons:
        return replace(made, reason=f"Needs {draft.missing or missing}.")
    against = "reversed" if draft.way == "holds" else "holds"
    mixed = p < LEVEL and any(one.verdict == against for one in draft.decisive)
    verdict = draft.way if p < LEVEL and not mixed else "not resolved"
    overall = replace(draft.overall, p_adjusted=p, verdict=verdict) if draft.overall else None
    said = (
        _format_reason(draft, p, claims, mixed),
        _collapse_caveat(draft.comparisons),
        _single_run_caveat(draft.comparisons),
        _excluded_models_caveat(models, draft.lines),
        _incomplete_grid_caveat(draft.lines),
    )
    return replace(made, verdict=verdict, reason=" ".join(filter(None, said)), overall=overall)


def _format_reason(draft: PendingVerdict, p: float, claims: int, mixed: bool) -> str:
    overall, chance = draft.overall, "no p, as nothing says what other seeds would give"
    if not math.isnan(p):
        said = format_p_value(p)
        chance = f"p {said}" if said.startswith("<") else f"p = {said}"
        chance += f" corrected over {claims} claims" if claims > 1 else ""
    parts = [chance]
    if overall is not None and math.isnan(overall.difference):
        parts = ["no seed that all of the models were fine-tuned with"]
    elif overall is not None:
        interval = "" if math.isnan(overall.low) else f"95 % interval {overall.low:+.2f} to {overall.high:+.2f}, "
        counts = Counter("hold" if one.verdict == "holds" else one.verdict for one in draft.comparisons)
        each = ", ".join(f"{counts[word]} {word}" for word in ("hold", "reversed", "not resolved") if counts[word])
        parts = [
            f"{overall.left} minus {overall.right}: {format_points(overall.difference)} ({interval}{chance})",
            f"one by one, of {len(draft.comparisons)}: {each}",
        ]
    if mixed:
        parts.append("some of them clearly go against the whole")
    sentence = "; ".join([*parts, draft.note] if draft.note else parts)
    return (sentence if sentence.startswith("p ") else sentence[:1].upper() + sentence[1:]) + "."


def format_p_value(p: float) -> str:
    """Return p as it is printed: 0.023, or < 0.0001; 1 from 0.995 on."""
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.995 else "1"


_MAX_LISTED_PLACES = 3  # places that a sentence names


def _collapse_caveat(comparisons: Sequence[Comparison]) -> str:
    """Return a caveat, a sentence on what a verdict leaves open, as do the functions below; "" if there is nothing of it."""
    places = [f"{one.family} at {one.where}" for one in comparisons if one.collapsed]
    if not places:
        return ""
    more = f" and {len(places) - _MAX_LISTED_PLACES} more" if len(places) > _MAX_LISTED_PLACES else ""
    return f"Not compared, as a side learned nothing: {', '.join(places[:_MAX_LISTED_PLACES])}{more}."


def _single_run_caveat(comparisons: Sequence[Comparison]) -> str:
    sound = [one for one in comparisons if not one.collapsed]
    once = sum(one.pretrained == 1 for one in sound)
    if not once:
        return ""
    if not any(one.lent for one in sound):
        return "This is about these trained models; another pretraining run may differ by more."
    return f"{once} of {len(sound)} comparisons have one pretraining run a side: how far runs differ is taken from the others."


def _excluded_models_caveat(models: ModelSelector, lines: Sequence[Contrast]) -> str:
    """Pretraining seeds of compared models that have no partner of the same seed."""
    used = {score.model_key for line in lines for of_run in line.members for _, score in of_run}
    recipes = {replace(setting, seed=0) for setting in used}
    count = sum(setting not in used and replace(setting, seed=0) in recipes for setting in models.settings)
    models_are = "1 model is" if count == 1 else f"{count} models are"
    return f"{models_are} left out, pretrained with a seed that the other side does not have." if count else ""


def _incomplete_grid_caveat(lines: Sequence[Contrast]) -> str:
    """Fine-tuning seeds and rates that one side of a line has and the other has not, or not yet."""
    seeds: Counter[tuple[int, int]] = Counter()
    rates: set[int] = set()
    for members in (of_run for line in lines for of_run in line.members):
        having = [set(member.seeds) for _, member in members]
        if all(having):
            seeds[len(set.intersection(*having)), len(set.union(*having))] += 1
            if len(tried := {_count_finished_rates(member) for _, member in members}) > 1:
                rates |= tried
    parts = []
    if fewer := {place: count for place, count in seeds.items() if place[0] < place[1]}:
        worst = min(fewer, key=lambda place: place[0] / place[1])
        lacking = f"{sum(fewer.values())} of {seeds.total()} pairs of models lack fine-tuning seeds"
        parts.append(f"{lacking} ({worst[0]} of {worst[1]})")
    if rates:
        parts.append(f"sides chose among unequal numbers of learning rates ({min(rates)} to {max(rates)})")
    return f"Not complete: {'; '.join(parts)}." if parts else ""


def _count_finished_rates(score: Score) -> int:
    """Rates of which every seed has ended, well or not."""
    every = {*score.rates, *score.failed_seeds}
    ended = [len(score.rates.get(rate, ())) + len(score.failed_seeds.get(rate, ())) for rate in every]
    return sum(count >= len(score.seeds) for count in ended)
