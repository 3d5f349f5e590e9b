"""The starting point of a run: new weights, or those of another run.

Those of another run are taken as a branch, or without its optimizer.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megaenc.console import truncate_text
from megaenc.errors import InputError
from megaenc.json_files import read_json_object

RUN_FORMAT = 1
"""Format of a run directory, the field `format` of run.json: another number for one that this
version cannot read."""
PROGRESS_FIELDS = ("tokens", "predicted_tokens", "flops", "skipped_updates", "loss_spikes")
"""Counters of metrics and checkpoints, summed from the run's first step on."""


@dataclass(frozen=True)
class Ancestor:
    """Earlier run or Hugging Face model that weights come from (`RunInit.before`).

    `run` is its directory or name, `step` that of the checkpoint, `tokens` are those read up to it,
    also by a run that it branches from; for a Hugging Face model both are 0. `schedule` is the text
    of its objective schedule, for a Hugging Face model of its one objective. Only that model has
    `family` (its model type), `context` (maximum number of tokens), `generation` (content of
    generation_config.json) and `config_fields` (those of config.json that exports keep); they are
    empty or 0 for a run. `total` is the planned number of steps of a run, 0 if unknown.
    """

    run: str
    """Its directory or name, as given in the command."""
    step: int
    schedule: str
    tokens: int
    family: str = ""
    """Model type of a Hugging Face model, whose `schedule` is the objective of its architecture;
    empty for a run."""
    context: int = 0
    """Maximum sequence length of a Hugging Face model."""
    generation: dict[str, Any] = field(default_factory=dict, hash=False)
    """Content of generation_config.json of a Hugging Face model."""
    total: int = 0
    """Planned number of steps of the run: equal to `step` if it was complete; 0 if unknown."""
    config_fields: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of a Hugging Face model's config.json that exports keep: classifier pooling and ids of
    special tokens."""


@dataclass(frozen=True)
class RunInit:
    """Starting point of a run: new weights, or step and counters of another run.

    `resolve_run_init` finds it; run.json holds it, so that a resume does not need the other run.
    `kind` is new, branch (with optimizer and data position of the other run) or weights. `run` is
    the other run's directory, `at` the step of its checkpoint and `parent` its `identity_digest`;
    without another run they are empty and 0. `before` are the earlier runs and Hugging Face models
    of the weights, the oldest first. The first `skip_samples` samples of the data are not read. A
    branch also takes PROGRESS_FIELDS (`tokens`, `predicted_tokens`, `flops`, `skipped_updates` and
    `loss_spikes` up to `at`) and `skip_packs` (values of the flag) from its parent; else they are 0
    and empty.
    """

    kind: Literal["new", "branch", "weights"] = "new"
    run: str = ""
    """Directory of the other run, as given in the command."""
    at: int = 0
    """Step of the other run's checkpoint."""
    parent: str = ""
    """`identity_digest` of the other run."""
    skip_samples: int = 0
    """Number of samples to skip before step 1."""
    tokens: int = 0
    """Tokens that a branch's parent had read at step `at`; this and the next fields are the initial
    PROGRESS_FIELDS."""
    predicted_tokens: int = 0
    flops: float = 0.0
    skipped_updates: int = 0
    loss_spikes: int = 0
    skip_packs: tuple[str, ...] = ()
    """Packs that a branch's parent skips."""
    before: tuple[Ancestor, ...] = ()
    """Earlier runs and models that the weights come from, the oldest first."""

    @property
    def step(self) -> int:
        """Return the step before this run's first one.

        It is `at` for a branch, whose steps continue those of its parent, otherwise 0.
        """
        return self.at if self.kind == "branch" else 0

    @property
    def identity(self) -> dict[str, Any]:
        """Return the entries `start` and `skip_samples` of a run's identity, JSON-ready.

        `start`, such as `weights of step 15 of run DIGEST` or `branch at step ...`, is left out for
        new weights, and `skip_samples` if it is 0.
        """
        kind = {"branch": "branch at step", "weights": "weights of step"}.get(self.kind)
        start = {"start": f"{kind} {self.at} of run {self.parent}"} if kind else {}
        return start | ({"skip_samples": self.skip_samples} if self.skip_samples else {})

    def describe(self) -> str:
        """Return the starting point as text for the console.

        It is `from new weights`, or such as `as a branch of runs/a at step 15` or `from the weights
        of runs/a at step 15 with a new optimizer`, then samples that are skipped.
        """
        if self.kind == "branch":
            return f"as a branch of {self.run} at step {self.at:,}"
        text = (
            f"from the weights of {self.run} at step {self.at:,} with a new optimizer"
            if self.run
            else "from new weights"
        )
        return text + (
            f", {self.skip_samples:,} samples into the data" if self.skip_samples else ""
        )


NEW_WEIGHTS = RunInit()


def read_run_metadata(file: Path) -> tuple[dict[str, Any], RunInit]:
    """Return the content of a run's run.json and the RunInit in it.

    Only `format`, `identity` and `start` are checked: other fields may be missing or wrong. Without
    `start` it is that of new weights.

    Args:
        file: Path of run.json.

    Raises:
        InputError: The file cannot be read, has the format of another version, lacks a valid
            `identity`, or a field of `start` is invalid.
    """
    from megaenc import flags  # lazily, because readers of run.json need no command line

    expected = "expected a file written by a run"
    metadata = read_json_object(file, expected.removeprefix("expected "))
    run_format = metadata.get("format")
    if type(run_format) is not int or run_format != RUN_FORMAT:
        text = "none" if run_format is None else truncate_text(str(run_format), 40)
        remedy = (
            "resume, branch and export it with that version, or begin anew in another directory"
        )
        raise InputError(
            f"{file}: field `format`: found {text}, expected {RUN_FORMAT}; another version of "
            f"megaenc wrote this run: {remedy}"
        )
    identity = metadata.get("identity")
    if not identity or not isinstance(identity, dict):
        raise InputError(f"{file}: field `identity`: found no settings of a run; {expected}")
    values = metadata.get("start", {})
    if not isinstance(values, dict):
        raise InputError(f"{file}: field `start`: found no object; {expected}")
    try:
        values = dict(values)
        before = tuple(Ancestor(**stage) for stage in values.pop("before", ()))
        skip_packs = tuple(values.pop("skip_packs", ()))
        start = RunInit(**values, skip_packs=skip_packs, before=before)
    except (TypeError, ValueError) as error:
        raise InputError(f"{file}: field `start`: {error}; {expected}") from None
    for part in (start, *before):
        plain = {
            name: value for name, value in vars(part).items() if not isinstance(value, tuple | dict)
        }
        flags.replace_fields(part, plain, source=f"{file}: start")  # checks the type of each field
    return metadata, start


def identity_digest(identity: dict[str, Any]) -> str:
    """Return the digest of a run's identity, equal for equal runs.

    It is the first 16 hexadecimal digits of the SHA-256 of its sorted JSON.

    Args:
        identity: `Plan.identity`, also as read from run.json.
    """
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
