"""What is read, and in which order: decided by data, seed and packing; not by length of the run, batch size or layout."""

import json

import numpy as np
import pytest
from training_helpers import plan_of

from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.parent_run import resolve_data_order


@pytest.mark.parametrize("flags", [[], ["--packing", "random-length"], ["--blend-max-epochs", "2"]], ids=str)
def test_order_knows_nothing_of_length_and_batch(flags, blend):
    common = [*blend, "--model", "tiny", "--seq-length", "64", "--seed", "3", *flags]
    short = plan_of(*common, "--train-iters", "10", "--global-batch-size", "8", "--micro-batch-size", "2")
    long = plan_of(*common, "--train-iters", "15", "--global-batch-size", "48", "--objective-schedule", "mlm")
    for sample in range(0, 600, 7):
        pack, other_pack = short.packs[sample], long.packs[sample]
        assert np.array_equal(pack.tokens, other_pack.tokens) and np.array_equal(pack.edges, other_pack.edges)
        assert (pack.sample, pack.epoch) == (other_pack.sample, other_pack.epoch)
    assert [short.first_sample(step) for step in (1, 2, 7)] == [0, 8, 48] and long.first_sample(2) == 48


def test_a_budget_of_tokens_is_as_many_steps_as_it_takes():
    sizes = ["--global-batch-size", "4", "--seq-length", "100", "--micro-batch-size", "4"]
    for tokens, steps in ((1, 1), (400, 1), (401, 2), (40_000, 100)):
        assert parse_config([*sizes, "--train-tokens", str(tokens)], "test").total_iters == steps
    assert parse_config(sizes, "test").total_iters == 200


def test_tokens_on_the_command_line_overrule_steps_in_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("train_iters: 9\nseq_length: 64\n")
    settings = parse_config(["--config", str(tmp_path / "run.yaml"), "--train-tokens", "2048"], "test")
    assert (settings.train_iters, settings.total_iters) == (None, 2)
    assert parse_config(["--config", str(tmp_path / "run.yaml"), "--train_tokens=2048"], "test") == settings


@pytest.fixture
def large(monkeypatch):
    """Every corpus of more than eight documents is a large one."""
    for module in ("builder", "block_stream"):
        monkeypatch.setattr(f"megaenc.data.packing.{module}.MOST_SHUFFLED", 8)
    monkeypatch.setattr("megaenc.data.packing.block_stream._MOST_BLOCKS", 50)


def forget_order(folder):
    """Make `folder` a run of a version that recorded no order."""
    metadata = json.loads((folder / "run.json").read_text())
    assert metadata.pop("data_order") == "documents" and "data_order" not in metadata["identity"]
    (folder / "run.json").write_text(json.dumps(metadata))
    config = (folder / "config.yaml").read_text()
    assert "data_order: documents\n" in config
    (folder / "config.yaml").write_text(config.replace("data_order: documents\n", ""))


@pytest.mark.parametrize(("order", "other"), [("blocks", "documents"), ("documents", "blocks")])
def test_a_run_keeps_its_order_of_documents(order, other, short_run, tmp_path, large, refusal):
    """Resumed and branched without the flag; a run without a record shuffles documents, as it always did."""
    run = ["--save", str(tmp_path / "run")]
    main([*short_run, *run, "--data-order", order, "--exit-interval", "1"])
    if order == "documents":
        forget_order(tmp_path / "run")
    branch = ["--branch-from", str(tmp_path / "run"), "--branch-at", "1"]
    weights = ["--init-from", str(tmp_path / "run"), "--skip-samples", "parent"]
    for start in (run, branch, weights):
        plan = plan_of(*short_run, *start)
        assert plan.settings.data.data_order == order and plan.data.has_blocks == (order == "blocks")
        assert "data_order is" in refusal(main, [*short_run, *start, "--data-order", other])
    assert plan_of(*short_run, *weights[:2], "--data-order", other).data.has_blocks == (order == "documents")


def test_both_orders_of_a_small_corpus_are_one_run(small_corpus, tmp_path):
    blocks = plan_of(*small_corpus.flags)
    documents = plan_of(*small_corpus.flags, "--data-order", "documents")
    assert (blocks.settings.data.data_order, documents.settings.data.data_order) == ("blocks", "documents")
    assert blocks.identity == documents.identity and "data_order" not in blocks.identity


def test_converted_weights_bring_no_order(small_corpus, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"source": {}, "identity": {}}))
    settings = parse_config([*small_corpus.flags, "--init-from", str(tmp_path)], "test")
    assert resolve_data_order(settings).data.data_order == "blocks"
    (tmp_path / "run.json").write_text("no JSON")
    assert resolve_data_order(settings).data.data_order == "blocks"
