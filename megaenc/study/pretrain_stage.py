"""A pretraining run as a stage of a study."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.errors import InputError
from megaenc.study.entries import schedule_of
from megaenc.study.graph import Pretraining, arguments
from megaenc.study.node import OfStage, changed, megaenc, read_json
from megaenc.training.checkpoint_folder import CheckpointFolder
from megaenc.training.run_folder import FACTS, METRICS, difference

_LAST_ROW = 8192  # bytes at the end of metrics.jsonl in which the last row is


@dataclass(frozen=True)
class PretrainNode(OfStage):
    """One pretraining run."""

    stage: Pretraining
    processes: int
    work: float
    """FLOP"""
    planned: float | None
    launcher: tuple[str, ...] = ("--standalone",)
    """how torchrun finds the others"""
    unit: str = "steps"

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.study / "runs" / self.stage.name

    def command(self) -> list[str]:
        """`megaenc pretrain`; the same goes on with a run that was stopped."""
        words = arguments(self.stage.flags_in(self.study))
        return megaenc("pretrain", *words, processes=self.processes, launcher=self.launcher)

    def done(self) -> bool:
        """Whether the last step is saved, whole."""
        return has_checkpoint(self.folder, self.stage.model.steps) and self._latest() == self.stage.model.steps

    def _latest(self) -> int | None:
        return CheckpointFolder(self.folder / "checkpoints").latest()

    def progress(self) -> tuple[float, float]:
        """Steps of its own, by the last row of metrics.jsonl."""
        if self.done():
            return self.stage.steps, self.stage.steps
        return max(0, _last_step(self.folder / METRICS) - self.stage.at), self.stage.steps

    def check(self) -> None:
        """Its flags against those in run.json; and the checkpoint that it begins with, where the parent is done."""
        identity = read_json(self.folder / FACTS).get("identity")
        if isinstance(identity, dict):
            wanted = {name: value for name, value in self._identity().items() if name in identity}
            if other := difference({name: identity[name] for name in wanted}, wanted):
                raise changed(self.folder, other)
        parent = self.study / "runs" / self.stage.parent
        if self.stage.start == "branch" and not self.done():
            check_kept(parent, self.stage.at, f"{self.id} branches")

    def _identity(self) -> dict[str, Any]:
        """What makes it this run, of what the manifest decides, as run.json has it."""
        model = self.stage.model
        values = {name: _as_json(value) for name, value in flags.flatten(model.run).items() if name not in _FOUND_OUT}
        if "bf16" in model.flags:
            values["bf16"] = model.run.bf16
        return values | {
            "train_iters": model.steps,
            "seed": model.setting.seed,
            "lr_warmup_iters": model.warmup,
            "lr_wsd_decay_iters": model.decay,
            "objective_schedule": schedule_of(model).canonical,
        }


# Of bf16 and of the rows of the vocabulary a run has what fits machine and tokenizer, unless it was given; the tokenizer is known
# by its fingerprint.
_FOUND_OUT = {"bf16", "vocab_size", "tokenizer"}


def has_checkpoint(run: Path, step: int) -> bool:
    """Whether a run has kept the checkpoint of a step, whole."""
    return CheckpointFolder(run / "checkpoints").is_whole(step)


def check_kept(run: Path, step: int, what: str) -> None:
    """InputError where a run is beyond `step` and has no checkpoint of it."""
    latest = CheckpointFolder(run / "checkpoints").latest()
    if latest is not None and latest >= step and not has_checkpoint(run, step):
        raise InputError(
            f"{run}: trained to step {latest} without keeping step {step}, where {what}: the manifest did not ask for it then; "
            "remove that folder to train it again, or choose another --output"
        )


def _last_step(metrics: Path) -> int:
    """Of the last whole row; 0 where there is none."""
    try:
        with open(metrics, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LAST_ROW))
            rows = stream.read().split(b"\n")[:-1]
        return int(json.loads(rows[-1])["step"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return 0


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
