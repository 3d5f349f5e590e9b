"""Validation: the same questions in every run, so that the curves of any two can be laid over each other."""

import itertools
import json
import math
from collections import defaultdict

import numpy as np
import pytest
import runs
import torch
import torch.nn.functional as F

from megaenc.counter_rng import SampleRandomness
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.model.packed_sequences import PackedSequences
from megaenc.objectives import Attention, Schedule
from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.plan import validation_objectives
from megaenc.training.planning import build_plan

VOCABULARY = Vocabulary(size=64, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="f" * 64)


@pytest.mark.parametrize(
    ("schedule", "texts"),
    [
        ("clm", ["clm", "mlm"]),
        ("mlm", ["clm", "mlm"]),
        ("clm:0.5,mlm(mask=0.2):0.5", ["clm", "mlm", "mlm(mask=0.2)"]),
        ("mlm(mask=0.4->0.15)", ["clm", "mlm", "mlm(mask=0.15)"]),
        ("mix(mntp:1,clm:1):1.0", ["clm", "mlm", "mntp"]),
    ],
)
def test_clm_and_mlm_are_always_among_the_questions(schedule, texts):
    assert list(validation_objectives(Schedule.build(schedule, 100, VOCABULARY), VOCABULARY)) == texts


def test_without_a_mask_token_there_is_no_mlm():
    maskless = Vocabulary(size=64, eos_id=0, mask_id=None, special_ids=(0,), fingerprint="f" * 64)
    assert list(validation_objectives(Schedule.build("clm", 100, maskless), maskless)) == ["clm"]


@pytest.mark.parametrize(
    ("change", "rows"), [([], 10), (["--objective-schedule", "600x(clm:1,mlm:1)"], 1), (["--log-interval", "7"], 7)]
)
def test_rows_of_metrics_show_every_phase(change, rows, small_corpus):
    plan = build_plan(parse_config([*small_corpus.flags, *runs.SHORT_RUN, "--train-iters", "1200", *change], "test"))
    assert plan.log_interval == rows


