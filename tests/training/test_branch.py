"""Branches off a kept checkpoint, compared with runs from the beginning."""

import json
import shutil

import pytest
import runs
import yaml

from megaenc.training.command import main

# 40 steps of CLM: warm-up to 4, constant, decay from 31 on. Checkpoints at 5, 10, ..., 40.
PARENT = [
    *runs.SHORT_RUN,
    "--no-bf16",
    "--train-iters",
    "40",
    "--objective-schedule",
    "clm",
    "--lr-wsd-decay-iters",
    "10",
]
TWO_STAGES = [
    *runs.SHORT_RUN,
    "--no-bf16",
    "--train-iters",
    "20",
    "--objective-schedule",
    "clm:15,mlm:5",
]
TWO_STAGES += ["--lr-wsd-decay-style", "minus_sqrt", "--min-lr", "1e-3"]  # other than the parent's


@pytest.fixture(scope="module")
def parent(small_corpus, tmp_path_factory):
    """The parent run of 40 steps."""
    directory = tmp_path_factory.mktemp("parent") / "run"
    main([*small_corpus.flags, *PARENT, "--save", str(directory), "--save-interval", "5"])
    return directory


@pytest.fixture(scope="module")
def two_stages(small_corpus, tmp_path_factory):
    """A run of 15 steps of CLM and 5 of MLM from new weights."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    main([*small_corpus.flags, *TWO_STAGES, "--save", str(directory)])
    return directory


def branch_flags(small_corpus, parent, flags, directory, *more, at=15):
    """Return the flags of a branch for the pretraining command."""
    start = ["--branch-from", str(parent), "--branch-at", str(at), "--save", str(directory)]
    return [*small_corpus.flags, *flags, *start, *map(str, more)]


def test_a_branch_is_bitwise_the_run_from_the_beginning(
    small_corpus, parent, two_stages, tmp_path, capsys
):
    main(branch_flags(small_corpus, parent, TWO_STAGES, tmp_path / "run"))
    assert f"as a branch of {parent} at step 15" in capsys.readouterr().out
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == [16, 17, 18, 19, 20]
    assert runs.curve(tmp_path / "run") == runs.curve(two_stages, after=15)
    runs.assert_same_weights(tmp_path / "run", two_stages, 20)
    assert [row["step"] for row in runs.validations(tmp_path / "run")] == [15, 20]
    first, last = runs.validations(tmp_path / "run")
    assert last == runs.validations(two_stages)[-1]
    counted = ("tokens", "predicted_tokens", "flops")
    assert [first[name] for name in counted] == [runs.metrics(parent)[14][name] for name in counted]


def test_a_branch_goes_on_without_its_parent_and_can_be_branched(
    small_corpus, parent, two_stages, tmp_path, capfd, refusal
):
    away = shutil.copytree(parent, tmp_path / "away")
    main(branch_flags(small_corpus, away, TWO_STAGES, tmp_path / "run", "--exit-interval", 17))
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["start"]["run"], facts["start"]["at"]) == (str(away), 15)
    assert facts["identity"]["start"] == f"branch at step 15 of run {facts['start']['parent']}"
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["branch_at"] == 15
    line = refusal(main, [*small_corpus.flags, *TWO_STAGES, "--save", tmp_path / "run"])
    assert "start is branch at step 15 of run" in line and "not given here" in line
    line = refusal(main, branch_flags(small_corpus, away, TWO_STAGES, tmp_path / "run", at=10))
    assert "start is branch at step 15 of run" in line and "branch at step 10 of run" in line

    shutil.rmtree(away)
    main(["--config", str(tmp_path / "run" / "config.yaml")])
    assert "resuming after step 17" in capfd.readouterr().out
    assert runs.curve(tmp_path / "run") == runs.curve(two_stages, after=15)
    main(branch_flags(small_corpus, tmp_path / "run", TWO_STAGES, tmp_path / "second", at=17))
    assert runs.curve(tmp_path / "second") == runs.curve(two_stages, after=17)


def test_the_parents_config_is_enough_to_branch(small_corpus, parent, tmp_path, capsys):
    flags = ["--config", parent / "config.yaml", "--branch-from", parent, "--branch-at", 20]
    flags += [
        "--train-iters",
        25,
        "--lr-wsd-decay-iters",
        5,
        "--save",
        tmp_path / "run",
        "--dry-run",
    ]
    main([str(flag) for flag in flags])
    output = capsys.readouterr().out
    assert f"makes steps 21 to 25, as a branch of {parent} at step 20\n" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ["--branch-at", "12"],
            "has no checkpoint of this step, "
            "expected one of the steps 5, 10, 15, 20, 25, 30, 35, 40",
        ),
        (
            ["--branch-at", "20"],
            "--branch-at 20: the new run ends at step 20, expected --train-iters beyond 20",
        ),
        (["--objective-schedule", "clm:10,mlm:10"], "step 11 trains mlm here and clm in"),
        (
            ["--objective-schedule", "mix(clm:1,mlm:1)"],
            "expected an --objective-schedule equal to it up to step 15",
        ),
        (
            ["--lr-warmup-iters", "0"],
            "expected its own up to step 15: "
            "--lr 0.003 --lr-warmup-iters 4 and a decay of at most 6",
        ),
        (["--lr-wsd-decay-iters", "7"], "the learning rate of step 15 is 0.003 in"),
        (["--global-batch-size", "16"], "global_batch_size is 8 there, 16 here"),
        (["--skip-samples", "8"], "began at sample 0, expected the same for a branch"),
    ],
)
def test_what_does_not_agree_is_named_in_one_line(
    change, words, small_corpus, parent, tmp_path, refusal
):
    line = refusal(main, branch_flags(small_corpus, parent, TWO_STAGES, tmp_path / "run", *change))
    assert words in line, line
    assert not (tmp_path / "run").exists()


def test_a_decayed_checkpoint_is_refused_with_those_that_serve(
    small_corpus, parent, tmp_path, refusal
):
    line = refusal(
        main,
        branch_flags(small_corpus, parent, PARENT, tmp_path / "run", "--train-iters", "60", at=40),
    )
    assert (
        "falls after step 31), and a branch continues at the peak; "
        "expected one of the steps 5, 10, 15, 20, 25, 30, or" in line
    )


def test_what_cannot_be_branched_is_one_line(small_corpus, parent, tmp_path, refusal):
    line = refusal(main, branch_flags(small_corpus, tmp_path, TWO_STAGES, tmp_path / "run"))
    assert "not a run directory (run.json: No such file" in line
    assert "is also --save" in refusal(main, branch_flags(small_corpus, parent, TWO_STAGES, parent))
