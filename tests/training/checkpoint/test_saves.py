"""Saves, synchronous or not, that survive errors, signals, kills and full disks."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import runs
from checkpoint_helpers import assert_only_step_4, errors

from megaenc.errors import InputError, LocalInputError
from megaenc.training.checkpoint.manager import CheckpointManager

SLOW = runs.WORKERS / "slow_disk.py"
TWO_UPDATES_LATER = ["2", "4"]  # or after four seconds
EVERY = [*runs.SHORT_RUN, "--train-iters", "12", "--save-interval", "4"]


def assert_same_runs(directory: Path, other: Path) -> None:
    """Assert the same rows, and checkpoints with the same files and bytes."""
    assert runs.curve(directory) == runs.curve(other)
    for step in (4, 8, 12):
        path = CheckpointManager(directory / "checkpoints").path(step)
        state = json.loads((path / "state.json").read_text())
        assert sorted(state["files"]) == sorted({*os.listdir(path)} - {"state.json"})
        other_path = CheckpointManager(other / "checkpoints").path(step)
        assert state == json.loads((other_path / "state.json").read_text())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_each_checkpoint_is_that_of_its_step(small_corpus, tmp_path):
    """It is written two steps later; a save that is due waits for the one before."""
    flags = [*small_corpus.flags, *EVERY, "--bf16", "--use-distributed-optimizer", "--save"]
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "waiting")], processes=2)
    directory = tmp_path / "run"
    output = runs.script(
        SLOW, [*TWO_UPDATES_LATER, *flags, str(directory), "--async-save"], processes=2
    ).stdout
    written = re.findall(r"shards of step (\d+) are written after update (\d+)", output)
    assert written == [("4", "6"), ("8", "10"), ("12", "12")]
    assert CheckpointManager(directory / "checkpoints").tracked_step() == 12
    assert_same_runs(directory, tmp_path / "waiting")


def test_a_kill_in_the_middle_leaves_the_one_before(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *EVERY, "--no-bf16", "--save"]
    directory = tmp_path / "run"
    runs.script(runs.PRETRAIN, [*flags, str(tmp_path / "waiting")])
    command = [*TWO_UPDATES_LATER, *flags, str(directory), "--async-save"]
    runs.script(SLOW, command, environment={"KILLED": "8"}, expect=-signal.SIGKILL)
    checkpoints = CheckpointManager(directory / "checkpoints")
    assert checkpoints.steps() == [checkpoints.tracked_step()] == [4]
    assert runs.metrics(directory)[-1]["step"] >= 9
    [attempt] = directory.glob("checkpoints/.iter_0000008.*")
    runs.script(SLOW, command)
    assert not attempt.exists()
    assert_same_runs(directory, tmp_path / "waiting")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("where", "more"), [("1:shard", []), ("0:metadata", []), ("1:shard", ["--async-save"])]
)
def test_full_for_one_rank_ends_both_with_one_line(where, more, small_corpus, tmp_path):
    """Only rank 0 writes the indexes: it must tell the other rank, which waits."""
    flags = [*small_corpus.flags, *EVERY, "--no-bf16", *more, "--save", str(tmp_path / "run")]
    flags += ["--tensor-model-parallel-size", "2"]
    result = runs.script(
        runs.WORKERS / "full_disk.py", [where, *flags], processes=2, expect=1, timeout=90
    )
    [line] = errors(result)
    assert "cannot be written to: No space left on device; step 8 is not saved, step 4 is" in line
    assert "Traceback" not in result.stderr
    assert_only_step_4(tmp_path / "run")


@pytest.mark.parametrize("more", [[], ["--async-save"]])
def test_a_disk_that_fills_up_is_one_line_and_the_run_goes_on_when_there_is_room(
    more, small_corpus, small_disk
):
    flags = [*small_corpus.flags, *EVERY, "--no-bf16", *more, "--save", str(small_disk / "run")]
    result = runs.script(runs.PRETRAIN, flags, expect=2)
    [line] = errors(result)
    assert result.stderr == line + "\n"
    assert (
        "cannot be written to: No space left on device; "
        "step 8 is not saved, step 4 is: give the same command again" in line
    )
    assert_only_step_4(small_disk / "run")
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert (
        "resuming after step 4"
        in runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "8"]).stdout
    )
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    [line] = errors(runs.script(runs.PRETRAIN, flags, expect=2))
    assert "Read-only file system" in line


@pytest.fixture
def engine(engine_of, short_run):
    engine = engine_of(*short_run)
    engine.train_step(1)
    return engine


def test_an_error_does_not_lose_a_save_that_was_begun(engine, tmp_path, monkeypatch):
    from megaenc.training.checkpoint import chunk_files

    file_digest = chunk_files.file_digest
    hashed_files = []

    def hash_slowly(file):
        hashed_files.append(file.name)
        time.sleep(0.6)
        return file_digest(file)

    monkeypatch.setattr(chunk_files, "file_digest", hash_slowly)
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(LocalInputError, match="of another kind"), checkpoints.drain_saves():
        checkpoints.save(engine, 1, {}, block=False)
        checkpoints.finish_save(block=False)
        assert checkpoints.steps() == []
        raise LocalInputError("of another kind")
    assert hashed_files == ["__0_0.distcp"]
    assert checkpoints.verify(1)["step"] == 1
    assert list(tmp_path.glob(".*")) == []


def test_the_tracker_names_a_checkpoint_that_is_there(engine, tmp_path, monkeypatch):
    """The tracker is written last, so that it names a checkpoint after any kill."""
    from megaenc.training.checkpoint import manager

    write = manager.atomic_write
    named = []

    def watched(path: Path, content: str) -> None:
        if path.name == manager.TRACKER_FILE:
            named.append((content, (tmp_path / f"iter_{int(content):07d}" / "state.json").exists()))
        write(path, content)

    monkeypatch.setattr(manager, "atomic_write", watched)
    CheckpointManager(tmp_path).save(engine, 1, {})
    assert named == [("1\n", True)]


def test_a_save_of_a_run_that_has_lost_its_lock_is_not_published(engine, tmp_path):
    def refuse() -> None:
        raise InputError("the lock is lost")

    with pytest.raises(
        InputError, match="the lock is lost; step 1 is not saved, and no step before it"
    ):
        CheckpointManager(tmp_path, before_publish=refuse).save(engine, 1, {})
    assert list(tmp_path.iterdir()) == []
