"""Scripts in forks of one process run and end as in processes of their own."""

import os

import pytest
import runs
from waiting import wait_until

LOOK = """
import atexit, json, multiprocessing, os, sys, threading

def double(number):
    return 2 * number

def say(line):
    # In one piece: under -u, which torchrun sets, `print` writes the end of the line separately.
    os.write(1, f"{line}\\n".encode())

if __name__ == "__main__":
    atexit.register(say, "at exit")
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "GROUP_RANK",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
        "PYTHONPATH", "OMP_NUM_THREADS", "ONE_MORE",
    )
    found = {name: os.environ.get(name) for name in names}
    found |= {"argv": sys.argv, "directory": os.getcwd(), "path": sys.path[0], "file": __file__}
    found |= {"input": sys.stdin.read()}
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
    def write(text: str):
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

    return write


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_script_finds_what_it_finds_under_the_real_thing(script):
    look = script(LOOK)
    how = dict(processes=2, environment={"ONE_MORE": "1"})
    fresh = runs.script(look, ["--flag", "value"], fresh=True, **how)
    forked = runs.script(look, ["--flag", "value"], **how)
    # Nothing but time tells which rank's exit comes before the other's last line.
    assert (sorted(forked.stdout.splitlines()), forked.stderr) == (
        sorted(fresh.stdout.splitlines()),
        fresh.stderr,
    )
    assert forked.stdout.splitlines().count("at exit") == 2
    assert os.environ.get("ONE_MORE") is None


WAIT = """
import os, pathlib, sys, time
directory = pathlib.Path(sys.argv[1])
(directory / os.environ["RANK"]).write_text(str(os.getpid()))
while len(list(directory.glob("[01]"))) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "0" and sys.argv[2] == "fail":
    sys.exit(7)
time.sleep(600)
"""


@pytest.mark.multiprocess
def test_a_rank_that_fails_ends_the_others_and_so_does_the_end_of_time(script, tmp_path):
    wait = script(WAIT)
    ended = runs.script(wait, [str(tmp_path), "fail"], processes=2, expect=1)
    assert "failed (exitcode: 7)" in ended.stderr
    assert_gone(tmp_path)
    with pytest.raises(AssertionError, match="took more than 2 s"):
        runs.script(wait, [str(tmp_path), "wait"], processes=2, timeout=2)
    assert_gone(tmp_path)
    assert runs.script(script("print('here')"), []).stdout == "here\n"


def assert_gone(directory) -> None:
    for rank in "01":
        process = (directory / rank).read_text()
        wait_until(lambda process=process: not os.path.exists(f"/proc/{process}"), 10)