@pytest.mark.multiprocess
def test_runs_that_share_nothing_but_the_data_are_asked_the_same(small_corpus, tmp_path):
    """Objective, packing, length and layout differ; before the first step the model, and so its answers, are the same."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1"]
    one = ["--objective-schedule", "mlm(mask=0.2)", "--train-iters", "2"]
    other = ["--objective-schedule", "clm", "--train-iters", "3", "--packing", "random-length", "--micro-batch-size", "4"]
    runs.script(runs.PRETRAIN, [*flags, *one, "--save", str(tmp_path / "one")])
    runs.script(
        runs.PRETRAIN, [*flags, *other, "--tensor-model-parallel-size", "2", "--save", str(tmp_path / "other")], processes=2
    )
    before = [runs.validations(tmp_path / name)[0] for name in ("one", "other")]
    after = [runs.validations(tmp_path / name)[-1] for name in ("one", "other")]
    for objective in ("clm", "mlm"):
        actual, expected = (row["objectives"][objective] for row in before)
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["most_frequent"] == expected["most_frequent"]
        assert after[0]["objectives"][objective]["loss"] != after[1]["objectives"][objective]["loss"]
    assert len({row["held_out"] for row in (*before, *after)}) == 1  # the same text, and it says so
    for row in (*before, *after):
        assert row.keys() >= {"step", "tokens", "predicted_tokens", "flops"}  # what curves can be laid over each other by


@pytest.fixture(scope="module")
def two_corpora(small_corpus, tmp_path_factory):
    """Flags of a run on the small corpus and another one, in packs of two ranges of positions."""
    from megaenc.data.preprocess import command as preprocess

    folder = tmp_path_factory.mktemp("two")
    text, other = runs.write_text(folder / "other.jsonl", documents=100, seed=1), folder / "other"
    tokenizer = ["--tokenizer", str(small_corpus.tokenizer)]
    preprocess.main(["--input", str(text), "--output-prefix", str(other), *tokenizer, "--append-eod"])
    data = ["--data-path", "0.6", str(small_corpus.prefix), "0.4", f"{other}_text_document", *tokenizer, "--split", "60,40,0"]
    return [*data, *runs.SHORT_RUN, "--no-bf16", "--seq-length", "192", "--eval-iters", "2"]


def by_single_tokens(encoder, packs, samples, objective, prefixes, first):
    """By group [summed loss, tokens], from the logits of one pack after the other; `first`: length of the first range."""
    from megaenc.training.micro_batches import build_micro_batch

    sums = defaultdict(lambda: np.zeros(2))
    for sample in range(samples):
        pack = packs[sample]
        batch = build_micro_batch(packs, [sample], objective, 0, torch.device("cpu"))
        with torch.no_grad():
            logits = encoder(batch.tokens, batch.positions, batch.packing, batch.predict_at)[:, : objective.vocabulary.size]
        losses = F.cross_entropy(logits, batch.labels, reduction="none").tolist()
        targets = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch))
        for loss, at in zip(losses, targets.predict_at.tolist(), strict=True):
            token = at + objective.shift
            assert pack.tokens[token] == targets.labels[targets.predict_at.tolist().index(at)]
            position = token - max(edge for edge in pack.edges.tolist() if edge <= token)
            low, high = 0, first - 1
            while position > high:
                low, high = high + 1, 2 * high + 1
            for group in ("all", f"{low}-{high}", prefixes[packs.corpus_of_sample(sample)]):
                sums[group] += loss, 1
    return sums


@pytest.mark.parametrize("first", [128, 16])
def test_losses_by_position_and_corpus_are_those_of_the_single_tokens(first, two_corpora, one_process, monkeypatch):
    from megaenc.training import micro_batches
    from megaenc.training.engine import Engine
    from megaenc.training.trainer import Validator

    monkeypatch.setattr(micro_batches, "FIRST_RANGE", first)
    plan = build_plan(parse_config([*two_corpora, "--objective-schedule", "mntp"], "test"))
    engine, validator = Engine(plan, one_process), Validator(plan)
    result = validator(engine)["objectives"]
    [part] = validator.parts
    [encoder] = [chunk.module for chunk in engine.chunks]
    prefixes = [corpus.prefix for corpus in plan.data.corpora]
    assert list(result) == ["clm", "mlm", "mntp"]
    for text, objective in validator.objectives.items():
        sums = by_single_tokens(encoder, part.packs, part.samples, objective, prefixes, first)
        expected = {group: loss / count for group, (loss, count) in sums.items()}
        assert result[text]["loss"] == pytest.approx(expected.pop("all"), rel=1e-6)
        actual = result[text]["by_position"] | result[text]["by_corpus"]
        assert actual == pytest.approx(expected, rel=1e-6)
        assert list(result[text]["by_corpus"]) == prefixes
        ranges = ["0-127", "128-255"] if first == 128 else ["0-15", "16-31", "32-63", "64-127", "128-255"]
        assert list(result[text]["by_position"]) == ranges
        for kind in ("by_position", "by_corpus"):
            total = sum(loss * sums[group][1] for group, loss in result[text][kind].items())
            assert total / sums["all"][1] == pytest.approx(result[text]["loss"], rel=1e-6)


def test_one_range_and_one_corpus_are_not_told_apart(small_corpus, one_process):
    """Losses by group would repeat the loss; a corpus without held-out tokens in the packs is no group either."""
    from megaenc.training.engine import Engine
    from megaenc.training.micro_batches import TokenGroups
    from megaenc.training.trainer import Validator

    plan = build_plan(parse_config([*small_corpus.flags, *runs.SHORT_RUN], "test"))
    result = Validator(plan)(Engine(plan, one_process))["objectives"]
    assert all(scores.keys() == {"loss", "accuracy", "most_frequent"} for scores in result.values())
    groups = TokenGroups((0, 128, 256), ("a", "b"))
    sums = np.array([[6.0, 8.0, 0.0, 14.0, 0.0], [2, 4, 0, 6, 0]])
    assert groups.mean_losses(sums) == {"by_position": {"0-127": 3.0, "128-255": 2.0}}


def test_thousands_of_corpora_take_no_memory_for_each_token(two_corpora, one_process):
    from megaenc.training.engine import sum_by_group
    from megaenc.training.micro_batches import TokenGroups, build_micro_batch

    plan = build_plan(parse_config(two_corpora, "test"))
    packs = plan.data.held_out
    own = TokenGroups.from_packs(packs)
    groups = TokenGroups(own.starts, (*map(str, range(2000)), *own.corpora))
    objective = plan.validation_objectives["clm"]
    batch = build_micro_batch(packs, [0, 1, 2], objective, 0, torch.device("cpu"), groups)
    tensors = [batch.tokens, batch.positions, batch.predict_at, batch.labels, batch.in_range]
    assert max(tensor.numel() for tensor in tensors) <= 3 * 192 * len(own.starts)
    losses = torch.arange(batch.labels.numel(), dtype=torch.float32)
    sums = sum_by_group(batch, losses)
    expected = np.zeros((2, len(groups)))
    at = 0
    for sample in range(3):
        targets = objective.targets(packs[sample], SampleRandomness(0, sample, packs[sample].epoch))
        for position in packs[sample].positions[targets.predict_at + 1].tolist():
            for group in (position >= 128, 2 + 2000 + packs.corpus_of_sample(sample)):
                expected[:, int(group)] += at, 1
            at += 1
    assert np.array_equal(sums.numpy(), expected)


@pytest.mark.multiprocess
def test_losses_by_group_are_the_same_in_every_layout(two_corpora, tmp_path):
    tensor, pipeline = ["--tensor-model-parallel-size", "2"], ["--pipeline-model-parallel-size", "2"]
    layouts = {"one": (1, []), "TP2 SP": (2, [*tensor, "--sequence-parallel"]), "PP2": (2, pipeline), "DP2": (2, [])}
    layouts |= {"TP2 PP2": (4, [*tensor, *pipeline])}
    short = [
        *two_corpora,
        "--eval-pseudo-perplexity-passes",
        "2",
        "--train-iters",
        "2",
        "--lr-warmup-iters",
        "0",
        "--lr-wsd-decay-iters",
        "0",
    ]
    jobs = [runs.Job(tmp_path / name, [*short, *flags], processes) for name, (processes, flags) in layouts.items()]
    runs.in_turn(jobs, tmp_path)
    reference = runs.validations(tmp_path / "one")[-1]["objectives"]
    for name in layouts:
        result = runs.validations(tmp_path / name)[-1]["objectives"]
        for objective in ("clm", "mlm", "pseudo_perplexity(passes=2)"):
            for kind in ("by_position", "by_corpus"):
                assert len(reference[objective][kind]) == 2
                assert result[objective][kind] == pytest.approx(reference[objective][kind], rel=1e-4), name


def exact_loss(encoder, packs, samples, vocabulary, shift):
    """Salazar et al.'s definition: of each token, the document without it, in a forward pass of its own."""
    total, count = 0.0, 0
    for pack in map(packs.__getitem__, range(samples)):
        for start, end in itertools.pairwise(pack.edges.tolist()):
            document = torch.from_numpy(pack.tokens[start:end])
            packing = PackedSequences.from_edges([0, len(document)], Attention.BIDIRECTIONAL, torch.device("cpu"))
            for at, token in enumerate(document.tolist()):
                if token in vocabulary.special_ids or at < shift:
                    continue
                hidden = document.clone()
                hidden[at] = vocabulary.mask_id
                with torch.no_grad():
                    logits = encoder(hidden[None], torch.arange(len(document)), packing, torch.tensor([at - shift]))
                total -= logits[0, : vocabulary.size].log_softmax(-1)[token].item()
                count += 1
    return total / count, count


