"""Bytes that a rank takes at its worst moment: what this implementation keeps, tensor by tensor.

The worst moment is when the last forward pass of all that are in flight is done and the head's gradient begins, or, where the
vocabulary is small, when the first layer's gradient does.
"""

from dataclasses import dataclass

from megaenc.estimate.hardware import Rates
from megaenc.estimate.layout_case import CostTerm, LayoutCase, ObjectiveWork, PipelineStage

LOGITS_AT_ONCE = 2**26  # as megaenc.model.linear_cross_entropy has it
LOGIT_BYTES_AT_ONCE = 2**30  # as it has with the kernels of accelerators


@dataclass(frozen=True)
class RankMemory:
    """Of a rank of one stage."""

    stage: PipelineStage
    terms: tuple[CostTerm, ...]

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(term.value for term in self.terms)


def worst_memory(case: LayoutCase, works: list[ObjectiveWork], rates: Rates) -> RankMemory:
    """Return that of the rank that takes most, under the objective that takes most."""
    found = [stage_memory(case, work, stage, rates) for work in works for stage in case.every_stage()]
    return max(found, key=lambda memory: memory.total)


def stage_memory(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, rates: Rates) -> RankMemory:
    """Return that of a rank of `stage`."""
    weights, width, layers, flying = stage.parameters, case.width, stage.layers, in_flight(case, stage)
    shared = case.data if case.layout.use_distributed_optimizer else 1
    share = f" / {shared} data-parallel ranks" if shared > 1 else ""
    kept, per_layer = kept_bytes(case, stage, rates.host)
    top, why = _on_top(case, work, stage, rates.host)
    border = 2 * case.row_bytes / case.sharded if case.stages > 1 else 0.0
    activations = flying * kept
    embedding = case.rows * case.shape.hidden_size * width if stage.first else 0.0
    batches = f"{flying:g} micro-batch{'es' if flying > 1 else ''}"
    of_kept = f"{rates.pieces_of_kept:.2f} of each byte of activations"
    terms = (
        ("base", rates.base, "libraries, device context and buffers of collectives, before there is a model"),
        ("weights", float(width * weights), f"{width} x {weights:,} parameters of this rank"),
        ("gradients", 4.0 * weights, f"4 x {weights:,}: a float32 buffer"),
        ("master weights", 4 * weights / shared if case.bf16 else 0.0, f"4 x {weights:,}{share}: float32"),
        ("AdamW's moments", 8 * weights / shared, f"8 x {weights:,}{share}"),
        ("activations", activations, f"{batches} in flight x {layers} layers: {per_layer}, of S = {case.row:,}"),
        ("stage borders", flying * border, "in flight x 2 S H w: what came and what was sent"),
        ("on top", max(top, embedding - activations), why),
        ("allocator", rates.pieces + rates.pieces_of_kept * activations, f"lost to pieces, as measured here, and {of_kept}"),
    )
    return RankMemory(stage, tuple(CostTerm(name, value, "bytes", formula) for name, value, formula in terms if value))


def in_flight(case: LayoutCase, stage: PipelineStage) -> float:
    """Return the micro-batches whose activations a stage holds at once, in whole stages.

    1F1B: as many as stages from here to the end. Interleaved (megatron-core): 2 (p - s - 1) + (v - 1) p + 1 parts of a stage.
    """
    after = case.stages - stage.number
    if case.turns == 1:
        return float(min(case.micro_batches, after))
    return min(case.micro_batches, (2 * (after - 1) + (case.turns - 1) * case.stages + 1) / case.turns)


def layer_bytes(case: LayoutCase, host: bool) -> dict[str, float]:
    """Return what autograd saves of one layer for a row, by part, without recomputation.

    On the host attention by document saves its output twice.
    """
    shape, w, t = case.shape, case.width, case.tensor
    queries, keys, heads = shape.query_size, case.keys, 4 * (shape.num_attention_heads + shape.num_query_groups)
    # Queries that share keys are copied out of the projection, the others normalised where they lie.
    normalised = w * queries * (shape.num_attention_heads > shape.num_query_groups) + heads
    parts = {
        "norms": 2 * (2 * w * shape.hidden_size + 4) / case.sharded,  # each what it needs, its output and 1 / rms
        "projections": w * (3 * queries + 3 * keys) / t + shape.qk_layernorm * normalised / t,  # q, k; q k v; what the next reads
        "attention": (w * queries * host + 4 * shape.num_attention_heads) / t,
        "mlp": 3 * w * shape.ffn_hidden_size / t,  # gate and up, their product
    }
    return {name: case.row * value for name, value in parts.items()}


def kept_bytes(case: LayoutCase, stage: PipelineStage, host: bool) -> tuple[float, str]:
    """Return the activations of one micro-batch on a stage, with recomputation, and the formula of a layer's."""
    layout, shape, parts = case.layout, case.shape, layer_bytes(case, host)
    whole, entering = sum(parts.values()), case.row_bytes / case.sharded
    listed = ", ".join(f"{name} {value / case.row:,.0f}" for name, value in parts.items())
    per_token = f"{whole / case.row:,.0f} bytes a token and layer ({listed})"
    if layout.recompute_granularity == "full":
        method, number = layout.full_recompute
        if method == "uniform":
            units = -(-stage.layers // number)
            return entering * units, f"{entering / case.row:,.0f} bytes a token and {number} layers recomputed"
        again = min(stage.layers, number * case.turns)
        return entering * again + whole * (stage.layers - again), f"{again} layers recomputed, others {per_token}"
    if layout.recompute_granularity == "selective":
        modules = layout.recompute_modules or ("core_attn",)
        left_out = [part for part, module in (("attention", "core_attn"), ("mlp", "mlp")) if module in modules]
        whole -= sum(parts[part] for part in left_out)
        if "core_attn" in modules and not shape.qk_layernorm:  # keys as they are lie in the projection's output
            whole -= case.row * case.width * case.keys / case.tensor
        per_token += f" without {' and '.join(left_out)}"
    return stage.layers * whole, per_token


def _on_top(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, host: bool) -> tuple[float, str]:
    """Return the head's at its worst, or the first layer's on the way back, whichever is more."""
    shape, w, layout, parts = case.shape, case.width, case.layout, layer_bytes(case, host)
    layer = case.row * w * (4 * shape.ffn_hidden_size + shape.query_size) / case.tensor + 2 * case.row_bytes
    what = "gradients of one layer, about w S (4 F + q) / t + 2 w S H"
    if layout.recompute_granularity == "full":
        layer += (layout.full_recompute[1] if layout.full_recompute[0] == "uniform" else 1) * sum(parts.values())
        what += " and the layers computed again"
    elif "mlp" in layout.recompute_modules:
        layer += parts["mlp"]
    picked, matrix = case.micro_batch_size * work.predicted, case.rows * shape.hidden_size
    # Of this rank's share of the vocabulary; on an accelerator by the fused kernels.
    logits = min(picked * case.rows, max(LOGITS_AT_ONCE if host else LOGIT_BYTES_AT_ONCE / w, case.rows))
    norm = parts["norms"] / 2 + (case.row_bytes if case.sharded > 1 else 0)
    gradient = 6 if case.bf16 else 4  # which takes the place of the logits
    head = norm + 2 * w * picked * shape.hidden_size + w * logits + gradient * matrix
    if head < layer or not stage.last:
        return layer, what
    return head, (
        f"head: {w} x {logits:,.0f} logits at once, of N = {picked:,.0f} predictions; {gradient} V H / t of its gradient; "
        "2 w N H; the norm's w S H"
    )
