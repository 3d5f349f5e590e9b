"""Encoder: embedding, megatron-core's transformer block, and an output layer.

The output layer computes only the predicted positions. Initial weights are a pure function of
(seed, name, row), the same in every parallel layout.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megaenc.backend import KernelConfig, ParallelConfig, detect_backend
from megaenc.counter_rng import normal_rows, truncate_normals
from megaenc.model.config import ModelConfig, padded_vocab_size
from megaenc.model.functional import ACTIVATIONS, Rotation
from megaenc.model.kernels import NO_FUSED_KERNELS, FusedKernels
from megaenc.model.kernels.selftest import LayerWidths, select_fused_kernels
from megaenc.model.layer_spec import (
    build_block_spec,
    build_transformer_config,
    list_fused_kernels,
    select_norm,
)
from megaenc.model.linear_cross_entropy import Predictions, linear_cross_entropy
from megaenc.model.packed_sequences import PackedSequences

_OUTPUT_PROJECTIONS = (".linear_proj.weight", ".linear_fc2.weight")  # of attention and MLP
_TORCH_KERNELS = KernelConfig(fused_kernels=False)  # for uses in which accuracy matters, not speed


class Encoder(LanguageModule):
    """Model chunk of this rank, by `build_model_chunks`.

    It has some layers; the model's first chunk also has the embedding, the last one the output
    layer. Letters in names: S tokens of a pack, N predicted positions, H hidden size, V this rank's
    columns of the padded vocabulary. All ranks build theirs together, by `layout` and `kernels`:
    they agree on kernels. Only `build_model_chunks` checks `model` and initializes the weights.

    Args:
        vocab_size: Vocabulary without padding, which the chunk adds.
        seq_length: Most tokens of a document, for which rotary angles are computed.
        dtype: Dtype of weights and activations, float32 or bfloat16.
        chunk: Index, from 0, of the chunk on this stage if stages are interleaved, else None.
    """

    def __init__(
        self,
        model: ModelConfig,
        vocab_size: int,
        seq_length: int,
        layout: ParallelConfig,
        dtype: torch.dtype,
        chunk: int | None = None,
        kernels: KernelConfig = _TORCH_KERNELS,
    ):
        config = build_transformer_config(model, layout, dtype, kernels)
        super().__init__(config)
        self.model_type = ModelType.encoder_or_decoder  # read by megatron-core's schedules
        self.vocab_size = vocab_size
        self.vp_stage = chunk
        self.pre_process = parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=chunk
        )
        self.post_process = parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=chunk
        )
        self.share_embeddings_and_output_weights = not model.untie_embeddings_and_output_weights
        tensor_parallel = layout.tensor_model_parallel_size
        padded = padded_vocab_size(vocab_size, model.make_vocab_size_divisible_by, tensor_parallel)
        # No buffers: rounded to bfloat16, the angles of distant tokens would be confused.
        self._model = model
        self._seq_length = seq_length
        self._rotary_base = 0.0
        self.set_rotary_base(model.rotary_base)
        self.local_angles = None
        if model.local_rotary_base is not None or (
            model.local_layers and model.rotary_seq_len_interpolation_factor
        ):
            # Also if both bases are equal, as a phase may change the other one.
            self.local_angles, _ = _rotary_angles(
                model, model.local_rotary_base or model.rotary_base, seq_length
            )
        widths = LayerWidths(
            model.hidden_size,
            model.head_dim,
            model.ffn_hidden_size // tensor_parallel,
            padded // tensor_parallel,
        )
        names = list_fused_kernels(model)
        self.fused = select_fused_kernels(
            kernels.fused_kernels, detect_backend().device, dtype, widths, names
        )
        norm = partial(
            build_module,
            select_norm(model, kernels, self.fused),
            hidden_size=model.hidden_size,
            eps=model.norm_epsilon,
        )
        if self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config, padded, seq_length, position_embedding_type="rope"
            )
            if model.scale_embedding:
                self.embedding.word_embeddings.register_forward_hook(_scale_by_root_of_width)
            self.embedding_norm = norm(config=config) if model.embedding_norm else None
        self.decoder = TransformerBlock(
            config,
            build_block_spec(model, config, chunk, kernels, self.fused, layout, self.post_process),
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=chunk,
        )
        self.selects_rows = any(layer.selects_rows for layer in self.decoder.layers)
        if self.post_process:
            # `head` gathers the sequence before it selects positions, so that these layers are not
            # sequence parallel.
            head_config = dataclasses.replace(
                config, sequence_parallel=False, gradient_accumulation_fusion=False
            )
            self.prediction_head = None
            if model.prediction_head:
                self.prediction_head = PredictionHead(
                    head_config, ACTIVATIONS[model.activation].function, norm(config=head_config)
                )
            self.output_layer = OutputLayer(
                config.hidden_size,
                padded,
                vocab_size,
                self.fused,
                config=head_config,
                init_method=config.init_method,
                bias=model.output_layer_bias,
                # If tied, it is the embedding itself, or its copy on the last stage, which
                # megatron-core keeps equal.
                skip_weight_param_allocation=self.pre_process
                and self.share_embeddings_and_output_weights,
            )
        self.setup_embeddings_and_output_layer()

    def set_rotary_base(self, base: float) -> None:
        """Set the base period of the rotary positions from the next `forward` on.

        Local layers keep theirs if the model has `local_rotary_base` or
        `rotary_seq_len_interpolation_factor`; otherwise they share that of the global layers.
        `base` is not checked, and not part of the state dict.
        """
        if self._rotary_base != base:
            self._rotary_base = base
            divisor = self._model.rotary_seq_len_interpolation_factor
            self.angles, self.rotation_scale = _rotary_angles(
                self._model, base, self._seq_length, divisor
            )

    def _set_attention_backend(self) -> None:
        """Do nothing.

        The base class checks Transformer Engine's variables, which our own attention does not read.
        """

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Set the hidden states of the previous model chunk, before each `forward`.

        megatron-core's schedules call it with a list of one tensor, or of None for the first chunk.
        """
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        packing: PackedSequences,
        predictions: Predictions,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss, logits or hidden states of a row of packed documents.

        It is the result of `head` in the model's last chunk, in others hidden states [S, 1, H],
        with sequence parallelism this rank's rows of them: S is then a multiple of the
        tensor-parallel size. The ranks of a tensor-parallel group call it together.

        Args:
            tokens: int64[1, S], token ids of a row; read only in the model's first chunk.
            positions: int64[S], positions in their documents, from 0 to below `seq_length`.
            packing: Documents of the row; not changed.
            predictions: Positions of outputs to score, and labels; read only in the last chunk.
        """
        hidden = self.embedding(tokens, None) if self.pre_process else None
        if self.pre_process and self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        # Computed once for all layers; the core attention rotates queries and keys itself.
        options = self.fused.rotary, self.rotation_scale
        rotation = local_rotation = Rotation.from_angles(self.angles[positions], *options)
        if self.local_angles is not None:
            local_rotation = Rotation.from_angles(self.local_angles[positions], *options)
        packing = dataclasses.replace(packing, rotation=rotation, local_rotation=local_rotation)
        if self.config.sequence_parallel and packing.dropout_keys is not None:
            packing = dataclasses.replace(
                packing, dropout_keys=scatter_to_sequence_parallel_region(packing.dropout_keys)
            )
        rows = predictions.positions
        # Matrix products without rows are untested on GPUs.
        if self.selects_rows and rows is not None and rows.numel():
            packing = dataclasses.replace(packing, output_rows=rows)
            predictions = dataclasses.replace(predictions, positions=None)
        hidden = self.decoder(hidden, attention_mask=None, packed_seq_params=packing)
        return self.head(hidden, predictions) if self.post_process else hidden

    def head(self, hidden_S1H: Tensor, predictions: Predictions) -> Tensor | tuple[Tensor, Tensor]:
        """Return the summed loss or the logits at the positions of `predictions`.

        Only the model's last chunk has the layers; tensor-parallel ranks call it together.

        Args:
            hidden_S1H: Output of the layers [S, 1, H]; with sequence parallelism this rank's rows
                of it, which are gathered.
            predictions: Positions in the S rows, and labels; positions None: all S rows.

        Returns:
            (summed loss, number correct) as of `linear_cross_entropy`, or without labels logits
            [N, V] of this rank's part of the vocabulary, in the model's dtype, -inf in padding.
        """
        if self.config.sequence_parallel:
            # All ranks select the same rows, and the output layer sums their gradients, so that
            # backward is a plain split.
            hidden_S1H = gather_from_sequence_parallel_region(
                hidden_S1H, tensor_parallel_output_grad=False
            )
        hidden_NH = hidden_S1H.squeeze(1)
        if predictions.positions is not None:
            hidden_NH = hidden_NH.index_select(0, predictions.positions)
        if self.prediction_head is not None:
            hidden_NH = self.prediction_head(hidden_NH)
        tied = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else None
        )
        return self.output_layer(hidden_NH, tied, predictions)


def _scale_by_root_of_width(module: torch.nn.Module, inputs: Any, embedding: Tensor) -> Tensor:
    """Return the embedding [..., H] times the square root of H, as a forward hook.

    Both are in its dtype, as in transformers.
    """
    return embedding * torch.tensor(embedding.size(-1) ** 0.5, dtype=embedding.dtype).item()


def _rotary_angles(
    model: ModelConfig, base: float, seq_length: int, divisor: float | None = None
) -> tuple[Tensor, float]:
    """Return the rotary angles of all positions, and YaRN's scale.

    Args:
        base: Base period.
        seq_length: Number of positions.
        divisor: Number by which positions are divided; None: 1.

    Returns:
        (angles float32[seq_length, 1, 1, head_dim], scale). The scale is a factor of rotated
        queries and keys, 1 without YaRN.
    """
    if model.yarn_rotary_scaling_factor is not None:
        # `get_emb`, because the class keeps the instances that are called.
        return YarnRotaryEmbedding(
            model.head_dim,
            rotary_base=base,
            scaling_factor=model.yarn_rotary_scaling_factor,
            original_max_position_embeddings=model.yarn_original_max_position_embeddings,
        ).get_emb(seq_length)
    angles = RotaryEmbedding(
        model.head_dim,
        rotary_percent=1.0,
        seq_len_interpolation_factor=divisor,
        rotary_base=base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
    )(seq_length)
    return angles, 1.0


class PredictionHead(torch.nn.Module):
    """Transformation of hidden states before the output layer, as BERT has.

    It is norm(activation(dense(x))) (arXiv 1810.04805), and `dense` has no bias. Tensor-parallel
    ranks compute the same, gradients included: the product is small next to the output layer's.

    Args:
        config: Read for the hidden size and the dtype of the weight.
        activation: Elementwise function.
        norm: Norm module of width `config.hidden_size`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        activation: Callable[[Tensor], Tensor],
        norm: torch.nn.Module,
    ):
        super().__init__()
        self.dense = torch.nn.Linear(
            config.hidden_size, config.hidden_size, bias=False, dtype=config.params_dtype
        )
        self.activation = activation
        self.norm = norm

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """Return norm(activation(dense(hidden))), [N, H]."""
        return self.norm(self.activation(self.dense(hidden_NH)))


