"""Converted models of every family, built once for all tests of conversions."""

from collections.abc import Callable
from pathlib import Path

import hf_models
import hf_tokenizers
import pytest
import runs
import torch
from small_data import read_json


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


@pytest.fixture(scope="session")
def two_runs(small_corpus, shared_directory) -> Path:
    """Run twenty steps that keep checkpoints 10 and 20, and one step of tiny updates.

    The second run's weights do not change. Neither run, `run` nor `still`, is to be changed.
    """

    def make(directory: Path) -> None:
        flags = [*small_corpus.flags, *runs.SHORT_RUN, "--bf16"]
        keep = ["--save-interval", "5", "--keep-every", "10"]
        still = [
            "--train-iters",
            "1",
            "--lr",
            "1e-30",
            "--objective-schedule",
            "mlm",
            "--lr-warmup-iters",
            "0",
        ]
        still += ["--lr-wsd-decay-iters", "1", "--no-untie-embeddings-and-output-weights"]
        jobs = [
            runs.Job(directory / "run", [*flags, *keep, "--tensor-model-parallel-size", "2"], 2),
            runs.Job(directory / "still", [*flags, *still]),
        ]
        runs.in_turn(jobs, directory)

    return shared_directory("two runs", make)


@pytest.fixture(scope="session")
def exports(two_runs, shared_directory) -> dict[int, Path]:
    """Return all exports of the run of twenty steps, by step; not to be changed."""
    directory = shared_directory(
        "exports",
        lambda directory: hf_models.to_hf(two_runs / "run", directory / "hf", "--all"),
    )
    certificates = (directory / "hf").glob("*/conversion.json")
    return {read_json(file)["step"]: file.parent for file in certificates}
