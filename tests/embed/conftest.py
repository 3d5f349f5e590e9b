"""Small random models, as Hugging Face and sentence-transformers folders, and a BEIR folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megaenc.data.tokenizer.tokenizer import train_tokenizer
from megaenc.embed.command import eval_main
from megaenc.embed.embedder import Embedder, EmbeddingConfig, read_embedding_config

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


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """What a test writes to a relative path is in a folder of its own."""
    monkeypatch.chdir(tmp_path)


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


def load_embedder(folder: Path, config: EmbeddingConfig | None = None, **options) -> Embedder:
    """The model of a folder in float32; without `config` by the folder's own rules."""
    config = config or read_embedding_config(str(folder))
    return Embedder(str(folder), config, device=torch.device("cpu"), dtype=torch.float32, **options)


def evaluate(*words: object) -> dict:
    """Call `embed eval` in float32; returns the results that it writes."""
    eval_main([str(word) for word in (*words, "--precision", "fp32", "--output", "new/scores.json")])
    return json.loads(Path("new/scores.json").read_text())


@pytest.fixture
def beir(tmp_path) -> Callable[..., Path]:
    """Write a BEIR folder, with other content of a file or, if that is None, without it."""

    files = {"corpus": "corpus.jsonl", "queries": "queries.jsonl", "qrels": "qrels/test.tsv"}
    content = {
        "corpus": "".join(json.dumps({"_id": key, "title": title, "text": text}) + "\n" for key, title, text in DOCUMENTS),
        "queries": "".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in QUERIES),
        "qrels": "query-id\tcorpus-id\tscore\n" + "".join(f"{query}\t{key}\t{grade}\n" for query, key, grade in QRELS),
    }

    def write(name: str = "letters", **changed: str | None) -> Path:
        (tmp_path / name / "qrels").mkdir(parents=True)
        for file, text in (content | changed).items():
            if text is not None:
                (tmp_path / name / files[file]).write_text(text)
        return tmp_path / name

    return write
