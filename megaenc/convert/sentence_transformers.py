"""Files with which sentence-transformers loads a Hugging Face directory.

They define pooling, prompts and cosine similarity.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
_POOLING_FLAGS = ("mean_tokens", "cls_token", "max_tokens", "mean_sqrt_len_tokens")


def write_sentence_layout(
    directory: Path,
    hidden_size: int,
    length: int,
    prompts: Mapping[str, str] | None = None,
    *,
    pooling: Literal["mean", "cls", "lasttoken"] = "mean",
    lower_case: bool = False,
) -> None:
    """Write the files with which sentence-transformers loads a Hugging Face model.

    They are modules.json, sentence_bert_config.json, config_sentence_transformers.json and
    1_Pooling/config.json. The model is loaded in float32; embeddings are not normalized.

    Args:
        directory: Existing directory of the model, with no `1_Pooling`, else FileExistsError.
        hidden_size: Width of the embeddings.
        length: Maximum number of tokens of a text.
        prompts: Prefix of a text by the name of its role, such as "query"; None: no prefixes.
        pooling: Token states that make the embedding: their mean, the first or the last one.
        lower_case: Whether texts are put into lower case first.
    """
    (directory / "1_Pooling").mkdir()
    pooling_flag = {"mean": "mean_tokens", "cls": "cls_token"}.get(pooling, pooling)
    unused_modes = {
        f"pooling_mode_{flag}": False for flag in _POOLING_FLAGS if flag != pooling_flag
    }
    encoding = {
        "prompts": dict(prompts or {}),
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    pooling = {
        "word_embedding_dimension": hidden_size,
        f"pooling_mode_{pooling_flag}": True,
    } | unused_modes
    write_json(directory / "modules.json", _MODULES)
    # Of the config, not of the model: a dtype in the user's model_kwargs takes precedence under
    # either of its names.
    dtype = {"config_args": {"dtype": "float32"}}
    write_json(
        directory / "sentence_bert_config.json",
        {"max_seq_length": length, "do_lower_case": lower_case} | dtype,
    )
    write_json(directory / "config_sentence_transformers.json", encoding)
    write_json(directory / "1_Pooling/config.json", pooling)


def write_json(file: Path, content: Any, indent: int = 2) -> None:
    """Write `content` to `file` as JSON, with a newline at the end.

    `indent` is the number of spaces of a level. Keys keep their order, and characters outside ASCII
    are escaped. An existing file is replaced, not atomically.
    """
    file.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
