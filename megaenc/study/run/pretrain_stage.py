"""A pretraining run as a stage of a study."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaenc import flags
from megaenc.data.indexed.metadata import metadata_path, read_corpus_metadata
from megaenc.data.packing.blended_dataset import parse_data_path
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.json_files import parse_json
from megaenc.objectives import Schedule
from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.plan.cost import TrainingCost
from megaenc.study.run.stage import (
    StageRunner,
    StaleArtifactError,
    format_flags,
    manifest_mismatch,
    megaenc_command,
    read_identity,
)
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.run_dir import METRICS_FILE, RUN_FILE, describe_difference
from megaenc.training.run_init import RunInit, identity_digest
from megaenc.viz.run_metrics import read_run_json

_PLACEHOLDER_VOCABULARY = Vocabulary(size=1024, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
_TAIL_BYTES = 8192  # bytes at the end of metrics.jsonl in which the last row is


@dataclass(frozen=True, kw_only=True)
class PretrainStage(StageRunner):
    """One `megaenc pretrain`: the run that ends as `model`, or the part of it that no other has trained."""

    model: PlannedModel
    start: Literal["new", "branch", "weights"]
    parent: str
    """The run that it branches off or begins with the weights of; "" for new weights."""
    branch_step: int
    """The parent's step at which it branches; 0 otherwise."""
    checkpoint_steps: tuple[int, ...]
    """Steps before the last whose checkpoints others need: branches, and exports of checkpoints on the way."""
    has_study_corpus: bool
    """Whether the study makes the corpus that it reads."""
    cost: TrainingCost
    """What the steps that it makes itself take."""
    processes: int
    data_flags: Mapping[str, Any] = field(hash=False)
    """data_path and tokenizer, where the manifest's flags do not say them"""
    launcher: tuple[str, ...] = ("--standalone",)
    """how torchrun finds the others"""
    kind, home, unit = "pretrain", "runs", "steps"

    @property
    def needs(self) -> tuple[str, ...]:
        return (f"{self.kind}/{self.parent}",) if self.parent else ("corpus",) if self.has_study_corpus else ()

    @property
    def steps(self) -> int:
        """Steps that it makes itself."""
        return self.model.steps - self.branch_step

    @property
    def is_decay_only(self) -> bool:
        """Whether it is nothing but another run's decay."""
        return self.start == "branch" and self.steps <= self.model.decay

    @property
    def work(self) -> float:  # FLOP
        return self.cost.flops

    @property
    def planned_seconds(self) -> float | None:  # by the manifest's tokens a second
        hours = self.cost.device_hours
        return None if hours is None else 3600 * hours / self.processes

    @property
    def flags(self) -> dict[str, Any]:
        """Flags of `megaenc pretrain`, by field name; `format_flags` spells them."""
        parent = str(self._parent)
        starts = {
            "new": {},
            "branch": {"branch_from": parent, "branch_at": self.branch_step},
            "weights": {"init_from": parent, "skip_samples": "parent"},
        }
        return {
            **self.model.flags,
            "objective_schedule": self.model.schedule,
            **self._step_flags,
            "save_steps": list(self.checkpoint_steps),
            "keep_last": 1,
            "save": str(self.folder),
            **self.data_flags,
            **starts[self.start],
        }

    @property
    def _step_flags(self) -> dict[str, int]:
        model = self.model
        rates = {"lr_warmup_iters": model.warmup, "lr_wsd_decay_iters": model.decay}
        return {"train_iters": model.steps, "seed": model.key.seed, **rates}

    @property
    def _parent(self) -> Path:
        return self.folder.with_name(self.parent) if self.parent else self.folder

    def next_command(self) -> list[str]:
        """Return the words of `megaenc pretrain`; the same goes on with a run that was stopped."""
        return megaenc_command("pretrain", *format_flags(self.flags), processes=self.processes, launcher=self.launcher)

    def is_done(self) -> bool:
        """Return whether the last step is saved, whole."""
        checkpoints = CheckpointDir(self.folder / "checkpoints")
        return checkpoints.is_complete(self.model.steps) and checkpoints.tracked_step() == self.model.steps

    def progress(self) -> tuple[float, float]:
        if self.is_done():
            return self.steps, self.steps
        return max(0, _read_last_step(self.folder / METRICS_FILE) - self.branch_step), self.steps

    def check(self) -> None:
        """Compare its flags with those in run.json, and what it began with and reads with what is there."""
        if (start := read_run_init(self.folder)) is None:
            return
        identity = read_identity(self.folder) or {}
        wanted = {name: value for name, value in self._identity().items() if name in identity}
        if other := describe_difference({name: identity[name] for name in wanted}, wanted):
            raise manifest_mismatch(self.folder, other)
        self._check_start(start)
        for name, here in self._data_fingerprints().items():
            if here != identity.get(name, here):
                raise StaleArtifactError(
                    self.folder, f"trained on another {name} than {' '.join(self.flags['data_path'])} is of now"
                )

    def _check_start(self, there: RunInit) -> None:
        """Compare how it began, as far as that can be told while the parent is not there."""
        parent = read_identity(self._parent) if self.parent else None
        at = self.branch_step if parent is None or self.start == "branch" else parent.get("train_iters")
        here = RunInit(self.start, self.parent, at)
        if (there.kind, there.step, Path(there.run).name) != (here.kind, here.step, here.run):
            raise manifest_mismatch(self.folder, f"it began {there.describe()}, now it would begin {here.describe()}")
        if parent is not None and (there.at, there.parent) != (at, identity_digest(parent)):
            raise StaleArtifactError(self.folder, f"began with another {self.parent} than {self._parent} is now")

    def _data_fingerprints(self) -> dict[str, str]:
        """Fingerprints of data and tokenizer as run.json has them, as far as what lies beside the data tells them."""
        pairs = parse_data_path(tuple(map(str, self.flags.get("data_path", ()))))
        if not pairs or not all(metadata_path(prefix).is_file() for _, prefix in pairs):
            return {}
        beside = [read_corpus_metadata(prefix) for _, prefix in pairs]
        found = {"tokenizer": beside[0].tokenizer.fingerprint}
        weights, prints = [weight for weight, _ in pairs], [each.sha256["bin"] for each in beside]
        if len(pairs) == 1:
            return found | {"data": prints[0]}
        if None in weights:
            return found  # their shares are those of the tokens that are trained on
        parts = [f"{weight / sum(weights)} {each}" for weight, each in zip(weights, prints, strict=True)]
        return found | {"data": ", ".join(parts)}

    def _identity(self) -> dict[str, Any]:
        """What makes it this run, of what the manifest decides, as run.json has it."""
        model = self.model
        schedule = Schedule.build(model.schedule, model.steps, _PLACEHOLDER_VOCABULARY, model.key.seed)
        known = {name: value for name, value in flags.flatten(model.run).items() if name not in _RESOLVED_BY_RUN}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
        if "bf16" in model.flags:
            values["bf16"] = model.run.bf16
        return values | self._step_flags | {"objective_schedule": schedule.canonical}


