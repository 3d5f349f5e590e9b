"""Slow stand-ins for attention kernels, with the signatures of the kernels."""

import importlib.metadata
import importlib.util
import itertools
import sys

import torch


def slow_kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, causal, window=(-1, -1)):
    """Compute attention segment by segment.

    The last query is aligned with the last key. `window` has the numbers of keys before and after,
    -1 for all.
    """
    each = q.size(1) // k.size(1)
    before, after = window
    if causal:
        after = 0
    parts = []
    assert q.size(-1) % 8 == 0, "kernels want heads in a multiple of 8"
    for (q0, q1), (k0, k1) in zip(
        itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True
    ):
        rows = q1 - q0
        columns = k1 - k0
        assert rows <= longest_q and 0 < columns <= longest_k, (
            "no segment lacks keys or is longer than was said"
        )
        distance = torch.arange(columns) - (torch.arange(rows)[:, None] + columns - rows)
        hidden = (distance < -before) & (before >= 0) | (distance > after) & (after >= 0)
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], k[k0:k1].repeat_interleave(each, 1)) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, v[k0:k1].repeat_interleave(each, 1)))
    return torch.cat(parts)


def varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
):
    """Stand in for the kernel of torch 2.11, which detects grouped heads."""
    return slow_kernel(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        scale=scale,
        causal=False,
        window=window_size,
    )


def varlen_2_13(query, key, *others, enable_gqa=False, **named):
    """Stand in for the kernel of torch 2.13, which needs enable_gqa for grouped heads."""
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError("Expect query and key/value to have the same number of heads")
    return varlen_2_11(query, key, *others, **named)


def flash_attn_2(
    *,
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal=False,
    window_size=(-1, -1),
):
    """Stand in for flash_attn.flash_attn_varlen_func, by keywords only.

    The order of its arguments differs between versions.
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return slow_kernel(q, k, v, *lengths, scale=softmax_scale, causal=causal, window=window_size)


def flash_attn_3(**named):
    """Stand in for an early flash_attn_interface, which also returns score sums."""
    return flash_attn_2(**named), torch.zeros(1)


def flash_attn_4(*, cu_seqlens_q, cu_seqlens_k, window_size=(None, None), **named):
    """Stand in for flash_attn.cute of flash-attn-4 4.0.0b36, which adds score sums."""
    assert all(
        edges.dtype == torch.int32 and edges.is_contiguous()
        for edges in (cu_seqlens_q, cu_seqlens_k)
    )
    assert all(side is None or side >= 0 for side in window_size), (
        "a side of which all is seen is None"
    )
    window = [-1 if side is None else side for side in window_size]
    return flash_attn_3(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, window_size=window, **named
    )


def install_4(monkeypatch, function):
    """Install a stand-in for the package flash-attn-4 with its module."""
    version = importlib.metadata.version
    install(monkeypatch, "flash_attn.cute", function)
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "4.0.0b36" if name == "flash-attn-4" else version(name),
    )


def install(monkeypatch, name, function):
    """Install a module `name` whose flash_attn_varlen_func is `function`."""
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(name, loader=None, origin="installed")
    )
    module.flash_attn_varlen_func = function
    monkeypatch.setitem(sys.modules, name, module)
