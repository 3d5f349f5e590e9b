"""A run that was stopped goes on as if it had not been, and a run folder holds one run."""

import dataclasses
import json
import shutil

import pytest
import runs
from training_helpers import plan_of

from megaenc.model import encoder
from megaenc.model.config import ModelConfig
from megaenc.training.command import main

STRAGGLERS = ["--log-straggler", "--straggler-interval", "2"]


def run_flags(small_corpus, folder, *more):
    return [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), *more]


@pytest.fixture(scope="module")
def whole_run(small_corpus, tmp_path_factory):
    """Twenty float32 steps without a stop; the objective changes after step 10."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.script(runs.PRETRAIN, run_flags(small_corpus, folder))
    return folder


@pytest.fixture(scope="module")
def stopped_run(small_corpus, tmp_path_factory):
    """The same run at TP2, stopped after step 7."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    flags = run_flags(small_corpus, folder, "--exit-interval", "7", "--tensor-model-parallel-size", "2", *STRAGGLERS)
    runs.script(runs.PRETRAIN, flags, processes=2)
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, 8))
    return folder


def test_resume_is_bitwise_equal_across_the_phase_switch(small_corpus, whole_run, tmp_path):
    folder = tmp_path / "run"
    for stop in (7, 14, 20):
        runs.script(runs.PRETRAIN, run_flags(small_corpus, folder, "--exit-interval", "7"))
        assert runs.metrics(folder)[-1]["step"] == stop
    assert runs.curve(folder) == runs.curve(whole_run)
    assert runs.validations(folder) == runs.validations(whole_run)


@pytest.mark.multiprocess
def test_resume_in_bf16_at_tp2_is_bitwise_equal(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--bf16", "--tensor-model-parallel-size", "2", "--train-iters", "10"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "whole")], processes=2)
    for _ in range(2):
        runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run"), "--exit-interval", "6"], processes=2)
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")


@pytest.mark.multiprocess
def test_saved_at_tp2_continues_at_pp2(small_corpus, whole_run, stopped_run, tmp_path):
    folder = shutil.copytree(stopped_run, tmp_path / "run")
    runs.script(runs.PRETRAIN, run_flags(small_corpus, folder, "--pipeline-model-parallel-size", "2"), processes=2)
    runs.assert_same_curve(folder, whole_run, tolerance=1e-4)


@pytest.mark.multiprocess
def test_what_a_kill_leaves_beyond_the_checkpoint_is_cut(small_corpus, stopped_run, tmp_path):
    """Steps that were logged and not saved, half a line, and files half-written beside."""
    folder = shutil.copytree(stopped_run, tmp_path / "run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "loss": 1.0}) + '\n{"step": 9, "lo')
    with open(folder / "validation.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "objectives": {}}) + "\n")
    with open(folder / "stragglers.jsonl", "a") as file:
        file.write(json.dumps({"step": 8, "ranks": []}) + "\n")
    (folder / ".run.json.4711-0123abcd.tmp").write_text("{")
    (folder / ".tokenizer.4711-0123abcd.tmp").mkdir()
    main(run_flags(small_corpus, folder, "--exit-interval", "4", *STRAGGLERS))
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, 9))
    assert "grad_norm" in runs.metrics(folder)[7]
    assert [row["step"] for row in runs.validations(folder)] == [0]
    assert '"step": 8' not in (folder / "stragglers.jsonl").read_text()
    assert list(folder.glob("*.tmp")) == list(folder.glob(".*.tmp")) == []


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--train-iters", "21", "--objective-schedule", "clm:10,mlm:11"], "train_iters is 20 there, 21 here"),
        (["--objective-schedule", "clm:0.25,mlm:0.75"], "objective_schedule is clm:10"),
        (["--hidden-size", "32"], "hidden_size is 64 there, 32 here"),
        (["--lr", "1e-3"], "lr is 0.003 there, 0.001 here"),
        (["--optimizer", "muon"], "optimizer is adamw there, muon here"),
    ],
)
def test_another_run_is_refused_by_field(change, named, small_corpus, stopped_run, refusal):
    line = refusal(main, run_flags(small_corpus, stopped_run, *change))
    assert "holds a different run" in line
    assert named in line


def test_no_weights_are_drawn_that_are_loaded(small_corpus, tmp_path, monkeypatch):
    draw = encoder.init_weights
    drawn = []

    def count_and_draw(*arguments):
        drawn.append(arguments)
        return draw(*arguments)

    monkeypatch.setattr(encoder, "init_weights", count_and_draw)
    first = tmp_path / "first"
    flags = ["--eval-interval", "0", "--exit-interval"]
    main(run_flags(small_corpus, first, *flags, "4"))
    assert drawn
    drawn.clear()
    branch = ["--branch-from", str(first), "--branch-at", "4"]
    main(run_flags(small_corpus, tmp_path / "branch", *flags, "5", *branch))
    main(run_flags(small_corpus, tmp_path / "weights", *flags, "1", "--init-from", str(first)))
    main(run_flags(small_corpus, first, *flags, "5"))
    assert not drawn


# Of a run's identity, besides the shape of its model.
IDENTITY = """
adam_beta1 adam_beta2 adam_eps bf16 clip_grad data data_order eval_iters fp8_format global_batch_size lr lr_warmup_iters
lr_wsd_decay_iters lr_wsd_decay_style min_lr muon_momentum muon_num_ns_steps no_weight_decay_norm_bias objective_packages
objective_schedule optimizer packing rampup_batch_size seed seq_length special_tokens split tokenizer train_iters weight_decay
"""


def test_a_run_is_told_from_others_by_what_its_weights_depend_on(small_corpus):
    shape = {field.name for field in dataclasses.fields(ModelConfig)}
    assert plan_of(*small_corpus.flags).identity.keys() == {*IDENTITY.split(), *shape}
