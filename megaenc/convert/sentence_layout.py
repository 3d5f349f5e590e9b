"""What sentence-transformers wants beside a model: that a text is the mean of the states of its tokens."""

import json
from pathlib import Path

_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


def write_sentence_layout(folder: Path, hidden_size: int, length: int) -> None:
    """Add the files to the export in `folder`; texts are cut after `length` tokens."""
    (folder / "1_Pooling").mkdir()
    files = {
        "modules.json": _MODULES,
        "sentence_bert_config.json": {"max_seq_length": length, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
        "1_Pooling/config.json": {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
        | {f"pooling_mode_{other}": False for other in ("cls_token", "max_tokens", "mean_sqrt_len_tokens")},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
