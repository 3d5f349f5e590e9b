"""Layer specs: megatron-core's parallel layers with our norms and core attention."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megaenc.backend import KernelConfig, ParallelConfig, detect_backend
from megaenc.model import transformer_engine
from megaenc.model.config import ModelConfig
from megaenc.model.fp8.linear import Float8ColumnParallelLinear, Float8RowParallelLinear
from megaenc.model.fp8.tensor import select_float8_recipe
from megaenc.model.functional import ACTIVATIONS, GatedActivation
from megaenc.model.kernels import FusedKernels
from megaenc.model.layer import EncoderLayer, PackedAttention, PackedSelfAttention
from megaenc.model.norms import LayerNorm, PostNorm, RMSNorm

_DEFAULT_KERNELS = KernelConfig()


def select_norm(
    model: ModelConfig, kernels: KernelConfig, fused: FusedKernels
) -> ModuleSpec | type:
    """Return the class or spec of the norms of hidden states, heads and outputs.

    megatron-core's `build_module` makes a norm of it with the keyword arguments `config`,
    `hidden_size` and `eps`.

    Args:
        kernels: Choice of Transformer Engine, whose installation is not checked.
        fused: Enabled Triton kernels.
    """
    if model.normalization == "LayerNorm":
        return ModuleSpec(
            module=LayerNorm, params={"bias": model.norm_bias, "fused": fused.layer_norm}
        )
    if kernels.transformer_impl == "transformer_engine":
        return transformer_engine.RMSNormFactory
    return ModuleSpec(module=RMSNorm, params={"fused": fused.norm})


def list_fused_kernels(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the Triton kernels that a model can use.

    They are fields of FusedKernels, for `select_fused_kernels`, which tests whether they work on
    this machine.
    """
    names = ["rotary", ACTIVATIONS[model.activation].kernel, "loss", "sum"]
    if model.normalization == "RMSNorm":
        names.append("norm")
    elif not model.norm_bias:
        names.append("layer_norm")
    if model.attention_output_dropout:
        names.append("dropout")
    return tuple(filter(None, names))


def build_transformer_config(
    model: ModelConfig,
    layout: ParallelConfig,
    dtype: torch.dtype,
    kernels: KernelConfig = _DEFAULT_KERNELS,
) -> TransformerConfig:
    """Return megatron-core's TransformerConfig of a model.

    Args:
        layout: Sizes of tensor, pipeline and sequence parallelism, and recomputation.
        dtype: Dtype of weights and activations, float32 or bfloat16.
        kernels: Read for Transformer Engine and its float8 format.

    Raises:
        InputError: `layout` cannot divide the layers; `ModelConfig.check` tests other sizes.
    """
    stages = layout.pipeline_model_parallel_size
    split = layout.layers_per_chunk(model.num_layers)
    interleaved = len(split) > stages
    parts = [["decoder"] * layers for layers in split]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    # The layer itself recomputes the activation.
    modules = [module for module in layout.selected_recompute_modules if module != "activation"]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        add_qkv_bias=model.add_qkv_bias,
        softmax_scale=None
        if model.query_pre_attn_scalar is None
        else model.query_pre_attn_scalar**-0.5,
        # The gradients of its weights are summed over tensor-parallel ranks.
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
        layernorm_zero_centered_gamma=model.apply_layernorm_1p,
        # The first layer lacks a norm: layers are not saved as one tensor.
        hetereogenous_dist_checkpoint=model.embedding_norm,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        # Unused: the next option makes MLP use the activation module of the spec below.
        activation_func=F.silu,
        use_te_activation_func=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=stages,
        pipeline_model_parallel_layout=parts if stages > 1 else None,
        # Sent one by one in an order that both sides keep: batched, two stages would confuse
        # forward and backward tensors.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        # megatron-core waits for the device after each exchange, for old versions of torch.
        batch_p2p_sync=False,
        sequence_parallel=layout.sequence_parallel,
        recompute_granularity=layout.recompute_granularity
        if layout.recompute_granularity == "full" or modules
        else None,
        recompute_modules=modules or None,
        recompute_method=layout.full_recompute[0],
        recompute_num_layers=layout.full_recompute[1],
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The loss is a sum over predicted tokens and a count; megatron-core divides by the global
        # count.
        calculate_per_token_loss=True,
        # Weights are drawn by name and row afterwards; the parallel layers still mark their
        # parameters as sharded.
        init_method=_leave_uninitialized,
        output_layer_init_method=_leave_uninitialized,
        embedding_init_method=_leave_uninitialized,
        transformer_impl=kernels.transformer_impl,
        # Only for Transformer Engine; our own layers get their format from the spec below.
        fp8=kernels.fp8_format if kernels.transformer_impl == "transformer_engine" else None,
        fp8_recipe="tensorwise",
        # For Transformer Engine's layers; megatron-core's own add to gradient buffers once they
        # have them (see main_grad).
        gradient_accumulation_fusion=kernels.transformer_impl == "transformer_engine",
        # These need apex, Transformer Engine or torch.compile, which needs a C++ compiler on CPU.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )


