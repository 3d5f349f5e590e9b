"""Micro-batches prepared ahead: the ones asked for, in order."""

import subprocess
import sys
import threading
import time
import weakref

import pytest
import runs

from megaenc.training.command import main
from megaenc.training.engine import repeat_iterator
from megaenc.training.micro_batches import DEPTH, Prefetcher
from megaenc.training.timers import StepTimers


def test_results_come_in_order_and_the_next_are_begun():
    built_keys = []
    ahead = Prefetcher(lambda key: built_keys.append(key) or 10 * key)
    assert list(ahead.iterate([1, 2, 3], next_keys=[4, 5, 6, 7])) == [10, 20, 30]
    deadline = time.monotonic() + 10
    while len(built_keys) < 3 + DEPTH and time.monotonic() < deadline:
        time.sleep(0.01)
    assert built_keys == [1, 2, 3, 4, 5]  # two ahead, and no further
    assert list(ahead.iterate([4, 9], next_keys=[8])) == [40, 90]  # the second guess was wrong
    assert list(ahead.iterate([7], next_keys=[])) == [70]


def test_they_are_made_while_others_are_used():
    second_started = threading.Event()
    ahead = Prefetcher(lambda key: second_started.set() if key == 2 else key)
    results = ahead.iterate([1, 2])
    assert next(results) == 1
    assert second_started.wait(10)  # though nobody has asked for the second


def test_an_error_arrives_in_its_place():
    def make(key):
        if key == 2:
            raise ValueError("no such document")
        return key

    results = Prefetcher(make).iterate([1, 2, 3])
    assert next(results) == 1
    with pytest.raises(ValueError, match="no such document"):
        next(results)


def test_the_thread_is_set_up_and_leaves_with_its_owner():
    threads = []
    ahead = Prefetcher(lambda key: key, set_up=lambda: threads.append(threading.current_thread()))
    assert list(ahead.iterate([1, 2], next_keys=[3, 4, 5])) == [1, 2]
    assert len(threads) == 1 and threads[0].name.startswith("micro-batches")
    del ahead
    threads[0].join(60)
    assert not threads[0].is_alive()


def test_a_process_ends_though_more_was_begun_than_is_taken():
    code = (
        "from megaenc.training.micro_batches import Prefetcher\n"
        "print(next(Prefetcher(abs).iterate(range(100), range(100, 200))))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and ended.stdout == "0\n", ended.stderr


def test_a_run_is_the_same_with_and_without(short_run, tmp_path, monkeypatch):
    from megaenc.training import engine

    flags = [*short_run, "--eval-interval", "2", "--exit-interval", "4"]
    main([*flags, "--save", str(tmp_path / "without")])
    build = engine.Engine.__init__

    def with_a_thread(self, *arguments, **named):
        build(self, *arguments, **named)
        assert self._prefetcher is None  # on processors
        self._prefetcher = Prefetcher(self._build_micro_batch)

    monkeypatch.setattr(engine.Engine, "__init__", with_a_thread)
    main([*flags, "--save", str(tmp_path / "with")])
    assert runs.curve(tmp_path / "with") == runs.curve(tmp_path / "without")
    assert runs.validations(tmp_path / "with") == runs.validations(tmp_path / "without")


def test_every_chunk_gets_all_micro_batches_and_a_single_one_keeps_none():
    first, second = map(list, repeat_iterator(iter("abc"), 2))
    assert first == second == ["a", "b", "c"]
    watched = []

    def generate():
        for _ in range(3):
            item = StepTimers()
            watched.append(weakref.ref(item))
            yield item
            del item

    [iterator] = repeat_iterator(generate(), 1)
    next(iterator)
    next(iterator)
    assert watched[0]() is None
