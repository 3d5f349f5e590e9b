"""What the steps of a run compute: each objective of each phase, its predictions and operations."""

from collections.abc import Iterator
from dataclasses import dataclass

from megaenc.data.vocabulary import Vocabulary
from megaenc.estimate.documents import Documents
from megaenc.model.config import ModelConfig
from megaenc.objectives import Attention, Objective, Schedule
from megaenc.training.settings import PretrainSettings


@dataclass(frozen=True)
class Work:
    """What an objective makes of a pack, on average; the steps that train it are alike."""

    objective: str
    tokens: int
    """of a pack"""
    predicted: float
    """positions of it that the head computes"""
    squares: float
    """sum of its documents' squared lengths"""
    seen: float
    """sum of the squares of the parts of documents that see each other: all, none, or prefixes"""

    @property
    def causal(self) -> bool:
        """Whether attention looks back alone, in most of it."""
        return self.seen < self.squares / 2

    def body_flops(self, shape: ModelConfig) -> float:
        """Matrix products of the layers, forward and backward."""
        return float(shape.body_flops_per_token() * self.tokens)

    def attention_flops(self, shape: ModelConfig) -> float:
        """Attention of the layers, forward and backward: 6 (s^2 + p^2) q a layer."""
        return shape.attention_flops(1, prefix=0) * (self.squares + self.seen)

    def head_flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """The output layer at the predicted positions."""
        return 6.0 * shape.hidden_size * vocab_size * self.predicted

    def flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Of a pack, as `ModelConfig.training_flops` counts them: recomputation and vocabulary padding left out."""
        return self.body_flops(shape) + self.attention_flops(shape) + self.head_flops(shape, vocab_size)


@dataclass(frozen=True)
class PhaseWork:
    """A phase of the schedule: steps first..last, and how many of them each objective has on average."""

    text: str
    first: int
    last: int
    parts: tuple[tuple[Work, float], ...]
    batches: tuple[tuple[int, int], ...]
    """(packs of a step, steps with so many): one unless --rampup-batch-size"""


def phases(settings: PretrainSettings, vocab_size: int, docs: Documents) -> list[PhaseWork]:
    """The phases of the run that are still to be made: a branch begins after the step of its parent. Raises InputError."""
    any_vocabulary = Vocabulary(vocab_size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")  # any with a mask token
    schedule = Schedule.build(settings.objective_schedule, settings.total_iters, any_vocabulary, settings.seed)
    done = settings.start.branch_at or 0
    found = []
    for phase in schedule.phases:
        first = max(phase.first_step, done + 1)
        if first > phase.last_step:
            continue
        steps = phase.last_step - first + 1
        pairs = zip(phase.choices, phase.shares, strict=True)
        parts = tuple((work_of(choice.start, choice.end, settings, docs), steps * share) for choice, share in pairs)
        found.append(PhaseWork(phase.text, first, phase.last_step, parts, tuple(_batches(settings, first, phase.last_step))))
    return found


def work_of(start: Objective, end: Objective, settings: PretrainSettings, docs: Documents) -> Work:
    """What an objective computes whose options go from those of `start` to those of `end`, at their middle."""
    length = settings.data.seq_length
    begins = docs.pieces if start.shift else 0.0  # no position stands before the first token of a document
    predicted, seen = length - begins, {Attention.CAUSAL: 0.0, Attention.BIDIRECTIONAL: docs.squares}.get(start.attention)
    if hasattr(start, "mask"):
        predicted = (start.mask + end.mask) / 2 * (length - begins - docs.special)
    if start.attention is Attention.PREFIX:
        low, high = getattr(start, "low", 0.0), getattr(start, "high", 1.0)
        after = length * (1 - (low + high) / 2) + docs.pieces / 2  # a prefix is rounded down
        predicted = min(predicted, after)
        seen = docs.squares * (low * low + low * high + high * high) / 3
    return Work(start.describe(end=end), length, max(predicted, 0.0), docs.squares, seen)


def _batches(settings: PretrainSettings, first: int, last: int) -> Iterator[tuple[int, int]]:
    """How many of the steps have how many packs."""
    if not settings.rampup_batch_size:  # its rule is megatron-core's, which takes a while to import
        yield settings.global_batch_size, last - first + 1
        return
    sizes, counts = settings.batch_sizes, {}
    growing = min(last, len(sizes.starts))
    for step in range(first, growing + 1):
        counts[sizes.size(step)] = counts.get(sizes.size(step), 0) + 1
    counts[sizes.full] = counts.get(sizes.full, 0) + max(0, last - max(first - 1, growing))
    yield from counts.items()