def test_pseudo_perplexity_with_a_pass_for_each_token_is_the_exact_one(small_corpus, one_process):
    from megaenc.training.engine import Engine
    from megaenc.training.trainer import Validator

    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--seq-length", "40", "--global-batch-size", "4"]
    flags += ["--objective-schedule", "mntp", "--init-method-std", "0.4", "--eval-pseudo-perplexity-passes"]
    plan = build_plan(parse_config([*flags, "40"], "test"))
    engine, validator, passes = Engine(plan, one_process), Validator(plan), []
    result = validator(engine, before_pass=lambda: passes.append(len(passes)))["objectives"]
    assert len(passes) == 2 * 39
    [part] = validator.parts
    [encoder] = [chunk.module.eval() for chunk in engine.chunks]
    names = ["pseudo_perplexity(passes=40)", "pseudo_perplexity(passes=40,shift=1)"]
    assert list(result) == ["clm", "mlm", "mntp", *names]
    for shift, name in enumerate(names):
        loss, count = exact_loss(encoder, part.packs, part.samples, plan.vocabulary, shift)
        assert result[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result[name]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        labels = validator.objectives[name].parts
        packs = [part.packs[sample] for sample in range(part.samples)]
        predicted = [
            objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch)) for objective in labels for pack in packs
        ]
        counts = np.bincount(np.concatenate([targets.labels for targets in predicted]))
        assert counts.sum() == count and result[name]["most_frequent"] == counts.max() / count
    fewer = build_plan(parse_config([*flags, "2"], "test"))
    half_hidden = Validator(fewer)(engine)["objectives"]["pseudo_perplexity(passes=2)"]["loss"]
    assert half_hidden != pytest.approx(result[names[0]]["loss"], rel=1e-3)


