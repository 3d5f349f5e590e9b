"""Core attention of the layers: inside documents that lie end to end, under the mask that the batch says."""

from megatron.core.transformer.module import MegatronModule

from megaenc.model.attention_backends import attend_by
from megaenc.model.packing import Packing


class PackedAttention(MegatronModule):
    """Core attention for megatron-core's SelfAttention: softmax(q k^T / sqrt(dim)) v inside each document, q and k rotated.

    query [s, 1, heads, dim], key and value [s, 1, groups, dim] -> [s, 1, heads * dim]. "auto" is the backend right anywhere.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, backend="auto", **_):
        super().__init__(config=config)
        self.backend = "sdpa" if backend == "auto" else backend
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
        out = attend_by(self.backend, *(x.squeeze(1) for x in (query, key, value)), packed_seq_params, self.softmax_scale)
        return out.reshape(query.size(0), 1, -1)
