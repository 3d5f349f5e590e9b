"""Small random models in both formats of directories, and a BEIR directory."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_data import beir_files, write_files
from small_models import save_model

from megaenc.console import silence_libraries
from megaenc.data.tokenizer.special_tokens import SpecialTokens, set_special_tokens
from megaenc.data.tokenizer.tokenizer import train_tokenizer
from megaenc.embed.command import eval_main
from megaenc.embed.embedder import Embedder, EmbeddingConfig, read_embedding_config

silence_libraries()

DOCUMENTS = [
    ("d1", "Rivers", "The old man walked slowly down to the river with his dog."),
    ("d2", "", "Nobody came to the garden in the early summer."),
    ("d3", "Letters", "1,024 letters from Lyon and Paris, and a heavy book."),
    ("d4", "", ""),
    ("d5", "Flowers", "Yellow flowers behind the house."),
    ("d6", "", "Lyon"),
]
QUERIES = [
    ("q1", "who walks to a river?"),
    ("q2", "letters from LYON"),
    ("q3", "yellow flowers in the garden"),
    ("q4", "of the"),
]
QRELS = [
    ("q1", "d1", 1),
    ("q2", "d3", 2),
    ("q2", "d6", 1),
    ("q3", "d5", 1),
    ("q3", "d2", 1),
    ("q3", "d1", 0),
    ("q4", "d2", 0),
]


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Give each test a working directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Write an encoder and a decoder with random weights; return them by kind.

    Their tokenizer adds two special tokens.
    """
    root = tmp_path_factory.mktemp("models")
    texts = [f"{title} {text}" for _, title, text in DOCUMENTS] + [text for _, text in QUERIES]
    tokenizer = train_tokenizer(texts * 20, 360)
    added = SpecialTokens("template", (tokenizer.mask_token_id,), (tokenizer.eos_token_id,))
    tokenizer = set_special_tokens(tokenizer, added)
    sizes = {
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    for directory, kind in (("encoder", "eurobert"), ("decoder", "qwen3")):
        model = save_model(root / directory, kind, tokenizer, **sizes)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(root / directory)
    return {kind: root / kind for kind in ("encoder", "decoder")}


def write_sentence_model(
    model, directory, *, pooling="mean", norm=False, prompts=None, default=None, **transformer
):
    """Save `model` with sentence-transformers, and load it again."""
    from sentence_transformers import SentenceTransformer, models

    modules = [
        models.Transformer(str(model), **transformer),
        models.Pooling(32, pooling),
        *([models.Normalize()] if norm else []),
    ]
    made = SentenceTransformer(
        modules=modules, device="cpu", prompts=prompts, default_prompt_name=default
    )
    made.save(str(directory))
    return SentenceTransformer(str(directory), device="cpu")


def load_embedder(directory: Path, config: EmbeddingConfig | None = None, **options) -> Embedder:
    """Load the model of a directory in float32, by its own rules without `config`."""
    config = config or read_embedding_config(str(directory))
    return Embedder(
        str(directory), config, device=torch.device("cpu"), dtype=torch.float32, **options
    )


def evaluate(*words: object) -> dict:
    """Call `embed eval` in float32; return the results that it writes."""
    eval_main(
        [str(word) for word in (*words, "--precision", "fp32", "--output", "new/scores.json")]
    )
    return json.loads(Path("new/scores.json").read_text())


@pytest.fixture
def beir(tmp_path) -> Callable[..., Path]:
    """Return a function that writes a BEIR directory, with files changed or omitted.

    A file whose changed content is None is omitted.
    """
    files = beir_files(DOCUMENTS, QUERIES, test=QRELS)
    return lambda name="letters", changed=None: Path(
        write_files(tmp_path / name, files | (changed or {}))
    )
