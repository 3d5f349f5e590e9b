"""Attention backends for packed documents.

`megaenc.model.attention.selftest` checks them on the current machine. Letters of shapes: S tokens
of the pack, H query heads, G key/value heads (H is a multiple of G), D width of a head.
"""

import contextlib
import functools
import importlib
import inspect
import math
import os
from collections.abc import Callable
from importlib import metadata, util

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megaenc.backend.device import read_cpu_flags
from megaenc.model.attention.blocks import attend_in_blocks, sdpa_kernels
from megaenc.model.attention.onednn import attend_by_products
from megaenc.model.attention.padded import attend_padded
from megaenc.model.packed_sequences import PackedSequences
from megaenc.objectives import Attention

BACKENDS = ("flash", "varlen", "cudnn", "onednn", "sdpa")
"""Backends from the fastest to the slowest; the last one works everywhere."""

# torch 2.11 detects grouped heads itself and lacks the keyword that later versions require.
_GQA_OPTION = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

_FLASH_MODULES = {4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}
"""Modules of flash-attn's versions in the order in which they are tried. On Hopper 4 has been
measured, and 3 has not."""
_FLASH_PACKAGES = {4: "flash-attn-4", 3: "flash-attn-3", 2: "flash-attn"}
_HOPPER = (9, 0)
_excluded_versions: set[int] = set()  # of flash-attn, in this process


def compute_attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: PackedSequences,
    scale: float | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """Return attention [S, H, D] within documents, computed by a backend.

    It has gradients, and the dtype of `q`. Data for further layers are kept in `packing.cache`.

    Args:
        name: One of BACKENDS for which `missing_requirement` is empty; not checked.
        q: Queries [S, H, D]; rotary positions are already applied to `q` and `k`.
        k: Keys [S, G, D].
        v: Values [S, G, D].
        packing: Documents of the S tokens, and their mask: bidirectional, causal or prefix.
        scale: Factor of the scores; None: 1 / sqrt(D).
        window: Tokens to each side that are attended to, if the mask allows; None: all.
    """
    width = q.size(-1)
    scale = 1 / math.sqrt(width) if scale is None else scale
    if window is not None and window >= packing.max_seqlen_q - 1:  # it hides nothing
        window = None
    if name == "sdpa":
        if window is not None:
            return attend_in_blocks(q, k, v, packing, scale, window)
        return _attend_per_document(q, k, v, packing, scale)
    if name == "onednn":
        return attend_by_products(q, k, v, packing, scale, window)
    if width % 8:  # accelerator kernels need a multiple of 8
        padded = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
        return compute_attention(name, *padded, packing, scale, window=window)[..., :width]
    if name == "cudnn":
        return attend_padded(q, k, v, packing, scale, window)
    return _attend_packed(
        load_flash_kernel(q.device) if name == "flash" else _varlen, q, k, v, packing, scale, window
    )


