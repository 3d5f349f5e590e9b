"""Batches that grow: sizes and positions from the number of the step alone, in plans, runs and resumed runs."""

import itertools

import pytest
import runs

from megaenc.backend import prepare_megatron
from megaenc.training.command import main
from megaenc.training.phases import build_batch_sizes

# 2 packs, then 4, 6 and 8, over the first 30: steps 1..5 of 2, 6..8 of 4, 9 and 10 of 6, then 8.
SIZES = [2] * 5 + [4] * 3 + [6] * 2 + [8] * 2
RUN = [
    *runs.SHORT_RUN, "--train-iters", "12", "--micro-batch-size", "1", "--rampup-batch-size", "2", "2", "30", "--no-bf16",
    "--eval-interval", "12",
]  # fmt: skip


@pytest.mark.parametrize("rampup", [(2, 2, 30), (16, 16, 1000), (8, 120, 1), (32, 32, 999)])
def test_sizes_are_those_of_megatron_core(rampup):
    prepare_megatron()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    full = 8 if rampup[0] == 2 else 128
    sizes = build_batch_sizes(full, rampup)
    rule, read = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, *rampup), 0
    for step in range(1, 60):
        rule.update(read, consistency_check=False)
        assert sizes.first_sample(step) == read and sizes.size(step) == rule.get_current_global_batch_size()
        read += sizes.size(step)


@pytest.mark.parametrize("rampup", [None, (2, 2, 30)])
def test_steps_that_read_so_many_samples(rampup):
    sizes = build_batch_sizes(8, rampup)
    for samples in range(1, 100):
        steps = sizes.steps_for(samples)
        assert sizes.first_sample(steps) < samples <= sizes.first_sample(steps + 1)


@pytest.fixture(scope="module")
def reference(small_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    main([*small_corpus.flags, *RUN, "--save", str(folder)])
    return folder


def test_rows_count_what_was_read(reference):
    rows = runs.metrics(reference)
    assert [row["tokens"] for row in rows] == [64 * read for read in itertools.accumulate(SIZES)]


@pytest.mark.multiprocess
def test_a_stop_and_another_layout_change_nothing(small_corpus, reference, tmp_path):
    command = [*small_corpus.flags, *RUN, "--save", str(tmp_path / "run")]
    main([*command, "--exit-interval", "7"])
    runs.script(runs.PRETRAIN, command, processes=2)
    assert len(runs.metrics(tmp_path / "run")) == 12
    runs.assert_same_curve(tmp_path / "run", reference, tolerance=1e-4)
    actual, expected = ([row["loss"] for row in runs.metrics(folder)[:7]] for folder in (tmp_path / "run", reference))
    assert actual == expected


def test_dry_run_counts_the_tokens_of_each_phase(small_corpus, capsys):
    main([*small_corpus.flags, *RUN, "--objective-schedule", "clm:7,mlm:5", "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    tokens = [64 * sum(SIZES[:7]), 64 * sum(SIZES)]
    assert ["clm", "1", "to", "7", f"{tokens[0]:,}", f"{tokens[0]:,}"] in lines
    assert ["mlm", "8", "to", "12", f"{tokens[1] - tokens[0]:,}", f"{tokens[1]:,}"] in lines
    assert any(line[:6] == ["12", "steps", "of", "2", "to", "8"] for line in lines)


def test_so_many_tokens_with_growing_batches(small_corpus, capsys):
    sizes = ["--seq-length", "64", "--micro-batch-size", "1", "--global-batch-size", "8", "--rampup-batch-size", "2", "2", "30"]
    main([*small_corpus.flags, *sizes, "--train-tokens", "1300", "--dry-run"])
    assert "8 steps of 2 to 8 packs of 64 tokens (concat): 1,408 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (["2", "2"], "--rampup-batch-size 2 2: expected three numbers of 1 or more"),
        (["0", "2", "30"], "expected three numbers of 1 or more"),
        (["2", "4", "30"], "steps of 4 do not lead from 2 to --global-batch-size 8"),
        (["8", "2", "30"], "steps of 2 do not lead from 8 to --global-batch-size 8"),
    ],
)
def test_what_cannot_grow_is_refused(values, complaint, small_corpus, refusal):
    assert complaint in refusal(main, [*small_corpus.flags, *RUN, "--rampup-batch-size", *values])
