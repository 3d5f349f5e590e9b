"""Runs whose phases have data, lengths, batches, rotary bases and learning rates of their own."""

import json
import math

import board_helpers
import numpy as np
import pytest
import runs
import yaml

from megaenc.convert.to_hf import to_hf
from megaenc.data.indexed.corpus import split_documents
from megaenc.data.packing.builder import RunData
from megaenc.data.preprocess import command as preprocess
from megaenc.errors import InputError
from megaenc.training.command import main
from megaenc.training.config import PretrainConfig, parse_config
from megaenc.training.engine import Engine
from megaenc.training.phases import build_learning_rate
from megaenc.training.planning import build_plan
from megaenc.training.trainer import Validator

SHAPE = [*runs.SHORT_RUN[:12], "--micro-batch-size", "2", "--global-batch-size", "8", "--lr", "3e-3", "--no-bf16"]
SHAPE += ["--eval-iters", "1", "--eval-interval", "5", "--clip-grad", "0.5"]
DECAY = ["--lr-warmup-iters", "3", "--lr-wsd-decay-iters", "5", "--lr-wsd-decay-style", "minus_sqrt"]


@pytest.fixture(scope="module")
def second_corpus(small_corpus, tmp_path_factory) -> str:
    """Prefix of a corpus of other text with the same tokenizer."""
    folder = tmp_path_factory.mktemp("second")
    text = runs.write_text(folder / "text.jsonl", documents=60, seed=1)
    tokenizer = ["--tokenizer", str(small_corpus.tokenizer), "--append-eod"]
    preprocess.main(["--input", str(text), "--output-prefix", str(folder / "b"), *tokenizer])
    return str(folder / "b_text_document")


@pytest.fixture(scope="module")
def three_phases(small_corpus, second_corpus, tmp_path_factory) -> list[str]:
    """Flags in the shape of mmBERT: blends, masks 0.3, 0.15 and 0.05, packs of 128, then 512 tokens, other rotary base, decay."""
    first, second = str(small_corpus.prefix), second_corpus
    longer = {"seq_length": 512, "rotary_base": 40000, "micro_batch_size": 1}
    phases = [
        {"objective": "mlm(mask=0.3)", "train_iters": 5, "data_path": [0.8, first, 0.2, second]},
        {
            "objective": "mlm(mask=0.15)",
            "train_iters": 5,
            "data_path": [0.5, first, 0.5, second],
            "global_batch_size": 4,
            **longer,
        },
        {"objective": "mlm(mask=0.05)", "train_iters": 5, "data_path": second, "global_batch_size": 4, **longer},
    ]
    file = tmp_path_factory.mktemp("phases") / "phases.yaml"
    file.write_text(yaml.safe_dump({"phases": phases}))
    tokenizer = ["--tokenizer", str(small_corpus.tokenizer), "--split", "90,10,0"]
    return ["--config", str(file), *tokenizer, *SHAPE, *DECAY, "--seq-length", "128"]


