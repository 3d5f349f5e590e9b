"""Sizes of a model in a parallel layout, and the computation of each objective and phase."""

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
from megaenc.objectives import GPTBERT, Attention, MaskedDiffusion, Objective, Schedule
from megaenc.training.config import PretrainConfig


@dataclass(frozen=True)
class HypotheticalLayout(ParallelConfig):
    """Parallel layout of another machine, with ParallelConfig's flags; parsed without megatron-core and torch."""

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers of each virtual stage in forward order, by the layout's flags."""
        text, stages = self.pipeline_model_parallel_layout, self.pipeline_model_parallel_size
        if not text or stages == 1 or self.num_layers_per_virtual_pipeline_stage:
            return super().layers_per_chunk(num_layers)
        return parse_split(text, num_layers, stages)


def parse_split(text: str, num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers per part of Megatron's pipeline notation, such as Et*6|t*7|t*7|t*6L; raise InputError if invalid."""
    flag = f"--pipeline-model-parallel-layout {text}"
    expanded = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        expanded = re.sub(pattern, lambda match: match[1] * int(match[2]), expanded)
    parts = expanded.split("|")
    if "".join(parts) != f"E{'t' * num_layers}L":
        raise InputError(f"{flag}: expected E, t for each of the {num_layers} layers, then L, with | between parts")
    if len(parts) % stages or not all(parts):
        raise InputError(f"{flag}: found {len(parts)} parts, expected {stages} or a multiple of it, none of them empty")
    return tuple(part.count("t") for part in parts)


def format_split(split: Sequence[int]) -> str:
    """Return layers per part in Megatron's pipeline notation, such as Et*6|t*7|t*7|t*6L for (6, 7, 7, 6)."""
    return f"E{'|'.join(f't*{layers}' if layers > 1 else 't' * layers for layers in split)}L"


@dataclass(frozen=True)
class CostTerm:
    """One term of an estimate: its name, value, unit, and formula as text."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage: its number, layers, parameters on one rank, and whether it has the embedding and the head."""

    index: int
    layers: int
    parameters: int
    """parameters of one rank: matrices are sharded over tensor-parallel ranks, norms are replicated"""
    has_embedding: bool

    has_head: bool


@dataclass(frozen=True)
class LayoutCase:
    """Model, vocabulary size, parallel layout, number of devices, batch sizes, pack length and dtype of a run.

    Letters in formulas: S tokens of a micro-batch, N predictions, H hidden size, F FFN size, q and k sizes of queries and keys,
    V padded vocabulary size; t tensor-parallel and d data-parallel ranks, p stages, m micro-batches, w bytes per value.
    """

    shape: ModelConfig
    vocab_size: int
    layout: ParallelConfig
    split: tuple[int, ...]
    """layers of each virtual stage, in forward order"""
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    bf16: bool
    newton_schulz_steps: int = 0
    """iterations of Muon's orthogonalization; 0 with another optimizer"""

    @classmethod
    def from_config(cls, config: PretrainConfig, vocab_size: int, gpus: int) -> "LayoutCase":
        """Return the LayoutCase of a pretraining config with a vocabulary of `vocab_size` on `gpus` devices."""
        split, batches = (
            config.layout.layers_per_chunk(config.shape.num_layers),
            (config.micro_batch_size, config.global_batch_size),
        )
        muon = config.optimizer.muon_num_ns_steps if config.optimizer.optimizer == "muon" else 0
        return cls(config.shape, vocab_size, config.layout, split, gpus, *batches, config.data.seq_length, config.bf16, muon)

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of tensor-parallel ranks, which share the matrices of each layer."""
        return self.layout.tensor_model_parallel_size

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages."""
        return self.layout.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of model replicas: devices / (tensor-parallel ranks x pipeline stages)."""
        return self.gpus // (self.tensor_parallel_size * self.num_stages)

    @property
    def virtual_stages(self) -> int:
        """Return the number of virtual stages on each pipeline stage; 1 without an interleaved schedule."""
        return len(self.split) // self.num_stages

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches per step of the rank with most packs."""
        multiple = self.num_stages if self.virtual_stages > 1 else 1
        rows = math.ceil(self.largest_share / self.micro_batch_size)
        return math.ceil(rows / multiple) * multiple

    @property
    def largest_share(self) -> int:
        """Return the packs of a global batch of the data-parallel rank with most."""
        return math.ceil(self.global_batch_size / self.data_parallel_size)

    @property
    def packs_at_once(self) -> int:
        """Return the packs of the largest micro-batch, at most --micro-batch-size."""
        return math.ceil(self.largest_share / self.micro_batches)

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of the largest micro-batch: packs x tokens of a pack."""
        return self.packs_at_once * self.seq_length

    @property
    def value_bytes(self) -> int:
        """Return the bytes of one value of an activation: 2 in bfloat16, 4 in float32."""
        return 2 if self.bf16 else 4

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of the hidden states of all tokens of a micro-batch after one layer."""
        return self.micro_batch_tokens * self.shape.hidden_size * self.value_bytes

    @property
    def sequence_shards(self) -> int:
        """Return the number of ranks that divide norms and residuals by sequence parallelism; 1 without it."""
        return self.tensor_parallel_size if self.layout.sequence_parallel else 1

    @property
    def kv_size(self) -> int:
        """Return the width of a token's keys (and of its values): query groups x head dimension."""
        return self.shape.num_query_groups * self.shape.head_dim

    @property
    def vocab_rows(self) -> int:
        """Return the number of rows of the padded embedding matrix on each tensor-parallel rank."""
        return (
            padded_vocab_size(self.vocab_size, self.shape.make_vocab_size_divisible_by, self.tensor_parallel_size)
            // self.tensor_parallel_size
        )

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer on each tensor-parallel rank."""
        shape, widths = self.shape, self.shape.linear_shapes(self.tensor_parallel_size)
        norms = shape.norms_per_layer * shape.norm_size(shape.hidden_size)
        norms += shape.qk_layernorm * 2 * shape.norm_size(shape.head_dim)
        return sum(map(math.prod, widths.values())) + shape.add_qkv_bias * widths["linear_qkv"][0] + norms

    def build_stage(self, number: int) -> PipelineStage:
        """Return pipeline stage `number`, counted from 0, with its layers and one rank's parameters."""
        layers, first, last = sum(self.split[number :: self.num_stages]), number == 0, number == self.num_stages - 1
        matrix = self.vocab_rows * self.shape.hidden_size
        own_head = self.shape.untie_embeddings_and_output_weights or not first  # a tied head is a copy on the last stage
        # The norm of the embedding (--embedding-norm) is in place of one of the first layer.
        head = self.shape.norm_size(self.shape.hidden_size) + self.shape.prediction_head_size
        head += own_head * matrix + self.shape.output_layer_bias * self.vocab_rows
        parameters = layers * self.layer_parameters + first * matrix + last * head
        return PipelineStage(number, layers, parameters, first, last)

    def build_stages(self) -> list[PipelineStage]:
        """Return all pipeline stages in forward order."""
        return [self.build_stage(number) for number in range(self.num_stages)]


@dataclass(frozen=True)
class ObjectiveWork:
    """Average work of one pack under an objective: tokens, predictions, and pairs of tokens that attend to each other."""

    objective: str
    tokens: int
    """tokens of a pack"""
    predicted: float
    """positions whose logits are computed"""
    squares: float
    """sum of the squared document lengths"""
    visible_squares: float
    """sum of the squared lengths of bidirectional parts: full documents, none, or prefixes"""
    local_pairs: float = 0.0
    """ordered pairs of tokens in a document within the window of local layers; 0 without such layers"""
    visible_local_pairs: float = 0.0
    """those in bidirectional parts"""
    selects_rows: bool = True
    """whether the last layer computes only the predicted positions after its attention"""

    @property
    def is_causal(self) -> bool:
        """Return whether attention is mostly causal: bidirectional parts are below half of the squared lengths."""
        return self.visible_squares < self.squares / 2

    def body_flops(self, shape: ModelConfig) -> float:
        """Return the FLOPs of the layers' matrix products in a pack, forward and backward, with all positions in all layers."""
        return float(shape.layer_flops_per_token() * self.tokens)

    @property
    def unneeded_tokens(self) -> float:
        """Return the tokens of a pack that the last layer leaves out after its attention."""
        return self.tokens - self.predicted if self.selects_rows and self.predicted else 0.0

    def unneeded_flops(self, shape: ModelConfig) -> float:
        """Return the FLOPs of a pack that the last layer saves by leaving out tokens, both passes."""
        return self.unneeded_tokens * shape.unselected_flops_per_token()

    def attention_flops(self, shape: ModelConfig) -> float:
        """Return all layers' attention FLOPs of a pack, both passes, by squared document and bidirectional lengths."""
        each, local = shape.attention_flops(1, prefix=0) // shape.num_layers, shape.local_layers
        global_flops = each * (shape.num_layers - local) * (self.squares + self.visible_squares)
        return global_flops + each * local * (self.local_pairs + self.visible_local_pairs)

    def head_flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Return the FLOPs of the output layer and prediction head at a pack's predicted positions, both passes."""
        return float(shape.head_flops(vocab_size, self.predicted))

    def flops(self, shape: ModelConfig, vocab_size: int) -> float:
        """Return a pack's forward and backward FLOPs: layers, attention, output layer; no recomputation or padding."""
        body = self.body_flops(shape) - self.unneeded_flops(shape)
        return body + self.attention_flops(shape) + self.head_flops(shape, vocab_size)


@dataclass(frozen=True)
class PhaseWork:
    """Phase of the schedule: first and last step, average number of steps of each objective, batch sizes, and passes."""

    text: str
    first: int
    last: int
    parts: tuple[tuple[ObjectiveWork, float], ...]
    batches: tuple[tuple[int, int], ...]
    """(global batch size, steps with it); one pair without --rampup-batch-size"""
    passes: int = 1
    """number of times that a step reads its packs, each time with an objective of its own"""


def build_schedule(config: PretrainConfig, vocab_size: int) -> Schedule:
    """Return a run's objective schedule for any vocabulary of `vocab_size`; InputError for a wrong one."""
    any_vocabulary = Vocabulary(vocab_size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")  # parsing needs a mask token
    return Schedule.build(config.objective_schedule, config.total_iters, any_vocabulary, config.seed)


def build_phases(config: PretrainConfig, vocab_size: int, docs: LengthModel) -> list[PhaseWork]:
    """Return a run's phases with their average work, for a branch from --branch-at on; InputError for a wrong schedule."""
    schedule = build_schedule(config, vocab_size)
    phases = []
    for phase in schedule.phases:
        first, last = max(phase.first_step, (config.start.branch_at or 0) + 1), phase.last_step
        if first <= last:
            pairs = zip(phase.choices, phase.shares, strict=True)
            works = [
                (compute_objective_work(choice.start, choice.end, config, docs), share * (last - first + 1))
                for choice, share in pairs
            ]
            batches = _count_batch_sizes(config, first, last)
            phases.append(PhaseWork(phase.text, first, last, tuple(works), batches, phase.passes))
    return phases


def compute_objective_work(start: Objective, end: Objective, config: PretrainConfig, docs: LengthModel) -> ObjectiveWork:
    """Return a pack's average ObjectiveWork under an objective whose options go linearly from `start` to `end`."""
    length = config.data.seq_length
    unpredicted, special = 0.0, docs.special
    if start.shift:
        unpredicted = docs.pieces  # a document's first token has no predecessor
        special -= docs.special_starts  # counted in `unpredicted`
    text = length - unpredicted - special
    predicted = length - unpredicted  # `clm` also predicts the ends of documents
    is_bidirectional = start.attention is Attention.BIDIRECTIONAL
    visible_squares, visible_local = is_bidirectional * docs.squares, is_bidirectional * docs.local_pairs
    if hasattr(start, "mask"):
        predicted = (start.mask + end.mask) / 2 * text
    if isinstance(start, MaskedDiffusion):
        predicted = (start.low + start.high + end.low + end.high) / 4 * text
    if isinstance(start, GPTBERT):
        causal = (start.causal + end.causal) / 2
        predicted += causal * (text - predicted)
        visible_squares, visible_local = (1 - causal) * docs.squares, (1 - causal) * docs.local_pairs
    elif start.attention is Attention.PREFIX:
        low, high = getattr(start, "low", 0.0), getattr(start, "high", 1.0)
        rest = length * (1 - (low + high) / 2) + docs.pieces / 2 - special  # a prefix is rounded down
        predicted = min(text, rest)
        visible_squares = docs.squares * (low * low + low * high + high * high) / 3
        visible_local = docs.local_pairs * (low + high) / 2  # exact if documents are much longer than the window
    pairs = docs.squares, visible_squares, docs.local_pairs, visible_local
    return ObjectiveWork(start.describe(end=end), length, max(predicted, 0.0), *pairs, config.layout.selects_rows)


def _count_batch_sizes(config: PretrainConfig, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return (global batch size, number of steps with it) for steps `first` to `last`."""
    if not config.rampup_batch_size:  # avoids a slow import of megatron-core
        return ((config.global_batch_size, last - first + 1),)
    sizes = config.batch_sizes
    growing = min(last, len(sizes.starts))
    counts = Counter(sizes.size(step) for step in range(first, growing + 1))
    counts[sizes.full] += max(0, last - max(first - 1, growing))
    return tuple(counts.items())
