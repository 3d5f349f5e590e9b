"""Converted models of every family, built once for all tests of conversions."""

from collections.abc import Callable
from pathlib import Path

import hf_models
import hf_tokenizers
import pytest
import torch


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Give each test a working directory of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def came_in(small_corpus, shared_directory) -> Callable[..., tuple[Path, Path]]:
    """Return a function that builds a model of hf_models.MODELS in both formats.

    It returns a Hugging Face directory and the run directory converted from it, neither to be
    changed. The model has spare rows of the vocabulary, `dtype`, and `options` in its config.
    """

    def find(name: str, dtype: torch.dtype = torch.float32, **options) -> tuple[Path, Path]:
        def make(directory: Path) -> None:
            tokenizer = small_corpus.tokenizer
            # With a qwen2 config.json transformers splits texts as Qwen2, whatever the tokenizer.
            if name == "qwen2":
                tokenizer = hf_tokenizers.save(
                    hf_tokenizers.qwen("<|mask|>"), directory / "tokenizer", mask_token="<|mask|>"
                )
            model = hf_models.build(name, vocab_size=410, **options).to(dtype)
            hf_models.write(model, directory / "hf", tokenizer)
            hf_models.from_hf(directory / "hf", directory / "core")

        directory = shared_directory(f"came in {name} {dtype} {options}", make)
        return directory / "hf", directory / "core"

    return find