@pytest.fixture(scope="module")
def whole_run(three_phases, tmp_path_factory):
    """The fifteen steps in one process without a stop, with a checkpoint in each phase."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    main([*three_phases, "--save", str(folder), "--save-steps", "3", "5", "8"])
    return folder


def plan_of(*flags):
    return build_plan(parse_config([*map(str, flags)], "test"))


def config_of(phases, *flags):
    return parse_config([*flags, "--phases", *(json.dumps(phase) for phase in phases)], "test")


def test_each_phase_reads_its_own_packs(three_phases, whole_run):
    plan = plan_of(*three_phases)
    assert [plan.samples_read(step) for step in (0, 5, 6, 10, 15)] == [0, 40, 44, 60, 80]
    assert [plan.step_tokens(step) for step in (5, 6, 15)] == [8 * 128, 4 * 512, 4 * 512]
    counts = [[plan.data_at(step).train.corpus_of_sample(sample) for sample in range(first, end)].count(1)
              for step, first, end in ((1, 0, 40), (6, 40, 60))]  # fmt: skip
    assert counts == [8, 10]
    rows = runs.metrics(whole_run)
    assert [row["tokens"] for row in rows] == [1024 * step if step <= 5 else 5120 + 2048 * (step - 5) for step in range(1, 16)]
    assert [row["objective"] for row in rows[::5]] == ["mlm(mask=0.3)", "mlm(mask=0.15)", "mlm(mask=0.05)"]
    rates = [row["learning_rate"] for row in rows]
    assert rates == pytest.approx([1e-3, 2e-3, *[3e-3] * 8, *(3e-3 * (1 - math.sqrt(part / 5)) for part in range(5))])
    reading = {row["prefix"]: row["packs"] for row in json.loads((whole_run / "run.json").read_text())["reading"]}
    assert sorted(reading.values()) == [8 + 10 + 20, 32 + 10]


def test_a_corpus_continues_where_an_earlier_phase_stopped(small_corpus, second_corpus):
    """With packs of the same length: in another blend, and after skipped packs too."""
    phases = [
        {"objective": "mlm", "train_iters": 3, "data_path": str(small_corpus.prefix)},
        {"objective": "clm", "train_iters": 4, "data_path": [0.5, second_corpus, 0.5, str(small_corpus.prefix)]},
        {"objective": "clm", "train_iters": 4, "data_path": str(small_corpus.prefix)},
    ]
    common = ["--tokenizer", str(small_corpus.tokenizer), "--seq-length", "64", "--phases", *map(json.dumps, phases)]
    alone = plan_of(*small_corpus.flags, "--seq-length", "64", "--split", "99,1,0").packs
    for skipped in ([], ["--skip-packs", "10-19"]):
        plan = plan_of(*common, "--global-batch-size", "16", "--micro-batch-size", "8", *skipped)
        read = [
            (plan.data_at(step), plan.sample_at(position))
            for step in range(1, 12)
            for position in range(plan.samples_read(step - 1), plan.samples_read(step))
        ]
        assert [sample for _, sample in read] == [
            sample for sample in range(176 + len(skipped) * 5) if not (skipped and 9 < sample < 20)
        ]
        packs = [
            data.train[sample]
            for data, sample in read
            if data.corpora[data.train.corpus_of_sample(sample)].prefix != second_corpus
        ]
        expected = [number for number in range(144 + len(skipped) * 5) if not (skipped and 9 < number < 20)]
        assert len(packs) == 48 + 32 + 64 == len(expected)
        for pack, number in zip(packs, expected, strict=True):
            assert np.array_equal(pack.tokens, alone[number].tokens)


def test_phases_that_differ_only_in_objectives_are_the_schedule(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *SHAPE, *DECAY, "--seq-length", "64"]
    phases = ["--phases", "{objective: clm, train_iters: 6}", "{objective: mlm, train_tokens: 2048}"]
    schedule = ["--objective-schedule", "clm:6,mlm:4", "--train-iters", "10"]
    assert plan_of(*flags, *phases).identity == plan_of(*flags, *schedule).identity
    main([*flags, *phases, "--save", str(tmp_path / "run"), "--exit-interval", "7"])
    main([*flags, *schedule, "--save", str(tmp_path / "run")])
    main([*flags, *schedule, "--save", str(tmp_path / "whole")])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")


@pytest.mark.parametrize("stop", [2, 5, 7, 13])
def test_a_run_stopped_in_any_phase_resumes_bitwise(three_phases, whole_run, stop, tmp_path):
    main([*three_phases, "--save", str(tmp_path / "run"), "--save-steps", "3", "5", "8", "--exit-interval", str(stop)])
    assert runs.metrics(tmp_path / "run")[-1]["step"] == stop
    main(["--config", str(tmp_path / "run" / "config.yaml"), "--exit-interval", "99"])
    assert runs.curve(tmp_path / "run") == runs.curve(whole_run)
    assert runs.validations(tmp_path / "run") == runs.validations(whole_run)
    runs.assert_same_weights(tmp_path / "run", whole_run, 15)


def validated(plan, step):
    """The packs that the validation of `step` reads, by the name of their set."""
    return {part.name: [part.packs[sample] for sample in range(part.samples)] for part in Validator(plan, step).parts}


def test_each_phase_is_validated_on_its_own_held_out_text(three_phases, whole_run, small_corpus, second_corpus):
    """In packs of its length: no loss is of a position that no training step has had."""
    plan = plan_of(*three_phases)
    shares = {5: ("0.8", "0.2", 128), 10: ("0.5", "0.5", 512), 15: ("0", "1", 512)}
    for step, (first, second, length) in shares.items():
        data_path = [first, str(small_corpus.prefix), second, second_corpus] if first != "0" else [second_corpus]
        options = {"split": "90,10,0", "packing": "concat", "seq_length": length, "seed": 1}
        expected = RunData.open(data_path, plan.vocabulary, **options).held_out
        [packs] = validated(plan, step).values()
        assert len(packs) == (8 if step == 5 else 4)
        for sample, pack in enumerate(packs):
            assert np.array_equal(pack.tokens, expected[sample].tokens)
            assert np.array_equal(pack.edges, expected[sample].edges)
    rows = runs.validations(whole_run)
    assert [row["step"] for row in rows] == [0, 5, 10, 15]
    texts = [row["held_out"] for row in rows]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    for row in rows:
        for scores in row["objectives"].values():
            assert ("by_position" in scores) == (row["step"] > 5)  # else all are among the first 128
            assert ("by_corpus" in scores) == (row["step"] < 15)


def test_the_validation_of_a_phase_is_that_of_a_run_without_phases(three_phases, whole_run, second_corpus, tmp_path):
    """Bit by bit, of the last weights."""
    tokenizer = three_phases[three_phases.index("--tokenizer") :]
    flags = [*tokenizer, "--rotary-base", "40000", "--objective-schedule", "mlm(mask=0.05)", "--train-iters", "9"]
    flags += ["--data-path", second_corpus, "--seq-length", "512", "--global-batch-size", "4"]
    main([*flags, "--init-from", str(whole_run), "--save", str(tmp_path / "last"), "--exit-interval", "1"])
    alone, phased = runs.validations(tmp_path / "last")[0], runs.validations(whole_run)[-1]
    assert alone["held_out"] == phased["held_out"]
    for name, scores in alone["objectives"].items():
        assert scores == phased["objectives"][name]


FIXED = "mlm(mask=0.15,random=0.1,keep=0.1)"


@pytest.fixture(scope="module")
def named_sets(three_phases, small_corpus, tmp_path_factory):
    """Flags of the three phases with two named sets: a corpus that is trained on, and another one; a fixed objective."""
    from_tokenizer = ["--tokenizer", str(small_corpus.tokenizer), "--append-eod"]
    folder = tmp_path_factory.mktemp("third")
    text = runs.write_text(folder / "text.jsonl", documents=40, seed=2)
    preprocess.main(["--input", str(text), "--output-prefix", str(folder / "c"), *from_tokenizer])
    sets = [f"own={small_corpus.prefix}", f"other={folder / 'c_text_document'}"]
    return [*three_phases, "--eval-iters", "2", "--valid-data-path", *sets, "--valid-objective", FIXED]


@pytest.fixture(scope="module")
def named_run(named_sets, tmp_path_factory):
    """The fifteen steps, validated on named sets."""
    folder = tmp_path_factory.mktemp("named") / "run"
    main([*named_sets, "--save", str(folder), "--tensorboard-dir", str(folder / "board")])
    return folder


def test_named_sets_have_the_same_text_in_all_phases(named_sets, named_run, small_corpus):
    """Each by its name, also at TensorBoard: the held-out documents of a corpus that is trained on, and another one whole."""
    plan = plan_of(*named_sets)
    own, other = plan.validation_sets
    assert own.documents.tolist() == split_documents(300, (90, 10, 0))[1].tolist()
    assert other.documents.tolist() == list(range(40))
    lengths = {1: 128, 6: 512, 15: 512}
    tokens = {}
    for step, length in lengths.items():
        for name, packs in validated(plan, step).items():
            assert {len(pack.tokens) for pack in packs} == {length}
            tokens.setdefault(name, []).append(np.concatenate([pack.tokens for pack in packs]))
    for name, (short, long, last) in tokens.items():
        assert np.array_equal(short[: len(long)], long) and np.array_equal(long, last)
        assert len(short) == 2 * 8 * 128 == len(long), name
    rows = runs.validations(named_run)
    assert [row["step"] for row in rows] == [0, 5, 10, 15]
    names = [f"own/{FIXED}", f"other/{FIXED}"]
    assert [list(row["objectives"]) for row in rows] == [names] * 4
    assert len({row["held_out"] for row in rows}) == 2  # the two lengths
    _, shown = board_helpers.tensorboard_shows(named_run / "board")
    for name in names:
        losses = {row["step"]: row["objectives"][name]["loss"] for row in rows}
        assert shown[f"validation/{name}/loss"] == losses
    assert all(scores["loss"] < 5.9 for scores in rows[-1]["objectives"].values())


def test_named_sets_do_not_change_the_run(named_sets, named_run, three_phases, whole_run, tmp_path):
    """Nor does a stop in the second phase change a validation."""
    assert runs.curve(named_run) == runs.curve(whole_run)
    main([*named_sets, "--save", str(tmp_path / "run"), "--exit-interval", "7"])
    main(["--config", str(tmp_path / "run" / "config.yaml"), "--exit-interval", "99"])
    assert runs.validations(tmp_path / "run") == runs.validations(named_run)
    assert runs.curve(tmp_path / "run") == runs.curve(whole_run)


@pytest.mark.multiprocess
def test_validations_of_phases_are_the_same_in_every_layout(named_sets, three_phases, tmp_path):
    """On named sets and on held-out text, after each phase."""
    flags = [*three_phases, "--eval-interval", "5", "--exit-interval", "10"]
    named = [*named_sets, "--exit-interval", "10", "--eval-iters", "1"]
    layouts = {"one": (1, []), "DP2": (2, []), "PP2": (2, ["--pipeline-model-parallel-size", "2"])}
    jobs = [runs.Job(tmp_path / f"{name} held", [*flags, *more], processes) for name, (processes, more) in layouts.items()]
    jobs += [runs.Job(tmp_path / f"{name} named", [*named, *more], processes) for name, (processes, more) in layouts.items()]
    runs.in_turn(jobs, tmp_path)
    for kind in ("held", "named"):
        reference = runs.validations(tmp_path / f"one {kind}")
        assert [row["step"] for row in reference] == [0, 5, 10]
        for name in ("DP2", "PP2"):
            rows = runs.validations(tmp_path / f"{name} {kind}")
            for row, expected in zip(rows, reference, strict=True):
                assert row["objectives"].keys() == expected["objectives"].keys()
                for objective, scores in row["objectives"].items():
                    assert scores["loss"] == pytest.approx(expected["objectives"][objective]["loss"], rel=1e-6)


def test_validations_have_the_micro_batches_of_their_phase(small_corpus, one_process, monkeypatch):
    """Two batches of 8 packs in rows of 4, then of 3 packs in rows of one; a named set's last batch has fewer packs."""
    phases = ["{objective: mlm, train_iters: 2, micro_batch_size: 4}"]
    phases += ["{objective: mlm, train_iters: 2, seq_length: 128, global_batch_size: 3, micro_batch_size: 1}"]
    flags = [*small_corpus.flags, *runs.SHORT_RUN[:12], "--seq-length", "64", "--global-batch-size", "8", "--no-bf16"]
    flags += ["--eval-iters", "2", "--lr-warmup-iters", "1", "--valid-objective", "clm", "--phases", *phases]
    for named, last in (([], [[1, 1, 1]] * 2), ([f"own={small_corpus.prefix}"], [[1, 1, 1]] * 2 + [[1, 1]])):
        plan = plan_of(*flags, *(["--valid-data-path", *named] if named else []))
        engine, rows = Engine(plan, one_process), []
        list_specs = engine._list_specs

        def record(packs, samples, *arguments, list_specs=list_specs, rows=rows, **options):
            rows.append([len(row) for row in samples])
            return list_specs(packs, samples, *arguments, **options)

        monkeypatch.setattr(engine, "_list_specs", record)
        for step, expected in ((2, [[4, 4]] * 2), (3, last)):
            rows.clear()
            Validator(plan, step)(engine)
            assert rows == expected


