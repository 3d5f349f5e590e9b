"""Comparison of a killed run with an undisturbed one, and damage that kills leave."""

import json
from pathlib import Path

import runs
from faults.moments import FaultRun

from megaenc.training.checkpoint_dir import find_content_damage, find_size_damage


def differences(run: FaultRun, reference: FaultRun, step: int) -> list[str]:
    """Return the differences of two runs in words: last checkpoint, rows, leftovers.

    Checkpoints are compared bit by bit, rows without measured values.
    """
    found = [f"half-written and left: {path}" for path in run.leftovers()]
    if run.tracked() != step or step not in run.steps():
        return [
            *found,
            f"the newest checkpoint is of step {run.tracked()}, there are {run.steps()}; "
            f"expected {step}",
        ]
    here = _state(run, step)
    there = _state(reference, step)
    found += [
        f"checkpoint of step {step}: {name} differs"
        for name in there
        if here.get(name) != there[name]
    ]
    for file in ("metrics.jsonl", "validation.jsonl"):
        if _rows(run.directory / file) != _rows(reference.directory / file):
            found.append(f"{file} differs")
    return found


def damaged_checkpoints(run: FaultRun) -> list[str]:
    """Return the files of visible checkpoints that are missing or damaged."""
    found = []
    for step in run.steps():
        directory = run.checkpoints / f"iter_{step:07d}"
        files = _state(run, step)["files"]
        if damage := find_size_damage(directory, files) or find_content_damage(directory, files):
            found.append(damage)
    if run.tracked() and run.tracked() not in run.steps():
        found.append(
            f"{run.checkpoints}: the tracker names step {run.tracked()}, there are {run.steps()}"
        )
    return found


def _state(run: FaultRun, step: int) -> dict[str, object]:
    """Return the state of a checkpoint, with the checksum of every file."""
    return json.loads(
        (run.checkpoints / f"iter_{step:07d}" / "state.json").read_text(encoding="utf-8")
    )


def _rows(file: Path) -> list[dict]:
    return [
        runs.lasting(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()
    ]
