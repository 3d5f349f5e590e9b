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
        return [*found, f"the newest checkpoint is of step {run.tracked()}, there are {run.steps()}; expected {step}"]
    here, there = (_checkpoint(one, step) for one in (run, reference))
    found += [
        f"checkpoint of step {step}: {name} differs" for name in here.keys() | there.keys() if here.get(name) != there.get(name)
    ]
    for file in ("metrics.jsonl", "validation.jsonl"):
        rows, expected = (_rows(one.folder / file) for one in (run, reference))
        if rows != expected:
            at = next(
                (number for number, pair in enumerate(zip(rows, expected, strict=False), 1) if pair[0] != pair[1]), "the end"
            )
            found.append(f"{file}: {len(rows)} rows, expected {len(expected)}; they differ from {at} on")
    return found


def damaged_checkpoints(run: FaultRun) -> list[str]:
    """Of the checkpoints that can be seen: files that are missing or not as state.json says."""
    found = []
    for step in run.steps():
        folder = run.checkpoints / f"iter_{step:07d}"
        files = json.loads((folder / "state.json").read_text(encoding="utf-8"))["files"]
        if damage := find_size_damage(folder, files) or find_content_damage(folder, files):
            found.append(damage)
    if run.tracked() and run.tracked() not in run.steps():
        found.append(f"{run.checkpoints}: the tracker names step {run.tracked()}, there are {run.steps()}")
    return found


def _checkpoint(run: FaultRun, step: int) -> dict[str, object]:
    """What is in it, by name: fields of state.json, and the checksum of every file."""
    state = json.loads((run.checkpoints / f"iter_{step:07d}" / "state.json").read_text(encoding="utf-8"))
    return state | state.pop("files")


def _rows(file: Path) -> list[dict]:
    return [runs.lasting(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
