"""Runs on groups of corpora, with shares by a power of their size and a limit of passes, by phase too."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import runs
from workers.bad_packs import spoil

from megaenc.data.preprocess import command as preprocess
from megaenc.training.command import main
from megaenc.training.config import parse_config
from megaenc.training.planning import build_plan

SIZES = {"deu": 80, "ell": 40, "isl": 10}
TEMPERED = ["--blend-temperature", "0.5"]
LIMITED = ["--blend-max-epochs", "2"]


@pytest.fixture(scope="module")
def group(small_corpus, tmp_path_factory) -> list[str]:
    """Flags: six packs in ten from a group of three corpora, four from another corpus."""
    folder = tmp_path_factory.mktemp("languages")
    for seed, (name, documents) in enumerate(SIZES.items(), 2):
        text = runs.write_text(folder / f"{name}.jsonl", documents=documents, seed=seed)
        tokenizer = ["--tokenizer", str(small_corpus.tokenizer), "--append-eod"]
        preprocess.main(["--input", str(text), "--output-prefix", str(folder / name), *tokenizer])
    data_path = ["--data-path", "0.6", str(folder / "*_text_document"), "0.4", str(small_corpus.prefix)]
    return [*data_path, "--tokenizer", str(small_corpus.tokenizer), "--split", "90,10,0"]


def plan_of(*flags):
    return build_plan(parse_config([*map(str, flags)], "test"))


def packs_by_name(plan):
    """Packs that the run reads from each corpus, by the first part of its name."""
    return {row.prefix.split("/")[-1].split("_")[0]: row.packs for row in plan.corpus_usage}


def test_a_temperature_divides_the_weight_of_a_group(group):
    sizes = ["--seq-length", "64", "--train-iters", "100", "--global-batch-size", "16"]
    for flags, exponent in (([], 1), (TEMPERED, 0.5), (["--blend-temperature", "0"], 0)):
        plan = plan_of(*group, *sizes, *flags)
        tokens = np.array([part.tokens_per_epoch for part in plan.data.train_datasets[:3]], dtype=float)
        expected = 960 * tokens**exponent / (tokens**exponent).sum()
        packs = packs_by_name(plan)
        assert abs(packs.pop("small") - 640) <= 2
        assert list(packs) == list(SIZES) and np.abs(np.array(list(packs.values())) - expected).max() <= 2


@pytest.mark.parametrize("flags", [TEMPERED, LIMITED, [*TEMPERED, *LIMITED]], ids=["tempered", "limited", "both"])
def test_order_knows_nothing_of_the_length(flags, group):
    common = [*group, *flags, "--seq-length", "32", "--seed", "3"]
    short = plan_of(*common, "--train-iters", "10", "--global-batch-size", "8")
    long = plan_of(*common, "--train-iters", "100", "--global-batch-size", "12", "--objective-schedule", "mlm")
    for sample in range(0, 1200, 7):
        pack, other_pack = short.packs[sample], long.packs[sample]
        assert np.array_equal(pack.tokens, other_pack.tokens) and np.array_equal(pack.edges, other_pack.edges)


def test_a_run_resumes_and_branches_on_the_same_packs(group, tmp_path, refusal):
    """Bitwise; with another temperature or limit it is another run, without an effect the same."""
    flags = [*group, *TEMPERED, *LIMITED, *runs.SHORT_RUN, "--no-bf16", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "2"]
    main([*flags, "--train-iters", "8", "--save", str(tmp_path / "whole")])
    main([*flags, "--train-iters", "8", "--save", str(tmp_path / "run"), "--exit-interval", "4"])
    for other in (["--blend-temperature", "0.4"], ["--blend-max-epochs", "3"], ["--blend-temperature", "1"]):
        message = refusal(main, [*flags, "--train-iters", "8", "--save", tmp_path / "run", *other])
        assert re.search("holds a different run: data is [0-9a-f]{24} of 4 corpora of at most 2 epochs there", message)
    main([*flags, "--train-iters", "8", "--save", str(tmp_path / "run")])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    assert runs.validations(tmp_path / "run") == runs.validations(tmp_path / "whole")
    branch = [*flags, "--train-iters", "20", "--branch-from", tmp_path / "run", "--branch-at", 4]
    parent, longer = plan_of(*flags, "--train-iters", "8", "--save", tmp_path / "run"), plan_of(*branch)
    for sample in range(64):
        assert np.array_equal(parent.packs[sample].tokens, longer.packs[sample].tokens)
    assert "data is" in refusal(main, [*branch, "--blend-temperature", "0.4"])
    identity = json.loads((tmp_path / "run" / "run.json").read_text())["identity"]
    assert not [name for name in identity if name.startswith("blend")]


def test_flags_without_effect_on_the_order_leave_the_identity(small_corpus):
    plain, limited = (
        plan_of(*small_corpus.flags, "--train-iters", "4"),
        plan_of(*small_corpus.flags, "--train-iters", "4", *LIMITED),
    )
    assert plain.identity == limited.identity


def test_skipped_packs_move_the_others_up(group):
    flags = [*group, *TEMPERED, *LIMITED, "--seq-length", "64", "--global-batch-size", "8", "--train-iters", "9"]
    plain, skipping = plan_of(*flags), plan_of(*flags, "--skip-packs", "10-19")
    read = [skipping.sample_at(position) for position in range(72)]
    assert read == [*range(10), *range(20, 82)]
    assert all(np.array_equal(skipping.packs[sample].tokens, plain.packs[sample].tokens) for sample in read)
    assert sum(packs_by_name(skipping).values()) == 72


def test_a_run_ends_before_all_corpora_do(group, small_corpus, refusal):
    """The step is that of --global-batch-size; packs that are skipped count as read."""
    flags = [*group, *LIMITED, "--seq-length", "64", "--global-batch-size", "8"]
    samples = plan_of(*flags, "--train-iters", "8").data.train.samples
    last = samples // 8
    assert plan_of(*flags, "--train-iters", last).corpus_usage
    message = refusal(main, [*flags, "--train-iters", last + 5, "--dry-run"])
    expected = f"--blend-max-epochs 2: all corpora end after {samples:,} packs, in step {last + 1:,} of {last + 5:,}"
    assert expected in message and f"expected a run or phase that ends with step {last:,}" in message
    assert "in step" in refusal(main, [*flags, "--train-iters", last, "--skip-packs", "3-12", "--dry-run"])
    alone = [*small_corpus.flags, *LIMITED, "--train-iters", "100000", "--dry-run"]
    assert "all corpora end after" in refusal(main, alone)


def test_a_run_without_packs_to_spare_does_not_rewind(group, tmp_path, monkeypatch, capsys):
    """It could neither end nor resume then."""
    flags = [*group[:2], group[2].replace("*", "[ei]*"), "0.4", group[2].replace("*", "deu"), *group[5:], *LIMITED]
    flags += [*runs.SHORT_RUN, "--no-bf16", "--eval-interval", "0", "--objective-schedule", "clm"]
    batch = plan_of(*flags, "--train-iters", "20").data.train.samples // 40
    flags += ["--global-batch-size", str(batch), "--micro-batch-size", "8", "--train-iters", "40", "--max-rewinds", "1"]
    spoil({36 * batch - 1: 30.0}, monkeypatch.setattr)
    main([*flags, "--rewind-skip-iters", "3", "--save", str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert "step 36: no rewind, as the packs left would be too few: --blend-max-epochs 2: all corpora end after" in output
    assert runs.metrics(tmp_path / "run")[-1]["step"] == 40
    assert json.loads((tmp_path / "run" / "run.json").read_text())["rewinds"] == []


def test_phases_have_temperatures_and_limits_of_their_own(group):
    """The passes of a phase include those of earlier ones over packs of the same length."""
    phases = [
        {"objective": "mlm", "train_iters": 10, "blend_temperature": 0.7},
        {"objective": "mlm", "train_iters": 10, "blend_temperature": 0.3},
        {"objective": "mlm", "train_iters": 10, "blend_temperature": 0.3, "blend_max_epochs": 1},
    ]
    common = [*group, "--seq-length", "64", "--global-batch-size", "16", "--phases", *map(json.dumps, phases)]
    plan = plan_of(*common)
    parts = [plan.data_at(step) for step in (1, 11, 21)]
    for data, exponent in zip(parts, (0.7, 0.3, 0.3), strict=True):
        tokens = np.array([part.tokens_per_epoch for part in data.train_datasets[:3]], dtype=float) ** exponent
        assert np.allclose(list(map(float, data.shares[:3])), 0.6 * tokens / tokens.sum())
    # The smallest corpus has been read more than once before the last phase, which leaves it out.
    smallest = parts[1].train_datasets[2]
    assert smallest.epochs_after(parts[1].train.next_packs(320)[2]) > 1
    assert parts[2].train.next_packs(320)[2] == parts[2].train.next_packs(480)[2]
    assert [row["data"] for row in plan.identity["phases"]] == [data.fingerprint for data in parts]


def test_a_corpus_that_phases_reach_by_other_paths_is_one(small_corpus, tmp_path):
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{small_corpus.prefix}{suffix}", tmp_path / f"copy{suffix}")
    phases = [
        {"objective": "mlm", "train_iters": 10},
        {"objective": "mlm", "train_iters": 10, "data_path": [str(tmp_path / "copy")], "seq_length": 128},
    ]
    options = ["--seq-length", "64", "--global-batch-size", "16", "--phases", *map(json.dumps, phases)]
    [row] = plan_of(*small_corpus.flags, *options).corpus_usage
    assert (row.prefix, row.packs, row.share) == (str(tmp_path / "copy"), 320, 1)


def test_thousands_of_corpora_are_not_all_printed(group, capsys, monkeypatch):
    monkeypatch.setattr("megaenc.training.dry_run._TABLE_CORPORA", 2)
    monkeypatch.setattr("megaenc.training.dry_run._HEADER_CORPORA", 2)
    monkeypatch.chdir(Path(group[2]).parent)  # short names fit the table
    relative = ["--data-path", "0.6", "*_text_document", "0.4", os.path.relpath(group[4]), *group[5:]]
    flags = [*relative, *TEMPERED, *runs.SHORT_RUN, "--train-iters", "2", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1"]
    main([*flags, "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    first = lines.index(["corpus", "share", "tokens", "packs", "epochs", "left", "out"])
    assert [line[0].split("/")[-1] for line in lines[first + 2 : first + 4]] == ["small_text_document", "deu_text_document"]
    assert lines[first + 2][1:3] == ["40.00", "%"]
    rest = " ".join(lines[first + 4])
    assert rest.startswith("... 2 smaller corpora, 0 without a pack ") and "%" in rest
    main(flags)
    assert "; 2 smaller corpora" in capsys.readouterr().out


def test_held_out_text_of_a_group_is_read_once(group):
    """Also if it is less than a batch."""
    from megaenc.training.trainer import Validator

    options = ["--blend-temperature", "0", "--seq-length", "64", "--train-iters", "4", "--eval-iters", "1000"]
    for batch in (8, 2000):
        [part] = Validator(plan_of(*group, *options, "--global-batch-size", batch)).parts
        assert part.packs.samples - batch < part.samples <= part.packs.samples
        assert part.packs[part.samples - 1].epoch == 0


def test_losses_of_a_group_are_those_of_one_corpus(group, one_process):
    from megaenc.training.engine import Engine
    from megaenc.training.trainer import Validator

    plan = plan_of(*group, *TEMPERED, *runs.SHORT_RUN)
    result = Validator(plan)(Engine(plan, one_process))["objectives"]
    assert all(list(scores["by_corpus"]) == [group[2], group[4]] for scores in result.values())
