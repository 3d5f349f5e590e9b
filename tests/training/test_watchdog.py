"""A run that stands still ends with every rank's stacks and exit code 70; what is merely slow to begin is left alone."""

import sys

import psutil
import runs

from megaenc.training.watchdog import HUNG, _line

SECONDS = 3


def processes_of(folder):
    """Command lines of processes that work for the run in `folder`."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if str(folder) in line]


def test_a_rank_that_hangs_ends_the_run_with_the_stacks_of_both(small_corpus, tmp_path):
    folder, fault = tmp_path / "run", f"stand_still:1:5:{tmp_path / 'struck'}"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--distributed-timeout-minutes", str(SECONDS / 60)]
    worker = runs.WORKERS / "fault_at_step.py"
    result = runs.script(worker, [fault, *flags, "--save", str(folder)], processes=2, expect=1, timeout=120)

    assert sorted(file.name for file in (folder / "stacks").iterdir()) == ["rank_00000.txt", "rank_00001.txt"]
    stacks = [(folder / "stacks" / f"rank_{rank:05d}.txt").read_text() for rank in range(2)]
    for rank, text in enumerate(stacks):
        assert f"rank {rank} of 2, " in text.splitlines()[0]
        assert text.splitlines()[0].endswith(", step 5")
        assert "in update" in text  # of the loop's own thread
    assert "in stand_still" in stacks[1]
    assert "torch/distributed/distributed_c10d.py" in stacks[0]
    assert "stand_still" not in stacks[0]

    [line] = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith("error: no progress for ")
    assert "rank 1 in stand_still (fault_at_step.py:" in line
    assert "rank 0 in " in line
    assert line.endswith(f"; stacks of all threads in {folder / 'stacks'}")
    codes = [line.split()[2] for line in result.stderr.splitlines() if line.strip().startswith("exitcode  :")]
    assert codes == [str(HUNG), str(HUNG)] == ["70", "70"]
    assert [row["step"] for row in runs.metrics(folder)] == [1, 2, 3, 4]
    assert not processes_of(folder)


ALONE = f"""
import ctypes, sys, time
import torch.distributed as dist
from megaenc.training import watchdog
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with watchdog.Watchdog({SECONDS / 60}, None) as dog:
    dog.beat("step", 1)
    time.sleep({SECONDS + 1})
    dog.beat("step", 2)
    print("the first step was let be", flush=True)
    if sys.argv[1] == "lock":
        ctypes.PyDLL(None).sleep(60)
    time.sleep(60)
"""


def test_a_first_step_has_time_and_a_second_one_has_not():
    result = runs.run([sys.executable, "-c", ALONE, "sleeps"], expect=HUNG, timeout=60)
    assert result.stdout == "the first step was let be\n"
    assert (
        "error: no progress for 3 seconds: rank 0 in <module> (<string>:13), step 2; stacks of all threads in standard error"
        in (result.stderr)
    )
    assert 'File "<string>", line 13 in <module>' in result.stderr


def test_who_holds_the_lock_of_the_interpreter_is_ended_by_the_fallback():
    result = runs.run([sys.executable, "-c", ALONE, "lock"], expect=1, timeout=60)
    assert result.stderr.startswith("Timeout (0:00:0")
    assert 'File "<string>", line 12 in <module>' in result.stderr


def test_the_line_names_the_odd_rank_first_and_who_is_silent(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "12")
    waiting = {"at": "all_reduce (distributed_c10d.py:3252)", "doing": "step 7", "quiet": 600.0, "stacks": "runs/a/stacks"}
    found = {rank: waiting for rank in range(12) if rank not in (3, 9)}
    found[3] = waiting | {"at": "read (packs.py:80)", "quiet": 601.3}
    assert _line(found) == (
        "error: no progress for 10 minutes: rank 9 silent (stacks follow on standard error, unless the process is gone); "
        "rank 3 in read (packs.py:80), step 7; ranks 0-2, 4-8, 10-11 in all_reduce (distributed_c10d.py:3252), step 7; "
        "stacks of all threads in runs/a/stacks"
    )
