"""The claim that no mask ratio is the best everywhere: every two ratios against each other, by size and family."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megaenc.study.claim_tests import FAMILIES, Draft, comparable, greatest, points
from megaenc.study.comparisons import Comparison, Line, adjusted, better_first, lines_of, pooled
from megaenc.study.models import Models
from megaenc.study.pooling import lending, test
from megaenc.study.setups import percent
from megaenc.study.statistics import LEVEL


def no_best_ratio(models: Models) -> Draft:
    """6: holds where each ratio is clearly beaten somewhere; reversed where one is never and is above each other one overall."""
    draft = Draft(
        6,
        "",
        "There is no single best mask ratio",
        "Is every mask ratio beaten by another one on some task or at some size?",
        "MLM models of two or more mask ratios, of one size and as many steps, decayed and evaluated on the same sets",
    )
    found: dict[tuple[str, int], set[float]] = defaultdict(set)
    alone = {
        one: one.mask_ratio
        for one in models.planned
        if one.decayed and not one.clm_steps and not one.cpt_mlm_steps and one.mask_ratio
    }
    for one in alone:
        found[one.size, one.steps].add(one.mask_ratio)
    longest = {size: max(steps for of, steps in found if of == size and len(found[of, steps]) > 1) for size in _several(found)}
    lines: list[Line] = []
    sides: list[tuple[float, float]] = []
    for size, steps in longest.items():
        ratios = sorted(found[size, steps])
        for first, second in [(a, b) for a in ratios for b in ratios if a < b]:
            pairs = models.pairs(
                lambda one, ratio=first: alone.get(one) == ratio,
                lambda one, ratio=second: alone.get(one) == ratio,
                lambda one: (one.size, one.steps),
            )
            some = lines_of(models.evidence, (percent(first), percent(second)), size, pairs.get((size, steps), {}), FAMILIES)
            lines += some
            sides += [(first, second)] * len(some)
    if not lines:
        return draft
    lent = lending(lines)
    comparisons = adjusted([test(line, lent) for line in lines])
    ratios = sorted({ratio for pair in sides for ratio in pair})
    beaten = {ratio: _beaten(ratio, sides, comparisons) for ratio in ratios}
    said = "; ".join(f"{percent(ratio)} {_where_beaten(*worst)}" for ratio, worst in beaten.items())
    p, way = max(p for p, _ in beaten.values()), "holds"
    if all(math.isnan(one.p) for one in comparisons):
        p = math.nan
    if not p < LEVEL and (unbeaten := [ratio for ratio in ratios if beaten[ratio][0] >= LEVEL]) and len(unbeaten) == 1:
        against = []
        for other in ratios:
            pair = (min(other, unbeaten[0]), max(other, unbeaten[0]))
            if of_pair := comparable([line for line, names in zip(lines, sides, strict=True) if names == pair]):
                against.append((test(pooled(of_pair), lent), pair[0] == unbeaten[0]))
        if len(against) == len(ratios) - 1 and all((one.difference > 0) == first for one, first in against):
            p, way = greatest([one.p for one, _ in against]), "reversed"
    return replace(draft, comparisons=[better_first(one) for one in comparisons], p=p, way=way, note=said, lines=lines)


def _several(found: dict[tuple[str, int], set[float]]) -> list[str]:
    return list(dict.fromkeys(size for (size, _), ratios in found.items() if len(ratios) > 1))


_Loss = tuple[float, Comparison | None]


def _beaten(ratio: float, sides: Sequence[tuple[float, float]], comparisons: Sequence[Comparison]) -> _Loss:
    """The smallest corrected p of a comparison that `ratio` loses, and that comparison; 1 where it loses none."""
    lost = [
        (one.p_adjusted, one)
        for pair, one in zip(sides, comparisons, strict=True)
        if ratio in pair and (one.difference < 0) == (pair[0] == ratio) and not math.isnan(one.p_adjusted)
    ]
    return min(lost, key=lambda found: found[0], default=(1.0, None))


def _where_beaten(p: float, worst: Comparison | None) -> str:
    if worst is None or p >= LEVEL:
        return "is not shown to be beaten anywhere"
    better = worst.left if worst.difference > 0 else worst.right
    return f"is beaten by {better} on {worst.family} at {worst.where} ({points(abs(worst.difference))})"
