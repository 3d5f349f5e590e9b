"""Runs that start with the weights of another run, and with nothing else of it."""

import json
import shutil

import pytest
import runs
import torch
import yaml
from runs import Job
from training_helpers import plan_of
from whole_models import load_weights

from megaenc.convert.run_checkpoint import open_run_checkpoint
from megaenc.training.command import main

pytestmark = pytest.mark.multiprocess

FOUR_LAYERS = [*runs.SHORT_RUN, "--no-bf16", "--num-layers", "4"]
PARENT = [
    *FOUR_LAYERS,
    "--train-iters",
    "6",
    "--objective-schedule",
    "clm",
    "--lr-warmup-iters",
    "1",
]
# As the study continues pretraining: other steps, no warm-up, constant, then decay. Another batch,
# rate and objective too.
CONTINUED = [
    *FOUR_LAYERS,
    "--train-iters",
    "4",
    "--objective-schedule",
    "mlm",
    "--lr-warmup-iters",
    "0",
]
CONTINUED += ["--lr-wsd-decay-iters", "2", "--global-batch-size", "4", "--lr", "1e-3"]
PP2 = ["--pipeline-model-parallel-size", "2"]
SPLIT = ["--use-distributed-optimizer"]
# By name: (processes, flags).
WAYS = {
    "bfloat16": (1, ["--bf16"]),
    "longer": (
        1,
        [
            "--seq-length",
            "128",
            "--yarn-rotary-scaling-factor",
            "2",
            "--yarn-original-max-position-embeddings",
            "64",
        ],
    ),
    "DP2": (2, SPLIT),
    "interleaved": (2, [*SPLIT, *PP2, "--num-layers-per-virtual-pipeline-stage", "1", "--bf16"]),
}


@pytest.fixture(scope="module")
def parent(small_corpus, tmp_path_factory):
    """Six steps of CLM on two stages and two data-parallel ranks; checkpoints 4 and 6."""
    directory = tmp_path_factory.mktemp("parent") / "run"
    flags = [*small_corpus.flags, *PARENT, "--save", str(directory), "--save-interval", "4"]
    runs.script(runs.PRETRAIN, [*flags, *PP2, *SPLIT], processes=4)
    return directory


@pytest.fixture(scope="module")
def continued(small_corpus, parent):
    """Flags of a run that starts with the parent's weights."""
    return [*small_corpus.flags, *CONTINUED, "--init-from", str(parent)]


def facts_of(directory):
    return json.loads((directory / "run.json").read_text())


def test_it_is_a_new_run_given_those_weights(small_corpus, parent, tmp_path):
    """This holds for longer packs with scaled rotary positions and for other layouts."""
    weights = tmp_path / "weights.pt"
    torch.save(load_weights(open_run_checkpoint(parent), 6)[1], weights)
    jobs = []
    for name, (processes, more) in WAYS.items():
        flags = [*small_corpus.flags, *CONTINUED, *more]
        jobs.append(Job(tmp_path / name, [*flags, "--init-from", str(parent)], processes))
        jobs.append(Job(tmp_path / f"{name}, by hand", flags, processes, weights=weights))
    printed = runs.in_turn(jobs, tmp_path).stdout
    assert printed.count(f"from the weights of {parent} at step 6 with a new optimizer") == len(
        WAYS
    )
    for job, by_hand in zip(jobs[::2], jobs[1::2], strict=True):
        assert runs.curve(job.save) == runs.curve(by_hand.save)
        assert [row["learning_rate"] for row in runs.metrics(job.save)] == [1e-3] * 3 + [5e-4]
        assert runs.validations(job.save) == runs.validations(by_hand.save)
        runs.assert_same_weights(job.save, by_hand.save, 4)


def test_an_older_checkpoint_in_another_layout(continued, tmp_path):
    flags = [*continued, "--init-at", "4", "--save"]
    main([*flags, str(tmp_path / "one")])
    runs.script(
        runs.PRETRAIN,
        [*flags, str(tmp_path / "two"), "--tensor-model-parallel-size", "2"],
        processes=2,
    )
    runs.assert_same_curve(tmp_path / "two", tmp_path / "one")
    assert runs.validations(tmp_path / "one")[0]["step"] == 0


