"""Small random models, as Hugging Face and sentence-transformers folders, and a BEIR folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaenc.data.tokenizer.tokenizer import train_tokenizer

DOCUMENTS = [
    ("d1", "Rivers", "The old man walked slowly down to the river with his dog."),
    ("d2", "", "Nobody came to the garden in the early summer."),
    ("d3", "Letters", "1,024 letters from Lyon and Paris, and a heavy book."),
    ("d4", "", ""),
    ("d5", "Flowers", "Yellow flowers behind the house."),
    ("d6", "", "Lyon"),
]
QUERIES = [("q1", "who walks to a river?"), ("q2", "letters from LYON"), ("q3", "yellow flowers in the garden"), ("q4", "of the")]
QRELS = [("q1", "d1", 1), ("q2", "d3", 2), ("q2", "d6", 1), ("q3", "d5", 1), ("q3", "d2", 1), ("q3", "d1", 0), ("q4", "d2", 0)]
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """An encoder and a decoder without trained weights, whose tokenizer adds two special tokens, by kind."""
    import transformers
    from tokenizers.processors import TemplateProcessing

    root = tmp_path_factory.mktemp("models")
    texts = [f"{title} {text}" for _, title, text in DOCUMENTS] + [text for _, text in QUERIES]
    tokenizer = train_tokenizer(texts * 20, 360)
    special = [("<|mask|>", tokenizer.mask_token_id), ("<|eos|>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<|mask|> $A <|eos|>", special_tokens=special)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    common = _SIZES | ids | {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    for kind, config in (
        ("encoder", transformers.EuroBertConfig(**common)),
        ("decoder", transformers.Qwen3Config(**common, head_dim=16)),
    ):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(root / kind)
        tokenizer.save_pretrained(root / kind)
    return {kind: root / kind for kind in ("encoder", "decoder")}


@pytest.fixture
def beir(tmp_path) -> Callable[..., Path]:
    """Write a BEIR folder, with other content of a file or, if that is None, without it."""

    def write(name: str = "letters", **changed: str | None) -> Path:
        content = {
            "corpus.jsonl": "".join(json.dumps({"_id": i, "title": t, "text": x}) + "\n" for i, t, x in DOCUMENTS),
            "queries.jsonl": "".join(json.dumps({"_id": i, "text": text}) + "\n" for i, text in QUERIES),
            "qrels/test.tsv": "query-id\tcorpus-id\tscore\n" + "".join(f"{q}\t{d}\t{g}\n" for q, d, g in QRELS),
        }
        content |= {
            {"corpus": "corpus.jsonl", "queries": "queries.jsonl", "qrels": "qrels/test.tsv"}[k]: v for k, v in changed.items()
        }
        (tmp_path / name / "qrels").mkdir(parents=True)
        for file, text in content.items():
            if text is not None:
                (tmp_path / name / file).write_text(text)
        return tmp_path / name

    return write
