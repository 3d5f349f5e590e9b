"""The card of an export: what the model was trained on doing, and at which position each of its predictions stands."""

from dataclasses import dataclass
from pathlib import Path

from megaenc.objectives import Attention, Objective, Schedule
from megaenc.training.start import NEW_WEIGHTS, Start


@dataclass(frozen=True)
class Provenance:
    """Where an export comes from."""

    schedule_text: str
    """As it was given."""
    schedule: Schedule
    step: int
    total_iters: int
    tokens: int
    start: Start = NEW_WEIGHTS

    @property
    def last_objectives(self) -> tuple[Objective, ...]:
        """What the last updates before the checkpoint were for, the most frequent first: those of a twentieth of the run's steps.

        Each as it was last trained. Step 0 has none behind it and is taken for the first one.
        """
        last = max(self.step, 1)
        first = max(1, last + 1 - max(1, self.total_iters // 20))
        steps: dict[str, float] = {}
        objectives: dict[str, Objective] = {}
        for phase in self.schedule.phases:
            here, there = max(phase.first_step, first), min(phase.last_step, last)
            for choice, share in zip(phase.choices, phase.shares, strict=True):
                if here <= there:
                    steps[choice.text] = steps.get(choice.text, 0) + share * (there - here + 1)
                    objectives[choice.text] = phase.objective(choice, there)
        return tuple(objectives[text] for text in sorted(steps, key=lambda text: -steps[text]))

    def read_as(self, attention: Attention) -> Objective:
        """The objective that an export under `attention` is used for: the most frequent last one of that attention, if any."""
        last = self.last_objectives
        return next((objective for objective in last if objective.attention == attention), last[0])


def card(name: str, provenance: Provenance, attention: Attention) -> str:
    """README.md, with the metadata that the Hub reads, of an export that reads its text under `attention`."""
    objective = provenance.read_as(attention)
    causal = attention == Attention.CAUSAL
    rows = "\n".join(
        f"| `{one.describe()}` | {one.attention} | token {_moved(one.shift)} |" for one in provenance.last_objectives
    )
    return f"""---
library_name: transformers
pipeline_tag: {"text-generation" if causal else "fill-mask"}
tags: [megaenc]
---

# {name}

A text {"decoder" if causal else "encoder"} pretrained on `{provenance.schedule_text}` over {provenance.total_iters:,} steps;
this is step {provenance.step:,}, after {provenance.tokens:,} tokens. {_descent(provenance.start)}Attention in this
export: {attention}.

## Where predictions stand

| last trained | under attention | the output at position i predicts |
|---|---|---|
{rows}

{_how_to_read(objective, attention)}
"""


def _descent(start: Start) -> str:
    """From which other runs it comes; by the names of their folders, for where these lie is nobody else's business."""
    parts = [
        f"Its first weights are those of `{Path(stage.run).name}`, a Hugging Face model of type {stage.family}. "
        for stage in start.before
        if stage.family
    ]
    stages = [
        f"`{Path(stage.run).name}` to step {stage.step:,} (`{stage.schedule}`, {stage.tokens:,} tokens)"
        for stage in start.before
        if not stage.family
    ]
    if stages:
        parts.append(f"{'They' if parts else 'Its first weights'} were trained in other runs: {', then '.join(stages)}. ")
    if start.kind == "branch":
        parts.append(f"It is a branch of the run `{Path(start.run).name}` at step {start.at:,}, and the same run up to there. ")
    return "".join(parts)


def _moved(shift: int) -> str:
    return f"i + {shift}" if shift else "i"


def _how_to_read(objective: Objective, attention: Attention) -> str:
    shift, name = objective.shift, objective.describe()
    parts = []
    if attention == Attention.CAUSAL and shift == 1:
        parts.append("The output at position i predicts token i + 1, as transformers' causal language models do.")
    elif shift:
        parts.append(
            f"**Predictions are moved by {shift} position{'s' if shift > 1 else ''}.** `{name}` predicts a token from the output "
            f"{shift} before it: for the mask token at position i read the logits at position i - {shift}. "
            '`transformers.pipeline("fill-mask")` reads position i and would answer for another token; '
            "`megaenc fill-mask` moves the logits by itself."
        )
    else:
        parts.append(f"`{name}` predicts a token where it stands: the output at position i is for token i.")
    if objective.attention != attention:
        parts.append(f"It was trained under {objective.attention} attention, and this export reads its text under {attention}.")
    parts.append(f"`config.json` holds the same as `prediction_shift: {shift}`.")
    return "\n".join(parts)
