"""Seconds of a step: computation by kind of operation, what is sent, the pipeline's idle time, the update."""

import math
from dataclasses import dataclass

from megaenc.estimate.case import Case, Stage, Term, Work
from megaenc.estimate.machines import Link, Rates
from megaenc.estimate.memory import LOGITS_AT_ONCE

BUCKET = 40_000_000  # parameters that megatron-core sends at once where gradients leave early, or 1,000,000 x ranks


@dataclass(frozen=True)
class StepTime:
    """A step under one objective."""

    seconds: float
    flops: float
    """of all ranks, as training counts them"""
    bubble: float
    """share of the pipeline's time in which a stage waits for others, on average"""
    slowest: int
    """the stage with the longest micro-batch"""
    terms: tuple[Term, ...]
    """seconds, those of the slowest stage, adding up to the step's"""
    sent: tuple[Term, ...]
    """bytes that one of its ranks sends a step"""


def step_time(case: Case, work: Work, rates: Rates) -> StepTime:
    """A step of `case` under `work`."""
    stages, count = case.every_stage(), case.micro_batches
    each = [micro_batch_terms(case, work, stage, rates) for stage in stages]
    times = [sum(term.value for term in terms) for terms in each]
    longest = max(times)
    slowest = times.index(longest)
    stage, idle = stages[slowest], (sum(times) - longest) / case.turns
    others = "the other stages' micro-batch" + ("" if case.turns == 1 else f" / {case.turns} turns")
    fills = f"{others}; even stages: (p - 1) of m + p - 1 = {count + case.stages - 1}"
    many = f"{count:,} micro-batch{'es' if count > 1 else ''}"
    computing = sum(term.value for term in each[slowest] if "all-reduce" not in term.name)
    terms = [
        *(Term(term.name, count * term.value, "s", f"{many} x {term.formula}") for term in each[slowest]),
        Term("pipeline fills and drains", idle, "s", fills),
        _border(case, rates),
        *_data_parallel(case, stage, rates, computing),
        _update(case, stage, rates),
    ]
    flops = case.global_batch_size * work.flops(case.shape, case.vocab_size)
    bubble = 1 - count * sum(times) / (case.stages * (count * longest + idle))
    kept = tuple(term for term in terms if term.value)
    return StepTime(sum(term.value for term in kept), flops, bubble, slowest, kept, tuple(sent(case, stage, work)))


def layer_bytes_moved(case: Case) -> float:
    """Bytes that everything but matrix products and attention reads and writes in a layer for a row, forward and backward.

    Counted kernel by kernel, w a number: norms and residuals 24 H, rotary positions 10 (q + k), heads side by side 4 q, SwiGLU
    16 F; and the layer's gradient is read and added to the float32 buffer, 8 + 2 w a parameter.
    """
    shape = case.shape
    hidden = 24 * shape.hidden_size / case.sharded
    inner = (14 * shape.query_size + 10 * case.keys + 16 * shape.ffn_hidden_size) / case.tensor
    return case.width * case.row * (hidden + inner) + (8 + 2 * case.width) * case.layer_parameters


def ends_bytes_moved(case: Case, work: Work, stage: Stage) -> float:
    """The same of embedding and loss, with the gradients of their matrices, 8 + 3 w a parameter, and 12 w H a token.

    A logit is 46 bytes in bfloat16, 36 in float32; each part of the logits adds to the output matrix's gradient, 12 or 8 bytes a
    parameter, which is then scaled and cast.
    """
    shape, matrix = case.shape, case.rows * case.shape.hidden_size
    each, adding, scaling = (46, 12, 14) if case.bf16 else (36, 8, 8)
    moved = 0.0
    if stage.first:
        moved += (8 + 3 * case.width) * matrix + 12 * case.width * case.row * shape.hidden_size
    if stage.last:
        logits = case.predicted(work.predicted) * case.rows
        parts = math.ceil(logits / max(LOGITS_AT_ONCE, case.rows))
        moved += (8 + 2 * case.width + scaling + adding * parts) * matrix + each * logits
    return moved