class OutputLayer(ColumnParallelLinear):
    """Output layer from hidden states to logits or, with labels, to the loss.

    Each rank computes the logits of its part of the vocabulary.

    Args:
        hidden_size: Width of the hidden states.
        padded_vocab_size: Rows of the weight over all ranks.
        vocab_size: Number of rows before the padding.
        fused: Kernels for the loss.
        **options: Keyword arguments of ColumnParallelLinear, such as `config`.
    """

    # One module for both: weights that are gathered on use are gathered by module calls.

    def __init__(
        self,
        hidden_size: int,
        padded_vocab_size: int,
        vocab_size: int,
        fused: FusedKernels = NO_FUSED_KERNELS,
        **options,
    ):
        super().__init__(hidden_size, padded_vocab_size, **options)
        self.fused = fused
        local_rows = self.output_size_per_partition
        self.vocab_columns = min(max(vocab_size - local_rows * self.tp_group.rank(), 0), local_rows)

    def forward(
        self,
        hidden_NH: Tensor,
        weight: Tensor | None,
        predictions: Predictions,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the summed loss or, without labels, the logits of hidden states.

        Args:
            hidden_NH: Hidden states at the predicted positions, equal on all tensor-parallel ranks.
            weight: Weight of the embedding if it is tied, else None.
            predictions: Labels and weights; `positions` is not read.

        Returns:
            As `Encoder.head`.
        """
        if predictions.labels is not None:
            # A tied weight also gets the embedding's gradient, which must not be mixed with an
            # empty one.
            adds_to_main_grad = self.gradient_accumulation_fusion and weight is None
            weight = self.weight if weight is None else weight
            return linear_cross_entropy(
                hidden_NH,
                weight,
                predictions,
                self.vocab_columns,
                self.tp_group,
                self.fused,
                bias_V=self.bias,
                main_grad_VH=weight.main_grad if adds_to_main_grad else None,
            )
        logits_NV, _ = super().forward(hidden_NH, weight)
        logits_NV[:, self.vocab_columns :] = float("-inf")  # exclude padding from the softmax
        return logits_NV


def build_model_chunks(
    model: ModelConfig,
    vocab_size: int,
    seq_length: int,
    layout: ParallelConfig,
    dtype: torch.dtype,
    *,
    seed: int | None,
    kernels: KernelConfig = _TORCH_KERNELS,
) -> list[Encoder]:
    """Return this rank's model chunks, several if pipeline stages are interleaved.

    All ranks call it together, after megatron-core's parallel state is initialized. The chunks are
    on the device of `detect_backend`, in training mode, in the order of their layers. An invalid
    shape, or a `layout` that cannot divide the model, is an InputError.

    Args:
        vocab_size: Vocabulary without padding, which the chunks add (not `model.vocab_size`).
        seq_length: Most tokens of a document.
        dtype: Dtype of weights and activations, float32 or bfloat16.
        seed: Seed of the initial weights; None: uninitialized, for weights that are loaded.
        kernels: Kernels to use; none of Triton unless given.
    """
    model.check(layout.tensor_model_parallel_size)
    chunks = layout.chunks_per_stage(model.num_layers)
    encoders = [
        Encoder(model, vocab_size, seq_length, layout, dtype, chunk, kernels).to(
            detect_backend().device
        )
        for chunk in (range(chunks) if chunks > 1 else (None,))
    ]
    return (
        encoders
        if seed is None
        else [init_weights(encoder, model, vocab_size, seed) for encoder in encoders]
    )


def build_encoder(*args: Any, **kwargs: Any) -> Encoder:
    """Return this rank's only model chunk.

    It is built from the arguments of `build_model_chunks`.

    Raises:
        ValueError: The rank has several chunks.
    """
    [encoder] = build_model_chunks(*args, **kwargs)
    return encoder


def named_global_parameters(encoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name in the full model, parameter) of each parameter of a chunk.

    Order and names, such as `decoder.layers.7.mlp.linear_fc1.weight`, are those of
    `encoder.named_parameters()`, but layers are numbered from 0 over all pipeline stages, and the
    weight of a tied output layer, if the chunk has its own copy, has the embedding's name. A
    parameter that ranks split is this rank's part. `encoder` is an Encoder without wrappers.
    """
    offset = encoder.decoder.layers[0].layer_number - 1 if len(encoder.decoder.layers) else 0
    for name, parameter in encoder.named_parameters():
        if name.startswith("decoder.layers."):
            local_index, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{int(local_index) + offset}.{rest}"
        elif name == "output_layer.weight" and encoder.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield name, parameter


@torch.no_grad()
def init_weights(
    encoder: torch.nn.Module, model: ModelConfig, vocab_size: int, seed: int
) -> torch.nn.Module:
    """Initialize a model chunk in place and return it.

    Matrices are drawn by `model.init_method`, as a function of `seed` and their name, equal in
    every parallel layout and on every device, without torch's generators. Weights of norms are 1,
    or 0 with `model.apply_layernorm_1p`; biases and padding are 0. Ranks do not communicate.

    Args:
        vocab_size: Vocabulary without padding.
    """
    for name, parameter in named_global_parameters(encoder):
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith(".bias") or model.apply_layernorm_1p else 1.0)
            continue
        values = _draw_weight_shard(name, parameter, vocab_size, seed)
        if model.init_method == "full_megatron":
            values = truncate_normals(values, model.init_cutoff)
        parameter.copy_(torch.from_numpy(values * np.float32(_initial_std(name, model))))
    return encoder


