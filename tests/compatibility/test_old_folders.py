"""Folders that version 0.1.0 wrote before its modules were renamed: a study with two runs, exports and results.

Only the files of tensors in the checkpoints have been written again, in the format of 2026-11-26, with the same contents.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file

from megaenc import cli
from megaenc.convert.command import main as convert

RUN = "toy-clm-6"
BRANCH = "toy-clm-3-mlm40-6"


@pytest.fixture
def old(tmp_path):
    """The folder of the manifest, its text and the study."""
    with tarfile.open(Path(__file__).parent / "study.tar.xz") as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # 3.11.4 or later
    return tmp_path


@pytest.fixture
def megaenc(old, monkeypatch, capfd):
    """Call a command in the folder of the manifest; returns what it prints."""
    monkeypatch.chdir(old)

    def call(*words: object) -> str:
        cli.main([str(word) for word in words])
        return capfd.readouterr().out

    return call


STUDY = ["study", "run", "study.yaml", "--output", "study"]


def test_a_finished_study_is_done(megaenc):
    assert "7 stages, 7 done, 0 to do" in megaenc(*STUDY)


@pytest.mark.slow
def test_a_lost_result_is_made_again(old, megaenc):
    [result] = (old / "study/results" / RUN).rglob("lr1e-03_sd1/results.json")
    before = json.loads(result.read_text())
    result.unlink()
    assert "7 of 7 stages are done" in megaenc(*STUDY)
    assert json.loads(result.read_text())["test"]["score"] == pytest.approx(before["test"]["score"])


def test_a_run_is_resumed(old):
    """From step 3, as if it had been killed there."""
    run = old / "study/runs" / RUN
    before = runs.metrics(run)
    checkpoints = run / "checkpoints"
    shutil.rmtree(checkpoints / "iter_0000006")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3\n")
    corpus = old / "study/corpus"
    flags = ["--data-path", f"{corpus}/corpus_text_document", "--tokenizer", f"{corpus}/tokenizer", "--save", str(run)]
    output = runs.script(runs.PRETRAIN, ["--config", str(run / "config.yaml"), *flags]).stdout
    assert "step 3" in output
    after = runs.metrics(run)
    assert [row["step"] for row in after] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in after] == pytest.approx([row["loss"] for row in before], rel=1e-5)


@pytest.mark.parametrize("name", [RUN, BRANCH])
def test_a_checkpoint_is_exported_as_it_was(old, name):
    convert(["to-hf", "--load", str(old / "study/runs" / name), "--output", str(old / "again")])
    then, now = (load_file(folder / "model.safetensors") for folder in (old / "study/hf" / name, old / "again"))
    assert then.keys() == now.keys() and all(torch.equal(then[key], now[key]) for key in then)


def test_runs_and_results_are_summarised_and_reported(old, megaenc):
    assert "step 6" in megaenc("summary", f"study/runs/{BRANCH}")
    assert "toy_sc" in megaenc("finetune", "summary", "study/results")
    megaenc("study", "report", "study.yaml", "--results", "study/results", "--runs", "study/runs", "--output", "report")
    assert RUN in (old / "report/index.html").read_text()