def micro_batch_terms(case: Case, work: Work, stage: Stage, rates: Rates) -> list[Term]:
    """One micro-batch forward and backward on a stage."""
    layers, part = stage.layers, stage.layers / case.shape.num_layers / case.tensor
    packs = case.micro_batch_size
    products = part * packs * work.body_flops(case.shape)
    attention = part * packs * work.attention_flops(case.shape)
    moved = layers * layer_bytes_moved(case)
    rate = rates.causal_attention if work.causal else rates.attention
    gemm, core, rest = products / rates.gemm, attention / rate, moved / rates.elementwise
    again = _recomputed(case, stage, gemm, core, rest)
    launches = max(0.0, layers * rates.layer_floor - gemm - core - rest)
    head = packs * work.head_flops(case.shape, case.rows * case.tensor) / case.tensor if stage.last else 0.0
    ends = ends_bytes_moved(case, work, stage)
    exposed = _tensor_parallel(case, stage, work, rates, gemm)
    return [
        Term("matrix products", gemm, "s", f"{_n(products)}FLOP / {_n(rates.gemm)}FLOP/s"),
        Term("attention", core, "s", f"{_n(attention)}FLOP / {_n(rate)}FLOP/s"),
        Term("norms, SwiGLU, copies", rest, "s", f"{_n(moved)}B / {_n(rates.elementwise)}B/s"),
        Term("computed again", again, "s", f"--recompute-granularity {case.layout.recompute_granularity}: forward once more"),
        Term("launches", launches, "s", f"{layers} layers x {rates.layer_floor:g} s at least, for the host starts each kernel"),
        Term("head", head / rates.gemm, "s", f"{_n(head)}FLOP / {_n(rates.gemm)}FLOP/s"),
        Term("embedding and loss", ends / rates.loss, "s", f"{_n(ends)}B / {_n(rates.loss)}B/s"),
        Term("start of a micro-batch", rates.start, "s", f"{rates.start:g} s of data and bookkeeping"),
        exposed,
    ]


def _recomputed(case: Case, stage: Stage, gemm: float, core: float, rest: float) -> float:
    """Seconds of the forward passes that recomputation repeats: a third of the products, two sevenths of attention."""
    layout, shape = case.layout, case.shape
    if not layout.recompute_granularity:
        return 0.0
    if layout.recompute_granularity == "full":
        method, number = layout.recomputed
        share = 1.0 if method == "uniform" else min(1.0, number * case.turns / max(stage.layers, 1))
        return share * (gemm / 3 + core * 2 / 7 + rest / 3)
    modules, inner = layout.recompute_modules or ("core_attn",), 3 * shape.ffn_hidden_size
    mlp = inner / (2 * shape.query_size + 2 * case.keys + inner)
    return ("core_attn" in modules) * core * 2 / 7 + ("mlp" in modules) * (gemm * mlp / 3 + rest / 4)


def _tensor_parallel(case: Case, stage: Stage, work: Work, rates: Rates, gemm: float) -> Term:
    """What a micro-batch waits for its tensor-parallel ranks.

    A layer reduces two rows forward and two backward; with sequence parallelism each is a gather and a scatter, and two more
    gathers backward. On accelerators those backward run beside the products with the weights (a third of all products).
    """
    name = "tensor-parallel all-reduce"
    if case.tensor == 1:
        return Term(name, 0.0, "s", "one rank")
    link = group_link(rates, 1, case.tensor)
    one = link.all_reduce(case.row * case.shape.hidden_size * case.width, case.tensor)
    forward, backward = 2.0 * stage.layers, (3.0 if case.sharded > 1 else 2.0) * stage.layers
    forward += stage.first + case.layout.sequence_parallel * stage.last / 2
    again = forward if case.layout.recompute_granularity == "full" else 0.0
    head = link.all_reduce(case.predicted(work.predicted) * case.shape.hidden_size * case.width, case.tensor) * stage.last
    hidden = 0.0 if rates.host else min(backward * one, gemm / 3)
    seconds = (forward + again + backward) * one + head - hidden
    text = f"{forward + again + backward:g} x {one:.3g} s, each 2 (t - 1) / t of {case.row:,} rows of H"
    return Term(name, seconds, "s", text + ("" if rates.host else f", {hidden:.3g} s beside products"))


def _border(case: Case, rates: Rates) -> Term:
    """What goes from stage to stage: in one-forward-one-backward each message is waited for, interleaved only at both ends."""
    name = "stage to stage"
    if case.stages == 1:
        return Term(name, 0.0, "s", "one stage")
    link = rates.inside if case.gpus <= rates.devices else rates.between
    one = link.send(case.row * case.shape.hidden_size * case.width / case.sharded)
    waited = 2 * (case.stages - 1) * case.turns + (0 if case.turns > 1 else 2 * (case.micro_batches - 1))
    return Term(name, waited * one, "s", f"{waited} messages x {one:.3g} s of {case.row:,} rows of H")


