"""Seconds of a step: computation by kind of operation, what is sent, the pipeline's idle time, the update."""

import math
from dataclasses import dataclass

from megaenc.estimate.hardware import Link, Rates
from megaenc.estimate.layout_case import CostTerm, LayoutCase, ObjectiveWork, PipelineStage
from megaenc.estimate.memory import LOGITS_AT_ONCE

BUCKET = 40_000_000  # parameters that megatron-core sends at once where gradients leave early, or 1,000,000 x ranks
_Seconds = tuple[str, float, str]  # name, value and formula of a term


@dataclass(frozen=True)
class StepTime:
    """A step under one objective."""

    seconds: float
    flops: float
    """of all ranks, as training counts them"""
    pipeline_bubble: float
    """share of the pipeline's time in which a stage waits for others, on average"""
    terms: tuple[CostTerm, ...]
    """seconds, those of the slowest stage, adding up to the step's"""
    sent: tuple[CostTerm, ...]
    """bytes that one of its ranks sends a step"""


def step_time(case: LayoutCase, work: ObjectiveWork, rates: Rates) -> StepTime:
    """Return what a step of `case` takes under `work`."""
    stages, count = case.every_stage(), case.micro_batches
    each = [micro_batch_terms(case, work, stage, rates) for stage in stages]
    times = [sum(seconds for _, seconds, _ in terms) for terms in each]
    stage, terms, longest = max(zip(stages, each, times, strict=True), key=lambda slowest: slowest[2])
    idle = (sum(times) - longest) / case.turns
    others = "the other stages' micro-batch" + ("" if case.turns == 1 else f" / {case.turns} turns")
    fills = f"{others}; even stages: (p - 1) of m + p - 1 = {count + case.stages - 1}"
    many = f"{count:,} micro-batch{'es' if count > 1 else ''}"
    computing = sum(seconds for name, seconds, _ in terms if "all-reduce" not in name)
    moved = update_bytes_moved(case, stage)
    found = [
        *((name, count * seconds, f"{many} x {formula}") for name, seconds, formula in terms),
        ("pipeline fills and drains", idle, fills),
        _border(case, rates),
        *_data_parallel(case, stage, rates, computing),
        ("update", moved / rates.optimizer, f"{_n(moved)}B of weights, gradients and moments / {_n(rates.optimizer)}B/s"),
    ]
    terms = tuple(CostTerm(name, seconds, "s", formula) for name, seconds, formula in found if seconds)
    flops = case.global_batch_size * work.flops(case.shape, case.vocab_size)
    bubble = 1 - count * sum(times) / (case.stages * (count * longest + idle))
    return StepTime(sum(term.value for term in terms), flops, bubble, terms, tuple(sent(case, stage, work)))


def layer_bytes_moved(case: LayoutCase) -> float:
    """Return the bytes that all but matrix products and attention read and write in a layer for a row, forward and backward.

    Counted kernel by kernel, w a number: norms and residuals 24 H, rotary positions 10 (q + k), heads side by side 4 q, SwiGLU
    16 F; and the layer's gradient is read and added to the float32 buffer, 8 + 2 w a parameter.
    """
    shape = case.shape
    hidden = 24 * shape.hidden_size / case.sharded
    inner = (14 * shape.query_size + 10 * case.keys + 16 * shape.ffn_hidden_size) / case.tensor
    return case.width * case.row * (hidden + inner) + (8 + 2 * case.width) * case.layer_parameters


def ends_bytes_moved(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage) -> float:
    """Return those of embedding and loss, with the gradients of their matrices, 8 + 3 w a parameter, and 12 w H a token.

    A logit is 46 bytes in bfloat16, 36 in float32; each part of the logits adds to the output matrix's gradient, 12 or 8 bytes a
    parameter, which is then scaled and cast.
    """
    matrix = case.rows * case.shape.hidden_size
    each, adding, scaling = (46, 12, 14) if case.bf16 else (36, 8, 8)
    moved = 0.0
    if stage.first:
        moved += (8 + 3 * case.width) * matrix + 12 * case.row_bytes
    if stage.last:
        logits = case.micro_batch_size * work.predicted * case.rows
        parts = math.ceil(logits / max(LOGITS_AT_ONCE, case.rows))
        moved += (8 + 2 * case.width + scaling + adding * parts) * matrix + each * logits
    return moved


