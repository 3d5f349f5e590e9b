"""How much the learning rate of the fine-tuning matters to models of each objective."""

import math
from collections import defaultdict

from megaenc.finetune.jobs import rate_name
from megaenc.study.evidence import Evidence
from megaenc.study.figures.panels import OBJECTIVES, PURPLE, Drawn, Line, Missing, Panel, Picture, Point, headline, panel_title
from megaenc.study.setting import Setting
from megaenc.study.setups import objective
from megaenc.study.spread_tables import sensitivity

KEY, TITLE = "learning-rates", "Sensitivity to the learning rate"


def picture(evidence: Evidence) -> Drawn:
    """Points lost against each model's own best rate, a light line a model and a strong one for the mean of an objective."""
    panels = []
    for family, dataset in headline(evidence).items():
        of_kind: dict[str, list[dict[float, float]]] = defaultdict(list)
        for one in evidence.scores:
            place = (one.family, one.dataset)
            if place == (family, dataset) and _finished(one.setting) and (made := sensitivity(one)) is not None:
                best = max(made.means.values())
                kind = _kind(objective(one.setting), bool(one.setting.cpt_mlm_steps))
                of_kind[kind].append({rate: 100 * (mean - best) for rate, mean in made.means.items()})
        lines = []
        for kind in sorted(of_kind, key=lambda kind: _ORDER.index(kind)):
            colour, marker = OBJECTIVES.get(kind, (PURPLE, "D"))
            models = of_kind[kind]
            if 1 < len(models) <= 40:
                lines += [Line("", colour, "", _points(losses), light=True, labelled=False) for losses in models]
            rates = sorted(set.intersection(*(set(losses) for losses in models)))
            means = {rate: math.fsum(losses[rate] for losses in models) / len(models) for rate in rates}
            if means:
                lines.append(Line(kind, colour, marker, _points(means)))
        if lines:
            every = sorted({point.x for line in lines for point in line.points})
            ticks = {rate: rate_name(rate).replace("e-0", "e-") for rate in every}
            axis = {"x_label": "learning rate of the fine-tuning", "y_label": "points below own best", "log": True}
            panels.append(Panel(panel_title(family, dataset), tuple(lines), ticks=ticks, **axis))
    if not panels:
        return Missing(
            KEY, TITLE, "No model has results of every seed at two learning rates; published tables have chosen rates alone."
        )
    caption = (
        "Mean over the seeds at each rate less that of the model's best rate, on test: light lines are finished models, strong "
        "ones the mean of those of an objective. The flatter, the less it matters which rate is taken."
    )
    if any(one.collapsed for one in evidence.scores):
        caption += " What collapses to worthless predictions at every rate is flat too: the table of collapsed runs names it."
    if any(one.rates_failed for one in evidence.scores):
        caption += (
            " Runs whose loss became no number count as the score that needs no model, where results say that; else their rate "
            "is left out of their model's line."
        )
    return Picture(KEY, TITLE, caption, tuple(panels))


def _finished(setting: Setting | None) -> bool:
    return setting is not None and setting.decayed


_ORDER = ("MLM", "CLM", "CLM + MLM", "other")


def _kind(name: str, continued: bool) -> str:
    if name == "CLM" and continued:  # MLM on a CLM model is both, one after the other
        return "CLM + MLM"
    return name if name in _ORDER else "other"


def _points(by_rate: dict[float, float]) -> tuple[Point, ...]:
    return tuple(Point(rate, by_rate[rate]) for rate in sorted(by_rate))
