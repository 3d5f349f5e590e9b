"""Operations and predictions against those that a run counts."""

import numpy as np
import pytest
import runs

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.special_tokens import SpecialTokens
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.estimate.command import build_workload, parse_estimate_config, resolve_vocab_size
from megaenc.estimate.layout_case import compute_objective_work
from megaenc.estimate.length_model import build_length_model
from megaenc.objectives import Schedule

RUN = [*runs.SHORT_RUN, "--train-iters", "36", "--global-batch-size", "16", "--eval-interval", "0"]
SCHEDULE = "clm:6,mlm(mask=0.3):6,mntp:6,prefix_lm:6,gpt_bert(causal=0.5,mask=0.3):6,sum(clm:1,mlm:2):6"
RUN += ["--objective-schedule", SCHEDULE, "--lr-warmup-iters", "2"]


def demanded(*flags):
    config = parse_estimate_config(["--gpu", "h100", *flags], "megaenc estimate")
    vocab_size, _ = resolve_vocab_size(config)
    docs = build_length_model(config.pretrain.data, config.document_tokens, config.pretrain.shape.window_size)
    return config, build_workload(config, vocab_size, docs)


@pytest.mark.slow
@pytest.mark.parametrize("window", [[], ["--window-size", "7", "--global-attn-every-n-layers", "3", "--prediction-head"]])
@pytest.mark.parametrize("packing", ["concat", "random-length"])
def test_operations_are_those_of_the_metrics(small_corpus, tmp_path, packing, window):
    """The sum that model_flops_utilization is made of, phase by phase: its packs are drawn, so some percent differ."""
    flags = [*RUN, *small_corpus.flags, "--packing", packing, *window]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(tmp_path / "run")])
    rows = runs.metrics(tmp_path / "run")
    config, workload = demanded(*flags)
    run = config.pretrain

    def flops_of_pack(work):
        return work.flops(run.shape, 400)

    for phase in workload.phases:
        first, last = rows[phase.first - 2] if phase.first > 1 else {"flops": 0, "predicted_tokens": 0}, rows[phase.last - 1]
        packs = [(work, steps * phase.passes * run.global_batch_size) for work, steps in phase.parts]
        predicted, flops = (sum(count * of(work) for work, count in packs) for of in (lambda work: work.predicted, flops_of_pack))
        rel = 2 if "gpt_bert" in phase.text else 1  # a document is causal or not as a whole
        assert last["predicted_tokens"] - first["predicted_tokens"] == pytest.approx(predicted, rel=0.06 * rel)
        assert last["flops"] - first["flops"] == pytest.approx(flops, rel=0.04 * rel)


def test_phases_mixtures_branches_and_growing_batches():
    batch = ["--global-batch-size", "16", "--micro-batch-size", "4", "--train-iters", "100"]
    _, workload = demanded(*batch, "--objective-schedule", "clm:0.25,mix(clm:1,mlm:3):0.75")
    assert [(phase.first, phase.last) for phase in workload.phases] == [(1, 25), (26, 100)]
    assert [steps for _, steps in workload.phases[1].parts] == [18.75, 56.25]
    assert [work.objective for work in workload.works] == ["mlm", "clm"]  # the more frequent first
    _, both = demanded(*batch, "--objective-schedule", "clm:20,sum(clm:1,mlm:3):80")
    assert [phase.passes for phase in both.phases] == [1, 2] and [steps for _, steps in both.phases[1].parts] == [40, 40]
    _, branch = demanded(*batch, "--objective-schedule", "clm:0.25,mlm:0.75", "--branch-from", "runs/a", "--branch-at", "40")
    assert [(phase.first, phase.last) for phase in branch.phases] == [(41, 100)]
    _, growing = demanded(*batch, "--objective-schedule", "mlm", "--rampup-batch-size", "4", "4", "120")
    sizes = dict(growing.phases[0].batches)
    assert sizes.keys() == {4, 8, 12, 16} and sum(sizes.values()) == 100


def test_passes_of_a_pseudo_perplexity_are_counted_in_validations():
    flags = ["--train-iters", "100", "--eval-iters", "3", "--eval-pseudo-perplexity-passes", "8", "--objective-schedule"]
    for schedule, forwards in (("mlm(mask=0.2)", 3 + 8), ("clm:0.5,mntp:0.5", 3 + 2 * 8)):  # clm, mlm, the schedule's, the passes
        assert demanded(*flags, schedule)[1].validation_batches == 3 * forwards


def test_fixed_objectives_and_named_sets_are_counted_in_validations():
    flags = ["--train-iters", "100", "--eval-iters", "3", "--objective-schedule", "mlm(mask=0.2)", "--valid-objective"]
    assert demanded(*flags, "mlm(mask=0.15)")[1].validation_batches == 3
    assert demanded(*flags, "clm", "mlm", "--valid-data-path", "a=A", "b=B")[1].validation_batches == 3 * 2 * 2


OBJECTIVES = ["clm", "mlm(mask=0.3)", "mntp(mask=0.3)", "prefix_lm", "gpt_bert(causal=0.5,mask=0.3)", "diffusion"]


@pytest.mark.parametrize("special", [SpecialTokens("eod", after=(0,)), SpecialTokens("template", (3,), (0,))])
@pytest.mark.parametrize("text", OBJECTIVES)
def test_predictions_are_those_of_short_documents_with_special_tokens(text, special, monkeypatch):
    """Documents of 3 to 30 tokens in packs of 64, so that each special token is 6 % of the tokens."""
    vocabulary = Vocabulary(size=400, eos_id=0, mask_id=1, special_ids=(0, 1, 3), fingerprint="")
    monkeypatch.setattr("megaenc.estimate.length_model._ONE_EOS", special)
    lengths = np.random.default_rng(0).integers(3, 31, size=20_000)
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