def micro_batch_terms(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, rates: Rates) -> list[_Seconds]:
    """Return what one micro-batch takes on a stage, forward and backward."""
    layers, packs = stage.layers, case.micro_batch_size
    part = layers / case.shape.num_layers / case.tensor
    products = part * packs * work.body_flops(case.shape)
    attention = part * packs * work.attention_flops(case.shape)
    moved = layers * layer_bytes_moved(case)
    rate = rates.causal_attention if work.causal else rates.attention
    gemm, core, rest = products / rates.gemm, attention / rate, moved / rates.elementwise
    again = _recomputed(case, stage, gemm, core, rest)
    launches = max(0.0, layers * rates.layer_floor - gemm - core - rest)
    head = packs * work.head_flops(case.shape, case.rows * case.tensor) / case.tensor if stage.last else 0.0
    ends = ends_bytes_moved(case, work, stage)
    return [
        ("matrix products", gemm, f"{_n(products)}FLOP / {_n(rates.gemm)}FLOP/s"),
        ("attention", core, f"{_n(attention)}FLOP / {_n(rate)}FLOP/s"),
        ("norms, SwiGLU, copies", rest, f"{_n(moved)}B / {_n(rates.elementwise)}B/s"),
        ("computed again", again, f"--recompute-granularity {case.layout.recompute_granularity}: forward once more"),
        ("launches", launches, f"{layers} layers x {rates.layer_floor:g} s at least, for the host starts each kernel"),
        ("head", head / rates.gemm, f"{_n(head)}FLOP / {_n(rates.gemm)}FLOP/s"),
        ("embedding and loss", ends / rates.loss, f"{_n(ends)}B / {_n(rates.loss)}B/s"),
        ("start of a micro-batch", rates.start, f"{rates.start:g} s of data and bookkeeping"),
        _tensor_parallel(case, stage, work, rates, gemm),
    ]


def _recomputed(case: LayoutCase, stage: PipelineStage, gemm: float, core: float, rest: float) -> float:
    """Return the seconds of the forward passes that recomputation repeats: a third of the products, two sevenths of attention."""
    layout, shape = case.layout, case.shape
    if layout.recompute_granularity == "full":
        method, number = layout.full_recompute
        share = 1.0 if method == "uniform" else min(1.0, number * case.turns / max(stage.layers, 1))
        return share * (gemm / 3 + core * 2 / 7 + rest / 3)
    modules = layout.recompute_modules or ("core_attn",) if layout.recompute_granularity else ()
    inner = 3 * shape.ffn_hidden_size
    mlp = inner / (2 * shape.query_size + 2 * case.keys + inner)
    return ("core_attn" in modules) * core * 2 / 7 + ("mlp" in modules) * (gemm * mlp / 3 + rest / 4)


def _tensor_parallel(case: LayoutCase, stage: PipelineStage, work: ObjectiveWork, rates: Rates, gemm: float) -> _Seconds:
    """Return what a micro-batch waits for its tensor-parallel ranks.

    A layer reduces two rows forward and two backward; with sequence parallelism each is a gather and a scatter, and two more
    gathers backward. On accelerators those backward run beside the products with the weights (a third of all products).
    """
    link = group_link(rates, 1, case.tensor)
    one = link.all_reduce(case.row_bytes, case.tensor)
    forward, backward = 2.0 * stage.layers, (3.0 if case.sharded > 1 else 2.0) * stage.layers
    forward += stage.first + case.layout.sequence_parallel * stage.last / 2
    times = forward + (forward if case.layout.recompute_granularity == "full" else 0.0) + backward
    head = link.all_reduce(work.predicted / case.seq_length * case.row_bytes, case.tensor) * stage.last
    hidden = 0.0 if rates.host else min(backward * one, gemm / 3)
    text = f"{times:g} x {one:.3g} s, each 2 (t - 1) / t of {case.row:,} rows of H"
    text += "" if rates.host else f", {hidden:.3g} s beside products"
    return ("tensor-parallel all-reduce", times * one + head - hidden, text)


