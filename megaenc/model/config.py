"""Model shape, presets, and parameter and FLOP counts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from megaenc.console import truncate_text
from megaenc.errors import InputError
from megaenc.flags import (
    ADAPTABLE_WEIGHTS,
    ANY_WEIGHTS,
    BY_PHASE,
    Bounds,
    FractionBelowOne,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Size,
    check_bounds,
    setting,
)

_Factor = Annotated[float, Bounds(low=1)]
# megatron-core computes YaRN's angles of as many positions.
_ContextLength = Annotated[int, Bounds(low=1, high=1 << 20)]


@dataclass(frozen=True)
class ModelConfig:
    """Shape and options of a pre-norm transformer.

    Each field is the flag of its name. Sizes are those of the whole model, over all ranks:
    `num_layers`, `hidden_size`, `ffn_hidden_size`, `num_attention_heads`, `num_query_groups`
    (key/value heads) and `kv_channels` (width of a head; None: hidden_size / num_attention_heads).
    Further groups are attention (`qk_layernorm`, `window_size` of local layers, None: all are
    global), rotary positions (`rotary_base` and their scaling), norms (`normalization`,
    `post_norms`), the MLP's `activation`, embedding and output layer (`vocab_size`, None: the
    tokenizer's), dropout and initial weights. The defaults are Llama's: RMSNorm, SwiGLU, rotary
    positions, grouped queries. The constructor checks nothing; `check` does.
    """

    num_layers: PositiveInt = 4
    """transformer layers"""
    hidden_size: PositiveInt = 256
    """width of the residual stream"""
    ffn_hidden_size: PositiveInt = 768
    """width inside the gated MLP"""
    num_attention_heads: PositiveInt = 4
    """query heads"""
    num_query_groups: PositiveInt = 2
    """key/value heads"""
    kv_channels: PositiveInt | None = None
    """width of an attention head; --hidden-size / --num-attention-heads unless given"""
    add_qkv_bias: bool = False
    """add a bias to queries, keys and values, as Qwen2 does"""
    qk_layernorm: bool = False
    """normalize queries and keys by RMSNorm in each head, as Qwen3 does"""
    query_pre_attn_scalar: PositiveInt | None = setting(None, feature="scaling of queries")
    """divide attention scores by the square root of this number; of the head width unless given"""
    rotary_base: PositiveFloat = setting(
        10000.0, ADAPTABLE_WEIGHTS, BY_PHASE, feature="rotary positions of another base period"
    )
    """base period of the rotary positions; for --init-from another one than the run's must be
    given, here or in --config, like the scaling of the positions"""
    use_rope_scaling: bool = setting(False, ADAPTABLE_WEIGHTS, feature="scaled rotary positions")
    """scale the low frequencies of the rotary positions, as Llama 3.1 and later do (original
    context: 8,192 tokens)"""
    rope_scaling_factor: _Factor = setting(8.0, ADAPTABLE_WEIGHTS)
    """factor of --use-rope-scaling; Llama 3.1 has 8, Llama 3.2 has 32"""
    yarn_rotary_scaling_factor: _Factor | None = setting(
        None, ADAPTABLE_WEIGHTS, feature="rotary positions scaled by YaRN"
    )
    """factor by which YaRN (arXiv 2309.00071) extends the context: it divides the low frequencies
    of the rotary positions, and sharpens attention; no YaRN unless given"""
    yarn_original_max_position_embeddings: _ContextLength | None = setting(None, ADAPTABLE_WEIGHTS)
    """with --yarn-rotary-scaling-factor: tokens of the context before the extension"""
    rotary_seq_len_interpolation_factor: _Factor | None = setting(
        None, feature="linearly scaled rotary positions"
    )
    """divide the rotary positions of layers with global attention by this number, 8 in Gemma 3 from
    4B on"""
    normalization: Literal["RMSNorm", "LayerNorm"] = setting("RMSNorm", feature="LayerNorm")
    """norm of layers, heads and outputs; LayerNorm (ModernBERT) subtracts the mean too"""
    norm_bias: bool = False
    """add a bias in each LayerNorm"""
    norm_epsilon: PositiveFloat = 1e-5
    """epsilon of the norms"""
    apply_layernorm_1p: bool = setting(False, feature="norms by weight + 1")
    """multiply by weight + 1 in each RMSNorm, with weights that start at 0, as Gemma 3 does"""
    post_norms: bool = setting(False, feature="norms after attention and MLP")
    """normalize the outputs of attention and MLP too, before they are added to the residual stream,
    as Gemma 3 does"""
    activation: Literal["silu", "gelu", "gelu_pytorch_tanh"] = "silu"
    """activation of the gated MLP, silu (SwiGLU), gelu (GeGLU, as in ModernBERT) or
    gelu_pytorch_tanh (its approximation by tanh, as in Gemma 3), and of the --prediction-head"""
    window_size: PositiveInt | None = setting(None, feature="attention windows")
    """tokens to each side that local layers attend to, half of ModernBERT's `local_attention`;
    attention is global in all layers without it, and in documents that fit into it"""
    global_attn_every_n_layers: Annotated[int, Bounds(low=2)] | None = None
    """with --window-size: attend globally in each n-th layer from --first-global-layer on
    (ModernBERT: 3, Gemma 3: 6); no layer unless given"""
    first_global_layer: PositiveInt = 1
    """first layer of --global-attn-every-n-layers, counted from 1 (ModernBERT: 1, Gemma 3: 6)"""
    local_rotary_base: PositiveFloat | None = setting(None, ADAPTABLE_WEIGHTS)
    """base period of the rotary positions in local layers; --rotary-base unless given"""
    embedding_norm: bool = setting(False, feature="norm of the embedding")
    """normalize the embedding instead of the input of the first layer's attention, as ModernBERT
    does"""
    scale_embedding: bool = setting(False, feature="scaling of the embedding")
    """multiply the embedding by the square root of --hidden-size, as Gemma 3 does"""
    prediction_head: bool = setting(False, feature="prediction head")
    """transform the predicted positions by a dense layer, the activation and a norm before the
    output layer, as BERT does"""
    output_layer_bias: bool = setting(False, feature="bias of the output layer")
    """add a bias for each token of the vocabulary to the logits, as BERT does"""
    attention_output_dropout: FractionBelowOne = setting(0.0, ANY_WEIGHTS)
    """share of attention's output, after its projection, that is dropped in training before it is
    added to the residual stream, as in ModernBERT (0.1)"""
    init_method_std: NonNegativeFloat = setting(0.02, ANY_WEIGHTS)
    """standard deviation of the initial weights"""
    init_method: Literal["normal", "scaled", "full_megatron"] = setting("normal", ANY_WEIGHTS)
    """distribution of the initial weights. normal: N(0, --init-method-std) for all matrices;
    scaled: divided by sqrt(2 x --num-layers) for the output projections of attention and MLP, as in
    Megatron; full_megatron: scaled, cut at --init-cutoff, and with 1 / sqrt(--hidden-size) for an
    output layer of its own, as in ModernBERT"""
    init_cutoff: PositiveFloat = setting(2.0, ANY_WEIGHTS)
    """with --init-method full_megatron: standard deviations at which the distribution is cut"""
    untie_embeddings_and_output_weights: bool = setting(
        True, feature="output layer that shares the embedding"
    )
    """give the output layer its own matrix, as in the study; otherwise it shares the embedding's"""
    vocab_size: Size | None = None
    """rows of the embedding; the tokenizer's vocabulary size unless given (converted models may
    have spare rows)"""
    make_vocab_size_divisible_by: Size = setting(128, ANY_WEIGHTS)
    """pad each tensor-parallel rank's share of the vocabulary to a multiple of this; exports omit
    the padding"""

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head.

        It is `kv_channels`, or without it the hidden size divided by the number of heads.
        """
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_size(self) -> int:
        """Return the total width of all query heads.

        It is also the width of the attention output.
        """
        return self.num_attention_heads * self.head_dim

    def parameter_count(self, vocab_size: int, *, lm_head: bool = True) -> int:
        """Return the number of parameters of the whole model, over all ranks.

        Args:
            vocab_size: Rows of the embedding, with padding if it is to be counted. The field
                `vocab_size` is not read.
            lm_head: Whether to count the output layer: its matrix if untied, and in any case its
                bias and the prediction head, if the model has them.
        """
        hidden = self.hidden_size
        vectors = self.add_qkv_bias * self._qkv_size + self.qk_layernorm * 2 * self.norm_size(
            self.head_dim
        )
        # With --embedding-norm the first layer has one less.
        norms = self.norms_per_layer * self.num_layers + 1
        matrices = 2 if lm_head and self.untie_embeddings_and_output_weights else 1
        head = lm_head * (self.prediction_head_size + self.output_layer_bias * vocab_size)
        layers = self.num_layers * (self._layer_matrices + vectors) + norms * self.norm_size(hidden)
        return layers + matrices * vocab_size * hidden + head

    @property
    def norms_per_layer(self) -> int:
        """Return the number of norms of hidden states in a layer.

        Norms of queries and keys are not counted. The first layer has one less with
        `embedding_norm`.
        """
        return 4 if self.post_norms else 2

    def norm_size(self, width: int) -> int:
        """Return the number of parameters of a norm over `width` channels.

        A channel has a weight, and a bias if `norm_bias`.
        """
        return (1 + self.norm_bias) * width

    @property
    def prediction_head_size(self) -> int:
        """Return the number of parameters of the prediction head, 0 without it.

        They are those of a dense layer without bias and a norm.
        """
        return self.prediction_head * (self.hidden_size**2 + self.norm_size(self.hidden_size))

    @property
    def mlp_matrices(self) -> int:
        """Return 3, the number of matrices of an MLP: gate, up and down.

        The MLP is always gated. Gate and up are computed as one product.
        """
        return 3

    @property
    def mlp_input_size(self) -> int:
        """Return the width of gate and up together, over all ranks."""
        return (self.mlp_matrices - 1) * self.ffn_hidden_size

    @property
    def _qkv_size(self) -> int:
        """Return the total width of queries, keys and values."""
        return self.query_size + 2 * self.num_query_groups * self.head_dim

    @property
    def _layer_matrices(self) -> int:
        """Return the number of weights in the matrices of one layer."""
        return self.hidden_size * (
            self._qkv_size + self.query_size + self.mlp_matrices * self.ffn_hidden_size
        )

    def linear_shapes(self, tensor_parallel: int) -> dict[str, tuple[int, int]]:
        """Return the (output, input) widths of a layer's four matrices on one rank.

        The keys are linear_qkv, linear_proj, linear_fc1 and linear_fc2. `tensor_parallel` is the
        number of ranks that share a matrix, which must divide the widths (see `check`).
        """
        return {
            "linear_qkv": (self._qkv_size // tensor_parallel, self.hidden_size),
            "linear_proj": (self.hidden_size, self.query_size // tensor_parallel),
            "linear_fc1": (self.mlp_input_size // tensor_parallel, self.hidden_size),
            "linear_fc2": (self.hidden_size, self.ffn_hidden_size // tensor_parallel),
        }

    def layer_flops_per_token(self) -> int:
        """Return the FLOPs of all layers' matrix products for one token.

        They are 6 for each weight: 2 in forward, 4 in backward. Scores and values of attention, the
        embedding and the output layer are not counted.
        """
        return 6 * self.num_layers * self._layer_matrices

    @property
    def local_layers(self) -> int:
        """Return the number of layers whose attention has a window, 0 without a window."""
        return 0 if self.window_size is None else self.num_layers - len(self._global_layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer in order, None if its attention is global.

        A window is the number of tokens to each side that a token attends to.
        """
        return tuple(
            None if layer_index in self._global_layers else self.window_size
            for layer_index in range(self.num_layers)
        )

    @property
    def _global_layers(self) -> range:
        """Return the indices, from 0, of layers that attend globally in spite of a window."""
        every = self.global_attn_every_n_layers
        return range(self.first_global_layer - 1, self.num_layers, every) if every else range(0)

    def attention_flops(self, length: int, *, prefix: int) -> int:
        """Return the FLOPs of attention in all layers for one document.

        Forward and backward: 6 (s^2 + p^2) q per layer, with s = `length`, p = `prefix` and the
        width q of all query heads. In layers with a window w, `visible_pairs(s, w)` replaces s^2,
        `visible_pairs(p, w)` p^2.

        Args:
            length: Tokens of the document.
            prefix: Tokens at its start that attend to each other: 0 if causal, `length` if
                bidirectional.
        """
        window = self.window_size
        local = self.local_layers
        pairs = (self.num_layers - local) * (length * length + prefix * prefix)
        pairs += local * (visible_pairs(length, window) + visible_pairs(prefix, window))
        return 6 * self.query_size * pairs

    def head_flops(self, outputs: int, predicted: float) -> float:
        """Return the FLOPs of the logits and of the prediction head.

        Forward and backward are counted. The result is an int if `predicted` is one.

        Args:
            outputs: Logits at each predicted position: the vocabulary, or an objective's classes.
            predicted: Number of predicted positions, which may be a mean.
        """
        return (
            6 * self.hidden_size * (outputs + self.prediction_head * self.hidden_size) * predicted
        )

    def training_flops(
        self,
        outputs: int,
        predicted: int,
        spans: Iterable[tuple[int, int, int]],
        *,
        selects_rows: bool = True,
    ) -> int:
        """Return the FLOPs of training the whole model on documents.

        Forward and backward are counted, recomputation is not.

        Args:
            outputs: Logits at each predicted position: the vocabulary without padding, or an
                objective's classes.
            predicted: Number of predicted positions.
            spans: (start, prefix end, stop) of each document, as of `PackedSequences.spans`.
            selects_rows: Whether the last layer computes only the predicted positions after its
                attention; without effect if `predicted` is 0, because then it computes all.
        """
        spans = list(spans)
        documents = sum(
            self.layer_flops_per_token() * (stop - start)
            + self.attention_flops(stop - start, prefix=prefix - start)
            for start, prefix, stop in spans
        )
        tokens = sum(stop - start for start, _, stop in spans)
        unneeded = (
            self.unselected_flops_per_token() * (tokens - predicted)
            if selects_rows and predicted
            else 0
        )
        return self.head_flops(outputs, predicted) + documents - unneeded

    def unselected_flops_per_token(self) -> int:
        """Return the FLOPs of the last layer after its attention for one token.

        They are those of the output projection and the MLP in forward and backward, which positions
        without a prediction do not need.
        """
        return 6 * self.hidden_size * (self.query_size + self.mlp_matrices * self.ffn_hidden_size)

    def check(self, tensor_parallel: int = 1) -> None:
        """Check that the shape is valid and can be split over tensor-parallel ranks.

        The split of the layers over pipeline stages is not checked.

        Args:
            tensor_parallel: Number of tensor-parallel ranks.

        Raises:
            InputError: A field is invalid; the error names its flag.
        """
        check_bounds(self)
        if self.kv_channels is None:
            self._check_multiple("hidden_size", self.num_attention_heads, "--num-attention-heads")
        if self.head_dim % 2:
            source = (
                "--hidden-size / --num-attention-heads is"
                if self.kv_channels is None
                else "--kv-channels: found"
            )
            raise InputError(
                f"{source} {self.head_dim}, expected an even head width for rotary positions"
            )
        self._check_multiple("num_attention_heads", self.num_query_groups, "--num-query-groups")
        for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
            self._check_multiple(name, tensor_parallel, "--tensor-model-parallel-size")
        self._check_effects()

    def _check_effects(self) -> None:
        """Check that no option lacks another one that gives it an effect or a meaning.

        Raises:
            InputError: An option does; the error names its flag.
        """
        has_yarn = self.yarn_rotary_scaling_factor is not None
        has_layer_norm = self.normalization == "LayerNorm"
        has_window = self.window_size is not None
        has_global_layers = self.global_attn_every_n_layers is not None
        with_global_layers = "--global-attn-every-n-layers with it"
        requirements = (
            (self.use_rope_scaling, ("rope_scaling_factor",), "--use-rope-scaling with it"),
            (
                has_yarn,
                ("yarn_original_max_position_embeddings",),
                "--yarn-rotary-scaling-factor with it",
            ),
            (
                self.yarn_original_max_position_embeddings is not None,
                ("yarn_rotary_scaling_factor",),
                "--yarn-original-max-position-embeddings with it",
            ),
            (
                not has_yarn,
                ("use_rope_scaling", "rotary_seq_len_interpolation_factor"),
                "only one of it and --yarn-rotary-scaling-factor",
            ),
            (has_layer_norm, ("norm_bias",), "--normalization LayerNorm with it"),
            (not has_layer_norm, ("apply_layernorm_1p",), "--normalization RMSNorm with it"),
            (
                has_window,
                ("global_attn_every_n_layers", "local_rotary_base"),
                "--window-size with it",
            ),
            (has_global_layers, ("first_global_layer",), with_global_layers),
            # With a window and no global layer, all layers are local.
            (
                has_global_layers or not has_window,
                ("local_rotary_base", "rotary_seq_len_interpolation_factor"),
                with_global_layers,
            ),
            (
                self.init_method == "full_megatron",
                ("init_cutoff",),
                "--init-method full_megatron with it",
            ),
        )
        for is_met, names, expected in requirements:
            for name in names:
                self._check_field(
                    name, is_met or getattr(self, name) == getattr(ModelConfig, name), expected
                )
        if has_yarn:
            # YaRN's formula divides by the logarithm of the base.
            for name in (
                "rotary_base",
                "local_rotary_base",
            ):
                value = getattr(self, name)
                self._check_field(
                    name,
                    value is None or value > 1,
                    "more than 1 with --yarn-rotary-scaling-factor",
                )

    def _check_multiple(self, name: str, divisor: int, divisor_flag: str) -> None:
        """Check that a field is a multiple of the value of another flag.

        Raises:
            InputError: It is not; the error names both flags.
        """
        self._check_field(
            name, getattr(self, name) % divisor == 0, f"a multiple of {divisor_flag} {divisor}"
        )

    def _check_field(self, name: str, is_valid: bool, expected: str) -> None:
        """Raise InputError, naming the flag of a field, unless the field is valid."""
        if not is_valid:
            raise InputError(
                f"--{name.replace('_', '-')}: found {getattr(self, name)}, expected {expected}"
            )


