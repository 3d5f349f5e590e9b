"""One way to lay a model over devices, in numbers: what each rank holds and how many micro-batches it runs."""

from dataclasses import dataclass, replace

from megaenc.backend.layout import Layout
from megaenc.model.config import ModelConfig, padded_vocab_size
from megaenc.training.settings import PretrainSettings


@dataclass(frozen=True)
class Term:
    """One number of an estimate, with where it comes from."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds."""

    number: int
    layers: int
    parameters: int
    """of one of its ranks: matrices are shared by the tensor-parallel ranks, norms are on each"""
    first: bool
    """has the embedding"""
    last: bool
    """has the head"""


@dataclass(frozen=True)
class Case:
    """A model in a layout.

    Letters in formulas: S tokens of a row, N predicted of them, H hidden, F inner, q and k widths of queries and keys, V rows of
    the padded vocabulary; t tensor-parallel and d data-parallel ranks, p stages, m micro-batches, w bytes a number.
    """

    shape: ModelConfig
    vocab_size: int
    layout: Layout
    split: tuple[int, ...]
    """layers of each part, in the order of the data"""
    gpus: int
    micro_batch_size: int
    global_batch_size: int
    seq_length: int
    bf16: bool

    @classmethod
    def of(cls, settings: PretrainSettings, vocab_size: int, gpus: int) -> "Case":
        """What `settings` ask for."""
        return cls(
            settings.shape,
            vocab_size,
            settings.layout,
            settings.layout.split(settings.shape.num_layers),
            gpus,
            settings.micro_batch_size,
            settings.global_batch_size,
            settings.data.seq_length,
            settings.bf16,
        )

    def with_batch(self, packs: int) -> "Case":
        """The same with steps of `packs` packs."""
        return replace(self, global_batch_size=packs)

    @property
    def tensor(self) -> int:
        """Ranks that share each layer."""
        return self.layout.tensor_model_parallel_size

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.layout.pipeline_model_parallel_size

    @property
    def data(self) -> int:
        """Copies of the model."""
        return self.gpus // (self.tensor * self.stages)

    @property
    def turns(self) -> int:
        """Parts that each stage holds; 1 unless interleaved."""
        return len(self.split) // self.stages

    @property
    def micro_batches(self) -> int:
        """Of a rank and step."""
        return self.global_batch_size // (self.micro_batch_size * self.data)

    @property
    def row(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch_size * self.seq_length

    @property
    def width(self) -> int:
        """Bytes of a number that layers compute with."""
        return 2 if self.bf16 else 4

    @property
    def sharded(self) -> int:
        """Ranks that share norms and residuals."""
        return self.tensor if self.layout.sequence_parallel else 1

    @property
    def keys(self) -> int:
        """Width of the keys of all groups."""
        return self.shape.num_query_groups * self.shape.head_dim

    @property
    def rows(self) -> int:
        """Rows of the embedding on each rank, padding included."""
        padded = padded_vocab_size(self.vocab_size, self.shape.make_vocab_size_divisible_by, self.tensor)
        return padded // self.tensor

    @property
    def layer_parameters(self) -> int:
        """Of a layer, on each of its ranks."""
        shape, qkv = self.shape, self.shape.query_size + 2 * self.keys
        matrices = shape.hidden_size * (qkv + shape.query_size + 3 * shape.ffn_hidden_size)
        whole = 2 * shape.hidden_size + shape.qk_layernorm * 2 * shape.head_dim
        return (matrices + shape.add_qkv_bias * qkv) // self.tensor + whole

    def stage(self, number: int) -> Stage:
        """What stage `number` (0, 1, ...) holds."""
        layers, first, last = sum(self.split[number :: self.stages]), number == 0, number == self.stages - 1
        matrix = self.rows * self.shape.hidden_size
        own_head = self.shape.untie_embeddings_and_output_weights or not first  # tied, the last stage has a copy of its own
        parameters = layers * self.layer_parameters + first * matrix + last * (own_head * matrix + self.shape.hidden_size)
        return Stage(number, layers, parameters, first, last)

    def every_stage(self) -> list[Stage]:
        """All of them."""
        return [self.stage(number) for number in range(self.stages)]

    def predicted(self, per_pack: float) -> float:
        """N: predicted positions of a row."""
        return self.micro_batch_size * per_pack
