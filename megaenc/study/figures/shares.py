"""How much of a budget should be CLM: scores over the CLM share, a line for each budget."""

from collections import defaultdict

from megaenc.study.axes import styles
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import Drawn, Missing, Picture, Series, bars, panels_of
from megaenc.study.setting import Setting
from megaenc.study.setups import objective, percent, steps_of

KEY, TITLE = "clm-shares", "CLM share at each budget"


def picture(evidence: Evidence, published: Evidence | None = None) -> Drawn:
    """Models from scratch at the mask ratio that most have, of every size and budget with a two-stage model."""
    settings = evidence.settings()
    mask = evidence.mask_ratio
    groups: dict[tuple[str, int], list[Setting]] = defaultdict(list)
    for one in settings:
        if one.decayed and not one.cpt_mlm_steps and not one.schedule and one.mask_ratio in (None, mask):
            groups[one.size, one.steps].append(one)
    groups = {
        where: members
        for where, members in groups.items()
        if any(objective(one) == "CLM + MLM" for one in members) and len({one.clm_share for one in members}) > 1
    }
    if not groups:
        return Missing(KEY, TITLE, "No two-stage model (CLM, then MLM) has a score beside a model of the same budget.")
    sizes = evidence.sizes_of(one for members in groups.values() for one in members)
    order = sorted(groups, key=lambda where: (sizes.index(where[0]), where[1]))
    names = {(size, steps): f"{steps_of(steps)} steps" + (f", {size}" if len(sizes) > 1 else "") for size, steps in order}
    style = styles(list(names.values()))
    series = [
        Series(names[where], *style[names[where]], tuple((100 * one.clm_share, one) for one in groups[where])) for where in order
    ]
    ticks = {float(share): f"{share} %" for share in (0, 25, 50, 75, 100)}
    panels = panels_of(evidence, series, published, dodge=1.2, ticks=ticks, x_label="share of the steps that are CLM, before MLM")
    said = bars(evidence, published, panels)
    caption = f"From MLM alone to CLM alone; MLM hides {percent(mask)} of the tokens. {said}"
    return Picture(KEY, TITLE, caption, panels)