def test_a_phase_without_held_out_text_is_not_validated(small_corpus, tmp_path):
    """Of one document none is held out; the other phase has its rows."""
    text = runs.write_text(tmp_path / "one.jsonl", documents=1)
    tokenizer = ["--tokenizer", str(small_corpus.tokenizer)]
    preprocess.main(["--input", str(text), "--output-prefix", str(tmp_path / "one"), *tokenizer, "--append-eod"])
    phases = [
        {"objective": "clm", "train_iters": 3, "data_path": str(tmp_path / "one_text_document")},
        {"objective": "clm", "train_iters": 3, "data_path": str(small_corpus.prefix)},
    ]
    flags = [*tokenizer, *SHAPE, "--seq-length", "64", "--eval-interval", "2", "--lr-warmup-iters", "1"]
    main([*flags, "--phases", *map(json.dumps, phases), "--save", str(tmp_path / "run")])
    assert [row["step"] for row in runs.validations(tmp_path / "run")] == [4, 6]


def test_a_dry_run_says_what_is_validated_on(named_sets, three_phases, small_corpus, capsys):
    main([*three_phases, "--dry-run"])
    own = capsys.readouterr().out.splitlines()[-1]
    assert own.startswith("validation: every 5 steps on the held-out text of each phase, in packs of the phase's length, under ")
    main([*named_sets, "--dry-run"])
    named = capsys.readouterr().out.splitlines()[-1]
    assert f"on own (held-out documents of {small_corpus.prefix}), other (all documents of " in named
    assert named.endswith(f", in packs of the phase's length, under {FIXED}")
    assert not plan_of(*named_sets, "--eval-interval", "0").validation_sets


