"""The training benchmark: all sides do the same work, and the figures follow from their turns."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megaenc.bench import pretrain, train_worker
from megaenc.bench.synthetic_docs import SyntheticDocuments
from megaenc.model.config import get_preset
from megaenc.objectives import Attention

TURN = """
import json, os, pathlib, pickle, sys
side, result = map(pathlib.Path, sys.argv[1:])
train, work = pickle.loads(side.read_bytes())
found = train(work)
if os.environ.get("RANK", "0") == "0":
    result.write_text(json.dumps(found))
"""
SMALL = pretrain.PretrainBenchConfig(
    model="tiny", vocab_size=300, documents=6, batch=2, shortest=3, longest=40, rounds=2, bf16=False
)


def test_documents_follow_from_the_seed_in_any_order():
    documents = SyntheticDocuments(6, 3, 40, 300, seed=5)
    lengths = documents.document_lengths.tolist()
    assert min(lengths) >= 3 and max(lengths) <= 40 and documents.tokens == sum(lengths)
    ordered = dataclasses.replace(documents, order=documents.order_by_length())
    assert [len(ordered[number].tokens) for number in range(6)] == sorted(lengths)
    objective = SMALL.build_job("").parse_objective("mlm(mask=0.4)")
    for place, number in enumerate(documents.order_by_length()):
        (first, requested), (second, expected) = ordered.targets(objective, place), documents.targets(objective, number)
        assert first.sample == second.sample and all(map(np.array_equal, requested[:3], expected[:3]))
    assert np.array_equal(documents[7].tokens, documents[1].tokens), "numbers go on from the beginning"


@pytest.mark.parametrize(("objective", "causal"), [("mlm(mask=0.4)", False), ("clm", True)])
def test_a_padded_batch_asks_for_the_same_tokens(objective, causal):
    work = dataclasses.replace(SMALL, objective=objective).build_job("")
    documents = work.read_documents()
    inputs, predicted = train_worker.build_padded_batch(work, documents, work.parse_objective(objective), 1, torch.device("cpu"))
    assert inputs["attention_mask"].sum(1).tolist() == documents.document_lengths[2:4].tolist()
    for row, number in enumerate((2, 3)):
        tokens, labels = documents[number].tokens, inputs["labels"][row].numpy()
        requested = np.flatnonzero(labels != train_worker.IGNORED)
        assert np.array_equal(labels[requested], tokens[requested])
        assert not causal or np.array_equal(requested, np.arange(1, len(tokens))), "every token but the first has one before it"
    assert predicted == int((inputs["labels"] != train_worker.IGNORED).sum()) > 0


class Computed(TorchDispatchMode):
    """Elements of the tensors that operations filled or allocated, without views and maps of a file."""

    elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation(*args, **(kwargs or {}))
        if not operation.is_view and operation is not torch.ops.aten.set_.source_Storage:
            tensors = [each for each in tree_leaves(results) if isinstance(each, torch.Tensor)]
            self.elements += sum(tensor.numel() for tensor in tensors if tensor.device.type != "meta")
        return results


@pytest.mark.parametrize("objective", ["mlm(mask=0.4)", "clm"])
def test_the_peer_is_built_without_filling_or_copying_its_weights(objective, tmp_path):
    work = dataclasses.replace(SMALL, objective=objective).build_job(str(tmp_path / "weights.safetensors"))
    kind, config = train_worker.build_hf_config(work)
    torch.manual_seed(3)
    with Computed() as usual:
        expected = kind(config).eval()
    save_file(expected.state_dict(), work.weights)
    with Computed() as computed:
        model = train_worker.load_hf_model(work).eval()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert computed.elements < count / 1000 and usual.elements > count
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(buffers[name], value) for name, value in expected.named_buffers())
    ids = torch.arange(2, 66).view(2, 32)
    assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("objective", ["mlm(mask=0.4)", "clm"])
def test_all_sides_begin_with_the_same_loss(objective, tmp_path):
    settings = dataclasses.replace(SMALL, objective=objective, tensor_model_parallel_size=2)
    sides = pretrain.build_contenders(settings, str(tmp_path / "weights.safetensors"))
    (tmp_path / "turn.py").write_text(TURN)
    results = {}
    for name, side in {"weights": (train_worker.write_weights, sides[pretrain.OURS][1]), **sides}.items():
        (tmp_path / "side").write_bytes(pickle.dumps(side))
        processes = side[1].tensor_model_parallel_size
        runs.script(tmp_path / "turn.py", [str(tmp_path / "side"), str(tmp_path / "result")], processes=processes)
        results[name] = json.loads((tmp_path / "result").read_text())
    del results["weights"]
    assert list(results) == [pretrain.OURS, pretrain.TENSOR_PARALLEL, pretrain.PADDED, pretrain.SORTED]
    losses = [each["loss"] for each in results.values()]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    assert len({each["predicted"] for each in results.values()}) == 1
    assert all(each["seconds"] > 0 and each["cpu_seconds"] > 0 and each["peak_memory"] > 0 for each in results.values())


@pytest.mark.slow
def test_a_turn_has_processes_of_its_own(tmp_path):
    work = dataclasses.replace(SMALL.build_job(str(tmp_path / "weights.safetensors")), tensor_model_parallel_size=2)
    results = train_worker.run_in_processes(train_worker.train_with_megaenc, work)
    assert results["seconds"] > 0 and results["predicted"] > 0
    with pytest.raises(RuntimeError, match=r"train_with_transformers: FileNotFoundError: .*weights"):
        train_worker.run_in_processes(
            train_worker.train_with_transformers, dataclasses.replace(work, tensor_model_parallel_size=1)
        )


def test_other_work_is_found():
    pretrain.check_losses({"a": 6.0, "b": 6.0 + 1e-4}, bf16=False)
    for loss in (6.01, float("nan")):
        with pytest.raises(RuntimeError, match=r"b 6\.01|b nan"):
            pretrain.check_losses({"a": 6.0, "b": loss}, bf16=False)


def test_figures_by_hand():
    def turn(seconds):
        return {"seconds": seconds, "cpu_seconds": 2 * seconds, "peak_memory": 2**30, "loss": 6.0, "predicted": 50}

    result = {
        pretrain.OURS: [turn(2.0), turn(4.0)],
        pretrain.PADDED: [turn(8.0), turn(8.0)],
        pretrain.SORTED: [turn(3.0), turn(6.0)],
    }
    results = pretrain.summarize_turns(SMALL, "sdpa", result, rate=1e9)
    documents = SMALL.build_job("").read_documents()
    assert results["tokens"] == documents.tokens
    assert results["sides"][pretrain.OURS]["tokens_per_second"] == pytest.approx(
        {"median": documents.tokens * 3 / 8, "lowest": documents.tokens / 4, "highest": documents.tokens / 2}
    )
    assert (results["ratio_padded"], results["ratio_sorted"]) == (3.0, 1.5)
    spans = documents.spans(Attention.BIDIRECTIONAL)
    assert results["gemm_share"] == pytest.approx(get_preset("tiny").training_flops(300, 50, spans) / 3.0 / 1e9)
    assert "3.00 times padded transformers" in pretrain.format_table(results)
    assert json.loads(json.dumps(results))["ratio_padded"] == 3.0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--documents", "7"], "--documents: found 7, expected a multiple of --batch 8"),
        (["--longest", "4"], "--longest: found 4, expected 12 or more"),
        (["--rounds", "0"], "--rounds: found 0, expected 1 or more"),
        (["--objective", "mntp"], "--objective mntp: transformers has no loss for it, expected clm or mlm(...)"),
        (["--model", "giant"], "--model: unknown preset 'giant'"),
        (["--output", "/proc/none/bench.json"], "--output /proc/none/bench.json: "),
    ],
)
def test_wrong_settings_are_one_line(flags, complaint, refusal):
    assert complaint in refusal(pretrain.main, flags)
