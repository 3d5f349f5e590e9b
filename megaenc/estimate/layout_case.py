"""A model in a layout, in numbers: what each rank holds and runs; and what the steps of a run compute."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megaenc.backend.parallel_config import ParallelConfig
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.estimate.length_model import LengthModel
from megaenc.model.config import ModelConfig, padded_vocab_size
from megaenc.objectives import Attention, Objective, Schedule
from megaenc.training.config import PretrainConfig


@dataclass(frozen=True)
class HypotheticalLayout(ParallelConfig):
    """A layout for a machine that need not be this one; nothing of megatron-core or torch is imported to read it."""

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        text, stages = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        if not text or stages == 1 or self.num_layers_per_virtual_pipeline_stage:
            return super().layers_per_chunk(num_layers)
        return read_split(text, num_layers, stages)

    def _check_overlap(self) -> None:
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise InputError("--overlap-param-gather: needs --use-distributed-optimizer and --overlap-grad-reduce")


def read_split(text: str, num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each part that Megatron's notation says, Et*6|t*7|t*7|t*6L. InputError if it is none of this model."""
    flag = f"--pipeline-model-parallel-layout {text}"
    spread = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        spread = re.sub(repeated, lambda found: found[1] * int(found[2]), spread)
    parts = spread.split("|")
    if "".join(parts) != f"E{'t' * num_layers}L":
        raise InputError(f"{flag}: expected E, t for each of the {num_layers} layers, then L, with | between parts")
    if len(parts) % stages or not all(parts):
        raise InputError(f"{flag}: found {len(parts)} parts, expected {stages} or a multiple of it, none of them empty")
    return tuple(part.count("t") for part in parts)


def write_split(split: Sequence[int]) -> str:
    """Return the same in Megatron's notation."""
    return f"E{'|'.join(f't*{layers}' if layers > 1 else 't' * layers for layers in split)}L"


@dataclass(frozen=True)
class CostTerm:
    """One number of an estimate, with where it comes from."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True)
class PipelineStage:
    """What a pipeline stage holds."""

    number: int
    layers: int
    parameters: int
    """of one of its ranks: matrices are shared by the tensor-parallel ranks, norms are on each"""
    first: bool
    """has the embedding"""
    last: bool
    """has the head"""


@dataclass(frozen=True)
class LayoutCase:
    """A model in a layout.

    Letters in formulas: S tokens of a row, N predicted of them, H hidden, F inner, q and k widths of queries and keys, V rows of
    the padded vocabulary; t tensor-parallel and d data-parallel ranks, p stages, m micro-batches, w bytes a number.
    """

    shape: ModelConfig
    vocab_size: int
    layout: ParallelConfig
    split: tuple[int, ...]
    """layers of each part, in the order of the data"""
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    bf16: bool

    @classmethod
    def of(cls, settings: PretrainConfig, vocab_size: int, gpus: int) -> "LayoutCase":
        """Return what `settings` ask for."""
        split, batches = settings.layout.layers_per_chunk(settings.shape.num_layers), (settings.micro_batch_size, settings.global_batch_size)
        return cls(settings.shape, vocab_size, settings.layout, split, gpus, *batches, settings.data.seq_length, settings.bf16)

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return self.layout.tensor_model_parallel_size

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.pipeline_model_parallel_size

    @property
    def data(self) -> int:
        """Copies of the model."""
        return self.gpus // (self.tensor * self.stages)

    @property
    def turns(self) -> int:
        """Parts that each stage holds; 1 unless interleaved."""
        return len(self.split) // self.stages

    @property
    def micro_batches(self) -> int:
        """Of a rank and step."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def row(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.seq_length

    @property
    def width(self) -> int:
        """Bytes of a number that layers compute with."""
        return 2 if self.bf16 else 4

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of H numbers a token."""
        return self.row * self.shape.hidden_size * self.width

    @property
    def sharded(self) -> int:
        """Ranks that share norms and residuals."""
        return self.tensor if self.layout.sequence_parallel else 1

    @property
    def keys(self) -> int:
        """Width of the keys of all groups."""
        return self.shape.num_query_groups * self.shape.head_dim

    @property
    def rows(self) -> int:
        """Rows of the embedding on each rank, padding included."""
        return padded_vocab_size(self.vocab_size, self.shape.make_vocab_size_divisible_by, self.tensor) // self.tensor

    @property
    def layer_parameters(self) -> int:
        """Of a layer, on each of its ranks."""
        shape, widths = self.shape, self.shape.linear_shapes(self.tensor)
        norms = 2 * shape.hidden_size + shape.qk_layernorm * 2 * shape.head_dim
        return sum(map(math.prod, widths.values())) + shape.add_qkv_bias * widths["linear_qkv"][0] + norms

    def stage(self, number: int) -> PipelineStage:
        """Return what stage `number` (0, 1, ...) holds."""
        layers, first, last = sum(self.split[number :: self.stages]), number == 0, number == self.stages - 1
        matrix = self.rows * self.shape.hidden_size
        own_head = self.shape.untie_embeddings_and_output_weights or not first  # tied, the last stage has a copy of its own
        parameters = layers * self.layer_parameters + first * matrix + last * (own_head * matrix + self.shape.hidden_size)
        return PipelineStage(number, layers, parameters, first, last)

    def every_stage(self) -> list[PipelineStage]:
        """Return what each holds."""
        return [self.stage(number) for number in range(self.stages)]


@dataclass(frozen=True)
class ObjectiveWork:
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
        """Return those of the layers' matrix products, forward and backward."""
        return float(shape.layer_flops_per_token() * self.tokens)

    def attention_flops(self, shape: ModelConfig) -> float:
        """Return those of the layers' attention, forward and backward: 6 (s^2 + p^2) q a layer."""
        return shape.attention_flops(1, prefix=0) * (self.squares + self.seen)

    def head_flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Return those of the output layer at the predicted positions."""
        return 6.0 * shape.hidden_size * vocab_size * self.predicted

    def flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Return those of a pack, as `ModelConfig.training_flops` counts them: recomputation and vocabulary padding left out."""
        return self.body_flops(shape) + self.attention_flops(shape) + self.head_flops(shape, vocab_size)