@pytest.mark.multiprocess
def test_every_step_at_tp2_pp2_is_that_of_one_process(three_phases, whole_run, tmp_path):
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, [*three_phases, *layout, "--save", str(tmp_path / "run")], processes=4)
    assert len(runs.metrics(tmp_path / "run")) == 15
    runs.assert_same_curve(tmp_path / "run", whole_run, tolerance=1e-4)


@pytest.mark.parametrize(
    ("step", "base", "context"), [(3, 10000.0, 128), (5, 10000.0, 128), (8, 40000.0, 512), (15, 40000.0, 512)]
)
def test_an_export_has_the_rotary_base_and_length_of_its_phase(whole_run, step, base, context, tmp_path):
    to_hf(whole_run, tmp_path / "hf", step=step)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]) == (base, context)


def test_a_branch_changes_phases_after_its_step(small_corpus, whole_run, three_phases, tmp_path, refusal):
    """From a run without phases to longer packs; and only after the step."""
    flags = [*small_corpus.flags, *SHAPE, "--lr-warmup-iters", "3", "--seq-length", "64"]
    main([*flags, "--objective-schedule", "mlm", "--train-iters", "20", "--save", str(tmp_path / "parent"), "--save-steps", "6"])
    start = ["--branch-from", str(tmp_path / "parent"), "--branch-at", "6"]
    longer = "{objective: mlm, train_iters: 4, seq_length: 128, rotary_base: 50000}"
    main([*flags, "--phases", "{objective: mlm, train_iters: 6}", longer, *start, "--save", str(tmp_path / "run")])
    main([*flags, "--phases", "{objective: mlm, train_iters: 6}", longer, "--save", str(tmp_path / "whole")])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole", after=6)
    runs.assert_same_weights(tmp_path / "run", tmp_path / "whole", 10)
    here, there = (runs.validations(tmp_path / name) for name in ("run", "whole"))
    assert [row["step"] for row in here] == [6, 10] and here[-1] == there[-1]
    assert here[0]["held_out"] == there[0]["held_out"] != here[1]["held_out"]
    line = refusal(main, [*flags, "--phases", "{objective: mlm, train_iters: 5}", longer, *start])
    assert "seq_length is 64 there, 128 here at step 6" in line and "the first of `phases`" in line


