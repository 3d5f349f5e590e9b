"""Peak memory of a rank, tensor by tensor.

The peak is at the start of the head's backward pass with all forward passes in flight done, or, for
a small vocabulary, at the first layer's backward pass.
"""

from dataclasses import dataclass

from megaenc.estimate.devices import BASE_BYTES
from megaenc.estimate.layout_case import LayoutCase, PipelineStage
from megaenc.estimate.work import ObjectiveWork

LOGIT_BYTES_AT_ONCE = 2**30  # as in the kernels of megaenc.model.linear_cross_entropy
CHUNK_BYTES = 2**25  # as in megaenc.training.checkpoint.state_tensors


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of a rank of one pipeline `stage`, by term in bytes.

    `compute_stage_memory` builds it. `terms` has the bytes by name: "base" (`BASE_BYTES`),
    "weights", "gradients", "master weights", "AdamW's moments", "activations", "stage borders"
    (sent and received) and "on top" (temporary), but none that are 0.
    """

    stage: PipelineStage
    terms: dict[str, float]

    @property
    def total(self) -> float:
        """Return the rank's peak memory in bytes, the sum of all terms."""
        return sum(self.terms.values())


def compute_max_memory(case: LayoutCase, works: list[ObjectiveWork]) -> RankMemory:
    """Return the RankMemory with the largest total over stages and objectives.

    Args:
        works: Work of each objective of the run, at least one.
    """
    memories = [
        compute_stage_memory(case, work, stage) for work in works for stage in case.build_stages()
    ]
    return max(memories, key=lambda memory: memory.total)


def compute_stage_memory(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage) -> RankMemory:
    """Return the peak memory of a rank of `stage` under one objective.

    It is that of training with AdamW on an accelerator.
    """
    weights = stage.parameters
    in_flight = micro_batches_in_flight(case, stage)
    shared = case.data_parallel_size if case.layout.use_distributed_optimizer else 1
    activations = in_flight * stage_activation_bytes(case, stage, is_cpu=False, work=work)
    borders = 2 * case.hidden_bytes / case.sequence_shards if case.num_stages > 1 else 0.0
    embedding = (
        case.vocab_rows * case.shape.hidden_size * case.value_bytes if stage.has_embedding else 0.0
    )
    temporary = _peak_temporary_bytes(case, work, stage)
    terms = {
        "base": float(BASE_BYTES),
        "weights": float(case.value_bytes * weights),
        "gradients": 4.0 * weights,  # a float32 buffer
        "master weights": 4 * weights / shared if case.bf16 else 0.0,
        "AdamW's moments": 8 * weights / shared,
        "activations": activations,
        "stage borders": in_flight * borders,  # received and sent
        "on top": max(temporary, embedding - activations),
    }
    return RankMemory(stage, {name: value for name, value in terms.items() if value})


@dataclass(frozen=True)
class SaveCost:
    """Bytes of a checkpoint on disk, and the host memory that a save takes on a node.

    `compute_save_cost` builds it. `total` is the checkpoint's size. `synchronous` and
    `asynchronous` are bytes of a node with `ranks_per_node` ranks, without and with --async-save.
    """

    total: float
    """bytes of weights and optimizer state"""
    ranks_per_node: int
    synchronous: float
    """bytes on a node while a save is written"""
    asynchronous: float
    """bytes on a node with --async-save, of ranks of the largest pipeline stage"""


def compute_save_cost(case: LayoutCase, devices_per_node: int) -> SaveCost:
    """Return a checkpoint's bytes on disk, and a node's host memory during a save.

    Weights, moments and master weights are divided among data-parallel ranks. A rank copies a chunk
    of 32 MiB at a time from its accelerator, or with --async-save all that it saves; both are sums
    over the ranks of a node: `devices_per_node`, or all if they are fewer.
    """
    per_parameter = case.value_bytes + 8 + 4 * case.bf16
    ranks = min(case.gpus, devices_per_node)
    rank_bytes = (
        max(stage.parameters for stage in case.build_stages())
        * per_parameter
        / case.data_parallel_size
    )
    rows = case.vocab_rows * case.tensor_parallel_size
    total = case.shape.parameter_count(rows) * per_parameter
    return SaveCost(total, ranks, ranks * float(CHUNK_BYTES), ranks * rank_bytes)


def micro_batches_in_flight(case: LayoutCase, stage: PipelineStage) -> float:
    """Return the maximum number of micro-batches whose activations a stage holds.

    It is fractional with virtual stages, in units of all the stage's layers, and at most the
    micro-batches of a step. With 1F1B it is the number of stages from this one to the last; with v
    virtual stages on each of p stages, stage s of megatron-core's interleaved schedule holds 2 (p -
    s - 1) + (v - 1) p + 1 virtual ones.
    """
    after = case.num_stages - stage.index
    if case.virtual_stages == 1:
        return float(min(case.micro_batches, after))
    return min(
        case.micro_batches,
        (2 * (after - 1) + (case.virtual_stages - 1) * case.num_stages + 1) / case.virtual_stages,
    )