def missing_requirement(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason against an attention backend on a device in a dtype.

    The text, a phrase such as "needs a CPU" or several joined by "; ", is empty if nothing is
    missing. The backend is not tried, which `check_backend` does. onednn is also refused on
    processors with AMX, with which sdpa is as fast.

    Args:
        name: One of BACKENDS; not checked.
        dtype: Dtype of queries, keys and values.
    """
    if name == "sdpa":
        return ""
    dtype_name = str(dtype).removeprefix("torch.")
    if name == "onednn":
        # Its products may be impossible, or no faster than sdpa.
        if device.type != "cpu":
            return "needs a CPU"
        if dtype != torch.bfloat16:
            return f"computes in bfloat16 and not in {dtype_name}"
        flags = read_cpu_flags()
        if "avx512_bf16" not in flags or "amx_bf16" in flags:
            return "needs a processor with AVX512-BF16 and without AMX, which sdpa uses"
        return "" if torch.backends.mkldnn.is_available() else "this torch has no oneDNN"
    if device.type != "cuda":
        return "needs an accelerator"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16-bit numbers and not in {dtype_name}"
    if name == "flash" and not flash_attn_versions(device):
        versions = _installed_flash_versions()
        hints = [
            f"version {version} {reason}"
            for version in versions
            if (reason := _unsupported_reason(version, device))
        ]
        return "; ".join([f"flash-attn{' 2' if hints else ''} is not installed", *hints])
    if name == "cudnn" and (torch.version.hip or not torch.backends.cudnn.is_available()):
        return "this torch has no cuDNN"
    return ""


Kernel = Callable[..., Tensor]
"""(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, scale, causal, window) ->
like q.

The last tokens of q and k are aligned; `window`: the tokens to each side that are attended to, -1
for all.
"""


def _varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, causal, window):
    """Compute attention with torch's `varlen_attn`, as a `Kernel`."""
    sides = (window, 0 if causal else window)
    return varlen_attn(
        q, k, v, cu_q, cu_k, longest_q, longest_k, scale=scale, window_size=sides, **_GQA_OPTION
    )


def flash_attn_versions(device: torch.device) -> list[int]:
    """Return the usable major versions of flash-attn in the order of trial: 4, 3, 2.

    They are installed, support `device`, which must be an accelerator, and are not excluded by
    `exclude_flash_attn`. The list may be empty. No version is imported.
    """
    versions = _installed_flash_versions()
    return [
        version
        for version in versions
        if version not in _excluded_versions and not _unsupported_reason(version, device)
    ]


def exclude_flash_attn(version: int) -> None:
    """Leave a major version of flash-attn unused in the rest of this process.

    `version` is 4, 3 or 2. Call it if the version cannot be imported or compiled, or has failed
    its self-test.
    """
    _excluded_versions.add(version)
    load_flash_kernel.cache_clear()


def is_hopper(device: torch.device) -> bool:
    """Return whether `device` is a Hopper GPU, such as an H100 or H200.

    A CPU and a GPU of AMD are none.
    """
    # AMD GPUs have other capabilities under the same numbers.
    return (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) == _HOPPER
    )


def exclude_unmeasured_flash_attn(device: torch.device) -> None:
    """Leave flash-attn 4 unused in this process unless `device` is a Hopper GPU.

    Nobody has measured it on others.
    """
    if not is_hopper(device):
        exclude_flash_attn(4)


def describe_backend(name: str, device: torch.device) -> str:
    """Return the backend's name, for flash with the release of its package.

    For example `flash (flash-attn 4.0.0b36)`, but `sdpa`.

    Args:
        name: One of BACKENDS.
        device: Accelerator; read for flash only.

    Raises:
        IndexError: `name` is flash, and no version of flash-attn is usable.
    """
    if name != "flash":
        return name
    version = flash_attn_versions(device)[0]
    release = str(version)
    with contextlib.suppress(metadata.PackageNotFoundError):
        release = metadata.version(_FLASH_PACKAGES[version])
    return f"{name} (flash-attn {release})"


def _installed_flash_versions() -> list[int]:
    """Return the installed versions of flash-attn, without importing any."""
    installed = {3: util.find_spec(_FLASH_MODULES[3]) is not None}
    with contextlib.suppress(metadata.PackageNotFoundError):
        # Later releases of version 2 hold a `flash_attn.cute`, too.
        installed[4] = bool(metadata.version(_FLASH_PACKAGES[4]))
    spec = util.find_spec(_FLASH_MODULES[2])
    # Version 4 installs a directory of that name and no module.
    installed[2] = spec is not None and spec.origin is not None
    return [version for version in _FLASH_MODULES if installed.get(version)]


def _unsupported_reason(version: int, device: torch.device) -> str:
    """Return the reason why a version of flash-attn cannot train on a device.

    The text is empty if it can.
    """
    if version == 2:
        return ""
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    if version == 3:
        return "" if capability == _HOPPER else "needs a Hopper GPU"
    # Version 4 has no backward on older GPUs.
    return "" if capability >= _HOPPER else "needs a Hopper or Blackwell GPU"


