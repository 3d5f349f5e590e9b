"""Figures of scores by objective, schedule, mask ratio and training budget."""

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.figures.base import (
    OBJECTIVE_STYLES,
    FigureLine,
    FigurePanel,
    FigureSpec,
    build_family_figure,
    build_points,
    describe_bars,
    panel_title,
    published_label,
)
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import (
    AVERAGE,
    dataset_label,
    datasets_by_family,
    format_percent,
    format_steps,
    group_by_recipe,
    is_continued,
    is_from_scratch,
    objective_name,
    parent_key,
    recipe_label,
    select_schedule_peers,
)
from megaenc.viz.style import BLUE, ORANGE, PURPLE, STYLES, assign_styles, format_tick

# Tick labels are at whole numbers.
_DATASET_DODGE = 0.14  # between the objectives of a data set
_BUDGET_WIDTH = 0.8  # of the points of a budget


class Budget(NamedTuple):
    """Model size and training steps, by which figures group models.

    `size` is the label of the size, such as "610M"; `steps` counts all CLM and MLM steps behind the
    weights.
    """

    size: str
    steps: int


def build_objectives_figure(evidence: Evidence, published: Evidence | None = None) -> FigureSpec:
    """Build the figure of the scores of CLM and MLM base models.

    Base models are those of `group_by_setup`, with MLM at the reference mask ratio. A panel per
    task family has scores in percent by size, or by data set if there is one size. Without both
    objectives there are no panels, and the caption gives the reason.

    Args:
        published: Published scores, drawn lightly for the models in the figure; None for none.
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
    return build_family_figure(
        key,
        title,
        f"Base models by size. {hidden}",
        evidence=evidence,
        series=series,
        published=published,
        dodge=0.08,
        ticks=dict(enumerate(sizes)),
        x_label="size of the model",
    )


def _build_dataset_panels(
    evidence: Evidence, published: Evidence | None, models: dict[str, list[ModelKey]]
) -> tuple[FigurePanel, ...]:
    """Build a panel per task family with scores on each of its data sets.

    Args:
        models: Models by legend name.
    """
    panels = []
    for family, datasets in datasets_by_family(evidence.datasets()).items():
        lines = _build_dataset_lines(evidence, published, models, family, datasets)
        if lines:
            ticks = {place: dataset_label(family, name) for place, name in enumerate(datasets)}
            title = panel_title(family, AVERAGE if len(datasets) > 1 else datasets[0])
            panels.append(FigurePanel(title, tuple(lines), "", ticks=ticks))
    return tuple(panels)


def _build_dataset_lines(
    evidence: Evidence,
    published: Evidence | None,
    models: dict[str, list[ModelKey]],
    family: str,
    datasets: list[str],
) -> list[FigureLine]:
    """Build the lines of a panel, one per model, those of published scores last."""
    lines = []
    for source in (evidence, published):
        if source is None:
            continue
        light = source is published
        for index, (name, members) in enumerate(models.items()):
            label = published_label(name) if light else name
            shift = _DATASET_DODGE * (index - 0.5)
            for model_key in members:
                places = [
                    (place + shift, dataset, model_key) for place, dataset in enumerate(datasets)
                ]
                points = build_points(source, family, places)
                if points:
                    style = OBJECTIVE_STYLES[name]
                    lines.append(FigureLine(label, *style, points, joined=False, light=light))
    return lines


def build_mask_ratio_figure(evidence: Evidence, published: Evidence | None = None) -> FigureSpec:
    """Build the figure of the scores of MLM base models over the mask ratio.

    Base models are those of `group_by_setup`. A panel per task family has scores and ratios in
    percent, and a line per size. If all models have one ratio there are no panels, and the caption
    gives the reason.

    Args:
        published: Published scores, drawn lightly for the models in the figure; None for none.
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
    lines = {
        size: [model_key for model_key in base if model_key.size == size]
        for size in evidence.sort_sizes(base)
    }
    return _build_ratio_figure(
        key,
        title,
        "MLM base models of each size.",
        evidence=evidence,
        lines=lines,
        styles=STYLES,
        published=published,
        x_label="tokens hidden",
    )


