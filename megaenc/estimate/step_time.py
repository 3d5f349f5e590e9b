"""Step time from computation, communication, pipeline bubble and optimizer step."""

import math
from dataclasses import dataclass

from megaenc.estimate.hardware import Link, Rates
from megaenc.estimate.layout_case import CostTerm, LayoutCase, ObjectiveWork, PipelineStage
from megaenc.estimate.memory import LOGIT_BYTES_AT_ONCE, LOGITS_AT_ONCE

BUCKET_SIZE = 40_000_000  # megatron-core's minimum bucket in parameters for overlapped gradient reduction; also 1,000,000 x ranks
_Seconds = tuple[str, float, str]  # name, value and formula of a term


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step under one objective, its FLOPs, idle fraction, and terms of its time and of its bytes sent."""

    seconds: float
    flops: float
    """training FLOPs of all ranks"""
    pipeline_bubble: float
    """average fraction of the time that a stage waits for others"""
    terms: tuple[CostTerm, ...]
    """seconds of the slowest stage by term, which sum to the step's"""
    sent: tuple[CostTerm, ...]
    """bytes that one of the slowest stage's ranks sends in a step"""


def compute_step_time(case: LayoutCase, work: ObjectiveWork, rates: Rates) -> StepTime:
    """Return the StepTime of a step in the layout `case` under one objective, by its slowest pipeline stage."""
    stages, count = case.build_stages(), case.micro_batches
    terms_by_stage = [micro_batch_terms(case, work, stage, rates) for stage in stages]
    times = [sum(seconds for _, seconds, _ in terms) for terms in terms_by_stage]
    stage, terms, longest = max(zip(stages, terms_by_stage, times, strict=True), key=lambda slowest: slowest[2])
    idle = (sum(times) - longest) / case.virtual_stages
    others = "the other stages' micro-batch" + ("" if case.virtual_stages == 1 else f" / {case.virtual_stages} turns")
    fills = f"{others}; even stages: (p - 1) of m + p - 1 = {count + case.num_stages - 1}"
    count_text = f"{count:,} micro-batch{'es' if count > 1 else ''}"
    compute_seconds = sum(seconds for name, seconds, _ in terms if "all-reduce" not in name)
    optimizer_bytes = optimizer_bytes_moved(case, stage)
    rows = [
        *((name, count * seconds, f"{count_text} x {formula}") for name, seconds, formula in terms),
        ("pipeline fills and drains", idle, fills),
        _pipeline_term(case, rates),
        _tied_embedding_term(case, rates),
        *_data_parallel_terms(case, stage, rates, compute_seconds),
        (
            "update",
            optimizer_bytes / rates.optimizer,
            f"{_format_si(optimizer_bytes)}B of weights, gradients and moments / {_format_si(rates.optimizer)}B/s",
        ),
        *_muon_terms(case, stage, rates),
    ]
    terms = tuple(CostTerm(name, seconds, "s", formula) for name, seconds, formula in rows if seconds)
    flops = case.global_batch_size * work.flops(case.shape, case.vocab_size)
    bubble = 1 - count * sum(times) / (case.num_stages * (count * longest + idle))
    return StepTime(sum(term.value for term in terms), flops, bubble, terms, tuple(communication_terms(case, stage, work)))


def layer_bytes_moved(case: LayoutCase, host: bool) -> float:
    """Return the bytes that one layer's elementwise kernels read and write for a micro-batch, forward and backward.

    In values of w bytes per token: norms with their residual additions 16 H, split and rotation of the joint projection
    4 (q + 2 k) (with norms of heads 14 q + 10 k), SwiGLU or GeGLU 8 F. Weight gradients are added to the float32 buffer by the
    product, 8 bytes per parameter. `host`: a CPU, where the activation takes 16 F, and in bfloat16 the addition 8 + 2 w.
    LayerNorms by torch's own operations, on a CPU or with biases, take 24 H; dropout of attention's output 4 H more.
    """
    shape, w = case.shape, case.value_bytes
    is_by_torch = shape.normalization == "LayerNorm" and (host or shape.norm_bias)
    values = (24 if is_by_torch else 16) + (4 if shape.attention_output_dropout else 0)
    hidden = values * shape.hidden_size / case.sequence_shards
    heads = 14 * shape.query_size + 10 * case.kv_size if shape.qk_layernorm else 4 * (shape.query_size + 2 * case.kv_size)
    inner = (heads + (16 if host else 8) * shape.ffn_hidden_size) / case.tensor_parallel_size
    adding = 8 + 2 * w if host and case.bf16 else 8
    return w * case.micro_batch_tokens * (hidden + inner) + adding * case.layer_parameters


