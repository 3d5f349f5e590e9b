import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import runs
from waiting import wait_until, wait_until_ended

from megaenc.processes import ChildProcess, exit_on_sigterm, python_environment, with_pdeathsig


@pytest.mark.parametrize(("then", "code"), [("wait", None), ("exit 3", 3)])
def test_what_a_child_has_begun_ends_with_it(then, code, tmp_path):
    with open(tmp_path / "said", "wb") as stream:
        child = ChildProcess(
            with_pdeathsig(["bash", "-c", f"sleep 600 > /dev/null & echo $!; {then}"]),
            python_environment(),
            stream,
        )
    try:
        said = tmp_path / "said"
        wait_until(lambda: said.read_text().endswith("\n"))
        assert child.wait(60 if code else 0.1) == code
    finally:
        child.kill()
    wait_until_ended([int(said.read_text())])
    assert child.exit_code() == (code or -signal.SIGKILL)


PARENT = """
import time
from megaenc.processes import ChildProcess, python_environment, with_pdeathsig
child = ChildProcess(with_pdeathsig(["sleep", "600"]), python_environment())
print(child.process.pid, flush=True)
time.sleep(600)
"""


def test_a_child_ends_with_a_parent_that_is_killed():
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=runs.surroundings(), stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(parent.stdout.readline()))
    wait_until(
        lambda: child.cmdline()[:1] == ["sleep"]
    )  # empty for a moment, while one program replaces the other
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until_ended([child.pid])


@pytest.mark.parametrize("ignored", [False, True])
def test_the_end_of_a_terminal_stops_what_is_not_told_to_ignore_it(ignored):
    before = signal.signal(
        signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL
    )  # as nohup does
    try:
        with contextlib.ExitStack() as stack:
            if not ignored:
                stop = stack.enter_context(pytest.raises(SystemExit))
            with exit_on_sigterm():
                os.kill(os.getpid(), signal.SIGHUP)
        assert ignored or stop.value.code == 129
    finally:
        signal.signal(signal.SIGHUP, before)


ORPHAN = """
import os, time
from megaenc.dist_env import die_with_launcher
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
