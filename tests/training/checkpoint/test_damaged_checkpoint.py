"""Resuming if the newest checkpoint is damaged, with and without an older one."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import runs
from checkpoint_helpers import change_state, flip_a_bit

from megaenc.convert.command import main as convert
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint_dir import CheckpointDir, DamagedCheckpointError
from megaenc.training.command import main

TRACKER = "checkpoints/latest_checkpointed_iteration.txt"


@pytest.fixture
def copy(saved_run, tmp_path):
    """A copy of the run, its checkpoints to be damaged."""
    return shutil.copytree(saved_run, tmp_path / "run")


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"iter_{step:07d}"


def flags(corpus, directory: Path) -> list[str]:
    return [*corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(directory)]


def digests(directory: Path, pattern: str = "*") -> dict[str, str]:
    """Return the checksum of every file."""
    files = [path for path in directory.rglob(pattern) if path.is_file()]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "state lost": lambda directory: (directory / "state.json").unlink(),
    "state of another step": lambda directory: (directory / "state.json").write_text('{"step": 7}'),
    "shard lost": lambda directory: (directory / "__0_0.distcp").unlink(),
    "shard cut": lambda directory: cut_short(directory / "__0_0.distcp"),
    "bit of a shard": lambda directory: flip_a_bit(directory / "__0_0.distcp"),
    "bit of the index of torch": lambda directory: flip_a_bit(directory / ".metadata"),
    "all lost": shutil.rmtree,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_export_names_the_damage_and_the_others(name, copy, tmp_path, refusal):
    DAMAGES[name](checkpoint(copy, 12))
    line = refusal(convert, ["to-hf", "--load", copy, "--output", tmp_path / "hf"])
    assert str(checkpoint(copy, 12)) in line
    assert "choose one of steps 4, 8 (--ckpt-step)" in line


@pytest.mark.multiprocess
def test_ranks_tell_each_other_of_damage_and_go_back_twice(small_corpus, tmp_path):
    """One checkpoint has a damaged shard of the last rank, the other a damaged state."""
    directory = tmp_path / "run"
    command = [
        *flags(small_corpus, directory),
        "--use-distributed-optimizer",
        "--save-interval",
        "4",
        "--exit-interval",
        "12",
    ]
    runs.script(runs.PRETRAIN, command, processes=2)
    curve = runs.curve(directory)
    validations = runs.validations(directory)
    saved = digests(checkpoint(directory, 12), "*.distcp")
    assert sorted(saved) == ["__0_0.distcp", "__1_0.distcp"]
    shard = checkpoint(directory, 12) / "__0_0.distcp"
    flip_a_bit(shard)
    state = checkpoint(directory, 8) / "state.json"
    content = state.read_bytes()
    assert b'"tokens": 4096' in content
    state.write_bytes(content.replace(b'"tokens": 4096', b'"tokens": 4097'))
    output = runs.script(runs.PRETRAIN, command, processes=2).stdout
    assert f"{shard}: its content changed" in output
    assert (
        f"{state}: its content changed; the checkpoint is damaged: trying the checkpoint of step 4"
        in output
    )
    assert "resuming after step 4" in output
    assert runs.curve(directory) == curve
    assert runs.validations(directory) == validations
    assert digests(checkpoint(directory, 12), "*.distcp") == saved


def test_a_flipped_bit_of_the_state_is_damage_or_says_the_same(saved_run, tmp_path):
    """Every eleventh bit of state.json is tried."""
    checkpoints = CheckpointDir(
        shutil.copytree(saved_run / "checkpoints", tmp_path / "checkpoints")
    )
    file = checkpoints.path(12) / "state.json"
    expected = checkpoints.read_state(12)
    content = file.read_bytes()
    changed = []
    for bit in range(0, 8 * len(content), 11):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            if checkpoints.read_state(12) != expected:
                changed.append(bit)
        except DamagedCheckpointError:
            pass
    assert changed == []


@pytest.mark.parametrize(
    "wrong",
    [{"identity": None}, {"files": {}}, {"files": {"common.pt": {"bytes": 1}}}, {"tokens": "1"}],
)
def test_a_state_with_fields_of_another_kind_is_damage(wrong, copy):
    change_state(checkpoint(copy, 12), lambda state: state.update(wrong))
    with pytest.raises(DamagedCheckpointError, match="not written by a save"):
        CheckpointDir(copy / "checkpoints").read_state(12)


def test_without_a_good_one_left_the_run_ends_with_one_line(small_corpus, copy, capfd):
    DAMAGES["bit of the index of torch"](checkpoint(copy, 12))
    DAMAGES["state lost"](checkpoint(copy, 8))
    DAMAGES["all lost"](checkpoint(copy, 4))
    with pytest.raises(SystemExit) as stop:
        main(flags(small_corpus, copy))
    output = capfd.readouterr()
    assert stop.value.code == 2
    assert f"{checkpoint(copy, 12) / '.metadata'}: its content changed" in output.out
    assert output.err == (
        f"error: {checkpoint(copy, 8) / 'state.json'}: No such file or directory; "
        "the checkpoint is incomplete; "
        f"no other is left; delete {copy / 'checkpoints'} to start over\n"
    )


def test_the_checkpoint_of_another_run_is_refused_and_all_stay_as_they_are(
    small_corpus, copy, refusal
):
    """The run does not fall back to an older one: this is a mistake, no damage."""
    change_state(checkpoint(copy, 12), lambda state: state["identity"].update(hidden_size=32))
    before = digests(copy / "checkpoints")
    line = refusal(main, flags(small_corpus, copy))
    assert (
        f"{checkpoint(copy, 12)} is a checkpoint of a different run: hidden_size is 32 there, "
        "64 here; remove it" in line
    )
    assert digests(copy / "checkpoints") == before


def test_a_tracker_that_is_no_number_is_refused(small_corpus, copy, refusal):
    (copy / TRACKER).write_text("twelve")
    assert f"{copy / TRACKER}: found 'twelve', expected the number of a step" in refusal(
        main, flags(small_corpus, copy)
    )


def test_a_save_that_was_killed_before_its_tracker_is_used(small_corpus, copy, capfd):
    (copy / TRACKER).unlink()
    leftover = copy / "checkpoints" / ".iter_0000016.0123456789abcdef"
    leftover.mkdir()
    main([*flags(small_corpus, copy), "--exit-interval", "13"])
    assert "resuming after step 12" in capfd.readouterr().out
    assert not leftover.exists()
    assert (copy / TRACKER).read_text() == "13\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (os.unlink, ("not found on ", "expected a directory that all nodes share")),
        (lambda shard: os.truncate(shard, 1000), ("ends early",)),
    ],
    ids=["a node does not see it", "it is cut"],
)
def test_a_shard_that_changes_after_its_checksum_is_one_line(
    change, words, copy, small_corpus, monkeypatch, refusal
):
    shard = checkpoint(copy, 12) / "__0_0.distcp"
    verify = CheckpointLoader.verify
    changed = []

    def verify_before(self, *arguments):
        state = verify(self, *arguments)
        if not changed:
            changed.append(shard)
            change(shard)
        return state

    monkeypatch.setattr(CheckpointLoader, "verify", verify_before)
    line = refusal(main, flags(small_corpus, copy))
    for word in (f"{shard}: ", *words):
        assert word in line
