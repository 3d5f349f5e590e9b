"""A damaged newest checkpoint is named, the one before it is used; without another the run ends with one line."""

import json
import os
import shutil
from pathlib import Path

import pytest
import runs
from checkpoint_helpers import change_state, flip_a_bit

from megaenc.convert.command import main as convert
from megaenc.training.checkpoint_dir import CheckpointDir, DamagedCheckpointError, json_digest
from megaenc.training.command import main


@pytest.fixture
def copy(saved_run, tmp_path):
    """The run, its checkpoints to be damaged."""
    return shutil.copytree(saved_run, tmp_path / "run")


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"iter_{step:07d}"


def shard(run: Path, step: int) -> Path:
    return sorted(checkpoint(run, step).glob("*.distcp"))[0]


def flags(corpus, folder: Path) -> list[str]:
    return [*corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder)]


def test_state_lists_every_file_with_its_checksum(saved_run):
    folder = checkpoint(saved_run, 12)
    state = json.loads((folder / "state.json").read_text())
    assert sorted(state["files"]) == sorted(set(os.listdir(folder)) - {"state.json"})
    assert all(entry["bytes"] == (folder / name).stat().st_size for name, entry in state["files"].items())


@pytest.mark.slow
def test_every_flipped_bit_of_the_state_is_damage_or_says_the_same(saved_run, tmp_path):
    """Alone in its folder: of the other files only the sizes are looked at."""
    checkpoints = CheckpointDir(shutil.copytree(saved_run / "checkpoints", tmp_path / "checkpoints"))
    file, expected = checkpoints.path(12) / "state.json", checkpoints.read_state(12)
    content, changed = file.read_bytes(), []
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            if checkpoints.read_state(12) != expected:
                changed.append(bit)
        except DamagedCheckpointError:
            pass
    assert changed == []


@pytest.mark.parametrize("has_digest", [True, False])
def test_a_checkpoint_of_an_earlier_version_is_one_line(has_digest, small_corpus, copy, tmp_path, refusal):
    """Which says what reads it; nothing is removed, and nothing begins anew."""
    for step in (4, 8, 12):
        (checkpoint(copy, step) / "index.json").unlink()
        change_state(checkpoint(copy, step), lambda state: state["files"].pop("index.json"))
        if not has_digest:
            file = checkpoint(copy, step) / "state.json"
            state = json.loads(file.read_text())
            del state["sha256"]
            file.write_text(json.dumps(state))
    before = sorted(copy.rglob("*"))
    for command, more in ((main, flags(small_corpus, copy)), (convert, ["to-hf", "--load", copy, "--output", tmp_path / "hf"])):
        line = refusal(command, more)
        assert f"{checkpoint(copy, 12)}: has the format of before 2026-11-26" in line and "1effa6e8 reads it" in line
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize("wrong", [{"identity": None}, {"files": {}}, {"files": {"common.pt": {"bytes": 1}}}, {"tokens": "1"}])
def test_a_state_with_fields_of_another_kind_is_damage(saved_run, tmp_path, wrong):
    shutil.copytree(checkpoint(saved_run, 12), tmp_path / "iter_0000012")
    file = tmp_path / "iter_0000012" / "state.json"
    state = json.loads(file.read_text()) | wrong
    del state["sha256"]
    file.write_text(json.dumps(state | {"sha256": json_digest(state)}))
    with pytest.raises(DamagedCheckpointError, match="not written by a save"):
        CheckpointDir(tmp_path).read_state(12)


@pytest.mark.multiprocess
def test_training_goes_on_from_the_one_before_and_ends_the_same(small_corpus, saved_run, copy):
    """A flipped bit in one, a file cut short in another: found by two ranks, and the third goes on to the same end."""
    damaged, cut = shard(copy, 12), checkpoint(copy, 8) / "common.pt"
    flip_a_bit(damaged)
    cut.write_bytes(cut.read_bytes()[:100])
    more = ["--tensor-model-parallel-size", "2", "--exit-interval", "12"]
    output = runs.script(runs.PRETRAIN, [*flags(small_corpus, copy), *more], processes=2).stdout.splitlines()
    assert [
        line
        for line in output
        if str(damaged) in line and "its content changed" in line and "trying the checkpoint of step 8" in line
    ]
    assert [line for line in output if f"{cut}: found 100 bytes" in line and "trying the checkpoint of step 4" in line]
    assert "resuming after step 4" in "\n".join(output)
    assert [row["step"] for row in runs.metrics(copy)] == list(range(1, 13))
    assert [row["step"] for row in runs.validations(copy)] == [0, 10]
    runs.assert_same_curve(copy, saved_run)
    shutil.rmtree(checkpoint(copy, 8))  # the new one of step 12 has taken the damaged one's place, and is whole
    assert "resuming after step 12" in runs.script(runs.PRETRAIN, flags(small_corpus, copy)).stdout


