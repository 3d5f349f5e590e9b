"""Validation: the same questions in every run, so that the curves of any two can be laid over each other."""

import pytest
import runs

from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.objectives import Schedule
from megaenc.training.config import parse_config
from megaenc.training.plan import validation_objectives
from megaenc.training.planning import build_plan

VOCABULARY = Vocabulary(size=64, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


@pytest.mark.parametrize(
    ("schedule", "texts"),
    [
        ("clm", ["clm", "mlm"]),
        ("mlm", ["clm", "mlm"]),
        ("clm:0.5,mlm(mask=0.2):0.5", ["clm", "mlm", "mlm(mask=0.2)"]),
        ("mlm(mask=0.4->0.15)", ["clm", "mlm", "mlm(mask=0.15)"]),
        ("mix(mntp:1,clm:1):1.0", ["clm", "mlm", "mntp"]),
    ],
)
def test_clm_and_mlm_are_always_among_the_questions(schedule, texts):
    assert list(validation_objectives(Schedule.build(schedule, 100, VOCABULARY), VOCABULARY)) == texts


def test_without_a_mask_token_there_is_no_mlm():
    maskless = Vocabulary(size=64, eos_id=0, mask_id=None, special_ids=(0,), fingerprint="f" * 64)
    assert list(validation_objectives(Schedule.build("clm", 100, maskless), maskless)) == ["clm"]


@pytest.mark.parametrize(
    ("change", "rows"), [([], 10), (["--objective-schedule", "600x(clm:1,mlm:1)"], 1), (["--log-interval", "7"], 7)]
)
def test_rows_of_metrics_show_every_phase(change, rows, small_corpus):
    plan = build_plan(parse_config([*small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "1200", *change], "test"))
    assert plan.log_interval == rows


@pytest.mark.multiprocess
def test_runs_that_share_nothing_but_the_data_are_asked_the_same(small_corpus, tmp_path):
    """Objective, packing, length and layout differ; before the first step the model, and so its answers, are the same."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1"]
    one = ["--objective-schedule", "mlm(mask=0.2)", "--train-iters", "2"]
    other = ["--objective-schedule", "clm", "--train-iters", "3", "--packing", "random-length", "--micro-batch-size", "4"]
    runs.script(runs.PRETRAIN, [*flags, *one, "--save", str(tmp_path / "one")])
    runs.script(
        runs.PRETRAIN, [*flags, *other, "--tensor-model-parallel-size", "2", "--save", str(tmp_path / "other")], processes=2
    )
    before = [runs.validations(tmp_path / name)[0] for name in ("one", "other")]
    after = [runs.validations(tmp_path / name)[-1] for name in ("one", "other")]
    for objective in ("clm", "mlm"):
        actual, expected = (row["objectives"][objective] for row in before)
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["most_frequent"] == expected["most_frequent"]
        assert after[0]["objectives"][objective]["loss"] != after[1]["objectives"][objective]["loss"]
    assert len({row["held_out"] for row in (*before, *after)}) == 1  # the same text, and it says so
    for row in (*before, *after):
        assert row.keys() >= {"step", "tokens", "predicted_tokens", "flops"}  # what curves can be laid over each other by
