"""Matrix products of bfloat16 that are added up, and stay, in float32."""

import torch
from torch import Tensor


def add_product(sum_VH: Tensor | None, a_Vn: Tensor, b_nH: Tensor, *, in_float32: bool) -> Tensor:
    """float32 `sum_VH` + a b, in place; None is a sum of nothing.

    `in_float32`: the product reaches the sum unrounded, which torch can on accelerators; otherwise it is first rounded to its own
    numbers and read once more.
    """
    if in_float32 and a_Vn.dtype != torch.float32:
        if sum_VH is None:
            return torch.mm(a_Vn, b_nH, out_dtype=torch.float32)
        return torch.addmm(sum_VH, a_Vn, b_nH, out_dtype=torch.float32, out=sum_VH)
    if sum_VH is None:
        return torch.mm(a_Vn, b_nH).float()
    return sum_VH.addmm_(a_Vn, b_nH) if a_Vn.dtype == sum_VH.dtype else sum_VH.add_(torch.mm(a_Vn, b_nH))
