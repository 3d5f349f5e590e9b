"""A study's pretraining runs, read back from their folders: curves, what they cost, what they were made with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.model.config import PRESETS
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.training.run_dir import RUN_FILE, METRICS_FILE
from megaenc.viz.run_metrics import Row, read_start_progress, read_run_json, read_steps, read_validations

_OF_A_PHASE = re.compile(r"[a-z][a-z0-9_]*(?=[(:,+]|$)")


@dataclass(frozen=True)
class TrainedRun:
    """A run folder: what it has made itself, without the steps of its parent."""

    name: str
    facts: Mapping[str, Any]
    steps: list[Row]
    validations: list[Row]
    start_progress: Row
    """how far it had come before its first step: 0, or where it branched"""

    @property
    def start(self) -> str:
        """new, branch or weights"""
        return self.facts["start"].get("kind", "new")

    @property
    def parent(self) -> str:
        """Folder name of the run that it began with; empty for a new one."""
        return Path(self.facts["start"].get("run", "")).name

    @property
    def identity(self) -> Mapping[str, Any]:
        """Flags that make the run what it is."""
        return self.facts["identity"]

    @property
    def kind(self) -> str:
        """CLM, MLM, `CLM + MLM` (in any order), `other`; or `continued` for what began with a model's weights."""
        if self.start == "weights":
            return "continued"
        schedule = str(self.identity.get("objective_schedule", "")) or ",".join(row["objective"] for row in self.steps)
        names = set(_OF_A_PHASE.findall(re.sub(r"\([^)]*\)", "", schedule)))
        return {("clm",): "CLM", ("mlm",): "MLM", ("clm", "mlm"): "CLM + MLM"}.get(tuple(sorted(names)), "other")


def read_runs(folder: Path) -> dict[str, TrainedRun]:
    """Return the runs with a step in `folder`, by name. Raises InputError if there is none, and for files that no run wrote."""
    try:
        run_dirs = sorted(path for path in folder.iterdir() if (path / RUN_FILE).is_file())
    except OSError as error:
        raise InputError(f"--runs {folder}: {error.strerror}; expected a folder of run folders") from None
    runs = {}
    for path in run_dirs:
        if steps := read_steps(path, required=False):
            runs[path.name] = TrainedRun(path.name, read_run_json(path), steps, read_validations(path), read_start_progress(path))
    if not runs:
        raise InputError(f"--runs {folder}: holds no run with a step, expected folders with {RUN_FILE} and {METRICS_FILE}")
    return runs


def flops_by_model(runs: Mapping[str, TrainedRun], settings: Mapping[str, ModelKey]) -> dict[ModelKey, float]:
    """Return the operations that went into each setting, beginnings that a run shares with its parent included.

    A checkpoint on the way, RUN-STEP, has those of the row of that step, or of the next before it.
    """
    found = {}
    for name, setting in settings.items():
        step = None if name in runs else setting.steps
        run = runs.get(name) or runs.get(re.sub(rf"-{setting.steps}(?=(-seed\d+)?$)", "", name))  # the seed at its end stays
        while run is not None and step is not None and run.start == "branch" and step <= run.start_progress["step"]:
            run = runs.get(run.parent)
        if run is None:
            continue
        rows = [row for row in run.steps if step is None or row["step"] <= step]
        if rows and "flops" in rows[-1] and (step is None or rows[-1]["step"] == step):
            found[setting] = float(rows[-1]["flops"]) + _ancestor_flops(run, runs)
    return found


def _ancestor_flops(run: TrainedRun, runs: Mapping[str, TrainedRun]) -> float:
    """Return the operations of the models that a run began with the weights of, which its own count leaves out."""
    spent, seen = 0.0, set()
    while run.name not in seen and (parent := runs.get(run.parent)) is not None:
        seen.add(run.name)
        spent += float(parent.steps[-1].get("flops", 0.0)) if run.start == "weights" else 0.0
        run = parent
    return spent


_PACKS, _LENGTH, _CHUNK, _IDS = 1152, 2048, 1024, 128_256


def published_model_flops(setting: ModelKey) -> float | None:
    """Return the same for a model of the study, from its shape: 1,152 packs a step, two chunks in each. None for other sizes."""
    if (shape := PRESETS.get(setting.size.lower())) is None or setting.schedule:
        return None

    def step(share: float, causal: bool) -> float:
        spans = [(start, start if causal else start + _CHUNK, start + _CHUNK) for start in range(0, _LENGTH, _CHUNK)]
        return _PACKS * shape.training_flops(_IDS, round(share * _LENGTH), spans)

    masked = setting.mlm_steps + setting.cpt_mlm_steps
    spent = setting.clm_steps * step(1.0, causal=True)
    return spent + (masked * step(setting.mask_ratio, causal=False) if masked and setting.mask_ratio else 0.0)


def resolve_model_keys(names: list[str], given: Mapping[str, ModelKey]) -> dict[str, ModelKey]:
    """Return what each name stands for: as `given` by a manifest, else as the study names its models."""
    found = {name: given.get(name) or parse_model_name(name) for name in names}
    return {name: setting for name, setting in found.items() if setting is not None}
