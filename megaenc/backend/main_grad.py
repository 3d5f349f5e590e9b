"""Weight gradients added to megatron-core's buffers by the matrix product itself.

megatron-core calls apex's extension for it, `fused_weight_gradient_mlp_cuda`; the module here
stands in for it. The buffers are float32.
"""

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor


def accumulate_matmul(
    sum_VH: Tensor | None, a_Vn: Tensor, b_nH: Tensor, *, in_float32: bool
) -> Tensor:
    """Add the product of two matrices to a float32 sum in place, and return the sum.

    Args:
        sum_VH: Sum so far, float32; None for zeros, whose sum is a new tensor.
        a_Vn: Matrix, float32 or 16-bit.
        b_nH: Matrix of the same data type.
        in_float32: True to compute a product of 16-bit matrices in float32, which only accelerators
            support; False rounds it to 16 bits before it is added.
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
    """Add a linear layer's weight gradient to `main_grad_NK`.

    It is the product of the gradient of the layer's output and its input.
    """
    accumulate_matmul(main_grad_NK, gradient_TN.t(), input_TK, in_float32=main_grad_NK.is_cuda)


def install() -> None:
    """Give megatron-core a function by which linear layers add weight gradients.

    It stands in for apex's extension; if apex has it, nothing changes. `prepare_megatron` calls it;
    further calls do nothing. Layers use the function after `enable_in`.
    """
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_add_weight_gradient
        )
        layers._grad_accum_fusion_available = True


def enable_in(chunks: Iterable[torch.nn.Module]) -> None:
    """Make linear layers add weight gradients to float32 buffers in their product.

    These are all linear layers of megatron-core in `chunks`, this rank's model chunks in
    megatron-core's DistributedDataParallel, which must have float32 buffers. `install` must have
    been called before. Neither is checked.
    """
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.gradient_accumulation_fusion = True