def _data_parallel(case: Case, stage: Stage, rates: Rates, micro_batch: float) -> list[Term]:
    """Gradients to all copies, and weights back where the optimizer is distributed; what overlaps hides behind a micro-batch."""
    if case.data == 1:
        return []
    layout, link = case.layout, group_link(rates, case.tensor, case.data)
    bucket = min(1.0, max(BUCKET, 1_000_000 * case.data) / stage.parameters)
    gradients, weights = 4.0 * stage.parameters, float(case.width * stage.parameters)

    def exposed(seconds: float, beside: float, overlap: bool) -> float:
        return max(bucket * seconds, seconds - beside) if overlap and not rates.host else seconds

    where = f"{case.data} ranks at {_n(link.bandwidth)}B/s"
    if not layout.use_distributed_optimizer:
        seconds = exposed(link.all_reduce(gradients, case.data), 2 / 3 * micro_batch, layout.overlap_grad_reduce)
        return [Term("gradients' all-reduce", seconds, "s", f"2 (d - 1) / d of {_n(gradients)}B, {where}")]
    scatter = exposed(link.gather(gradients, case.data), 2 / 3 * micro_batch, layout.overlap_grad_reduce)
    gather = exposed(link.gather(weights, case.data), 1 / 3 * micro_batch, layout.overlap_param_gather)
    return [
        Term("gradients' reduce-scatter", scatter, "s", f"(d - 1) / d of {_n(gradients)}B, {where}"),
        Term("weights' all-gather", gather, "s", f"(d - 1) / d of {_n(weights)}B, {where}"),
    ]


def update_bytes_moved(case: Case, stage: Stage) -> float:
    """Of an update: zeroing 4 and scaling 8 a parameter; of the optimizer's share the norm 4, clipping 8, AdamW 28, copy 6."""
    shared = case.data if case.layout.use_distributed_optimizer else 1
    return stage.parameters * (12 + (46 if case.bf16 else 40) / shared)


def _update(case: Case, stage: Stage, rates: Rates) -> Term:
    moved = update_bytes_moved(case, stage)
    text = f"{_n(moved)}B of weights, gradients and moments / {_n(rates.optimizer)}B/s"
    return Term("update", moved / rates.optimizer, "s", text)


def group_link(rates: Rates, stride: int, ranks: int) -> Link:
    """What connects `ranks` that lie `stride` apart: inside a node while they fit; else by the links of those that share one."""
    if stride * ranks <= rates.devices:
        return rates.inside
    together = max(1, rates.devices // stride)
    return Link(min(rates.inside.bandwidth, together * rates.between.bandwidth), rates.between.latency)


def sent(case: Case, stage: Stage, work: Work) -> list[Term]:
    """Bytes that one rank of a stage sends for a step, by what they are for."""
    row = case.row * case.shape.hidden_size * case.width
    count, n, d, parameters = case.micro_batches, case.tensor, case.data, stage.parameters
    found = []
    if n > 1:
        a_layer = (5 if case.sharded > 1 else 4) + 2 * (case.layout.recompute_granularity == "full")
        times = a_layer * stage.layers + stage.first
        head = case.predicted(work.predicted) / case.row * stage.last
        text = f"m {count:,} x {times} x 2 (t - 1) / t x S H w = {_n(row)}B, and the head"
        found.append(Term("tensor parallel", count * (times + head) * 2 * (n - 1) / n * row, "bytes", text))
    if case.stages > 1:
        ways = (not stage.first) + (not stage.last)
        text = f"m {count:,} x {ways} neighbours x S H w = {_n(row)}B"
        found.append(Term("pipeline", count * ways * case.turns * row / case.sharded, "bytes", text))
    if d > 1:
        times, text = 8.0, f"2 (d - 1) / d x 4 x {parameters:,}"
        if case.layout.use_distributed_optimizer:
            times, text = 4 + case.width, f"(d - 1) / d x (4 + w) x {parameters:,}"
        found.append(Term("data parallel", (d - 1) / d * times * parameters, "bytes", text))
    return found


def _n(value: float) -> str:
    """1.5 G, ready for a unit."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} E"