def test_weights_of_an_earlier_phase_have_its_rotary_base(small_corpus, whole_run, refusal):
    flags = [*small_corpus.flags, *SHAPE, "--seq-length", "128", "--train-iters", "2", "--init-from", str(whole_run)]
    assert plan_of(*flags, "--init-at", "5").start.at == 5
    plan = plan_of(*flags, "--init-at", "8", "--rotary-base", "40000")
    assert plan.start.before[-1].schedule == "mlm(mask=0.3):5,mlm(mask=0.15):5,mlm(mask=0.05):5"
    assert plan.start.before[-1].tokens == 5 * 1024 + 3 * 2048


def test_a_learning_rate_flag_gives_each_phase_a_schedule():
    phases = [
        {"objective": "mlm", "train_iters": 10, "lr_warmup_iters": 2, "lr_decay_style": "constant"},
        {"objective": "mlm", "train_iters": 4, "lr": 1e-3, "lr_decay_style": "constant"},
        {"objective": "mlm", "train_iters": 4, "lr": 1e-3, "lr_wsd_decay_fraction": 1.0, "lr_wsd_decay_style": "minus_sqrt"},
    ]
    rate = build_learning_rate(config_of(phases, "--lr", "4e-3", "--lr-warmup-iters", "0"))
    expected = [2e-3, *[4e-3] * 9, *[1e-3] * 4, *(1e-3 * (1 - math.sqrt(part / 4)) for part in range(4))]
    assert [rate(step) for step in range(1, 19)] == pytest.approx(expected)
    assert rate.describe().count("; then ") == 2


