"""Attention inside documents that lie end to end: causal, bidirectional or with a prefix, as the batch says."""

import inspect

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn

from megaenc.model.packing import Packing
from megaenc.objectives import Attention

# torch 2.11 finds out about grouped heads by itself and does not know the keyword that later versions want.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

_EVERYTHING, _BEFORE = (-1, -1), (-1, 0)  # window sizes; with fewer queries than keys the last of both stand side by side


class PackedAttention(MegatronModule):
    """Core attention for megatron-core's SelfAttention: softmax(q k^T / sqrt(dim)) v inside each document, q and k rotated.

    query [s, 1, heads, dim], key and value [s, 1, groups, dim] -> [s, 1, heads * dim], heads and groups being this rank's.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, backend="auto", **_):
        super().__init__(config=config)
        self.backend = backend
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: Packing | None = None,
    ):
        if packed_seq_params.rotation is not None:
            query, key = (packed_seq_params.rotation(x) for x in (query, key))
        if self.backend == "varlen" or (self.backend == "auto" and query.is_cuda and query.dtype != torch.float32):
            return self._varlen(query, key, value, packed_seq_params)
        return self._by_document(query, key, value, packed_seq_params)

    def _varlen(self, query, key, value, packing):
        """One kernel over all documents, two where they have prefixes; it takes 16-bit numbers on an accelerator."""
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        whole = packing.cu_seqlens_kv, packing.max_seqlen_kv
        if packing.attention == Attention.PREFIX:
            out = self._varlen_prefix(q, k, v, packing.prefix_rows, whole)
        else:
            out = self._kernel(q, k, v, whole, whole, _BEFORE if packing.attention == Attention.CAUSAL else _EVERYTHING)
        return out.reshape(query.size(0), 1, -1)

    def _varlen_prefix(self, q, k, v, rows, whole):
        """Prefixes among themselves, then the other rows over all that comes before them."""
        out = torch.empty_like(q)
        if rows.prefix.numel():
            prefixes = rows.cu_seqlens_prefix, rows.longest_prefix
            inside = self._kernel(*(x.index_select(0, rows.prefix) for x in (q, k, v)), prefixes, prefixes, _EVERYTHING)
            out = out.index_copy(0, rows.prefix, inside)
        suffixes = rows.cu_seqlens_suffix, rows.longest_suffix
        after = self._kernel(q.index_select(0, rows.suffix), k, v, suffixes, whole, _BEFORE)
        return out.index_copy(0, rows.suffix, after)

    def _kernel(self, q, k, v, queries, keys, window):
        """varlen_attn; `queries` and `keys`: their cu_seqlens and the longest of them."""
        return varlen_attn(
            q, k, v, queries[0], keys[0], queries[1], keys[1], scale=self.softmax_scale, window_size=window, **_GROUPED
        )

    def _by_document(self, query, key, value, packing):
        """torch's scaled dot product on each document by itself: exact everywhere, and nothing is computed across an edge.

        Split and put together once: the gradient of a slice would be a whole row of zeros for each document.
        """
        spans = packing.spans()
        sizes = [stop - start for start, _, stop in spans]
        documents = zip(
            *(x.permute(1, 2, 0, 3).split(sizes, dim=2) for x in (query, key, value)), strict=True
        )  # [1, heads, s, dim]
        parts = []
        for (start, prefix, stop), (q, k, v) in zip(spans, documents, strict=True):
            if prefix == stop:
                parts.append(self._dot_product(q, k, v))
            elif prefix == start:
                parts.append(self._dot_product(q, k, v, causal=True))
            else:
                before, after = q.split([prefix - start, stop - prefix], dim=2)
                parts.append(self._dot_product(before, k[:, :, : prefix - start], v[:, :, : prefix - start]))
                parts.append(self._dot_product(after, k, v, causal=True))
        return torch.cat([part.permute(2, 0, 1, 3) for part in parts]).flatten(2)

    def _dot_product(self, q, k, v, causal=False):
        """If causal, the last query sees all keys and each one before it one key less."""
        rows, columns = q.size(2), k.size(2)
        mask = None
        if causal and rows < columns:  # torch's own causal mask would set the first query beside the first key
            mask = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal and mask is None,
            scale=self.softmax_scale,
            enable_gqa=k.size(1) != q.size(1),
        )
