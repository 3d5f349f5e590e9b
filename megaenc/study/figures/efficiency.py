"""How fast CLM and MLM learn: checkpoints on the way, by step and by what they cost."""

from collections.abc import Mapping

from megaenc.study.axes import short
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import OBJECTIVES, Drawn, Missing, Picture, Series, bars, panels_of
from megaenc.study.setting import Setting
from megaenc.study.setups import objective, percent

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def by_step(evidence: Evidence, published: Evidence | None = None) -> Drawn:
    """Scores of the checkpoints over their steps."""
    key, title = "efficiency-steps", "Data efficiency by step"
    settings = _on_the_way(evidence)
    if len({one.steps for one in settings}) < 2:
        return Missing(key, title, "Fewer than two checkpoints on the way have scores.")
    places = {one: float(one.steps) for one in settings}
    return _picture(key, title, "step", evidence, published, places, named=True)


def by_flops(evidence: Evidence, flops: Mapping[Setting, float], published: Evidence | None = None) -> Drawn:
    """The same over the operations that they took; `flops` by setting, those that it lacks are left out."""
    key, title = "efficiency-flops", "Data efficiency by FLOP"
    settings = _on_the_way(evidence)
    places = {one: flops[one] for one in settings if one in flops}
    if len(set(places.values())) < 2:
        why = "Fewer than two checkpoints on the way have scores."
        if len({one.steps for one in settings}) > 1:
            why = (
                "The operations of its runs are not known: --runs names the folder of the pretraining runs, which say them. "
                "Models of a manifest always need it; only those of the study are counted from their shapes without."
            )
        return Missing(key, title, why)
    return _picture(key, title, "FLOPs of the matrix products", evidence, published, places)


def _on_the_way(evidence: Evidence) -> list[Setting]:
    return [one for one in evidence.settings() if not one.decayed]


def _picture(
    key: str,
    title: str,
    x_label: str,
    evidence: Evidence,
    published: Evidence | None,
    places: Mapping[Setting, float],
    named: bool = False,
) -> Drawn:
    kinds = dict.fromkeys((objective(one), one.mask_ratio, one.size) for one in places)
    sizes, masks = evidence.sizes_of(places), {one.mask_ratio for one in places if one.mask_ratio is not None}
    series = []
    for name, mask, size in sorted(kinds, key=lambda kind: (kind[0] != "MLM", kind[0], kind[1] or 0, sizes.index(kind[2]))):
        members = [one for one in places if (objective(one), one.mask_ratio, one.size) == (name, mask, size)]
        colour, marker = OBJECTIVES.get(name, ("#CC79A7", "D"))
        label = name + (f" {percent(mask)}" if mask is not None and len(masks) > 1 else "")
        label += f", {size}" if len(sizes) > 1 else ""
        marker = _MARKERS[sizes.index(size) % len(_MARKERS)] if len(sizes) > 1 else marker
        series.append(Series(label, colour, marker, tuple((places[one], one) for one in members)))
    log = max(places.values()) >= 8 * min(places.values())
    seen = sorted(set(places.values()))
    ticks = {place: short(place) for place in seen} if named and len(seen) <= 8 else None
    panels = panels_of(
        evidence, series, published, x_label=x_label, log=log, unit="steps" if named else "operations", ticks=ticks
    )
    caption = f"Checkpoints before any decay of the learning rate. {bars(evidence, published, panels)}"
    return Picture(key, title, caption, panels)
