"""What a study costs: steps, operations, hours and bytes, with every beginning shared and with none, and the longest wait.

Operations are counted as training counts them (`ModelConfig.training_flops`), at the expected lengths of documents and numbers of
predictions. Hours follow from the tokens a second that the manifest states, bytes from the parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaenc.finetune.grid import count
from megaenc.study.entries import Model
from megaenc.study.manifest import Manifest

if TYPE_CHECKING:
    from megaenc.study.graph import Graph
    from megaenc.study.pretrain_stage import PretrainNode

RESULT_BYTES = 272_000
"""Of one fine-tuning result on average: 18,000 of the study's form and size take 4.9 GB (docs/grid.md)."""


@dataclass(frozen=True)
class Amount:
    """What some steps amount to."""

    steps: int = 0
    tokens: int = 0
    flops: float = 0.0
    device_hours: float | None = 0.0
    """None where no rate is known"""

    def __add__(self, other: "Amount") -> "Amount":
        hours = (self.device_hours, other.device_hours)
        return Amount(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.flops + other.flops,
            None if None in hours else sum(hours),
        )


@dataclass(frozen=True)
class Disk:
    """Bytes, when all is done and nothing removed."""

    checkpoints: int
    """With the optimizer: the last of each run, and those that others need."""
    exports: int
    results: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.checkpoints + self.exports + self.results


@dataclass(frozen=True)
class Chain:
    """A chain of stages of which none can begin before what it needs of the one before."""

    hours: float | None
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Cost:
    """What a study costs."""

    shared: Amount
    """Pretraining, every beginning trained once."""
    alone: Amount
    """Pretraining, every model from its own first step; what is continued still begins with the study's own parent."""
    groups: Mapping[str, tuple[Amount, Amount]]
    """Both by group of models."""
    models: int
    """Each the end of one run."""
    evaluated: int
    """Models that are."""
    checkpoints: int
    """Those, and checkpoints on the way."""
    trainings: int
    """Fine-tuning runs, retrieval once for all its sets."""
    results: int
    """Fine-tuning results, as many as runs if every set were trained on."""
    finetune_hours: float | None
    disk: Disk
    at_the_branch: Chain
    """Where a branch begins as soon as its checkpoint is there, each run on the manifest's devices, fine-tunings all at once."""
    at_the_end: Chain
    """Where it waits for its parent's end."""


def cost_of(graph: "Graph") -> Cost:
    """Count `graph`."""
    hardware, manifest = graph.manifest.hardware, graph.manifest
    shared = {name: run.amount for name, run in graph.runs.items()}
    alone = {name: amount(manifest, run.model, 0, run.model.steps) for name, run in graph.runs.items()}
    groups: dict[str, tuple[Amount, Amount]] = {}
    for name, run in graph.runs.items():
        before = groups.get(run.model.group, (Amount(), Amount()))
        groups[run.model.group] = (before[0] + shared[name], before[1] + alone[name])
    order = {model.group: None for model in manifest.models}
    trainings = sum(grid.runs for grid in graph.grids.values())
    seconds = hardware.finetune_seconds
    return Cost(
        shared=sum(shared.values(), Amount()),
        alone=sum(alone.values(), Amount()),
        groups={group: groups[group] for group in order},
        models=len(manifest.models),
        evaluated=sum(model.evaluate for model in manifest.models),
        checkpoints=len(graph.exports),
        trainings=trainings,
        results=sum(grid.results for grid in graph.grids.values()),
        finetune_hours=trainings * seconds / 3600 if seconds or not trainings else None,
        disk=_disk(graph),
        at_the_branch=_longest(graph, shared, lambda run, parent: (run.at or parent.model.steps) - parent.at),
        at_the_end=_longest(graph, shared, lambda run, parent: parent.steps),
    )


def amount(manifest: Manifest, model: Model, after: int, last: int) -> Amount:
    """Return what the updates after + 1..last of a model's run take."""
    run, rate = model.run, manifest.hardware.rate(model.setting.size)
    packs, vocab_size = run.global_batch_size, manifest.vocab_size(model)
    flops = sum(
        share * steps * packs * work.flops(run.shape, vocab_size)
        for phase, share in model.trained(after, last)
        for work, steps in phase.parts
    )
    tokens = (last - after) * packs * run.data.seq_length
    return Amount(last - after, tokens, flops, tokens / rate / 3600 if rate else None)


def checkpoint_bytes(graph: "Graph", run: "PretrainNode") -> int:
    """Of one checkpoint: weights as they compute, master weights where these are bfloat16, and AdamW's two moments."""
    flags = run.model.run
    return flags.shape.parameters(graph.manifest.vocab_size(run.model)) * (14 if flags.bf16 else 12)


def _disk(graph: "Graph") -> Disk:
    checkpoints = sum((len(run.keep) + 1) * checkpoint_bytes(graph, run) for run in graph.runs.values())
    exports = 0
    for export in graph.exports.values():
        model = graph.runs[export.run].model
        exports += model.run.shape.parameters(graph.manifest.vocab_size(model)) * (2 if model.run.bf16 else 4)
    return Disk(checkpoints, exports, RESULT_BYTES * sum(grid.results for grid in graph.grids.values()))


