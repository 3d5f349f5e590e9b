"""Phases with data, lengths, batches, rotary bases and rates of their own."""

import json
import math

import board_helpers
import numpy as np
import pytest
import runs
import torch
from training_helpers import make_corpus, plan_of

from megaenc.convert.to_hf import to_hf
from megaenc.data.indexed.corpus import split_documents
from megaenc.data.packing.packed_dataset import RandomLengthPackedDataset
from megaenc.errors import InputError
from megaenc.training.checkpoint_dir import CheckpointDir
from megaenc.training.command import main
from megaenc.training.config import PretrainConfig, parse_config
from megaenc.training.phases import build_learning_rate
from megaenc.training.validation import Validator

SHAPE = [
    *runs.SHORT_RUN[:10],
    "--seq-length",
    "64",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--lr",
    "3e-3",
]
SHAPE += ["--no-bf16", "--eval-iters", "1", "--eval-interval", "3", "--lr-warmup-iters", "1"]
FIXED = "mlm(mask=0.15,random=0.1,keep=0.1)"


@pytest.fixture(scope="module")
def whole_run(three_phases, tmp_path_factory):
    """The nine steps without a stop, with checkpoints before and after a phase begins."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    main([*three_phases, "--save", str(directory), "--save-steps", "4", "--keep-last", "1"])
    return directory


@pytest.fixture(scope="module")
def named_sets(three_phases, small_corpus, tmp_path_factory):
    """Flags of the three phases with a fixed objective and two named sets.

    One is a corpus that is trained on.
    """
    directory = tmp_path_factory.mktemp("third")
    other = make_corpus(directory / "c", small_corpus.tokenizer, 40, seed=2)
    sets = [f"own={small_corpus.prefix}", f"other={other}"]
    return [
        *three_phases,
        "--eval-iters",
        "2",
        "--valid-data-path",
        *sets,
        "--valid-objective",
        FIXED,
    ]


@pytest.fixture(scope="module")
def named_run(named_sets, tmp_path_factory):
    """The nine steps, validated on named sets."""
    directory = tmp_path_factory.mktemp("named") / "run"
    main([*named_sets, "--save", str(directory), "--tensorboard-dir", str(directory / "board")])
    return directory


def test_each_phase_reads_its_own_packs(whole_run):
    rows = runs.metrics(whole_run)
    assert [row["tokens"] for row in rows] == [
        1024,
        2048,
        3072,
        *range(3072 + 2048, 3072 + 7 * 2048, 2048),
    ]
    assert [row["objective"] for row in rows[::3]] == [
        "mlm(mask=0.3)",
        "mlm(mask=0.15)",
        "mlm(mask=0.05)",
    ]
    decay = [3e-3 * (1 - math.sqrt(part / 3)) for part in range(3)]
    assert [row["learning_rate"] for row in rows] == pytest.approx([1.5e-3, *[3e-3] * 5, *decay])
    reading = json.loads((whole_run / "run.json").read_text())["reading"]
    assert sorted(row["packs"] for row in reading) == [5 + 6 + 12, 19 + 6]


def test_the_last_step_of_each_phase_is_saved_and_kept(whole_run):
    assert CheckpointDir(whole_run / "checkpoints").steps() == [3, 4, 6, 9]


@pytest.mark.parametrize(
    ("flags", "kept", "text"),
    [
        ([], {3, 4, 6}, "checkpoints: 6, of which 6 stay"),
        (["--keep-last", "1"], {3, 4, 6}, "checkpoints: 6, of which 4 stay"),
        (["--keep-every", "4"], {3, 4, 6}, "checkpoints: 6, of which 5 stay"),
        (["--keep-last", "1", "--no-save-phase-ends"], {4}, "checkpoints: 5, of which 2 stay"),
    ],
)
def test_the_dry_run_counts_the_checkpoints_that_stay(flags, kept, text, three_phases, capfd):
    flags = [*three_phases, "--save", "run", "--save-steps", "4", "--save-interval", "2", *flags]
    main([*flags, "--dry-run"])
    assert text in capfd.readouterr().out.splitlines()
    assert plan_of(*flags).settings.kept_steps == kept


def test_a_corpus_continues_where_an_earlier_phase_stopped(small_corpus, second_corpus):
    """This holds for packs of one length, in another blend and after skipped packs."""
    first = str(small_corpus.prefix)
    phases = [
        {"objective": "mlm", "train_iters": 3, "data_path": first},
        {"objective": "clm", "train_iters": 4, "data_path": [0.5, second_corpus, 0.5, first]},
        {"objective": "clm", "train_iters": 4, "data_path": first},
    ]
    sizes = [
        "--seq-length",
        "64",
        "--global-batch-size",
        "16",
        "--micro-batch-size",
        "8",
        "--skip-packs",
        "10-19",
    ]
    plan = plan_of(
        "--tokenizer", small_corpus.tokenizer, *sizes, "--phases", *map(json.dumps, phases)
    )
    alone = plan_of(*small_corpus.flags, "--seq-length", "64", "--split", "99,1,0").packs
    expected = iter([*range(10), *range(20, 154)])
    for step in range(1, 12):
        data = plan.data_at(step)
        for position in range(plan.samples_read(step - 1), plan.samples_read(step)):
            sample = plan.sample_at(position)
            if data.corpora[data.train.corpus_of_sample(sample)].prefix == first:
                assert np.array_equal(data.train[sample].tokens, alone[next(expected)].tokens)
    assert not list(expected)


def test_packing_may_change_by_phase(small_corpus, capfd, monkeypatch):
    """Each packing continues where it stopped, as in a run that has only this packing."""
    monkeypatch.setattr(RandomLengthPackedDataset, "dropped", 0.3)
    flags = [*small_corpus.flags, "--seq-length", "64", "--global-batch-size", "8"]
    packings = ["concat", "random-length", "concat"]
    phases = [{"objective": "mlm", "train_iters": 2, "packing": packing} for packing in packings]
    plan = plan_of(*flags, "--phases", *map(json.dumps, phases))
    alone = {name: plan_of(*flags, "--packing", name).packs for name in packings}
    expected = [("concat", 0), ("random-length", 0), ("concat", 16)]
    for phase, (packing, first) in enumerate(expected):
        data = plan.data_at(2 * phase + 1)
        for sample in range(16):
            pack = data.train[16 * phase + sample]
            assert np.array_equal(pack.tokens, alone[packing][first + sample].tokens)
    assert [row["packing"] for row in plan.identity["phases"]] == packings
    assert plan.corpus_usage[0].dropped == pytest.approx(0.1, rel=0.1)  # a third of the run
    main([*flags, "--phases", *map(json.dumps, phases), "--dry-run"])
    printed = capfd.readouterr().out
    assert "of 64 tokens (concat, random-length)" in printed
    rows = [
        line.split() for line in printed.splitlines() if line.split()[:1] in (["phase"], ["mlm"])
    ]
    assert [row[-1] for row in rows] == ["packing", *packings, "%)"]


def test_phases_that_differ_only_in_objectives_are_the_schedule(small_corpus):
    flags = [*small_corpus.flags, *SHAPE]
    phases = [
        "--phases",
        "{objective: clm, train_iters: 6}",
        "{objective: mlm, train_tokens: 2048}",
    ]
    schedule = ["--objective-schedule", "clm:6,mlm:4", "--train-iters", "10"]
    assert plan_of(*flags, *phases).identity == plan_of(*flags, *schedule).identity


def test_stops_in_any_phase_and_named_sets_change_nothing(
    named_sets, named_run, whole_run, tmp_path
):
    main([*named_sets, "--save", str(tmp_path / "run"), "--exit-interval", "2"])
    for _ in range(4):
        main(["--config", str(tmp_path / "run" / "config.yaml")])
    assert runs.curve(tmp_path / "run") == runs.curve(whole_run)
    assert runs.validations(tmp_path / "run") == runs.validations(named_run)


def test_each_phase_is_validated_on_its_own_held_out_text(whole_run):
    """Packs have its length, and no validated position was trained on."""
    rows = runs.validations(whole_run)
    assert [row["step"] for row in rows] == [0, 3, 6, 9]
    texts = [row["held_out"] for row in rows]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    for row in rows:
        for scores in row["objectives"].values():
            # In shorter packs all positions are in the first range.
            assert ("by_position" in scores) == (row["step"] > 3)
            assert ("by_corpus" in scores) == (row["step"] < 9)


def test_the_validation_of_a_phase_is_that_of_a_run_without_phases(
    three_phases, whole_run, second_corpus, tmp_path
):
    """The scores of the last weights are equal bit by bit."""
    common = three_phases[three_phases.index("--tokenizer") :]
    flags = [
        *common,
        "--rotary-base",
        "40000",
        "--objective-schedule",
        "mlm(mask=0.05)",
        "--train-iters",
        "9",
    ]
    flags += ["--data-path", second_corpus, "--seq-length", "512", "--global-batch-size", "4"]
    flags += ["--micro-batch-size", "1"]
    main(
        [
            *flags,
            "--init-from",
            str(whole_run),
            "--save",
            str(tmp_path / "last"),
            "--exit-interval",
            "1",
        ]
    )
    alone = runs.validations(tmp_path / "last")[0]
    phased = runs.validations(whole_run)[-1]
    assert alone["held_out"] == phased["held_out"]
    for name, scores in alone["objectives"].items():
        assert scores == phased["objectives"][name]


def test_named_sets_have_the_same_text_in_all_phases(named_sets, named_run):
    """The sets are one corpus's held-out documents and another corpus as a whole."""
    plan = plan_of(*named_sets)
    own_set, other_set = plan.validation_sets
    assert own_set.documents.tolist() == split_documents(300, (90, 10, 0))[1].tolist()
    assert other_set.documents.tolist() == list(range(40))
    for short, long in zip(Validator(plan, 1).parts, Validator(plan, 9).parts, strict=True):
        texts = [
            [part.packs[sample].tokens for sample in range(part.samples)] for part in (short, long)
        ]
        assert [len(packs[0]) for packs in texts] == [128, 512]
        short_text, long_text = map(np.concatenate, texts)
        assert np.array_equal(short_text, long_text) and len(short_text) == 2 * 8 * 128
    rows = runs.validations(named_run)
    assert [row["step"] for row in rows] == [0, 3, 6, 9]
    assert len({row["held_out"] for row in rows}) == 2  # the two lengths
    _, shown = board_helpers.tensorboard_shows(named_run / "board")
    for name in (f"own/{FIXED}", f"other/{FIXED}"):
        assert shown[f"validation/{name}/loss"] == {
            row["step"]: row["objectives"][name]["loss"] for row in rows
        }
    assert not plan_of(*named_sets, "--eval-interval", "0").validation_sets


