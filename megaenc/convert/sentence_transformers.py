"""Files with which sentence-transformers loads a Hugging Face folder: mean pooling, prompts, cosine similarity."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def write_sentence_layout(folder: Path, hidden_size: int, length: int, prompts: Mapping[str, str] | None = None) -> None:
    """Write the files of sentence-transformers for mean pooling over at most `length` tokens, in float32 by default.

    `prompts`: prefix of a text by the name of its role, such as "query".
    """
    (folder / "1_Pooling").mkdir()
    others = dict.fromkeys((f"pooling_mode_{other}" for other in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")), False)
    encoding = {"prompts": dict(prompts or {}), "default_prompt_name": None, "similarity_fn_name": "cosine"}
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True} | others
    write_json(folder / "modules.json", _MODULES)
    # Of the config, not of the model: a dtype in the user's model_kwargs takes precedence under either of its names.
    dtype = {"config_args": {"dtype": "float32"}}
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False} | dtype)
    write_json(folder / "config_sentence_transformers.json", encoding)
    write_json(folder / "1_Pooling/config.json", pooling)


def write_json(file: Path, content: Any, indent: int = 2) -> None:
    """Write `content` to `file` as indented JSON."""
    file.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
