"""What the mask ratio changes: by size, and with and without CLM before."""

from collections import defaultdict

from megaenc.study.axes import styles
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import OBJECTIVES, Drawn, Missing, Picture, Series, bars, panels_of
from megaenc.study.setting import Setting
from megaenc.study.setups import objective, percent, steps_of


def by_size(evidence: Evidence, published: Evidence | None = None) -> Drawn:
    """MLM base models of each size over their mask ratios."""
    key, title = "mask-ratios", "Mask ratios"
    base = [one for one in evidence.grouped().get("base", []) if objective(one) == "MLM"]
    ratios = sorted({one.mask_ratio for one in base})
    if len(ratios) < 2:
        return Missing(key, title, "No size has MLM models of two mask ratios with scores yet.")
    sizes = evidence.sizes_of(base)
    style = styles(sizes)
    series = [
        Series(size, *style[size], tuple((100 * one.mask_ratio, one) for one in base if one.size == size)) for size in sizes
    ]
    ticks = {100 * ratio: percent(ratio) for ratio in ratios}
    panels = panels_of(evidence, series, published, dodge=_dodge(ratios), ticks=ticks, x_label="tokens hidden")
    return Picture(key, title, f"MLM base models of each size. {bars(evidence, published, panels)}", panels)


def with_clm(evidence: Evidence, published: Evidence | None = None) -> Drawn:
    """MLM alone and CLM then MLM over mask ratios, at each size and budget that has two ratios of both."""
    key, title = "mask-ratios-with-clm", "Mask ratios, with and without CLM first"
    groups: dict[tuple[str, int, float], list[Setting]] = defaultdict(list)
    for one in evidence.settings():
        if one.decayed and not one.cpt_mlm_steps and objective(one) in ("MLM", "CLM + MLM"):
            groups[one.size, one.steps, round(one.clm_share, 2)].append(one)
    several = {where: found for where, found in groups.items() if len({one.mask_ratio for one in found}) > 1}
    pairs = [
        (several[size, steps, 0.0], found)
        for (size, steps, share), found in several.items()
        if share and (size, steps, 0.0) in several
    ]
    if not pairs:
        return Missing(key, title, "No budget has models of two mask ratios both with CLM first and without, with scores.")
    named = len({(found[0].size, found[0].steps) for _, found in pairs}) > 1
    series: dict[str, Series] = {}
    colours = iter(styles([f"{at}" for at in range(2 * len(pairs))]).values())
    for pair in pairs:
        for members in pair:
            first = members[0]
            share = f"{percent(round(first.clm_share, 2))} CLM, then MLM" if first.clm_steps else "MLM alone"
            name = f"{share} ({first.size}, {steps_of(first.steps)} steps)" if named else share
            style = next(colours) if named else OBJECTIVES[objective(first)]
            series.setdefault(name, Series(name, *style, tuple((100 * one.mask_ratio, one) for one in members)))
    ratios = sorted({one.mask_ratio for pair in pairs for members in pair for one in members})
    ticks = {100 * ratio: percent(ratio) for ratio in ratios}
    panels = panels_of(
        evidence, list(series.values()), published, dodge=_dodge(ratios), ticks=ticks, x_label="tokens hidden in MLM"
    )
    return Picture(key, title, f"Models of the same budget. {bars(evidence, published, panels)}", panels)


def _dodge(ratios: list[float]) -> float:
    """A twenty-fifth of the axis."""
    return 100 * (ratios[-1] - ratios[0]) / 60
