"""Loss spikes: the same in every run of the same steps, and rewinds after them."""

import json
import shutil
import signal

import numpy as np
import pytest
import runs
from workers.bad_packs import spoil

from megaenc.counter_rng import uniforms
from megaenc.training.callbacks.loss_spikes import (
    MAX_RECENT_LOSSES,
    MIN_RECENT_LOSSES,
    RecentLosses,
    compute_deviations,
)
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.command import main

# Eight packs a step: step 40 reads packs 312 to 319.
RUN = [
    *runs.SHORT_RUN,
    "--no-bf16",
    "--train-iters",
    "48",
    "--objective-schedule",
    "clm",
    "--eval-interval",
    "20",
]
SPIKE = {315: 30.0}


def noise(count: int) -> list[float]:
    """Return normal numbers of mean 3 and standard deviation 0.1."""
    radius = uniforms(0, "radius", count)
    angle = uniforms(0, "angle", count)
    return (3 + 0.1 * np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)).tolist()


def test_deviations_are_those_of_normal_noise_and_a_spike_does_not_hide_the_next():
    assert compute_deviations(3.6, noise(2000)) == pytest.approx(6, rel=0.1)
    assert compute_deviations(2.4, noise(2000)) == pytest.approx(-6, rel=0.1)
    assert compute_deviations(3.6, noise(120) + [30.0] * 8) == pytest.approx(
        compute_deviations(3.6, noise(128)), rel=0.25
    )
    assert compute_deviations(2.0, [2.0] * 50) == 0
    assert compute_deviations(2.0 + 1e-6, [2.0] * 50) < 1 < compute_deviations(2.1, [2.0] * 50)


def test_each_objective_has_its_own_losses_and_comes_back_anew():
    losses = RecentLosses()
    deviations = [losses.add(step, "clm", 3.0 + 0.01 * (step % 7)) for step in range(1, 41)]
    assert deviations.count(None) == MIN_RECENT_LOSSES
    assert None not in deviations[MIN_RECENT_LOSSES:]
    assert losses.add(41, "mlm", 9.0) is None
    assert losses.add(42, "clm", 9.0) > 6
    assert losses.add(43, "clm", None) is None
    assert losses.add(42 + MIN_RECENT_LOSSES, "clm", 3.0) is not None
    assert losses.add(43 + 2 * MIN_RECENT_LOSSES, "clm", 9.0) is None
    for step in range(200, 400):
        losses.add(step, "clm", 3.0)
    assert len(losses.state["clm"]["losses"]) == MAX_RECENT_LOSSES


def assert_same_run(run, reference):
    assert runs.curve(run) == runs.curve(reference)
    assert runs.validations(run) == runs.validations(reference)
    runs.assert_same_weights(run, reference, 48)


@pytest.fixture(scope="module")
def without(small_corpus, tmp_path_factory):
    """The whole run without the packs that steps 38 to 40 of RUN read."""
    directory = tmp_path_factory.mktemp("without") / "run"
    main(
        [
            *small_corpus.flags,
            *RUN,
            "--skip-packs",
            "296-319",
            "--save",
            str(directory),
            "--save-interval",
            "5",
        ]
    )
    return directory


REWIND = ["--max-rewinds", "1", "--rewind-skip-iters", "3", "--save-interval", "5"]


@pytest.fixture(scope="module")
def rewound(small_corpus, tmp_path_factory):
    """RUN with a spike at step 40, rewound to its checkpoint of 35; and its output."""
    directory = tmp_path_factory.mktemp("rewound") / "run"
    flags = [json.dumps(SPIKE), *small_corpus.flags, *RUN, *REWIND, "--save", str(directory)]
    return directory, runs.script(runs.WORKERS / "bad_packs.py", flags).stdout


def test_a_rewind_makes_the_run_that_never_read_those_packs(rewound, without):
    directory, output = rewound
    assert_same_run(directory, without)
    [line] = [line for line in output.splitlines() if line.startswith("step 40: ")]
    assert "is a spike, " in line and line.endswith(
        " deviations above the recent ones; rewind 1 of 1"
    )
    assert "resuming after step 35" in output and "; 24 packs left out: 296-319" in output
    facts = json.loads((directory / "run.json").read_text())
    assert facts["skip_packs"] == facts["rewinds"] == ["296-319"]
    assert "skip_packs:\n- 296-319\n" in (directory / "config.yaml").read_text()


