"""All figures of a report, in the order in which they are shown."""

from collections.abc import Mapping
from dataclasses import dataclass

from megaenc.study.evidence import Evidence
from megaenc.study.figures import continued, efficiency, losses, masks, objectives, rates, schedules, shares
from megaenc.study.figures.panels import Drawn, Missing, Picture, laid_over
from megaenc.study.run_tree import TrainedRun, flops_of_the_study
from megaenc.study.setting import Setting


@dataclass(frozen=True)
class Shown:
    """A figure, and the published numbers drawn the same way where they cannot lie in it."""

    drawn: Drawn
    published: Picture | None = None


def figures_of(
    evidence: Evidence, runs: Mapping[str, TrainedRun], flops: Mapping[Setting, float], published: Evidence | None = None
) -> list[Shown]:
    """Every figure; `flops` by setting, `published` what to lay behind or beside."""
    flops_there = flops_by_shape(published) if published else {}
    pairs: list[tuple[Drawn, Drawn | None]] = [
        (make(evidence, published), make(published) if published else None)
        for make in (objectives.picture, masks.by_size, masks.with_clm)
    ]
    pairs.append((efficiency.by_step(evidence, published), efficiency.by_step(published) if published else None))
    by_flops = efficiency.by_flops(evidence, flops, published)
    pairs.append((by_flops, efficiency.by_flops(published, flops_there) if published else None))
    pairs.append((rates.picture(evidence), None))
    pairs += [(make(evidence, published), make(published) if published else None) for make in (shares.picture, continued.picture)]
    if (others := schedules.picture(evidence)) is not None:
        pairs.append((others, None))
    pairs.append((losses.picture(runs), None))
    return [Shown(ours, theirs if isinstance(theirs, Picture) and not _covered(ours) else None) for ours, theirs in pairs]


def flops_by_shape(evidence: Evidence) -> dict[Setting, float]:
    """Operations of the study's own models, from their shapes."""
    counted = {setting: flops_of_the_study(setting) for setting in evidence.settings()}
    return {setting: count for setting, count in counted.items() if count}


def _covered(drawn: Drawn) -> bool:
    """Whether the published values lie in the figure already."""
    return not isinstance(drawn, Missing) and laid_over(drawn.panels)
