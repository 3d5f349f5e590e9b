"""--async-save writes what a save without it writes, while updates go on; and no error, signal or kill does more harm to it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import runs
from checkpoint_helpers import assert_only_step_4, errors

from megaenc.errors import InputError, LocalInputError
from megaenc.training.checkpoint.manager import CheckpointManager
from megaenc.training.distributed.signals import EXIT_STOPPED

SLOW, LATE = runs.WORKERS / "slow_disk.py", ["2", "1"]  # written two updates later, or after a second
NEVER = ["100000", "120"]
EVERY = [*runs.SHORT_RUN, "--save-interval", "4"]
LAYOUTS = {
    1: ["--no-bf16"],
    2: ["--bf16", "--use-distributed-optimizer"],
}


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["one process", "two with the distributed optimizer"]
)
def processes(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def waiting(small_corpus, processes, tmp_path_factory) -> Path:
    """Twenty steps, each fourth saved, none made while that is written."""
    folder = tmp_path_factory.mktemp("waiting") / "run"
    runs.script(runs.PRETRAIN, [*small_corpus.flags, *EVERY, *LAYOUTS[processes], "--save", str(folder)], processes=processes)
    return folder


def curve(folder: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in runs.metrics(folder)]


def assert_same_checkpoints(folder: Path, other: Path, steps: list[int]) -> None:
    """The same files, with the same bytes."""
    for step in steps:
        paths = [CheckpointManager(run / "checkpoints").path(step) for run in (folder, other)]
        actual, expected = (json.loads((path / "state.json").read_text()) for path in paths)
        assert sorted(actual["files"]) == sorted({*os.listdir(paths[0])} - {"state.json"})
        assert sorted(actual["files"]) == sorted(expected["files"])
        assert actual == expected


@pytest.mark.multiprocess
def test_each_checkpoint_is_that_of_its_step(waiting, small_corpus, processes, tmp_path):
    """Written when two more updates have changed the weights; a save that is due waits for the one before."""
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *EVERY, *LAYOUTS[processes], "--async-save", "--save", str(folder)]
    output = runs.script(SLOW, [*LATE, *flags], processes=processes).stdout
    written = re.findall(r"shards of step (\d+) are written after update (\d+)", output)
    assert written == [("4", "6"), ("8", "10"), ("12", "14"), ("16", "18"), ("20", "20")]
    checkpoints = CheckpointManager(folder / "checkpoints")
    assert checkpoints.steps() == [4, 8, 12, 16, 20]
    assert checkpoints.tracked_step() == 20
    assert_same_checkpoints(folder, waiting, checkpoints.steps())
    assert curve(folder) == curve(waiting)


@pytest.mark.multiprocess
def test_a_run_goes_on_from_one_bitwise(waiting, small_corpus, processes, tmp_path):
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *EVERY, *LAYOUTS[processes], "--async-save", "--save", str(folder), "--exit-interval", "10"]
    for _ in range(2):
        runs.script(runs.PRETRAIN, [*flags, "--keep-last", "2"], processes=processes)
    assert curve(folder) == curve(waiting)
    assert CheckpointManager(folder / "checkpoints").steps() == [16, 20]
    assert_same_checkpoints(folder, waiting, [16, 20])


class Running:
    """A run of one process in the background, up to the row of `step`; killed at the end, whatever happens."""

    def __init__(self, flags: list[str], folder: Path, step: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *map(str, flags), "--save", str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(runs.ROOT), "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        self.folder, self.step = folder, step

    def __enter__(self) -> subprocess.Popen:
        log, deadline = self.folder / "metrics.jsonl", time.monotonic() + 120
        while not (log.exists() and runs.metrics(self.folder)[-1:] and runs.metrics(self.folder)[-1]["step"] >= self.step):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "the steps were not made"
            time.sleep(0.05)
        return self.process

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1], indirect=True, ids=["one process"])
def test_a_kill_in_the_middle_leaves_the_one_before(waiting, small_corpus, tmp_path):
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *EVERY, *LAYOUTS[1], "--async-save"]
    runs.script(runs.PRETRAIN, [*flags, "--save", str(folder), "--exit-interval", "4"])
    with Running([SLOW, *NEVER, *flags], folder, step=8) as process:
        while not (attempts := list(folder.glob("checkpoints/.iter_0000008.*"))):
            time.sleep(0.01)
        process.kill()
    assert CheckpointManager(folder / "checkpoints").steps() == [CheckpointManager(folder / "checkpoints").tracked_step()] == [4]
    [attempt] = attempts
    assert attempt.is_dir()
    runs.script(runs.PRETRAIN, [*flags, "--save", str(folder)])
    assert not attempt.exists()
    assert curve(folder) == curve(waiting)
    assert_same_checkpoints(folder, waiting, [4, 8, 12, 16, 20])


@pytest.mark.slow
def test_a_signal_waits_for_the_save_that_is_under_way(small_corpus, tmp_path):
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *EVERY, *LAYOUTS[1], "--async-save", "--train-iters", "100000", "--log-interval", "1"]
    flags += ["--eval-interval", "0", "--save-interval", "30"]
    with Running([SLOW, "100000", "3", *flags], folder, step=32) as process:
        assert CheckpointManager(folder / "checkpoints").steps() == []
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED
    stopped = runs.metrics(folder)[-1]["step"]
    assert CheckpointManager(folder / "checkpoints").steps() == [30, stopped]
    assert CheckpointManager(folder / "checkpoints").tracked_step() == stopped
    assert "stopped by SIGTERM" in out


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["1:shard", "0:metadata"])
def test_full_for_one_rank_ends_both_with_one_line(where, small_corpus, tmp_path):
    flags = [*small_corpus.flags, *EVERY, "--no-bf16", "--async-save", "--save", str(tmp_path / "run")]
    flags += ["--tensor-model-parallel-size", "2"]
    result = runs.script(runs.WORKERS / "full_disk.py", [where, *flags], processes=2, expect=1, timeout=90)
    [line] = errors(result)
    assert "cannot be written to: No space left on device; step 8 is not saved, step 4 is" in line
    assert_only_step_4(tmp_path / "run")


def test_disk_that_fills_up(small_corpus, small_disk):
    flags = [*small_corpus.flags, *EVERY, "--no-bf16", "--async-save", "--save", str(small_disk / "run")]
    result = runs.script(runs.PRETRAIN, flags, expect=2)
    [line] = errors(result)
    assert result.stderr == line + "\n"
    assert "cannot be written to: No space left on device; step 8 is not saved, step 4 is: give the same command again" in line
    assert_only_step_4(small_disk / "run")


@pytest.fixture
def engine(one_process, small_corpus):
    from megaenc.training.config import parse_config
    from megaenc.training.engine import Engine
    from megaenc.training.planning import build_plan

    return Engine(build_plan(parse_config([*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16"], "test")), one_process)


@pytest.mark.parametrize("error", [InputError, LocalInputError, RuntimeError])
def test_an_error_does_not_lose_a_save_that_was_begun(error, engine, tmp_path, monkeypatch):
    from megaenc.training.checkpoint import chunk_files

    checkpoints, file_digest, hashed_files = CheckpointManager(tmp_path), chunk_files.file_digest, []

    def hash_slowly(file):
        hashed_files.append(file.name)
        time.sleep(0.6)
        return file_digest(file)

    monkeypatch.setattr(chunk_files, "file_digest", hash_slowly)
    engine.train_step(1)
    with pytest.raises(error, match="of another kind"), checkpoints.drain_saves():
        checkpoints.save(engine, 1, {}, block=False)
        checkpoints.finish_save(block=False)
        assert checkpoints.steps() == []
        raise error("of another kind")
    assert hashed_files == ["__0_0.distcp"]
    assert checkpoints.verify(1)["step"] == 1
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_tracker_names_a_checkpoint_that_is_there(engine, tmp_path, monkeypatch):
    """Written before the checkpoint has its name, it would name nothing after a kill between the two."""
    from megaenc.training.checkpoint import manager

    write, named = manager.atomic_write, []

    def watched(path: Path, content: str) -> None:
        if path.name == manager.TRACKER_FILE:
            named.append((content, (tmp_path / f"iter_{int(content):07d}" / "state.json").exists()))
        write(path, content)

    monkeypatch.setattr(manager, "atomic_write", watched)
    engine.train_step(1)
    CheckpointManager(tmp_path).save(engine, 1, {})
    assert named == [("1\n", True)]
