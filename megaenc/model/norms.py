"""Norm layers, fused with the residual addition before them.

Both take one pass over memory.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaenc.model.functional import rms_norm as rms_norm_on_host


class PendingSum(NamedTuple):
    """Hidden states as a sum that is not computed yet, so that the next norm does it.

    residual: residual stream; output: output of the last attention or MLP; both [S, 1, H]. `add`
    computes the sum.
    """

    residual: Tensor
    output: Tensor

    def add(self) -> Tensor:
        """Return the sum, [S, 1, H]."""
        return self.residual + self.output


class RMSNorm(torch.nn.Module):
    """RMSNorm layer with a learned weight (Zhang & Sennrich 2019).

    It is x / rms(x) * weight over the last dimension; `eps` is added to rms(x)**2. The factor is
    weight + 1, added in float32, with the option `layernorm_zero_centered_gamma`. megatron-core's
    wrapper of torch's norm refuses sequence parallelism, which only needs an attribute of the
    weight, so that its gradient is summed over the tensor-parallel ranks.

    Args:
        config: Read for the dtype of the weight, zero-centering and sequence parallelism.
        hidden_size: Width of the last dimension.
        fused: Whether to use the Triton kernel.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        fused: bool = False,
        **_,
    ):
        super().__init__()
        self.eps = eps
        self.fused = fused
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(
            torch.full((hidden_size,), 1.0 - self.is_zero_centered, dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return x / rms(x) * weight, [..., H], or * (weight + 1) if `is_zero_centered`.

        It has the dtype of `x`, also if the weight is wider. With `residual`, [..., H] of the same
        dtype, return (residual + x, its norm), in one pass unless torch's own norm is used.
        """
        weight = self.weight.float() + 1 if self.is_zero_centered else self.weight
        if self.fused:
            from megaenc.model.kernels.norm import rms_norm

            return rms_norm(x, weight, self.eps, residual)
        if x.device.type == "cpu":
            return rms_norm_on_host(x, weight, self.eps, residual)
        x = x if residual is None else residual + x
        out = F.rms_norm(x.to(weight.dtype), (x.size(-1),), weight, self.eps).type_as(x)
        return out if residual is None else (x, out)


class LayerNorm(torch.nn.Module):
    """LayerNorm layer with a learned weight, and a bias only if `bias` is true.

    megatron-core's always has a bias. The weight is never zero-centered.

    Args:
        config: Read for the dtype of the weights and sequence parallelism.
        hidden_size: Width of the last dimension.
        eps: Number added to the variance.
        bias: Whether there is a learned bias.
        fused: Whether to use the Triton kernel; without effect with a bias.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        bias: bool = False,
        fused: bool = False,
        **_,
    ):
        super().__init__()
        self.eps = eps
        self.fused = fused and not bias
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.bias = (
            torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
            if bias
            else None
        )
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return (x - mean(x)) / std(x) * weight + bias, [..., H], in the dtype of `x`.

        With `residual`, [..., H] of the same dtype, return (residual + x, its norm).
        """
        if self.fused:
            from megaenc.model.kernels.norm import layer_norm

            return layer_norm(x, self.weight, self.eps, residual)
        x = x if residual is None else residual + x
        out = F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return out if residual is None else (x, out)


class PostNorm(torch.nn.Module):
    """Norm of a layer's attention or MLP output before the residual addition.

    It takes the place of megatron-core's bias-dropout-add.

    Args:
        norm: Class or spec of the norm (see `select_norm`).
        config: Read for the width and epsilon of the norm.
    """

    def __init__(self, norm: ModuleSpec | type, config: TransformerConfig):
        super().__init__()
        self.norm = build_module(
            norm, config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, output: Tensor) -> Tensor:
        """Return the norm of `output` [S, 1, H]."""
        return self.norm(output)


def add_and_norm(norm: torch.nn.Module, hidden: Tensor | PendingSum) -> tuple[Tensor, Tensor]:
    """Return the residual stream and its norm, [S, 1, H] each.

    Args:
        norm: Norm module; RMSNorm and LayerNorm compute a pending sum in the same pass.
        hidden: Residual stream [S, 1, H], or its PendingSum, which is added up.
    """
    if isinstance(hidden, PendingSum) and isinstance(norm, RMSNorm | LayerNorm):
        return norm(hidden.output, hidden.residual)
    residual = hidden.add() if isinstance(hidden, PendingSum) else hidden
    return residual, norm(residual)
