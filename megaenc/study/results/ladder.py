"""Runs of a manifest's ladder: size, cost and held-out losses of each."""

import csv
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megaenc.errors import InputError
from megaenc.json_files import read_regular_file
from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.manifest.ladder import (
    LADDER,
    TRIED_RATES,
    LadderObjective,
    build_schedule,
    count_parameters,
    peak_rate,
)
from megaenc.study.manifest.schema import Manifest
from megaenc.study.results.evidence import Evidence, headline_datasets
from megaenc.study.results.groups import format_percent
from megaenc.study.results.pretrain_runs import TrainedRun
from megaenc.study.stats.scaling import ScalingPoint
from megaenc.viz.run_metrics import training_seconds

POINT_COLUMNS = {
    "Model": "name",
    "Objective": "objective",
    "Size": "size",
    "Seed": "seed",
    "Rate over the rule's": "rate_factor",
    "Fitted": "is_fitted",
    "Parameters": "parameters",
    "Tokens": "tokens",
    "FLOPs": "flops",
    "Hours": "hours",
}
"""Column of a file of points by field of LadderRun; further columns are losses by measure."""
_NUMBERS = ("seed", "rate_factor", "parameters", "tokens", "flops", "hours")


@dataclass(frozen=True)
class LadderRun:
    """Finished run of a ladder, as of `read_ladder_runs`."""

    name: str
    """name of the model"""
    objective: str
    """recipe for tables and legends, such as `25 % CLM, then MLM 30 %`"""
    size: str
    """name in the manifest's `sizes`"""
    seed: int
    rate_factor: float
    """peak learning rate over that of the rule"""
    is_fitted: bool
    """whether the laws are fitted to it; False for a run that tries another rate"""
    parameters: int
    """N of the scaling laws, `count_parameters`"""
    tokens: float
    flops: float
    hours: float
    """hours in the run's own training steps, without those of a branch's parent"""
    losses: Mapping[str, float] = field(default_factory=dict)
    """losses by measure: nats a token under an objective or as pseudo-perplexity, on held-out text,
    or the error, a fraction, of a task family"""


def read_ladder_runs(
    manifest: Manifest, runs: Mapping[str, TrainedRun], evidence: Evidence
) -> list[LadderRun]:
    """Return the finished runs of a manifest's ladder and those of its `points`.

    A finished run takes the place of a point of its name; other points come first.

    Args:
        runs: Pretraining runs by name, of `read_runs`.
        evidence: Scores of fine-tuning, whose errors are measures too; may be empty.

    Raises:
        InputError: A file `points` cannot be read or has a wrong value.
    """
    result: dict[str, LadderRun] = {}
    for path in manifest.ladder.points:
        for point in _read_points(manifest.path.parent / path):
            result[point.name] = point
    for model in manifest.models:
        run = runs.get(model.name)
        is_finished = run is not None and run.steps[-1]["step"] == model.steps
        if is_finished and model.group in (LADDER, TRIED_RATES):
            result[model.name] = _build_run(manifest, model, run, evidence)
    return list(result.values())


def _build_run(
    manifest: Manifest, model: PlannedModel, run: TrainedRun, evidence: Evidence
) -> LadderRun:
    """Return a finished run with its held-out losses and errors of tasks."""
    losses = {}
    is_clm = not model.key.mlm_steps
    for row in run.validations:
        if row["step"] == model.steps:
            for measure, scores in row["objectives"].items():
                # the loss of the model as it is used: causal or bidirectional
                is_measured = measure.rpartition("/")[2].startswith("clm") == is_clm
                if scores["loss"] is not None and is_measured:
                    losses[measure] = scores["loss"]
    for family, dataset in headline_datasets(evidence).items():
        score = evidence.find(model.key, dataset, family)
        if score is not None and score.mean < 1:  # an error of 0 has no logarithm
            losses[f"error on {family}"] = 1 - score.mean
    parameters = count_parameters(model.config.shape, manifest.vocab_size(model))
    objective = next(
        objective
        for objective in manifest.ladder.objectives
        if build_schedule(objective, model.steps) == model.schedule
    )
    # rates are rounded: the nearest of the factors
    ratio = model.config.learning_rate.lr / (objective.rate_factor * peak_rate(parameters))
    factor = min((1.0, *manifest.ladder.rate_factors), key=lambda factor: abs(factor - ratio))
    last = run.steps[-1]
    return LadderRun(
        name=model.name,
        objective=_format_objective(objective),
        size=model.key.size,
        seed=model.key.seed,
        rate_factor=round(objective.rate_factor * factor, 4),
        is_fitted=model.group == LADDER,
        parameters=parameters,
        tokens=float(last["tokens"]),
        flops=float(last["flops"]),
        hours=training_seconds(run.steps, run.start_progress["step"]) / 3600,
        losses=losses,
    )


def _format_objective(objective: LadderObjective) -> str:
    """Return an objective for tables and legends, such as `25 % CLM, then MLM 30 %`."""
    if objective.schedule:
        return objective.schedule
    if objective.clm_share == 1:
        return "CLM"
    text = f"MLM {format_percent(objective.mask)}"
    if objective.clm_share:
        text = f"{format_percent(objective.clm_share)} CLM, then {text}"
    return text


def _read_points(path: Path) -> list[LadderRun]:
    """Return the runs in a CSV file of points that an earlier report wrote.

    Raises:
        InputError: The file cannot be read, lacks a column, or has a wrong number.
    """
    try:
        text = read_regular_file(path).decode()
    except (OSError, UnicodeError) as error:
        raise InputError(
            f"ladder: field `points`: {path}: {error}; expected tables/ladder-points.csv of an "
            "earlier report"
        ) from None
    rows = csv.DictReader(io.StringIO(text))
    names = list(rows.fieldnames or ())
    for column in POINT_COLUMNS:
        if column not in names:
            raise InputError(
                f"{path}: found no column `{column}`, expected tables/ladder-points.csv of a report"
            )
    points = []
    for line, row in enumerate(rows, 2):
        fields = {name: row[column] for column, name in POINT_COLUMNS.items()}
        losses = {name: row[name] for name in names if name not in POINT_COLUMNS and row[name]}
        try:
            numbers = {name: float(fields[name]) for name in _NUMBERS}
            numbers |= {name: int(numbers[name]) for name in ("seed", "parameters")}
            losses = {name: float(value) for name, value in losses.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{path}, line {line}: {error}; expected a number") from None
        is_fitted = fields.pop("is_fitted") == "yes"
        points.append(LadderRun(**(fields | numbers), is_fitted=is_fitted, losses=losses))
    return points


def group_points(runs: Sequence[LadderRun], measure: str) -> dict[str, list[ScalingPoint]]:
    """Return the points of all fitted runs under a measure, by objective."""
    points = defaultdict(list)
    for run in runs:
        if run.is_fitted and measure in run.losses:
            point = ScalingPoint(
                run.objective,
                float(run.parameters),
                run.tokens,
                run.flops,
                run.losses[measure],
                run.seed,
            )
            points[run.objective].append(point)
    return dict(points)
