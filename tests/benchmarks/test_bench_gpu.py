"""The GPU benchmark in miniature on the host, and faults that it must find."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import gpu
import pytest
import runs
import torch

from megaenc.model.attention import backends
from megaenc.model.packed_sequences import PackedSequences
from megaenc.objectives import Attention
from megaenc.training.distributed import largest_batch

SETUP = dataclasses.replace(gpu.SMALL.correctness["64"], kernels={"attention_backend": "sdpa"})


@pytest.mark.slow
def test_a_miniature_of_it_is_done(tmp_path):
    """The host is compared with itself: only bfloat16 differs, by its rounding."""
    output = tmp_path / "gpu"
    flags = ["--device", "cpu", "--small", "--output", str(output)]
    environment = runs.surroundings() | {"PYTHON": sys.executable, "PYTHONPATH": ""}
    subprocess.run(
        [runs.ROOT / "benchmarks" / "gpu.sh", *flags],
        env=environment,
        check=True,
        capture_output=True,
        cwd="/",
    )
    lines = (output / "results.jsonl").read_text().splitlines()
    rows = {}
    for line in lines:
        row = json.loads(line, parse_constant=pytest.fail)
        rows.setdefault(row["kind"], []).append(row)
    assert rows.keys() == {"machine", "correctness", "speed", "breakdown", "peer"}
    assert len((output / "results.txt").read_text().splitlines()) == len(lines)
    assert (
        len({(row["head_dim"], row["attention"], row["numbers"]) for row in rows["correctness"]})
        == 8
    )
    for row in rows["correctness"]:
        assert row["passed"] and not row["not_compared"]
        assert (row["gradient_error"] < 1e-6) == (row["numbers"] == "float32")
    for row in rows["speed"]:
        assert row["finite"]
        tokens = row["packs"] * row["micro_batches"] * gpu.SMALL.speed["miniature"].seq_length
        assert row["tokens_per_second"] * row["seconds_per_step"] == pytest.approx(tokens)
    losses = [row["loss"] for row in rows["peer"]]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-2)


@pytest.mark.parametrize("fault", ["nothing", "mask", "edges", "scale"])
def test_a_fault_of_attention_is_found(fault, one_process, monkeypatch):
    """A fault must be larger than bfloat16's rounding."""
    engine = gpu.build_engine(SETUP, one_process)
    expected = [gpu.compute_gradients(engine, SETUP, text) for text in gpu.OBJECTIVES]
    right = backends._scaled_dot_product
    spans = PackedSequences.spans

    def wrong_mask(q, k, v, scale, causal=False):
        return right(q, k, v, scale, not causal)

    def wrong_scale(q, k, v, scale, causal=False):
        """Compute attention as if heads were padded from 96 to 128."""
        return right(q, k, v, (96 / 128) ** 0.5 * scale, causal)

    def whole_row(self):
        prefix = {Attention.CAUSAL: 0, Attention.BIDIRECTIONAL: 192}[self.attention]
        return [(0, prefix, spans(self)[-1][-1])]

    if fault == "mask":
        monkeypatch.setattr(backends, "_scaled_dot_product", wrong_mask)
    if fault == "scale":
        monkeypatch.setattr(backends, "_scaled_dot_product", wrong_scale)
    if fault == "edges":
        monkeypatch.setattr(PackedSequences, "spans", whole_row)
    wide = dataclasses.replace(SETUP, bf16=True)
    for text, reference in zip(gpu.OBJECTIVES, expected, strict=True):
        found = gpu.compute_gradients(engine, SETUP, text)
        row = gpu.compare_gradients(wide, text, found, reference)
        assert row["passed"] == (fault == "nothing"), row
        assert (row["gradient_error"] <= row["allowed"]["gradient"]) == (fault == "nothing"), row


def test_a_wrong_gradient_of_one_parameter_is_found():
    right = {"a": torch.ones(8), "b": torch.ones(8)}

    def compared(loss, gradients):
        return gpu.compare_gradients(SETUP, "clm", (loss, gradients), (6.0, right))

    assert compared(6.0, right)["passed"]
    for wrong in (torch.ones(8) * 1.01, torch.full((8,), float("nan"))):
        row = compared(6.0, right | {"b": wrong})
        assert not row["passed"] and row["worst_parameter"] == "b"
    for loss in (float("nan"), 6.001):
        assert not compared(loss, right)["passed"]
    assert compared(6.0, {"a": right["a"], "c": right["b"]})["not_compared"] == ["b", "c"]


def test_a_batch_that_fills_the_memory_fits_under_every_objective(monkeypatch):
    """A pack takes 3 bytes, 4 under `mlm`; more than 12 packs exhaust the allocator."""

    def measure_peak(engine, objective, samples, packs):
        if len(samples) > 12:
            raise torch.OutOfMemoryError
        return len(samples) * {"clm": 3.0, "mlm": 4.0}[objective]

    monkeypatch.setattr(largest_batch, "measure_peak", measure_peak)
    monkeypatch.setattr(largest_batch, "discard_batch", lambda engine: None)
    monkeypatch.setattr(largest_batch, "reduce_over_ranks", lambda values, operation: values)
    found = [
        largest_batch.find_largest_batch(SimpleNamespace(), objectives, range(1, 100), room)
        for objectives, room in (
            (["clm"], 30.0),
            (["clm", "mlm"], 30.0),
            (["clm"], 1000.0),
            (["clm"], 0.0),
        )
    ]
    assert found == [10, 7, 12, 1]
