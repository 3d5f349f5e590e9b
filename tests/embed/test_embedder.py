"""Float32 embeddings, within 1e-5 of sentence-transformers and transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from embed.conftest import load_embedder, write_sentence_model
from small_data import write_file

from megaenc.embed.embedder import EmbeddingConfig, fetch_model, read_embedding_config
from megaenc.errors import InputError

TEXTS = [
    "Lyon",
    "The old man walked slowly down to the river with his dog. " * 9,
    "letters from LYON",
    "yellow",
    "Nobody came.",
]


def embed(directory, texts, config=None, **options):
    embedder = load_embedder(directory, config, **options)
    return embedder.embed(embedder.tokenize(texts))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("encoder", {}),
        ("encoder", {"pooling": "cls", "norm": True, "max_seq_length": 20}),
        ("decoder", {"pooling": "lasttoken", "max_seq_length": 33}),
        ("decoder", {"pooling": "mean", "do_lower_case": True}),
        ("encoder", {"prompts": {"query": "Ask: ", "document": "Read: "}}),
    ],
)
def test_a_sentence_transformers_directory(models, kind, options):
    reference = write_sentence_model(models[kind], "st", **options)
    config = read_embedding_config("st")
    how = {"normalize_embeddings": True, "convert_to_tensor": True}
    for prefix, encode in (
        (config.query_prefix, reference.encode_query),
        (config.document_prefix, reference.encode_document),
    ):
        expected = encode(TEXTS, **how)
        for batch_size in (1, 3):
            vectors = embed("st", [prefix + text for text in TEXTS], config, batch_size=batch_size)
            torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)
    assert (config.query_prefix, config.document_prefix) == (
        ("Ask: ", "Read: ") if "prompts" in options else ("", "")
    )


def test_a_text_without_tokens_has_no_direction(models):
    directory = shutil.copytree(models["encoder"], Path("plain"))
    values = json.loads((directory / "tokenizer.json").read_text())
    write_file(directory / "tokenizer.json", values | {"post_processor": None})
    vectors = embed(directory, ["", "Lyon", ""])
    assert not vectors[[0, 2]].any() and vectors[1].norm() == pytest.approx(1)
    assert embed(models["encoder"], [""]).norm() == pytest.approx(1)  # its special tokens


def test_a_length_without_room_for_text_is_refused(models):
    with pytest.raises(
        InputError, match=r"--max-length: found 2, expected room for text next to 2 added tokens"
    ):
        load_embedder(models["encoder"], EmbeddingConfig(max_length=2))
    rows = load_embedder(models["encoder"], EmbeddingConfig(max_length=3)).tokenize(TEXTS)
    assert [len(row) for row in rows] == [3] * 5


def test_nan_is_an_error(models):
    embedder = load_embedder(models["encoder"])
    next(embedder.backbone.parameters()).data.fill_(float("nan"))
    with pytest.raises(InputError, match=r"an embedding is NaN or inf; try --precision fp32"):
        embedder.embed(embedder.tokenize(["Lyon"]))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "modules.json",
            "[]",
            r"modules.json: found the modules , expected Transformer, Pooling and maybe Normalize",
        ),
        (
            "modules.json",
            '[{"type": "a.Transformer"}, {"type": "a.Dense"}]',
            r"found the modules Transformer, Dense",
        ),
        (
            "modules.json",
            '[{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "../1_Pooling"}]',
            r"found the paths \['', '../1_Pooling'\]",
        ),
        (
            "1_Pooling/config.json",
            '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true}',
            r"found the pooling",
        ),
        (
            "1_Pooling/config.json",
            '{"include_prompt": false}',
            r"field `include_prompt`: found false, expected true",
        ),
        (
            "sentence_bert_config.json",
            '{"max_seq_length": "long"}',
            r"max_seq_length: found 'long', expected a number",
        ),
        (
            "config_sentence_transformers.json",
            '{"prompts": {"query": 5}}',
            r"field `prompts`: expected texts by name",
        ),
    ],
)
def test_unusable_directories(models, file, content, message):
    write_sentence_model(models["encoder"], "st")
    (Path("st") / file).write_text(content)
    with pytest.raises(InputError, match=message):
        read_embedding_config("st")


def test_the_form_of_older_versions(models):
    write_sentence_model(models["encoder"], "st")
    old = {
        "word_embedding_dimension": 32,
        "pooling_mode_cls_token": True,
        "pooling_mode_mean_tokens": False,
    }
    write_file(Path("st/1_Pooling/config.json"), old)
    Path("st/sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}')
    config = read_embedding_config("st")
    assert config == EmbeddingConfig("cls", None, 12, "", "", True)


def test_a_model_of_the_hub_by_name(models, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--lab--small"
    snapshot = shutil.copytree(models["encoder"], cached / "snapshots" / ("a" * 40))
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("a" * 40)
    assert fetch_model("lab/small") == str(snapshot)
    with pytest.raises(
        InputError, match=r"--model lab/other: neither a directory nor a model that the Hub gives"
    ):
        fetch_model("lab/other")
    for path in ("nothing", "../lab/small", f"lab/{'x' * 300}"):
        with pytest.raises(InputError, match=r"no such directory; expected a Hugging Face model"):
            fetch_model(path)