def test_the_newest_is_that_of_the_tracker(continued, parent, tmp_path):
    """A run rewound to step 4 keeps the checkpoint of step 6 until it saves it again."""
    shutil.copytree(parent, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4\n")
    assert plan_of(*continued).start.at == 6
    assert plan_of(*continued, "--init-from", tmp_path / "run").start.at == 4


def test_what_was_the_newest_at_first_stays_so(continued, tmp_path):
    """The parent goes on while the new run restarts before its first checkpoint."""
    first = plan_of(*continued, "--save", tmp_path, "--init-at", 4)
    (tmp_path / "run.json").write_text(json.dumps(first.run_metadata))
    assert plan_of(*continued, "--save", tmp_path).identity == first.identity


def test_skip_samples_is_where_the_data_begins(continued):
    """The parent reads 6 steps of 8 samples, so its child begins with sample 48."""
    skipping = plan_of(*continued, "--skip-samples", 40)
    assert [skipping.first_sample(step) for step in (1, 2)] == [40, 44]
    assert sum(row.packs for row in skipping.corpus_usage) == 4 * 4
    after = plan_of(*continued, "--skip-samples", "parent")
    assert (
        after.first_sample(1),
        after.identity["skip_samples"],
        after.settings.start.skip_samples,
    ) == (48, 48, 48)
    assert plan_of(*continued, "--init-at", 4, "--skip-samples", "parent").first_sample(1) == 32


def test_rows_beyond_the_tokenizer_make_another_run(small_corpus):
    flags = [*small_corpus.flags, *CONTINUED]
    plain = plan_of(*flags)
    more = plan_of(*flags, "--vocab-size", 420)
    assert plain.identity == plan_of(*flags, "--vocab-size", 400).identity
    assert more.identity["vocab_size"] == 420
    assert more.run_metadata["parameters"] - plain.run_metadata["parameters"] == 2 * 20 * 64


def test_resumed_without_the_parent_it_is_bitwise_the_same(
    continued, parent, tmp_path, capfd, refusal
):
    away = shutil.copytree(parent, tmp_path / "away")
    flags = [*continued, "--init-from", str(away), "--skip-samples", "parent"]
    save = ["--save", str(tmp_path / "run")]
    main([*flags, "--save", str(tmp_path / "whole")])
    main([*flags, *save, "--exit-interval", "2"])
    assert "skip_samples is 48 there, 47 here" in refusal(
        main, [*flags, *save, "--skip-samples", "47"]
    )
    shutil.rmtree(away)
    main([*flags, *save])  # as it was begun, `parent` and the newest checkpoint included
    assert "resuming after step 2" in capfd.readouterr().out
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    assert runs.validations(tmp_path / "run") == runs.validations(tmp_path / "whole")
    facts = facts_of(tmp_path / "run")
    assert facts["identity"]["start"] == f"weights of step 6 of run {facts['start']['parent']}"


def test_a_run_that_began_with_weights_can_be_branched(continued, parent, tmp_path):
    """In its config.yaml --branch-from replaces --init-from; its data continues."""
    main(
        [
            *continued,
            "--skip-samples",
            "parent",
            "--save",
            str(tmp_path / "run"),
            "--save-interval",
            "2",
        ]
    )
    start = [
        "--branch-from",
        str(tmp_path / "run"),
        "--branch-at",
        "2",
        "--save",
        str(tmp_path / "branch"),
    ]
    main(["--config", str(tmp_path / "run" / "config.yaml"), *start])
    assert runs.curve(tmp_path / "branch") == runs.curve(tmp_path / "run", after=2)
    third = plan_of(*continued, "--init-from", tmp_path / "branch", "--skip-samples", "parent")
    assert third.first_sample(1) == 48 + 4 * 4
    stages = [(stage.run, stage.step, stage.tokens) for stage in third.start.before]
    assert stages[0] == (str(parent), 6, 6 * 8 * 64)
    assert stages[-1] == (str(tmp_path / "branch"), 4, 4 * 4 * 64)


def test_weights_of_the_other_precision_will_do(continued, tmp_path):
    """So will those of another dropout and initialization."""
    first = [
        *continued,
        "--exit-interval",
        "1",
        "--eval-interval",
        "1",
        "--attention-output-dropout",
        "0.1",
    ]
    first += ["--init-method", "full_megatron", "--init-cutoff", "3"]
    main([*first, "--bf16", "--save", str(tmp_path / "half")])
    main([*first, "--init-from", str(tmp_path / "half"), "--save", str(tmp_path / "single")])
    before = runs.validations(tmp_path / "half")[-1]["objectives"]["mlm"]
    after = runs.validations(tmp_path / "single")[0]["objectives"]["mlm"]
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-2)


