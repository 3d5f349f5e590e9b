"""RMSNorm, rotary positions, gated activations and dropout.

They save little for their gradients. `fused`: by Triton kernels.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

_CACHE_ELEMENTS = 2**18
"""Elements that are cast to float32 at a time: several such pieces fit into the caches of a
core."""


def row_slices(rows: int, width: int, max_elements: int) -> Iterator[slice]:
    """Yield slices that cover all rows of a [rows, width] matrix in order.

    Each has as many rows as `max_elements` allows, but at least one. The last may stop after
    `rows`.
    """
    step = max(1, max_elements // max(1, width))
    return (slice(start, start + step) for start in range(0, rows, step))


def rms_norm(
    x: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight in the dtype of `x` (Zhang & Sennrich 2019).

    With `residual` it returns (x + residual in the dtype of `x`, the norm of that). It is computed
    in float32 and has gradients. It is for the CPU, on which torch's own norm writes a float32 copy
    of `x` after each operation and keeps two for backward.

    Args:
        x: [..., H].
        weight: [H].
        epsilon: Number that is added to the mean square.
        residual: [..., H] to add before the norm, or None.
    """
    return _RMSNorm.apply(x, residual, weight, epsilon)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm in float32, chunk by chunk.

    It saves only what it normalizes and its inverse root mean squares.
    """

    @staticmethod
    def forward(ctx, x, residual, weight, epsilon):
        ctx.is_sum = residual is not None
        x_RH = x.reshape(-1, x.size(-1))
        wide = torch.promote_types(x.dtype, torch.float32)
        out_RH = torch.empty(x_RH.shape, dtype=x.dtype, device=x.device)
        scale = weight.to(wide)
        shrink_R1 = torch.empty(len(x_RH), 1, dtype=wide, device=x.device)
        if ctx.is_sum:
            addend_RH = x_RH
            residual_RH = residual.reshape(x_RH.shape)
            x_RH = torch.empty_like(out_RH)
        for part in row_slices(*x_RH.shape, _CACHE_ELEMENTS):
            if ctx.is_sum:
                torch.add(addend_RH[part], residual_RH[part], out=x_RH[part])
            values = x_RH[part].to(wide)
            shrink = shrink_R1[part]
            torch.mean(values.square(), -1, keepdim=True, out=shrink).add_(epsilon).rsqrt_()
            torch.mul(values * shrink, scale, out=out_RH[part])
        ctx.save_for_backward(x_RH, shrink_R1, weight)
        out = out_RH.view(x.shape)
        return (x_RH.view(x.shape), out) if ctx.is_sum else out

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        x_RH, shrink_R1, weight = ctx.saved_tensors
        gradient_RH = gradients[-1].reshape(x_RH.shape)
        to_sum_RH = gradients[0].reshape(x_RH.shape)
        scale = weight.to(shrink_R1.dtype)
        to_x_RH = torch.empty(x_RH.shape, dtype=x_RH.dtype, device=x_RH.device)
        to_weight = torch.zeros_like(scale)
        for part in row_slices(*x_RH.shape, _CACHE_ELEMENTS):
            shrink = shrink_R1[part]
            above = gradient_RH[part].to(scale.dtype)
            normed = x_RH[part] * shrink
            product = above * normed
            to_weight += product.sum(0)
            along = product.mul_(scale).mean(-1, keepdim=True)
            below = torch.mul(above, scale, out=product).sub_(normed.mul_(along))
            if ctx.is_sum:
                torch.add(below.mul_(shrink), to_sum_RH[part], out=to_x_RH[part])
            else:
                torch.mul(below, shrink, out=to_x_RH[part])
        to_x = to_x_RH.view(gradients[0].shape)
        return to_x, to_x if ctx.is_sum else None, to_weight.to(weight.dtype), None


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of a row's tokens (arXiv 2104.09864), applied by a call.

    Built by `from_angles`. A call rotates queries or keys [S, 1, heads, dim] into a new tensor of
    their dtype; element i of a head is rotated together with element i + dim / 2. `cos` and `sin`
    are float32[S, 1, 1, dim / 2], times the scale of `from_angles`. With `fused` a Triton kernel
    does it, in float32. `split` rotates queries and keys that are still joined with the values.
    """

    cos: Tensor
    sin: Tensor
    fused: bool = False
    """whether the Triton kernel is used, which computes in float32 for all dtypes"""
    _rounded: dict[torch.dtype, tuple[Tensor, Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """cos and sin cast to other dtypes, cached for all layers"""

    @classmethod
    def from_angles(cls, angles: Tensor, fused: bool = False, scale: float = 1.0) -> "Rotation":
        """Return the Rotation of a row's tokens by their angles.

        Args:
            angles: float32[S, 1, 1, dim] of two equal halves, in radians; the first one is read.
            fused: Whether to use the Triton kernel.
            scale: Factor of rotated queries and keys, as in YaRN.
        """
        half = angles[..., : angles.size(-1) // 2]
        cos = half.cos()
        sin = half.sin()
        return cls(cos, sin, fused) if scale == 1 else cls(cos * scale, sin * scale, fused)

    def __call__(self, x: Tensor) -> Tensor:
        """Return a tensor [S, 1, heads, dim] rotated by the angles of each token.

        It has the dtype of `x`, in which it is computed unless fused, and gradients. `x` is not
        changed.
        """
        if self.fused:
            from megaenc.model.kernels.rotary import rotate
        else:
            rotate = _rotate
        return _Rotate.apply(x, *self._tables(x.dtype), rotate)

    def split(self, mixed: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of a joint projection, the first two rotated.

        All three are copies with gradients, so that `mixed`, whose dtype they have, is freed.

        Args:
            mixed: [S, 1, G, (R + 2) dim]: for each of G groups R queries, a key and a value.
            dim: Width of a head.

        Returns:
            (queries [S, G R, dim], keys [S, G, dim], values [S, G, dim]).
        """
        if self.fused:
            from megaenc.model.kernels.rotary import copy_qkv
        else:
            copy_qkv = _copy_qkv
        return _SplitQKV.apply(mixed, dim, *self._tables(mixed.dtype), copy_qkv)

    def _tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin as they multiply tensors of a dtype: in float32 if fused."""
        if self.fused:
            return self.cos.contiguous(), self.sin.contiguous()
        if dtype not in self._rounded:
            self._rounded[dtype] = self.cos.to(dtype), self.sin.to(dtype)
        return self._rounded[dtype]


class _Rotate(torch.autograd.Function):
    """Rotation by the angles of cos and sin, with the rotation back as its gradient.

    Both scale if cos and sin do.
    """

    @staticmethod
    def forward(ctx, x, cos, sin, rotate):
        ctx.save_for_backward(cos, sin)
        ctx.rotate = rotate
        return rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return ctx.rotate(gradient, *ctx.saved_tensors, -1), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int, out: Tensor | None = None) -> Tensor:
    """Return a tensor [S, ..., dim] of four dimensions, rotated.

    Args:
        sign: Factor of the angles, 1 or -1.
        out: Tensor for the result; None: a new one.
    """
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


class _SplitQKV(torch.autograd.Function):
    """Split of the joint projection into queries, keys and values, with rotation.

    Its gradient is one tensor, too.
    """

    @staticmethod
    def forward(ctx, mixed, dim, cos, sin, copy_qkv):
        ctx.save_for_backward(cos, sin)
        ctx.shape = mixed.shape
        ctx.copy_qkv = copy_qkv
        tokens = mixed.size(0)
        groups = mixed.size(2)
        heads = mixed.size(3) // dim
        blocks = mixed.contiguous().view(tokens, groups, heads, dim)
        q = blocks.new_empty(tokens, groups, heads - 2, dim)
        k = blocks.new_empty(tokens, groups, 1, dim)
        v = blocks.new_empty(tokens, groups, 1, dim)
        copy_qkv(blocks, q, k, v, cos, sin, False)
        return q.flatten(1, 2), k.squeeze(2), v.squeeze(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, to_q, to_k, to_v):
        tokens, groups, dim = to_k.shape
        per_group = to_q.size(1) // groups
        to_mixed = torch.empty(
            tokens, groups, per_group + 2, dim, dtype=to_k.dtype, device=to_k.device
        )
        counts = zip((to_q, to_k, to_v), (per_group, 1, 1), strict=True)
        parts = (part.contiguous().view(tokens, groups, count, dim) for part, count in counts)
        ctx.copy_qkv(to_mixed, *parts, *ctx.saved_tensors, True)
        return to_mixed.view(ctx.shape), None, None, None, None


def _copy_qkv(
    mixed: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, backward: bool
) -> None:
    """Copy the joint projection to q, k and v, or back, in torch.

    It does what `kernels.rotary.copy_qkv` does.
    """
    parts = mixed.split([q.size(2), 1, 1], dim=2)
    for joint, part in zip(parts[:2], (q, k), strict=True):
        _rotate(*((part, cos, sin, -1, joint) if backward else (joint, cos, sin, 1, part)))
    parts[2].copy_(v) if backward else v.copy_(parts[2])


class Activation(NamedTuple):
    """Activation of the gated MLP and of the prediction head.

    function: elementwise, of a tensor; backward: (gradient of the output, input, *, grad_input),
    which writes the gradient of the input to `grad_input`; kernel: name of the FusedKernels field
    of its gated form, "" if there is none.
    """

    function: Callable[[Tensor], Tensor]
    backward: Callable[..., Tensor]
    kernel: str = ""


_GELU_TANH = {"approximate": "tanh"}
ACTIVATIONS = {
    "silu": Activation(F.silu, torch.ops.aten.silu_backward.grad_input, "swiglu"),
    "gelu": Activation(F.gelu, torch.ops.aten.gelu_backward.grad_input, "geglu"),
    "gelu_pytorch_tanh": Activation(
        partial(F.gelu, **_GELU_TANH),
        partial(torch.ops.aten.gelu_backward.grad_input, **_GELU_TANH),
        "geglu",
    ),
}
"""Values of --activation."""


class GatedActivation(MegatronModule):
    """Gated activation module, activation(gate) * up.

    Gate and up are the halves of the input's last dimension (Shazeer 2020, arXiv 2002.05202).

    Args:
        config: Passed by megatron-core; not read.
        activation: Name in ACTIVATIONS; another one is a KeyError of `forward`, unless fused.
        fused: Whether to use the Triton kernel `glu`, only for activations that have one.
    """

    def __init__(self, config: TransformerConfig | None, activation: str, fused: bool = False):
        super().__init__(config)
        self.activation = activation
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """Return activation(gate) * up, [..., F].

        `x` is [..., 2 F]; its halves are gate and up.
        """
        if self.fused:
            from megaenc.model.kernels.glu import glu

            return glu(x, self.activation)
        return _GatedActivation.apply(x, ACTIVATIONS[self.activation])


class _GatedActivation(torch.autograd.Function):
    """Gated activation that saves only its input.

    Backward recomputes activation(gate).
    """

    @staticmethod
    def forward(ctx, x, activation):
        ctx.save_for_backward(x)
        ctx.activation = activation
        gate, up = x.chunk(2, dim=-1)
        return activation.function(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        to_x = torch.empty_like(x)
        to_gate, to_up = to_x.chunk(2, dim=-1)
        torch.mul(gradient, ctx.activation.function(gate), out=to_up)
        ctx.activation.backward(gradient * up, gate, grad_input=to_gate)
        return to_x, None


# Factors of "lowbias32" (Wellons 2018), whose output bits depend on all input bits.
_HASH_FACTORS = (
    0x7FEB352D,
    0x846CA68B,
)
_CHANNEL_STEP = 0x9E3779B1
_LAYER_STEP = 0x85EBCA77


def dropout(x: Tensor, keys: Tensor, layer: int, probability: float, fused: bool = False) -> Tensor:
    """Return hidden states after dropout: x / (1 - probability), or 0, in its dtype.

    Elements are dropped in evaluation mode, too. Which ones is a function of (key, layer, channel)
    only, so that they are the same in every parallel layout, under recomputation and after a
    resume.

    Args:
        x: Hidden states [S, 1, H], or some rows of them.
        keys: int64, a random number for the token of each row of `x`.
        layer: Index of the layer in the whole model, from 1.
        probability: Probability that an element becomes 0, from 0 to below 1, which is not checked.
        fused: Use the Triton kernel, which drops the same elements.
    """
    return _Dropout.apply(x, keys, layer, probability, fused)


class _Dropout(torch.autograd.Function):
    """Dropout by a hash of counters, which saves only the keys of the tokens."""

    @staticmethod
    def forward(ctx, x, keys, layer, probability, fused):
        ctx.save_for_backward(keys)
        ctx.options = layer, probability, fused
        return _drop(x, keys, layer, probability, fused)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (keys,) = ctx.saved_tensors
        return _drop(gradient, keys, *ctx.options), None, None, None, None


def _drop(x: Tensor, keys: Tensor, layer: int, probability: float, fused: bool) -> Tensor:
    """Return what `dropout` does, without a gradient."""
    # 32-bit numbers that all wrap around, as signed ones; the hash is compared as an unsigned one.
    low = _to_int32(keys)
    high = _to_int32(keys >> 32) | 1
    first = layer * _LAYER_STEP % 2**32
    limit = round(probability * 2**32)
    scale = 1 / (1 - probability)
    if fused:
        from megaenc.model.kernels.dropout import drop

        # As signed numbers, so that Triton compiles one kernel for all of them.
        return drop(x, low, high, _signed(first), _signed(limit), scale)
    rows_SH = x.reshape(-1, x.size(-1))
    out_SH = torch.empty_like(rows_SH)
    channels = _to_int32(torch.arange(x.size(-1), device=x.device) * _CHANNEL_STEP + first)
    for part in row_slices(*rows_SH.shape, _CACHE_ELEMENTS):
        number = channels + low[part, None]
        number ^= (number >> 16) & 0xFFFF
        number *= _signed(_HASH_FACTORS[0])
        number ^= (number >> 15) & 0x1FFFF
        number *= _signed(_HASH_FACTORS[1])
        number ^= (number >> 16) & 0xFFFF
        number *= high[part, None]
        number ^= -(2**31)
        torch.mul(rows_SH[part], scale, out=out_SH[part])
        out_SH[part].masked_fill_(number < limit - 2**31, 0.0)
    return out_SH.view(x.shape)


def _to_int32(numbers: Tensor) -> Tensor:
    """Return the low 32 bits of int64 `numbers` as int32."""
    low = numbers & 0xFFFFFFFF
    return torch.where(low < 2**31, low, low - 2**32).to(torch.int32)


def _signed(number: int) -> int:
    """Return the signed 32-bit number that has the bits of the unsigned `number`."""
    return number if number < 2**31 else number - 2**32
