"""What layers do number by number, each with a gradient that reads and writes memory as often as it must and no more.

Between matrix products the time goes with memory: autograd would keep and copy what a formula by hand need not. On an accelerator
a kernel of its own (megaenc.model.kernels) takes the place of each, if it is `fused`.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Rotation:
    """Rotary positions (Su et al. 2021, arXiv 2104.09864): the halves of a head's width as points, turned by a token's angles.

    cos and sin: float32[S, 1, 1, dim / 2].
    """

    cos: Tensor
    sin: Tensor
    fused: bool = False
    """By the kernel, which computes in float32 whatever numbers come and go."""
    _rounded: dict[torch.dtype, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)
    """To other numbers, once for all layers."""

    @classmethod
    def by(cls, angles: Tensor, fused: bool = False) -> "Rotation":
        """`angles`: float32[S, 1, 1, dim], the halves of the last dimension being equal."""
        half = angles[..., : angles.size(-1) // 2]
        return cls(half.cos(), half.sin(), fused)

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, 1, heads, dim], turned, computed in its own numbers unless it is fused."""
        if self.fused:
            from megaenc.model.kernels.rotary import rotate

            return rotate(x, self.cos, self.sin)
        if x.dtype not in self._rounded:
            self._rounded[x.dtype] = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return _Rotate.apply(x, *self._rounded[x.dtype])


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return _turned(gradient, *ctx.saved_tensors, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


class SwiGLU(MegatronModule):
    """silu(gate) * up, the halves of the last dimension (Shazeer 2020, arXiv 2002.05202). Backward computes silu(gate) again."""

    def __init__(self, config: TransformerConfig | None, fused: bool = False):
        super().__init__(config)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        """x [..., 2 F] to [..., F]."""
        if self.fused:
            from megaenc.model.kernels.swiglu import swiglu

            return swiglu(x)
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        to_x = torch.empty_like(x)
        to_gate, to_up = to_x.chunk(2, dim=-1)
        torch.mul(gradient, F.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=to_gate)
        return to_x
