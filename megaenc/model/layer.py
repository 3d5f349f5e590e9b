"""Transformer layer of megatron-core with fewer passes over memory.

All operations between its matrix products take one pass.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megaenc.model.attention.backends import compute_attention
from megaenc.model.functional import dropout
from megaenc.model.norms import PendingSum, PostNorm, add_and_norm
from megaenc.model.packed_sequences import PackedSequences


class EncoderLayer(TransformerLayer):
    """Pre-norm layer that leaves the residual addition to the norm after it.

    That norm may be the first one of the next layer. megatron-core builds the layer from its spec.
    Further arguments are those of TransformerLayer.

    Args:
        is_last: Whether it is the last layer of its model chunk, which returns no PendingSum.
        selects_rows: Whether to compute only the `output_rows` of the pack after attention.
        recompute_activation: Whether backward computes the MLP's activation again.
        output_dropout: Fraction of attention's output, not the MLP's, to drop if the pack has
            `dropout_keys`.
        fused_dropout: Whether the Triton kernel drops it.
    """

    def __init__(
        self,
        *args: Any,
        is_last: bool,
        selects_rows: bool,
        recompute_activation: bool,
        output_dropout: float,
        fused_dropout: bool,
        **options: Any,
    ):
        super().__init__(*args, **options)
        self.output_dropout = output_dropout
        self.fused_dropout = fused_dropout
        self.is_last = is_last
        self.selects_rows = selects_rows
        self.recompute_activation = recompute_activation

    def forward(
        self,
        hidden_states: Tensor | PendingSum,
        attention_mask: None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> tuple[Tensor | PendingSum, None]:
        """Return the hidden states after the layer, and None as megatron-core's layers do.

        The hidden states are [S, 1, H], with sequence parallelism this rank's rows, or their
        PendingSum if another layer follows in the chunk and recomputation is not full. A layer with
        `selects_rows` returns only the `output_rows`. Other arguments are megatron-core's and
        ignored, as is `attention_mask`.
        """
        residual, normed = add_and_norm(self.input_layernorm, hidden_states)
        output, _ = self.self_attention(normed, attention_mask, packed_seq_params=packed_seq_params)
        if self.selects_rows:  # as the core attention has done
            residual = select_rows(residual, packed_seq_params)
        output = self._drop_output(output, packed_seq_params)
        residual, normed = add_and_norm(
            self.pre_mlp_layernorm, self._pending_sum(residual, output, self.self_attn_bda)
        )
        output = (
            checkpoint(self._compute_mlp, False, normed)
            if self.recompute_mlp
            else self._compute_mlp(normed)
        )
        result = self._pending_sum(residual, output, self.mlp_bda)
        # Full recomputation saves tensors between layers.
        return (
            result.add() if self.is_last or self.config.recompute_granularity == "full" else result,
            None,
        )

    def _drop_output(self, output: Tensor, packing: PackedSequences) -> Tensor:
        """Return attention's output after dropout, unchanged without `dropout_keys`.

        It is [S, 1, H], or has only the selected rows.
        """
        keys = packing.dropout_keys
        if not self.output_dropout or keys is None:
            return output
        if self.selects_rows:
            keys = select_rows(keys, packing)
        return dropout(output, keys, self.layer_number, self.output_dropout, self.fused_dropout)

    @staticmethod
    def _pending_sum(residual: Tensor, output: Tensor, post_norm: Any) -> PendingSum:
        """Return the PendingSum of `residual` and a sublayer's output.

        The output passes the norm of --post-norms if there is one.
        """
        return PendingSum(
            residual, post_norm(output) if isinstance(post_norm, PostNorm) else output
        )

    def _compute_mlp(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output [S, 1, H] of `hidden` [S, 1, H]."""
        first, _ = self.mlp.linear_fc1(hidden)
        activation = self.mlp.activation_func(first)
        is_saved = not (self.recompute_activation and torch.is_grad_enabled())
        with (
            contextlib.nullcontext()
            if is_saved
            else _recompute_saved(activation, self.mlp.activation_func, first)
        ):
            output, _ = self.mlp.linear_fc2(activation)
        return output


