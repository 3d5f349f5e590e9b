"""Command lines run in turn, each in a fork: `commands_in_turn.py JOBS RESULTS`.

JOBS is JSON of `directory`, `seconds` and `commands`, lists of words. Each command runs in
`directory` as if typed there; its changes in `directory` are listed and undone, except those of the
first `keep` commands. RESULTS gets a line of JSON for each command: its exit code, or null if it
took too long; standard error; the changes; the seconds that it took.
"""

import contextlib
import gc
import importlib
import io
import json
import os
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from pathlib import Path

from megaenc.console import silence_libraries

silence_libraries()  # as a command does, before the first import of torch

from megaenc import cli  # noqa: E402
from megaenc.backend import prepare_megatron  # noqa: E402
from megaenc.dist_env import die_with_parent  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
# Imported late by commands that are given below, at a second or more each.
ALSO = (
    "megaenc.training.planning",
    "megaenc.training.trainer",
    "transformers.models.auto.tokenization_auto",
    "megaenc.finetune.train",
    "megaenc.embed.train_run",
    "megaenc.convert.to_hf",
    "scipy.stats",
)


def prepare() -> None:
    """Import everything and build the parsers, which all forks share."""
    prepare_megatron()
    for name in (*ALSO, *(place.partition(":")[0] for place, _ in cli.COMMANDS.values())):
        importlib.import_module(name)
    for name in cli.COMMANDS:
        with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            cli.main([*name.split(), "--no-such-flag"])
    gc.freeze()


def listing(directory: Path) -> dict[str, tuple]:
    """Return kind, size and modification time of everything in `directory` by path."""
    found = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            found[str(path.relative_to(directory))] = (
                status.st_mode,
                status.st_size,
                status.st_mtime_ns,
            )
        else:
            found[str(path.relative_to(directory))] = (status.st_mode,)
    return found


def run(words: list[str], directory: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command; return its exit code and standard error, None after `seconds`."""
    with tempfile.TemporaryFile() as err:
        server = os.getpid()
        child = os.fork()
        if not child:
            become(words, directory, err.fileno(), server)
        deadline = time.monotonic() + seconds
        code = None
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.005)
        else:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        err.seek(0)
        return code, err.read().decode(errors="replace")


def become(words: list[str], directory: Path, err: int, server: int) -> None:
    """Make this fork the command, and end it with the command's exit code."""
    code = 1
    try:
        die_with_parent(server)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(err, 2)
        os.chdir(directory)
        sys.argv[:] = words
        if words[0] == "megaenc":
            cli.main(words[1:])
        else:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # spares the time of taking apart all that was imported


def same(path: Path, pristine: Path) -> bool:
    """Return if a file has the content that it had before."""
    return path.is_file() and pristine.is_file() and path.read_bytes() == pristine.read_bytes()


def undo(changes: list[str], directory: Path, pristine: Path) -> None:
    """Restore the paths named in `changes` of `directory` from `pristine`."""
    for name in changes:
        path = directory / name
        source = pristine / name
        if path.is_dir() and not path.is_symlink():
            if not source.is_dir():
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
            if source.is_file():
                shutil.copy2(source, path)
            elif source.is_dir():
                path.mkdir()


def main() -> None:
    """Run all of JOBS."""
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    directory = Path(jobs["directory"])
    prepare()
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a thread was started: it would be missing in a fork"
    )
    with open(sys.argv[2], "w", encoding="utf-8") as stream, tempfile.TemporaryDirectory() as spare:
        pristine = Path(spare) / "pristine"
        for number, words in enumerate(jobs["commands"]):
            if number == jobs["keep"]:
                shutil.copytree(
                    directory,
                    pristine,
                    symlinks=True,
                    ignore=lambda path, names: [n for n in names if n == "fifo"],
                )
                before = listing(directory)
            start = time.monotonic()
            code, err = run(words, directory, jobs["seconds"])
            seconds = round(time.monotonic() - start, 2)
            changes = []
            if number >= jobs["keep"]:
                after = listing(directory)
                touched = sorted(
                    name
                    for name in before.keys() | after.keys()
                    if before.get(name) != after.get(name)
                )
                changes = [name for name in touched if not same(directory / name, pristine / name)]
                if touched:
                    undo(touched, directory, pristine)
                    before = listing(directory)
            stream.write(
                json.dumps({"code": code, "stderr": err, "changes": changes, "seconds": seconds})
                + "\n"
            )
            stream.flush()


if __name__ == "__main__":
    die_with_parent(os.getppid())
    main()
