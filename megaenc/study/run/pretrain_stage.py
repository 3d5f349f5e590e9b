"""Pretraining run as a stage of a study."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaenc import flags
from megaenc.data.indexed.metadata import metadata_path, read_corpus_metadata
from megaenc.data.packing.corpus_order import find_period_counts
from megaenc.data.packing.data_path import (
    describe_blend,
    find_corpora,
    is_tempered_blend,
    list_prefixes,
    shares_weights_by_size,
    weigh_corpora,
)
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_json_or_empty
from megaenc.model.freezing import canonical_freeze
from megaenc.objectives import Schedule
from megaenc.study.manifest.expand import PlannedModel
from megaenc.study.plan.training_cost import TrainingCost
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
from megaenc.training.run_init import RunInit, identity_digest, read_run_metadata

_PLACEHOLDER_VOCABULARY = Vocabulary(
    size=1024, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint=""
)
_TAIL_BYTES = 8192  # bytes at the end of metrics.jsonl that contain the last row


@dataclass(frozen=True, kw_only=True)
class PretrainStage(StageRunner):
    """Stage of `megaenc pretrain` that trains `model`, or its steps after a branch.

    `build_graph` builds it. If `start` is "branch", it trains the steps after `branch_step` of the
    run `parent`; else all of the model's run, from "new" weights or those of the parent's end
    ("weights"). `checkpoint_steps` are steps before the last whose checkpoints are kept for
    branches and exports; `cost` (TrainingCost) is that of its own steps. `processes` train
    together, with `launcher` as torchrun's rendezvous arguments. `data_flags`, data_path and
    tokenizer, replace those of `model`; `has_study_corpus` is whether the study builds its corpus.
    """

    model: PlannedModel
    start: Literal["new", "branch", "weights"]
    parent: str
    """Name of the run to branch off or to take the weights of; "" for new weights."""
    branch_step: int
    """Step of the parent at which it branches; otherwise 0."""
    checkpoint_steps: tuple[int, ...]
    """Steps before the last whose checkpoints are kept for branches and exports."""
    has_study_corpus: bool
    """True for a run on the corpus that the study builds."""
    cost: TrainingCost
    """Cost of its own steps."""
    processes: int
    data_flags: Mapping[str, Any] = field(hash=False)
    """data_path and tokenizer, if the manifest's flags lack them"""
    launcher: tuple[str, ...] = ("--standalone",)
    """torchrun's rendezvous arguments"""
    kind = "pretrain"
    subfolder = "runs"
    unit = "steps"

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the id of the stage that this run needs, in a tuple.

        It is the parent's stage, otherwise `corpus` if the study builds its corpus; () if neither
        exists.
        """
        if self.parent:
            return (f"{self.kind}/{self.parent}",)
        return ("corpus",) if self.has_study_corpus else ()

    @property
    def steps(self) -> int:
        """Return the number of steps that this run trains itself, after its branch."""
        return self.model.steps - self.branch_step

    @property
    def work(self) -> float:
        """Return the FLOPs of the run's own steps, to which run times are proportional.

        They are those of forward and backward on all processes.
        """
        return self.cost.flops

    @property
    def planned_seconds(self) -> float | None:
        """Return the planned run time in seconds; None if the throughput is unknown."""
        hours = self.cost.device_hours
        return None if hours is None else 3600 * hours / self.processes

    @property
    def flags(self) -> dict[str, Any]:
        """Return the flags of `megaenc pretrain` for this run, by field name."""
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
            "save": str(self.directory),
            **self.data_flags,
            **starts[self.start],
        }

    @property
    def _step_flags(self) -> dict[str, int]:
        """Return the flags for steps, seed, warm-up and decay."""
        return {
            "train_iters": self.model.steps,
            "seed": self.model.key.seed,
            "lr_warmup_iters": self.model.warmup,
            "lr_wsd_decay_iters": self.model.decay,
        }

    @property
    def _parent(self) -> Path:
        """Return the parent's run directory; the run's own if it has no parent."""
        return self.directory.with_name(self.parent) if self.parent else self.directory

    def remaining_commands(self) -> list[list[str]]:
        """Return the command line of `megaenc pretrain` unless the run has ended.

        It also resumes a stopped run. Several processes are started by torchrun.
        """
        if self.is_done():
            return []
        return [
            megaenc_command(
                "pretrain",
                *format_flags(self.flags),
                processes=self.processes,
                launcher=self.launcher,
            )
        ]

    def is_done(self) -> bool:
        """Return whether the last step's checkpoint is complete and the run's latest."""
        checkpoints = CheckpointDir(self.directory / "checkpoints")
        return (
            checkpoints.is_complete(self.model.steps)
            and checkpoints.tracked_step() == self.model.steps
        )

    def progress(self) -> tuple[float, float]:
        """Return (own steps trained so far, all own steps).

        Trained steps are those in metrics.jsonl; own ones come after the branch.
        """
        if self.is_done():
            return self.steps, self.steps
        return max(0, _read_last_step(self.directory / METRICS_FILE) - self.branch_step), self.steps

    def check(self) -> None:
        """Raise StaleArtifactError if the run had other flags, parent or data.

        They are compared with its run.json; a run without one passes. A broken run.json is another
        InputError.
        """
        run_file = self.directory / RUN_FILE
        if not run_file.exists():
            return
        metadata, start = read_run_metadata(run_file)
        identity = metadata["identity"]
        planned = self._identity()
        # Runs do not record all flags. They leave out `freeze` only if they freeze nothing.
        fields = [name for name in planned if name in identity or name == "freeze"]
        difference = describe_difference(identity, planned, fields=fields)
        if difference:
            raise manifest_mismatch(self.directory, difference)
        self._check_start(start)
        for name, fingerprint in self._data_fingerprints().items():
            if fingerprint != identity.get(name, fingerprint):
                data_path = " ".join(self.flags["data_path"])
                raise StaleArtifactError(
                    self.directory, f"trained with another {name} than that of {data_path} now"
                )

    def _check_start(self, start: RunInit) -> None:
        """Raise StaleArtifactError if the run began differently.

        It also did if its parent is not the one that exists now.
        """
        parent = read_identity(self._parent) if self.parent else None
        parent_step = (
            self.branch_step
            if parent is None or self.start == "branch"
            else parent.get("train_iters")
        )
        planned = RunInit(self.start, self.parent, parent_step)
        is_same_run = start.kind == planned.kind and Path(start.run).name == planned.run
        if not is_same_run or start.step != planned.step:
            raise manifest_mismatch(
                self.directory,
                f"the run began {start.describe()}, now it would begin {planned.describe()}",
            )
        if parent is not None and (start.at, start.parent) != (
            parent_step,
            identity_digest(parent),
        ):
            raise StaleArtifactError(
                self.directory, f"began with another {self.parent} than {self._parent} is now"
            )

    def _data_fingerprints(self) -> dict[str, str]:
        """Return the fingerprints of data and tokenizer that can be compared.

        They are those of run.json's identity, and need the metadata of the corpora. Shares that
        follow from sizes are computed from the training tokens in run.json.
        """
        try:
            sources = find_corpora(tuple(map(str, self.flags.get("data_path", ()))))
        except InputError:  # a pattern that matches nothing any more
            return {}
        prefixes = list_prefixes(sources)
        if not prefixes or not all(metadata_path(prefix).is_file() for prefix in prefixes):
            return {}
        corpora = [read_corpus_metadata(prefix) for prefix in prefixes]
        tokenizer = {"tokenizer": corpora[0].tokenizer.fingerprint}
        tokens = [1] * len(prefixes)
        if shares_weights_by_size(sources):
            tokens = self._read_training_tokens()
        if tokens is None:
            return tokenizer
        if len(tokens) != len(prefixes):
            return tokenizer | {"data": f"{len(prefixes)} corpora"}
        temperature = self.flags.get("blend_temperature", 1)
        max_epochs = self.flags.get("blend_max_epochs")
        weights = weigh_corpora(sources, tokens, temperature)
        counts = find_period_counts(
            weights,
            is_tempered=is_tempered_blend(sources, temperature),
            has_limits=max_epochs is not None,
        )
        data = describe_blend(
            [weight / sum(weights) for weight in weights],
            [corpus.sha256["bin"] for corpus in corpora],
            is_periodic=counts is not None,
            max_epochs=max_epochs,
        )
        return tokenizer | {"data": data}

    def _read_training_tokens(self) -> list[int] | None:
        """Return the training tokens of each corpus in run.json; None if it has none."""
        rows = read_json_or_empty(self.directory / RUN_FILE).get("reading")
        try:
            return [int(row["tokens"]) for row in rows]
        except (TypeError, KeyError, ValueError):
            return None

    def _identity(self) -> dict[str, Any]:
        """Return the part of run.json's identity that the manifest determines."""
        model = self.model
        schedule = Schedule.build(
            model.schedule, model.steps, _PLACEHOLDER_VOCABULARY, model.key.seed
        )
        values = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in flags.flatten(model.config).items()
            if name not in _RESOLVED_BY_RUN
        }
        values["freeze"] = canonical_freeze(model.config.optimizer.freeze, model.config.shape)
        if "bf16" in model.flags:
            values["bf16"] = model.config.bf16
        return values | self._step_flags | {"objective_schedule": schedule.canonical}


# Unless set, bf16 and vocab_size depend on machine and tokenizer. The tokenizer is compared by its
# fingerprint, the first sample by the parent that it follows from. The order of documents depends
# on their number too.
_RESOLVED_BY_RUN = {"bf16", "vocab_size", "tokenizer", "skip_samples", "data_order"}


def _read_last_step(metrics: Path) -> int:
    """Return the step of the last complete row of metrics.jsonl; 0 without one."""
    with contextlib.suppress(OSError, IndexError, ValueError, KeyError, TypeError):
        if metrics.is_file():
            with open(metrics, "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
                rows = stream.read(_TAIL_BYTES).split(b"\n")[:-1]
            step = parse_json(rows[-1])["step"]
            return step if type(step) is int else 0
    return 0
