"""Models whose objectives alternate, mix or change otherwise, beside CLM and MLM after as many steps."""

import itertools
from collections import defaultdict

from megaenc.study.axes import styles
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import BLUE, ORANGE, Picture, Series, bars, panels_of
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
    placed: dict[str, list[tuple[float, Setting]]] = defaultdict(list)
    for at, where in enumerate(order):
        plain = [one for one in names if (one.size, one.steps) == where and _kind(one, evidence.mask_ratio)]
        here = [*sorted(((_kind(one, evidence.mask_ratio), one) for one in plain), key=lambda found: _PLAIN.index(found[0]))]
        here += [(names[one], one) for one in groups[where]]
        labels = list(dict.fromkeys(label for label, _ in here))  # several seeds of one model stand above each other
        for label, one in here:
            placed[label].append((at + 0.8 * ((labels.index(label) + 0.5) / len(labels) - 0.5), one))
    order_of = [*(name for name in _PLAIN if name in placed), *(name for name in placed if name not in _PLAIN)]
    free = [look for look in styles([f"{at}" for at in range(42)]).values() if look[0] not in (BLUE, ORANGE)]
    looks = {**dict(zip((name for name in order_of if name not in _PLAIN), itertools.cycle(free), strict=False)), **_LOOKS}
    series = [Series(name, *looks[name], tuple(placed[name]), joined=False) for name in order_of]
    ticks = {
        float(at): f"{steps_of(steps)} steps" + (f", {size}" if len(sizes) > 1 else "") for at, (size, steps) in enumerate(order)
    }
    panels = panels_of(evidence, series, ticks=ticks, x_label="optimizer steps in all")
    mask = "" if evidence.mask_ratio is None else f" ({percent(evidence.mask_ratio)} hidden)"
    caption = (
        f"Each model of another schedule, and CLM and MLM{mask} after as many steps where there are such. "
        f"{bars(evidence, None, panels)}"
    )
    return Picture(KEY, TITLE, caption, panels)


_LOOKS = {"MLM": (ORANGE, "s"), "CLM": (BLUE, "o"), "MLM on CLM": (BLUE, "v"), "MLM on MLM": (ORANGE, "D")}
_PLAIN = list(_LOOKS)


def _kind(setting: Setting, mask: float | None) -> str:
    """Which of _PLAIN a finished model is; "" for all others."""
    if setting.schedule or not setting.decayed or setting.mask_ratio not in (None, mask):
        return ""
    kind = f"MLM on {objective(setting)}" if setting.cpt_mlm_steps else objective(setting)
    return kind if kind in _PLAIN else ""
