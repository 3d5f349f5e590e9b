"""Classification of kernels by purpose, from their names or the time window in which they ran."""

import re
from collections import namedtuple
from collections.abc import Iterable, Sequence

MATMUL, FORWARD, BACKWARD = "matrix products", "attention forward", "attention backward"
ELEMENTWISE, LOSS, OPTIMIZER = "norm, rotary, SwiGLU, elementwise", "loss", "optimizer"
BUFFERS, COMMUNICATION, IDLE = "gradient buffers, copies", "communication", "idle"

SUGGESTIONS = {
    MATMUL: "larger micro-batches (recompute attention to make room), --fp8-format where the chip has 8-bit products",
    FORWARD: (faster := "another --attention-backend (see the comparison): flash-attn 4 on Hopper, if it is not in use"),
    BACKWARD: faster,
    ELEMENTWISE: "the activation inside the matrix product before it",
    LOSS: "a larger part of the predictions at a time: fewer and larger matrix products",
    OPTIMIZER: "more micro-batches an update, as a real run has",
    BUFFERS: "whether `sum` is among the fused kernels, without which gradients are added up after the matrix products",
    COMMUNICATION: "--overlap-grad-reduce and --overlap-param-gather",
    IDLE: "the host synchronisations that are listed; larger micro-batches, whose kernels take longer to run than to start",
}
"""Suggested optimization for each group."""
GROUPS = tuple(SUGGESTIONS)

# The order matters: flash attention kernels are also named cutlass, and backward kernels contain forward names.
_NAMES = (
    (ELEMENTWISE, r"norm_(forward|backward)_kernel|rotary|glu_(forward|backward)"),
    (COMMUNICATION, r"nccl|rccl|msccl|gloo:|c10d::"),
    (
        BACKWARD,
        r"flash_bwd|FlashAttnBwd|flash_bprop|sdpa\w*bprop|fmha_cutlassB|fmha\w*bwd|FmhaBwd|bwd_kernel_(dk|dq|fuse)|bwd_preprocess|"
        r"attn\w*bwd|dot_do_o|convert_dq|attention\w*_backward|_AttentionBackward",
    ),
    (
        FORWARD,
        r"flash_fwd|FlashAttnFwd|flash_fprop|sdpa\w*fprop|fmha_cutlassF|fmha\w*fwd|FmhaFwd|attn_fwd|attn\w*fwd|"
        r"scaled_dot_product|varlen_attn|^_Attention\b",
    ),
    (OPTIMIZER, r"[aA]dam|multi_tensor_(apply|l2norm|scale)|LpNormFunctor"),
    (LOSS, r"cross_entropy|SoftMax|softmax|nll_loss|logsumexp|(?<![a-z])loss"),
    (
        MATMUL,
        r"gemm|gemv|nvjet|cutlass|Cijk_|splitK|triton_(tem_fused_)?(mm|bmm)|"
        r"^aten::(mm|addmm|addmm_|bmm|baddbmm|mv|_scaled_mm|mkldnn\w*)$|^mkldnn",
    ),
    (
        BUFFERS,
        r"Memcpy|Memset|copyBuffer|fillBuffer|FillFunctor|CUDAFunctor_?[aA]dd<float>|copy_kernel|"
        r"^aten::(copy_|zero_|fill_|clone|_to_copy)$",
    ),
)


def classify_kernel(name: str) -> str:
    """Return the group of a kernel or host operation by its name; the elementwise group if no pattern matches."""
    return next((group for group, pattern in _NAMES if re.search(pattern, name)), ELEMENTWISE)


KernelEvent = namedtuple("KernelEvent", "name start_ns seconds")
"""Executed kernel: name, start in ns of the system clock, and duration in seconds."""
TimeWindow = namedtuple("TimeWindow", "group start_ns end_ns")
"""Time window in ns in which the host worked for one group."""


def sum_by_group(events: Iterable[KernelEvent], windows: Sequence[TimeWindow]) -> dict[str, float]:
    """Return seconds by group: products, attention, communication by kernel name, others by time window, else name."""
    seconds = dict.fromkeys(GROUPS[:-1], 0.0)
    for event in events:
        group = classify_kernel(event.name)
        if group not in (MATMUL, FORWARD, BACKWARD, COMMUNICATION):
            group = next((window.group for window in windows if window.start_ns <= event.start_ns <= window.end_ns), group)
        seconds[group] += event.seconds
    return seconds


def suggest_optimization(seconds: dict[str, float]) -> str:
    """Return a text with the slowest group other than matrix products, attention as one group, and a suggestion."""
    totals = {group: value for group, value in seconds.items() if group not in (MATMUL, FORWARD, BACKWARD)}
    totals["attention"] = seconds[FORWARD] + seconds[BACKWARD]
    largest = max(totals, key=totals.__getitem__)
    return f"{largest} takes most after matrix products: {SUGGESTIONS.get(largest, faster)}"
