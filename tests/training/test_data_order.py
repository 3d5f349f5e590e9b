"""What is read, and in which order: decided by data, seed and packing; not by length of the run, batch size or layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import runs

from megaenc.data.indexed.indexed_dataset import IndexedWriter
from megaenc.data.packing.block_stream import MOST_SHUFFLED
from megaenc.data.preprocess import command as preprocess
from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.micro_batches import DataParallelSampler
from megaenc.training.parent_run import resolve_data_order
from megaenc.training.planning import build_plan


@pytest.fixture(scope="module")
def blend(small_corpus, tmp_path_factory) -> list[str]:
    """Flags: three packs in ten from a second corpus with the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    text = runs.write_text(folder / "text.jsonl", documents=60, seed=1)
    preprocess.main(
        ["--input", str(text), "--output-prefix", str(folder / "b"), "--tokenizer", str(small_corpus.tokenizer), "--append-eod"]
    )
    data_path = ["--data-path", "0.7", str(small_corpus.prefix), "0.3", str(folder / "b_text_document")]
    return [*data_path, "--tokenizer", str(small_corpus.tokenizer), "--split", "90,10,0"]


def plan_of(*flags):
    return build_plan(parse_config([*map(str, flags)], "test"))


@pytest.mark.parametrize("packing", ["concat", "random-length"])
def test_order_knows_nothing_of_length_and_batch(packing, blend):
    common = [*blend, "--model", "tiny", "--seq-length", "64", "--packing", packing, "--seed", "3"]
    short = plan_of(*common, "--train-iters", "10", "--global-batch-size", "8", "--micro-batch-size", "2")
    long = plan_of(*common, "--train-iters", "4000", "--global-batch-size", "48", "--objective-schedule", "mlm")
    for sample in range(0, 600, 7):
        pack, other_pack = short.packs[sample], long.packs[sample]
        assert np.array_equal(pack.tokens, other_pack.tokens) and np.array_equal(pack.edges, other_pack.edges)
        assert (pack.sample, pack.epoch) == (other_pack.sample, other_pack.epoch)
    assert [short.first_sample(step) for step in (1, 2, 7)] == [0, 8, 48] and long.first_sample(2) == 48


@pytest.mark.parametrize(("micro", "ranks"), [(1, 1), (2, 1), (1, 8), (4, 2), (2, 4)])
def test_every_layout_reads_the_samples_of_a_step_once(micro, ranks):
    shares = [DataParallelSampler(8, micro, rank, ranks) for rank in range(ranks)]
    read = [sample for share in shares for samples in share.samples(40) for sample in samples]
    assert sorted(read) == list(range(40, 48))


@pytest.mark.multiprocess
def test_a_blend_in_random_lengths_trains_alike_in_every_layout(blend, tmp_path):
    flags = [*blend, *runs.SHORT_RUN, "--train-iters", "10", "--packing", "random-length", "--no-bf16"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "one")])
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*flags, *layout, "--save", str(tmp_path / "four")], processes=4)
    runs.assert_same_curve(tmp_path / "four", tmp_path / "one", tolerance=1e-4)


@pytest.fixture(scope="module")
def large_corpus(small_corpus, tmp_path_factory) -> list[str]:
    """Flags: a corpus of so many documents, of one to five tokens, that they are shuffled in blocks."""
    prefix, rng, documents = tmp_path_factory.mktemp("large") / "corpus", np.random.default_rng(0), MOST_SHUFFLED + 1
    lengths = rng.integers(1, 6, documents)
    tokens = rng.integers(8, 400, lengths.sum()).astype(np.uint16)
    tokens[lengths.cumsum() - 1] = 0
    writer = IndexedWriter(Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), "uint16")
    writer.add_documents(tokens, lengths, np.ones(documents, int))
    writer.finish()
    return ["--data-path", str(prefix), "--tokenizer", str(small_corpus.tokenizer)]


@pytest.mark.multiprocess
def test_a_corpus_in_blocks_trains_alike_in_every_layout(large_corpus, tmp_path):
    flags = [*large_corpus, *runs.SHORT_RUN, "--train-iters", "10", "--packing", "random-length", "--no-bf16"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "one")])
    assert json.loads((tmp_path / "one" / "run.json").read_text())["identity"]["data_order"] == "blocks"
    for name, layout in {"data": [], "both": ["--tensor-model-parallel-size", "2"]}.items():
        runs.script(runs.PRETRAIN, [*flags, *layout, "--save", str(tmp_path / name)], processes=4 if layout else 2)
        runs.assert_same_curve(tmp_path / name, tmp_path / "one", tolerance=1e-4)