@dataclass(frozen=True)
class PhaseWork:
    """A phase of the schedule: steps first..last, and how many of them each objective has on average."""

    text: str
    first: int
    last: int
    parts: tuple[tuple[ObjectiveWork, float], ...]
    batches: tuple[tuple[int, int], ...]
    """(packs of a step, steps with so many): one unless --rampup-batch-size"""


def phases(settings: PretrainConfig, vocab_size: int, docs: LengthModel) -> list[PhaseWork]:
    """Return the phases that are still to be made: a branch begins after the step of its parent. Raises InputError."""
    any_vocabulary = Vocabulary(vocab_size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")  # any with a mask token
    schedule = Schedule.build(settings.objective_schedule, settings.total_iters, any_vocabulary, settings.seed)
    found = []
    for phase in schedule.phases:
        first, last = max(phase.first_step, (settings.start.branch_at or 0) + 1), phase.last_step
        if first <= last:
            pairs = zip(phase.choices, phase.shares, strict=True)
            works = [(work_of(choice.start, choice.end, settings, docs), share * (last - first + 1)) for choice, share in pairs]
            found.append(PhaseWork(phase.text, first, last, tuple(works), _batches(settings, first, last)))
    return found


def work_of(start: Objective, end: Objective, settings: PretrainConfig, docs: LengthModel) -> ObjectiveWork:
    """Return what an objective computes whose options go from those of `start` to those of `end`, at their middle."""
    length = settings.data.seq_length
    begins = docs.pieces if start.shift else 0.0  # no position stands before the first token of a document
    predicted, seen = length - begins, {Attention.CAUSAL: 0.0, Attention.BIDIRECTIONAL: docs.squares}.get(start.attention)
    if hasattr(start, "mask"):
        predicted = (start.mask + end.mask) / 2 * (length - begins - docs.special)
    if start.attention is Attention.PREFIX:
        low, high = getattr(start, "low", 0.0), getattr(start, "high", 1.0)
        predicted = min(predicted, length * (1 - (low + high) / 2) + docs.pieces / 2)  # a prefix is rounded down
        seen = docs.squares * (low * low + low * high + high * high) / 3
    return ObjectiveWork(start.describe(end=end), length, max(predicted, 0.0), docs.squares, seen)


def _batches(settings: PretrainConfig, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return (packs, how many of the steps have so many)."""
    if not settings.rampup_batch_size:  # its rule is megatron-core's, which takes a while to import
        return ((settings.global_batch_size, last - first + 1),)
    sizes = settings.batch_sizes
    growing = min(last, len(sizes.starts))
    counts = Counter(sizes.size(step) for step in range(first, growing + 1))
    counts[sizes.full] += max(0, last - max(first - 1, growing))
    return tuple(counts.items())
