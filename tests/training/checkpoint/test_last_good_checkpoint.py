"""Whatever is wrong with the newest checkpoint, one line says it, and those that are good stay as they are."""

import hashlib
import shutil
from pathlib import Path

import pytest
import runs
from checkpoint_helpers import flip_a_bit, forge

from megaenc.training.command import main


@pytest.fixture
def copy(saved_run, tmp_path):
    """The run with checkpoints of steps 4, 8 and 12, the last to be damaged."""
    return shutil.copytree(saved_run, tmp_path / "run")


def flags(corpus, folder: Path, *more: str) -> list[str]:
    return [*corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), *more]


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"iter_{step:07d}"


def content(folder: Path) -> dict[str, str]:
    """The checksum of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shards(run: Path, step: int) -> dict[str, str]:
    return {name: checksum for name, checksum in content(checkpoint(run, step)).items() if name.endswith(".distcp")}


def cut_short(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1000])


@pytest.mark.parametrize("damage", [cut_short, flip_a_bit, Path.unlink])
def test_damage_is_one_line_and_the_steps_are_made_again(damage, small_corpus, saved_run, copy, capfd):
    good = [content(checkpoint(copy, step)) for step in (4, 8)]
    shard = sorted(checkpoint(copy, 12).glob("*.distcp"))[0]
    damage(shard)
    main(flags(small_corpus, copy, "--exit-interval", "12"))
    output = capfd.readouterr()
    [line] = [line for line in output.out.splitlines() if str(shard) in line]
    assert line.endswith("trying the checkpoint of step 8") and output.err == ""
    assert [content(checkpoint(copy, step)) for step in (4, 8)] == good
    assert shards(copy, 12) == shards(saved_run, 12)  # in the place of the damaged one


def test_the_checkpoint_of_another_model_is_refused_and_all_stay_as_they_are(small_corpus, copy, tmp_path, refusal):
    """Newer than all that is there, whole, and of the same data: only the model is another."""
    other = flags(small_corpus, tmp_path / "other", "--hidden-size", "32", "--eval-interval", "0", "--exit-interval", "16")
    main(other)
    shutil.copytree(checkpoint(tmp_path / "other", 16), checkpoint(copy, 16))
    (copy / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("16\n")
    before = content(copy / "checkpoints")
    line = refusal(main, flags(small_corpus, copy))
    assert f"{checkpoint(copy, 16)} is a checkpoint of a different run: hidden_size is 32 there, 64 here; remove it" in line
    assert content(copy / "checkpoints") == before
    shutil.rmtree(checkpoint(copy, 16))  # as the line says
    main(flags(small_corpus, copy, "--exit-interval", "13"))
    assert [row["step"] for row in runs.metrics(copy)] == list(range(1, 14))


def test_an_index_of_no_save_is_refused_and_all_stay_as_they_are(small_corpus, copy, refusal):
    forge(checkpoint(copy, 12) / "index.json", b'{"optimizer_step": 12, "chunks": [7]}')
    before = content(copy / "checkpoints")
    line = refusal(main, flags(small_corpus, copy))
    assert f"{checkpoint(copy, 12) / 'index.json'}: not written by a save" in line
    assert content(copy / "checkpoints") == before


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_file_of_any_rank_is_named(small_corpus, tmp_path):
    """Of four ranks with the distributed optimizer: lost, cut or changed, the run goes on from the checkpoint before."""
    run = tmp_path / "run"
    command = flags(small_corpus, run, "--use-distributed-optimizer", "--micro-batch-size", "1")
    runs.script(runs.PRETRAIN, [*command, "--save-interval", "4", "--exit-interval", "8"], processes=4)
    saved = shards(run, 8)
    assert sorted(saved) == [f"__{rank}_0.distcp" for rank in range(4)]
    for rank, damage in enumerate([Path.unlink, cut_short, flip_a_bit, flip_a_bit]):
        shard = checkpoint(run, 8) / f"__{rank}_0.distcp"
        damage(shard)
        output = runs.script(runs.PRETRAIN, [*command, "--exit-interval", "8"], processes=4).stdout
        [line] = [line for line in output.splitlines() if str(shard) in line]
        assert line.endswith("trying the checkpoint of step 4")
        assert "resuming after step 4" in output
        assert shards(run, 8) == saved
