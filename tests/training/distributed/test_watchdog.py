"""Runs that hang: they end with all ranks' stacks and exit code 70."""

import json
import re

import psutil
import pytest
import runs

from megaenc.training.distributed.watchdog import EXIT_HUNG, _format_hang, _parse_report

SECONDS = 6  # a step takes a hundredth of it


def hang(small_corpus, directory, fault):
    """Hang the second of two ranks in step 5; return the output and its error line."""
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        "--no-bf16",
        "--distributed-timeout-minutes",
        str(SECONDS / 60),
    ]
    fault = f"{fault}:1:5:{directory.with_name('struck')}"
    result = runs.script(
        runs.WORKERS / "fault_at_step.py",
        [fault, *flags, "--save", str(directory)],
        processes=2,
        expect=1,
    )
    assert [row["step"] for row in runs.metrics(directory)] == [1, 2, 3, 4]
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(directory) in (process.info["cmdline"] or [])
    ]
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith("error: no progress for ")
    assert line.endswith(f"; stacks of all threads in {directory / 'stacks'}")
    return result, line


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_both(small_corpus, tmp_path):
    directory = tmp_path / "run"
    result, line = hang(small_corpus, directory, "stand_still")
    assert "rank 1 in stand_still (fault_at_step.py:" in line
    assert "rank 0 in " in line
    assert "failed (exitcode: 70)" in result.stderr
    assert EXIT_HUNG == 70
    stacks = {file.name: file.read_text() for file in (directory / "stacks").iterdir()}
    assert sorted(stacks) == ["rank_00000.txt", "rank_00001.txt"]
    for rank, name in enumerate(sorted(stacks)):
        first = stacks[name].splitlines()[0]
        assert f"rank {rank} of 2, " in first
        assert first.endswith(", step 5")
        assert "in train_step" in stacks[name]  # of the loop's own thread
    assert "in stand_still" in stacks["rank_00001.txt"]
    assert "torch/distributed/distributed_c10d.py" in stacks["rank_00000.txt"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_that_holds_the_lock_of_the_interpreter_is_ended_by_the_fallback(
    small_corpus, tmp_path
):
    directory = tmp_path / "run"
    result, line = hang(small_corpus, directory, "hold_the_lock")
    assert "rank 1 silent" in line
    assert "Timeout (0:00:" in result.stderr
    assert "in hold_the_lock" in result.stderr
    assert (
        "torch/distributed/distributed_c10d.py"
        in (directory / "stacks" / "rank_00000.txt").read_text()
    )


ALONE = """
import time
import torch.distributed as dist
from megaenc.training.distributed import watchdog
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with watchdog.Watchdog(2 / 60, None) as dog:
    dog.beat("step", 1)
    time.sleep(3)
    dog.beat("step", 2)
    print("the first step was let be", flush=True)
    time.sleep(60)
"""


def test_a_first_step_has_time_and_a_second_one_has_not(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    result = runs.script(tmp_path / "alone.py", [], expect=EXIT_HUNG, timeout=60)
    assert result.stdout == "the first step was let be\n"
    expected = (
        r"error: no progress for \d+ seconds: rank 0 in .*, step 2; "
        "stacks of all threads in standard error"
    )
    assert re.search(expected, result.stderr), result.stderr
    assert 'alone.py", line 11 in <module>' in result.stderr


MANY = """
import os
import time
import torch.distributed as dist
from megaenc.training.distributed import watchdog

store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
watchdog._get_default_store = lambda: store
watchdog.startup_timeout = lambda limit: limit

def here():
    time.sleep(60)

def elsewhere():
    time.sleep(60)

with watchdog.Watchdog(2 / 60, None):
    elsewhere() if os.environ["RANK"] == "3" else here()
"""


@pytest.mark.multiprocess
def test_without_a_directory_one_rank_at_each_position_prints_its_stacks(tmp_path):
    (tmp_path / "many.py").write_text(MANY)
    printed = runs.script(tmp_path / "many.py", [], processes=4, expect=1, timeout=60).stderr
    assert "failed (exitcode: 70)" in printed
    [line] = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert "rank 3 in elsewhere" in line
    assert "ranks 0-2 in here" in line
    assert [rank for rank in range(4) if f"rank {rank} of 4, " in printed] == [0, 3]
    assert printed.count("in elsewhere\n") == printed.count("in here\n") == 1


def test_the_line_names_the_odd_rank_first_and_who_is_silent(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "12")
    waiting = {
        "at": "all_reduce (distributed_c10d.py:3252)",
        "doing": "step 7",
        "quiet": 600.0,
        "stacks": "runs/a/stacks",
    }
    reports = {rank: waiting for rank in range(12) if rank not in (3, 9)}
    reports[3] = waiting | {"at": "read (packs.py:80)", "quiet": 601.3}
    assert _format_hang(reports) == (
        "error: no progress for 10 minutes: rank 9 silent (stacks follow on standard error, "
        "unless the process is gone); "
        "rank 3 in read (packs.py:80), step 7; "
        "ranks 0-2, 4-8, 10-11 in all_reduce (distributed_c10d.py:3252), step 7; "
        "stacks of all threads in runs/a/stacks"
    )


HUGE = b'{"quiet": 1' + b"0" * 400 + b"}"


@pytest.mark.parametrize(
    "value", [b"\x80\x04.", b"[" * 100_000, b'{"at": 3, "quiet": true}', b'{"quiet": NaN}', HUGE]
)
def test_what_no_rank_has_told_is_unknown(value):
    assert _format_hang({0: _parse_report(value)}).startswith("error: no progress for ")
    assert _parse_report(value) | {"quiet": 0.0} == {
        "doing": "unknown",
        "at": "unknown",
        "stacks": "unknown",
        "quiet": 0.0,
    }


def test_what_a_rank_tells_is_kept_but_for_what_steers_a_terminal():
    report = {"doing": "step 5", "at": "\x1b[2Jread (a.py:1)", "quiet": 3.5, "stacks": "/runs/a"}
    assert _parse_report(json.dumps(report).encode()) == report | {"at": r"\x1b[2Jread (a.py:1)"}