def test_another_blend_is_another_run(blend, small_corpus, tmp_path, refusal):
    flags = [
        *blend,
        *runs.SHORT_RUN,
        "--train-iters",
        "2",
        "--lr-warmup-iters",
        "1",
        "--lr-wsd-decay-iters",
        "1",
        "--save",
        tmp_path,
    ]
    runs.script(runs.PRETRAIN, [str(flag) for flag in [*flags, "--exit-interval", "1"]])
    reading = json.loads((tmp_path / "run.json").read_text())["reading"]
    assert [(row["share"], row["packs"]) for row in reading] == [(0.7, 11), (0.3, 5)]
    other = [*flags, "--data-path", "0.5", blend[2], "0.5", blend[4]]
    assert "holds a different run: data is 7/10" in refusal(main, other)
    assert "holds a different run: packing is concat there, random-length here" in refusal(
        main, [*flags, "--packing", "random-length"]
    )


def test_a_budget_of_tokens_is_as_many_steps_as_it_takes():
    sizes = ["--global-batch-size", "4", "--seq-length", "100", "--micro-batch-size", "4"]
    for tokens, steps in ((1, 1), (400, 1), (401, 2), (40_000, 100)):
        assert parse_config([*sizes, "--train-tokens", str(tokens)], "test").total_iters == steps
    assert parse_config(sizes, "test").total_iters == 200


def test_tokens_on_the_command_line_overrule_steps_in_yaml(tmp_path, small_corpus, refusal):
    (tmp_path / "run.yaml").write_text("train_iters: 9\nseq_length: 64\n")
    settings = parse_config(["--config", str(tmp_path / "run.yaml"), "--train-tokens", "2048"], "test")
    assert (settings.train_iters, settings.total_iters) == (None, 2)
    assert parse_config(["--config", str(tmp_path / "run.yaml"), "--train_tokens=2048"], "test") == settings
    both = [*small_corpus.flags, "--train-tokens", "5", "--train-iters", "6"]
    assert "--train-tokens: found 5 together with --train-iters 6, expected one of them" in refusal(main, both)


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


@pytest.mark.parametrize("order", ["blocks", "documents"])
def test_a_run_keeps_its_order_of_documents(order, small_corpus, tmp_path, large, refusal):
    """Bitwise, resumed and branched without the flag; a run without a record shuffles documents, as it always did."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--train-iters", "12"]
    given = [] if order == "blocks" else ["--data-order", "documents"]
    main([*flags, *given, "--save", str(tmp_path / "whole")])
    main([*flags, *given, "--save", str(tmp_path / "run"), "--exit-interval", "6"])
    if order == "documents":
        forget_order(tmp_path / "run")
    else:
        assert json.loads((tmp_path / "run" / "run.json").read_text())["identity"]["data_order"] == "blocks"
    other = {"blocks": "documents", "documents": "blocks"}[order]
    message = refusal(main, [*flags, "--save", tmp_path / "run", "--data-order", other])
    assert "holds a different run: data_order is" in message
    main([*flags, "--save", str(tmp_path / "run")])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    assert runs.validations(tmp_path / "run") == runs.validations(tmp_path / "whole")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data_order"] == order

    if order == "documents":
        forget_order(tmp_path / "run")
    branch = [*flags, "--branch-from", tmp_path / "run", "--branch-at", 6]
    weights = [*flags, "--init-from", tmp_path / "run", "--skip-samples", "parent"]
    for plan in (plan_of(*branch), plan_of(*weights)):
        assert plan.settings.data.data_order == order and plan.data.has_blocks == (order == "blocks")
    assert "data_order is" in refusal(main, [*branch, "--data-order", other])
    assert "data_order is" in refusal(main, [*weights, "--data-order", other])
    assert plan_of(*weights[:-2], "--data-order", other).data.has_blocks == (order == "documents")


def test_both_orders_of_a_small_corpus_are_one_run(small_corpus, tmp_path):
    plans = [plan_of(*small_corpus.flags, *flags) for flags in ([], ["--data-order", "blocks"], ["--data-order", "documents"])]
    assert [plan.settings.data.data_order for plan in plans] == ["blocks", "blocks", "documents"]
    assert plans[0].identity == plans[1].identity == plans[2].identity and "data_order" not in plans[0].identity


def test_converted_weights_bring_no_order(small_corpus, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"source": {}, "identity": {}}))
    settings = parse_config([*small_corpus.flags, "--init-from", str(tmp_path)], "test")
    assert resolve_data_order(settings).data.data_order == "blocks"
    (tmp_path / "run.json").write_text("no JSON")
    assert resolve_data_order(settings).data.data_order == "blocks"
