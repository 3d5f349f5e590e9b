"""Self-tests of the Triton kernels, and selection of those that pass on all ranks.

Results are compared with formulas in float64.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megaenc.backend.reductions import gather_lowest
from megaenc.console import print_rank_0
from megaenc.model.kernels import NO_FUSED_KERNELS, FusedKernels

TOLERANCE = {torch.float32: 2**-16, torch.bfloat16: 2**-7}
"""Tolerance of results by dtype, relative to their own magnitude plus the root mean square of all.
Kernels compute in float32 and round once, which in bfloat16 is an error of half of this; Triton's
interpreter truncates instead."""


@dataclass(frozen=True)
class SelfTestResult:
    """Result of the self-test of a kernel or an attention backend on this rank.

    name: kernel or backend; available: whether it could run at all, True for a backend that raises
    an exception; error: largest relative error, of a failure the first above the tolerance; None
    without a result; tolerance: limit of the error; reason: reason for failure, for the console,
    without a full stop; empty if it passed.
    """

    name: str
    available: bool
    error: float | None
    tolerance: float
    reason: str

    @property
    def passed(self) -> bool:
        """Return whether the self-test passed, so that a run may use what it tested."""
        return not self.reason


@dataclass(frozen=True)
class LayerWidths:
    """Widths of the model's tensors on one rank.

    hidden: hidden size; head: width of an attention head; ffn: width inside the gated MLP;
    vocabulary: vocabulary with padding. The last two are a tensor-parallel rank's parts.
    """

    hidden: int
    head: int
    ffn: int
    vocabulary: int


Comparison = tuple[str, Tensor, Tensor]
"""(label, actual result, expected result in float64)"""


def check_kernel(
    name: str, device: torch.device, dtype: torch.dtype, widths: LayerWidths
) -> SelfTestResult:
    """Return the result of testing a Triton kernel against float64 on this rank.

    An exception, also that of an unknown `name`, is a failed result with `available` False. Torch's
    global generators are not used.

    Args:
        name: Key of CHECKS, which is a field of FusedKernels.
        dtype: Dtype of activations and weights, a key of TOLERANCE; another one raises KeyError.
        widths: Widths of the model, which are tested next to others.
    """
    worst = SelfTestResult(name, True, 0.0, TOLERANCE[dtype], "")
    try:
        for label, actual, expected in CHECKS[name](_RandomTensors(device, dtype), widths):
            error = _max_relative_error(actual, expected)
            tolerance = TOLERANCE[actual.dtype]
            if not error <= tolerance:  # also if it is NaN
                return SelfTestResult(
                    name,
                    True,
                    error,
                    tolerance,
                    f"{label} is off by {error:.2g} (tolerance {tolerance:.2g})",
                )
            if error / tolerance > worst.error / worst.tolerance:
                worst = SelfTestResult(name, True, error, tolerance, "")
    except Exception as error:  # compilers raise errors of many types
        lines = str(error).strip().splitlines() or [""]
        return SelfTestResult(
            name, False, None, TOLERANCE[dtype], f"{type(error).__name__}: {lines[0][:200]}"
        )
    return worst


def _max_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of an element.

    It is |actual - expected| relative to |expected| plus the root mean square of all.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"found shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if not actual.numel():
        return 0.0
    scale = (expected.abs() + expected.square().mean().sqrt()).clamp_(
        min=torch.finfo(torch.float64).tiny
    )
    return float(((actual.double() - expected).abs() / scale).max())


class _RandomTensors:
    """Source of reproducible random tensors with its own generator."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, size: float = 1.0) -> Tensor:
        """Draw normal numbers with standard deviation `size`, which require gradients."""
        return (
            (torch.randn(shape, generator=self.generator) * size)
            .to(self.device, self.dtype)
            .requires_grad_()
        )

    def labels(self, rows: int, below: int) -> Tensor:
        """Return random token ids from 0 to `below` - 1 on the device, int64[rows]."""
        return torch.randint(0, below, (rows,), generator=self.generator).to(self.device)


