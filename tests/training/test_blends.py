"""Runs on groups of corpora, with temperatures and limits of passes, by phase too."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
from training_helpers import make_corpus, plan_of
from workers.bad_packs import spoil

from megaenc.training.command import main
from megaenc.training.validation import Validator

SIZES = {"deu": 80, "ell": 40, "isl": 10}
TEMPERED = ["--blend-temperature", "0.5"]
LIMITED = ["--blend-max-epochs", "2"]


@pytest.fixture(scope="module")
def group(small_corpus, tmp_path_factory) -> list[str]:
    """Flags: six packs in ten from a group of three corpora, four from another corpus."""
    directory = tmp_path_factory.mktemp("languages")
    for seed, (name, documents) in enumerate(SIZES.items(), 2):
        make_corpus(directory / name, small_corpus.tokenizer, documents, seed)
    data_path = [
        "--data-path",
        "0.6",
        str(directory / "*_text_document"),
        "0.4",
        str(small_corpus.prefix),
    ]
    sizes = ["--seq-length", "64", "--global-batch-size", "16"]
    return [*data_path, "--tokenizer", str(small_corpus.tokenizer), "--split", "90,10,0", *sizes]


def group_shares(data, exponent):
    """Return each corpus's fraction of the group: its tokens to the power `exponent`."""
    tokens = (
        np.array([part.tokens_per_epoch for part in data.train_datasets[:3]], dtype=float)
        ** exponent
    )
    return tokens / tokens.sum()


@pytest.mark.parametrize(
    ("flags", "exponent"), [([], 1), (TEMPERED, 0.5), (["--blend-temperature", "0"], 0)]
)
def test_a_temperature_divides_the_weight_of_a_group(flags, exponent, group):
    plan = plan_of(*group, *flags, "--train-iters", "100")
    packs = {Path(row.prefix).name.split("_")[0]: row.packs for row in plan.corpus_usage}
    assert packs.pop("small") == pytest.approx(640, abs=2)
    assert list(packs) == list(SIZES)
    assert list(packs.values()) == pytest.approx(
        list(960 * group_shares(plan.data, exponent)), abs=2
    )


def test_another_temperature_or_limit_makes_another_run(group):
    def data(*flags):
        return plan_of(*group, "--train-iters", "4", *flags).identity["data"]

    told = data(*TEMPERED, *LIMITED)
    assert re.fullmatch("[0-9a-f]{24} of 4 corpora of at most 2 epochs", told)
    assert data("--blend-temperature", "0.4", *LIMITED) != told
    assert data(*TEMPERED, "--blend-max-epochs", "3") != told


def test_flags_without_effect_on_the_order_leave_the_identity(small_corpus):
    plain = plan_of(*small_corpus.flags, "--train-iters", "4")
    assert plain.identity == plan_of(*small_corpus.flags, "--train-iters", "4", *LIMITED).identity


def test_a_run_ends_before_all_corpora_do(group, refusal):
    """Steps count by --global-batch-size, and skipped packs count as read."""
    flags = [*group, *LIMITED, "--global-batch-size", "8", "--dry-run", "--train-iters"]
    samples = plan_of(*flags, "8").data.train.samples
    last = samples // 8
    assert plan_of(*flags, last).corpus_usage
    message = refusal(main, [*flags, last + 5])
    expected = (
        f"--blend-max-epochs 2: all corpora end after {samples:,} packs, "
        f"in step {last + 1:,} of {last + 5:,}"
    )
    assert (
        expected in message and f"expected a run or phase that ends with step {last:,}" in message
    )
    assert "in step" in refusal(main, [*flags, last, "--skip-packs", "3-12"])


