"""Resumed runs, which go on as if never stopped, and one run a directory."""

import json
import shutil

import pytest
import runs

from megaenc import backend
from megaenc.model import encoder
from megaenc.training.command import main


def test_what_a_kill_leaves_beyond_the_checkpoint_is_cut(short_run, saved_run, tmp_path):
    """Left are logged steps that were not saved, half a line and half-written files."""
    directory = shutil.copytree(saved_run, tmp_path / "run")
    for name, row in (
        ("metrics", {"loss": 1.0}),
        ("validation", {"objectives": {}}),
        ("stragglers", {"ranks": []}),
    ):
        with open(directory / f"{name}.jsonl", "a") as file:
            file.write(json.dumps({"step": 13} | row) + '\n{"step": 14, "lo')
    (directory / ".run.json.4711-0123abcd.tmp").write_text("{")
    (directory / ".tokenizer.4711-0123abcd.tmp").mkdir()
    main(
        [
            *short_run,
            "--save",
            str(directory),
            "--exit-interval",
            "13",
            "--log-straggler",
            "--straggler-interval",
            "2",
        ]
    )
    assert [row["step"] for row in runs.metrics(directory)] == list(range(1, 14))
    assert "grad_norm" in runs.metrics(directory)[12]
    assert [row["step"] for row in runs.validations(directory)] == [0, 10]
    assert (directory / "stragglers.jsonl").read_text() == ""
    assert list(directory.glob("*.tmp")) == list(directory.glob(".*.tmp")) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            ["--train-iters", "21", "--objective-schedule", "clm:10,mlm:11"],
            "train_iters is 20 there, 21 here",
        ),
        (["--objective-schedule", "clm:0.25,mlm:0.75"], "objective_schedule is clm:10"),
        (["--hidden-size", "32"], "hidden_size is 64 there, 32 here"),
        (["--lr", "1e-3"], "lr is 0.003 there, 0.001 here"),
        (["--optimizer", "muon"], "optimizer is adamw there, muon here"),
    ],
)
def test_another_run_is_refused_by_field(change, named, short_run, saved_run, refusal):
    line = refusal(main, [*short_run, "--save", saved_run, *change])
    assert "holds a different run" in line
    assert named in line


def test_no_weights_are_drawn_that_are_loaded(short_run, saved_run, tmp_path, monkeypatch):
    monkeypatch.setattr(encoder, "init_weights", None)
    flags = [*short_run, "--eval-interval", "0", "--exit-interval"]
    main(
        [
            *flags,
            "5",
            "--save",
            str(tmp_path / "branch"),
            "--branch-from",
            str(saved_run),
            "--branch-at",
            "4",
        ]
    )
    main([*flags, "1", "--save", str(tmp_path / "weights"), "--init-from", str(saved_run)])
    main([*flags, "13", "--save", str(shutil.copytree(saved_run, tmp_path / "run"))])
    with pytest.raises(TypeError):
        main([*flags, "1"])
    backend.destroy_distributed()
