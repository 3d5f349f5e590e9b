"""The ways to compute attention inside documents of one row. Which of them is right on a machine, `attention_check` finds out.

Letters of shapes: S tokens of the row, H heads of queries, G of keys and values (H a multiple of G), D the width of a head.
"""

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Callable
from importlib import util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from megaenc.model.attention.padded import attend_padded
from megaenc.model.packed_sequences import PackedSequences
from megaenc.objectives import Attention

BACKENDS = ("flash", "varlen", "cudnn", "sdpa")
"""As fast as they are expected to be; the last is right everywhere."""

# torch 2.11 finds out about grouped heads by itself and does not know the keyword that later versions want.
_GQA_OPTION = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

# Of torch's scaled dot product; cuDNN would make a plan for each length of a document.
_SDPA_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
_HOPPER, _FLASH_ATTN_3 = (9, 0), "flash_attn_interface"  # the device that flash-attn 3 is made for, and its module


def compute_attention(name: str, q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float | None = None) -> Tensor:
    """q [S, H, D], k and v [S, G, D] -> [S, H, D] by the backend `name` of `BACKENDS`; `scale`: 1 / sqrt(D) unless given."""
    width = q.size(-1)
    scale = 1 / math.sqrt(width) if scale is None else scale
    if name == "sdpa":
        return _attend_per_document(q, k, v, packing, scale)
    if width % 8:  # as the kernels of accelerators want it
        q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
        return compute_attention(name, q, k, v, packing, scale)[..., :width]
    if name == "cudnn":
        return attend_padded(q, k, v, packing, scale)
    return _attend_packed(load_flash_kernel(q.device) if name == "flash" else _varlen, q, k, v, packing, scale)


def missing_requirement(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """What the backend `name` lacks to be tried on `device` in `dtype`, in a few words; empty where nothing."""
    if name == "sdpa":
        return ""
    if device.type != "cuda":
        return "needs an accelerator"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16-bit numbers and not in {str(dtype).removeprefix('torch.')}"
    if name == "flash" and not flash_attn_module(device):
        third = ", and version 3, which is, is for a Hopper alone" if util.find_spec(_FLASH_ATTN_3) else ""
        return f"flash-attn{' 2' if third else ''} is not installed{third}"
    if name == "cudnn" and (torch.version.hip or not torch.backends.cudnn.is_available()):
        return "this torch has no cuDNN"
    return ""


Kernel = Callable[..., Tensor]
"""(q, k, v, cu_seqlens of queries, of keys, longest of each, *, scale, causal) -> like q; causal aligns the last of both."""


def _varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, causal):
    window = (-1, 0) if causal else (-1, -1)
    return varlen_attn(q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=window, **_GQA_OPTION)


def flash_attn_module(device: torch.device) -> str:
    """The module of flash-attn 3 where it is installed and `device` is a Hopper, else that of flash-attn 2; empty without it."""
    # AMD's numbers of devices mean others.
    if util.find_spec(_FLASH_ATTN_3) and not torch.version.hip and torch.cuda.get_device_capability(device) == _HOPPER:
        return _FLASH_ATTN_3
    return "flash_attn" if util.find_spec("flash_attn") else ""


@functools.cache
def load_flash_kernel(device: torch.device) -> Kernel:
    """That of `flash_attn_module`, which must not be empty."""
    function = importlib.import_module(flash_attn_module(device)).flash_attn_varlen_func

    def kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, causal):
        out = function(q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale=scale, causal=causal)
        return out[0] if isinstance(out, tuple) else out  # early versions of the third give the scores' sums back as well

    return kernel


def _attend_packed(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float) -> Tensor:
    """One kernel over all documents, two where they have prefixes: those among themselves, the rest over all before it."""
    every, longest = packing.cu_seqlens_kv, packing.max_seqlen_kv
    if packing.attention != Attention.PREFIX:
        return kernel(q, k, v, every, every, longest, longest, scale=scale, causal=packing.attention == Attention.CAUSAL)
    rows = packing.prefix_rows
    out = torch.empty_like(q)
    if rows.prefix.numel():
        prefixes, most = rows.cu_seqlens_prefix, rows.longest_prefix
        inside = (x.index_select(0, rows.prefix) for x in (q, k, v))
        out = out.index_copy(0, rows.prefix, kernel(*inside, prefixes, prefixes, most, most, scale=scale, causal=False))
    after = q.index_select(0, rows.suffix)
    after = kernel(after, k, v, rows.cu_seqlens_suffix, every, rows.longest_suffix, longest, scale=scale, causal=True)
    return out.index_copy(0, rows.suffix, after)


def _attend_per_document(q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float) -> Tensor:
    """Attend by torch's scaled dot product on each document by itself: exact everywhere.

    Split and put together once: the gradient of a slice would be a whole row of zeros for each document.
    """
    spans = packing.spans()
    sizes = [stop - start for start, _, stop in spans]
    documents = zip(*(x.transpose(0, 1)[None].split(sizes, dim=2) for x in (q, k, v)), strict=True)  # [1, heads, length, D]
    parts = []
    with contextlib.nullcontext() if q.device.type == "cpu" else sdpa_kernel(list(_SDPA_KERNELS)):
        for (start, prefix, stop), (queries, keys, values) in zip(spans, documents, strict=True):
            if prefix == stop:
                parts.append(_scaled_dot_product(queries, keys, values, scale))
            elif prefix == start:
                parts.append(_scaled_dot_product(queries, keys, values, scale, causal=True))
            else:
                first = prefix - start
                before, after = queries.split([first, stop - prefix], dim=2)
                parts.append(_scaled_dot_product(before, keys[:, :, :first], values[:, :, :first], scale))
                parts.append(_scaled_dot_product(after, keys, values, scale, causal=True))
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def _scaled_dot_product(q, k, v, scale, causal=False):
    """If causal, the last query sees all keys and each one before it one key less."""
    rows, columns = q.size(2), k.size(2)
    mask = None
    if causal and rows < columns:  # torch's own causal mask would set the first query beside the first key
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=k.size(1) != q.size(1)
    )
