"""What a run begins with: new weights, a branch of another run, or another run's weights."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal, Self

PROGRESS_FIELDS = ("tokens", "predicted_tokens", "flops", "skipped_updates", "loss_spikes")
"""What metrics and checkpoints count from a run's first step on."""


@dataclass(frozen=True)
class Ancestor:
    """A run whose training is in the first weights of another, or a Hugging Face model that they came from."""

    run: str
    """Its folder, as given."""
    step: int
    schedule: str
    tokens: int
    family: str = ""
    """Of a Hugging Face model: its type there. What it was trained on is not known, so `schedule` is what it was made for."""
    context: int = 0
    """Of a Hugging Face model: the tokens that it reads at most."""
    generation: dict[str, Any] = field(default_factory=dict, hash=False)
    """Of a Hugging Face model: how it writes text, the tokens at which it stops among it (its generation_config.json)."""
    total: int = 0
    """Steps of that run when it was left: `step` where it had reached its end; 0 where that is not known."""


@dataclass(frozen=True)
class RunInit:
    """What a run begins with; run.json holds it, so that the run goes on without the other being there."""

    kind: Literal["new", "branch", "weights"] = "new"
    run: str = ""
    """The other run's folder, as given."""
    at: int = 0
    """The step of its checkpoint."""
    parent: str = ""
    """The digest of its identity."""
    skip_samples: int = 0
    """Samples of the data that come before those of step 1."""
    tokens: int = 0
    """What a branch's parent had read when it was left, and had done, so that a branch counts on."""
    predicted_tokens: int = 0
    flops: float = 0.0
    skipped_updates: int = 0
    loss_spikes: int = 0
    skip_packs: tuple[str, ...] = ()
    """What a branch's parent leaves out."""
    before: tuple[Ancestor, ...] = ()
    """Whose weights step 1 began with, the oldest first."""

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Self:
        """Return the start in run.json; new weights if it says nothing. Raises TypeError for anything that no run wrote."""
        values = facts.get("start", {})
        if not isinstance(values, dict):
            raise TypeError(f"start is a {type(values).__name__}")
        before = tuple(Ancestor(**stage) for stage in values.get("before", ()))
        return cls(**{**values, "skip_packs": tuple(values.get("skip_packs", ())), "before": before})

    def check(self, source: str) -> None:
        """Raise InputError, naming `source` and the field, for a value of another type than a run writes."""
        from megaenc import flags  # readers of a run's folder need no command line

        for part in (self, *self.before):
            plain = {name: value for name, value in vars(part).items() if not isinstance(value, tuple | dict)}
            flags.replace_fields(part, plain, source=source)

    @property
    def step(self) -> int:
        """Updates that lie behind the first one of this run."""
        return self.at if self.kind == "branch" else 0

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two starts the same; nothing for a run from new weights that reads its data from the beginning."""
        what = {"branch": "branch at step", "weights": "weights of step"}.get(self.kind)
        found = {"start": f"{what} {self.at} of run {self.parent}"} if what else {}
        return found | ({"skip_samples": self.skip_samples} if self.skip_samples else {})

    def describe(self) -> str:
        """For the console: `from new weights`, `as a branch of runs/a at step 15`."""
        if self.kind == "branch":
            return f"as a branch of {self.run} at step {self.at:,}"
        what = f"from the weights of {self.run} at step {self.at:,} with a new optimizer" if self.run else "from new weights"
        return what + (f", {self.skip_samples:,} samples into the data" if self.skip_samples else "")


NEW_WEIGHTS = RunInit()


def identity_digest(identity: dict[str, Any]) -> str:
    """16 hexadecimal digits that tell a run from every other."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
