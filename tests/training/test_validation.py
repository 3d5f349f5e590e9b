"""Validation with the same questions in every run, so that curves are comparable."""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import runs
import torch
import torch.nn.functional as F
from objectives.objective_helpers import VOCABULARY
from training_helpers import plan_of

from megaenc.counter_rng import SampleRandomness
from megaenc.model.linear_cross_entropy import Predictions
from megaenc.model.packed_sequences import PackedSequences
from megaenc.objectives import Attention, Schedule
from megaenc.training import micro_batches
from megaenc.training.command import main
from megaenc.training.micro_batches import TokenGroups, build_micro_batch
from megaenc.training.plan import validation_objectives
from megaenc.training.validation import Validator

FIXED = "mlm(mask=0.15,random=0.1,keep=0.1)"


@pytest.mark.parametrize(
    ("schedule", "texts"),
    [
        ("clm", ["clm", "mlm"]),
        ("mlm(mask=0.4->0.15)", ["clm", "mlm", "mlm(mask=0.15)"]),
        ("mix(mntp:1,clm:1):1.0", ["clm", "mlm", "mntp"]),
    ],
)
def test_clm_and_mlm_are_always_among_the_questions(schedule, texts):
    assert (
        list(validation_objectives(Schedule.build(schedule, 100, VOCABULARY), VOCABULARY)) == texts
    )


def test_without_a_mask_token_there_is_no_mlm():
    maskless = replace(VOCABULARY, mask_id=None)
    assert list(validation_objectives(Schedule.build("clm", 100, maskless), maskless)) == ["clm"]


@pytest.mark.parametrize(
    ("change", "rows"),
    [([], 10), (["--objective-schedule", "600x(clm:1,mlm:1)"], 1), (["--log-interval", "7"], 7)],
)
def test_rows_of_metrics_show_every_phase(change, rows, short_run):
    assert plan_of(*short_run, "--train-iters", "1200", *change).log_interval == rows


def test_runs_that_share_nothing_but_the_data_are_asked_the_same(short_run, tmp_path):
    """Before step 1 runs of any objective, packing and micro-batch score the same."""
    first = [*short_run, "--exit-interval", "1", "--save"]
    main([*first, str(tmp_path / "one"), "--objective-schedule", "mlm(mask=0.2)"])
    main([*first, str(tmp_path / "other"), "--packing", "random-length", "--micro-batch-size", "4"])
    [one] = runs.validations(tmp_path / "one")
    [other] = runs.validations(tmp_path / "other")
    assert one["held_out"] == other["held_out"]  # the same text, and it says so
    for objective, expected in other["objectives"].items():
        actual = one["objectives"][objective]
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert actual["most_frequent"] == expected["most_frequent"]
    # Curves may be plotted over any of these.
    assert one.keys() >= {
        "step",
        "tokens",
        "predicted_tokens",
        "flops",
    }


@pytest.fixture
def two_corpora(blend):
    """Flags of a run on two corpora in packs of two ranges of positions."""
    return [
        *blend,
        *runs.SHORT_RUN,
        "--split",
        "60,40,0",
        "--no-bf16",
        "--seq-length",
        "192",
        "--eval-iters",
        "2",
    ]


def by_single_tokens(encoder, packs, samples, objective):
    """Return [summed loss, tokens] by group from the logits of one pack at a time.

    The first range has 16 positions.
    """
    sums = defaultdict(lambda: np.zeros(2))
    for sample in range(samples):
        pack = packs[sample]
        batch = build_micro_batch(packs, [sample], objective, 0, torch.device("cpu"))
        with torch.no_grad():
            predictions = Predictions(batch.predictions.positions)
            logits = encoder(batch.tokens, batch.positions, batch.packing, predictions)
        logits = logits[:, : objective.vocabulary.size]
        losses = F.cross_entropy(logits, batch.predictions.labels, reduction="none").tolist()
        predict_at = objective.targets(
            pack, SampleRandomness(0, pack.sample, pack.epoch)
        ).predict_at
        for loss, position_index, label in zip(
            losses, predict_at.tolist(), batch.predictions.labels, strict=True
        ):
            token = position_index + objective.shift
            assert pack.tokens[token] == label
            position = token - max(edge for edge in pack.cu_seqlens.tolist() if edge <= token)
            low = 0
            high = 15
            while position > high:
                low = high + 1
                high += low
            corpus = packs.sources[packs.corpus_of_sample(sample)]
            for group in ("all", f"{low}-{high}", corpus):
                sums[group] += loss, 1
    return sums


