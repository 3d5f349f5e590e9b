"""Runs, corpora and flags that several files share, and a small disk."""

import json
import shutil
import subprocess
import sys

import pytest
import runs
from training_helpers import make_corpus, plan_of


@pytest.fixture(scope="session")
def saved_run(small_corpus, tmp_path_factory):
    """A run stopped after step 12 of 20, with three checkpoints; do not change it.

    It is in float32, with checkpoints of steps 4, 8 and 12.
    """
    directory = tmp_path_factory.mktemp("saved") / "run"
    every = ["--save-interval", "4", "--exit-interval", "12"]
    runs.script(
        runs.PRETRAIN,
        [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(directory), *every],
    )
    return directory


@pytest.fixture(scope="session")
def short_run(small_corpus) -> list[str]:
    """Flags of twenty float32 steps on the small corpus."""
    return [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16"]


@pytest.fixture
def engine_of(one_process):
    """A function that returns the engine of a run with these flags in this process."""
    from megaenc.training.engine import Engine

    return lambda *flags: Engine(plan_of(*flags), one_process)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3.5 MB: room for one checkpoint of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3500k", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def second_corpus(small_corpus, shared_directory) -> str:
    """The prefix of a corpus of 60 other documents with the same tokenizer."""
    directory = shared_directory(
        "second", lambda directory: make_corpus(directory / "b", small_corpus.tokenizer, 60, seed=1)
    )
    return str(directory / "b_text_document")


@pytest.fixture(scope="session")
def blend(small_corpus, second_corpus) -> list[str]:
    """Flags: three packs in ten from the second corpus."""
    data_path = ["--data-path", "0.7", str(small_corpus.prefix), "0.3", second_corpus]
    return [*data_path, "--tokenizer", str(small_corpus.tokenizer), "--split", "90,10,0"]


@pytest.fixture(scope="session")
def three_phases(small_corpus, second_corpus) -> list[str]:
    """Flags of three phases in the shape of mmBERT.

    Blends, mask fractions of 0.3, 0.15 and 0.05, packs of 128 and then 512 tokens, and another
    rotary base, then decay.
    """
    first = str(small_corpus.prefix)
    longer = {
        "seq_length": 512,
        "rotary_base": 40000,
        "micro_batch_size": 1,
        "global_batch_size": 4,
    }
    phases = [
        {
            "objective": "mlm(mask=0.3)",
            "train_iters": 3,
            "data_path": [0.8, first, 0.2, second_corpus],
        },
        {
            "objective": "mlm(mask=0.15)",
            "train_iters": 3,
            "data_path": [0.5, first, 0.5, second_corpus],
            **longer,
        },
        {"objective": "mlm(mask=0.05)", "train_iters": 3, "data_path": second_corpus, **longer},
    ]
    tokenizer = ["--tokenizer", str(small_corpus.tokenizer), "--split", "90,10,0"]
    decay = [
        "--lr-warmup-iters",
        "2",
        "--lr-wsd-decay-iters",
        "3",
        "--lr-wsd-decay-style",
        "minus_sqrt",
    ]
    sizes = [
        "--seq-length",
        "128",
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "8",
        "--eval-interval",
        "3",
    ]
    shape = [
        *runs.SHORT_RUN[:10],
        *sizes,
        "--eval-iters",
        "1",
        "--lr",
        "3e-3",
        "--clip-grad",
        "0.5",
        "--no-bf16",
    ]
    return ["--phases", *map(json.dumps, phases), *tokenizer, *shape, *decay]


@pytest.fixture(scope="session")
def teacher(small_corpus, shared_directory):
    """A random EuroBERT with the tokenizer of the corpus; do not change it."""
    from convert import hf_models

    def make(directory):
        hf_models.write(
            hf_models.build("eurobert", max_position_embeddings=64),
            directory,
            small_corpus.tokenizer,
        )

    return shared_directory("teacher", make)


@pytest.fixture(scope="session")
def distilled(small_corpus, teacher) -> list[str]:
    """Flags of six float32 steps with a teacher.

    The fraction of distillation changes, then it is summed with another objective.
    """
    distill = f"distill(teacher={teacher},mask=0.3,top_k=8"
    schedule = f"{distill},share=0.9->0.5):4,sum(clm:1,{distill},temperature=2):2):2"
    length = [
        "--train-iters",
        "6",
        "--lr",
        "5e-4",
        "--lr-warmup-iters",
        "1",
        "--lr-wsd-decay-iters",
        "1",
    ]
    return [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        *length,
        "--objective-schedule",
        schedule,
        "--no-bf16",
        "--eval-interval",
        "6",
    ]


@pytest.fixture(scope="session")
def plugin(shared_directory):
    """A directory with the example package as pip installs it."""

    def make(directory):
        source = shutil.copytree(runs.ROOT / "examples" / "objective_plugin", directory / "source")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--no-index",
        ]
        runs.run(
            [*pip, "--no-build-isolation", "--target", str(directory / "packages"), str(source)]
        )

    return shared_directory("plugin", make) / "packages"
