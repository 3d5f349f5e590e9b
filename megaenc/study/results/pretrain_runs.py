"""Pretraining runs of a study: steps, validations, FLOPs and flags."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.model.config import PRESETS
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.training.run_dir import METRICS_FILE, RUN_FILE
from megaenc.viz.run_metrics import (
    Row,
    read_run_json,
    read_start_progress,
    read_steps,
    read_validations,
)

_CHECKPOINT_NAME = re.compile(r"(?P<run>.+)-(?P<step>\d+)(?P<seed>(-seed\d+)?)")
"""Name of an intermediate checkpoint: the run's own step stands before the seed."""
_OBJECTIVE_OF_PHASE = re.compile(r"[a-z][a-z0-9_]*(?=[(:,+]|$)")


@dataclass(frozen=True)
class TrainedRun:
    """Content of a run directory, without the logged steps of a branch's parent.

    `read_runs` builds it. `name` is that of the directory, `facts` the content of run.json, `steps`
    the rows of metrics.jsonl (of `read_steps`), at least one, and `validations` those of
    validation.jsonl (of `read_validations`), empty without it. A Row is a dict of one line.
    `start_progress` is a Row with step, tokens, predicted_tokens and flops before the first step:
    those of a branch's parent there, else 0.
    """

    name: str
    """name of the directory"""
    facts: Mapping[str, Any]
    """content of run.json"""
    steps: list[Row]
    """rows of metrics.jsonl, at least one"""
    validations: list[Row]
    """rows of validation.jsonl"""
    start_progress: Row
    """step, tokens and FLOPs before its first step: 0, or the parent's at the branch"""

    @property
    def start(self) -> str:
        """Return how the run started: "new", "branch" or "weights".

        A branch started at a step of its parent, and "weights" from the weights of a parent.
        """
        return self.facts["start"].get("kind", "new")

    @property
    def parent(self) -> str:
        """Return the directory name of the parent; "" for a new run.

        The run branched from its parent, or took the weights of it.
        """
        return Path(self.facts["start"].get("run", "")).name

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return the flags that determine the training result, as value by name.

        Names have underscores, such as `seq_length`; there are none if run.json lacks them.
        """
        return self.facts["identity"]

    @property
    def kind(self) -> str:
        """Return "CLM", "MLM", "CLM + MLM", "other" or "continued", by the objectives.

        "CLM + MLM" has both, in any order or mixture, "other" any further objective. A run that
        started from another run's weights is "continued", whatever its objectives.
        """
        if self.start == "weights":
            return "continued"
        schedule = str(self.identity.get("objective_schedule", "")) or ",".join(
            row["objective"] for row in self.steps
        )
        names = set(_OBJECTIVE_OF_PHASE.findall(re.sub(r"\([^)]*\)", "", schedule)))
        kinds = {("clm",): "CLM", ("mlm",): "MLM", ("clm", "mlm"): "CLM + MLM"}
        return kinds.get(tuple(sorted(names)), "other")


def read_runs(directory: Path) -> dict[str, TrainedRun]:
    """Read the run directories in `directory` that have a logged step.

    Other entries, and runs in deeper directories, are left out.

    Returns:
        The runs by name, sorted by it.

    Raises:
        InputError: The directory cannot be read or has no such run, or a file is invalid.
    """
    try:
        run_dirs = sorted(path for path in directory.iterdir() if (path / RUN_FILE).is_file())
    except OSError as error:
        raise InputError(
            f"--runs {directory}: {error.strerror}; expected a directory of run directories"
        ) from None
    runs = {}
    for path in run_dirs:
        if steps := read_steps(path, required=False):
            runs[path.name] = TrainedRun(
                path.name,
                read_run_json(path),
                steps,
                read_validations(path),
                read_start_progress(path),
            )
    if not runs:
        raise InputError(
            f"--runs {directory}: holds no run with a step, expected directories with {RUN_FILE} "
            f"and {METRICS_FILE}"
        )
    return runs


def flops_by_model(
    runs: Mapping[str, TrainedRun], model_keys: Mapping[str, ModelKey]
) -> dict[ModelKey, float]:
    """Return the training FLOPs behind each model's weights, by model key.

    They are cumulative, of forward and backward passes, on all GPUs. Ancestors whose weights a run
    took are included if they are in `runs`, else they count as 0. Models without a run of their
    name or without logged FLOPs are left out. An intermediate checkpoint RUN-STEP has the FLOPs of
    that step, and is left out if the step was not logged.

    Args:
        runs: Runs by name, of `read_runs`.
        model_keys: Key of each model by name.
    """
    flops = {}
    for name, model_key in model_keys.items():
        step = None
        run = runs.get(name)
        checkpoint = _CHECKPOINT_NAME.fullmatch(name)
        if run is None and checkpoint:
            run = runs.get(checkpoint["run"] + checkpoint["seed"])
            step = int(checkpoint["step"])
        while (
            run is not None
            and step is not None
            and run.start == "branch"
            and step <= run.start_progress["step"]
        ):
            run = runs.get(run.parent)
        if run is None:
            continue
        rows = [row for row in run.steps if step is None or row["step"] <= step]
        if rows and "flops" in rows[-1] and (step is None or rows[-1]["step"] == step):
            flops[model_key] = float(rows[-1]["flops"]) + _ancestor_flops(run, runs)
    return flops


def _ancestor_flops(run: TrainedRun, runs: Mapping[str, TrainedRun]) -> float:
    """Return the FLOPs of all ancestors from whose weights a run started.

    The run's own log does not count them.
    """
    flops = 0.0
    visited = set()
    while run.name not in visited and (parent := runs.get(run.parent)) is not None:
        visited.add(run.name)
        if run.start == "weights":
            flops += float(parent.steps[-1].get("flops", 0.0))
        run = parent
    return flops


_PACKS = 1152
_LENGTH = 2048
_CHUNK = 1024
_IDS = 128_256


def published_model_flops(model_key: ModelKey) -> float | None:
    """Compute a published model's training FLOPs from its shape, both passes.

    A step has 1,152 packs of 2,048 tokens in two documents of 1,024. A continued model has the
    FLOPs of its parent too.

    Returns:
        The FLOPs; None for a size that is no preset, or a schedule.
    """
    shape = PRESETS.get(model_key.size.lower())
    if shape is None or model_key.schedule:
        return None

    def step_flops(predicted_fraction: float, causal: bool) -> float:
        """Return the FLOPs of a step in which this share of the tokens is predicted."""
        spans = [
            (start, start if causal else start + _CHUNK, start + _CHUNK)
            for start in range(0, _LENGTH, _CHUNK)
        ]
        return _PACKS * shape.training_flops(_IDS, round(predicted_fraction * _LENGTH), spans)

    masked = model_key.mlm_steps + model_key.cpt_mlm_steps
    flops = model_key.clm_steps * step_flops(1.0, causal=True)
    if masked and model_key.mask_ratio:
        flops += masked * step_flops(model_key.mask_ratio, causal=False)
    return float(flops)


def resolve_model_keys(
    names: list[str], manifest_keys: Mapping[str, ModelKey]
) -> dict[str, ModelKey]:
    """Return the model key by name, from `manifest_keys` or else parsed from the name.

    Names without either are left out; the order is that of `names`.

    Args:
        names: Names of models, such as `610m-mlm40-42k`.
        manifest_keys: Key by model name; empty without a manifest.
    """
    model_keys = {name: manifest_keys.get(name) or parse_model_name(name) for name in names}
    return {name: model_key for name, model_key in model_keys.items() if model_key is not None}
