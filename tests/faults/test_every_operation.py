"""Kills right before each kind of operation on the disk: nothing is lost or false."""

import json
import os

import pytest
import runs
from faults.campaign import MODEL
from faults.ends import differences
from faults.moments import FaultRun

from megaenc.training.command import main

STEPS = 24
# Some of the kinds, that they are not missed: instants that chance would hardly find.
BEGINNING = {
    "a run begins": "os.mkdir ",
    "rows beyond the checkpoint are cut": "os.rename /.metrics.jsonl.tmp",
}
SAVING = {
    "a save begins": "os.mkdir /checkpoints/.iter_",
    "what a killed save left goes": "shutil.rmtree /checkpoints/.iter_",
    "a checkpoint gets its checksums": "os.rename /checkpoints/.iter_/.state.json.tmp",
    "a checkpoint gets its name": "os.rename /checkpoints/.iter_",
    "the tracker names it": "os.rename /checkpoints/.latest_checkpointed_iteration.txt.tmp",
    "an old one goes": "os.rename /checkpoints/iter_",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "below", "instants"),
    [([], "", BEGINNING | SAVING), (["--async-save"], "/checkpoints", SAVING)],
    ids=["synchronous", "asynchronous"],
)
def test_a_kill_before_any_kind_of_operation_changes_nothing(
    saves, below, instants, small_corpus, tmp_path
):
    flags = [
        *small_corpus.flags,
        *MODEL,
        "--train-iters",
        str(STEPS),
        "--save-interval",
        "1",
        "--keep-last",
        "1",
    ]
    main([*flags, "--save", str(tmp_path / "alone")])
    path = os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests")])
    command = [below, *flags, *saves, "--save", str(tmp_path / "run")]
    runs.script(
        runs.WORKERS / "killed_before.py",
        command,
        environment={"PYTHONPATH": path},
        timeout=580,
        fresh=True,
    )
    kills = dict(json.loads(line) for line in (tmp_path / "run.kills").read_text().splitlines())
    print(f"{len(kills)} kills:", *kills, sep="\n")
    assert set(instants.values()) <= kills.keys()
    assert not any(kills.values()), kills
    assert differences(FaultRun(tmp_path / "run"), FaultRun(tmp_path / "alone"), STEPS) == []
