"""Weight gradients added to megatron-core's float32 buffers by the matrix product itself.

megatron-core calls apex's extension for it, `fused_weight_gradient_mlp_cuda`; the module here stands in for it.
"""

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor


def accumulate_matmul(
    sum_VH: Tensor | None, a_Vn: Tensor, b_nH: Tensor, *, in_float32: bool
) -> Tensor:
    """Return `sum_VH` (None: zeros) plus a b in float32, added in place; `in_float32`: without rounding the product.

    `in_float32` with 16-bit matrices works only on accelerators.
    """
    if in_float32 and a_Vn.dtype != torch.float32:
        if sum_VH is None:
            return torch.mm(a_Vn, b_nH, out_dtype=torch.float32)
        return torch.addmm(sum_VH, a_Vn, b_nH, out_dtype=torch.float32, out=sum_VH)
    if sum_VH is None:
        return torch.mm(a_Vn, b_nH).float()
    return (
        sum_VH.addmm_(a_Vn, b_nH)
        if a_Vn.dtype == sum_VH.dtype
        else sum_VH.add_(torch.mm(a_Vn, b_nH))
    )


def _add_weight_gradient(input_TK: Tensor, gradient_TN: Tensor, main_grad_NK: Tensor) -> None:
    """Add a linear layer's weight gradient, the product of its output's gradient and its input, to `main_grad_NK`."""
    accumulate_matmul(main_grad_NK, gradient_TN.t(), input_TK, in_float32=main_grad_NK.is_cuda)


def install() -> None:
    """Give megatron-core's linear layers the function that adds weight gradients, unless apex has it."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_add_weight_gradient
        )
        layers._grad_accum_fusion_available = True


def enable_in(chunks: Iterable[torch.nn.Module]) -> None:
    """Make all linear layers of megatron-core in `chunks`, which hold gradient buffers, add their weight gradients to these."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.gradient_accumulation_fusion = True