def test_validations_have_the_micro_batches_of_their_phase(small_corpus, engine_of, monkeypatch):
    """They are two batches of 8 packs in rows of 4, then of 3 packs in rows of one."""
    phases = [
        {"objective": "mlm", "train_iters": 2, "micro_batch_size": 4},
        {
            "objective": "mlm",
            "train_iters": 2,
            "seq_length": 128,
            "global_batch_size": 3,
            "micro_batch_size": 1,
        },
    ]
    flags = [*small_corpus.flags, *SHAPE, "--eval-iters", "2", "--valid-objective", "clm"]
    engine = engine_of(*flags, "--phases", *map(json.dumps, phases))
    rows = []
    list_specs = engine._list_specs

    def record(packs, samples, *arguments, **options):
        rows.append([len(row) for row in samples])
        return list_specs(packs, samples, *arguments, **options)

    monkeypatch.setattr(engine, "_list_specs", record)
    for step in (2, 3):
        Validator(engine.plan, step)(engine)
    assert rows == [[4, 4]] * 2 + [[1, 1, 1]] * 2


def test_a_phase_without_held_out_text_is_not_validated(small_corpus, tmp_path):
    """Of one document none is held out; the other phase has its rows."""
    one = make_corpus(tmp_path / "one", small_corpus.tokenizer, 1)
    phases = [
        {"objective": "clm", "train_iters": 1, "data_path": one},
        {"objective": "clm", "train_iters": 2, "data_path": str(small_corpus.prefix)},
    ]
    flags = [
        "--tokenizer",
        str(small_corpus.tokenizer),
        *SHAPE,
        "--eval-interval",
        "1",
        "--phases",
        *map(json.dumps, phases),
    ]
    main([*flags, "--save", str(tmp_path / "run")])
    assert [row["step"] for row in runs.validations(tmp_path / "run")] == [2, 3]