def test_pseudo_perplexity_is_no_part_of_a_run(small_corpus):
    """So that a run begun without it can be resumed with it, and its held-out text stays that of others."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN]
    plain, measured = (
        build_plan(parse_config([*flags, *more], "test")) for more in ([], ["--eval-pseudo-perplexity-passes", "4"])
    )
    assert plain.identity == measured.identity
    assert list(measured.validation_objectives) == [*plain.validation_objectives, "pseudo_perplexity(passes=4)"]


def test_a_fixed_objective_replaces_those_of_the_schedule(small_corpus, tmp_path):
    """The rows have no other, and the run is the same; several are possible, in that order."""
    fixed = "mlm(mask=0.15,random=0.1,keep=0.1)"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--train-iters", "4", "--lr-warmup-iters", "1"]
    flags += ["--lr-wsd-decay-iters", "1", "--eval-interval", "2"]
    plans = {
        texts: build_plan(parse_config([*flags, *(["--valid-objective", *texts] if texts else [])], "test"))
        for texts in ((), (fixed,), ("mntp", "clm"))
    }
    assert [list(plan.validation_objectives) for plan in plans.values()] == [["clm", "mlm"], [fixed], ["mntp", "clm"]]
    assert len({json.dumps(plan.identity) for plan in plans.values()}) == 1
    main([*flags, "--save", str(tmp_path / "plain")])
    main([*flags, "--valid-objective", fixed, "--save", str(tmp_path / "fixed")])
    assert [list(row["objectives"]) for row in runs.validations(tmp_path / "fixed")] == [[fixed]] * 3
    assert runs.curve(tmp_path / "plain") == runs.curve(tmp_path / "fixed")


def test_a_fixed_objective_hides_fifteen_of_a_hundred_tokens(small_corpus):
    """Of these eight in ten become the mask token, one another token, and one stays."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--valid-objective", "mlm(mask=0.15,random=0.1,keep=0.1)"]
    plan = build_plan(parse_config(flags, "test"))
    [objective] = plan.validation_objectives.values()
    [packs] = plan.validation_packs(0).values()
    hidden, text = np.zeros(3), 0
    for pack in map(packs.__getitem__, range(32)):
        targets = objective.targets(pack, SampleRandomness(0, pack.sample, pack.epoch))
        inputs = targets.inputs[targets.predict_at]
        hidden += (inputs == plan.vocabulary.mask_id).sum(), (inputs == targets.labels).sum(), len(inputs)
        text += (~np.isin(pack.tokens, plan.vocabulary.special_ids)).sum()
    assert hidden[2] / text == pytest.approx(0.15, abs=0.02)
    assert hidden[:2] / hidden[2] == pytest.approx([0.8, 0.1], abs=0.06)