def visible_pairs(length: int, window: int | None) -> int:
    """Return the number of ordered pairs of tokens that are at most `window` apart.

    A token and itself are a pair, too.

    Args:
        length: Number of tokens.
        window: Largest distance; None: any.
    """
    reach = length if window is None else min(window + 1, length)
    return length * (2 * reach - 1) - reach * (reach - 1)


_MODERNBERT = {
    "rotary_base": 160000.0,
    "normalization": "LayerNorm",
    "activation": "gelu",
    "window_size": 64,
    "global_attn_every_n_layers": 3,
    "local_rotary_base": 10000.0,
    "embedding_norm": True,
    "prediction_head": True,
    "output_layer_bias": True,
    "untie_embeddings_and_output_weights": False,
}

_GEMMA3 = {
    "kv_channels": 256,
    "qk_layernorm": True,
    "rotary_base": 1e6,
    "norm_epsilon": 1e-6,
    "apply_layernorm_1p": True,
    "post_norms": True,
    "activation": "gelu_pytorch_tanh",
    "window_size": 511,
    "global_attn_every_n_layers": 6,
    "first_global_layer": 6,
    "local_rotary_base": 10000.0,
    "scale_embedding": True,
    "untie_embeddings_and_output_weights": False,
}

# The study's three sizes (arXiv 2507.00994), two for machines without an accelerator, ModernBERT's
# two (arXiv 2412.13663), NeoBERT (arXiv 2502.19587), the two small ones of Gemma 3 (arXiv
# 2503.19786), and EmbeddingGemma (arXiv 2509.20354).
PRESETS = {
    "210m": ModelConfig(12, 768, 3072, 12, 12),
    "610m": ModelConfig(26, 1152, 4096, 18, 6),
    "1b": ModelConfig(28, 1728, 5120, 18, 6),
    "small": ModelConfig(8, 512, 1536, 8, 4),
    "tiny": ModelConfig(4, 256, 768, 4, 2),
    "modernbert-base": ModelConfig(22, 768, 1152, 12, 12, **_MODERNBERT),
    "modernbert-large": ModelConfig(28, 1024, 2624, 16, 16, **_MODERNBERT),
    "neobert-base": ModelConfig(28, 768, 2048, 12, 12, output_layer_bias=True),
    "gemma3-270m": ModelConfig(18, 640, 2048, 4, 1, **_GEMMA3),
    "gemma3-1b": ModelConfig(26, 1152, 6912, 4, 1, **_GEMMA3),
    "embeddinggemma-300m": ModelConfig(
        24, 768, 1152, 3, 1, **_GEMMA3 | {"kv_channels": None, "window_size": 256}
    ),
}


def get_preset(name: str) -> ModelConfig:
    """Return the ModelConfig of a preset, such as 610m.

    Args:
        name: Name of the preset, in upper or lower case.

    Raises:
        InputError: There is no such preset; the error lists all.
    """
    if (key := str(name).lower()) not in PRESETS:  # a YAML file may have any value
        raise InputError(
            f"--model: unknown preset {truncate_text(repr(name))}, "
            f"expected one of {', '.join(PRESETS)}"
        )
    return PRESETS[key]


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """Return the size of the vocabulary with padding, over all tensor-parallel ranks.

    Args:
        vocab_size: Number of tokens.
        multiple: Number that divides the rows of each rank.
        tensor_parallel: Number of tensor-parallel ranks, which get equally many rows.
    """
    total = multiple * tensor_parallel
    return -(-vocab_size // total) * total
