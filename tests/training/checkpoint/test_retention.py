"""--keep-last and --keep-every: what goes after a save, and what never does."""

import errno
import os
from pathlib import Path

import pytest
import runs
from checkpoint_helpers import whole_checkpoint

from megaenc.training.checkpoint.manager import CheckpointManager, checkpoints_to_delete


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "gone"),
    [
        (None, None, []),
        (1, None, [10, 20, 30, 40]),
        (2, None, [10, 20, 30]),
        (9, None, []),
        (None, 20, [10, 30]),
        (2, 20, [10, 30]),
        (3, 20, [10]),
    ],
)
def test_rules_beside_a_checkpoint_of_step_50(keep_last, keep_every, gone):
    assert checkpoints_to_delete([30, 10, 20, 40], keep_last, keep_every) == gone


def test_named_steps_stay_and_are_not_counted_among_the_last():
    assert checkpoints_to_delete([30, 10, 20, 40], 1, None, (20, 35)) == [10, 30, 40]
    assert checkpoints_to_delete([30, 10, 20, 40], None, None, (20,)) == []


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20, 30, 40, 50):
        whole_checkpoint(tmp_path / f"iter_{step:07d}", step)
    return tmp_path


def test_a_damaged_one_is_not_counted(folder):
    checkpoints = CheckpointManager(folder, keep_last=2)
    (checkpoints.path(40) / "__0_0.distcp").write_bytes(b"cut")
    checkpoints.delete_old(50)
    assert checkpoints.steps() == [30, 50]


def test_nothing_goes_beside_a_newest_that_is_damaged(folder):
    checkpoints = CheckpointManager(folder, keep_last=1)
    (checkpoints.path(50) / "state.json").unlink()
    checkpoints.delete_old(50)
    assert checkpoints.steps() == [10, 20, 30, 40, 50]


def test_steps_that_a_run_has_gone_back_from_stay(folder):
    checkpoints = CheckpointManager(folder, keep_last=1)
    checkpoints.delete_old(30)
    assert checkpoints.steps() == [30, 40, 50]


def test_what_has_read_packs_that_the_run_leaves_out_is_not_counted(folder, monkeypatch):
    """As after a rewind from step 40 to 30 whose next save is at step 50: the one to fall back to is 30."""
    monkeypatch.setattr("megaenc.training.checkpoint.manager.saw_same_data", lambda plan, state: state["step"] != 40)
    checkpoints = CheckpointManager(folder, keep_last=2)
    checkpoints.delete_old(50, plan=object())
    assert checkpoints.steps() == [30, 50]


def test_what_cannot_be_read_now_is_not_taken_for_damaged(folder, monkeypatch):
    read_text = Path.read_text

    def stale(path, *how, **more):
        if path.parent.name == "iter_0000020":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read_text(path, *how, **more)

    monkeypatch.setattr(Path, "read_text", stale)
    checkpoints = CheckpointManager(folder, keep_every=20)
    checkpoints.delete_old(50)
    assert checkpoints.steps() == [20, 40, 50]


def test_what_a_cut_off_removal_left_is_no_checkpoint_and_goes(folder, monkeypatch):
    checkpoints = CheckpointManager(folder, keep_last=4)
    monkeypatch.setattr(
        "megaenc.training.checkpoint.manager.shutil.rmtree", lambda *how, **more: None
    )  # as a kill there would have it
    checkpoints.delete_old(50)
    assert checkpoints.steps() == [20, 30, 40, 50]
    monkeypatch.undo()
    assert [path.name[:14] for path in checkpoints.folder.glob(".*")] == [".iter_0000010."]
    checkpoints.remove_leftovers()
    assert list(checkpoints.folder.glob(".*")) == []


def test_a_run_keeps_what_its_flags_say(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run"), "--save-interval", "2"]
    runs.script(runs.PRETRAIN, [*flags, "--keep-last", "2", "--keep-every", "8"])
    assert CheckpointManager(tmp_path / "run" / "checkpoints").steps() == [8, 16, 18, 20]