def unneeded_bytes_moved(case: LayoutCase, work: ObjectiveWork, host: bool) -> float:
    """Return the bytes of `layer_bytes_moved` that the last layer saves by leaving out tokens: of a norm, 8 H, and SwiGLU."""
    inner = (16 if host else 8) * case.shape.ffn_hidden_size / case.tensor_parallel_size
    return case.value_bytes * case.packs_at_once * work.unneeded_tokens * (8 * case.shape.hidden_size + inner)


def embedding_loss_bytes_moved(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, host: bool) -> float:
    """Return the bytes that a stage's embedding and loss read and write for a micro-batch, with weight gradients.

    Embedding: 8 + 3 w per parameter and 12 w H per token. Loss: 4 w per logit; `host`, a CPU: 46 in bfloat16, 36 in float32. Each
    chunk of logits adds to the output matrix's gradient, 8 per parameter (CPU in bfloat16: 12). A tied matrix's is then scaled,
    cast and added to the embedding's.
    """
    matrix, w = case.vocab_rows * case.shape.hidden_size, case.value_bytes
    each, adding, scaling = (46, 12, 14) if case.bf16 else (36, 8, 8)
    if not host:
        each, adding = 4 * w, 8
    moved = 0.0
    if stage.has_embedding:
        moved += (8 + 3 * w) * matrix + 12 * case.hidden_bytes
    if stage.has_head:
        logits = case.packs_at_once * work.predicted * case.vocab_rows
        parts = math.ceil(logits / max(LOGITS_AT_ONCE if host else LOGIT_BYTES_AT_ONCE / w, case.vocab_rows))
        tied = 0 if case.shape.untie_embeddings_and_output_weights else 8 + 2 * w + scaling
        moved += (tied + adding * parts) * matrix + each * logits
    return moved


def micro_batch_terms(case: LayoutCase, work: ObjectiveWork, stage: PipelineStage, rates: Rates) -> list[_Seconds]:
    """Return (name, seconds, formula) of each part of one micro-batch's forward and backward pass on a stage."""
    layers, packs = stage.layers, case.packs_at_once
    part = layers / case.shape.num_layers / case.tensor_parallel_size
    products = part * packs * work.body_flops(case.shape)
    attention = part * packs * work.attention_flops(case.shape)
    moved = layers * layer_bytes_moved(case, rates.host)
    if stage.has_head and layers:
        products -= packs * work.unneeded_flops(case.shape) / case.tensor_parallel_size
        moved -= unneeded_bytes_moved(case, work, rates.host)
    rate = rates.causal_attention if work.is_causal else rates.attention
    gemm, core, rest = products / rates.gemm, attention / rate, moved / rates.elementwise
    again = _recompute_seconds(case, stage, gemm, core, rest, rates.host)
    launches = max(0.0, layers * rates.layer_floor - gemm - core - rest)
    head = (
        packs * work.head_flops(case.shape, case.vocab_rows * case.tensor_parallel_size) / case.tensor_parallel_size
        if stage.has_head
        else 0.0
    )
    ends = embedding_loss_bytes_moved(case, work, stage, rates.host)
    return [
        ("matrix products", gemm, f"{_format_si(products)}FLOP / {_format_si(rates.gemm)}FLOP/s"),
        ("attention", core, f"{_format_si(attention)}FLOP / {_format_si(rate)}FLOP/s"),
        ("norms, SwiGLU, copies", rest, f"{_format_si(moved)}B / {_format_si(rates.elementwise)}B/s"),
        ("computed again", again, f"--recompute-granularity {case.layout.recompute_granularity}: forward once more"),
        ("launches", launches, f"{layers} layers x {rates.layer_floor:g} s at least, the host's kernel launches"),
        ("head", head / rates.gemm, f"{_format_si(head)}FLOP / {_format_si(rates.gemm)}FLOP/s"),
        ("embedding and loss", ends / rates.loss, f"{_format_si(ends)}B / {_format_si(rates.loss)}B/s"),
        ("start of a micro-batch", rates.start, f"{rates.start:g} s of data and bookkeeping"),
        _tensor_parallel_term(case, stage, work, rates, gemm),
    ]


