"""Parts of the GPU benchmark: made work, and verdicts that can fail."""

import dataclasses

import numpy as np
import pytest
import torch


def setup(**changes):
    from megaenc.bench.gpu.presets import SMALL

    return dataclasses.replace(SMALL.correctness["64"], **changes)


def test_made_documents_are_packed_whole():
    from megaenc.bench.gpu import synthetic
    from megaenc.bench.synthetic_docs import EOS

    corpus = setup().build_documents(90)
    lengths = corpus.document_lengths
    assert lengths.min() >= 12 and lengths.max() <= 96 and lengths.max() > 3 * lengths.min()
    first, second = lengths[:2]
    joined = corpus.read_spans(np.array([1, 0]), np.array([0, 2]), np.array([second, first]))
    assert len(joined) == second + first - 2 and joined[second - 1] == joined[-1] == EOS
    assert joined.max() < 500
    pack = synthetic.build_plan(setup(), "clm", tokens=5000).packs[3]
    assert len(pack.tokens) == 96 and np.array_equal(np.flatnonzero(pack.tokens[:-1] == EOS) + 1, pack.edges[1:-1])


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        ("nothing", ()),
        ("mask", ("causal", "bidirectional")),
        ("edges", ("causal", "bidirectional")),
        ("scale", ("causal", "bidirectional")),
    ],
)
def test_a_fault_of_attention_is_found(fault, faulty, one_process, tmp_path, monkeypatch):
    from megaenc.bench.gpu import correctness
    from megaenc.model.attention import backends
    from megaenc.model.packed_sequences import PackedSequences
    from megaenc.objectives import Attention

    plain = {"64": setup(kernels={"attention_backend": "sdpa"})}
    engine = correctness.build_engine(plain["64"], one_process)
    expected = [correctness.compute_gradients(engine, plain["64"], text, 2) for text in correctness.OBJECTIVES]
    assert all(float(gradient.norm()) > 0 for _, results in expected for gradient in results.values())
    usual, spans = backends._scaled_dot_product, PackedSequences.spans
    if fault == "mask":
        monkeypatch.setattr(backends, "_scaled_dot_product", lambda q, k, v, s, causal=False: usual(q, k, v, s, not causal))
    if fault == "scale":  # that of a head padded from 96 to 128
        off = (96 / 128) ** 0.5
        monkeypatch.setattr(backends, "_scaled_dot_product", lambda q, k, v, s, causal=False: usual(q, k, v, off * s, causal))
    if fault == "edges":
        complete = {Attention.CAUSAL: 0, Attention.BIDIRECTIONAL: 192}
        monkeypatch.setattr(PackedSequences, "spans", lambda self: [(0, complete[self.attention], spans(self)[-1][-1])])
    rows = []
    for text, right in zip(correctness.OBJECTIVES, expected, strict=True):
        # With the tolerance of bfloat16: a fault must be larger than its rounding.
        wide = dataclasses.replace(plain["64"], bf16=True)
        rows.append(correctness.compare_gradients(wide, text, correctness.compute_gradients(engine, plain["64"], text, 2), right))
    assert tuple(row["attention"] for row in rows if not row["passed"]) == faulty, rows
    assert all((row["gradient_error"] <= row["allowed"]["gradient"]) == (fault == "nothing") for row in rows), rows


def test_a_wrong_gradient_of_one_parameter_is_found():
    from megaenc.bench.gpu import correctness

    right = {"a": torch.ones(8), "b": torch.ones(8)}
    ok = correctness.compare_gradients(setup(), "clm", (6.0, right), (6.0, right))
    assert ok["passed"] and ok["gradient_error"] == 0.0
    for wrong in (torch.ones(8) * 1.01, torch.full((8,), float("nan"))):
        row = correctness.compare_gradients(setup(), "clm", (6.0, right | {"b": wrong}), (6.0, right))
        assert not row["passed"] and row["worst_parameter"] == "b"
    assert not correctness.compare_gradients(setup(), "clm", (float("nan"), right), (6.0, right))["passed"]
    assert not correctness.compare_gradients(setup(), "clm", (6.001, right), (6.0, right))["passed"]
    renamed = correctness.compare_gradients(setup(), "clm", (6.0, {"a": right["a"], "c": right["b"]}), (6.0, right))
    assert renamed["not_compared"] == ["b", "c"]


def test_parity_is_of_the_worst_update():
    from megaenc.bench.gpu.verdicts import compare_runs

    host = [7.0, 6.0, 5.0]
    rows = compare_runs({"host float32": host, "device float32": [7.0, 6.0, 5.02], "device bfloat16": [7.0, 6.0, 5.02]})
    assert [(row["numbers"], row["beside"], row["passed"]) for row in rows] == [
        ("float32", "host float32", False),
        ("bfloat16", "host float32", True),
    ]
    assert rows[0]["worst"] == pytest.approx(0.004)
    broken = compare_runs({"host float32": host, "device float32": [7.0, float("nan"), 5.0]})
    assert not broken[0]["passed"]


def test_the_same_weights_are_made_each_time(one_process):
    from megaenc.bench.gpu import synthetic

    engines = [synthetic.build_random_engine(synthetic.build_plan(setup(), "clm"), one_process) for _ in range(2)]
    first, second = (dict(synthetic.unwrap_encoder(engine).named_parameters()) for engine in engines)
    assert all(torch.equal(first[name], second[name]) for name in first)
    matrix = first["decoder.layers.0.mlp.linear_fc1.weight"]
    assert matrix.detach().std().item() == pytest.approx(192**-0.5, rel=0.05)
    synthetic.configure_batches(engines[0], setup(), "clm", 2, 3)
    update = engines[0].train_step(1)
    assert update.is_applied and update.metrics.predicted > 0.9 * 6 * 96


def test_attention_is_checked_under_all_masks_that_will_be_trained(one_process, monkeypatch):
    from megaenc.bench.gpu import correctness, synthetic
    from megaenc.bench.gpu.presets import CLM, MLM
    from megaenc.objectives import Attention
    from megaenc.training import attention_select

    checked, check = [], attention_select.check_backend

    def noted(name, masks, **others):
        checked.append(masks)
        return check(name, masks=masks, **others)

    monkeypatch.setattr(attention_select, "check_backend", noted)
    engine = correctness.build_engine(setup(), one_process)
    assert checked[-1] == [Attention.CAUSAL, Attention.BIDIRECTIONAL]
    synthetic.configure_batches(engine, setup(), MLM, 1, 1)
    assert {engine.plan.schedule.objective(step).attention for step in range(1, 20)} == {Attention.BIDIRECTIONAL}
    synthetic.build_random_engine(synthetic.build_plan(setup(), CLM), one_process)
    assert checked[-1] == [Attention.CAUSAL]