@pytest.mark.slow
def test_killed_in_a_rewind_the_same_command_goes_on(small_corpus, without, tmp_path, monkeypatch):
    """Only the list is written, and checkpoints exist that have read those packs."""
    directory = tmp_path / "run"
    flags = [
        json.dumps(SPIKE),
        *small_corpus.flags,
        *RUN,
        *REWIND,
        "--save-interval",
        "3",
        "--skip-packs",
        "900",
    ]
    monkeypatch.setenv("KILLED", "1")
    runs.script(
        runs.WORKERS / "bad_packs.py", [*flags, "--save", str(directory)], expect=-signal.SIGKILL
    )
    checkpoints = CheckpointLoader(directory / "checkpoints")
    assert checkpoints.tracked_step() == 39 and runs.metrics(directory)[-1]["step"] == 40
    monkeypatch.delenv("KILLED")
    output = runs.script(runs.WORKERS / "bad_packs.py", [*flags, "--save", str(directory)]).stdout
    assert "resuming after step 36" in output and "25 packs left out: 296-319 900" in output
    assert_same_run(directory, without)
    assert json.loads((directory / "run.json").read_text())["rewinds"] == ["296-319"]


def test_a_branch_leaves_out_what_rewinds_did_and_needs_a_step_that_they_left(
    small_corpus, rewound, without, tmp_path, refusal
):
    parent = shutil.copytree(rewound[0], tmp_path / "parent")
    flags = [*small_corpus.flags, *RUN, "--branch-from", str(parent), "--branch-at", "35", "--save"]
    main([*flags, str(tmp_path / "run")])
    assert runs.curve(tmp_path / "run") == runs.curve(without, after=35)
    facts = json.loads((parent / "run.json").read_text())
    (parent / "run.json").write_text(json.dumps(facts | {"skip_packs": ["200", "296-319"]}))
    line = refusal(main, [*flags, str(tmp_path / "another")])
    assert "has since rewound and skipped packs that this step read" in line


def test_without_a_checkpoint_it_begins_again(small_corpus, without, tmp_path, monkeypatch):
    spoil(SPIKE, monkeypatch.setattr)
    main([*small_corpus.flags, *RUN, *REWIND[:4], "--save", str(tmp_path / "run")])
    assert_same_run(tmp_path / "run", without)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_go_back_together(small_corpus, tmp_path):
    """Each has half of the optimizer's state."""
    flags = [
        *small_corpus.flags,
        *RUN[:-2],
        "--use-distributed-optimizer",
        "--bf16",
        "--eval-interval",
        "0",
        "--save",
    ]
    rewind = ["--max-rewinds", "1", "--rewind-skip-iters", "3", "--save-interval", "20"]
    arguments = [json.dumps(SPIKE), *flags, str(tmp_path / "run"), *rewind]
    runs.script(runs.WORKERS / "bad_packs.py", arguments, processes=2)
    runs.script(
        runs.PRETRAIN, [*flags, str(tmp_path / "whole"), "--skip-packs", "296-319"], processes=2
    )
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    runs.assert_same_weights(tmp_path / "run", tmp_path / "whole", 48)


def test_rewinds_are_used_up_and_a_checkpoint_in_the_midst_is_enough(
    small_corpus, tmp_path, monkeypatch, capsys
):
    """After each rewind step 40 reads other packs, which are bad as well."""
    spoil({315: 30.0, 339: 30.0, 345: 30.0}, monkeypatch.setattr)
    flags = [
        *small_corpus.flags,
        *RUN,
        "--max-rewinds",
        "2",
        "--save-interval",
        "13",
        "--keep-last",
        "1",
        "--async-save",
    ]
    main([*flags, "--save", str(tmp_path / "run")])
    lines = [line for line in capsys.readouterr().out.splitlines() if " is a spike, " in line]
    assert [line.rpartition("; ")[2] for line in lines] == [
        "rewind 1 of 2",
        "rewind 2 of 2",
        "all of --max-rewinds 2 are used",
    ]
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["rewinds"] == ["312-319", "320-343"] and facts["skip_packs"] == ["312-343"]
    assert [row["loss_spikes"] for row in runs.metrics(tmp_path / "run")][-1] == 1


def test_spikes_are_counted_and_found_again_after_a_stop(
    small_corpus, tmp_path, monkeypatch, capsys
):
    spoil(SPIKE, monkeypatch.setattr)
    flags = [*small_corpus.flags, *RUN, "--log-interval", "3", "--save"]
    main([*flags, str(tmp_path / "whole")])
    assert " deviations above the recent ones\n" in capsys.readouterr().out
    for _ in range(2):
        main([*flags, str(tmp_path / "run"), "--exit-interval", "36"])
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    rows = {row["step"]: row for row in runs.metrics(tmp_path / "whole")}
    assert list(rows) == [*range(3, 40, 3), 40, 42, 45, 48]  # the spike has a row of its own
    assert rows[40]["loss_deviations"] > 6 and [
        rows[step]["loss_spikes"] for step in (39, 40, 42, 48)
    ] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--max-rewinds", "1", "--save", "x", "--loss-spike-sigmas", "0"],
            "expected --loss-spike-sigmas above 0",
        ),
        (["--rewind-skip-iters", "0"], "--rewind-skip-iters: found 0, expected 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, words, small_corpus, refusal):
    assert words in refusal(main, [*small_corpus.flags, *RUN, *flags])
