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
from megaenc.study.manifest.ladder import LADDER, TRIED_RATES, count_parameters, peak_rate
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.schema import Manifest
from megaenc.study.results.evidence import Evidence, headline_datasets
from megaenc.study.results.groups import format_percent, objective_name
from megaenc.study.results.pretrain_runs import TrainedRun
from megaenc.study.stats.scaling import ScalingPoint
from megaenc.viz.run_metrics import is_pseudo_perplexity, training_seconds

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
    """Return the finished runs of a manifest's ladder, in the order of its models.

    Runs without a directory are taken from the files `points` of the ladder.

    Args:
        runs: Pretraining runs by name, of `read_runs`.
        evidence: Scores of fine-tuning, whose errors are measures too; may be empty.

    Raises:
        InputError: A file `points` cannot be read or has a wrong value.
    """
    earlier: dict[str, LadderRun] = {}
    for path in manifest.ladder.points:
        for point in _read_points(manifest.data_dir / path):
            earlier[point.name] = point
    result = []
    for model in manifest.models:
        if model.group not in (LADDER, TRIED_RATES):
            continue
        run = runs.get(model.name)
        if run is not None and run.steps[-1]["step"] == model.steps:
            result.append(_build_run(manifest, model, run, evidence))
        elif model.name in earlier:
            result.append(earlier[model.name])
    return result


def _build_run(
    manifest: Manifest, model: PlannedModel, run: TrainedRun, evidence: Evidence
) -> LadderRun:
    """Return a finished run with its held-out losses and errors of tasks."""
    losses = {}
    for row in run.validations:
        if row["step"] == model.steps:
            for measure, scores in row["objectives"].items():
                if scores["loss"] is not None and _is_measured(model.key, measure):
                    losses[measure] = scores["loss"]
    for family, dataset in headline_datasets(evidence).items():
        score = evidence.find(model.key, dataset, family)
        if score is not None:
            losses[f"error on {family}"] = 1 - score.mean
    parameters = count_parameters(model.config.shape, manifest.vocab_size(model))
    last = run.steps[-1]
    return LadderRun(
        name=model.name,
        objective=_format_objective(model.key),
        size=model.key.size,
        seed=model.key.seed,
        rate_factor=round(model.config.learning_rate.lr / peak_rate(parameters), 2),
        is_fitted=model.group == LADDER,
        parameters=parameters,
        tokens=float(last["tokens"]),
        flops=float(last["flops"]),
        hours=training_seconds(run.steps, run.start_progress["step"]) / 3600,
        losses=losses,
    )


def _is_measured(key: ModelKey, measure: str) -> bool:
    """Return whether a validation objective measures a model as it is used.

    CLM is measured by its own loss, other objectives by those with bidirectional attention.
    """
    is_causal = measure.rpartition("/")[2].startswith("clm") or "shift=" in measure
    return is_causal == (objective_name(key) == "CLM") and not (
        is_causal and is_pseudo_perplexity(measure)
    )


def _format_objective(key: ModelKey) -> str:
    """Return a recipe, such as `25 % CLM, then MLM 30 %`.

    Shares are rounded, as whole steps make those of one recipe differ.
    """
    if key.schedule or not key.mlm_steps:
        return objective_name(key)
    text = f"MLM {format_percent(key.mask_ratio)}"
    return f"{key.clm_share:.0%} CLM, then {text}".replace("%", " %", 1) if key.clm_steps else text


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
            losses = {name: float(value) for name, value in losses.items()}
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}, line {line}: {error}; expected a number") from None
        numbers |= {name: int(numbers[name]) for name in ("seed", "parameters")}
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