def test_a_dry_run_shows_each_phase_and_what_is_validated_on(
    three_phases, named_sets, small_corpus, capsys
):
    main([*three_phases, "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert any("9 steps of 4 to 8 packs of 128 to 512 tokens" in line for line in lines)
    rows = [line.split() for line in lines if line.startswith("  mlm") and " to " in line]
    assert [row[-4:] for row in rows] == [
        ["8", "128", "10,000", "2"],
        ["4", "512", "40,000", "2"],
        ["4", "512", "40,000", "1"],
    ]
    assert lines[-1].startswith(
        "validation: every 3 steps on the held-out text of each phase, "
        "in packs of the phase's length, under "
    )
    main([*named_sets, "--dry-run"])
    named = capsys.readouterr().out.splitlines()[-1]
    assert (
        f"on own (held-out documents of {small_corpus.prefix}), other (all documents of " in named
    )
    assert named.endswith(f", in packs of the phase's length, under {FIXED}")


@pytest.mark.parametrize(("step", "base", "context"), [(3, 10000.0, 128), (4, 40000.0, 512)])
def test_an_export_has_the_rotary_base_and_length_of_its_phase(
    whole_run, step, base, context, tmp_path
):
    to_hf(whole_run, tmp_path / "hf", step=step)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]) == (
        base,
        context,
    )