def _recompute_seconds(case: LayoutCase, stage: PipelineStage, gemm: float, core: float, rest: float, host: bool) -> float:
    """Return the seconds of recomputed forward passes: a third of matrix products, two sevenths of attention."""
    shape = case.shape
    if case.layout.recompute_granularity == "full":
        return _recomputed_fraction(case, stage) * (gemm / 3 + core * 2 / 7 + rest / 3)
    modules = case.layout.selected_recompute_modules
    inner = 3 * shape.ffn_hidden_size
    mlp = inner / (2 * shape.query_size + 2 * case.kv_size + inner)
    seconds = ("core_attn" in modules) * core * 2 / 7 + ("mlp" in modules) * (gemm * mlp / 3 + rest / 4)
    if "activation" in modules and "mlp" not in modules:  # 3 F of the elementwise work are done twice
        moved = layer_bytes_moved(case, host)
        again = 3 * shape.ffn_hidden_size * case.value_bytes * case.micro_batch_tokens / case.tensor_parallel_size
        seconds += rest * again / moved
    return seconds


def _recomputed_fraction(case: LayoutCase, stage: PipelineStage) -> float:
    """Return the fraction of a stage's layers of which full recomputation repeats the forward pass."""
    method, number = case.layout.full_recompute
    return 1.0 if method == "uniform" else min(1.0, number * case.virtual_stages / max(stage.layers, 1))


def count_hidden_exchanges(case: LayoutCase, stage: PipelineStage, work: ObjectiveWork) -> tuple[float, float]:
    """Return how often tensor-parallel ranks exchange hidden states in a micro-batch, and how often while others compute.

    In units of an all-reduce, of which an all-gather or a reduce-scatter is half. A layer has two forward and two backward; with
    sequence parallelism also two all-gathers backward, because inputs of products are not kept whole. Those, and the ones of
    gradients, overlap with a product on accelerators; with sequence parallelism the all-gathers of gradients do not. The last
    layer exchanges only predicted positions after its attention.
    """
    forward = 2.0 * stage.layers
    of_layer = 0.0
    if case.layout.recompute_granularity == "full":
        of_layer = 2.0 * _recomputed_fraction(case, stage)
    elif "mlp" in case.layout.selected_recompute_modules:
        of_layer = 1.0
    again = of_layer * stage.layers
    backward = (3.0 if case.sequence_shards > 1 else 2.0) * stage.layers
    ends = stage.has_embedding + stage.has_head * (case.sequence_shards > 1) / 2  # the head gathers, its backward is a split
    left_out = work.unneeded_tokens / work.tokens if stage.has_head and stage.layers else 0.0
    return forward + again + backward + ends - (3.0 + of_layer) * left_out, 2.0 * stage.layers - left_out


def _head_bytes(case: LayoutCase, work: ObjectiveWork) -> tuple[float, float]:
    """Return the bytes that the loss of a micro-batch all-reduces, gradients of hidden states, and all-gathers, statistics.

    The statistics are four float32 for each prediction from each tensor-parallel rank.
    """
    predicted = case.packs_at_once * work.predicted
    return predicted * case.shape.hidden_size * case.value_bytes, predicted * 16 * case.tensor_parallel_size


def _tensor_parallel_term(case: LayoutCase, stage: PipelineStage, work: ObjectiveWork, rates: Rates, gemm: float) -> _Seconds:
    """Return the exposed tensor-parallel communication of a micro-batch as (name, seconds, formula).

    On accelerators what can overlap (`count_hidden_exchanges`) does so with the weight gradients, a third of all products.
    """
    ranks = case.tensor_parallel_size
    link = group_link(rates, 1, ranks)
    one = link.all_reduce(case.hidden_bytes, ranks)
    times, overlapping = count_hidden_exchanges(case, stage, work)
    gradients, statistics = _head_bytes(case, work)
    head = (link.all_reduce(gradients, ranks) + link.gather(statistics, ranks)) * stage.has_head
    hidden = 0.0 if rates.host else min(overlapping * one, gemm / 3)
    text = f"{times:g} x {one:.3g} s, each 2 (t - 1) / t of {case.micro_batch_tokens:,} rows of H"
    text += "" if rates.host else f", {hidden:.3g} s overlapped"
    return ("tensor-parallel all-reduce", times * one + head - hidden, text)


