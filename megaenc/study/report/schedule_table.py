"""Table of the differences of objectives and schedules from MLM.

It has the noise between pretraining runs.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import dunnett

from megaenc.study.claims.decision import format_p_value
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.table import CellValue, Column, Table, TableRow
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.groups import (
    dataset_label,
    datasets_by_family,
    group_by_recipe,
    recipe_label,
    select_schedule_peers,
)

_NOTE = (
    "Mean score over the pretraining runs less that of MLM with as many steps, or else with the "
    "most steps, in points (half of the 95 % interval), and p. Both are Dunnett's: corrected over "
    "the rows of a data set, with one standard deviation between the pretraining runs of a row, "
    "which is estimated from all rows. It contains the noise of fine-tuning; other test examples "
    "are not considered."
)


@dataclass(frozen=True)
class ControlComparison:
    """Differences of recipes from a control on one data set, as fractions.

    `compare_with_control` builds it. The arrays `differences` (recipe less control), `half_width`
    (of simultaneous 95 % intervals) and `p` (two-sided) are float[R], in the order of R recipes;
    the last two are NaN if `run_std` is NaN or 0. This is the standard deviation between runs,
    pooled over recipes and control, with `df` degrees of freedom.
    """

    differences: np.ndarray
    """float[R], of each recipe's mean over runs, less the control's"""
    half_width: np.ndarray
    """float[R], of the simultaneous 95 % intervals; NaN if no recipe has two runs, or if all runs
    of each are equal"""
    p: np.ndarray
    """float[R], two-sided; NaN as above"""
    run_std: float
    """pooled standard deviation between the pretraining runs of a recipe"""
    df: int
    """degrees of freedom of `run_std`"""


def compare_with_control(recipes: Sequence[np.ndarray], control: np.ndarray) -> ControlComparison:
    """Compare the scores of each recipe with those of the control by Dunnett's test.

    The test is two-sided. Intervals and p are NaN if neither a recipe nor the control has two runs,
    or if all runs of each are equal. Source: Dunnett, A multiple comparison procedure for comparing
    several treatments with a control, 1955.

    Args:
        recipes: Scores of each recipe, float[runs], as fractions, with one run or more; at least
            one recipe. Numbers of runs may differ.
        control: Scores of the control, float[runs].
    """
    groups = [*recipes, control]
    df = sum(map(len, groups)) - len(groups)
    squares = math.fsum(float(np.sum((group - group.mean()) ** 2)) for group in groups)
    differences = np.array([recipe.mean() - control.mean() for recipe in recipes])
    std = math.sqrt(squares / df) if df else math.nan
    if not std > 0:
        unknown = np.full(len(recipes), math.nan)
        return ControlComparison(differences, unknown, unknown, std, df)
    with warnings.catch_warnings():
        # about single or equal runs, and about an error of the interval's level below 0.001
        warnings.simplefilter("ignore")
        result = dunnett(*recipes, control=control, random_state=0)
        interval = result.confidence_interval()
    return ControlComparison(
        differences, (interval.high - interval.low) / 2, result.pvalue, std, df
    )


def build_schedule_table(evidence: Evidence) -> Table | None:
    """Build the table of differences from MLM by objective or schedule, in points.

    A row is a recipe, a schedule or one of its peers by `select_schedule_peers` at the reference
    mask ratio. Its control is the MLM model of its size with as many steps or, if there is none,
    that with the most. Columns are, by data set, the difference with half its interval, and p. The
    rows of each control end with one of the standard deviation between runs.

    Returns:
        The table; None unless a model with a schedule and an MLM model have the same size.
    """
    recipes = group_by_recipe(
        select_schedule_peers(evidence.model_keys(), evidence.reference_mask_ratio)
    )
    controls = [recipe for recipe in recipes if not recipe.schedule and not recipe.clm_steps]
    groups: dict[ModelKey, list[ModelKey]] = {}
    for recipe in recipes:
        candidates = [candidate for candidate in controls if candidate.size == recipe.size]
        if candidates and recipe not in controls:
            control = max(
                candidates, key=lambda candidate: (candidate.steps == recipe.steps, candidate.steps)
            )
            groups.setdefault(control, []).append(recipe)
    groups = {
        control: members
        for control, members in groups.items()
        if any(recipe.schedule for recipe in members)
    }
    if not groups:
        return None
    datasets = datasets_by_family(evidence.datasets())
    places = [(family, name) for family, names in datasets.items() for name in names]
    rows: list[TableRow] = []
    for control, members in groups.items():
        rows += _build_rows(evidence, recipes, control, members, places)
    pairs = [(dataset_label(family, name), family) for family, name in places]
    columns = (
        *(Column(name, numeric=False) for name in ("Size", "Objective")),
        *(Column(name) for name in ("Steps", "Steps of MLM", "Runs")),
        *(
            Column(name, f"{family} {label}")
            for label, family in pairs
            for name in ("less MLM", "p")
        ),
    )
    return Table(
        "schedules", "Objectives and schedules compared with MLM", _NOTE, columns, tuple(rows)
    )


def _build_rows(
    evidence: Evidence,
    recipes: Mapping[ModelKey, Sequence[ModelKey]],
    control: ModelKey,
    members: Sequence[ModelKey],
    places: Sequence[tuple[str, str]],
) -> list[TableRow]:
    """Build a row for each recipe compared with `control`, and one with the noise."""
    cells: dict[ModelKey, list[CellValue]] = {recipe: [] for recipe in members}
    noise: list[CellValue] = []
    for family, name in places:
        scores = {}
        for recipe in (control, *members):
            by_run = [evidence.find(key, name, family) for key in recipes[recipe]]
            if means := [score.mean for score in by_run if score is not None]:
                scores[recipe] = np.array(means)
        compared = [recipe for recipe in members if recipe in scores and control in scores]
        by_recipe: dict[ModelKey, tuple[CellValue, CellValue]] = {}
        noise_cell = None
        if compared:
            result = compare_with_control([scores[recipe] for recipe in compared], scores[control])
            compared_values = zip(
                compared, result.differences, result.half_width, result.p, strict=True
            )
            by_recipe = {
                recipe: _format_cells(difference, half, p)
                for recipe, difference, half, p in compared_values
            }
            noise_cell = f"{100 * result.run_std:.2f} ({result.df} df)" if result.df else None
        for recipe in members:
            cells[recipe] += by_recipe.get(recipe, (None, None))
        noise += [noise_cell, None]
    rows = [
        TableRow(
            (
                recipe.size,
                recipe_label(recipe),
                recipe.steps,
                control.steps,
                len(recipes[recipe]),
                *cells[recipe],
            ),
            rule=index == 0,
            name=recipe_label(recipe),
        )
        for index, recipe in enumerate(members)
    ]
    label = "standard deviation between runs"
    return [
        *rows,
        TableRow((control.size, label, None, control.steps, None, *noise), light=True, name=label),
    ]


def _format_cells(difference: float, half_width: float, p: float) -> tuple[CellValue, CellValue]:
    """Format a difference with the half width of its interval, in points, and p.

    Half width and p are left out if they are unknown.
    """
    text = f"{100 * difference:+.2f}"
    if math.isnan(p):
        return text, None
    return f"{text} ({100 * half_width:.2f})", format_p_value(p)
