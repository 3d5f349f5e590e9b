"""Two runs started in one directory at once: one gets it, the other is refused."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import runs
from training_helpers import plan_of

from megaenc import backend
from megaenc.errors import InputError
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.command import main
from megaenc.training.engine import Engine
from megaenc.training.run_dir import RunDir

IN_USE = "another process is training in this directory; wait for it or choose another"


def test_one_of_those_that_come_at_once_has_the_directory(short_run, tmp_path):
    """Four commands race twenty times, for new directories and for existing runs.

    The one that gets it keeps it until all have tried.
    """
    plan = plan_of(*short_run, "--save", tmp_path)
    together = threading.Barrier(4)

    def enter(directory):
        together.wait()
        try:
            return RunDir(directory, plan)
        except InputError as error:
            return str(error)

    for race in range(20):
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(enter, [tmp_path / str(race // 2)] * 4))
        [winner] = [answer for answer in answers if isinstance(answer, RunDir)]
        assert sum(IN_USE in answer for answer in answers if answer is not winner) == 3, answers
        winner.lock.release()


def test_a_command_on_a_directory_in_use_is_one_line(short_run, tmp_path, refusal):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        line = refusal(main, [*short_run, "--save", tmp_path])
    assert IN_USE in line


def test_a_run_that_has_lost_its_lock_stops_before_it_writes(
    short_run, tmp_path, monkeypatch, refusal
):
    """Saves touch `.lock`, so that no purge of old files removes it."""
    train_step = Engine.train_step
    lock = tmp_path / "run" / ".lock"
    times = []

    def train_and_lose(engine, step, *arguments):
        if step == 3:
            os.utime(lock, (1, 1))
        if step == 8:
            times.append(lock.stat().st_mtime)
            lock.unlink()
        return train_step(engine, step, *arguments)

    monkeypatch.setattr(Engine, "train_step", train_and_lose)
    flags = [*short_run, "--save-interval", "4", "--log-interval", "1"]
    try:
        line = refusal(main, [*flags, "--save", tmp_path / "run"])
    finally:
        backend.destroy_distributed()  # a rank that finds an error alone leaves without the others
    assert times[0] > 1
    assert ".lock: found it removed or replaced, expected the lock of this run" in line
    assert CheckpointLoader(tmp_path / "run" / "checkpoints").steps() == [4]
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == list(range(1, 8))
