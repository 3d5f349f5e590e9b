"""The end of commands: Ctrl-C at any moment, a full disk behind standard output."""

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, os, signal, sys, threading, time
from megaenc.errors import InputError, handle_command_errors

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class AtTheVeryEnd:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):
        kill(process, number)

@handle_command_errors
def main(prog="program"):
    moment = sys.argv[1]
    if moment == "work":
        interrupt()
    elif moment == "exec":
        exec("interrupt(); list(range(9))", {"interrupt": interrupt})
    elif moment == "error":
        class Interrupted(InputError):
            def __str__(self):
                interrupt()
                return "wrong"
        raise Interrupted
    elif moment == "threads":
        threading.Thread(target=lambda: (time.sleep(0.2), interrupt(), time.sleep(60))).start()
    elif moment == "exit":
        atexit.register(interrupt)
    elif moment == "twice":
        atexit.register(interrupt)
        interrupt()
    elif moment == "end":
        sys.at_the_very_end = AtTheVeryEnd()
    print("done", flush=True)

main()
"""


@pytest.mark.parametrize(
    ("moment", "code", "out", "err"),
    [
        ("work", 130, "", "stopped\n"),
        ("exec", 130, "", "stopped\n"),
        ("error", 130, "", "stopped\n"),
        ("threads", 130, "done\n", "stopped\n"),
        ("exit", 130, "done\n", "stopped\n"),
        ("twice", 130, "", "stopped\n"),
        ("end", 0, "done\n", ""),
    ],
)
def test_ctrl_c_is_one_word_or_comes_too_late(moment, code, out, err, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "program", moment]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, out, err)


def test_a_program_that_calls_a_command_keeps_its_ctrl_c(monkeypatch):
    from megaenc.cli import main

    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    before = signal.getsignal(signal.SIGINT)
    main(["--version"])
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_standard_output_is_one_line(unbuffered):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "megaenc", "--help"]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
        )
    assert ended.returncode == 2
    assert ended.stderr == (
        "error: standard output, or a temporary file: cannot be written to: No space left on "
        "device\n"
    )


def test_a_full_disk_behind_both_streams_still_ends_with_two():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "megaenc", "--help"]
        assert subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode == 2


def test_a_limit_on_the_size_of_files_is_one_line(tmp_path):
    """A command replaces one file whole; a library copies one elsewhere."""
    (tmp_path / "large").write_bytes(bytes(100_000))
    code = """
import resource, shutil, sys
from pathlib import Path
from megaenc.atomic_io import atomic_write
from megaenc.errors import handle_command_errors

@handle_command_errors
def main(call):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    call()

calls = {
    "atomic": lambda: atomic_write(Path("out/file"), "x" * 2000),
    "copy": lambda: shutil.copy("large", "out/copy"),
}
main(calls[sys.argv[1]])
"""
    (tmp_path / "out").mkdir()
    for kind, place in (("atomic", "out"), ("copy", "out/copy")):
        command = [sys.executable, "-c", code, kind]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stderr) == (
            2,
            f"error: {place}: cannot be written to: File too large\n",
        )
