"""What MLM on a finished model brings, by its length, from CLM and from MLM models."""

from collections import defaultdict

from megaenc.study.axes import styles
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import OBJECTIVES, Drawn, Missing, Picture, Series, bars, panels_of
from megaenc.study.setting import Setting
from megaenc.study.setups import objective, parent_of, percent, steps_of

KEY, TITLE = "continued-pretraining", "Continued pretraining by length"


def picture(evidence: Evidence, published: Evidence | None = None) -> Drawn:
    """Finished models, at 0 more steps, and those that went on from them with MLM."""
    settings = evidence.settings()
    groups: dict[tuple[Setting, float | None], list[Setting]] = defaultdict(list)
    for one in settings:
        if one.cpt_mlm_steps and one.decayed and not one.schedule:
            parent = parent_of(one)
            groups[_first_seed(parent), one.mask_ratio].append(one)
            if parent in settings and parent not in groups[_first_seed(parent), one.mask_ratio]:
                groups[_first_seed(parent), one.mask_ratio].append(parent)
    if not groups:
        return Missing(KEY, TITLE, "No model of continued pretraining has a score yet.")
    sizes, masks = evidence.sizes_of(parent for parent, _ in groups), {mask for _, mask in groups}
    order = sorted(groups, key=lambda key: (sizes.index(key[0].size), key[0].clm_steps > 0, key[0].steps, key[1]))
    kinds = [objective(parent) for parent, _ in order]
    plain = len(set(kinds)) == len(kinds)  # each objective once: it says all
    names = {}
    for key, kind in zip(order, kinds, strict=True):
        parent, mask = key
        names[key] = f"from {kind}"
        if not plain:
            names[key] += f" {steps_of(parent.steps)}" + (f", {parent.size}" if len(sizes) > 1 else "")
            names[key] += f", {percent(mask)} hidden" if len(masks) > 1 else ""
    style = (
        {names[key]: OBJECTIVES[kind] for key, kind in zip(order, kinds, strict=True)} if plain else styles(list(names.values()))
    )
    series = [Series(names[key], *style[names[key]], tuple((one.cpt_mlm_steps, one) for one in groups[key])) for key in order]
    places = sorted({one.cpt_mlm_steps for members in groups.values() for one in members})
    ticks = {float(steps): steps_of(steps) for steps in places}
    panels = panels_of(
        evidence, series, published, dodge=places[-1] / 70, ticks=ticks, x_label="MLM steps after the finished model"
    )
    caption = f"At 0 the finished, decayed models. {bars(evidence, published, panels)}"
    return Picture(KEY, TITLE, caption, panels)


def _first_seed(setting: Setting) -> Setting:
    """The same model of the first seed: seeds of one model make one line."""
    from dataclasses import replace

    return replace(setting, seed=1)
