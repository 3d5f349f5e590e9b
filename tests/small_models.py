"""Tiny models with random weights, as Hugging Face directories."""

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def save_model(
    directory: Path,
    kind: str,
    tokenizer: Any = None,
    auto: Any = transformers.AutoModel,
    **values: Any,
) -> Any:
    """Save a model of type `kind`, with its tokenizer if there is one, and return it.

    `auto` is the class of transformers that builds it. `values` replace those of SIZES.
    """
    ids = {}
    if tokenizer is not None:
        ids["vocab_size"] = len(tokenizer)
        ids["pad_token_id"] = tokenizer.pad_token_id
        ids["bos_token_id"] = None
        ids["eos_token_id"] = tokenizer.eos_token_id
    config = transformers.AutoConfig.for_model(kind, **SIZES | ids | values)
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    model.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    return model
