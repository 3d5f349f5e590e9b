"""Figures of scores by objective, schedule, mask ratio and training budget."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.figures.base import (
    OBJECTIVE_STYLES,
    FigureLine,
    FigurePanel,
    FigureSeries,
    FigureSpec,
    build_family_figure,
    build_points,
    describe_bars,
    panel_title,
    published_label,
)
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import (
    FAMILY_LABELS,
    dataset_label,
    datasets_by_family,
    format_percent,
    format_steps,
    group_by_recipe,
    objective_name,
    parent_key,
    recipe_label,
    select_schedule_peers,
)
from megaenc.viz.style import BLUE, ORANGE, PURPLE, STYLES, assign_styles, format_tick


def build_objectives_figure(evidence: Evidence, published: Evidence | None = None) -> FigureSpec:
    """Build the figure of the scores of CLM and MLM base models.

    Base models are finished ones of one objective with the longest budget of their size. Scores are
    by size, or by data set if there is one size. Without both objectives there are no panels, and
    the caption gives the reason.

    Args:
        published: Published scores to draw lightly, of the same models; None for none.
    """
    key = "objectives"
    title = "CLM and MLM"
    base = evidence.group_by_setup().get("base", [])
    mask = evidence.reference_mask_ratio
    models = {
        name: [
            model_key
            for model_key in base
            if objective_name(model_key) == name and model_key.mask_ratio in (None, mask)
        ]
        for name in ("MLM", "CLM")
    }
    if not all(models.values()):
        missing = " and ".join(name for name, members in models.items() if not members)
        return FigureSpec(key, title, f"No base model of {missing} has a score yet.")
    sizes = evidence.sort_sizes(model_key for members in models.values() for model_key in members)
    hidden = f"MLM hides {format_percent(mask)} of the tokens."
    if len(sizes) == 1:
        panels = _build_dataset_panels(evidence, published, models)
        legend_text = f"{hidden} {describe_bars(evidence, published, panels)}"
        return FigureSpec(
            key, title, f"Base models of size {sizes[0]} on every data set. {legend_text}", panels
        )
    series = [
        (
            name,
            OBJECTIVE_STYLES[name],
            [(sizes.index(model_key.size), model_key) for model_key in members],
        )
        for name, members in models.items()
    ]
    axis = {"dodge": 0.08, "ticks": dict(enumerate(sizes)), "x_label": "size of the model"}
    return build_family_figure(
        key, title, f"Base models by size. {hidden}", evidence, series, published, **axis
    )


def _build_dataset_panels(
    evidence: Evidence, published: Evidence | None, models: dict[str, list[ModelKey]]
) -> tuple[FigurePanel, ...]:
    """Build a panel per task family with scores on each of its data sets.

    Args:
        models: Models by legend name.
    """
    panels = []
    for family, names in datasets_by_family(evidence.datasets()).items():
        lines = []
        for source, (index, (name, members)) in itertools.product(
            (evidence, published), enumerate(models.items())
        ):
            for key in members if source is not None else ():
                places = [
                    (place + 0.14 * (index - 0.5), dataset, key)
                    for place, dataset in enumerate(names)
                ]
                if points := build_points(source, family, places):
                    light = source is published
                    label = published_label(name) if light else name
                    lines.append(
                        FigureLine(
                            label, *OBJECTIVE_STYLES[name], points, joined=False, light=light
                        )
                    )
        if lines:
            ticks = {place: dataset_label(family, dataset) for place, dataset in enumerate(names)}
            title = (
                FAMILY_LABELS.get(family, family)
                if len(names) > 1
                else panel_title(family, names[0])
            )
            panels.append(FigurePanel(title, tuple(lines), "", ticks=ticks))
    return tuple(panels)


def build_mask_ratio_figure(evidence: Evidence, published: Evidence | None = None) -> FigureSpec:
    """Build the figure of the scores of MLM base models over the mask ratio.

    Base models are finished ones with the longest budget of their size. There is a line per size;
    below two ratios there are no panels, and the caption gives the reason.

    Args:
        published: Published scores to draw lightly, of the same models; None for none.
    """
    key = "mask-ratios"
    title = "Mask ratios"
    base = [
        model_key
        for model_key in evidence.group_by_setup().get("base", [])
        if objective_name(model_key) == "MLM"
    ]
    if len({model_key.mask_ratio for model_key in base}) < 2:
        return FigureSpec(key, title, "No size has MLM models of two mask ratios with scores yet.")
    style = assign_styles(evidence.sort_sizes(base))
    series = [
        (
            size,
            line_style,
            _place_by_mask_ratio(model_key for model_key in base if model_key.size == size),
        )
        for size, line_style in style.items()
    ]
    return build_family_figure(
        key,
        title,
        "MLM base models of each size.",
        evidence,
        series,
        published,
        **_build_mask_ratio_axis(series),
    )


def build_two_stage_mask_ratio_figure(
    evidence: Evidence, published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of scores over the mask ratio, with and without CLM first.

    There is a line for each size, number of steps and of CLM steps. Unless a budget has two ratios
    both with CLM first and without, there are no panels, and the caption gives the reason.

    Args:
        published: Published scores to draw lightly, of the same models; None for none.
    """
    key = "mask-ratios-with-clm"
    title = "Mask ratios, with and without CLM first"
    groups: dict[tuple[str, int, int], list[ModelKey]] = defaultdict(list)
    for model_key in evidence.model_keys():
        if (
            model_key.decayed
            and not model_key.cpt_mlm_steps
            and objective_name(model_key) in ("MLM", "CLM + MLM")
        ):
            groups[model_key.size, model_key.steps, model_key.clm_steps].append(model_key)
    several = {
        where: models
        for where, models in groups.items()
        if len({model_key.mask_ratio for model_key in models}) > 1
    }
    with_clm = [where for where in several if where[2] and (*where[:2], 0) in several]
    if not with_clm:
        return FigureSpec(
            key,
            title,
            "No budget has models of two mask ratios both with CLM first and without, with scores.",
        )
    named = len({where[:2] for where in with_clm}) > 1
    series: dict[str, tuple] = {}
    colours = itertools.cycle(STYLES)
    for size, steps, first in with_clm:
        for clm_steps in (0, first):
            members = several[size, steps, clm_steps]
            name = f"CLM {format_steps(clm_steps)}, then MLM" if clm_steps else "MLM only"
            name += f" ({size}, {format_steps(steps)} steps)" if named else ""
            style = (
                next(colours) if len(with_clm) > 1 else OBJECTIVE_STYLES[objective_name(members[0])]
            )
            series.setdefault(name, (name, style, _place_by_mask_ratio(members)))
    axis = _build_mask_ratio_axis([*series.values()]) | {"x_label": "tokens hidden in MLM"}
    return build_family_figure(
        key, title, "Models of the same budget.", evidence, [*series.values()], published, **axis
    )


