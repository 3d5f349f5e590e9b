"""A run that was stopped goes on as if it had not been, and a run folder holds one run."""

import json
import shutil

import pytest
import runs

from megaenc.training.command import main


@pytest.fixture(scope="module")
def whole_run(small_corpus, tmp_path_factory):
    """Twenty float32 steps without a stop; the objective changes after step 10."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder)])
    return folder


@pytest.fixture(scope="module")
def stopped_run(small_corpus, tmp_path_factory):
    """The same run at TP2, stopped after step 7."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), "--exit-interval", "7"]
    runs.script(runs.PRETRAIN, [*flags, "--tensor-model-parallel-size", "2"], processes=2)
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, 8))
    return folder


def test_resume_is_bitwise_equal_across_the_phase_switch(small_corpus, whole_run, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run"), "--exit-interval", "7"]
    for stop in (7, 14, 20):
        runs.script(runs.PRETRAIN, flags)
        assert runs.metrics(tmp_path / "run")[-1]["step"] == stop
    assert runs.curve(tmp_path / "run") == runs.curve(whole_run)
    assert runs.validations(tmp_path / "run") == runs.validations(whole_run)


@pytest.mark.multiprocess
def test_resume_in_bf16_at_tp2_is_bitwise_equal(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--bf16", "--tensor-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "whole")], processes=2)
    for _ in range(2):
        runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run"), "--exit-interval", "12"], processes=2)
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")


@pytest.mark.multiprocess
def test_saved_at_tp2_continues_at_pp2(small_corpus, whole_run, stopped_run, tmp_path):
    folder = shutil.copytree(stopped_run, tmp_path / "run")
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, flags, processes=2)
    assert len(runs.metrics(folder)) == 20
    runs.assert_same_curve(folder, whole_run, tolerance=1e-4)


@pytest.mark.multiprocess
def test_rows_beyond_the_checkpoint_are_cut(small_corpus, stopped_run, tmp_path):
    """As a kill leaves them: steps that were logged and not saved, half a line, and files half-written beside."""
    folder = shutil.copytree(stopped_run, tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "loss": 1.0}) + '\n{"step": 9, "lo')
    with open(folder / "validation.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "objectives": {}}) + "\n")
    half_written = [folder / f".{name}.4711-0123abcd.tmp" for name in ("run.json", "metrics.jsonl", "tokenizer")]
    half_written[0].write_text("{")
    half_written[1].write_text('{"step": 1, "lo')
    half_written[2].mkdir()
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), "--exit-interval", "4"]
    runs.script(runs.PRETRAIN, flags)
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, 9))
    assert "grad_norm" in runs.metrics(folder)[7]
    assert [row["step"] for row in runs.validations(folder)] == [0]
    assert not any(path.exists() for path in half_written)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--seed", "2"], "seed is 1 there, 2 here"),
        (["--train-iters", "21", "--objective-schedule", "clm:10,mlm:11"], "train_iters is 20 there, 21 here"),
        (["--objective-schedule", "clm:0.25,mlm:0.75"], "objective_schedule is clm:10"),
        (["--global-batch-size", "16"], "global_batch_size is 8 there, 16 here"),
        (["--hidden-size", "32"], "hidden_size is 64 there, 32 here"),
        (["--lr", "1e-3"], "lr is 0.003 there, 0.001 here"),
        (["--lr-wsd-decay-style", "cosine"], "lr_wsd_decay_style is not given there, cosine here"),
        (["--optimizer", "muon"], "optimizer is not given there, muon here"),
        (["--min-lr", "1e-4"], "min_lr is not given there, 0.0001 here"),
        (["--eval-iters", "2"], "eval_iters is 1 there, 2 here"),
    ],
)
def test_another_run_is_refused_by_field(change, named, small_corpus, stopped_run, refusal):
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", stopped_run, *change])
    assert "holds a different run" in line
    assert named in line


def test_folder_of_something_else_is_refused_and_left_alone(small_corpus, tmp_path, refusal):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--save", tmp_path])
    assert "not a run directory: holds config.yaml but no run.json" in line
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"


@pytest.mark.multiprocess
def test_folder_in_use_is_refused(small_corpus, stopped_run, tmp_path, refusal):
    import fcntl

    folder = shutil.copytree(stopped_run, tmp_path / "run")
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refusal(main, [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", folder])
    assert "another process is training in this directory" in line


@pytest.mark.parametrize("start", ["resume", "branch", "weights"])
def test_no_weights_are_drawn_that_are_loaded(start, small_corpus, tmp_path, monkeypatch):
    from megaenc.model import encoder

    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--eval-interval", "0"]
    first = ["--save", str(tmp_path / "first"), "--exit-interval", "4"]
    main([*flags, *first])
    more = {
        "resume": ["--save", str(tmp_path / "first")],
        "branch": ["--save", str(tmp_path / "other"), "--branch-from", str(tmp_path / "first"), "--branch-at", "4"],
        "weights": ["--save", str(tmp_path / "other"), "--init-from", str(tmp_path / "first")],
    }
    drawn, draw = [], encoder.init_weights

    def count_and_draw(*arguments):
        drawn.append(arguments)
        return draw(*arguments)

    monkeypatch.setattr(encoder, "init_weights", count_and_draw)
    main([*flags, *more[start]])
    assert not drawn
    main([*flags, "--save", str(tmp_path / "new"), "--exit-interval", "1"])
    assert drawn
