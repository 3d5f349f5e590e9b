"""Each kernel against its formula in float64, on the device that is to run it; those right on all ranks are used."""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaenc.console import print_rank_0

TOLERANCE = {torch.float32: 2**-16, torch.bfloat16: 2**-7}
"""Of results in these numbers, relative to their own size and that of all of them. Everything is computed in float32 and rounded
once, which puts a bfloat16 out by half of that where it is rounded to the nearest; triton's interpreter cuts off instead."""


@dataclass(frozen=True)
class SelfTestResult:
    """Result of a check of a kernel or an attention backend, which says what `error` and `tolerance` are relative to."""

    name: str
    available: bool
    """Whether it could be tried at all."""
    error: float | None
    """The largest that was found; None where nothing was computed."""
    tolerance: float
    reason: str
    """What speaks against it, for the console; empty where it is right."""

    @property
    def passed(self) -> bool:
        """Whether a run may use it."""
        return not self.reason


@dataclass(frozen=True)
class LayerWidths:
    """Of the model's tensors on one rank."""

    hidden: int
    head: int
    ffn: int
    vocabulary: int


Comparison = tuple[str, Tensor, Tensor]
"""Of what, found, expected in float64."""


def check_kernel(name: str, device: torch.device, dtype: torch.dtype, widths: LayerWidths) -> SelfTestResult:
    """Try the kernel `name` of `CHECKS` in float32 or bfloat16, on the `widths` of the model and some that fill no block."""
    worst = SelfTestResult(name, True, 0.0, TOLERANCE[dtype], "")
    try:
        for what, found, expected in CHECKS[name](_RandomTensors(device, dtype), widths):
            error, allowed = _max_relative_error(found, expected), TOLERANCE[found.dtype]
            if not error <= allowed:  # nor is a NaN
                return SelfTestResult(name, True, error, allowed, f"{what} is {error:.2g} off, allowed {allowed:.2g}")
            if error / allowed > worst.error / worst.tolerance:
                worst = SelfTestResult(name, True, error, allowed, "")
    except Exception as error:  # of whatever kind: compilers have their own
        said = str(error).strip().splitlines() or [""]
        return SelfTestResult(name, False, None, TOLERANCE[dtype], f"{type(error).__name__}: {said[0][:200]}")
    return worst


def _max_relative_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to what is expected there plus the root mean square of all that is."""
    if found.shape != expected.shape:
        raise ValueError(f"found shape {tuple(found.shape)}, expected {tuple(expected.shape)}")
    if not found.numel():
        return 0.0
    scale = (expected.abs() + expected.square().mean().sqrt()).clamp_(min=torch.finfo(torch.float64).tiny)
    return float(((found.double() - expected).abs() / scale).max())


class _RandomTensors:
    """Normal numbers, the same every time, that disturb nobody else's."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * size).to(self.device, self.dtype).requires_grad_()

    def label(self, rows: int, below: int) -> Tensor:
        return torch.randint(0, below, (rows,), generator=self.generator).to(self.device)