def _place_by_mask_ratio(models: Iterable[ModelKey]) -> list[tuple[float, ModelKey]]:
    """Return (mask ratio in percent, model) of each model."""
    return [(100 * model_key.mask_ratio, model_key) for model_key in models]


def _build_mask_ratio_axis(series: FigureSeries) -> dict[str, Any]:
    """Return the fields of the x axis, and the dodge between series, for mask ratios."""
    ratios = sorted({model_key.mask_ratio for *_, places in series for _, model_key in places})
    ticks = {100 * ratio: format_percent(ratio) for ratio in ratios}
    return {
        "dodge": 100 * (ratios[-1] - ratios[0]) / 60,
        "ticks": ticks,
        "x_label": "tokens hidden",
    }


def build_step_efficiency_figure(
    evidence: Evidence, published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of intermediate checkpoints' scores over training steps.

    There is a line per objective, mask ratio and size. Below two numbers of steps there are no
    panels, and the caption gives the reason.

    Args:
        published: Published scores to draw lightly, of the same models; None for none.
    """
    places = {
        model_key: float(model_key.steps)
        for model_key in evidence.model_keys()
        if not model_key.decayed
    }
    steps = sorted(set(places.values()))
    axis = {
        "x_label": "step",
        "unit": "steps",
        "ticks": {place: format_tick(place) for place in steps} if len(steps) <= 8 else None,
    }
    return _build_efficiency_figure(
        "efficiency-steps", "Data efficiency by step", evidence, published, places, **axis
    )


def build_flop_efficiency_figure(
    evidence: Evidence, flops: Mapping[ModelKey, float], published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of intermediate checkpoints' scores over training FLOPs.

    There is a line per objective, mask ratio and size. Below two positions there are no panels, and
    the caption gives the reason.

    Args:
        flops: Cumulative training FLOPs of each model; others are left out.
        published: Published scores to draw lightly, of the same models; None for none.
    """
    key = "efficiency-flops"
    title = "Data efficiency by FLOP"
    checkpoints = [model_key for model_key in evidence.model_keys() if not model_key.decayed]
    places = {model_key: flops[model_key] for model_key in checkpoints if model_key in flops}
    if len(set(places.values())) < 2 and len({model_key.steps for model_key in checkpoints}) > 1:
        why = (
            "The FLOPs of the runs are unknown; pass the directory of the pretraining runs with "
            "--runs. Only the FLOPs of the published study's models are computed from their "
            "shapes."
        )
        return FigureSpec(key, title, why)
    axis = {"x_label": "FLOPs of the matrix products", "unit": "operations"}
    return _build_efficiency_figure(key, title, evidence, published, places, **axis)


def _build_efficiency_figure(
    key: str,
    title: str,
    evidence: Evidence,
    published: Evidence | None,
    places: Mapping[ModelKey, float],
    **axis,
) -> FigureSpec:
    """Build the figure of intermediate checkpoints at the given x positions.

    There is a line per objective, mask ratio and size.
    """
    if len(set(places.values())) < 2:
        return FigureSpec(key, title, "Fewer than two intermediate checkpoints have scores.")
    sizes = evidence.sort_sizes(places)
    masks = {model_key.mask_ratio for model_key in places if model_key.mask_ratio is not None}
    groups: dict[tuple[str, float | None, str], list[tuple[float, ModelKey]]] = defaultdict(list)
    for model_key, x in places.items():
        groups[objective_name(model_key), model_key.mask_ratio, model_key.size].append(
            (x, model_key)
        )
    series = []
    for kind in sorted(
        groups, key=lambda kind: (kind[0] != "MLM", kind[0], kind[1] or 0, sizes.index(kind[2]))
    ):
        name, mask, size = kind
        colour, marker = OBJECTIVE_STYLES.get(name, (PURPLE, "D"))
        label = name + (f" {format_percent(mask)}" if mask is not None and len(masks) > 1 else "")
        if len(sizes) > 1:
            label = f"{label}, {size}"
            _, marker = STYLES[sizes.index(size) % len(STYLES)]
        series.append((label, (colour, marker), groups[kind]))
    log = max(places.values()) >= 8 * min(places.values())
    caption = "Intermediate checkpoints, before the learning rate decays."
    return build_family_figure(key, title, caption, evidence, series, published, log=log, **axis)


def build_clm_share_figure(evidence: Evidence, published: Evidence | None = None) -> FigureSpec:
    """Build the figure of scores over the percentage of CLM steps before MLM.

    There is a line per budget (size and steps) of finished models. Without a two-stage model and
    another one of a budget there are no panels, and the caption gives the reason.

    Args:
        published: Published scores to draw lightly, of the same models; None for none.
    """
    key = "clm-shares"
    title = "CLM share at each budget"
    mask = evidence.reference_mask_ratio
    budgets: dict[tuple[str, int], list[tuple[float, ModelKey]]] = defaultdict(list)
    for model_key in evidence.model_keys():
        if (
            model_key.decayed
            and not model_key.cpt_mlm_steps
            and not model_key.schedule
            and model_key.mask_ratio in (None, mask)
        ):
            budgets[model_key.size, model_key.steps].append((100 * model_key.clm_share, model_key))
    for where, members in list(budgets.items()):
        if (
            not any(objective_name(model_key) == "CLM + MLM" for _, model_key in members)
            or len({percent for percent, _ in members}) < 2
        ):
            del budgets[where]
    if not budgets:
        return FigureSpec(
            key,
            title,
            "No two-stage model (CLM, then MLM) and another model of the same budget have scores.",
        )
    names = _name_budgets(evidence, budgets)
    style = assign_styles(list(names.values()))
    series = [(name, style[name], budgets[where]) for where, name in names.items()]
    ticks = {float(percent): f"{percent} %" for percent in (0, 25, 50, 75, 100)}
    axis = {"dodge": 1.2, "ticks": ticks, "x_label": "share of CLM steps, before MLM"}
    caption = f"From MLM only to CLM only; MLM hides {format_percent(mask)} of the tokens."
    return build_family_figure(key, title, caption, evidence, series, published, **axis)


def _name_budgets(
    evidence: Evidence, budgets: Collection[tuple[str, int]]
) -> dict[tuple[str, int], str]:
    """Return a distinct legend name for each (size, steps), in order of both."""
    sizes = evidence.sort_sizes(ModelKey(size) for size, _ in budgets)
    order = sorted(budgets, key=lambda where: (sizes.index(where[0]), where[1]))
    return {
        (size, steps): f"{format_steps(steps)} steps" + (f", {size}" if len(sizes) > 1 else "")
        for size, steps in order
    }


def build_continued_pretraining_figure(
    evidence: Evidence, published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of scores over MLM steps of continued pretraining, by parent.

    Parents, the finished models from which it started, are at 0. Without continued models there are
    no panels, and the caption gives the reason.

    Args:
        published: Published scores to draw lightly, of the same models; None for none.
    """
    key = "continued-pretraining"
    title = "Continued pretraining by length"
    model_keys = evidence.model_keys()
    groups: dict[tuple[ModelKey, float | None], list[ModelKey]] = defaultdict(list)
    for model_key in model_keys:
        if model_key.cpt_mlm_steps and model_key.decayed and not model_key.schedule:
            parent = parent_key(model_key)
            members = groups[
                replace(parent, seed=1), model_key.mask_ratio
            ]  # one line for all seeds of a model
            members.append(model_key)
            if parent in model_keys and parent not in members:
                members.append(parent)
    if not groups:
        return FigureSpec(key, title, "No model of continued pretraining has a score yet.")
    sizes = evidence.sort_sizes(parent for parent, _ in groups)
    masks = {mask for _, mask in groups}
    order = sorted(
        groups,
        key=lambda key: (sizes.index(key[0].size), key[0].clm_steps > 0, key[0].steps, key[1]),
    )
    kinds = [objective_name(parent) for parent, _ in order]
    names = [f"from {kind}" for kind in kinds]
    line_styles = [OBJECTIVE_STYLES.get(kind) for kind in kinds]
    if len(set(kinds)) < len(kinds):  # the objective is not unique
        for index, (parent, mask) in enumerate(order):
            names[index] += f" {format_steps(parent.steps)}" + (
                f", {parent.size}" if len(sizes) > 1 else ""
            )
            names[index] += f", {format_percent(mask)} hidden" if len(masks) > 1 else ""
        line_styles = [assign_styles(names)[name] for name in names]
    places = (
        [(model_key.cpt_mlm_steps, model_key) for model_key in groups[where]] for where in order
    )
    series = list(zip(names, line_styles, places, strict=True))
    lengths = sorted(
        {model_key.cpt_mlm_steps for members in groups.values() for model_key in members}
    )
    ticks = {float(steps): format_steps(steps) for steps in lengths}
    axis = {
        "dodge": lengths[-1] / 70,
        "ticks": ticks,
        "x_label": "MLM steps after the finished model",
    }
    return build_family_figure(
        key, title, "Finished, decayed models are at 0.", evidence, series, published, **axis
    )


_PLAIN_STYLES = {
    "MLM": (ORANGE, "s"),
    "CLM": (BLUE, "o"),
    "MLM on CLM": (BLUE, "v"),
    "MLM on MLM": (ORANGE, "D"),
}
"""Styles of CLM and MLM models in the figure of other schedules."""


def build_schedule_figure(evidence: Evidence) -> FigureSpec | None:
    """Build the figure of models with other objective schedules next to CLM and MLM.

    Positions on the x axis are the budgets (size and steps).

    Returns:
        The figure; None if no model with a score has such a schedule.
    """
    mask = evidence.reference_mask_ratio
    recipes = group_by_recipe(select_schedule_peers(evidence.model_keys(), mask))
    if not any(recipe.schedule for recipe in recipes):
        return None
    budgets: dict[tuple[str, int], list[ModelKey]] = defaultdict(list)
    for recipe in recipes:
        budgets[recipe.size, recipe.steps].append(recipe)
    names = _name_budgets(evidence, budgets)
    placed: dict[str, list[tuple[float, ModelKey]]] = defaultdict(list)
    for index, where in enumerate(names):
        labels = sorted(
            map(recipe_label, budgets[where]), key=lambda label: label not in _PLAIN_STYLES
        )
        for recipe in budgets[where]:
            place = index + 0.8 * ((labels.index(recipe_label(recipe)) + 0.5) / len(labels) - 0.5)
            placed[recipe_label(recipe)] += [(place, key) for key in recipes[recipe]]
    order = [
        *(label for label in _PLAIN_STYLES if label in placed),
        *(label for label in placed if label not in _PLAIN_STYLES),
    ]
    free = itertools.cycle(style for style in STYLES if style[0] not in (BLUE, ORANGE))
    series = [(label, _PLAIN_STYLES.get(label) or next(free), placed[label]) for label in order]
    ticks = {float(index): name.removesuffix(" steps") for index, name in enumerate(names.values())}
    hidden = "" if mask is None else f" ({format_percent(mask)} hidden)"
    caption = (
        f"Models with other schedules, and CLM and MLM{hidden} models of as many steps, or of any "
        "number of steps if there are none."
    )
    axis = {"ticks": ticks, "x_label": "optimizer steps in all", "joined": False}
    return build_family_figure(
        "other-schedules", "Other schedules", caption, evidence, series, **axis
    )
