"""How a run ended, against a run that was left alone; and whether what a kill has left can be trusted."""

import json
from pathlib import Path

import runs
from faults.moments import FaultRun

from megaenc.training.checkpoint_dir import find_content_damage, find_size_damage


def differences(run: FaultRun, reference: FaultRun, step: int) -> list[str]:
    """What differs, in words: the checkpoint of the last `step` bit by bit, rows but for what is measured, what is left."""
    found = [f"half-written and left: {path}" for path in run.leftovers()]
    if run.tracked() != step or step not in run.steps():
        return [
            *found,
            f"the newest checkpoint is of step {run.tracked()}, there are {run.steps()}; expected {step}",
        ]
    here = _state(run, step)
    there = _state(reference, step)
    found += [
        f"checkpoint of step {step}: {name} differs"
        for name in there
        if here.get(name) != there[name]
    ]
    for file in ("metrics.jsonl", "validation.jsonl"):
        if _rows(run.folder / file) != _rows(reference.folder / file):
            found.append(f"{file} differs")
    return found


def damaged_checkpoints(run: FaultRun) -> list[str]:
    """Of the checkpoints that can be seen: files that are missing or not as state.json says."""
    found = []
    for step in run.steps():
        folder = run.checkpoints / f"iter_{step:07d}"
        files = _state(run, step)["files"]
        if damage := find_size_damage(folder, files) or find_content_damage(folder, files):
            found.append(damage)
    if run.tracked() and run.tracked() not in run.steps():
        found.append(
            f"{run.checkpoints}: the tracker names step {run.tracked()}, there are {run.steps()}"
        )
    return found


def _state(run: FaultRun, step: int) -> dict[str, object]:
    """What is in a checkpoint, with the checksum of every file."""
    return json.loads(
        (run.checkpoints / f"iter_{step:07d}" / "state.json").read_text(encoding="utf-8")
    )


def _rows(file: Path) -> list[dict]:
    return [
        runs.lasting(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()
    ]
