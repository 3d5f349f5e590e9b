"""Sharded checkpoints in a run folder: complete or invisible, readable in any layout."""

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from megaenc.errors import InputError
from megaenc.files import write_whole
from megaenc.ranks import rank
from megaenc.training.engine import Engine
from megaenc.training.sharded_state import fill, fill_module, sharded_state

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "state.json"


class Checkpoints:
    """The folder `checkpoints` of a run: one `iter_0000100` a save, and a tracker file that names the newest."""

    def __init__(self, folder: Path):
        self.folder = folder

    def latest(self) -> int | None:
        """The step of the newest checkpoint, None where there is none. InputError if the tracker is not a number."""
        tracker = self.folder / TRACKER
        if not tracker.exists():
            return None
        text = tracker.read_text(encoding="utf-8").strip()
        if not text.isdecimal():
            raise InputError(f"{tracker}: found {text!r}, expected the number of a step")
        return int(text)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return self.folder / f"iter_{step:07d}"

    def state(self, step: int) -> dict[str, Any]:
        """The JSON saved with the checkpoint of `step`, if every file is there; InputError names what is missing."""
        path = self.path(step)
        if not path.is_dir():
            raise InputError(f"{path}: missing, expected the checkpoint of step {step}: {self._advice(step)}")
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            sizes = dict(state["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = error.strerror if isinstance(error, OSError) else f"not what a save wrote ({error!r})"
            raise InputError(f"{path / STATE}: {what}; the checkpoint is incomplete: {self._advice(step)}") from None
        for name, size in sizes.items():
            found = (path / name).stat().st_size if (path / name).exists() else None
            if found != size:
                what = "missing" if found is None else f"found {found} bytes, expected {size}"
                raise InputError(f"{path / name}: {what}; the checkpoint is incomplete: {self._advice(step)}")
        return state

    def _advice(self, step: int) -> str:
        others = sorted(int(p.name[5:]) for p in self.folder.glob("iter_*") if p.name[5:].isdecimal() and int(p.name[5:]) != step)
        if others:
            return f"to go on from step {others[-1]}, write {others[-1]} into {self.folder / TRACKER}"
        return f"no other is there; delete {self.folder} to start anew"

    def save(self, engine: Engine, step: int, progress: dict[str, Any]) -> None:
        """Write the checkpoint of `step` with `progress` in its JSON; all ranks call this together.

        It is written under a name of this attempt and renamed when all of it is on the disk; the tracker follows last.
        """
        names = [f".{self.path(step).name}.{uuid.uuid4().hex}"]
        dist.broadcast_object_list(names)
        attempt = self.folder / names[0]
        if rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in self.folder.glob(".iter_*"):  # left by attempts that were killed; the run's lock says none is alive
                shutil.rmtree(stale, ignore_errors=True)
            attempt.mkdir()
        dist.barrier()
        dist_checkpointing.save(sharded_state(engine, is_loading=False), str(attempt))
        dist.barrier()
        if rank() == 0:
            files = {file.name: file.stat().st_size for file in sorted(attempt.iterdir())}
            write_whole(attempt / STATE, json.dumps({"step": step, **progress, "files": files}, indent=1))
            target = self.path(step)
            if target.exists():  # a save that was cut off before its tracker was written
                shutil.rmtree(target)
            os.rename(attempt, target)
            write_whole(self.folder / TRACKER, f"{step}\n")
        dist.barrier()

    def load(self, engine: Engine, step: int) -> None:
        """Put the checkpoint of `step` into `engine`, in whatever layout it was saved."""
        self.state(step)
        fill(engine, dist_checkpointing.load(sharded_state(engine, is_loading=True), str(self.path(step))))


def load_model(checkpoints: Checkpoints, step: int, module: torch.nn.Module) -> None:
    """Put the weights of the checkpoint of `step` into `module`, without an optimizer."""
    checkpoints.state(step)
    loaded = dist_checkpointing.load({"model": module.sharded_state_dict(prefix="model.")}, str(checkpoints.path(step)))
    fill_module(module, loaded["model"])
