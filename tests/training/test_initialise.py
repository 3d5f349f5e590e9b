"""A run that begins with the weights of another, and with nothing else of it."""

import itertools
import json
import shutil

import pytest
import runs
import torch
import yaml

from megaenc.training.command import main
from megaenc.training.plan import PHASE_IDENTITY

PARENT = [*runs.SHORT_RUN, "--no-bf16", "--train-iters", "12", "--objective-schedule", "clm"]
# As the study continues pretraining: other steps, no warm-up, constant, then decay. Another batch, rate and objective too.
CONTINUED = [*runs.SHORT_RUN, "--no-bf16", "--train-iters", "6", "--objective-schedule", "mlm", "--lr-warmup-iters", "0"]
CONTINUED += ["--lr-wsd-decay-iters", "2", "--global-batch-size", "4", "--lr", "1e-3"]


LONGER = ["--no-bf16", "--seq-length", "128"]
YARN = ["--yarn-rotary-scaling-factor", "2", "--yarn-original-max-position-embeddings", "64"]


@pytest.fixture(scope="module")
def parent(small_corpus, tmp_path_factory):
    """Twelve steps of CLM by two pipeline stages; checkpoints of 8 and 12."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    flags = [*small_corpus.flags, *PARENT, "--save", str(folder), "--save-interval", "8"]
    runs.script(runs.PRETRAIN, [*flags, "--pipeline-model-parallel-size", "2"], processes=2)
    return folder


@pytest.mark.multiprocess
def test_weights_fit_any_dropout_and_initialization(small_corpus, parent, capsys):
    change = ["--attention-output-dropout", "0.1", "--init-method", "full_megatron", "--init-cutoff", "3"]
    main([*small_corpus.flags, *CONTINUED, "--no-bf16", "--init-from", str(parent), *change, "--dry-run"])
    assert f"from the weights of {parent} at step 12" in capsys.readouterr().out


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "change", [["--no-bf16"], ["--bf16"], [*LONGER, "--rotary-base", "40000"], [*LONGER, *YARN]], ids=lambda change: change[-2:]
)
def test_it_is_a_new_run_given_those_weights(change, small_corpus, parent, tmp_path, monkeypatch, capsys):
    """Also with packs twice as long and rotary positions for them."""
    from megaenc.training import engine

    flags = [*small_corpus.flags, *CONTINUED, *change]
    main([*flags, "--init-from", str(parent), "--save", str(tmp_path / "run")])
    assert f"from the weights of {parent} at step 12 with a new optimizer" in capsys.readouterr().out

    parent_weights, build = runs.weights(parent, 12), engine.build_model_chunks

    def build_with_given_weights(*arguments, **options):
        (encoder,) = chunks = build(*arguments, **options)
        with torch.no_grad():
            for name, parameter in encoder.named_parameters():
                parameter.copy_(parent_weights[name])
        return chunks

    monkeypatch.setattr(engine, "build_model_chunks", build_with_given_weights)
    main([*flags, "--save", str(tmp_path / "by hand")])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "by hand")
    assert [row["learning_rate"] for row in runs.metrics(tmp_path / "run")] == [1e-3] * 5 + [5e-4]
    assert runs.validations(tmp_path / "run") == runs.validations(tmp_path / "by hand")
    actual, expected = runs.weights(tmp_path / "run", 6), runs.weights(tmp_path / "by hand", 6)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.multiprocess
def test_an_older_checkpoint_in_another_layout(small_corpus, parent, tmp_path):
    flags = [*small_corpus.flags, *CONTINUED, "--init-from", str(parent), "--init-at", "8"]
    main([*flags, "--save", str(tmp_path / "one")])
    two = [*flags, "--save", str(tmp_path / "two"), "--tensor-model-parallel-size", "2"]
    runs.script(runs.PRETRAIN, two, processes=2)
    runs.assert_same_curve(tmp_path / "two", tmp_path / "one")
    assert runs.validations(tmp_path / "one")[0]["step"] == 0


def plan_of(flags):
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    return build_plan(parse_config([str(flag) for flag in flags], "test"))


@pytest.mark.multiprocess
def test_the_newest_is_that_of_the_tracker(small_corpus, parent, tmp_path):
    """A run that was sent back to step 8 leaves the checkpoint of step 12 until it is made again."""
    shutil.copytree(parent, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("8\n")
    flags = [*small_corpus.flags, *CONTINUED, "--init-from"]
    assert (plan_of([*flags, parent]).start.at, plan_of([*flags, tmp_path / "run"]).start.at) == (12, 8)


@pytest.mark.multiprocess
def test_what_was_the_newest_at_first_stays_so(small_corpus, parent, tmp_path):
    """A run that is started again before its first checkpoint, while the other run has gone on."""
    (tmp_path / "run").mkdir()
    flags = [*small_corpus.flags, *CONTINUED, "--save", tmp_path / "run", "--init-from", parent]
    first = plan_of([*flags, "--init-at", 8])
    (tmp_path / "run" / "run.json").write_text(json.dumps(first.run_metadata))
    assert plan_of(flags).identity == first.identity


@pytest.mark.multiprocess
def test_skip_samples_is_where_the_data_begins(small_corpus, parent, tmp_path):
    """The parent reads 12 steps of 8 samples, so one that goes on after it in steps of 4 begins with sample 96."""
    flags = [*small_corpus.flags, *CONTINUED]
    new, skipping = plan_of(flags), plan_of([*flags, "--skip-samples", 40])
    assert [new.first_sample(step) for step in (1, 2)] == [0, 4]
    assert [skipping.first_sample(step) for step in (1, 2)] == [40, 44]
    assert sum(row.packs for row in skipping.corpus_usage) == 6 * 4
    after = plan_of([*flags, "--init-from", parent, "--skip-samples", "parent"])
    assert (after.first_sample(1), after.identity["skip_samples"], after.settings.start.skip_samples) == (96, 96, 96)
    assert plan_of([*flags, "--init-from", parent, "--init-at", 8, "--skip-samples", "parent"]).first_sample(1) == 64

    main([*flags, "--init-from", str(parent), "--skip-samples", "parent", "--save", str(tmp_path / "run")])
    third = plan_of([*flags, "--init-from", tmp_path / "run", "--skip-samples", "parent"])
    assert third.first_sample(1) == 96 + 6 * 4
    assert [(stage.run, stage.step, stage.tokens) for stage in third.start.before] == [
        (str(parent), 12, 12 * 8 * 64),
        (str(tmp_path / "run"), 6, 6 * 4 * 64),
    ]


def test_rows_beyond_the_tokenizer_make_another_run(small_corpus):
    flags = [*small_corpus.flags, *CONTINUED]
    plain, same, more = plan_of(flags), plan_of([*flags, "--vocab-size", 400]), plan_of([*flags, "--vocab-size", 420])
    assert plain.identity == same.identity and plain.vocab_size == same.vocab_size == 400
    assert (more.identity["vocab_size"], more.run_metadata["vocab_size"]) == (420, 420)
    assert more.run_metadata["parameters"] - plain.run_metadata["parameters"] == 2 * 20 * 64


@pytest.mark.multiprocess
def test_resumed_without_the_parent_it_is_bitwise_the_same(small_corpus, parent, tmp_path, capfd, refusal):
    away = shutil.copytree(parent, tmp_path / "away")
    start = ["--init-from", str(away), "--skip-samples", "parent"]
    flags = [*small_corpus.flags, *CONTINUED, *start]
    main([*flags, "--save", str(tmp_path / "whole")])
    main([*flags, "--save", str(tmp_path / "run"), "--exit-interval", "4"])
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["init_from"], config["init_at"], config["skip_samples"]) == (str(away), 12, 96)

    save = ["--save", tmp_path / "run"]
    for change, words in (
        ([*save, "--skip-samples", "95"], "skip_samples is 96 there, 95 here"),
        ([*save, "--init-at", "8", "--skip-samples", "96"], "start is weights of step 12 of run"),
    ):
        assert words in refusal(main, [*flags, *change])
    assert "start is weights of step 12" in refusal(main, [*small_corpus.flags, *CONTINUED, *save])

    shutil.rmtree(away)
    main([*flags, "--save", str(tmp_path / "run")])  # as it was begun, `parent` and the newest checkpoint included
    assert "resuming after step 4" in capfd.readouterr().out
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    assert runs.validations(tmp_path / "run") == runs.validations(tmp_path / "whole")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["identity"]["start"] == f"weights of step 12 of run {facts['start']['parent']}"


@pytest.mark.multiprocess
def test_a_run_that_began_with_weights_can_be_branched(small_corpus, parent, tmp_path):
    """By its own config.yaml, where --branch-from takes the place of --init-from; its data goes on where it was."""
    flags = [*small_corpus.flags, *CONTINUED, "--init-from", str(parent), "--skip-samples", "parent"]
    main([*flags, "--save", str(tmp_path / "run"), "--save-interval", "4"])
    start = ["--branch-from", str(tmp_path / "run"), "--branch-at", "4", "--save", str(tmp_path / "branch")]
    main(["--config", str(tmp_path / "run" / "config.yaml"), *start])
    assert runs.curve(tmp_path / "branch") == runs.curve(tmp_path / "run")[4:]
    facts = json.loads((tmp_path / "branch" / "run.json").read_text())
    assert facts["identity"]["skip_samples"] == 96
    assert [stage["run"] for stage in facts["start"]["before"]] == [str(parent)]


@pytest.mark.multiprocess
def test_weights_of_the_other_precision_will_do(small_corpus, parent, tmp_path):
    flags = [*small_corpus.flags, *CONTINUED]
    main([*flags, "--init-from", str(parent), "--bf16", "--save", str(tmp_path / "half")])
    main([*flags, "--init-from", str(tmp_path / "half"), "--no-bf16", "--save", str(tmp_path / "single")])
    first, last = runs.validations(tmp_path / "single")[0], runs.validations(tmp_path / "half")[-1]
    assert first["objectives"]["mlm"]["loss"] == pytest.approx(last["objectives"]["mlm"]["loss"], rel=1e-2)


@pytest.mark.multiprocess
def test_another_parent_at_the_same_path_is_refused_before_the_first_checkpoint(small_corpus, parent, tmp_path, refusal):
    """A run that was stopped before it saved begins anew, so its parent must still be the one it was."""
    away = shutil.copytree(parent, tmp_path / "away")
    flags = [*small_corpus.flags, *CONTINUED, "--init-from", str(away), "--save", str(tmp_path / "run")]
    main(flags)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    facts = json.loads((away / "run.json").read_text())
    facts["identity"]["seed"] = 3
    (away / "run.json").write_text(json.dumps(facts))
    assert "start is weights of step 12 of run" in refusal(main, flags)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--num-layers", "4"], "num_layers is 2 there, 4 here; its weights fit no other value"),
        (["--init-at", "7"], "--init-at 7: "),
        (["--skip-samples", "parent", "--seed", "2"], "seed is 1 there, 2 here; its samples are numbered differently"),
        (["--skip-samples", "parent", "--seq-length", "32"], "seq_length is 64 there, 32 here"),
        (["--skip-samples", "-1"], "--skip-samples: found -1, expected 0 or more"),
        (["--init-from", "nowhere"], "--init-from nowhere: not a run directory"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(change, words, small_corpus, parent, tmp_path, refusal):
    line = refusal(main, [*small_corpus.flags, *CONTINUED, "--init-from", parent, "--save", tmp_path / "run", *change])
    assert words in line, line
    assert not (tmp_path / "run").exists()


@pytest.mark.multiprocess
def test_other_rotary_positions_must_be_given(small_corpus, parent, tmp_path, refusal, capfd):
    """On the command line or in a file; those of defaults and presets would change a model silently."""
    facts, config = json.loads((parent / "run.json").read_text()), yaml.safe_load((parent / "config.yaml").read_text())
    changes = {"rotary_base": 500.0, "use_rope_scaling": True, "rope_scaling_factor": 32.0}
    run = shutil.copytree(parent, tmp_path / "parent")
    (run / "run.json").write_text(json.dumps(facts | {"identity": facts["identity"] | changes}))
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes | {"pipeline_model_parallel_size": 1}))
    (tmp_path / "base.yaml").write_text("config: parent/config.yaml\nrotary-base: 10000")
    (tmp_path / "preset.yaml").write_text("config: base.yaml\nmodel: tiny")
    flags = [*small_corpus.flags, *CONTINUED, "--init-from", str(run), "--save", str(tmp_path / "new"), "--dry-run"]
    base, scaling = ["--rotary-base", "500"], ["--use-rope-scaling", "--rope-scaling-factor", "32"]
    asked = "; expected --rotary-base 500.0, or the new value given with --rotary-base"
    for given, words in (
        (scaling, f"--init-from {run}: rotary_base is 500.0 there, 10000.0 here{asked}"),
        ([*scaling, "--config", tmp_path / "preset.yaml"], asked),
        ([*scaling, "--config", tmp_path / "base.yaml", "--model", "tiny"], asked),
        (base, "use_rope_scaling is True there, False here; expected --use-rope-scaling, or the new value given"),
        ([*base, "--use-rope-scaling"], "rope_scaling_factor is 32.0 there, 8.0 here; expected --rope-scaling-factor 32.0"),
        ([*base, *scaling, "--kv-channels", "32"], "kv_channels is not given there, 32 here; its weights fit no other value"),
    ):
        assert words in refusal(main, [*flags, *given]), given
    for given in (
        [*base, *scaling],
        ["--rotary_base=10000", "--no-use-rope-scaling", "--rope-scaling-factor", "8"],
        ["--config", tmp_path / "parent" / "config.yaml"],
        ["--config", tmp_path / "base.yaml"],
        ["--config", tmp_path / "parent" / "config.yaml", "--rotary-base", "9000"],
    ):
        main([str(flag) for flag in [*flags, *given]])
        assert f"from the weights of {run} at step 12" in capfd.readouterr().out.replace("\n", "")


@pytest.mark.multiprocess
def test_rotary_bases_of_phases(small_corpus, parent, tmp_path, refusal, capfd):
    """The first phase may give another one; a parent whose phases have changed it has another one than its config.yaml."""
    facts, config = json.loads((parent / "run.json").read_text()), yaml.safe_load((parent / "config.yaml").read_text())
    phase = {name: facts["identity"].get(name) for name in PHASE_IDENTITY} | {"last_step": 8}
    phases = {"phases": [phase, phase | {"rotary_base": 500.0, "last_step": 12}], "rotary_base": 500.0}
    run = shutil.copytree(parent, tmp_path / "parent")
    (run / "run.json").write_text(json.dumps(facts | {"identity": facts["identity"] | phases}))
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"pipeline_model_parallel_size": 1}))
    flags = [*small_corpus.flags, *CONTINUED, "--init-from", str(run), "--save", str(tmp_path / "new"), "--dry-run"]
    kept = [*flags, "--config", str(run / "config.yaml")]
    assert "rotary_base is 500.0 there, 10000.0 here; expected --rotary-base 500.0" in refusal(main, kept)
    replaced = {"--train-iters", "--objective-schedule"}  # by phases
    free = [word for before, word in itertools.pairwise(["", *flags]) if not replaced & {before, word}]
    for given in (
        [*kept, "--init-at", "8"],
        [*kept, "--rotary-base", "10000"],
        [*free, "--phases", "{objective: mlm, train_iters: 6, rotary_base: 10000}"],
    ):
        main(given)
        assert f"from the weights of {run} at step" in capfd.readouterr().out.replace("\n", "")


def test_a_parent_that_is_missing_in_the_flags_is_one_line(small_corpus, refusal):
    flags = [*small_corpus.flags, *CONTINUED]
    assert "--skip-samples parent: found no --init-from" in refusal(main, [*flags, "--skip-samples", "parent"])
    assert "--init-at 3: found no --init-from" in refusal(main, [*flags, "--init-at", "3"])