def _recompute_saved(result: Tensor, function: Callable[[Tensor], Tensor], argument: Tensor) -> Any:
    """Return a context in which autograd does not save `result`.

    It is computed again in backward, as function(argument).
    """
    address = result.data_ptr()
    size = result.numel()
    argument = argument.detach()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        return tensor.shape if (tensor.data_ptr(), tensor.numel()) == (address, size) else tensor

    def unpack(saved: Tensor | torch.Size) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        with torch.no_grad():
            return function(argument).view(saved)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class PackedSelfAttention(SelfAttention):
    """Self-attention whose joint projection goes to the core attention whole.

    The core attention splits and rotates it in one pass. With norms of queries and keys it gets the
    three tensors separately, as in megatron-core.
    """

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the joint projection of queries, keys and values, None and None.

        It is [s, 1, groups, (queries per group + 2) * dim], for all s tokens of the pack, also if
        `hidden_states` [s, 1, H] has only this rank's rows by sequence parallelism. With norms of
        queries and keys, they and the values are returned separately, as by megatron-core; other
        arguments are ignored without these norms.
        """
        if self.q_layernorm is not None:
            return super().get_query_key_value_tensors(hidden_states, *args, **options)
        mixed, _ = self.linear_qkv(hidden_states)
        return mixed.unflatten(-1, (self.num_query_groups_per_partition, -1)), None, None


class PackedAttention(MegatronModule):
    """Core attention for PackedSelfAttention, within each document.

    It is softmax(`softmax_scale` q k^T) v with q and k rotated. Arguments that are not listed are
    megatron-core's and ignored, except `config`.

    Args:
        softmax_scale: Factor of the scores; None: 1 / sqrt(dim).
        backend: Attention backend as for `compute_attention`, not checked; "auto" is sdpa, which
            works on every device.
        window: Tokens to each side that are attended to, if the mask allows; None: all.
        selects_rows: Whether to return only the `output_rows` of the pack.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        softmax_scale=None,
        backend="auto",
        window=None,
        selects_rows=False,
        **_,
    ):
        super().__init__(config=config)
        self.backend = "sdpa" if backend == "auto" else backend
        self.softmax_scale = softmax_scale
        self.window = window
        self.selects_rows = selects_rows

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSequences | None = None,
    ):
        """Return attention [s, 1, heads * dim] within documents.

        With `selects_rows` it has only the `output_rows`. `attention_mask`, `attn_mask_type` and
        `attention_bias` are ignored.

        Args:
            query: [s, 1, heads, dim], or the joint projection [s, 1, groups, (heads / groups + 2) *
                dim].
            key: [s, 1, groups, dim]; None if `query` is the joint projection.
            value: Like `key`.
            packed_seq_params: Required. If `rotation` (`local_rotation` with a window) is None,
                separate queries and keys are not rotated; a joint projection is an AttributeError.
        """
        packing = packed_seq_params
        rotation = packing.rotation if self.window is None else packing.local_rotation
        if key is None:
            inputs = rotation.split(query, self.config.kv_channels)
        else:
            if rotation is not None:
                query = rotation(query)
                key = rotation(key)
            inputs = (x.squeeze(1) for x in (query, key, value))
        out = compute_attention(
            self.backend, *inputs, packing, self.softmax_scale, window=self.window
        )
        out = out.reshape(query.size(0), 1, -1)
        return select_rows(out, packing) if self.selects_rows else out


def select_rows(hidden: Tensor, packing: PackedSequences) -> Tensor:
    """Return the `output_rows` of a tensor of a pack, or all rows if they are None.

    The tensor is for example hidden states [S, 1, H].
    """
    return hidden if packing.output_rows is None else hidden.index_select(0, packing.output_rows)