@pytest.mark.parametrize("field", [b'"seed": 1', b'"tokens": 6144'])
def test_a_flipped_bit_in_what_the_run_has_come_to_is_damage(field, small_corpus, saved_run, copy):
    file = checkpoint(copy, 12) / "state.json"
    content = file.read_bytes()
    assert field in content
    file.write_bytes(content.replace(field, field[:-1] + bytes([field[-1] ^ 1])))
    output = runs.script(runs.PRETRAIN, [*flags(small_corpus, copy), "--exit-interval", "12"]).stdout
    assert f"{file}: its content changed; the checkpoint is damaged: trying" in output
    assert "resuming after step 8" in output
    runs.assert_same_curve(copy, saved_run)


def no_state(run, step):
    (checkpoint(run, step) / "state.json").unlink()


def no_shard(run, step):
    shard(run, step).unlink()


def odd_state(run, step):
    (checkpoint(run, step) / "state.json").write_text('{"step": 7}')


def no_folder(run, step):
    shutil.rmtree(checkpoint(run, step))


def test_without_a_good_one_left_the_run_ends_with_one_line(small_corpus, copy, capfd):
    flip_a_bit(checkpoint(copy, 12) / ".metadata")
    no_state(copy, 8)
    no_folder(copy, 4)
    with pytest.raises(SystemExit) as stop:
        main(flags(small_corpus, copy))
    output = capfd.readouterr()
    assert stop.value.code == 2
    assert f"{checkpoint(copy, 12) / '.metadata'}: its content changed" in output.out
    assert output.err == (
        f"error: {checkpoint(copy, 8) / 'state.json'}: No such file or directory; the checkpoint is incomplete; "
        f"no other is left; delete {copy / 'checkpoints'} to start over\n"
    )


@pytest.mark.parametrize("damage", [no_state, odd_state, no_shard, no_folder])
def test_export_names_the_damage_and_the_others(damage, copy, tmp_path, refusal):
    damage(copy, 12)
    line = refusal(convert, ["to-hf", "--load", copy, "--output", tmp_path / "hf"])
    assert str(checkpoint(copy, 12)) in line
    assert "choose one of steps 4, 8 (--ckpt-step)" in line


def test_checkpoint_of_another_run_is_refused(small_corpus, copy, refusal):
    """Even where the one before it would do: it is no damage but a mistake."""
    change_state(checkpoint(copy, 12), lambda state: state["identity"].update(hidden_size=32))
    line = refusal(main, flags(small_corpus, copy))
    assert f"{checkpoint(copy, 12)} is a checkpoint of a different run: hidden_size is 32 there, 64 here" in line


def test_a_tracker_that_is_no_number_is_refused(small_corpus, copy, refusal):
    tracker = copy / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.write_text("twelve")
    assert f"{tracker}: found 'twelve', expected the number of a step" in refusal(main, flags(small_corpus, copy))


def test_a_save_that_was_killed_before_its_tracker_is_used(small_corpus, copy):
    tracker = copy / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "12\n"
    tracker.unlink()
    leftover = copy / "checkpoints" / ".iter_0000016.0123456789abcdef"
    leftover.mkdir()
    assert "resuming after step 12" in runs.script(runs.PRETRAIN, flags(small_corpus, copy)).stdout
    assert not leftover.exists()
    assert tracker.read_text() == "20\n"


def test_a_node_that_does_not_see_the_shards_says_so(copy, small_corpus, monkeypatch, refusal):
    """Others have verified them."""
    from megaenc.training.checkpoint.loader import CheckpointLoader

    missing, verify = shard(copy, 12), CheckpointLoader.verify

    def verify_elsewhere(self, *arguments):
        state = verify(self, *arguments)
        missing.unlink(missing_ok=True)
        return state

    monkeypatch.setattr(CheckpointLoader, "verify", verify_elsewhere)
    message = refusal(main, flags(small_corpus, copy))
    assert f"{missing}: not found on " in message and "expected a directory that all nodes share" in message


def test_a_shard_that_is_cut_after_its_checksum_is_one_line(copy, small_corpus, monkeypatch, refusal):
    from megaenc.training.checkpoint.loader import CheckpointLoader

    cut, verify = shard(copy, 12), CheckpointLoader.verify

    def verify_before(self, *arguments):
        state = verify(self, *arguments)
        os.truncate(cut, 1000)
        return state

    monkeypatch.setattr(CheckpointLoader, "verify", verify_before)
    assert f"{cut}: ends early" in refusal(main, flags(small_corpus, copy))