def _compare_with_formula(
    kernel: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    draw: _RandomTensors,
    names: str,
    *inputs: Tensor,
) -> Iterator[Comparison]:
    """Yield the output and the gradients of a kernel and of its formula.

    The formula gets inputs in float64.

    Args:
        names: Names of the inputs, separated by spaces.
    """
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual = kernel(*inputs)
    expected = formula(*exact)
    gradient = draw(*actual.shape).detach()
    if actual.dtype != inputs[0].dtype:
        raise TypeError(f"found {actual.dtype}, expected {inputs[0].dtype}")
    yield "the output", actual.detach(), expected.detach()
    actual_gradients = torch.autograd.grad(actual, inputs, gradient)
    expected_gradients = torch.autograd.grad(expected, exact, gradient.double())
    for name, *gradients in zip(names.split(), actual_gradients, expected_gradients, strict=True):
        yield f"the gradient of {name}", *gradients


def _check_norm(draw: _RandomTensors, widths: LayerWidths, kernel: str) -> Iterator[Comparison]:
    """Yield comparisons of a norm's kernels with torch's.

    `kernel` is rms_norm or layer_norm.
    """
    from megaenc.model.kernels.launch import resident_programs
    from megaenc.model.kernels.norm import layer_norm, rms_norm

    norm = rms_norm if kernel == "rms_norm" else layer_norm

    def formula(x: Tensor, weight: Tensor) -> Tensor:
        if kernel == "rms_norm":
            return F.rms_norm(x, weight.shape, weight, 1e-5)
        return F.layer_norm(x, weight.shape, weight, None, 1e-5)

    # Each program of the backward kernel iterates more than once.
    many_rows = 2 * resident_programs(draw.device) + 3
    for shape in (
        (5, 1, widths.hidden),
        (many_rows, 1, 1728),
        (67, 1, 3, widths.head),
        (1, 1, 96),
        (200, 33),
        (0, 1, 96),
    ):
        x = draw(*shape, size=3.0)
        weight = draw(shape[-1])
        yield from _compare_with_formula(
            lambda x, weight: norm(x, weight, 1e-5), formula, draw, "x weight", x, weight
        )
        # Whole numbers, whose sums need no rounding.
        x = draw(*shape, size=3.0).detach().round().requires_grad_()
        residual = draw(*shape, size=3.0).detach().round().requires_grad_()
        yield from _compare_with_formula(
            lambda x, residual, weight: torch.stack(norm(x, weight, 1e-5, residual)),
            lambda x, residual, weight: torch.stack([x + residual, formula(x + residual, weight)]),
            draw,
            "x residual weight",
            x,
            residual,
            weight,
        )


