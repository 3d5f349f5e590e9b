"""What a verdict leaves open, in sentences: models that were pretrained once or collapsed, seeds and rates that are not there."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from megaenc.study.claim_tests import Draft
from megaenc.study.comparisons import Comparison, Line
from megaenc.study.models import Models
from megaenc.study.score import Score

_FEW = 3  # places that a sentence names


def caveats(models: Models, draft: Draft) -> list[str]:
    """Sentences, most important first; none for what the claim has nothing of."""
    said = (_collapsed(draft.comparisons), _pretrained(draft.comparisons), _left_out(models, draft.lines), _unequal(draft.lines))
    return [sentence for sentence in said if sentence]


def _collapsed(comparisons: Sequence[Comparison]) -> str:
    places = [f"{one.family} at {one.where}" for one in comparisons if one.collapsed]
    if not places:
        return ""
    more = f" and {len(places) - _FEW} more" if len(places) > _FEW else ""
    return f"Not compared, as a side learned nothing: {', '.join(places[:_FEW])}{more}."


def _pretrained(comparisons: Sequence[Comparison]) -> str:
    sound = [one for one in comparisons if not one.collapsed]
    once = sum(one.pretrained == 1 for one in sound)
    if not once:
        return ""
    if not any(one.lent for one in sound):
        return "This is about these trained models; another pretraining run may differ by more."
    return f"{once} of {len(sound)} comparisons have one pretraining run a side: how far runs differ is taken from the others."


def _left_out(models: Models, lines: Sequence[Line]) -> str:
    """Pretraining seeds of compared models that have no partner of the same seed."""
    used = {score.setting for line in lines for of_run in line.members for _, score in of_run}
    recipes = {replace(setting, seed=0) for setting in used}
    count = sum(setting not in used and replace(setting, seed=0) in recipes for setting in models.settings)
    models_are = "1 model is" if count == 1 else f"{count} models are"
    return f"{models_are} left out, pretrained with a seed that the other side does not have." if count else ""


def _unequal(lines: Sequence[Line]) -> str:
    """Fine-tuning seeds and rates that one side of a line has and the other has not, or not yet."""
    seeds: Counter[tuple[int, int]] = Counter()
    rates: set[int] = set()
    for members in (of_run for line in lines for of_run in line.members):
        having = [set(member.seeds) for _, member in members]
        if all(having):
            seeds[len(set.intersection(*having)), len(set.union(*having))] += 1
            if len(tried := {_tried(member) for _, member in members}) > 1:
                rates |= tried
    parts = []
    if fewer := {place: count for place, count in seeds.items() if place[0] < place[1]}:
        worst = min(fewer, key=lambda place: place[0] / place[1])
        lacking = f"{sum(fewer.values())} of {seeds.total()} pairs of models lack fine-tuning seeds"
        parts.append(f"{lacking} ({worst[0]} of {worst[1]})")
    if rates:
        parts.append(f"sides chose among unequal numbers of learning rates ({min(rates)} to {max(rates)})")
    return f"Not complete: {'; '.join(parts)}." if parts else ""


def _tried(score: Score) -> int:
    """Rates of which every seed has ended, well or not."""
    every = {*score.rates, *score.rates_failed}
    ended = [len(score.rates.get(rate, ())) + len(score.rates_failed.get(rate, ())) for rate in every]
    return sum(count >= len(score.seeds) for count in ended)