def test_a_branch_changes_phases_after_its_step(small_corpus, tmp_path, refusal):
    """A run without phases gets one with longer packs; earlier phases are fixed."""
    flags = [*small_corpus.flags, *SHAPE]
    main(
        [
            *flags,
            "--objective-schedule",
            "mlm",
            "--train-iters",
            "8",
            "--save",
            str(tmp_path / "parent"),
            "--exit-interval",
            "3",
        ]
    )
    start = ["--branch-from", str(tmp_path / "parent"), "--branch-at", "3"]
    longer = "{objective: mlm, train_iters: 2, seq_length: 128, rotary_base: 50000}"
    phases = ["--phases", "{objective: mlm, train_iters: 3}", longer]
    main([*flags, *phases, *start, "--save", str(tmp_path / "run")])
    main([*flags, *phases, "--save", str(tmp_path / "whole")])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole", after=3)
    runs.assert_same_weights(tmp_path / "run", tmp_path / "whole", 5)
    line = refusal(main, [*flags, "--phases", "{objective: mlm, train_iters: 2}", longer, *start])
    assert (
        "rotary_base is 10000.0 there, 50000.0 here at step 3" in line
        and "the first of `phases`" in line
    )


def test_a_learning_rate_flag_gives_each_phase_a_schedule():
    phases = [
        {"objective": "mlm", "train_iters": 10, "lr_warmup_iters": 2, "lr_decay_style": "constant"},
        {"objective": "mlm", "train_iters": 4, "lr": 1e-3, "lr_decay_style": "constant"},
        {
            "objective": "mlm",
            "train_iters": 4,
            "lr": 1e-3,
            "lr_wsd_decay_fraction": 1.0,
            "lr_wsd_decay_style": "minus_sqrt",
        },
    ]
    flags = ["--lr", "4e-3", "--lr-warmup-iters", "0", "--phases", *map(json.dumps, phases)]
    rate = build_learning_rate(parse_config(flags, "test"))
    expected = [
        2e-3,
        *[4e-3] * 9,
        *[1e-3] * 4,
        *(1e-3 * (1 - math.sqrt(part / 4)) for part in range(4)),
    ]
    assert [rate(step) for step in range(1, 19)] == pytest.approx(expected)
    assert rate.describe().count("; then ") == 2


