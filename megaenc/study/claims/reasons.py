"""Sentences that give the reason of a verdict.

They have the numbers of the deciding test, task families, another pretraining run, and caveats.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megaenc.study.claims.decision import PendingVerdict, format_difference, format_p
from megaenc.study.results.evidence import Score
from megaenc.study.stats.comparisons import Comparison, Contrast, ModelSelector, Outcome
from megaenc.study.stats.run_noise import RunNoise


def format_reason(
    models: ModelSelector,
    draft: PendingVerdict,
    p: float,
    claims: int,
    verdict: Outcome,
    another_run: Outcome,
    p_another_run: float,
    noise: RunNoise,
) -> str:
    """Format the reason of a verdict: numbers, families, another run, and caveats.

    The result is one line of sentences.

    Args:
        models: All evaluated models; a sentence counts those that lack a pair of the same seed.
        draft: Test for these trained models, with at least one comparison.
        p: p of the claim, corrected over `claims`, the number of claims with a p; NaN if unknown.
        verdict: Outcome for these trained models.
        another_run: Outcome for another pretraining run.
        p_another_run: Corrected p of `another_run`; NaN if unknown.
        noise: Noise between pretraining runs, named in the sentence on another run.
    """
    families = []
    for comparison in draft.families:
        difference = format_difference(comparison.difference, comparison.unit)
        p_family = format_p(comparison.p_adjusted)
        families.append(f"{comparison.family} {difference} ({p_family}, {comparison.verdict})")
    sentences = (
        _format_decision(draft, p, claims, verdict),
        f"By family: {'; '.join(families)}." if families else "",
        _another_run_caveat(draft, another_run, p_another_run, noise),
        _collapse_caveat(draft.comparisons),
        _excluded_models_caveat(models, draft.contrasts),
        _incomplete_grid_caveat(draft.contrasts),
    )
    return " ".join(filter(None, sentences))


def _format_decision(draft: PendingVerdict, p: float, claims: int, verdict: Outcome) -> str:
    """Format difference, interval, p and counts of a claim as a sentence."""
    overall = draft.overall
    chance = "no p, as the variation between seeds is unknown"
    if not math.isnan(p):
        chance = format_p(p) + (f" corrected over {claims} claims" if claims > 1 else "")
    if overall is None:
        parts = [chance]
    elif math.isnan(overall.difference):
        parts = ["no fine-tuning seed that all of these models have"]
    else:
        interval = ""
        if not math.isnan(overall.low):
            interval = f"95 % interval {overall.low:+.2f} to {overall.high:+.2f}, "
        counts = Counter(comparison.verdict for comparison in draft.comparisons)
        words = {
            "holds": "holds" if counts["holds"] == 1 else "hold",
            "reversed": "reversed",
            "not resolved": "not resolved",
        }
        verdict_counts = ", ".join(
            f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict]
        )
        difference = format_difference(overall.difference, overall.unit)
        parts = [
            f"{overall.left} minus {overall.right}: {difference} ({interval}{chance})",
            f"one by one, of {len(draft.comparisons)}: {verdict_counts}",
        ]
    if verdict == "mixed":
        parts.append("some of them are significant in opposite directions")
    if draft.note:
        parts.append(draft.note)
    sentence = "; ".join(parts) + "."
    return sentence if sentence.startswith("p ") else sentence[:1].upper() + sentence[1:]


def _another_run_caveat(draft: PendingVerdict, verdict: Outcome, p: float, noise: RunNoise) -> str:
    """Return a sentence on another pretraining run; "" unless some side has only one."""
    count = sum(comparison.pretraining_runs == 1 for comparison in draft.comparisons)
    if not count:
        return ""
    if any(comparison.has_borrowed_variance for comparison in draft.comparisons):
        single = f"{count} of {len(draft.comparisons)} comparisons have one pretraining run a side"
        return f"{single}; the variance between runs is taken from the others."
    is_spread = any(comparison.unit == "share" for comparison in draft.comparisons)
    if math.isnan(p):
        also = "" if is_spread or noise.given else ", or state --run-noise"
        return (
            "This is about these trained models; by how much another pretraining run differs is "
            f"unknown here: pretrain with several seeds{also}."
        )
    if is_spread:
        how = "by the differences between sizes"
    else:
        used = list(dict.fromkeys(contrast.family for contrast in draft.contrasts))
        how = f"noise between runs: {noise.describe(used)}"
    return f"Another pretraining run: {verdict} ({format_p(p)}; {how})."


_MAX_LISTED_PLACES = 3  # in one sentence


def _collapse_caveat(comparisons: Sequence[Comparison]) -> str:
    """Return a sentence that names comparisons with a collapsed side; "" without any."""
    locations = [
        f"{comparison.family} at {comparison.where}"
        for comparison in comparisons
        if comparison.collapsed
    ]
    if not locations:
        return ""
    sentence = f"A side has collapsed: {', '.join(locations[:_MAX_LISTED_PLACES])}"
    if len(locations) > _MAX_LISTED_PLACES:
        sentence += f" and {len(locations) - _MAX_LISTED_PLACES} more"
    return f"{sentence}."


def _excluded_models_caveat(models: ModelSelector, contrasts: Sequence[Contrast]) -> str:
    """Return a sentence that counts models without a pair; "" if there are none.

    Such a model is left out because the other side lacks its pretraining seed.
    """
    used = {
        score.model_key
        for contrast in contrasts
        for run_scores in contrast.weighted_scores
        for _, score in run_scores
    }
    recipes = {replace(key, seed=0) for key in used}
    count = sum(key not in used and replace(key, seed=0) in recipes for key in models.model_keys)
    if not count:
        return ""
    models_are = "1 model is" if count == 1 else f"{count} models are"
    return f"{models_are} left out because the other side lacks the same pretraining seed."


def _incomplete_grid_caveat(contrasts: Sequence[Contrast]) -> str:
    """Return a sentence on fine-tuning runs that one side lacks; "" if there are none.

    It counts pairs that lack seeds, and sides with unequal numbers of learning rates.
    """
    seeds: Counter[tuple[int, int]] = Counter()
    rates: set[int] = set()
    for members in (
        run_scores for contrast in contrasts for run_scores in contrast.weighted_scores
    ):
        seed_sets = [set(member.seed_scores) for _, member in members]
        if not all(seed_sets):
            continue
        seeds[len(set.intersection(*seed_sets)), len(set.union(*seed_sets))] += 1
        tried = {_count_finished_rates(member) for _, member in members}
        if len(tried) > 1:
            rates |= tried
    parts = []
    fewer = {place: count for place, count in seeds.items() if place[0] < place[1]}
    if fewer:
        shared, planned = min(fewer, key=lambda place: place[0] / place[1])
        parts.append(
            f"{sum(fewer.values())} of {seeds.total()} pairs of models lack fine-tuning seeds "
            f"({shared} of {planned})"
        )
    if rates:
        parts.append(
            f"sides chose among unequal numbers of learning rates ({min(rates)} to {max(rates)})"
        )
    return f"Not complete: {'; '.join(parts)}." if parts else ""


def _count_finished_rates(score: Score) -> int:
    """Return the number of learning rates at which every seed has finished or failed."""
    tried_rates = {*score.rate_scores, *score.failed_seeds}
    ended = [
        len(score.rate_scores.get(rate, ())) + len(score.failed_seeds.get(rate, ()))
        for rate in tried_rates
    ]
    return sum(count >= len(score.seed_scores) for count in ended)
