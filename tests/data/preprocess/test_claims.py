"""Claims have one live owner and are taken over from dead or silent ones."""

import multiprocessing
import os
import signal
import time

from megaenc.data.preprocess import claims
from megaenc.data.preprocess.claims import ClaimDirectory


def hold(directory, queue):
    queue.put(ClaimDirectory(directory).acquire("0") is not None)
    signal.pause()  # live until killed


def test_a_killed_owner_of_this_machine_is_replaced_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=hold, args=(tmp_path, queue), daemon=True)
    process.start()
    assert queue.get(timeout=30)
    shared = ClaimDirectory(tmp_path)
    assert shared.acquire("0") is None
    process.kill()
    process.join()
    with shared.acquire("0"):
        assert ClaimDirectory(tmp_path).acquire("0") is None
    assert not list(tmp_path.iterdir())


def test_an_owner_that_gives_no_sign_of_life_is_replaced_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DEAD_SECONDS", 0.4)
    machine = claims._identify_machine()
    path = tmp_path / "work.claim"
    for content in (
        "elsewhere 1",
        f"{machine} 1",
        f"{machine} {1 << 80}",
        machine,
        "",
        "[" * 200,
        "\udcff",
    ):
        path.write_text(content, errors="surrogateescape")
        os.utime(path, (0, 0))  # the clock of another machine does not count
        shared = ClaimDirectory(tmp_path)
        started = time.monotonic()
        while (claim := shared.acquire("work")) is None:
            time.sleep(0.02)
        assert 0.4 <= time.monotonic() - started < 5
        with claim:
            pass


def test_an_owner_stays_while_it_renews_its_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DEAD_SECONDS", 0.5)
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(claims, "_has_ended", lambda owner: False)
    others = ClaimDirectory(tmp_path)
    with ClaimDirectory(tmp_path).acquire("work"):
        for _ in range(20):
            assert others.acquire("work") is None
            time.sleep(0.05)
    assert others.acquire("work") is not None