def test_a_file_with_phases_replaces_the_length_of_its_base(tmp_path):
    (tmp_path / "base.yaml").write_text("train_iters: 7\nobjective_schedule: clm\nlr: 0.5\n")
    (tmp_path / "run.yaml").write_text(
        "config: base.yaml\nphases: [{objective: mlm, train_tokens: 2049, global-batch-size: 8}]\n"
    )
    config = parse_config(["--config", str(tmp_path / "run.yaml")], "test")
    assert (config.total_iters, config.schedule_text, config.optimizer.lr) == (3, "mlm:3", 0.5)
    assert (config.tokens_after(3), config.batch_size_text, config.seq_length_text) == (3 * 8 * 128, "8", "128")


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (["mlm:10"], "phase 1: found 'mlm:10', expected fields such as {objective: mlm"),
        (["{train_iters: 3}"], "phase 1: field `objective`: missing"),
        (["{objective: mlm, objective: clm, train_iters: 3}"], "(key `objective` is given twice), expected fields such as"),
        (["{objective: mlm, train_iters: 3, train-iters: 4}"], "phase 1: field `train_iters` is given twice, in two spellings"),
        (["{objective: mlm}"], "phase 1: found neither train_iters nor train_tokens, expected one of them"),
        (["{objective: mlm, train_iters: 2, train_tokens: 5}"], "found train_iters and train_tokens"),
        (["{objective: 'clm:0.5,mlm:0.5', train_iters: 4}"], "expected one objective, mixture or sum without an amount"),
        (["{objective: 'mlm:4', train_iters: 4}"], "expected one objective, mixture or sum without an amount"),
        (["{objective: mlm, train_iters: 4, seq_len: 8}"], "field `seq_len` cannot change by phase; did you mean `seq_length`?"),
        (["{objective: mlm, train_iters: 4, num_layers: 8}"], "field `num_layers` cannot change by phase; expected one of"),
        (["{objective: mlm, train_iters: 4, seq_length: long}"], "phase 1: field `seq_length`: found 'long', expected a int"),
        (["{objective: mlm, train_iters: 0}"], "phase 1: --train-iters: found 0, expected 1 or more"),
        (["{objective: mlm, train_tokens: 9, global_batch_size: 0}"], "phase 1: --global-batch-size: found 0"),
        (["{objective: mlm, train_iters: 4}", "{objective: mlm, train_iters: 4, micro_batch_size: 0}"],
         "phase 2: --micro-batch-size: found 0, expected 1 or more"),
        (["{objective: mlm, train_iters: 4, lr_warmup_iters: 3, lr_wsd_decay_iters: 2}"], "phase 1: warm-up of 3 and decay of 2"),
        (["{objective: mlm, train_iters: 4, lr: 0}"], "phase 1: --lr: found 0"),
        (["{objective: mlm, train_iters: 4, rampup_batch_size: [2]}"], "phase 1: --rampup-batch-size 2: expected three numbers"),
    ],
)  # fmt: skip
def test_wrong_phases_are_refused(phases, words):
    with pytest.raises(InputError) as refused:
        config = parse_config(["--phases", *phases], "test")
        config.check(1)
        build_learning_rate(config)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "flag",
    [
        "--train-iters 5",
        "--train-tokens 500",
        "--objective-schedule clm",
        "--objective-schedule=clm:0.25,mlm:0.75",
        "--rampup-batch-size 2 2 9",
    ],
)
def test_flags_that_phases_replace_are_refused_beside_them(flag):
    with pytest.raises(InputError, match=r"--[a-z-]+: found .* together with phases, expected"):
        parse_config(["--phases", "{objective: mlm, train_iters: 3}", *flag.split()], "test").check(1)