def _border(case: LayoutCase, rates: Rates) -> _Seconds:
    """Return what goes from stage to stage: in 1F1B each message is waited for, interleaved only at both ends."""
    link = rates.inside if case.gpus <= rates.devices else rates.between
    one = link.send(case.row_bytes / case.sharded)
    between = case.stages > 1 and case.turns == 1
    waited = 2 * (case.stages - 1) * case.turns + between * 2 * (case.micro_batches - 1)
    return ("stage to stage", waited * one, f"{waited} messages x {one:.3g} s of {case.row:,} rows of H")


def _data_parallel(case: LayoutCase, stage: PipelineStage, rates: Rates, micro_batch: float) -> list[_Seconds]:
    """Return what the copies send each other: gradients, and weights back if the optimizer is distributed.

    What overlaps hides behind a micro-batch.
    """
    if case.data == 1:
        return []
    layout, link = case.layout, group_link(rates, case.tensor, case.data)
    bucket = min(1.0, max(BUCKET, 1_000_000 * case.data) / stage.parameters)
    where = f"{case.data} ranks at {_n(link.bandwidth)}B/s"

    def term(name: str, times: int, size: float, beside: float, overlap: bool) -> _Seconds:
        seconds = times * link.gather(size, case.data)
        exposed = max(bucket * seconds, seconds - beside) if overlap and not rates.host else seconds
        return (name, exposed, f"{'2 ' * (times - 1)}(d - 1) / d of {_n(size)}B, {where}")

    gradients, weights = 4.0 * stage.parameters, float(case.width * stage.parameters)
    if not layout.use_distributed_optimizer:
        return [term("gradients' all-reduce", 2, gradients, 2 / 3 * micro_batch, layout.overlap_grad_reduce)]
    return [
        term("gradients' reduce-scatter", 1, gradients, 2 / 3 * micro_batch, layout.overlap_grad_reduce),
        term("weights' all-gather", 1, weights, 1 / 3 * micro_batch, layout.overlap_param_gather),
    ]


def update_bytes_moved(case: LayoutCase, stage: PipelineStage) -> float:
    """Return those of an update: zeroing 4, scaling 8 a parameter; of the optimizer's share norm 4, clip 8, AdamW 28, copy 6."""
    shared = case.data if case.layout.use_distributed_optimizer else 1
    return stage.parameters * (12 + (46 if case.bf16 else 40) / shared)


def group_link(rates: Rates, stride: int, ranks: int) -> Link:
    """Return what connects `ranks` that lie `stride` apart: a node's inside if they fit, else the links of those in one node."""
    if stride * ranks <= rates.devices:
        return rates.inside
    together = max(1, rates.devices // stride)
    return Link(min(rates.inside.bandwidth, together * rates.between.bandwidth), rates.between.latency)


def sent(case: LayoutCase, stage: PipelineStage, work: ObjectiveWork) -> list[CostTerm]:
    """Return the bytes that one rank of a stage sends for a step, by what they are for."""
    row, count, n, d, parameters = case.row_bytes, case.micro_batches, case.tensor, case.data, stage.parameters
    a_layer = (5 if case.sharded > 1 else 4) + 2 * (case.layout.recompute_granularity == "full")
    times = a_layer * stage.layers + stage.first
    all_rows = count * (times + work.predicted / case.seq_length * stage.last)
    ways = (not stage.first) + (not stage.last)
    copied, text = 8.0, f"2 (d - 1) / d x 4 x {parameters:,}"
    if case.layout.use_distributed_optimizer:
        copied, text = 4 + case.width, f"(d - 1) / d x (4 + w) x {parameters:,}"
    m, rows = f"m {count:,}", f"S H w = {_n(row)}B"
    found = [
        ("tensor parallel", all_rows * 2 * (n - 1) / n * row, f"{m} x {times} x 2 (t - 1) / t x {rows}, and the head"),
        ("pipeline", count * ways * case.turns * row / case.sharded, f"{m} x {ways} neighbours x {rows}"),
        ("data parallel", (d - 1) / d * copied * parameters, text),
    ]
    return [CostTerm(name, value, "bytes", formula) for name, value, formula in found if value]


def _n(value: float) -> str:
    """Return 1.5 G, ready for a unit."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} E"
