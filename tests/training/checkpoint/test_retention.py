"""Removal of checkpoints after a save by --keep-last and --keep-every."""

import errno
import os
from pathlib import Path

import pytest
from checkpoint_helpers import whole_checkpoint

from megaenc.training.checkpoint import manager
from megaenc.training.checkpoint.manager import CheckpointManager
from megaenc.training.checkpoint_dir import checkpoints_to_delete
from megaenc.training.command import main


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ((None, None), []),
        ((1, None), [10, 20, 30, 40]),
        ((2, None), [10, 20, 30]),
        ((9, None), []),
        ((None, 20), [10, 30]),
        ((3, 20), [10]),
        ((1, None, (20, 35)), [10, 30, 40]),  # named steps stay and are not counted among the last
        ((None, None, (20,)), []),
    ],
)
def test_rules_beside_a_checkpoint_of_step_50(rules, gone):
    assert checkpoints_to_delete([30, 10, 20, 40], *rules) == gone


@pytest.fixture
def directory(tmp_path):
    for step in (10, 20, 30, 40, 50):
        whole_checkpoint(tmp_path / f"iter_{step:07d}", step)
    return tmp_path


def left_after(directory, newest=50, plan=None, **rules) -> list[int]:
    checkpoints = CheckpointManager(directory, **rules)
    checkpoints.delete_old(newest, plan)
    return checkpoints.steps()


def test_a_damaged_one_is_not_counted(directory):
    (directory / "iter_0000040" / "__0_0.distcp").write_bytes(b"cut")
    assert left_after(directory, keep_last=2) == [30, 50]


def test_nothing_goes_beside_a_newest_that_is_damaged(directory):
    (directory / "iter_0000050" / "state.json").unlink()
    assert left_after(directory, keep_last=1) == [10, 20, 30, 40, 50]


def test_steps_that_a_run_has_gone_back_from_stay(directory):
    assert left_after(directory, newest=30, keep_last=1) == [30, 40, 50]


def test_what_has_read_packs_that_the_run_leaves_out_is_not_counted(directory, monkeypatch):
    """After a rewind from step 40 to 30, --keep-last 2 keeps 30 and 50."""
    monkeypatch.setattr(manager, "saw_same_data", lambda plan, state: state["step"] != 40)
    assert left_after(directory, plan=object(), keep_last=2) == [30, 50]


def test_what_cannot_be_read_now_is_not_taken_for_damaged(directory, monkeypatch):
    read_text = Path.read_text

    def stale(path, *how, **more):
        if path.parent.name == "iter_0000020":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_text(path, *how, **more)

    monkeypatch.setattr(Path, "read_text", stale)
    assert left_after(directory, keep_every=20) == [20, 40, 50]


def test_what_a_cut_off_removal_left_is_no_checkpoint_and_goes(directory, monkeypatch):
    # A kill at this point has the same effect.
    monkeypatch.setattr(manager.shutil, "rmtree", lambda *how, **more: None)
    assert left_after(directory, keep_last=4) == [20, 30, 40, 50]
    monkeypatch.undo()
    assert [path.name[:14] for path in directory.glob(".*")] == [".iter_0000010."]
    CheckpointManager(directory).remove_leftovers()
    assert list(directory.glob(".*")) == []


def test_a_run_keeps_what_its_flags_say(short_run, tmp_path):
    flags = [*short_run, "--save", str(tmp_path / "run"), "--save-interval", "2"]
    main([*flags, "--keep-last", "2", "--keep-every", "8"])
    assert CheckpointManager(tmp_path / "run" / "checkpoints").steps() == [8, 16, 18, 20]
