"""Claims: one live owner at a time, taken over from owners that have died or fallen silent."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from megaenc.data.preprocess import claims
from megaenc.data.preprocess.claims import ClaimFolder


def take_all(folder, count, queue):
    shared = ClaimFolder(folder)
    own = [name for name in map(str, range(count)) if shared.acquire(name) is not None]
    queue.put(own)
    signal.pause()  # live until killed


@pytest.fixture
def owner(tmp_path):
    """Start a process that claims names 0..count-1 and lives on; return it and its names."""
    context, processes = multiprocessing.get_context("fork"), []

    def start(count):
        queue = context.Queue()
        processes.append(context.Process(target=take_all, args=(tmp_path, count, queue), daemon=True))
        processes[-1].start()
        return processes[-1], queue

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_a_killed_owner_of_this_machine_is_replaced_at_once_and_its_files_removed(tmp_path, owner):
    process, queue = owner(1)
    assert queue.get(timeout=30) == ["0"]
    rest, other = tmp_path / f".0-text.bin.{process.pid}-0123abcd.tmp", tmp_path / f".1-text.bin.{process.pid}-0123abcd.tmp"
    rest.touch(), other.touch()
    shared = ClaimFolder(tmp_path)
    assert shared.acquire("0") is None and rest.exists()
    process.kill()
    process.join()
    assert shared.acquire("0") is not None
    assert sorted(path.name for path in tmp_path.glob("0.claim-*")) == ["0.claim-1", "0.claim-2"]
    assert not rest.exists() and other.exists()


def test_a_silent_owner_on_another_machine_is_replaced_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DEAD_SECONDS", 0.4)
    foreign = {"machine": "elsewhere", "pid": 1, "start": "1", "done": 3}
    path = tmp_path / "work.claim-1"
    for content in (json.dumps(foreign), "", "[" * 200):
        path.write_text(content)
        os.utime(path, (0, 0))  # the clock of another machine does not count
        shared = ClaimFolder(tmp_path)
        started = time.monotonic()
        while (claim := shared.acquire("work")) is None:
            time.sleep(0.02)
        assert 0.4 <= time.monotonic() - started < 5
        claim.path.unlink()


def test_files_of_a_process_are_kept_if_another_has_its_id_now(tmp_path):
    owner = claims._identify_process() | {"start": "1"}
    (tmp_path / "part.claim-1").write_text(json.dumps(owner))
    (temporary := tmp_path / f".part-text.bin.{os.getpid()}-x.tmp").touch()
    assert ClaimFolder(tmp_path).acquire("part").generation == 2
    assert temporary.exists()
