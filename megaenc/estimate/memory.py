"""Peak memory of a rank, tensor by tensor.

The peak is at the start of the head's backward pass with all forward passes in flight done, or, for a small vocabulary, at the
first layer's backward pass.
"""

from dataclasses import dataclass

from megaenc.estimate.hardware import Rates
from megaenc.estimate.layout_case import CostTerm, LayoutCase, ObjectiveWork, PipelineStage

LOGITS_AT_ONCE = 2**26  # as in megaenc.model.linear_cross_entropy
LOGIT_BYTES_AT_ONCE = 2**30  # the same for its kernels on accelerators
KEPT_KEYS, QUERY_BLOCK, ALIGNMENT = 1024, 256, 32  # as in megaenc.model.attention.onednn
CHUNK_BYTES = 2**25  # as in megaenc.training.checkpoint.state_tensors


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of a rank of one pipeline stage, by term in bytes."""

    stage: PipelineStage
    terms: tuple[CostTerm, ...]

    @property
    def total(self) -> float:
        """Return the rank's peak memory in bytes, the sum of all terms."""
        return sum(term.value for term in self.terms)


def compute_max_memory(case: LayoutCase, works: list[ObjectiveWork], rates: Rates) -> RankMemory:
    """Return the RankMemory of the pipeline stage and objective with the largest peak memory."""
    memories = [compute_stage_memory(case, work, stage, rates) for work in works for stage in case.build_stages()]
    return max(memories, key=lambda memory: memory.total)


def compute_stage_memory(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, rates: Rates) -> RankMemory:
    """Return the peak memory of a rank of `stage` by term under one objective; `rates` has base and fragmentation."""
    weights, width, layers, in_flight = stage.parameters, case.value_bytes, stage.layers, micro_batches_in_flight(case, stage)
    keys = saved_keys_per_token(case, work) if rates.saves_probabilities else None
    shared = case.data_parallel_size if case.layout.use_distributed_optimizer else 1
    share = f" / {shared} data-parallel ranks" if shared > 1 else ""
    micro_batch_bytes, per_layer = stage_activation_bytes(case, stage, rates.host, work, keys)
    temporary, temporary_formula = _peak_temporary_bytes(case, work, stage, rates.host, keys)
    border_bytes = 2 * case.hidden_bytes / case.sequence_shards if case.num_stages > 1 else 0.0
    activations = in_flight * micro_batch_bytes
    embedding = case.vocab_rows * case.shape.hidden_size * width if stage.has_embedding else 0.0
    batches = f"{in_flight:g} micro-batch{'es' if in_flight > 1 else ''}"
    fragments_formula = f"{rates.pieces_of_kept:.2f} of each byte of activations"
    terms = (
        ("base", rates.base, "libraries, device context and collective buffers, before the model is built"),
        ("weights", float(width * weights), f"{width} x {weights:,} parameters of this rank"),
        ("gradients", 4.0 * weights, f"4 x {weights:,}: a float32 buffer"),
        ("master weights", 4 * weights / shared if case.bf16 else 0.0, f"4 x {weights:,}{share}: float32"),
        ("AdamW's moments", 8 * weights / shared, f"8 x {weights:,}{share}"),
        ("activations", activations, f"{batches} in flight x {layers} layers: {per_layer}, of S = {case.micro_batch_tokens:,}"),
        ("stage borders", in_flight * border_bytes, "in flight x 2 S H w: received and sent activations"),
        ("on top", max(temporary, embedding - activations), temporary_formula),
        (
            "allocator",
            rates.pieces + rates.pieces_of_kept * activations,
            f"fragmentation, as measured here, and {fragments_formula}",
        ),
    )
    return RankMemory(stage, tuple(CostTerm(name, value, "bytes", formula) for name, value, formula in terms if value))


@dataclass(frozen=True)
class SaveCost:
    """Bytes of a checkpoint, and the host memory that a save takes on a node."""

    total: float
    """bytes of weights and optimizer state"""
    ranks_per_node: int
    synchronous: float
    """bytes on a node while a save is written"""
    asynchronous: float
    """bytes on a node with --async-save, of ranks of the largest pipeline stage"""