# Of bf16 and of the rows of the vocabulary a run has what fits machine and tokenizer, unless it was given; the tokenizer is known
# by its fingerprint. Where its samples begin follows from the parent, which is compared.
_RESOLVED_BY_RUN = {"bf16", "vocab_size", "tokenizer", "skip_samples"}


def read_run_init(run: Path) -> RunInit | None:
    """Return how a run began, by its run.json; None for a run that has not begun. Raises InputError for a damaged file."""
    if not (run / RUN_FILE).exists():
        return None
    facts, place, expected = read_run_json(run), f"{run / RUN_FILE}: field", "expected what a run wrote there"
    try:
        start = RunInit.read(facts)
    except (TypeError, AttributeError):
        raise InputError(f"{place} `start`: found an unknown form; {expected}") from None
    start.check(f"{place} `start`")
    if not facts["identity"]:
        raise InputError(f"{place} `identity`: missing; {expected}")
    return start


def _read_last_step(metrics: Path) -> int:
    """Of the last whole row; 0 where there is none."""
    with contextlib.suppress(OSError, IndexError, ValueError, KeyError, TypeError):
        if metrics.is_file():
            with open(metrics, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
                rows = stream.read(_TAIL_BYTES).split(b"\n")[:-1]
            step = parse_json(rows[-1])["step"]
            return step if type(step) is int else 0
    return 0
