import heapq
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import runs

from megaenc.errors import InputError
from megaenc.processes import (
    ChildProcess,
    ProcessPool,
    ThreadPool,
    Worker,
    check_process_count,
    describe_exit_code,
    python_environment,
    with_pdeathsig,
)

# The helpers import what they run by name, so these tests use functions of the standard library.


pools = pytest.mark.parametrize("pool", [ProcessPool, ThreadPool])


@pools
@pytest.mark.parametrize("count", [1, 3])
def test_results_come_in_the_order_of_the_work(pool, count):
    """The same workers can be given more."""
    with pool(time.sleep, count) as workers:
        assert list(workers.map([0.05, 0, 0.02, 0, 0])) == [None] * 5
    with pool(abs, count) as workers:
        for items in (20, 0, 5):
            assert list(workers.map(range(-items, 0))) == list(range(items, 0, -1))


def test_large_items_and_results_do_not_lock_up():
    with ProcessPool(bytes.upper, 2) as workers:
        assert all(result == b"A" * 3_000_000 for result in workers.map([b"a" * 3_000_000] * 12))


@pools
def test_work_is_taken_as_it_is_needed_and_threads_leave_with_the_block(pool):
    taken, before = [], threading.active_count()

    def items():
        for number in range(100):
            taken.append(number)
            yield -number

    with pool(abs, 2) as workers:
        next(workers.map(items()))
        assert len(taken) <= 5
    assert threading.active_count() == before


@pools
def test_work_that_is_a_generator_gives_its_results_one_by_one(pool):
    with pool(heapq.merge, 2) as workers:
        assert list(workers.map([[1, 2], [], [3], [4, 5, 6]])) == [1, 2, 3, 4, 5, 6]
        results = workers.map([[b"a" * 3_000_000] * 3, [7, 8], 9])
        assert [len(next(results)) for _ in range(3)] == [3_000_000] * 3
        assert [next(results), next(results)] == [7, 8]
        with pytest.raises(TypeError):
            next(results)


def test_an_error_of_the_work_arrives_in_its_place():
    with ProcessPool(int, 2) as workers:
        results = workers.map(["1", "2", "three", "4"])
        assert [next(results), next(results)] == [1, 2]
        with pytest.raises(ValueError, match="three") as error:
            next(results)
        assert "in process " in error.value.__notes__[0]


def test_a_worker_killed_in_the_middle_of_its_answer_is_named():
    with ProcessPool(bytes, 1) as workers:

        def items():
            yield 50_000_000  # more than fits into the connection
            yield 1
            assert workers._workers[0].connection.poll(20), "no answer has begun"
            workers._workers[0].process.kill()
            yield 1

        with pytest.raises(InputError, match=r"worker 1 of 1 \(process \d+\) was killed by SIGKILL"):
            list(workers.map(items()))


@pytest.mark.parametrize(
    ("work", "item", "message"),
    [(os._exit, 3, "ended with exit code 3"), (signal.raise_signal, signal.SIGKILL, "was killed by SIGKILL")],
)
def test_a_dead_worker_is_an_error_that_names_it(work, item, message):
    with ProcessPool(work, 2) as workers, pytest.raises(InputError, match=message) as error:
        list(workers.map([item] * 10))
    assert "of 2 (process " in str(error.value)


@pytest.mark.parametrize(("then", "code"), [("wait", None), ("exit 3", 3)])
def test_what_a_child_has_begun_ends_with_it(then, code, tmp_path):
    with open(tmp_path / "said", "wb") as stream:
        child = ChildProcess(
            with_pdeathsig(["bash", "-c", f"sleep 600 > /dev/null & echo $!; {then}"]), python_environment(), stream
        )
    try:
        deadline = time.monotonic() + 60
        while not (said := (tmp_path / "said").read_text()).endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert child.wait(60 if code else 0.1) == code
        begun = psutil.Process(int(said))
    finally:
        child.kill()
    gone, _ = psutil.wait_procs([begun], timeout=10)
    assert gone or begun.status() == psutil.STATUS_ZOMBIE, "nobody here reaps it, perhaps"
    assert child.exit_code() == (code or -signal.SIGKILL)


PARENT = """
import time
from megaenc.processes import ChildProcess, python_environment, with_pdeathsig
child = ChildProcess(with_pdeathsig(["sleep", "600"]), python_environment())
print(child.process.pid, flush=True)
time.sleep(600)
"""


def test_a_child_ends_with_a_parent_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=runs.surroundings(), stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 60
    while child.cmdline()[:1] != ["sleep"]:  # empty for a moment, while one program replaces the other
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, left = psutil.wait_procs([child], timeout=10)
    if left and child.status() != psutil.STATUS_ZOMBIE:  # which nobody here reaps, perhaps
        child.kill()
        pytest.fail("the child outlives its parent")


def test_a_worker_is_given_a_deadline():
    worker = Worker(time.sleep, python_environment())
    worker.send(60)
    with pytest.raises(TimeoutError):
        next(worker.results(time.monotonic() + 0.2))
    worker.kill()
    assert worker.process.returncode == -signal.SIGKILL


def test_the_end_of_a_process_is_told():
    assert describe_exit_code(-11).startswith("was killed by SIGSEGV")
    assert describe_exit_code(-9).startswith("was killed by SIGKILL, as the kernel")


ORPHAN = """
import os, time
from megaenc.torchelastic import die_with_launcher
launcher = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == launcher:
    time.sleep(0.01)
print("begins", flush=True)
die_with_launcher()
print("goes on", flush=True)
"""


def test_a_worker_whose_launcher_died_before_it_began_ends(monkeypatch):
    if "python" in Path("/proc/1/cmdline").read_text():
        pytest.skip("orphans are adopted by a Python program here")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert runs.run([sys.executable, "-c", ORPHAN]).stdout == "begins\n"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert runs.run([sys.executable, "-c", ORPHAN]).stdout == "begins\ngoes on\n"


@pytest.mark.parametrize(("cores", "most"), [(1, 64), (100, 800)])
def test_far_more_processes_than_cores_are_refused(monkeypatch, cores, most):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    check_process_count("--workers", most)
    with pytest.raises(InputError, match=f"--workers: found {most + 1}, expected at most {most} with {cores} usable cores"):
        check_process_count("--workers", most + 1)