def layer_activation_bytes(case: LayoutCase, is_cpu: bool) -> dict[str, float]:
    """Return the bytes that a layer saves for backward per micro-batch, by part.

    The keys are norms, projections, attention and mlp. The bytes are those of one rank without
    recomputation, for the largest micro-batch.

    Args:
        is_cpu: Whether the device is a CPU, where attention by sdpa saves its output twice.
    """
    shape = case.shape
    w = case.value_bytes
    t = case.tensor_parallel_size
    queries = shape.query_size
    keys = case.kv_size
    heads = 4 * (shape.num_attention_heads + shape.num_query_groups)
    # QK layernorm keeps the projection for its gradient and, with grouped queries, copies the
    # queries out of it.
    normalised = (
        w * (queries + keys + queries * (shape.num_attention_heads > shape.num_query_groups))
        + heads
    )
    # Input and 1 / rms of each; LayerNorm also saves the mean. The outputs of two are saved as the
    # inputs of matrix products.
    norm = w * shape.hidden_size + (8 if shape.normalization == "LayerNorm" else 4)
    attention = w * queries * is_cpu + 4 * shape.num_attention_heads
    parts = {
        "norms": (shape.norms_per_layer * norm + 2 * w * shape.hidden_size) / case.sequence_shards,
        # q, k, v; the input of the output projection
        "projections": (w * (2 * queries + 2 * keys) + shape.qk_layernorm * normalised) / t,
        "attention": attention / t,
        # The activation's input and output.
        "mlp": w * (shape.mlp_input_size + shape.ffn_hidden_size) / t,
    }
    return {name: case.micro_batch_tokens * value for name, value in parts.items()}


def stage_activation_bytes(
    case: LayoutCase, stage: PipelineStage, is_cpu: bool, work: ObjectiveWork | None = None
) -> float:
    """Return the bytes that a stage's layers save for backward per micro-batch.

    They are those of one rank. Activations that are recomputed are not saved, so they are left out,
    and so are those of embedding, logits and loss.

    Args:
        is_cpu: Whether the device is a CPU, as in `layer_activation_bytes`.
        work: The objective; None if the last layer computes all positions.
    """
    layout = case.layout
    parts = layer_activation_bytes(case, is_cpu)
    of_layer = sum(parts.values())
    entering = case.hidden_bytes / case.sequence_shards
    if layout.recompute_granularity == "full":
        method, layer_count = layout.full_recompute
        if method == "uniform":
            return entering * -(-stage.layers // layer_count)
        recomputed_layers = min(stage.layers, layer_count * case.virtual_stages)
        return entering * recomputed_layers + of_layer * (stage.layers - recomputed_layers)
    modules = layout.selected_recompute_modules
    if "core_attn" in modules:
        of_layer -= parts["attention"]
    if "mlp" in modules:
        of_layer -= parts["mlp"]
    elif "activation" in modules:
        of_layer -= (
            case.micro_batch_tokens
            * case.value_bytes
            * case.shape.ffn_hidden_size
            / case.tensor_parallel_size
        )
    total = stage.layers * of_layer
    if work and work.unneeded_tokens and stage.has_head and stage.layers:
        total -= _unneeded_activation_bytes(case, work, is_cpu)
    return total


def _unneeded_activation_bytes(case: LayoutCase, work: ObjectiveWork, is_cpu: bool) -> float:
    """Return the bytes that the last layer saves less per micro-batch.

    After its attention it leaves out tokens. On an accelerator its attention saves its whole
    output, and the output projection the selected rows of it.
    """
    shape = case.shape
    w = case.value_bytes
    t = case.tensor_parallel_size
    modules = case.layout.selected_recompute_modules
    norm = w * shape.hidden_size + (8 if shape.normalization == "LayerNorm" else 4)
    norms = (shape.norms_per_layer - 1) * norm + w * shape.hidden_size
    mlp = 0.0
    if "mlp" not in modules:
        mlp = w / t * (shape.mlp_input_size + shape.ffn_hidden_size * ("activation" not in modules))
    projection = work.unneeded_tokens if is_cpu or "core_attn" in modules else -work.predicted
    return case.packs_at_once * (
        work.unneeded_tokens * (norms + mlp) + projection * w * shape.query_size / t
    )


def _peak_temporary_bytes(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage) -> float:
    """Return temporary bytes of the backward pass: the head's or a layer's."""
    shape = case.shape
    layout = case.layout
    w = case.value_bytes
    parts = layer_activation_bytes(case, is_cpu=False)
    # Gradients of one layer.
    inner = (
        w
        * (shape.mlp_input_size + 2 * shape.ffn_hidden_size + shape.query_size)
        / case.tensor_parallel_size
    )
    layer = case.micro_batch_tokens * inner + 2 * case.hidden_bytes
    if layout.recompute_granularity == "full":
        layers_at_once = layout.full_recompute[1] if layout.full_recompute[0] == "uniform" else 1
        layer += layers_at_once * sum(parts.values())
    elif "mlp" in layout.recompute_modules:
        layer += parts["mlp"]
    if not stage.has_head:
        return layer
    predictions = case.packs_at_once * work.predicted
    matrix = case.vocab_rows * shape.hidden_size
    # Of this rank's vocabulary shard, with the fused kernels.
    logits = min(predictions * case.vocab_rows, max(LOGIT_BYTES_AT_ONCE / w, case.vocab_rows))
    norm = 2 * case.hidden_bytes / case.sequence_shards + (
        case.hidden_bytes if case.sequence_shards > 1 else 0
    )
    # A tied matrix's gradient has a tensor of its own; of an untied one autograd gets an empty
    # tensor besides the buffer.
    gradient = w
    if not shape.untie_embeddings_and_output_weights:
        gradient = 6 if case.bf16 else 4
    states = 2 + 3 * shape.prediction_head  # the outputs of its dense layer, activation and norm
    head = norm + states * w * predictions * shape.hidden_size + w * logits + gradient * matrix
    return max(head, layer)