def _initial_std(name: str, model: ModelConfig) -> float:
    """Return the standard deviation of the initial values of a matrix, before any cut."""
    if model.init_method == "normal":
        return model.init_method_std
    if name.endswith(_OUTPUT_PROJECTIONS):
        return model.init_method_std / math.sqrt(2 * model.num_layers)
    if model.init_method == "full_megatron" and name == "output_layer.weight":
        return 1 / math.sqrt(model.hidden_size)
    return model.init_method_std


def _draw_weight_shard(
    name: str, parameter: torch.nn.Parameter, vocab_size: int, seed: int
) -> np.ndarray:
    """Return this rank's rows and columns of a standard normal matrix, float32.

    The values depend on the name of the matrix and the seed.
    """
    rows, columns = parameter.shape
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    if name.endswith(_OUTPUT_PROJECTIONS):  # row parallel: each rank has all rows of some columns
        return normal_rows(seed, name, range(rows), columns * size)[
            :, columns * rank : columns * (rank + 1)
        ]
    # Each rank has its part of the gate, then of the up projection.
    if name.endswith(".linear_fc1.weight"):
        height = rows // parameter.partition_stride
        starts = range(height * rank, rows * size, height * size)
        return np.concatenate(
            [normal_rows(seed, name, range(start, start + height), columns) for start in starts]
        )
    start = 0 if name == "prediction_head.dense.weight" else rows * rank  # all ranks have the same
    stop = start + rows
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        stop = max(start, min(stop, vocab_size))
    values = np.zeros((rows, columns), dtype=np.float32)
    values[: stop - start] = normal_rows(seed, name, range(start, stop), columns)
    return values