def test_a_file_with_phases_replaces_the_length_of_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("train_iters: 7\nobjective_schedule: clm\nlr: 0.5\n")
    phases = "phases: [{objective: mlm, train_tokens: 2049, global-batch-size: 8}]\n"
    (tmp_path / "run.yaml").write_text(f"config: base.yaml\n{phases}")
    config = parse_config(["--config", str(tmp_path / "run.yaml")], "test")
    assert (config.total_iters, config.schedule_text, config.learning_rate.lr) == (3, "mlm:3", 0.5)
    assert (config.tokens_after(3), config.batch_size_text, config.seq_length_text) == (
        3 * 8 * 128,
        "8",
        "128",
    )


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (["{train_iters: 3}"], "phase 1: field `objective`: missing"),
        (["{objective: mlm, objective: clm, train_iters: 3}"],
         "(key `objective` is given twice), expected fields such as"),
        (["{objective: mlm, train_iters: 3, train-iters: 4}"],
         "phase 1: field `train_iters` is given twice, in two spellings"),
        (["{objective: mlm}"],
         "phase 1: found neither train_iters nor train_tokens, expected one of them"),
        (["{objective: mlm, train_iters: 2, train_tokens: 5}"],
         "found train_iters and train_tokens"),
        (["{objective: 'mlm:4', train_iters: 4}"],
         "expected one objective, mixture or sum without an amount"),
        (["{objective: mlm, train_iters: 4, seq_len: 8}"],
         "field `seq_len` cannot change by phase; did you mean `seq_length`?"),
        (["{objective: mlm, train_iters: 4, seq_length: long}"],
         "phase 1: field `seq_length`: found 'long', expected a int"),
        (["{objective: mlm, train_iters: 4}",
          "{objective: mlm, train_iters: 4, micro_batch_size: 0}"],
         "phase 2: field `micro_batch_size`: found 0, expected 1 to 10,000,000"),
        (["{objective: mlm, train_iters: 4, packing: random-length, seq_length: 16}"],
         "phase 1: --packing random-length: found --seq-length 16, expected at least 24"),
        (["{objective: mlm, train_iters: 4, lr_warmup_iters: 3, lr_wsd_decay_iters: 2}"],
         "phase 1: warm-up of 3 and decay of 2"),
    ],
)  # fmt: skip
def test_wrong_phases_are_refused(phases, words):
    with pytest.raises(InputError) as refused:
        config = parse_config(["--phases", *phases], "test")
        config.check(1)
        build_learning_rate(config)
    assert words in str(refused.value)


def test_a_schedule_next_to_phases_is_refused_even_with_its_default_value(tmp_path):
    path = tmp_path / "run.yaml"
    phases = "phases: [{objective: mlm, train_iters: 3}]\n"
    schedule = PretrainConfig.objective_schedule
    message = (
        rf"--objective-schedule: found {schedule} together with phases, "
        "expected `objective` of each phase"
    )
    path.write_text(f"{phases}objective_schedule: '{schedule}'\n")
    with pytest.raises(InputError, match=f"--config {path}: {message}"):
        parse_config(["--config", str(path)], "test")


def test_weight_decay_may_change_by_phase(small_corpus, engine_of):
    """Phase 2 starts with the same gradient: runs differ by lr * decay * weight."""
    engines = []
    for decay in (0.1, 2.1):
        phases = [
            {"objective": "mlm", "train_iters": 1},
            {"objective": "mlm", "train_iters": 1, "weight_decay": decay},
        ]
        flags = [
            *SHAPE,
            "--lr-warmup-iters",
            "0",
            "--lr-decay-style",
            "constant",
            "--phases",
            *map(json.dumps, phases),
        ]
        engines.append(engine_of(*small_corpus.flags, *flags))
    for engine in engines:
        engine.train_step(1)
    before = [weight.detach().clone() for weight in engines[0].chunks[0].parameters()]
    for engine in engines:
        engine.train_step(2)
    for start, usual, strong in zip(
        before, *(engine.chunks[0].parameters() for engine in engines), strict=True
    ):
        torch.testing.assert_close(strong, usual - 3e-3 * 2 * start, rtol=0, atol=1e-6)
