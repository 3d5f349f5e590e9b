"""Parallel linear layers of megatron-core with float8 matrix products.

Communication is as in megatron-core's own layers, except that sequence-parallel inputs are gathered
in float8.
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaenc.backend import Backend, KernelConfig
from megaenc.errors import InputError, format_error
from megaenc.model import transformer_engine
from megaenc.model.fp8.tensor import TEST_ROWS, Float8Recipe, rounding_error, select_float8_recipe


def check_linear_layers(
    kernels: KernelConfig, backend: Backend, widths: Iterable[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Check that the chosen linear layers work: Transformer Engine's, or float8.

    Other layers are not checked. Ranks do not communicate.

    Args:
        kernels: Choice of the layers (`transformer_impl`, `fp8_format`).
        backend: Hardware of this process, on which float8 is tested.
        widths: (output, input) widths of the layers on this rank; only for float8.
        dtype: Dtype of inputs and weights; only for float8.

    Raises:
        InputError: They cannot be used on this machine; the error names the flag.
    """
    if kernels.transformer_impl == "transformer_engine":
        transformer_engine.check_transformer_engine(kernels.fp8_format)
    elif kernels.fp8_format:
        check_float8_linear(kernels.fp8_format, backend, widths, dtype)


def check_float8_linear(
    fp8_format: str, backend: Backend, widths: Iterable[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Check that float8 layers match float32 up to rounding on this machine.

    The tolerance of the relative norm is 2^-7, for results in bfloat16 and fast accumulation, plus
    the `rounding_error` of both matrices, taken as independent. `backend` is this process's.

    Args:
        fp8_format: As in `select_float8_recipe`.
        widths: (output, input) widths of the layers on this rank.
        dtype: Dtype of inputs, weights and results.

    Raises:
        InputError: There are no float8 matrix products, or one fails or exceeds the tolerance.
    """
    names = "output", "gradient of the input", "gradient of the weight"
    kind = select_float8_recipe(fp8_format, backend)
    generator = torch.Generator().manual_seed(0)
    forward = 2**-7 + math.hypot(rounding_error(kind.forward), rounding_error(kind.forward))
    backward = 2**-7 + math.hypot(rounding_error(kind.forward), rounding_error(kind.gradient))
    for out, width in sorted(set(widths)):
        x = torch.randn(TEST_ROWS, width, generator=generator).to(backend.device, dtype)
        weight = torch.randn(out, width, generator=generator).to(backend.device, dtype)
        gradient = torch.randn(TEST_ROWS, out, generator=generator).to(backend.device, dtype)
        expected = (
            x.float() @ weight.float().t(),
            gradient.float() @ weight.float(),
            gradient.float().t() @ x.float(),
        )
        try:
            results = _run_float8_linear(kind, x, weight, gradient)
            errors = [
                float((actual.float() - right).norm() / right.norm())
                for actual, right in zip(results, expected, strict=True)
            ]
        except RuntimeError as error:  # the library has no kernel for these sizes or this device
            raise InputError(
                f"--fp8-format {fp8_format}: the products of a {out} x {width} layer fail on "
                f"{backend.description}: "
                f"{format_error(error)}; leave the flag out"
            ) from None
        for name, error, tolerance in zip(
            names, errors, (forward, backward, backward), strict=True
        ):
            if not error <= tolerance:
                raise InputError(
                    f"--fp8-format {fp8_format}: the {name} of a {out} x {width} layer is "
                    f"{100 * error:.2g} % off float32's on "
                    f"{backend.description}, expected {100 * tolerance:.2g} % at most; "
                    "leave the flag out"
                )


def _run_float8_linear(
    kind: Float8Recipe, x: Tensor, weight: Tensor, gradient: Tensor
) -> tuple[Tensor, ...]:
    """Return a float8 layer's output and its gradients of input and weight.

    `gradient` is that of the output. The layer runs on one rank.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    with torch.enable_grad():
        out = _Float8Linear.apply(*leaves, None, kind, None, False)
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


class _Float8LinearMixin:
    """Override of the matrix products of megatron-core's linear layers with float8.

    `float8` comes from the layer spec.
    """

    def __init__(self, *sizes: int, float8: Float8Recipe, **options):
        super().__init__(*sizes, **options)
        self.float8 = float8

    def _forward_impl(self, input, weight, bias, *, allreduce_dgrad, sequence_parallel, **_):
        group = self.tp_group if allreduce_dgrad or sequence_parallel else None
        return _Float8Linear.apply(input, weight, bias, self.float8, group, sequence_parallel)


class Float8ColumnParallelLinear(_Float8LinearMixin, ColumnParallelLinear):
    """Column-parallel linear layer with float8 matrix products.

    Each tensor-parallel rank computes some of the outputs. Arguments are those of
    ColumnParallelLinear (`gradient_accumulation_fusion` has no effect) and the keyword `float8`, a
    Float8Recipe. The weight keeps its dtype. On accelerators a rank's widths are multiples of 16.
    """


class Float8RowParallelLinear(_Float8LinearMixin, RowParallelLinear):
    """Row-parallel linear layer with float8 matrix products.

    Each tensor-parallel rank has some of the inputs. Arguments are those of RowParallelLinear; all
    else is as in Float8ColumnParallelLinear.
    """


class _Float8Linear(torch.autograd.Function):
    """Linear layer in float8, as an autograd function.

    Args:
        x: [s, b, K]; with sequence parallelism each rank has a part of s.
        weight: [N, K] of this rank.
        bias: [N] or None.
        group: Ranks over which the gradient of `x` is summed; None: no sum.

    Returns:
        [s, b, N].
    """

    @staticmethod
    def forward(
        ctx,
        x,
        weight,
        bias,
        float8: Float8Recipe,
        group: dist.ProcessGroup | None,
        sequence_parallel: bool,
    ):
        x_TK = x.reshape(-1, x.size(-1))
        x_amax_bits = float8.amax_bits(x_TK)
        w_amax_bits = float8.amax_bits(weight)
        if sequence_parallel:  # all parts of the matrix share one scale
            dist.all_reduce(x_amax_bits, dist.ReduceOp.MAX, group=group)
        x8, x_inverse = float8.quantize(x_TK, x_amax_bits, float8.forward)
        w8, w_inverse = float8.quantize(weight, w_amax_bits, float8.forward)
        all8, gather = _start_all_gather(x8, group) if sequence_parallel else (x8, None)
        if gather:
            gather.wait()
        ctx.save_for_backward(x8, x_inverse, weight, w_amax_bits)
        ctx.float8 = float8
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        ctx.shape = x.shape
        out = float8.matmul(all8, w8, x_inverse, w_inverse, x.dtype, fast=True)
        if bias is not None:
            out += bias
        return out.view(-1, *x.shape[1:-1], weight.size(0))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x8, x_inverse, weight, w_amax_bits = ctx.saved_tensors
        float8 = ctx.float8
        group = ctx.group
        all8, gather = _start_all_gather(x8, group) if ctx.sequence_parallel else (x8, None)
        g_TN = gradient.reshape(-1, gradient.size(-1))
        g8, g_inverse = float8.quantize(g_TN, float8.amax_bits(g_TN), float8.gradient)
        # Quantized again: kept from forward, float8 weights would take memory for each micro-batch
        # in flight.
        w8, w_inverse = float8.quantize(weight, w_amax_bits, float8.forward)
        to_x_TK = float8.matmul(g8, float8.transpose(w8), g_inverse, w_inverse, gradient.dtype)
        if gather:
            gather.wait()
        to_x_TK, reduction = _start_reduction(to_x_TK, group, ctx.sequence_parallel)
        to_weight_NK = float8.matmul(
            float8.transpose(g8), float8.transpose(all8), g_inverse, x_inverse, weight.dtype
        )
        to_bias = g_TN.sum(0) if ctx.needs_input_grad[2] else None
        if reduction:
            reduction.wait()
        return to_x_TK.view(ctx.shape), to_weight_NK, to_bias, None, None, None


def _start_all_gather(part: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start to gather the rows of all ranks as bytes.

    The returned tensor is valid once the returned work is done.
    """
    full = part.new_empty(part.size(0) * group.size(), part.size(1))
    return full, dist.all_gather_into_tensor(
        full.view(torch.uint8), part.view(torch.uint8), group=group, async_op=True
    )


def _start_reduction(
    tensor: Tensor, group: dist.ProcessGroup | None, scatter: bool
) -> tuple[Tensor, dist.Work | None]:
    """Start to sum a tensor over ranks; with `scatter` get only this rank's rows.

    The returned tensor is valid once the returned work, None for no group, is done.
    """
    if not group:
        return tensor, None
    if not scatter:
        return tensor, dist.all_reduce(tensor, group=group, async_op=True)
    part = tensor.new_empty(tensor.size(0) // group.size(), tensor.size(1))
    return part, dist.reduce_scatter_tensor(part, tensor, group=group, async_op=True)