def test_a_run_without_packs_to_spare_does_not_rewind(group, tmp_path, monkeypatch, capsys):
    """It could neither end nor resume then."""
    flags = [
        *group[:2],
        group[2].replace("*", "[ei]*"),
        "0.4",
        group[2].replace("*", "deu"),
        *group[5:],
        *LIMITED,
    ]
    flags += [*runs.SHORT_RUN, "--no-bf16", "--eval-interval", "0", "--objective-schedule", "clm"]
    batch = plan_of(*flags, "--train-iters", "20").data.train.samples // 40
    flags += [
        "--global-batch-size",
        str(batch),
        "--micro-batch-size",
        "8",
        "--train-iters",
        "40",
        "--max-rewinds",
        "1",
    ]
    spoil({36 * batch - 1: 30.0}, monkeypatch.setattr)
    main([*flags, "--rewind-skip-iters", "3", "--save", str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert (
        "step 36: no rewind, as the packs left would be too few: --blend-max-epochs 2: "
        "all corpora end after" in output
    )
    assert runs.metrics(tmp_path / "run")[-1]["step"] == 40
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rewinds"] == []


def test_phases_have_temperatures_and_limits_of_their_own(group):
    """Passes include those of earlier phases over packs of the same length."""
    phases = [
        {"objective": "mlm", "train_iters": 10, "blend_temperature": 0.7},
        {"objective": "mlm", "train_iters": 10, "blend_temperature": 0.3},
        {"objective": "mlm", "train_iters": 10, "blend_temperature": 0.3, "blend_max_epochs": 1},
    ]
    plan = plan_of(*group, "--phases", *map(json.dumps, phases))
    first = plan.data_at(1)
    second = plan.data_at(11)
    third = plan.data_at(21)
    for data, exponent in ((first, 0.7), (second, 0.3), (third, 0.3)):
        assert list(map(float, data.fractions[:3])) == pytest.approx(
            list(0.6 * group_shares(data, exponent))
        )
    # The smallest corpus has been read more than once before the last phase, which leaves it out.
    assert second.train_datasets[2].epochs_after(second.train.next_packs(320)[2]) > 1
    assert third.train.next_packs(320)[2] == third.train.next_packs(480)[2]


def test_a_corpus_that_phases_reach_by_other_paths_is_one(small_corpus, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{small_corpus.prefix}{suffix}", tmp_path / f"copy{suffix}")
    phases = [
        {"objective": "mlm", "train_iters": 10},
        {
            "objective": "mlm",
            "train_iters": 10,
            "data_path": [str(tmp_path / "copy")],
            "seq_length": 128,
        },
    ]
    options = [
        "--seq-length",
        "64",
        "--global-batch-size",
        "16",
        "--phases",
        *map(json.dumps, phases),
    ]
    [row] = plan_of(*small_corpus.flags, *options).corpus_usage
    assert (row.prefix, row.packs, row.share) == (str(tmp_path / "copy"), 320, 1)


def test_thousands_of_corpora_are_not_all_printed(group, capsys, monkeypatch):
    monkeypatch.setattr("megaenc.training.dry_run._TABLE_CORPORA", 2)
    monkeypatch.setattr("megaenc.training.callbacks.run_messages._HEADER_CORPORA", 2)
    monkeypatch.chdir(Path(group[2]).parent)  # short names fit the table
    relative = [
        "--data-path",
        "0.6",
        "*_text_document",
        "0.4",
        os.path.relpath(group[4]),
        *group[5:],
    ]
    flags = [*relative, *TEMPERED, *runs.SHORT_RUN, "--exit-interval", "1", "--eval-interval", "0"]
    main([*flags, "--dry-run"])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    first = lines.index("corpus share tokens packs epochs left out") + 2
    largest, second, rest = lines[first : first + 3]
    assert "small_text_document 40.00 %" in largest and second.startswith("deu_text_document")
    assert rest.startswith("... 2 smaller corpora, 0 without a pack ")
    main(flags)
    assert "; 2 smaller corpora" in capsys.readouterr().out


@pytest.mark.parametrize("batch", [8, 2000])
def test_held_out_text_of_a_group_is_read_once(batch, group):
    """This holds even if it is less than a batch."""
    options = ["--blend-temperature", "0", "--train-iters", "4", "--eval-iters", "1000"]
    [part] = Validator(plan_of(*group, *options, "--global-batch-size", batch)).parts
    assert part.packs.samples - batch < part.samples <= part.packs.samples
    assert part.packs[part.samples - 1].epoch == 0


def test_losses_of_a_group_are_those_of_one_corpus(group, engine_of):
    engine = engine_of(*group, *TEMPERED, *runs.SHORT_RUN)
    for scores in Validator(engine.plan)(engine)["objectives"].values():
        assert list(scores["by_corpus"]) == [group[2], group[4]]
