"""NeoBERT (arXiv 2502.19587), which transformers has no class for, in PyTorch.

It verifies exports and loads models without code from the Hub. Classes have the names that
config.json has, weights those of the Hub, and importing this module registers the classes with
transformers' Auto classes.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# Constants of the Hub's code: positions, and the width inside the MLP.
_ROTARY_BASE = 10000.0
_MULTIPLE = 8


def inner_size(intermediate_size: int) -> int:
    """Return the width inside the MLP for config.json's `intermediate_size`.

    It is two thirds of it, rounded down to an integer, then up to a multiple of 8.
    """
    return -(-int(2 * intermediate_size / 3) // _MULTIPLE) * _MULTIPLE


@strict
class NeoBERTConfig(PreTrainedConfig):
    """Fields of NeoBERT's config.json, with the defaults of the Hub's code.

    Fields are named as in config.json and given by keyword; `max_position_embeddings` is another
    name of `max_length`. Sizes are `vocab_size`, `hidden_size`, `intermediate_size`,
    `num_hidden_layers` and `num_attention_heads`; the others are `norm_eps`, two ranges of initial
    weights, `pad_token_id` (None: none) and `tie_word_embeddings`. A value of a wrong type is a
    StrictDataclassFieldValidationError of huggingface_hub.
    """

    model_type = "neobert"
    attribute_map: ClassVar = {"max_position_embeddings": "max_length"}

    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    norm_eps: float = 1e-6
    max_length: int = 1024
    embedding_init_range: float = 0.02
    decoder_init_range: float = 0.02
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False


def _eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return attention and its weights by the formula.

    Args:
        query: [B, heads, S, D], as `key` and `value`.
        mask: Added to the scores.

    Returns:
        The attention, [B, S, heads, D], and its weights.
    """
    scores = query @ key.mT * scaling
    weights = (
        (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(value.dtype)
    )
    return (weights @ value).transpose(1, 2), weights


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Return `x` [B, S, heads, D] with each pair of neighbouring numbers rotated.

    A pair is multiplied, as a complex number, by its `rotation`, [B, S, D / 2].
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation[:, :, None]).flatten(-2).to(x.dtype)


class _SwiGLU(nn.Module):
    """Gated MLP without biases: w3(silu(gate) * up).

    Gate and up projection have one matrix, w12.
    """

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.w12 = nn.Linear(hidden, 2 * inner, bias=False)
        self.w3 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP's output, [B, S, H]."""
        gate, up = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * up)


class _NeoBERTLayer(nn.Module):
    """Transformer layer with RMSNorm before attention and MLP.

    Each head has its query, key and value rows in `qkv` together.
    """

    is_causal = False

    def __init__(self, config: NeoBERTConfig):
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.head_dim = hidden // config.num_attention_heads
        self.attention_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.wo = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.ffn = _SwiGLU(hidden, inner_size(config.intermediate_size))

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
        """Return hidden states [B, S, H] after the layer.

        Args:
            x: Hidden states [B, S, H].
            rotation: Complex factors of queries and keys, [B or 1, S, head width / 2].
            mask: Result of transformers' `create_bidirectional_mask` for the config's attention;
                None: all tokens are seen.
        """
        query, key, value = (
            self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        )
        heads = (
            part.transpose(1, 2)
            for part in (_rotate(query, rotation), _rotate(key, rotation), value)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, _eager_attention
        )
        attended, _ = attend(self, *heads, mask, scaling=self.head_dim**-0.5)
        x = x + self.wo(attended.flatten(2))
        return x + self.ffn(self.ffn_norm(x))


class NeoBERTPreTrainedModel(PreTrainedModel):
    """Base class of NeoBERT models for transformers, which saves and loads them."""

    config_class = NeoBERTConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class NeoBERT(NeoBERTPreTrainedModel):
    """NeoBERT without output layer, for transformers' AutoModel.

    It is built from a NeoBERTConfig. Importing this module registers it there.
    """

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.transformer_encoder = nn.ModuleList(
            _NeoBERTLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.layer_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.encoder

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the embedding."""
        self.encoder = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutput:
        """Return the states after the last norm, [B, S, H], as `last_hidden_state`.

        Other arguments, such as `output_hidden_states`, are ignored.

        Args:
            input_ids: int64[B, S], needed unless `inputs_embeds` are given, then unused.
            attention_mask: [B, S], 1 for tokens of the text and 0 for padding, or [B, 1, S, S] to
                add to the scores; None: all are text.
            position_ids: int64[B, S] or [1, S], positions of the tokens; None: 0, 1, ... They may
                exceed `max_length`.
            inputs_embeds: [B, S, H] instead of the embedding's rows.
        """
        x = self.encoder(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.size(1), device=x.device)[None]
        width = self.config.hidden_size // self.config.num_attention_heads
        frequencies = 1.0 / _ROTARY_BASE ** (
            torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width
        )
        angles = position_ids[..., None] * frequencies
        rotation = torch.polar(torch.ones_like(angles), angles)
        mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask
        )
        for layer in self.transformer_encoder:
            x = layer(x, rotation, mask)
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))


class NeoBERTLMHead(NeoBERTPreTrainedModel):
    """NeoBERT with the output layer of masked language modelling.

    It is built from a NeoBERTConfig, by transformers' AutoModelForMaskedLM. The layer has a matrix
    of its own and a bias. Only logits are returned: `labels` are ignored, and there is no loss.
    """

    def __init__(self, config: NeoBERTConfig):
        super().__init__(config)
        self.model = NeoBERT(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Set the output layer."""
        self.decoder = value

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **options: Any
    ) -> MaskedLMOutput:
        """Return `logits`, [B, S, V]; arguments are those of `NeoBERT.forward`.

        `labels` and other arguments are ignored: there is no loss.
        """
        states = self.model(input_ids, attention_mask, **options).last_hidden_state
        return MaskedLMOutput(logits=self.decoder(states))


AutoConfig.register("neobert", NeoBERTConfig)
AutoModel.register(NeoBERTConfig, NeoBERT)
AutoModelForMaskedLM.register(NeoBERTConfig, NeoBERTLMHead)