def test_losses_by_position_and_corpus_are_those_of_the_single_tokens(
    two_corpora, engine_of, monkeypatch
):
    monkeypatch.setattr(micro_batches, "FIRST_RANGE", 16)
    engine = engine_of(*two_corpora, "--objective-schedule", "mntp")
    validator = Validator(engine.plan)
    result = validator(engine)["objectives"]
    [part] = validator.parts
    [encoder] = [chunk.module for chunk in engine.chunks]
    assert list(result) == ["clm", "mlm", "mntp"]
    for text, objective in validator.objectives.items():
        sums = by_single_tokens(encoder, part.packs, part.samples, objective)
        expected = {group: loss / count for group, (loss, count) in sums.items()}
        assert result[text]["loss"] == pytest.approx(expected.pop("all"), rel=1e-6)
        assert result[text]["by_position"] | result[text]["by_corpus"] == pytest.approx(
            expected, rel=1e-6
        )
        assert list(result[text]["by_corpus"]) == [
            corpus.prefix for corpus in engine.plan.data.corpora
        ]
        assert list(result[text]["by_position"]) == ["0-15", "16-31", "32-63", "64-127", "128-255"]


def test_one_range_and_one_corpus_are_not_told_apart(short_run, engine_of):
    """Losses by group would repeat the loss; a corpus without held-out text has none."""
    engine = engine_of(*short_run)
    for scores in Validator(engine.plan)(engine)["objectives"].values():
        assert scores.keys() == {"loss", "accuracy", "most_frequent"}
    groups = TokenGroups((0, 128, 256), ("a", "b"))
    sums = np.array([[6.0, 8.0, 0.0, 14.0, 0.0], [2, 4, 0, 6, 0]])
    assert groups.mean_losses(sums) == {"by_position": {"0-127": 3.0, "128-255": 2.0}}


def test_thousands_of_corpora_take_no_memory_for_each_token(two_corpora):
    plan = plan_of(*two_corpora)
    held_out_groups = TokenGroups.from_packs(plan.data.held_out)
    groups = TokenGroups(held_out_groups.starts, (*map(str, range(2000)), *held_out_groups.corpora))
    objective = plan.validation_objectives["clm"]
    batch = build_micro_batch(
        plan.data.held_out, [0, 1, 2], objective, 0, torch.device("cpu"), groups
    )
    assert batch.in_range.numel() <= 3 * 192 * len(held_out_groups.starts)
    assert len(batch.corpus_spans) == 3


def exact_loss(encoder, packs, samples, vocabulary, shift):
    """Return Salazar et al.'s loss: each token is predicted in a pass of its own."""
    total = 0.0
    tokens = []
    for pack in map(packs.__getitem__, range(samples)):
        for start, end in itertools.pairwise(pack.cu_seqlens.tolist()):
            document = torch.from_numpy(pack.tokens[start:end])
            packing = PackedSequences.from_cu_seqlens(
                [0, len(document)], Attention.BIDIRECTIONAL, torch.device("cpu")
            )
            for token_index, token in enumerate(document.tolist()):
                if token in vocabulary.special_ids or token_index < shift:
                    continue
                tokens.append(token)
                hidden = document.clone()
                hidden[token_index] = vocabulary.mask_id
                with torch.no_grad():
                    logits = encoder(
                        hidden[None],
                        torch.arange(len(document)),
                        packing,
                        Predictions(torch.tensor([token_index - shift])),
                    )
                total -= logits[0, : vocabulary.size].log_softmax(-1)[token].item()
    return total / len(tokens), tokens


def test_pseudo_perplexity_with_a_pass_for_each_token_is_the_exact_one(short_run, engine_of):
    flags = [*short_run, "--seq-length", "40", "--global-batch-size", "4"]
    flags += [
        "--objective-schedule",
        "mntp",
        "--init-method-std",
        "0.4",
        "--eval-pseudo-perplexity-passes",
    ]
    engine = engine_of(*flags, "40")
    validator = Validator(engine.plan)
    passes = []
    result = validator(engine, before_pass=lambda: passes.append(1))["objectives"]
    assert len(passes) == 2 * 39
    [part] = validator.parts
    [encoder] = [chunk.module.eval() for chunk in engine.chunks]
    names = ["pseudo_perplexity(passes=40)", "pseudo_perplexity(passes=40,shift=1)"]
    assert list(result) == ["clm", "mlm", "mntp", *names]
    for shift, name in enumerate(names):
        loss, tokens = exact_loss(encoder, part.packs, part.samples, engine.plan.vocabulary, shift)
        assert result[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert result[name]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert result[name]["most_frequent"] == max(Counter(tokens).values()) / len(tokens)
    half_hidden = Validator(plan_of(*flags, "2"))(engine)["objectives"][
        "pseudo_perplexity(passes=2)"
    ]["loss"]
    assert half_hidden != pytest.approx(result[names[0]]["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--eval-pseudo-perplexity-passes", "4"], ["clm", "mlm", "pseudo_perplexity(passes=4)"]),
        (["--valid-objective", FIXED], [FIXED]),
        (["--valid-objective", "mntp", "clm"], ["mntp", "clm"]),
    ],
)
def test_what_is_validated_is_no_part_of_a_run(flags, texts, short_run):
    """A run that began without validation can be resumed with it."""
    plain = plan_of(*short_run)
    asked = plan_of(*short_run, *flags)
    assert asked.identity == plain.identity
    assert list(asked.validation_objectives) == texts