def build_two_stage_mask_ratio_figure(
    evidence: Evidence, published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of scores over the mask ratio, with and without CLM first.

    A panel per task family has scores and ratios in percent. A line has the models from scratch of
    a budget (size and all steps) with as many CLM steps, at two or more ratios. Only budgets that
    have lines with and without CLM first are drawn; if there are none, there are no panels, and the
    caption gives the reason.

    Args:
        published: Published scores, drawn lightly for the models in the figure; None for none.
    """
    key = "mask-ratios-with-clm"
    title = "Mask ratios, with and without CLM first"
    groups: dict[tuple[Budget, int], list[ModelKey]] = defaultdict(list)
    for model_key in evidence.model_keys():
        if is_from_scratch(model_key) and objective_name(model_key) != "CLM":
            budget = Budget(model_key.size, model_key.steps)
            groups[budget, model_key.clm_steps].append(model_key)
    several = {
        group: models
        for group, models in groups.items()
        if len({model_key.mask_ratio for model_key in models}) > 1
    }
    with_clm = [
        (budget, clm_steps) for budget, clm_steps in several if clm_steps and (budget, 0) in several
    ]
    if not with_clm:
        return FigureSpec(
            key,
            title,
            "No budget has models of two mask ratios both with CLM first and without, with scores.",
        )
    budgets = {budget for budget, _ in with_clm}
    lines: dict[str, list[ModelKey]] = {}
    for budget, first in with_clm:
        place = _if_several(f" ({budget.size}, {format_steps(budget.steps)} steps)", budgets)
        lines[f"MLM only{place}"] = several[budget, 0]
        lines[f"CLM {format_steps(first)}, then MLM{place}"] = several[budget, first]
    styles = STYLES
    if len(with_clm) == 1:
        styles = [OBJECTIVE_STYLES["MLM"], OBJECTIVE_STYLES["CLM + MLM"]]
    return _build_ratio_figure(
        key,
        title,
        "Models of the same budget.",
        evidence=evidence,
        lines=lines,
        styles=styles,
        published=published,
        x_label="tokens hidden in MLM",
    )


def _build_ratio_figure(
    key: str,
    title: str,
    caption: str,
    *,
    evidence: Evidence,
    lines: Mapping[str, list[ModelKey]],
    styles: list[tuple[str, str]],
    published: Evidence | None,
    x_label: str,
) -> FigureSpec:
    """Build a figure of scores over the mask ratio in percent.

    Args:
        lines: Models of each line by its name.
        styles: Colour and marker of each line; they repeat.
    """
    series = [
        (name, style, [(100 * model_key.mask_ratio, model_key) for model_key in models])
        for (name, models), style in zip(lines.items(), itertools.cycle(styles), strict=False)
    ]
    ratios = sorted({model_key.mask_ratio for models in lines.values() for model_key in models})
    return build_family_figure(
        key,
        title,
        caption,
        evidence=evidence,
        series=series,
        published=published,
        dodge=100 * (ratios[-1] - ratios[0]) / 60,
        ticks={100 * ratio: format_percent(ratio) for ratio in ratios},
        x_label=x_label,
    )


def _if_several(text: str, values: Collection) -> str:
    """Return the part `text` of a legend name, or "" if it would be the same in all."""
    return text if len(values) > 1 else ""


def build_step_efficiency_figure(
    evidence: Evidence, published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of intermediate checkpoints' scores over training steps.

    A panel per task family has scores in percent, and a line per objective, mask ratio and size;
    final models are left out. If all checkpoints have one number of steps there are no panels, and
    the caption gives the reason.

    Args:
        published: Published scores, drawn lightly for the models in the figure; None for none.
    """
    places = {
        model_key: float(model_key.steps)
        for model_key in evidence.model_keys()
        if not model_key.decayed
    }
    steps = sorted(set(places.values()))
    return _build_efficiency_figure(
        "efficiency-steps",
        "Data efficiency by step",
        evidence=evidence,
        published=published,
        places=places,
        x_label="step",
        unit="steps",
        ticks={place: format_tick(place) for place in steps} if len(steps) <= 8 else None,
    )


def build_flop_efficiency_figure(
    evidence: Evidence, flops: Mapping[ModelKey, float], published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of intermediate checkpoints' scores over training FLOPs.

    A panel per task family has scores in percent, and a line per objective, mask ratio and size. If
    all checkpoints have the same FLOPs, or none are known, there are no panels, and the caption
    gives the reason.

    Args:
        flops: Cumulative training FLOPs by model; models that it lacks are left out.
        published: Published scores, drawn lightly for the models in the figure, at the same FLOPs;
            None for none.
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
    return _build_efficiency_figure(
        key,
        title,
        evidence=evidence,
        published=published,
        places=places,
        x_label="FLOPs of the matrix products",
        unit="operations",
    )


def _build_efficiency_figure(
    key: str,
    title: str,
    *,
    evidence: Evidence,
    published: Evidence | None,
    places: Mapping[ModelKey, float],
    **axis: Any,
) -> FigureSpec:
    """Build the figure of intermediate checkpoints at the given x positions.

    There is a line per objective, mask ratio and size.

    Args:
        places: X position of each checkpoint.
        axis: Further fields of FigurePanel.
    """
    if len(set(places.values())) < 2:
        return FigureSpec(key, title, "Fewer than two intermediate checkpoints have scores.")
    sizes = evidence.sort_sizes(places)
    masks = {model_key.mask_ratio for model_key in places if model_key.mask_ratio is not None}
    order = sorted(
        places,
        key=lambda model_key: (
            objective_name(model_key) != "MLM",
            objective_name(model_key),
            model_key.mask_ratio or 0,
            sizes.index(model_key.size),
        ),
    )
    groups: dict[tuple[str, float | None, str], list[tuple[float, ModelKey]]] = defaultdict(list)
    for model_key in order:
        group = (objective_name(model_key), model_key.mask_ratio, model_key.size)
        groups[group].append((places[model_key], model_key))
    series = []
    for (name, mask, size), members in groups.items():
        colour, marker = OBJECTIVE_STYLES.get(name, (PURPLE, "D"))
        if len(sizes) > 1:
            _, marker = STYLES[sizes.index(size) % len(STYLES)]
        if mask is not None:
            name += _if_several(f" {format_percent(mask)}", masks)
        name += _if_several(f", {size}", sizes)
        series.append((name, (colour, marker), members))
    return build_family_figure(
        key,
        title,
        "Intermediate checkpoints, before the learning rate decays.",
        evidence=evidence,
        series=series,
        published=published,
        log=max(places.values()) >= 8 * min(places.values()),
        **axis,
    )


def build_clm_share_figure(evidence: Evidence, published: Evidence | None = None) -> FigureSpec:
    """Build the figure of scores over the percentage of CLM steps before MLM.

    MLM only is at 0, CLM only at 100. A panel per task family has scores in percent, and a line per
    budget (size and steps) of finished models, with MLM at the reference mask ratio. Without a
    two-stage model and one of the same budget with another percentage there are no panels, and the
    caption gives the reason.

    Args:
        published: Published scores, drawn lightly for the models in the figure; None for none.
    """
    key = "clm-shares"
    title = "CLM share at each budget"
    mask = evidence.reference_mask_ratio
    groups: dict[Budget, list[tuple[float, ModelKey]]] = defaultdict(list)
    for model_key in evidence.model_keys():
        if is_from_scratch(model_key) and model_key.mask_ratio in (None, mask):
            budget = Budget(model_key.size, model_key.steps)
            groups[budget].append((100 * model_key.clm_share, model_key))
    budgets = {}
    for budget, places in groups.items():
        percents = {percent for percent, _ in places}
        if len(percents) > 1 and any(0 < percent < 100 for percent in percents):
            budgets[budget] = places
    if not budgets:
        return FigureSpec(
            key,
            title,
            "No two-stage model (CLM, then MLM) and another model of the same budget have scores.",
        )
    names = _name_budgets(evidence, budgets)
    styles = assign_styles(list(names.values()))
    series = [(name, styles[name], budgets[budget]) for budget, name in names.items()]
    return build_family_figure(
        key,
        title,
        f"From MLM only to CLM only; MLM hides {format_percent(mask)} of the tokens.",
        evidence=evidence,
        series=series,
        published=published,
        dodge=1.2,
        ticks={float(percent): f"{percent} %" for percent in (0, 25, 50, 75, 100)},
        x_label="share of CLM steps, before MLM",
    )


def _name_budgets(evidence: Evidence, budgets: Collection[Budget]) -> dict[Budget, str]:
    """Return a distinct legend name for each budget, in order of size and steps."""
    sizes = evidence.sort_sizes(ModelKey(budget.size) for budget in budgets)
    order = sorted(budgets, key=lambda budget: (sizes.index(budget.size), budget.steps))
    return {
        budget: f"{format_steps(budget.steps)} steps" + _if_several(f", {budget.size}", sizes)
        for budget in order
    }


def build_continued_pretraining_figure(
    evidence: Evidence, published: Evidence | None = None
) -> FigureSpec:
    """Build the figure of scores over MLM steps of continued pretraining, by parent.

    Parents, the finished models from which it started, are at 0 if they have scores. A panel per
    task family has scores in percent, and a line per parent and mask ratio. Models with a schedule
    are left out. Without continued models there are no panels, and the caption gives the reason.

    Args:
        published: Published scores, drawn lightly for the models in the figure; None for none.
    """
    key = "continued-pretraining"
    title = "Continued pretraining by length"
    model_keys = evidence.model_keys()
    continued = list(filter(is_continued, model_keys))
    if not continued:
        return FigureSpec(key, title, "No model of continued pretraining has a score yet.")
    sizes = evidence.sort_sizes(continued)
    continued.sort(
        key=lambda model_key: (
            sizes.index(model_key.size),
            model_key.clm_steps > 0,
            parent_key(model_key).steps,
            model_key.mask_ratio,
        )
    )
    groups: dict[tuple[ModelKey, float | None], list[ModelKey]] = defaultdict(list)
    for model_key in continued:
        parent = parent_key(model_key)
        # One line for all seeds of a model.
        members = groups[replace(parent, seed=1), model_key.mask_ratio]
        members.append(model_key)
        if parent in model_keys and parent not in members:
            members.append(parent)
    names = [f"from {objective_name(parent)}" for parent, _ in groups]
    styles = {f"from {objective}": style for objective, style in OBJECTIVE_STYLES.items()}
    if len(set(names)) < len(names):  # the objective is not unique
        masks = {mask for _, mask in groups}
        for index, (parent, mask) in enumerate(groups):
            names[index] += f" {format_steps(parent.steps)}"
            names[index] += _if_several(f", {parent.size}", sizes)
            names[index] += _if_several(f", {format_percent(mask)} hidden", masks)
        styles = assign_styles(names)
    series = [
        (name, styles[name], [(model_key.cpt_mlm_steps, model_key) for model_key in members])
        for name, members in zip(names, groups.values(), strict=True)
    ]
    lengths = sorted(
        {model_key.cpt_mlm_steps for members in groups.values() for model_key in members}
    )
    return build_family_figure(
        key,
        title,
        "Finished, decayed models are at 0.",
        evidence=evidence,
        series=series,
        published=published,
        dodge=lengths[-1] / 70,
        ticks={float(steps): format_steps(steps) for steps in lengths},
        x_label="MLM steps after the finished model",
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

    It has these models and their peers by `select_schedule_peers`, with MLM at the reference mask
    ratio. A panel per task family has scores in percent; positions on the x axis are the budgets
    (size and steps).

    Returns:
        The figure; None if no finished model with a score has such a schedule.
    """
    mask = evidence.reference_mask_ratio
    recipes = group_by_recipe(select_schedule_peers(evidence.model_keys(), mask))
    if not any(recipe.schedule for recipe in recipes):
        return None
    budgets: dict[Budget, list[ModelKey]] = defaultdict(list)
    for recipe in recipes:
        budgets[Budget(recipe.size, recipe.steps)].append(recipe)
    names = _name_budgets(evidence, budgets)
    placed: dict[str, list[tuple[float, ModelKey]]] = defaultdict(list)
    for index, budget in enumerate(names):
        labels = sorted(
            map(recipe_label, budgets[budget]), key=lambda label: label not in _PLAIN_STYLES
        )
        for recipe in budgets[budget]:
            label = recipe_label(recipe)
            place = index + _BUDGET_WIDTH * ((labels.index(label) + 0.5) / len(labels) - 0.5)
            placed[label] += [(place, model_key) for model_key in recipes[recipe]]
    others = [label for label in placed if label not in _PLAIN_STYLES]
    free_styles = [style for style in STYLES if style[0] not in (BLUE, ORANGE)]
    styles = _PLAIN_STYLES | dict(zip(others, itertools.cycle(free_styles), strict=False))
    series = [(label, style, placed[label]) for label, style in styles.items() if label in placed]
    ticks = {float(index): name.removesuffix(" steps") for index, name in enumerate(names.values())}
    hidden = "" if mask is None else f" ({format_percent(mask)} hidden)"
    caption = (
        f"Models with other schedules, and CLM and MLM{hidden} models of as many steps, or of any "
        "number of steps if there are none."
    )
    return build_family_figure(
        "other-schedules",
        "Other schedules",
        caption,
        evidence=evidence,
        series=series,
        joined=False,
        ticks=ticks,
        x_label="optimizer steps in all",
    )
