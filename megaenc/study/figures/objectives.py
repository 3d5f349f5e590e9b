"""CLM against MLM: by size, or by data set where there is one size."""

from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import (
    OBJECTIVES,
    Drawn,
    Line,
    Missing,
    Panel,
    Picture,
    Series,
    bars,
    behind,
    panel_title,
    panels_of,
    point_of,
)
from megaenc.study.setting import Setting
from megaenc.study.setups import FAMILIES, dataset_label, datasets_of, objective, percent

KEY, TITLE = "objectives", "CLM and MLM"


def picture(evidence: Evidence, published: Evidence | None = None) -> Drawn:
    """The base models of both objectives, MLM at the mask ratio that most models have."""
    base = evidence.grouped().get("base", [])
    mask = evidence.mask_ratio
    models = {name: [one for one in base if objective(one) == name and one.mask_ratio in (None, mask)] for name in ("MLM", "CLM")}
    if not all(models.values()):
        lacking = " and ".join(name for name, found in models.items() if not found)
        return Missing(KEY, TITLE, f"No base model of {lacking} has a score yet.")
    sizes = evidence.sizes_of(one for found in models.values() for one in found)
    hidden = f"MLM hides {percent(mask)} of the tokens."
    if len(sizes) > 1:
        series = [
            Series(name, *OBJECTIVES[name], tuple((sizes.index(one.size), one) for one in found))
            for name, found in models.items()
        ]
        ticks = dict(enumerate(sizes))
        panels = panels_of(evidence, series, published, dodge=0.08, ticks=ticks, x_label="size of the model")
        return Picture(KEY, TITLE, f"Base models by size. {hidden} {bars(evidence, published, panels)}", panels)
    panels = _by_dataset(evidence, published, models)
    said = f"{hidden} {bars(evidence, published, panels)}"
    return Picture(KEY, TITLE, f"Base models of size {sizes[0]} on every data set. {said}", panels)


def _by_dataset(evidence: Evidence, published: Evidence | None, models: dict[str, list[Setting]]) -> tuple[Panel, ...]:
    panels = []
    for family, names in datasets_of(evidence.datasets()).items():
        lines = []
        for source, light in ((evidence, False), (published, True)):
            for at, (name, found) in enumerate(models.items()):
                for setting in found:
                    points = tuple(
                        point_of(place + 0.14 * (at - 0.5), score)
                        for place, dataset in enumerate(names)
                        if source is not None and (score := source.find(setting, dataset, family)) is not None
                    )
                    if points:
                        label = behind(name) if light else name
                        lines.append(Line(label, *OBJECTIVES[name], points, joined=False, light=light))
        if lines:
            ticks = {place: dataset_label(family, dataset) for place, dataset in enumerate(names)}
            title = FAMILIES.get(family, family) if len(names) > 1 else panel_title(family, names[0])
            panels.append(Panel(title, tuple(lines), "", ticks=ticks))
    return tuple(panels)