@functools.cache
def load_flash_kernel(device: torch.device) -> Kernel:
    """Return flash-attn's attention function for a device as a `Kernel`.

    It is that of the first of `flash_attn_versions`, imported and then kept until
    `exclude_flash_attn` is called.

    Raises:
        IndexError: No version is usable.
        Exception: The version cannot be imported.
    """
    # Version 4 keeps what it compiles for later runs.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    function = importlib.import_module(
        _FLASH_MODULES[flash_attn_versions(device)[0]]
    ).flash_attn_varlen_func

    def kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, causal, window):
        # The default window hides nothing: (-1, -1), in version 4 (None, None).
        mask = {"causal": causal}
        if window >= 0:
            mask["window_size"] = (window, 0 if causal else window)
        lengths = {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": longest_q,
            "max_seqlen_k": longest_k,
        }
        # By keyword, as versions differ in the order.
        out = function(q=q, k=k, v=v, **lengths, softmax_scale=scale, **mask)
        # Version 4 and early releases of 3 also return the log-sum-exp.
        return out[0] if isinstance(out, tuple) else out

    return kernel


def _attend_packed(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: PackedSequences,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend in all documents with one kernel call, or two under prefix attention.

    The two calls attend within prefixes, and causally for the rest.
    """
    cu_seqlens = packing.cu_seqlens_kv
    longest = packing.max_seqlen_kv
    kernel = functools.partial(kernel, scale=scale, window=-1 if window is None else window)
    if packing.attention != Attention.PREFIX:
        return kernel(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            causal=packing.attention == Attention.CAUSAL,
        )
    rows = packing.prefix_rows
    out = torch.empty_like(q)
    if rows.prefix.numel():
        prefixes = rows.cu_seqlens_prefix
        longest_prefix = rows.longest_prefix
        inside = (x.index_select(0, rows.prefix) for x in (q, k, v))
        out = out.index_copy(
            0,
            rows.prefix,
            kernel(*inside, prefixes, prefixes, longest_prefix, longest_prefix, causal=False),
        )
    if not rows.suffix.numel():
        return out
    after = q.index_select(0, rows.suffix)
    after = kernel(
        after, k, v, rows.cu_seqlens_suffix, cu_seqlens, rows.longest_suffix, longest, causal=True
    )
    return out.index_copy(0, rows.suffix, after)


def _attend_per_document(
    q: Tensor, k: Tensor, v: Tensor, packing: PackedSequences, scale: float
) -> Tensor:
    """Attend with torch's scaled dot product, document by document, on any device.

    Tensors are split and concatenated only once: the gradient of each slice would be a whole pack
    of zeros.
    """
    spans = packing.spans()
    sizes = [stop - start for start, _, stop in spans]
    # Each tensor is [1, heads, length, D].
    documents = zip(*(x.transpose(0, 1)[None].split(sizes, dim=2) for x in (q, k, v)), strict=True)
    parts = []
    with sdpa_kernels(q.device):
        for (start, prefix, stop), (queries, keys, values) in zip(spans, documents, strict=True):
            if prefix == stop:
                parts.append(_scaled_dot_product(queries, keys, values, scale))
            elif prefix == start:
                parts.append(_scaled_dot_product(queries, keys, values, scale, causal=True))
            else:
                first = prefix - start
                before, after = queries.split([first, stop - prefix], dim=2)
                parts.append(
                    _scaled_dot_product(before, keys[:, :, :first], values[:, :, :first], scale)
                )
                parts.append(_scaled_dot_product(after, keys, values, scale, causal=True))
    return torch.cat([part[0].transpose(0, 1) for part in parts])


def _scaled_dot_product(q, k, v, scale, causal=False):
    """Return torch's scaled dot-product attention.

    A causal mask aligns the last query with the last key.
    """
    rows = q.size(2)
    columns = k.size(2)
    mask = None
    # torch's own causal mask aligns the first query with the first key.
    if causal and rows < columns:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        enable_gqa=k.size(1) != q.size(1),
    )