def _pipeline_term(case: LayoutCase, rates: Rates) -> _Seconds:
    """Return the exposed pipeline communication of a step: every message in 1F1B, only warm-up and cool-down if interleaved."""
    link = rates.inside if case.gpus <= rates.devices else rates.between
    one = link.send(case.hidden_bytes / case.sequence_shards)
    between = case.num_stages > 1 and case.virtual_stages == 1
    waited = 2 * (case.num_stages - 1) * case.virtual_stages + between * 2 * (case.micro_batches - 1)
    return ("stage to stage", waited * one, f"{waited} messages x {one:.3g} s of {case.micro_batch_tokens:,} rows of H")


def _tied_embedding_bytes(case: LayoutCase) -> int:
    """Return the bytes of the gradient of a tied embedding that the first and the last stage all-reduce; 0 if there is none."""
    is_copied = case.num_stages > 1 and not case.shape.untie_embeddings_and_output_weights
    return 4 * is_copied * case.vocab_rows * case.shape.hidden_size


def _tied_embedding_term(case: LayoutCase, rates: Rates) -> _Seconds:
    """Return the all-reduce of a tied embedding's gradient between the first and the last stage, which all others wait for."""
    size, link = _tied_embedding_bytes(case), rates.inside if case.gpus <= rates.devices else rates.between
    return ("tied embedding's all-reduce", link.all_reduce(size, 2) if size else 0.0, f"{_format_si(size)}B, 2 ranks")


def _data_parallel_terms(case: LayoutCase, stage: PipelineStage, rates: Rates, micro_batch: float) -> list[_Seconds]:
    """Return the exposed gradient reduction and, with a distributed optimizer, weight gathering as (name, seconds, formula).

    Overlapped communication hides behind one micro-batch.
    """
    if case.data_parallel_size == 1:
        return []
    layout, link = case.layout, group_link(rates, case.tensor_parallel_size, case.data_parallel_size)
    bucket = min(1.0, max(BUCKET_SIZE, 1_000_000 * case.data_parallel_size) / stage.parameters)
    where = f"{case.data_parallel_size} ranks at {_format_si(link.bandwidth)}B/s"

    def term(name: str, times: int, size: float, compute_seconds: float, overlap: bool) -> _Seconds:
        seconds = times * link.gather(size, case.data_parallel_size)
        exposed = max(bucket * seconds, seconds - compute_seconds) if overlap and not rates.host else seconds
        return (name, exposed, f"{'2 ' * (times - 1)}(d - 1) / d of {_format_si(size)}B, {where}")

    gradients, weights = 4.0 * stage.parameters, float(case.value_bytes * stage.parameters)
    if not layout.use_distributed_optimizer:
        return [term("gradients' all-reduce", 2, gradients, 2 / 3 * micro_batch, layout.overlap_grad_reduce)]
    return [
        term("gradients' reduce-scatter", 1, gradients, 2 / 3 * micro_batch, layout.overlap_grad_reduce),
        term("weights' all-gather", 1, weights, 1 / 3 * micro_batch, layout.overlap_param_gather),
    ]


def optimizer_bytes_moved(case: LayoutCase, stage: PipelineStage) -> float:
    """Return the bytes that an optimizer step reads and writes on one rank of a stage.

    Per parameter: zeroing gradients 4; per parameter of the optimizer's shard: norm 4, AdamW with the division 32, cast 6.
    """
    shared = case.data_parallel_size if case.layout.use_distributed_optimizer else 1
    return stage.parameters * (4 + (42 if case.bf16 else 36) / shared)


