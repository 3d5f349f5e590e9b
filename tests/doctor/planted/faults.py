"""Checks that misbehave."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megaenc.doctor.result import CheckContext, Finding, ok, problem


def hangs(context: CheckContext) -> list[Finding]:
    """Sleep without the interpreter's lock, as in a driver, with a child process."""
    print("waiting for the device", flush=True)
    Path("child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)
    return []


def crashes(context: CheckContext) -> list[Finding]:
    """Crash like a library that was built for another machine."""
    print("about to go", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def raises(context: CheckContext) -> list[Finding]:
    """Raise like a broken package."""
    raise ImportError("no such symbol", name="flash_attn.ops")


def ends(context: CheckContext) -> list[Finding]:
    """End the process without output."""
    os._exit(3)


def process(context: CheckContext) -> list[Finding]:
    """Report the id of this process."""
    print("words of one that went well", flush=True)
    return [ok("process", str(os.getpid()))]


def finds_a_problem(context: CheckContext) -> list[Finding]:
    """Report a problem that leaves the process in doubt."""
    return [problem("something", "wrong", "see to it")]
