"""Models whose objectives alternate, mix or change otherwise, beside CLM and MLM after as many steps."""

from collections import defaultdict

from megaenc.study.axes import styles
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import OBJECTIVES, Picture, Series, bars, panels_of
from megaenc.study.setting import Setting
from megaenc.study.setups import objective, percent, steps_of

KEY, TITLE = "other-schedules", "Other schedules"


def picture(evidence: Evidence) -> Picture | None:
    """A place for each size and number of steps; None where every model is CLM, MLM, or one after the other."""
    names = {one.setting: one.model for one in evidence.scores if one.setting is not None}
    groups: dict[tuple[str, int], list[Setting]] = defaultdict(list)
    for one in names:
        if one.schedule and one.decayed:
            groups[one.size, one.steps].append(one)
    if not groups:
        return None
    sizes = evidence.sizes_of(members[0] for members in groups.values())
    order = sorted(groups, key=lambda where: (sizes.index(where[0]), where[1]))
    beside: dict[str, list[tuple[float, Setting]]] = {name: [] for name in ("MLM", "CLM", "MLM on CLM", "MLM on MLM")}
    for at, where in enumerate(order):
        for one in names:
            if (
                (one.size, one.steps) == where
                and one.decayed
                and not one.schedule
                and one.mask_ratio in (None, evidence.mask_ratio)
            ):
                kind = objective(one) if not one.cpt_mlm_steps else f"MLM on {objective(one)}"
                if kind in beside:
                    beside[kind].append((at, one))
    looks = {"MLM on CLM": (OBJECTIVES["CLM"][0], "v"), "MLM on MLM": (OBJECTIVES["MLM"][0], "D"), **OBJECTIVES}
    series = [Series(name, *looks[name], tuple(places), joined=False) for name, places in beside.items() if places]
    others = [(float(at), one) for at, where in enumerate(order) for one in groups[where]]
    style = styles([names[one] for _, one in others])
    series += [Series(names[one], *style[names[one]], ((at, one),), joined=False) for at, one in others]
    ticks = {
        float(at): f"{steps_of(steps)} steps" + (f", {size}" if len(sizes) > 1 else "") for at, (size, steps) in enumerate(order)
    }
    panels = panels_of(evidence, series, dodge=0.8 / len(series), ticks=ticks, x_label="steps, those before a finished model too")
    mask = "" if evidence.mask_ratio is None else f" ({percent(evidence.mask_ratio)} hidden)"
    caption = (
        f"Each model of another schedule, and CLM and MLM{mask} after as many steps where there are such. "
        f"{bars(evidence, None, panels)}"
    )
    return Picture(KEY, TITLE, caption, panels)
