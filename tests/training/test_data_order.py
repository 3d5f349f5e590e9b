"""The order of data: a function of data, seed and packing, not of the layout."""

import numpy as np
import pytest
from training_helpers import plan_of

from megaenc.training.command import main
from megaenc.training.config import parse_config


@pytest.mark.parametrize(
    "flags", [[], ["--packing", "random-length"], ["--blend-max-epochs", "2"]], ids=str
)
def test_order_knows_nothing_of_length_and_batch(flags, blend):
    common = [*blend, "--model", "tiny", "--seq-length", "64", "--seed", "3", *flags]
    short = plan_of(
        *common, "--train-iters", "10", "--global-batch-size", "8", "--micro-batch-size", "2"
    )
    long = plan_of(
        *common, "--train-iters", "15", "--global-batch-size", "48", "--objective-schedule", "mlm"
    )
    for sample in range(0, 600, 7):
        pack = short.packs[sample]
        other_pack = long.packs[sample]
        assert np.array_equal(pack.tokens, other_pack.tokens)
        assert np.array_equal(pack.cu_seqlens, other_pack.cu_seqlens)
        assert (pack.sample, pack.epoch) == (other_pack.sample, other_pack.epoch)
    assert [short.first_sample(step) for step in (1, 2, 7)] == [0, 8, 48]
    assert long.first_sample(2) == 48


def test_a_budget_of_tokens_is_as_many_steps_as_it_takes():
    sizes = ["--global-batch-size", "4", "--seq-length", "100", "--micro-batch-size", "4"]
    for tokens, steps in ((1, 1), (400, 1), (401, 2), (40_000, 100)):
        assert parse_config([*sizes, "--train-tokens", str(tokens)], "test").total_iters == steps
    assert parse_config(sizes, "test").total_iters == 200


@pytest.fixture
def large(monkeypatch):
    """Every corpus of more than eight documents counts as a large one."""
    for module in ("builder", "block_stream"):
        monkeypatch.setattr(f"megaenc.data.packing.{module}.MOST_SHUFFLED", 8)
    monkeypatch.setattr("megaenc.data.packing.block_stream._MOST_BLOCKS", 50)


@pytest.mark.parametrize(("order", "other"), [("blocks", "documents"), ("documents", "blocks")])
def test_the_order_of_documents_is_a_part_of_the_identity(
    order, other, short_run, tmp_path, large, refusal
):
    run = ["--save", str(tmp_path / "run")]
    main([*short_run, *run, "--data-order", order, "--exit-interval", "1"])
    branch = ["--branch-from", str(tmp_path / "run"), "--branch-at", "1"]
    weights = ["--init-from", str(tmp_path / "run"), "--skip-samples", "parent"]
    for start in (run, branch, weights):
        assert plan_of(*short_run, *start, "--data-order", order).data.has_blocks == (
            order == "blocks"
        )
        assert f"data_order is {order} there, {other} here" in refusal(
            main, [*short_run, *start, "--data-order", other]
        )
    assert plan_of(*short_run, *weights[:2], "--data-order", other).data.has_blocks == (
        order == "documents"
    )


def test_both_orders_of_a_small_corpus_are_one_run(small_corpus):
    blocks = plan_of(*small_corpus.flags)
    documents = plan_of(*small_corpus.flags, "--data-order", "documents")
    assert blocks.settings.data.data_order == "blocks"
    assert blocks.identity == documents.identity