def test_another_parent_at_the_same_path_is_refused_before_the_first_checkpoint(
    continued, parent, tmp_path, refusal
):
    """A run stopped before its first save starts again from the parent's weights."""
    away = shutil.copytree(parent, tmp_path / "away")
    flags = [*continued, "--init-from", str(away), "--save", str(tmp_path / "run")]
    main([*flags, "--exit-interval", "1"])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    facts = facts_of(away)
    facts["identity"]["seed"] = 3
    (away / "run.json").write_text(json.dumps(facts))
    assert "start is weights of step 6 of run" in refusal(main, flags)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ["--skip-samples", "parent", "--seed", "2"],
            "seed is 1 there, 2 here; its samples are numbered differently",
        ),
        (["--skip-samples", "parent", "--seq-length", "32"], "seq_length is 64 there, 32 here"),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(change, words, continued, tmp_path, refusal):
    assert words in refusal(main, [*continued, "--save", tmp_path / "run", *change])
    assert not (tmp_path / "run").exists()


@pytest.fixture
def changed_parent(parent, tmp_path):
    """A function that copies the parent with other fields of identity and config.yaml.

    Phases are changed in the identity only.
    """

    def change(**fields):
        run = shutil.copytree(parent, tmp_path / "parent")
        facts = facts_of(run)
        facts["identity"] |= fields
        (run / "run.json").write_text(json.dumps(facts))
        config = yaml.safe_load((run / "config.yaml").read_text()) | {
            "pipeline_model_parallel_size": 1,
            "use_distributed_optimizer": False,
        }
        if "phases" not in fields:
            config |= fields
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        return run

    return change


BASE = ["--rotary-base", "500"]
SCALING = ["--use-rope-scaling", "--rope-scaling-factor", "32"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            SCALING,
            "rotary_base is 500.0 there, 10000.0 here; "
            "expected --rotary-base 500.0, or the new value given with --rotar",
        ),
        (["--config", "preset.yaml", *SCALING], "rotary_base is 500.0 there, 10000.0 here"),
        (
            BASE,
            "use_rope_scaling is True there, False here; "
            "expected --use-rope-scaling, or the new value given",
        ),
        (
            [*BASE, "--use-rope-scaling"],
            "rope_scaling_factor is 32.0 there, 8.0 here; expected --rope-scaling-factor 32.0",
        ),
        (
            [*BASE, *SCALING, "--kv-channels", "32"],
            "kv_channels is not given there, 32 here; its weights fit no other value",
        ),
        ([*BASE, *SCALING], ""),
        (["--rotary_base=10000", "--no-use-rope-scaling", "--rope-scaling-factor", "8"], ""),
        (["--config", "base.yaml"], ""),
        (["--config", "parent/config.yaml", "--rotary-base", "9000"], ""),
    ],
)
def test_other_rotary_positions_must_be_given(
    given, words, continued, changed_parent, tmp_path, monkeypatch, refusal
):
    """Defaults and presets would change the model silently."""
    monkeypatch.chdir(tmp_path)
    run = changed_parent(rotary_base=500.0, use_rope_scaling=True, rope_scaling_factor=32.0)
    (tmp_path / "base.yaml").write_text("config: parent/config.yaml\nrotary-base: 10000")
    (tmp_path / "preset.yaml").write_text("config: base.yaml\nmodel: tiny")
    flags = [*continued, "--init-from", str(run), "--dry-run", *given]
    if words:
        assert words in refusal(main, flags)
    else:
        main(flags)


def test_rotary_bases_of_phases(small_corpus, continued, parent, changed_parent, refusal):
    """The first phase may set the base; after later phases the parent has another one."""
    phase = {"rotary_base": 10000.0, "last_step": 4}
    run = changed_parent(phases=[phase, {"rotary_base": 500.0, "last_step": 6}], rotary_base=500.0)
    kept = [*continued, "--init-from", str(run), "--config", str(run / "config.yaml"), "--dry-run"]
    assert "rotary_base is 500.0 there, 10000.0 here; expected --rotary-base 500.0" in refusal(
        main, kept
    )
    main([*kept, "--init-at", "4"])
    main([*kept, "--rotary-base", "10000"])
    phases = [
        "--phases",
        "{objective: mlm, train_iters: 6, rotary_base: 10000}",
        "--no-bf16",
        "--dry-run",
    ]
    main(
        [
            *small_corpus.flags,
            *runs.SHORT_RUN[:14],
            "--num-layers",
            "4",
            "--init-from",
            str(run),
            *phases,
        ]
    )