def test_a_schedule_next_to_phases_is_refused_even_with_its_default_value(tmp_path):
    path = tmp_path / "run.yaml"
    phases = "phases: [{objective: mlm, train_iters: 3}]\n"
    schedule = PretrainConfig.objective_schedule
    path.write_text(f"{phases}objective_schedule: '{schedule}'\n")
    message = rf"--objective-schedule: found {schedule} together with phases, expected `objective` of each phase"
    with pytest.raises(InputError, match=f"--config {path}: {message}"):
        parse_config(["--config", str(path)], "test")
    path.write_text(phases)
    with pytest.raises(InputError, match=message):
        parse_config(["--config", str(path), "--objective-schedule", schedule], "test")
    assert parse_config(["--config", str(path)], "test").schedule_text == "mlm:3"


def test_windows_as_long_as_a_pack_are_refused():
    with pytest.raises(InputError, match="--window-size: found 64, expected less than --seq-length 64"):
        parse_config(["--window-size", "64", "--seq-length", "64"], "test").check(1)
    assert isinstance(parse_config(["--window-size", "63", "--seq-length", "64"], "test"), PretrainConfig)


def test_the_dry_run_shows_each_phase(three_phases, capsys):
    main([*three_phases, "--dry-run"])
    output = capsys.readouterr().out
    assert "15 steps of 4 to 8 packs of 128 to 512 tokens" in output
    rows = [line.split() for line in output.splitlines() if line.startswith("  mlm") and " to " in line]
    assert [row[-4:] for row in rows] == [["8", "128", "10,000", "2"], ["4", "512", "40,000", "2"], ["4", "512", "40,000", "1"]]


def test_weight_decay_may_change_by_phase(small_corpus, tmp_path, refusal):
    """The first step of the second phase has the same gradient, so that lr * decay * weight tells two runs apart."""
    folders = []
    for decay in (0.1, 2.1):
        phases = [{"objective": "mlm", "train_iters": 2}, {"objective": "mlm", "train_iters": 1, "weight_decay": decay}]
        flags = [*small_corpus.flags, *SHAPE, "--seq-length", "64", "--lr-warmup-iters", "0", "--save-steps", "2"]
        folders.append(tmp_path / str(decay))
        main([*flags, "--phases", *map(json.dumps, phases), "--lr-decay-style", "constant", "--save", str(folders[-1])])
    before, usual, strong = runs.weights(folders[0], 2), runs.weights(folders[0], 3), runs.weights(folders[1], 3)
    assert runs.curve(folders[0])[:2] == runs.curve(folders[1])[:2]
    for name, weight in usual.items():
        np.testing.assert_allclose(strong[name], weight - 3e-3 * 2 * before[name], rtol=0, atol=1e-6)
    branch = [*flags, "--branch-from", str(folders[0]), "--branch-at", "2", "--train-iters", "4", "--lr-decay-style", "constant"]
    line = refusal(main, [*branch, "--objective-schedule", "mlm", "--weight-decay", "0.2", "--save", str(tmp_path / "branch")])
    assert "weight_decay is 0.1 there, 0.2 here at step 1" in line
