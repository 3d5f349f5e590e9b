"""Operations and predictions against those that a run counts."""

import numpy as np
import pytest
import runs

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.estimate.command import build_workload, parse_estimate_config, resolve_vocab_size
from megaenc.estimate.length_model import build_length_model
from megaenc.estimate.work import compute_objective_work
from megaenc.model.config import visible_pairs
from megaenc.objectives import Schedule

RUN = [*runs.SHORT_RUN, "--train-iters", "36", "--global-batch-size", "16", "--eval-interval", "0"]
SCHEDULE = (
    "clm:6,mlm(mask=0.3):6,mntp:6,prefix_lm:6,gpt_bert(causal=0.5,mask=0.3):6,sum(clm:1,mlm:2):6"
)
RUN += ["--objective-schedule", SCHEDULE, "--lr-warmup-iters", "2"]


def demanded(*flags):
    config = parse_estimate_config(["--gpu", "h100", *flags], "megaenc estimate")
    vocab_size, _ = resolve_vocab_size(config)
    docs = build_length_model(
        config.pretrain.data, config.document_tokens, config.pretrain.shape.window_size
    )
    return config, build_workload(config, vocab_size, docs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--packing", "concat"],
        [
            "--packing",
            "random-length",
            "--window-size",
            "7",
            "--global-attn-every-n-layers",
            "3",
            "--prediction-head",
        ],
    ],
)
def test_operations_are_those_of_the_metrics(small_corpus, tmp_path, more):
    """The sum behind model_flops_utilization, phase by phase, within a few percent."""
    flags = [*RUN, *small_corpus.flags, *more]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")])
    rows = runs.metrics(tmp_path / "run")
    config, workload = demanded(*flags)
    before = {"flops": 0, "predicted_tokens": 0}
    for phase in workload.phases:
        last = rows[phase.last - 1]
        predicted = 0
        flops = 0
        for work, steps in phase.parts:
            packs = steps * phase.passes * 16
            predicted += packs * work.predicted
            flops += packs * work.flops(config.pretrain.shape, 400)
        rel = 2 if "gpt_bert" in phase.text else 1  # a document is causal or not as a whole
        assert last["predicted_tokens"] - before["predicted_tokens"] == pytest.approx(
            predicted, rel=0.06 * rel
        )
        assert last["flops"] - before["flops"] == pytest.approx(flops, rel=0.04 * rel)
        before = last


def test_phases_mixtures_branches_and_growing_batches():
    def work(*flags):
        batch = ["--global-batch-size", "16", "--micro-batch-size", "4", "--train-iters", "100"]
        _, found = demanded(*batch, "--objective-schedule", *flags)
        return found

    mixed = work("clm:0.25,mix(clm:1,mlm:3):0.75")
    assert [(phase.first, phase.last) for phase in mixed.phases] == [(1, 25), (26, 100)]
    assert [steps for _, steps in mixed.phases[1].parts] == [18.75, 56.25]
    assert [each.objective for each in mixed.works] == ["mlm", "clm"]  # the more frequent first
    both = work("clm:20,sum(clm:1,mlm:3):80")
    assert [phase.passes for phase in both.phases] == [1, 2]
    assert [steps for _, steps in both.phases[1].parts] == [40, 40]
    branch = work("clm:0.25,mlm:0.75", "--branch-from", "runs/a", "--branch-at", "40")
    assert [(phase.first, phase.last) for phase in branch.phases] == [(41, 100)]
    growing = work("mlm", "--rampup-batch-size", "4", "4", "120")
    sizes = dict(growing.phases[0].batches)
    assert sizes.keys() == {4, 8, 12, 16}
    assert sum(sizes.values()) == 100


@pytest.mark.parametrize(
    ("schedule", "more", "forwards"),
    [
        ("mlm(mask=0.2)", ["--eval-pseudo-perplexity-passes", "8"], 3 + 8),
        # clm, mlm, the schedule's, the passes
        ("clm:0.5,mntp:0.5", ["--eval-pseudo-perplexity-passes", "8"], 3 + 2 * 8),
        ("mlm(mask=0.2)", ["--valid-objective", "mlm(mask=0.15)"], 1),
        (
            "mlm(mask=0.2)",
            ["--valid-objective", "clm", "mlm", "--valid-data-path", "a=A", "b=B"],
            2 * 2,
        ),
    ],
)
def test_every_pass_of_a_validation_is_counted(schedule, more, forwards):
    flags = ["--train-iters", "100", "--eval-iters", "3", "--objective-schedule", schedule]
    assert demanded(*flags, *more)[1].validation_batches == 3 * forwards


OBJECTIVES = [
    "clm",
    "mlm(mask=0.3)",
    "mntp(mask=0.3)",
    "prefix_lm",
    "gpt_bert(causal=0.5,mask=0.3)",
    "diffusion",
]


@pytest.mark.parametrize(
    "special", [SpecialTokens("eod", after=(0,)), SpecialTokens("template", (3,), (0,))]
)
@pytest.mark.parametrize("text", OBJECTIVES)
def test_predictions_are_those_of_short_documents_with_special_tokens(text, special, monkeypatch):
    """Documents have 3 to 30 tokens, so each special token is 6 % of all tokens."""
    vocabulary = Vocabulary(size=400, eos_id=0, mask_id=1, special_ids=(0, 1, 3), fingerprint="")
    monkeypatch.setattr("megaenc.estimate.length_model._ONE_EOS", special)
    lengths = np.random.default_rng(0).integers(3, 31, size=4_000)
    ends = np.cumsum(lengths)
    tokens = np.full(ends[-1], 2)
    tokens[ends - 1] = vocabulary.eos_id
    if special.before:
        tokens[ends - lengths] = special.before[0]
    is_edge = np.zeros(len(tokens) + 1, dtype=bool)
    is_edge[ends] = True
    is_edge[::64] = True
    objective = Schedule.build(text, 1, vocabulary).objective(1)
    packs = len(tokens) // 64
    predicted = 0
    for sample in range(packs):
        start = 64 * sample
        edges = np.flatnonzero(is_edge[start : start + 65]).astype(np.int32)
        pack = Pack(sample, 0, tokens[start : start + 64], edges)
        predicted += len(objective.targets(pack, SampleRandomness(0, sample, 0)).labels)
    config, _ = demanded("--seq-length", "64", "--objective-schedule", text)
    docs = build_length_model(config.pretrain.data, tuple(lengths.tolist()))
    work = compute_objective_work(objective, objective, config.pretrain, docs)
    assert work.predicted == pytest.approx(predicted / packs, rel=0.03)


def test_prefixes_share_the_window_of_local_layers():
    """Prefixes and their documents are much longer than the window of 8 tokens a side."""
    vocabulary = Vocabulary(size=400, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
    objective = Schedule.build("prefix_lm(low=0.2,high=0.6)", 1, vocabulary).objective(1)
    config, _ = demanded("--seq-length", "2000")
    docs = build_length_model(config.pretrain.data, (2000,), window=8)
    work = compute_objective_work(objective, objective, config.pretrain, docs)
    expected = np.mean([visible_pairs(prefix, 8) for prefix in range(400, 1200)])
    assert work.visible_local_pairs == pytest.approx(expected, rel=0.01)