def _longest(graph: "Graph", made: Mapping[str, Amount], until: Callable[["PretrainNode", "PretrainNode"], int]) -> Chain:
    """The chain that ends last; `until`: steps that a parent makes itself before its child can begin."""
    devices, seconds = graph.manifest.hardware.devices, graph.manifest.hardware.finetune_seconds
    begins: dict[str, tuple[float, tuple[str, ...]]] = {}

    def hours(run: "PretrainNode", steps: int) -> float:
        return (made[run.name].device_hours or 0.0) / devices * steps / run.steps

    ends: list[tuple[float, tuple[str, ...]]] = [(0.0, ())]
    for run in graph.runs.values():
        wait, chain = 0.0, ()
        if run.parent:
            parent = graph.runs[run.parent]
            before, chain = begins[run.parent]
            wait = before + hours(parent, until(run, parent))
        begins[run.name] = (wait, (*chain, run.id))
        ends.append((wait + hours(run, run.steps), begins[run.name][1]))
    for grid in graph.grids.values():
        export = graph.exports[grid.name]
        run = graph.runs[export.run]
        wait, chain = begins[run.name]
        end = wait + hours(run, export.step - run.at) + seconds / 3600
        ends.append((end, (*chain, export.id, grid.id)))
    known = all(amount.device_hours is not None for amount in made.values())
    longest = max(ends, key=lambda end: end[0])
    return Chain(longest[0] if known else None, longest[1])


def explained(graph: "Graph") -> dict[str, str]:
    """For each group of models, in words, how its shared steps come about, and how they compare with what was reported."""
    return {group: _explain(graph, group) for group in dict.fromkeys(model.group for model in graph.manifest.models)}


def _explain(graph: "Graph", group: str) -> str:
    runs = [run for run in graph.runs.values() if run.model.group == group]
    guessed = [run for run in runs if run.model.inferred]
    counted = [run for run in runs if not run.model.inferred]
    whole, said = sum(run.steps for run in runs), graph.manifest.reported.steps.get(group)
    parts = [_split(counted)]
    if guessed:
        parts.append(f"and {_steps(guessed):,} for the {len(guessed)} of its {len(runs)} models that are inferred")
    text = f"{whole:,} steps: " + " ".join(parts)
    if said is None:
        return text
    who, mine, starts = graph.manifest.reported.source or "reported", _steps(counted), _starts(counted)
    also = f"; {who} says {said:,}"
    if mine == said:
        return f"{text}{also}, the same" + (" without these" if guessed else "")
    if len(starts) > 1 and len(set(starts.values())) == 1 and said in starts.values():
        return f"{text}{also}, one of the {len(starts)} starts alone"
    tail = next((run.model.decay for run in counted if run.is_tail), 0)
    difference = abs(mine - said)
    also += (
        f", {difference:,} {'less' if said < mine else 'more'} than the {mine:,}"
        if guessed
        else f", {difference:,} " + ("less" if said < mine else "more")
    )
    if tail and difference % tail == 0:
        count = difference // tail
        also += f": as much as {'one decay' if count == 1 else f'{count} decays'} of {tail:,}; which, it does not say"
    return text + also


def _split(runs: list["PretrainNode"]) -> str:
    """How the steps of some runs come about, by where they begin."""
    starts = _starts(runs)
    if starts and len(set(starts.values())) == 1:
        (each,) = set(starts.values())
        of_one = [run for run in runs if _root(run) == next(iter(starts))]
        decays = [run for run in of_one]
        constant = each - sum(min(run.model.decay, run.steps) for run in decays)
        decay = decays[0].model.decay
        same = all(min(run.model.decay, run.steps) == decay for run in decays)
        inside = f" ({constant:,} undecayed and {len(decays)} x {decay:,} of decay)" if same else ""
        return f"{each:,}{inside} for each of {len(starts)} starts" if len(starts) > 1 else f"{each:,}{inside}"
    new = [run for run in runs if run.start == "new"]
    tails = [run for run in runs if run.is_tail]
    branches = [run for run in runs if run.start == "branch" and not run.is_tail]
    others = [run for run in runs if run.start == "weights"]
    said = [
        f"{_times(new)} from new weights" if new else "",
        f"{_steps(branches):,} in {len(branches)} {'branches' if len(branches) > 1 else 'branch'}" if branches else "",
        f"{_times(tails)} of decay alone" if tails else "",
        f"{_steps(others):,} in {count(len(others), 'run')} on finished models" if others else "",
    ]
    return f"{', '.join(filter(None, said))}" + (f" ({_steps(runs):,})" if sum(map(bool, said)) > 1 else "")


def _starts(runs: list["PretrainNode"]) -> dict[str, int]:
    """Where all continue finished models: the steps by the model that is continued."""
    found: dict[str, int] = {}
    for run in runs:
        found[_root(run)] = found.get(_root(run), 0) + run.steps
    return {} if "" in found else found


def _root(run: "PretrainNode") -> str:
    return run.model.after


def _times(runs: list["PretrainNode"]) -> str:
    same = {run.steps for run in runs}
    return f"{len(runs)} x {same.pop():,}" if len(same) == 1 else f"{_steps(runs):,} in {len(runs)} runs"


def _steps(runs: list["PretrainNode"]) -> int:
    return sum(run.steps for run in runs)