def _leave_uninitialized(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` unchanged, as an init method of megatron-core."""
    return tensor


def build_block_spec(
    model: ModelConfig,
    config: TransformerConfig,
    chunk: int | None,
    kernels: KernelConfig,
    fused: FusedKernels,
    layout: ParallelConfig,
    has_head: bool,
) -> TransformerBlockSubmodules:
    """Return the layer specs of this pipeline stage or model chunk.

    megatron-core's parallel state, which knows the stage, must be initialized.

    Args:
        config: Result of `build_transformer_config`.
        chunk: Index, from 0, of the chunk on this stage if stages are interleaved, else None.
        fused: Enabled Triton kernels.
        has_head: Whether the output layer follows. The last of the layers then computes only the
            predicted positions if `layout.selects_rows`.
    """
    first = get_transformer_layer_offset(config, chunk)
    layer_indices = range(first, first + get_num_layers_to_build(config, chunk))
    recompute_activation = "activation" in layout.selected_recompute_modules
    layers = []
    for layer_index in layer_indices:
        is_last = layer_index == layer_indices[-1]
        options = {"is_last": is_last, "selects_rows": is_last and has_head and layout.selects_rows}
        options["recompute_activation"] = recompute_activation
        options |= {
            "output_dropout": model.attention_output_dropout,
            "fused_dropout": fused.dropout,
        }
        layers.append(_build_layer_spec(model, config, layer_index, kernels, fused, options))
    return TransformerBlockSubmodules(layers, layer_norm=select_norm(model, kernels, fused))


def _build_layer_spec(
    model: ModelConfig,
    config: TransformerConfig,
    layer_index: int,
    kernels: KernelConfig,
    fused: FusedKernels,
    options: dict[str, Any],
) -> ModuleSpec:
    """Return the spec of one layer.

    Args:
        layer_index: Index of the layer in the whole model, from 0.
        options: Arguments of EncoderLayer.
    """
    norm = select_norm(model, kernels, fused)
    head_norm = norm if config.qk_layernorm else None
    if kernels.transformer_impl == "transformer_engine":
        column_parallel, row_parallel = transformer_engine.linear_classes()
    elif kernels.fp8_format:
        params = {"float8": select_float8_recipe(kernels.fp8_format, detect_backend())}
        column_parallel = ModuleSpec(Float8ColumnParallelLinear, params=params)
        row_parallel = ModuleSpec(Float8RowParallelLinear, params=params)
    else:
        column_parallel = ColumnParallelLinear
        row_parallel = RowParallelLinear
    attention = {"backend": kernels.attention_backend, "window": model.layer_windows[layer_index]}
    attention["selects_rows"] = options["selects_rows"]
    add = (
        ModuleSpec(module=PostNorm, params={"norm": norm, "config": config})
        if model.post_norms
        else get_bias_dropout_add
    )
    is_fused = getattr(fused, ACTIVATIONS[model.activation].kernel, False)
    activation = ModuleSpec(
        module=GatedActivation, params={"activation": model.activation, "fused": is_fused}
    )
    return ModuleSpec(
        module=EncoderLayer,
        params=options,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if model.embedding_norm and layer_index == 0 else norm,
            self_attention=ModuleSpec(
                module=PackedSelfAttention,
                # SelfAttention passes it to the core attention, which takes the mask from the batch
                # instead.
                params={"attn_mask_type": AttnMaskType.no_mask},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column_parallel,
                    core_attention=ModuleSpec(module=PackedAttention, params=attention),
                    linear_proj=row_parallel,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=column_parallel,
                    linear_fc2=row_parallel,
                    activation_func=activation,
                ),
            ),
            mlp_bda=add,
        ),
    )
