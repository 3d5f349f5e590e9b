"""Attention inside documents that lie end to end, causal or bidirectional as the batch says."""

import inspect
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn.attention.varlen import varlen_attn

from megaenc.objectives import Attention

# torch 2.11 finds out about grouped heads by itself and does not know the keyword that later versions want.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

MASK_TYPES = {Attention.CAUSAL: AttnMaskType.causal, Attention.BIDIRECTIONAL: AttnMaskType.no_mask}


@dataclass
class Packing(PackedSeqParams):
    """Documents of one row and the mask they are read under; travels to core attention as `packed_seq_params`.

    `qkv_format` stays "sbhd", so that megatron-core's SelfAttention leaves the layout alone. It reaches the core attention
    through every recompute mode, which an object passed as `attention_mask` would not.
    """

    mask_type: AttnMaskType = AttnMaskType.no_mask
    documents: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, edges: list[int], attention: Attention, device: torch.device) -> "Packing":
        """Documents between neighbouring `edges` (the cu_seqlens: 0 first, the row's length last)."""
        cu_seqlens = to_device(torch.tensor(edges, dtype=torch.int32), device)
        documents = list(pairwise(edges))
        longest = max(stop - start for start, stop in documents)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            mask_type=MASK_TYPES[attention],
            documents=documents,
        )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, made on the host, on `device`, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class PackedAttention(MegatronModule):
    """Core attention for megatron-core's SelfAttention: softmax(q k^T / sqrt(dim)) v inside each document.

    query [s, 1, heads, dim], key and value [s, 1, groups, dim] -> [s, 1, heads * dim], heads and groups being this rank's.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        causal = packed_seq_params.mask_type == AttnMaskType.causal
        if query.is_cuda and query.dtype != torch.float32:
            return self._varlen(query, key, value, packed_seq_params, causal)
        return self._by_document(query, key, value, packed_seq_params, causal)

    def _varlen(self, query, key, value, packing, causal):
        """One kernel over all documents; it takes 16-bit numbers on an accelerator."""
        out = varlen_attn(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packing.cu_seqlens_q,
            packing.cu_seqlens_kv,
            packing.max_seqlen_q,
            packing.max_seqlen_kv,
            scale=self.softmax_scale,
            window_size=(-1, 0) if causal else (-1, -1),
            **_GROUPED,
        )
        return out.reshape(query.size(0), 1, -1)

    def _by_document(self, query, key, value, packing, causal):
        """torch's scaled dot product on each document by itself: exact everywhere, and nothing is computed across an edge."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [1, heads, s, dim]
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, start:stop],
                k[:, :, start:stop],
                v[:, :, start:stop],
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=k.size(1) != q.size(1),
            )
            for start, stop in packing.documents
        ]
        return torch.cat(parts, dim=2).permute(2, 0, 1, 3).reshape(query.size(0), 1, -1)
