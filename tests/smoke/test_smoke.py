"""From text to a fine-tuned encoder in a minute, by the commands that users type.

`pytest tests/smoke` checks an installation and needs nothing but pytest next to what megaenc itself
needs; the image of the CPU runs it while it is built (docker build --target smoke).
"""

import json
import sys

import pytest
import runs

pytestmark = [pytest.mark.multiprocess, pytest.mark.system]

MEGAENC = [sys.executable, "-m", "megaenc"]
HALF = 10
WHOLE = 20


@pytest.fixture(scope="module")
def run_directory(small_corpus, tmp_path_factory):
    """A run of two processes, stopped half-way and resumed by the same command."""
    directory = tmp_path_factory.mktemp("smoke") / "run"
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        "--save",
        str(directory),
        "--tensor-model-parallel-size",
        "2",
    ]
    for last in (HALF, WHOLE):
        runs.script(runs.PRETRAIN, [*flags, "--exit-interval", str(HALF)], processes=2, fresh=True)
        assert runs.metrics(directory)[-1]["step"] == last
    return directory


@pytest.fixture(scope="module")
def exported(run_directory):
    """The run's last checkpoint as a Hugging Face directory."""
    directory = run_directory.with_name("hf")
    runs.run(
        [*MEGAENC, "convert", "to-hf", "--load", str(run_directory), "--output", str(directory)]
    )
    return directory


def test_a_run_trains_and_goes_on_from_its_checkpoint(run_directory):
    rows = runs.metrics(run_directory)
    assert [row["step"] for row in rows] == list(range(1, WHOLE + 1))
    assert [row["objective"] for row in rows] == ["clm"] * HALF + ["mlm"] * HALF
    for half in (rows[:HALF], rows[HALF:]):  # which begins anew with the other objective
        assert half[-1]["loss"] < half[0]["loss"]


def test_the_export_loads_and_fills_masks(exported):
    from transformers import pipeline

    fill = pipeline("fill-mask", model=str(exported))
    best, second, *_ = fill(f"the {fill.tokenizer.mask_token} of")
    assert 0 < second["score"] <= best["score"] < 1


def test_the_export_is_fine_tuned(exported, tmp_path):
    directory = tmp_path / "colours"
    directory.mkdir()
    for split, count in (("train", 64), ("valid", 16), ("test", 16)):
        rows = [
            {"text": f"number {n} is {('red', 'green')[n % 2]}", "label": ("red", "green")[n % 2]}
            for n in range(count)
        ]
        (directory / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--batch-size",
        "8",
        "--max-length",
        "32",
        "--learning-rate",
        "1e-3",
        "--output",
        str(tmp_path / "results"),
    ]
    said = runs.run(
        [*MEGAENC, "finetune", "run", "--model", str(exported), "--dataset", str(directory), *flags]
    )
    shown = runs.run([*MEGAENC, "finetune", "summary", str(tmp_path / "results")])
    assert "colours" in said.stdout + said.stderr and "colours" in shown.stdout
