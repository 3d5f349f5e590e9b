import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import runs
from waiting import wait_until_ended

from megaenc.data import worker_pool
from megaenc.data.worker_pool import WorkerProcessDied, start_pool
from megaenc.processes import ChildProcess, python_environment

# A process imports what it runs by name, so these tests use functions of the standard library.
kinds = pytest.mark.parametrize("threads", [False, True], ids=["processes", "threads"])


@kinds
@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_the_order_of_the_items(threads, count):
    """A second call of the same workers works too."""
    with start_pool(time.sleep, count, threads=threads) as call:
        assert list(call([0.05, 0, 0.02, 0, 0])) == [None] * 5
    with start_pool(abs, count, threads=threads) as call:
        for items in (20, 0, 5):
            assert list(call(range(-items, 0))) == list(range(items, 0, -1))


def test_large_items_and_results_do_not_lock_up():
    with start_pool(bytes.upper, 2) as call:
        assert all(result == b"A" * 3_000_000 for result in call([b"a" * 3_000_000] * 12))


@kinds
def test_items_are_taken_as_they_are_needed_and_threads_end_with_the_block(threads):
    taken = []
    before = threading.active_count()

    def items():
        for number in range(100):
            taken.append(number)
            yield -number

    with start_pool(abs, 2, threads=threads) as call:
        next(call(items()))
        assert len(taken) <= 5
    assert threading.active_count() == before


def test_the_end_of_the_block_does_not_wait_for_work():
    started = time.monotonic()
    with start_pool(time.sleep, 2) as call:
        next(call([0, 600, 600, 600, 600]))
    assert time.monotonic() - started < 300


@kinds
def test_an_error_of_the_work_arrives_in_its_place(threads):
    with start_pool(int, 2, threads=threads) as call:
        results = call(["1", "2", "three", "4"])
        assert [next(results), next(results)] == [1, 2]
        with pytest.raises(ValueError, match="three") as error:
            next(results)
        if not threads:
            assert "in process " in error.value.__notes__[0]


HALF_AN_ANSWER = """
import os, struct, sys
os.write(int(sys.argv[2]), struct.pack('!i', 1000) + b'half')
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        (HALF_AN_ANSWER, "was killed by SIGKILL, as the kernel does when memory runs out"),
    ],
    ids=["exit", "signal", "half an answer"],
)
def test_a_worker_that_dies_is_named(code, end):
    before = psutil.Process().children()
    with start_pool(exec, 2) as call:
        workers = [child.pid for child in psutil.Process().children() if child not in before]
        results = call(["None", "None", "None", code, "None"])
        assert [next(results) for _ in range(3)] == [None] * 3
        with pytest.raises(
            WorkerProcessDied, match=rf"^worker process {workers[1]} {end}, before it was done$"
        ):
            next(results)


SCRIPT = """
import os, signal, time
import psutil
from megaenc.data.worker_pool import start_pool
print("this script")
with start_pool(time.sleep, 2) as call:
    results = call([0, 0, 600, 600])
    print(next(results), next(results))
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_needs_no_guard_and_its_workers_end_with_it_when_it_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    output = tmp_path / "output"
    with open(output, "wb") as stream:  # not a pipe, which workers that are left would keep open
        ended = subprocess.run(
            [sys.executable, script], env=runs.surroundings(), stdout=stream, stderr=stream
        )
    assert ended.returncode == -signal.SIGKILL
    *lines, numbers = output.read_text().splitlines()
    assert lines == ["this script", "None None"]
    assert len(numbers.split()) == 2
    wait_until_ended([int(number) for number in numbers.split()])


def test_a_worker_that_cannot_be_killed_keeps_nobody_waiting(monkeypatch):
    """A process in a driver's call that hangs cannot be killed."""
    monkeypatch.setattr(worker_pool, "KILL_TIMEOUT", 0.1)
    worker = worker_pool.WorkerProcess(time.sleep, python_environment())
    future = worker.submit(60)
    while not future.running():
        time.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(ChildProcess, "kill", lambda process: None)
        worker.kill()
    with pytest.raises(WorkerProcessDied, match="closed its connection"):
        future.result(0)
    ChildProcess.kill(worker)
