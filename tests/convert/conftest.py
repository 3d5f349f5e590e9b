"""Models of every family that came in, made once for all tests of conversions."""

from collections.abc import Callable
from pathlib import Path

import hf_models
import hf_tokenizers
import pytest
import torch


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """What a test writes to a relative path is in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def came_in(small_corpus, shared_folder) -> Callable[..., tuple[Path, Path]]:
    """Return a function of a name in hf_models.MODELS: a Hugging Face folder, and the run folder made of it.

    The model has spare rows of the vocabulary, `dtype`, and `options` in its config. The folders must not be changed.
    """

    def find(name: str, dtype: torch.dtype = torch.float32, **options) -> tuple[Path, Path]:
        def make(folder: Path) -> None:
            tokenizer = small_corpus.tokenizer
            if (
                name == "qwen2"
            ):  # beside its config.json transformers splits texts as Qwen2 does, whoever's the tokenizer is
                tokenizer = hf_tokenizers.save(
                    hf_tokenizers.qwen("<|mask|>"), folder / "tokenizer", mask_token="<|mask|>"
                )
            model = hf_models.build(name, vocab_size=410, **options).to(dtype)
            hf_models.write(model, folder / "hf", tokenizer)
            hf_models.from_hf(folder / "hf", folder / "core")

        folder = shared_folder(f"came in {name} {dtype} {options}", make)
        return folder / "hf", folder / "core"

    return find
