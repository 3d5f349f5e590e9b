"""The training benchmark: all sides do the same work."""

import dataclasses
import json

import numpy as np
import pretrain
import pytest
import torch
import work
from synthetic import SyntheticDocuments

SMALL = pretrain.PretrainBenchConfig(
    model="tiny", vocab_size=300, documents=6, batch=2, shortest=3, longest=40, rounds=1, bf16=False
)
each_objective = pytest.mark.parametrize("objective", ["mlm(mask=0.4)", "clm"])


def test_documents_follow_from_the_seed_in_any_order():
    documents = SyntheticDocuments(6, 3, 40, 300, seed=5)
    lengths = documents.document_lengths.tolist()
    assert min(lengths) >= 3
    assert max(lengths) <= 40
    assert documents.tokens == sum(lengths)
    ordered = dataclasses.replace(documents, order=documents.order_by_length())
    assert [len(ordered[number].tokens) for number in range(6)] == sorted(lengths)
    objective = SMALL.build_job("").parse_objective("mlm(mask=0.4)")
    for place, number in enumerate(documents.order_by_length()):
        first, requested = ordered.targets(objective, place)
        second, expected = documents.targets(objective, number)
        assert first.sample == second.sample
        assert all(map(np.array_equal, requested[:3], expected[:3]))
    assert np.array_equal(documents[7].tokens, documents[1].tokens), (
        "numbers go on from the beginning"
    )


@each_objective
def test_a_padded_batch_asks_for_the_same_tokens(objective):
    job = dataclasses.replace(SMALL, objective=objective).build_job("")
    documents = job.read_documents()
    inputs, predicted = work.build_padded_batch(
        job, documents, job.parse_objective(objective), 1, torch.device("cpu")
    )
    assert inputs["attention_mask"].sum(1).tolist() == documents.document_lengths[2:4].tolist()
    for row, number in enumerate((2, 3)):
        tokens = documents[number].tokens
        labels = inputs["labels"][row].numpy()
        requested = np.flatnonzero(labels != work.IGNORED)
        assert np.array_equal(labels[requested], tokens[requested])
        if objective == "clm":
            assert np.array_equal(requested, np.arange(1, len(tokens))), (
                "every token but the first has one before it"
            )
    assert predicted == int((inputs["labels"] != work.IGNORED).sum()) > 0


@each_objective
def test_all_sides_begin_with_the_same_loss(objective, tmp_path):
    settings = dataclasses.replace(SMALL, objective=objective)
    sides = pretrain.build_contenders(settings, str(tmp_path / "weights.safetensors"))
    work.write_weights(sides[pretrain.OURS][1])
    results = [train(job) for train, job in sides.values()]
    losses = [each["loss"] for each in results]
    assert len(losses) == 3
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    assert len({each["predicted"] for each in results}) == 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sides_take_turns_in_processes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrain, "find_fastest_attention", lambda job: "sdpa")
    flags = [
        "--model",
        "tiny",
        "--vocab-size",
        "300",
        "--documents",
        "6",
        "--batch",
        "2",
        "--longest",
        "40",
        "--rounds",
        "1",
    ]
    flags += [
        "--no-bf16",
        "--tensor-model-parallel-size",
        "2",
        "--output",
        str(tmp_path / "bench.json"),
    ]
    pretrain.main(flags)
    results = json.loads((tmp_path / "bench.json").read_text())
    turns = {side: turns[0] for side, turns in results["turns"].items()}
    assert list(turns) == [
        pretrain.OURS,
        pretrain.TENSOR_PARALLEL,
        pretrain.PADDED,
        pretrain.SORTED,
    ]
    losses = [turn["loss"] for turn in turns.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    ours = turns[pretrain.OURS]["seconds"]
    assert results["tokens_per_second"] == pytest.approx(results["tokens"] / ours)
    assert results["ratio_padded"] == pytest.approx(turns[pretrain.PADDED]["seconds"] / ours)


def test_other_work_is_found():
    pretrain.check_losses({"a": 6.0, "b": 6.0 + 1e-4}, bf16=False)
    for loss in (6.01, float("nan")):
        with pytest.raises(RuntimeError, match=r"b 6\.01|b nan"):
            pretrain.check_losses({"a": 6.0, "b": loss}, bf16=False)
