"""Skipped packs: all others are read in the same order."""

import itertools
import json

import pytest
import runs
from training_helpers import plan_of
from workers.bad_packs import spoil

from megaenc.counter_rng import uniforms
from megaenc.errors import InputError
from megaenc.training.command import main
from megaenc.training.skip_policy import plan_after_rewind
from megaenc.training.skip_ranges import SkippedPacks

RUN = [
    *runs.SHORT_RUN,
    "--no-bf16",
    "--train-iters",
    "12",
    "--lr-wsd-decay-iters",
    "2",
    "--eval-interval",
    "0",
]


def random_packs(seed: int) -> SkippedPacks:
    """Return up to six ranges of up to eight samples, among the first 60."""
    draws = uniforms(seed, "skipped", 13)
    ranges = [
        (int(60 * a), int(60 * a) + int(8 * b))
        for a, b in zip(draws[1::2], draws[2::2], strict=True)
    ]
    return SkippedPacks.from_ranges(ranges[: int(7 * draws[0])])


def read(packs: SkippedPacks, first: int) -> list[int]:
    """Return the samples from `first` on that are not skipped."""
    left_out = {sample for start, last in packs.ranges for sample in range(start, last + 1)}
    return [sample for sample in range(first, 200) if sample not in left_out][:60]


@pytest.mark.parametrize("seed", range(20))
def test_samples_are_those_that_are_not_left_out_in_order(seed):
    packs = random_packs(seed)
    other_packs = random_packs(seed + 1000) if seed % 2 else packs | SkippedPacks(((44, 45),))
    for first in (0, 17, 40, 70):
        samples = read(packs, first)
        assert [packs.sample_at(first, position) for position in range(60)] == samples
        assert [packs.end_sample(first, count) for count in range(61)] == [
            first,
            *(sample + 1 for sample in samples),
        ]
        for count in range(60):
            same = samples[:count] == read(other_packs, first)[:count]
            assert (
                packs.reads_same(other_packs, first, count)
                == other_packs.reads_same(packs, first, count)
                == same
            )
    assert packs.clip(10, 30).pack_count == 20 - len(
        [sample for sample in read(packs, 10) if sample < 30]
    )
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(packs.ranges))
    assert SkippedPacks.parse(packs.texts) == packs


def test_texts_are_put_in_order_and_what_is_no_range_is_refused():
    assert SkippedPacks.parse(["9", "3-5", "6", "20-30", "25-27"]).texts == ("3-6", "9", "20-30")
    for text in ("5-3", "a", "-4", "3-", "1,2", ""):
        with pytest.raises(InputError, match="expected the number of a pack"):
            SkippedPacks.parse([text])


def test_plan_counts_on_over_what_is_left_out(small_corpus):
    plan = plan_of(*small_corpus.flags, *RUN, "--skip-packs", "10", "12-13", "--skip-samples", "4")
    assert [plan.first_sample(step) for step in (1, 2, 3)] == [4, 15, 23]
    assert [plan.sample_at(position) for position in range(9)] == [4, 5, 6, 7, 8, 9, 11, 14, 15]
    assert [row.packs for row in plan.corpus_usage] == [96]


@pytest.mark.parametrize(
    ("checkpoint_steps", "packs"),
    [((), "0-71"), ((6,), "48-71"), ((9, 3), "24-71"), ((8,), "64-71")],
)
def test_a_rewind_skips_the_window_from_the_start_or_the_earliest_checkpoint(
    checkpoint_steps, packs, small_corpus
):
    plan = plan_of(*small_corpus.flags, *RUN, "--rewind-skip-iters", "20")
    assert plan_after_rewind(plan, 9, checkpoint_steps).rewinds == (packs,)


def test_a_rewind_skips_only_the_window(small_corpus):
    plan = plan_of(*small_corpus.flags, *RUN, "--rewind-skip-iters", "2", "--skip-packs", "50")
    rewound_plan = plan_after_rewind(plan, 9, [3])
    assert rewound_plan.rewinds == ("57-72",)
    assert rewound_plan.skipped.texts == ("50", "57-72")


@pytest.fixture(scope="module")
def without(small_corpus, tmp_path_factory):
    """All 12 steps with pack 37 of step 5 and packs 80 to 83 skipped from the start."""
    directory = tmp_path_factory.mktemp("without") / "run"
    flags = [
        *small_corpus.flags,
        *RUN,
        "--skip-packs",
        "37",
        "80-83",
        "--save",
        str(directory),
        "--save-interval",
        "3",
    ]
    main(flags)
    return directory


def test_the_pack_that_was_named_is_left_out_and_the_run_goes_on(
    small_corpus, without, tmp_path, monkeypatch, capfd, refusal
):
    """Without the flag a resumed run keeps skipping the same packs."""
    directory = tmp_path / "run"
    flags = [*small_corpus.flags, *RUN, "--save", str(directory), "--save-interval", "3"]
    spoil({37: "loss"}, monkeypatch.setattr)
    line = refusal(main, [*flags, "--max-skipped-updates", "0"])
    assert "step 5: loss is NaN or infinite, from pack 37 " in line
    assert "with --skip-packs 37" in line
    main([*flags, "--skip-packs", "37", "--exit-interval", "6"])
    assert "resuming after step 3" in capfd.readouterr().out
    # What has been read cannot be chosen anew; what has not, can.
    line = refusal(main, [*flags, "--skip-packs", "36-37"])
    assert "skip_packs is 37 there, 36-37 here; expected the same --skip-packs" in line
    assert "skip_packs is 37 there, not given here" in refusal(
        main, [*flags, "--skip-packs", "none"]
    )
    main([*flags, "--skip-packs", "80-83", "37", "--exit-interval", "8"])
    output = capfd.readouterr().out
    assert "resuming after step 6" in output
    assert "; 5 packs left out: 37 80-83" in output
    main(flags)
    assert runs.curve(directory) == runs.curve(without)
    runs.assert_same_weights(directory, without, 12)
    assert json.loads((directory / "run.json").read_text())["skip_packs"] == ["37", "80-83"]


def test_a_branch_leaves_out_what_its_parent_does(small_corpus, without, tmp_path, refusal):
    start = ["--branch-from", str(without), "--branch-at", "6"]
    flags = [*small_corpus.flags, *RUN, *start]
    main([*flags, "--save", str(tmp_path / "run")])
    assert runs.curve(tmp_path / "run") == runs.curve(without, after=6)
    line = refusal(main, [*flags, "--skip-packs", "80-83", "--save", tmp_path / "other"])
    assert "--branch-at 6: skip_packs is 37 80-83 there, 80-83 here" in line
    assert plan_of(*flags, "--skip-packs", "37").first_sample(12) == 8 * 11 + 1
    plan = plan_of(*flags, "--rewind-skip-iters", "20")
    assert plan_after_rewind(plan, 8, ()).rewinds == ("49-64",)


def test_new_data_begin_after_what_the_parent_has_read(small_corpus, without):
    flags = [*small_corpus.flags, *RUN, "--init-from", without, "--skip-samples", "parent"]
    plan = plan_of(*flags, "--init-at", 3)
    assert (plan.start.skip_samples, plan.skipped.ranges) == (24, ())
    plan = plan_of(*flags)
    assert (plan.start.skip_samples, plan.start.before[0].tokens) == (12 * 8 + 5, 12 * 8 * 64)