def compute_save_cost(case: LayoutCase, rates: Rates) -> SaveCost:
    """Return the SaveCost of a layout.

    Data-parallel ranks have equal shares of weights, moments and master weights. A rank copies a chunk
    at a time from an accelerator, or with --async-save its whole share.
    """
    per_parameter = case.value_bytes + 8 + 4 * case.bf16
    ranks = min(case.gpus, rates.devices)
    share = max(stage.parameters for stage in case.build_stages()) * per_parameter / case.data_parallel_size
    total = case.shape.parameter_count(case.vocab_rows) * per_parameter
    return SaveCost(total, ranks, 0.0 if rates.host else ranks * float(CHUNK_BYTES), ranks * share)


def micro_batches_in_flight(case: LayoutCase, stage: PipelineStage) -> float:
    """Return the maximum number of micro-batches whose activations a stage holds, in multiples of a full stage.

    1F1B: the stages from this one to the last. Interleaved (megatron-core): 2 (p - s - 1) + (v - 1) p + 1 virtual stages.
    """
    after = case.num_stages - stage.index
    if case.virtual_stages == 1:
        return float(min(case.micro_batches, after))
    return min(case.micro_batches, (2 * (after - 1) + (case.virtual_stages - 1) * case.num_stages + 1) / case.virtual_stages)


def saved_keys_per_token(case: LayoutCase, work: ObjectiveWork) -> float:
    """Return about how many probabilities attention by onednn saves per token, head and layer: up to KEPT_KEYS.

    Documents are padded, causal blocks of queries also have the keys of later ones, and queries with more keys save nothing.
    """
    length, bidirectional = work.squares / work.tokens + ALIGNMENT, work.visible_squares / max(work.squares, 1.0)
    everywhere = bidirectional * length + (1 - bidirectional) * min(length, (length + QUERY_BLOCK) / 2)
    near = min(everywhere, QUERY_BLOCK + 2 * (case.shape.window_size or 0))
    local = case.shape.local_layers / case.shape.num_layers
    return sum(share * min(keys, KEPT_KEYS**2 / keys) for share, keys in ((1 - local, everywhere), (local, near)))


def layer_activation_bytes(case: LayoutCase, host: bool, saved_keys: float | None = None) -> dict[str, float]:
    """Return the bytes one layer saves for backward per micro-batch, by part, without recomputation; `host`: on a CPU.

    `saved_keys`: of `saved_keys_per_token` if attention is by onednn. By sdpa on the host, it saves its output twice.
    """
    shape, w, t = case.shape, case.value_bytes, case.tensor_parallel_size
    queries, keys, heads = shape.query_size, case.kv_size, 4 * (shape.num_attention_heads + shape.num_query_groups)
    # QK layernorm keeps the projection for its gradient and, with grouped queries, copies the queries out of it.
    normalised = w * (queries + keys + queries * (shape.num_attention_heads > shape.num_query_groups)) + heads
    # Input and 1 / rms of each; LayerNorm also saves the mean. The outputs of two are saved as the inputs of matrix products.
    norm = w * shape.hidden_size + (8 if shape.normalization == "LayerNorm" else 4)
    attention = w * queries * host + 4 * shape.num_attention_heads
    if saved_keys is not None:
        attention = w * saved_keys * shape.num_attention_heads
    parts = {
        "norms": (shape.norms_per_layer * norm + 2 * w * shape.hidden_size) / case.sequence_shards,
        # q, k, v; the input of the output projection
        "projections": (w * (2 * queries + 2 * keys) + shape.qk_layernorm * normalised) / t,
        "attention": attention / t,
        "mlp": 3 * w * shape.ffn_hidden_size / t,  # gate, up and their product
    }
    return {name: case.micro_batch_tokens * value for name, value in parts.items()}


