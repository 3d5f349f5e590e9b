"""Scripts that are run by forks of one process: what they find and how they end is as in processes of their own."""

import json
import os
import time

import pytest
import runs

LOOK = """
import atexit, json, multiprocessing, os, sys, threading

def double(number):
    return 2 * number

def say(line):
    os.write(1, f"{line}\\n".encode())  # whole, where `print` under -u, as torchrun starts ranks, writes the line's end by itself

if __name__ == "__main__":
    atexit.register(say, "at exit")
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "GROUP_RANK", "TORCHELASTIC_USE_AGENT_STORE",
             "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "PYTHONPATH", "OMP_NUM_THREADS", "ONE_MORE")
    found = {name: os.environ.get(name) for name in names}
    found |= {"argv": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "file": __file__, "input": sys.stdin.read()}
    found |= {"leads": os.getsid(0) == os.getpid(), "threads": threading.active_count()}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["spawned"] = pool.map(double, [1, 2])
    if found["WORLD_SIZE"]:
        import torch.distributed as dist
        error_file = os.environ["TORCHELASTIC_ERROR_FILE"].split(os.sep)
        found["error_file"] = error_file[-3:]
        dist.init_process_group("gloo")
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        dist.destroy_process_group()
    else:
        every = [found]
    if os.environ.get("RANK", "0") == "0":
        say(json.dumps(every))
"""


@pytest.fixture
def script(tmp_path):
    """Write a script."""

    def write(text: str):
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

    return write


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, 2])
def test_a_script_finds_what_it_finds_under_the_real_thing(processes, script):
    look = script(LOOK)
    fresh, forked = (
        runs.script(look, ["--flag", "value"], processes=processes, fresh=fresh, environment={"ONE_MORE": "1"})
        for fresh in (True, False)
    )
    # Nothing but time tells which rank's exit comes before the other's last line.
    assert (sorted(forked.stdout.splitlines()), forked.stderr) == (sorted(fresh.stdout.splitlines()), fresh.stderr)
    [found] = [json.loads(line) for line in forked.stdout.splitlines() if line != "at exit"]
    assert len(found) == processes == forked.stdout.splitlines().count("at exit")
    assert os.environ.get("ONE_MORE") is None


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "forked"])
@pytest.mark.parametrize(
    ("end", "code"),
    [("raise SystemExit(3)", 3), ("raise ValueError('no')", 1), ("sys.exit('no')", 1), ("os.kill(os.getpid(), 9)", -9)],
)
def test_its_end_is_that_of_the_process(end, code, fresh, script):
    ended = runs.script(script(f"import os, sys\nprint('said', flush=True)\n{end}\n"), [], expect=code, fresh=fresh)
    assert ended.stdout == "said\n"
    assert ("ValueError: no" in ended.stderr) == ("ValueError" in end)


WAIT = """
import os, pathlib, signal, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
(folder / rank).write_text(str(os.getpid()))
if rank == "0" and sys.argv[2] == "fail":
    while len(list(folder.glob("[012]"))) < 3:
        time.sleep(0.01)
    sys.exit(7)
time.sleep(600)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "forked"])
def test_a_rank_that_fails_ends_the_others(fresh, script, tmp_path):
    ended = runs.script(script(WAIT), [str(tmp_path), "fail"], processes=3, expect=1, fresh=fresh)
    assert "failed (exitcode: 7)" in ended.stderr
    assert_gone(int((tmp_path / str(rank)).read_text()) for rank in range(3))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_when_time_is_up_all_are_killed_and_the_next_run_is_as_ever(script, tmp_path):
    with pytest.raises(AssertionError, match="took more than 5 s"):
        runs.script(script(WAIT), [str(tmp_path), "wait"], processes=2, timeout=5)
    assert_gone(int((tmp_path / str(rank)).read_text()) for rank in range(2))
    assert runs.script(script("print('here')"), []).stdout == "here\n"


def assert_gone(processes) -> None:
    deadline = time.monotonic() + 10
    left = set(processes)
    while left := {number for number in left if os.path.exists(f"/proc/{number}")}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