def _compare_with_formula(
    kernel: Callable[..., Tensor], formula: Callable[..., Tensor], draw: _RandomTensors, names: str, *inputs: Tensor
) -> Iterator[Comparison]:
    """Output and gradients of both for `inputs`, called `names`; the formula has them as float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = kernel(*inputs), formula(*exact)
    gradient = draw(*found.shape).detach()
    if found.dtype != inputs[0].dtype:
        raise TypeError(f"found {found.dtype}, expected {inputs[0].dtype}")
    yield "the output", found.detach(), expected.detach()
    to_inputs = torch.autograd.grad(found, inputs, gradient)
    to_exact = torch.autograd.grad(expected, exact, gradient.double())
    for name, here, there in zip(names.split(), to_inputs, to_exact, strict=True):
        yield f"the gradient of {name}", here, there


def _check_norm(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    from megaenc.model.kernels.launch import resident_programs
    from megaenc.model.kernels.norm import rms_norm

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-5)

    several = 2 * resident_programs(draw.device) + 3  # each program of the backward kernel goes round more than once
    for shape in ((5, 1, widths.hidden), (several, 1, 1728), (67, 1, 3, widths.head), (1, 1, 96), (200, 33), (0, 1, 96)):
        x, weight = draw(*shape, size=3.0), draw(shape[-1])
        yield from _compare_with_formula(lambda x, weight: rms_norm(x, weight, 1e-5), formula, draw, "x weight", x, weight)


def _check_rotary(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    from megaenc.model.functional import Rotation

    # Slices, as queries and keys are of the joint projection; rows at round addresses have a variant of their own.
    shapes = (7, 3, widths.head, 16), (7, 3, widths.head, 5), (5, 18, 96, 5), (3, 40, 64, 5), (1, 1, 10, 5), (0, 2, 64, 5)
    for tokens, heads, dim, beside in shapes:
        angles = draw(tokens, 1, 1, dim // 2, size=1000.0).detach().float()
        cos, sin = angles.cos(), angles.sin()
        rotation = Rotation(cos, sin, fused=True)

        def formula(x: Tensor, cos: Tensor = cos, sin: Tensor = sin, dim: int = dim) -> Tensor:
            first, second = x[..., :dim].chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        x = draw(tokens, 1, heads, dim + beside)
        yield from _compare_with_formula(lambda x, dim=dim, rotation=rotation: rotation(x[..., :dim]), formula, draw, "x", x)


def _check_swiglu(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    from megaenc.model.kernels.swiglu import swiglu

    def formula(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    for rows, width, size in ((5, widths.ffn, 1.0), (9, 171, 1.0), (3, 2500, 40.0), (1, 1, 1.0), (0, 8, 1.0)):
        yield from _compare_with_formula(swiglu, formula, draw, "x", draw(rows, 1, 2 * width, size=size))


def _check_loss(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    """The vocabulary as three ranks share it, of which the last has padding alone."""
    from megaenc.model.kernels.cross_entropy import softmax_statistics, logits_to_gradient_
    from megaenc.model.linear_cross_entropy import combine_statistics

    for rows, width, size in ((5, widths.vocabulary, 1.0), (9, 1000, 3.0), (1, 1, 1.0), (3, 4500, 30.0), (0, 100, 1.0)):
        columns = max(1, width - 63)
        whole = draw(rows, width + columns, size=size).detach()
        whole[: rows // 2] = whole[: rows // 2].round()  # many of the highest are equal
        if rows:
            whole[-1, -1] = whole[-1].max() + 1  # highest after others were so for a while
        labels = draw.label(rows, width + columns)
        exact = whole.double()
        ids = torch.arange(width + columns, device=exact.device)
        likeliest = ids.where(exact == exact.amax(1, keepdim=True), width + columns).amin(1)
        padded = torch.cat([whole, draw(rows, 2 * width - columns).detach().abs() + 1000], 1)
        shares = list(zip(padded.split(width, 1), (0, width, 2 * width), (width, columns, 0), strict=True))
        shares = [(logits.contiguous(), first, columns) for logits, first, columns in shares]
        top, total, target, token = combine_statistics(
            torch.stack([softmax_statistics(logits, labels, *share) for logits, *share in shares])
        )
        yield "the loss", total.log() + top - target, F.cross_entropy(exact, labels, reduction="none")
        yield "the guess", (token != likeliest).float(), torch.zeros(rows, dtype=torch.float64, device=exact.device)
        found = torch.cat([logits_to_gradient_(logits, labels, top, total, *share) for logits, *share in shares], 1)
        expected = exact.softmax(1) - F.one_hot(labels, width + columns)
        yield "the gradient of logits", found, F.pad(expected, (0, 2 * width - columns))


def _check_sum(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    from megaenc.model.linear_cross_entropy import accumulate_matmul

    for rows, columns, width in ((128, 256, widths.hidden), (40, 130, 72)):
        (a, b), (c, d) = ((draw(rows, columns).detach(), draw(rows, width).detach()) for _ in range(2))
        found = accumulate_matmul(accumulate_matmul(None, a.t(), b, in_float32=True), c.t(), d, in_float32=True)
        yield "a sum of products", found, a.double().t() @ b.double() + c.double().t() @ d.double()


CHECKS: dict[str, Callable[[_RandomTensors, LayerWidths], Iterator[Comparison]]] = {
    "norm": _check_norm,
    "rotary": _check_rotary,
    "swiglu": _check_swiglu,
    "loss": _check_loss,
    "sum": _check_sum,
}


@dataclass(frozen=True)
class FusedKernels:
    """Of each kernel whether it is used; a field for each of `CHECKS`."""

    norm: bool = False
    rotary: bool = False
    swiglu: bool = False
    loss: bool = False
    sum: bool = False


NO_FUSED_KERNELS = FusedKernels()


def select_fused_kernels(wanted: bool, device: torch.device, dtype: torch.dtype, widths: LayerWidths) -> FusedKernels:
    """Return the kernels for a model of `widths`; all processes of a run call it together. Those left out are named.

    On the host there are none, except under triton's interpreter, as tests have it (TRITON_INTERPRET=1).
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not wanted or (device.type == "cpu" and not interpreted):
        return NO_FUSED_KERNELS
    return _test_all_kernels(device, dtype, widths)


@functools.cache  # parts of an interleaved pipeline are built one by one
def _test_all_kernels(device: torch.device, dtype: torch.dtype, widths: LayerWidths) -> FusedKernels:
    verdicts = [check_kernel(name, device, dtype, widths) for name in CHECKS]
    return FusedKernels(**_agree_across_ranks(verdicts))


def _agree_across_ranks(verdicts: list[SelfTestResult]) -> dict[str, bool]:
    """By name, whether a kernel is right on all ranks; says which are not."""
    here = {verdict.name: verdict.reason for verdict in verdicts}
    everywhere = [here]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, here)
    reasons = {name: next((why[name] for why in everywhere if why[name]), "") for name in here}
    for why in dict.fromkeys(reasons.values()):  # one line where all have the same, such as no triton
        if why:
            print_rank_0(f"fused kernels: torch's own {', '.join(name for name in here if reasons[name] == why)} instead ({why})")
    return {name: not why for name, why in reasons.items()}
