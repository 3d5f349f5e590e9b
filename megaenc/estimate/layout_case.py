"""Sizes of a model in a parallel layout."""

import math
from dataclasses import dataclass

from megaenc.backend.parallel_config import ParallelConfig
from megaenc.model.config import ModelConfig, padded_vocab_size
from megaenc.training.config import PretrainConfig


@dataclass(frozen=True)
class PipelineStage:
    """Layers and parameters of one rank of a pipeline stage, of a LayoutCase.

    `LayoutCase.build_stages` builds them. `index` counts from 0. `layers` is the number in all
    virtual stages. `parameters` are those of one tensor-parallel rank: its shard of matrices, those
    of embedding (if `has_embedding`) and head (if `has_head`) included, and norms, which are
    replicated.
    """

    index: int
    layers: int
    parameters: int
    """parameters of one rank: matrices are sharded over tensor-parallel ranks, norms are
    replicated"""
    has_embedding: bool

    has_head: bool


@dataclass(frozen=True)
class LayoutCase:
    """Model and batch of a run in a parallel layout on some devices.

    `from_config` builds it. `shape` is the model, `vocab_size` without padding, `layout` the
    parallel layout, `gpus` the number of all devices, `split` the number of layers of each virtual
    stage in forward order. `global_batch_size`, and `micro_batch_size` of a data-parallel rank, are
    in packs of `seq_length` tokens. `bf16` is whether weights and activations are bfloat16, else
    float32.
    """

    shape: ModelConfig
    vocab_size: int
    layout: ParallelConfig
    split: tuple[int, ...]
    """layers of each virtual stage, in forward order"""
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    bf16: bool

    @classmethod
    def from_config(cls, config: PretrainConfig, vocab_size: int, gpus: int) -> "LayoutCase":
        """Return the case of a pretraining config on a number of devices.

        It is checked neither that the layout fits `gpus` nor that micro_batch_size is a number, not
        "auto".

        Args:
            vocab_size: Vocabulary without padding, which the case adds.

        Raises:
            InputError: The layout cannot split the layers into stages.
        """
        return cls(
            shape=config.shape,
            vocab_size=vocab_size,
            layout=config.layout,
            split=config.layout.layers_per_chunk(config.shape.num_layers),
            gpus=gpus,
            micro_batch_size=config.micro_batch_size,
            global_batch_size=config.global_batch_size,
            seq_length=config.data.seq_length,
            bf16=config.bf16,
        )

    @property
    def tensor_parallel_size(self) -> int:
        """Return the number of tensor-parallel ranks, which share each layer's matrices."""
        return self.layout.tensor_model_parallel_size

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages; virtual ones are not counted."""
        return self.layout.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of model replicas, rounded down if `gpus` is no multiple."""
        return self.gpus // (self.tensor_parallel_size * self.num_stages)

    @property
    def virtual_stages(self) -> int:
        """Return the number of virtual stages on each pipeline stage.

        It is 1 without an interleaved schedule.
        """
        return len(self.split) // self.num_stages

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches per step of the data-parallel rank with most packs.

        With an interleaved schedule, they are rounded up to a multiple of the pipeline stages.
        """
        multiple = self.num_stages if self.virtual_stages > 1 else 1
        rows = math.ceil(self.largest_share / self.micro_batch_size)
        return math.ceil(rows / multiple) * multiple

    @property
    def largest_share(self) -> int:
        """Return the packs per step of the data-parallel rank with most packs.

        It is the global batch size over the data-parallel size, rounded up.
        """
        return math.ceil(self.global_batch_size / self.data_parallel_size)

    @property
    def packs_at_once(self) -> int:
        """Return the packs of a replica's largest micro-batch.

        A rank divides its packs evenly over its `micro_batches`, each of at most
        `micro_batch_size`: 9 packs with a size of 8 become 5 and 4.
        """
        return math.ceil(self.largest_share / self.micro_batches)

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of a replica's largest micro-batch, packs x `seq_length`.

        Tensor-parallel ranks do not divide them (`sequence_shards` does).
        """
        return self.packs_at_once * self.seq_length

    @property
    def value_bytes(self) -> int:
        """Return the bytes of one value of an activation: 2 in bfloat16, 4 in float32."""
        return 2 if self.bf16 else 4

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of a micro-batch's hidden states after one layer.

        The micro-batch is the largest. As in `micro_batch_tokens`, tensor-parallel ranks do not
        divide them.
        """
        return self.micro_batch_tokens * self.shape.hidden_size * self.value_bytes

    @property
    def sequence_shards(self) -> int:
        """Return the number of ranks that divide the tokens of norms and residuals.

        It is the tensor-parallel size with sequence parallelism, else 1.
        """
        return self.tensor_parallel_size if self.layout.sequence_parallel else 1

    @property
    def kv_size(self) -> int:
        """Return the width of a token's keys, which is that of its values too.

        It is not divided by tensor-parallel ranks.
        """
        return self.shape.num_query_groups * self.shape.head_dim

    @property
    def vocab_rows(self) -> int:
        """Return the rows of the padded embedding on each tensor-parallel rank."""
        return (
            padded_vocab_size(
                self.vocab_size, self.shape.make_vocab_size_divisible_by, self.tensor_parallel_size
            )
            // self.tensor_parallel_size
        )

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one layer on each tensor-parallel rank."""
        shape = self.shape
        widths = shape.linear_shapes(self.tensor_parallel_size)
        norms = shape.norms_per_layer * shape.norm_size(shape.hidden_size)
        norms += shape.qk_layernorm * 2 * shape.norm_size(shape.head_dim)
        return (
            sum(map(math.prod, widths.values()))
            + shape.add_qkv_bias * widths["linear_qkv"][0]
            + norms
        )

    def build_stage(self, index: int) -> PipelineStage:
        """Return the PipelineStage with an index from 0 to `num_stages` - 1, unchecked."""
        layers = sum(self.split[index :: self.num_stages])
        is_first = index == 0
        is_last = index == self.num_stages - 1
        matrix = self.vocab_rows * self.shape.hidden_size
        # A tied head is a copy on the last stage.
        own_head = self.shape.untie_embeddings_and_output_weights or not is_first
        # The norm of the embedding (--embedding-norm) is in place of one of the first layer.
        head = self.shape.norm_size(self.shape.hidden_size) + self.shape.prediction_head_size
        head += own_head * matrix + self.shape.output_layer_bias * self.vocab_rows
        parameters = layers * self.layer_parameters + is_first * matrix + is_last * head
        return PipelineStage(index, layers, parameters, is_first, is_last)

    def build_stages(self) -> list[PipelineStage]:
        """Return the `num_stages` pipeline stages in forward order.

        Each has the layers of its virtual stages.
        """
        return [self.build_stage(index) for index in range(self.num_stages)]