def _check_rotary(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    """Yield comparisons of the rotary kernel with its formula."""
    from megaenc.model.functional import Rotation

    # Slices, as queries and keys are of the joint projection; aligned rows have their own variant
    # of the kernel.
    shapes = (
        (7, 3, widths.head, 16),
        (7, 3, widths.head, 5),
        (5, 18, 96, 5),
        (3, 40, 64, 5),
        (1, 1, 10, 5),
        (0, 2, 64, 5),
    )
    for tokens, heads, dim, gap in shapes:
        angles = draw(tokens, 1, 1, dim // 2, size=1000.0).detach().float()
        cos = angles.cos()
        sin = angles.sin()
        rotation = Rotation(cos, sin, fused=True)

        def formula(x: Tensor, cos: Tensor = cos, sin: Tensor = sin, dim: int = dim) -> Tensor:
            first, second = x[..., :dim].chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        x = draw(tokens, 1, heads, dim + gap)
        yield from _compare_with_formula(
            lambda x, dim=dim, rotation=rotation: rotation(x[..., :dim]), formula, draw, "x", x
        )
        for per_group in (1, 3):

            def split(mixed: Tensor, dim: int = dim, rotation: Rotation = rotation) -> Tensor:
                return torch.cat([part.flatten(1) for part in rotation.split(mixed, dim)], 1)

            def split_formula(
                mixed: Tensor, heads: int = heads, dim: int = dim, formula: Callable = formula
            ) -> Tensor:
                blocks = mixed.view(len(mixed), heads, mixed.size(3) // dim, dim)
                q, k, v = blocks.split([blocks.size(2) - 2, 1, 1], 2)
                return torch.cat([part.flatten(1) for part in (formula(q), formula(k), v)], 1)

            mixed = draw(tokens, 1, heads, (per_group + 2) * dim)
            yield from _compare_with_formula(split, split_formula, draw, "mixed", mixed)


def _check_glu(draw: _RandomTensors, widths: LayerWidths, kernel: str) -> Iterator[Comparison]:
    """Yield comparisons of a kernel's gated activations with their formulas in torch.

    `kernel` is swiglu or geglu.
    """
    from megaenc.model.functional import ACTIVATIONS
    from megaenc.model.kernels.glu import glu

    def formula(x: Tensor, name: str) -> Tensor:
        gate, up = x.chunk(2, -1)
        return ACTIVATIONS[name].function(gate) * up

    for name in (name for name, activation in ACTIVATIONS.items() if activation.kernel == kernel):
        function = functools.partial(glu, activation=name)
        expected = functools.partial(formula, name=name)
        for rows, width, size in (
            (5, widths.ffn, 1.0),
            (9, 171, 1.0),
            (3, 2500, 40.0),
            (1, 1, 1.0),
            (0, 8, 1.0),
        ):
            yield from _compare_with_formula(
                function, expected, draw, "x", draw(rows, 1, 2 * width, size=size)
            )


def _check_dropout(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    """Yield comparisons of the dropout kernel with torch's operations.

    Both drop the same elements.
    """
    from megaenc.model.functional import dropout

    for rows, width, layer, probability in (
        (5, widths.hidden, 1, 0.1),
        (7, 171, 90, 0.5),
        (3, 2500, 7, 0.9),
        (0, 8, 1, 0.1),
    ):
        keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=draw.generator).to(draw.device)

        def drop(
            x: Tensor, keys: Tensor = keys, layer: int = layer, probability: float = probability
        ) -> Tensor:
            return dropout(x, keys, layer, probability, fused=x.dtype != torch.float64)

        yield from _compare_with_formula(drop, drop, draw, "x", draw(rows, 1, width))


def _check_loss(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    """Yield comparisons of the cross-entropy kernels with torch's.

    The vocabulary is split over three parts, of which the last has only padding.
    """
    from megaenc.model.kernels.cross_entropy import logits_to_gradient_, softmax_statistics
    from megaenc.model.linear_cross_entropy import combine_statistics

    for rows, width, size in (
        (5, widths.vocabulary, 1.0),
        (9, 1000, 3.0),
        (1, 1, 1.0),
        (3, 4500, 30.0),
        (0, 100, 1.0),
    ):
        columns = max(1, width - 63)
        scores = draw(rows, width + columns, size=size).detach()
        scores[: rows // 2] = scores[: rows // 2].round()  # ties for the highest score
        if rows:
            scores[-1, -1] = scores[-1].max() + 1  # the highest score comes last
        labels = draw.labels(rows, width + columns)
        exact = scores.double()
        ids = torch.arange(width + columns, device=exact.device)
        likeliest = ids.where(exact == exact.amax(1, keepdim=True), width + columns).amin(1)
        padded = torch.cat([scores, draw(rows, 2 * width - columns).detach().abs() + 1000], 1)
        parts = list(
            zip(padded.split(width, 1), (0, width, 2 * width), (width, columns, 0), strict=True)
        )
        parts = [(logits.contiguous(), first, columns) for logits, first, columns in parts]
        highest, total, target, token = combine_statistics(
            torch.stack([softmax_statistics(logits, labels, *part) for logits, *part in parts])
        )
        yield (
            "the loss",
            total.log() + highest - target,
            F.cross_entropy(exact, labels, reduction="none"),
        )
        yield (
            "the prediction",
            (token != likeliest).float(),
            torch.zeros(rows, dtype=torch.float64, device=exact.device),
        )
        actual = torch.cat(
            [logits_to_gradient_(logits, labels, highest, total, *part) for logits, *part in parts],
            1,
        )
        expected = exact.softmax(1) - F.one_hot(labels, width + columns)
        yield "the gradient of logits", actual, F.pad(expected, (0, 2 * width - columns))


def _check_sum(draw: _RandomTensors, widths: LayerWidths) -> Iterator[Comparison]:
    """Yield comparisons of the float32 accumulation of matrix products with float64."""
    from megaenc.backend.main_grad import accumulate_matmul

    for rows, columns, width in ((128, 256, widths.hidden), (40, 130, 72)):
        a = draw(rows, columns).detach()
        b = draw(rows, width).detach()
        c = draw(rows, columns).detach()
        d = draw(rows, width).detach()
        actual = accumulate_matmul(
            accumulate_matmul(None, a.t(), b, in_float32=True), c.t(), d, in_float32=True
        )
        yield "a sum of products", actual, a.double().t() @ b.double() + c.double().t() @ d.double()


CHECKS: dict[str, Callable[[_RandomTensors, LayerWidths], Iterator[Comparison]]] = {
    "norm": functools.partial(_check_norm, kernel="rms_norm"),
    "layer_norm": functools.partial(_check_norm, kernel="layer_norm"),
    "rotary": _check_rotary,
    "swiglu": functools.partial(_check_glu, kernel="swiglu"),
    "geglu": functools.partial(_check_glu, kernel="geglu"),
    "dropout": _check_dropout,
    "loss": _check_loss,
    "sum": _check_sum,
}


def select_fused_kernels(
    enabled: bool,
    device: torch.device,
    dtype: torch.dtype,
    widths: LayerWidths,
    names: tuple[str, ...],
) -> FusedKernels:
    """Return the Triton kernels that pass a self-test on all ranks.

    All ranks call it together, and rank 0 prints the kernels that fail; without torch.distributed
    the process decides for itself. There are none on a CPU, except by Triton's interpreter
    (TRITON_INTERPRET=1). Results are kept: later calls with equal arguments do not communicate.

    Args:
        enabled: Whether any kernel may be used, equal on all ranks.
        dtype: Dtype of activations and weights, float32 or bfloat16.
        names: Kernels that the model can use, fields of FusedKernels; all others stay False.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not enabled or (device.type == "cpu" and not interpreted):
        return NO_FUSED_KERNELS
    return _test_kernels(device, dtype, widths, names)


@functools.cache  # chunks of an interleaved pipeline are built one by one
def _test_kernels(
    device: torch.device, dtype: torch.dtype, widths: LayerWidths, names: tuple[str, ...]
) -> FusedKernels:
    """Test the kernels of `names` and return those that pass on every rank."""
    results = [check_kernel(name, device, dtype, widths) for name in names]
    return FusedKernels(**_agree_across_ranks(results))


def _agree_across_ranks(results: list[SelfTestResult]) -> dict[str, bool]:
    """Return for each kernel whether it passed on all ranks.

    Rank 0 prints those that failed.
    """
    reasons = {result.name: result.reason for result in results}
    if dist.is_initialized():
        for name, reason in reasons.items():
            lowest, _ = gather_lowest(reason or None)
            reasons[name] = next(iter(lowest.values()), "")
    # One line for kernels with the same reason, such as a missing Triton.
    for reason in dict.fromkeys(reasons.values()):
        if reason:
            names = ", ".join(name for name in reasons if reasons[name] == reason)
            print_rank_0(f"fused kernels: torch's own {names} instead ({reason})")
    return {name: not reason for name, reason in reasons.items()}