def stage_activation_bytes(
    case: LayoutCase,
    stage: PipelineStage,
    host: bool,
    work: ObjectiveWork | None = None,
    saved_keys: float | None = None,
) -> tuple[float, str]:
    """Return (bytes a stage saves for backward per micro-batch, less the recomputed; formula text); `host`: on a CPU.

    `work`: None if the last layer computes all positions. `saved_keys`: as for `layer_activation_bytes`.
    """
    layout, parts = case.layout, layer_activation_bytes(case, host, saved_keys)
    layer_total, entering = sum(parts.values()), case.hidden_bytes / case.sequence_shards
    listed = ", ".join(f"{name} {value / case.micro_batch_tokens:,.0f}" for name, value in parts.items())
    per_token = f"{layer_total / case.micro_batch_tokens:,.0f} bytes a token and layer ({listed})"
    if layout.recompute_granularity == "full":
        method, number = layout.full_recompute
        if method == "uniform":
            units = -(-stage.layers // number)
            return entering * units, f"{entering / case.micro_batch_tokens:,.0f} bytes a token and {number} layers recomputed"
        recomputed_layers = min(stage.layers, number * case.virtual_stages)
        return entering * recomputed_layers + layer_total * (
            stage.layers - recomputed_layers
        ), f"{recomputed_layers} layers recomputed, others {per_token}"
    if layout.recompute_granularity == "selective":
        modules = layout.selected_recompute_modules
        recomputed_parts = [part for part, module in (("attention", "core_attn"), ("mlp", "mlp")) if module in modules]
        layer_total -= sum(parts[part] for part in recomputed_parts)
        if "activation" in modules and "mlp" not in modules:
            recomputed_parts.append("a third of mlp")
            layer_total -= parts["mlp"] / 3
        per_token += f" without {' and '.join(recomputed_parts)}"
    total = stage.layers * layer_total
    if work and work.unneeded_tokens and stage.has_head and stage.layers:
        total -= _unneeded_activation_bytes(case, work, host)
        per_token += f", the last layer {work.predicted / work.tokens:.0%} of what follows its attention"
    return total, per_token


def _unneeded_activation_bytes(case: LayoutCase, work: ObjectiveWork, host: bool) -> float:
    """Return the bytes that the last layer saves less per micro-batch, as after its attention it leaves out tokens.

    On an accelerator its attention saves its whole output, and the output projection the selected rows of it.
    """
    shape, w, t = case.shape, case.value_bytes, case.tensor_parallel_size
    modules = case.layout.selected_recompute_modules
    norm = w * shape.hidden_size + (8 if shape.normalization == "LayerNorm" else 4)
    norms = (shape.norms_per_layer - 1) * norm + w * shape.hidden_size
    mlp = w * shape.ffn_hidden_size / t * (0 if "mlp" in modules else 2 if "activation" in modules else 3)
    projection = work.unneeded_tokens if host or "core_attn" in modules else -work.predicted
    return case.packs_at_once * (work.unneeded_tokens * (norms + mlp) + projection * w * shape.query_size / t)


def _peak_temporary_bytes(
    case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, host: bool, saved_keys: float | None
) -> tuple[float, str]:
    """Return the larger of the head's and one layer's temporary bytes in the backward pass, and its formula text."""
    shape, w, layout, parts = case.shape, case.value_bytes, case.layout, layer_activation_bytes(case, host, saved_keys)
    layer = (
        case.micro_batch_tokens * w * (4 * shape.ffn_hidden_size + shape.query_size) / case.tensor_parallel_size
        + 2 * case.hidden_bytes
    )
    formula = "gradients of one layer, about w S (4 F + q) / t + 2 w S H"
    if layout.recompute_granularity == "full":
        layer += (layout.full_recompute[1] if layout.full_recompute[0] == "uniform" else 1) * sum(parts.values())
        formula += " and the recomputed layers"
    elif "mlp" in layout.recompute_modules:
        layer += parts["mlp"]
    predictions, matrix = case.packs_at_once * work.predicted, case.vocab_rows * shape.hidden_size
    # Of this rank's vocabulary shard; on an accelerator with the fused kernels.
    logits = min(predictions * case.vocab_rows, max(LOGITS_AT_ONCE if host else LOGIT_BYTES_AT_ONCE / w, case.vocab_rows))
    norm = 2 * case.hidden_bytes / case.sequence_shards + (case.hidden_bytes if case.sequence_shards > 1 else 0)
    # A tied matrix's gradient has a tensor of its own; an untied one's is in the buffer, and what autograd gets instead is empty.
    gradient = (6 if case.bf16 else 4) if not shape.untie_embeddings_and_output_weights else 0 if host else w
    states = 2 + 3 * shape.prediction_head  # the outputs of its dense layer, activation and norm
    head = norm + states * w * predictions * shape.hidden_size + w * logits + gradient * matrix
    if head < layer or not stage.has_head:
        return layer, formula
    return head, (
        f"head: {w} x {logits:,.0f} logits at once, of N = {predictions:,.0f} predictions; {gradient} V H / t for its gradient; "
        "2 w N H; the norm's w S H"
    )
