"""A pretraining run as a stage of a study."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaenc import flags
from megaenc.data.blend import parse_data_path
from megaenc.data.sidecar import read_sidecar, sidecar_path
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_json
from megaenc.study.begun import read_start
from megaenc.study.entries import schedule_of
from megaenc.study.graph import Pretraining, arguments
from megaenc.study.node import Changed, OfStage, changed, megaenc
from megaenc.training.checkpoint_folder import CheckpointFolder
from megaenc.training.run_folder import FACTS, METRICS, difference
from megaenc.training.start import Start, digest

_LAST_ROW = 8192  # bytes at the end of metrics.jsonl in which the last row is


@dataclass(frozen=True)
class PretrainNode(OfStage):
    """One pretraining run."""

    stage: Pretraining
    processes: int
    work: float
    """FLOP"""
    planned: float | None
    text: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """data_path and tokenizer, where the study does not make them"""
    launcher: tuple[str, ...] = ("--standalone",)
    """how torchrun finds the others"""
    unit: str = "steps"

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.study / "runs" / self.stage.name

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of `megaenc pretrain`, by name; relative paths made absolute."""
        return self.stage.flags_in(self.study) | dict(self.text)

    def command(self) -> list[str]:
        """`megaenc pretrain`; the same goes on with a run that was stopped."""
        words = arguments(self.flags)
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
        """Its flags against those in run.json, and what it began with and reads against what is there."""
        start = read_start(self.folder)
        if start is None:
            return
        identity = identity_of(self.folder) or {}
        wanted = {name: value for name, value in self._identity().items() if name in identity}
        if other := difference({name: identity[name] for name in wanted}, wanted):
            raise changed(self.folder, other)
        self._check_start(start)
        for name, here in self._text().items():
            if here != identity.get(name, here):
                raise Changed(self.folder, f"trained on another {name} than {' '.join(self.flags['data_path'])} is of now")

    def _check_start(self, there: Start) -> None:
        """How it began, as far as that can be told while the parent is not there."""
        stage, parent = self.stage, identity_of(self.study / "runs" / self.stage.parent) if self.stage.parent else None
        at = stage.at if parent is None or stage.start == "branch" else parent.get("train_iters")
        here = Start(stage.start, stage.parent, at)
        if (there.kind, there.step, Path(there.run).name) != (here.kind, here.step, here.run):
            raise changed(self.folder, f"it began {there.describe()}, now it would begin {here.describe()}")
        if parent is not None and (there.at, there.parent) != (at, digest(parent)):
            raise Changed(self.folder, f"began with another {stage.parent} than {self.study / 'runs' / stage.parent} is now")

    def _text(self) -> dict[str, str]:
        """Fingerprints of data and tokenizer as run.json has them, as far as what lies beside the data tells them."""
        pairs = parse_data_path(tuple(map(str, self.flags.get("data_path", ()))))
        if not pairs or not all(sidecar_path(prefix).is_file() for _, prefix in pairs):
            return {}
        beside = [read_sidecar(prefix) for _, prefix in pairs]
        found = {"tokenizer": beside[0].tokenizer.fingerprint}
        weights, prints = [weight for weight, _ in pairs], [each.sha256["bin"] for each in beside]
        if len(pairs) == 1:
            return found | {"data": prints[0]}
        if None in weights:
            return found  # their shares are those of the tokens that are trained on
        shares = (weight / sum(weights) for weight in weights)
        return found | {"data": ", ".join(f"{share} {each}" for share, each in zip(shares, prints, strict=True))}

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
# by its fingerprint. Where its samples begin follows from the parent, which is compared.
_FOUND_OUT = {"bf16", "vocab_size", "tokenizer", "skip_samples"}


def identity_of(run: Path) -> dict[str, Any] | None:
    """What makes it this run, by its folder; None where it has not begun."""
    found = read_json(run / FACTS).get("identity")
    return found if isinstance(found, dict) else None


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
    if not metrics.is_file():
        return 0
    try:
        with open(metrics, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _LAST_ROW))
            rows = stream.read(_LAST_ROW).split(b"\n")[:-1]
        step = parse_json(rows[-1])["step"]
    except (OSError, IndexError, ValueError, KeyError, TypeError):
        return 0
    return step if type(step) is int else 0


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
