"""The study's three ways to make models out of one run, as docs/starting-runs.md has them, with a step for each thousand."""

import pytest
import runs

from megaenc.training.command import main


def test_every_model_of_the_study_out_of_one_run(small_corpus, tmp_path):
    shape = runs.SHORT_RUN[: runs.SHORT_RUN.index("--train-iters")]
    first = ["--train-iters", 42, "--lr-warmup-iters", 2, "--lr-wsd-decay-iters", 2, "--save-interval", 10, "--eval-interval", 0]

    def pretrain(save, *flags, config=None):
        base_flags = ["--config", tmp_path / config / "config.yaml"] if config else [*small_corpus.flags, *shape, *first]
        main([str(flag) for flag in (*base_flags, *flags, "--save", tmp_path / save)])
        return runs.metrics(tmp_path / save)

    def branch_of(run, at):
        return ["--branch-from", tmp_path / run, "--branch-at", at]

    clm = pretrain("clm-42", "--objective-schedule", "clm", "--no-bf16")
    for at, end in ((10, 12), (20, 22)):
        rows = pretrain(f"clm-{end}", *branch_of("clm-42", at), "--train-iters", end, config="clm-42")
        assert [row["step"] for row in rows] == [at + 1, at + 2]
        assert rows[0]["loss"] == clm[at]["loss"], "the first step of a decay has the peak"
    two = ["--objective-schedule", "clm:10,mlm(mask=0.4):32"]
    rows = pretrain("clm-10-mlm-42", *branch_of("clm-42", 10), *two, config="clm-42")
    assert [row["step"] for row in rows] == list(range(11, 43)) and rows[-1]["tokens"] == clm[-1]["tokens"]
    short = ["--train-iters", 12, "--objective-schedule", "clm:10,mlm(mask=0.4):2"]
    assert pretrain("clm-10-mlm-12", *branch_of("clm-42", 10), *short, config="clm-42")[-1]["step"] == 12

    after = ["--init-from", tmp_path / "clm-42", "--skip-samples", "parent", "--objective-schedule", "mlm(mask=0.4)"]
    rows = pretrain("mlm-64", *after, "--train-iters", 22, "--lr-warmup-iters", 0, config="clm-42")
    assert [row["step"] for row in rows] == list(range(1, 23))
    peak = rows[0]["learning_rate"]
    assert [row["learning_rate"] / peak for row in rows] == pytest.approx([1] * 21 + [0.5])
    assert pretrain("mlm-54", *branch_of("mlm-64", 10), "--train-iters", 12, config="mlm-64")[0]["loss"] == rows[10]["loss"]
    short = pretrain("mlm-44", "--train-iters", 2, config="mlm-64")
    assert [row["loss"] for row in short] == [row["loss"] for row in rows[:2]]
