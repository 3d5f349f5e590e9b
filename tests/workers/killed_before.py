"""Kills before each kind of operation on files: `killed_before.py BELOW FLAGS...`.

Each start is killed right before the first operation of a kind that no earlier start was killed at,
until one completes the run. Operations outside BELOW, a directory in --save or nothing for all of
it, do not count. The file next to --save gets a line of JSON for each kill: the kind, and what is
wrong with the visible checkpoints. All starts are forked from this process, which has imported
everything and has no other thread: so each takes a second.
"""

import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path

import torch
from faults.ends import damaged_checkpoints
from faults.moments import FaultRun
from fork_server import import_all

from megaenc.backend import detect_backend
from megaenc.training.command import main

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
# Process ids and random letters of temporary names, and the number of a step.
PARTICULARS = re.compile(r"\.[0-9a-f]{32}|\.\d+-[0-9a-f]{8}|(?<=iter_)\d+")


def kind_of(event: str, arguments: tuple, directory: str) -> str | None:
    """Return the kind of an operation that changes files in `directory`, else None."""
    writes = (
        event == "open"
        and isinstance(arguments[2], int)
        and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    )
    if not writes and event not in CHANGES:
        return None
    path = arguments[0]
    if not isinstance(path, (str, Path)) or not str(path).startswith(directory):
        return None
    return f"{event} {PARTICULARS.sub('', str(path).removeprefix(directory))}"


def start(flags: list[str], directory: str, below: str, known: set[str], report: int) -> int:
    """Run in a fork until an operation not in `known`; return the fork's exit code.

    The fork writes the operation's kind to `report` and is killed before it.
    """
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def watch(event: str, arguments: tuple) -> None:
        kind = kind_of(event, arguments, directory)
        if kind and kind not in known and kind.partition(" ")[2].startswith(below):
            os.write(report, kind.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    try:
        main(flags, prog="killed_before.py")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def run(below: str, flags: list[str]) -> None:
    """Start the run until it completes."""
    import_all()
    detect_backend().peak_flops(torch.float32)  # measured once, for all starts
    directory = flags[flags.index("--save") + 1]
    known = set()
    with open(f"{directory}.kills", "w", encoding="utf-8") as kills:
        while True:
            told, report = os.pipe()
            code = start(flags, directory, below, known, report)
            os.close(report)
            kind = os.read(told, 4096).decode()
            os.close(told)
            if code == 0:
                return
            if code != -signal.SIGKILL:
                sys.exit(f"a start that was to be killed ended with {code}, after {sorted(known)}")
            known.add(kind)
            kills.write(json.dumps([kind, damaged_checkpoints(FaultRun(Path(directory)))]) + "\n")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