def _muon_terms(case: LayoutCase, stage: PipelineStage, rates: Rates) -> list[_Seconds]:
    """Return Muon's orthogonalization and the exchange of its matrices, as (name, seconds, formula); [] without Muon.

    An iteration on a matrix of m x n, m the smaller, takes 4 m^2 n + 2 m^3 FLOPs; tensor-parallel ranks do all of it together.
    """
    if not case.newton_schulz_steps:
        return []
    shape, replicas = case.shape, case.data_parallel_size
    widths = (*2 * (shape.query_size, case.kv_size), *3 * (shape.ffn_hidden_size,))  # of Q, K, output, V, gate, up, down
    sides = [(shape.hidden_size, width) for width in widths]
    flops = sum(4 * min(pair) ** 2 * max(pair) + 2 * min(pair) ** 3 for pair in sides)
    flops *= case.newton_schulz_steps * stage.layers / replicas
    terms = [("orthogonalization", flops / rates.gemm, f"{_format_si(flops)}FLOP / {_format_si(rates.gemm)}FLOP/s")]
    if replicas == 1:
        return terms
    link, size = group_link(rates, case.tensor_parallel_size, replicas), _muon_bytes(case, stage)
    text = f"{_format_si(size)}B, {replicas} ranks at {_format_si(link.bandwidth)}B/s"
    return [*terms, ("Muon's matrices", link.gather(size, replicas), text)]


def _muon_bytes(case: LayoutCase, stage: PipelineStage) -> float:
    """Return the bytes of Muon's matrices that replicas exchange, of which each rank sends (d - 1) / d; 0 without Muon.

    Each rank gets all updates; with a distributed optimizer momenta and updates only go from range to matrix and back.
    """
    shape = case.shape
    widths = 2 * shape.query_size + 2 * case.kv_size + 3 * shape.ffn_hidden_size
    size = case.value_bytes * stage.layers * shape.hidden_size * widths / case.tensor_parallel_size
    size = size * 2 / case.data_parallel_size if case.layout.use_distributed_optimizer else size
    return size if case.newton_schulz_steps else 0.0


def group_link(rates: Rates, stride: int, ranks: int) -> Link:
    """Return the Link of `ranks` ranks, `stride` apart: in a node if they fit, else limited by links between nodes."""
    if stride * ranks <= rates.devices:
        return rates.inside
    together = max(1, rates.devices // stride)
    return Link(min(rates.inside.bandwidth, together * rates.between.bandwidth), rates.between.latency)


def communication_terms(case: LayoutCase, stage: PipelineStage, work: ObjectiveWork) -> list[CostTerm]:
    """Return a term for each parallelism in use: the bytes that one rank of a stage sends per step."""
    row, count, n, d, parameters = (
        case.hidden_bytes,
        case.micro_batches,
        case.tensor_parallel_size,
        case.data_parallel_size,
        stage.parameters,
    )
    times, _ = count_hidden_exchanges(case, stage, work)
    gradients, statistics = _head_bytes(case, work)
    tensor = count * (2 * times * row + stage.has_head * (2 * gradients + statistics))
    if case.sequence_shards > 1:
        tensor += (
            2 * 4 * (stage.layers * case.shape.norms_per_layer + stage.has_head) * case.shape.norm_size(case.shape.hidden_size)
        )
    ways = (2 * case.virtual_stages - stage.has_embedding - stage.has_head) * (case.num_stages > 1)
    tied = (stage.has_embedding or stage.has_head) * _tied_embedding_bytes(case)
    bytes_per_parameter, text = 8.0, f"2 (d - 1) / d x 4 x {parameters:,}"
    if case.layout.use_distributed_optimizer:
        bytes_per_parameter, text = 4 + case.value_bytes, f"(d - 1) / d x (4 + w) x {parameters:,}"
    m, rows = f"m {count:,}", f"S H w = {_format_si(row)}B"
    quantities = [
        ("tensor parallel", (n - 1) / n * tensor, f"{m} x {times:g} x 2 (t - 1) / t x {rows}, the head, norms under SP"),
        ("pipeline", count * ways * row / case.sequence_shards, f"{m} x {ways} messages x {rows}"),
        ("tied embedding", float(tied), f"float32 gradient of {case.vocab_rows:,} rows, between first and last stage"),
        ("data parallel", (d - 1) / d * bytes_per_parameter * parameters, text),
        ("Muon's matrices", (d - 1) / d * _muon_bytes(case, stage), "momenta and updates"),
    ]
    return [CostTerm(name, value, "bytes", formula) for name, value, formula in quantities if value]


def _format_si(value: float) -> str:
    """Return a number with an SI prefix, such as "1.5 G", for a unit to follow."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} E"
