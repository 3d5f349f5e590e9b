"""Nothing is half-written: files and folders get a name of their own first and are renamed when they are whole."""

import contextlib
import errno
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from megaenc.errors import InputError


def refuse_existing(path: Path, flag: str) -> None:
    """Raise InputError when `path` is a file or a folder with something in it; `flag` names where the path came from."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists() or path.is_symlink():
        raise InputError(f"{flag} {path}: exists already; remove it or choose another name")


def make_parent(path: Path, flag: str) -> None:
    """Create the folder that `path` goes into. Raises InputError when that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot create the folder {path.parent}: {error.strerror}") from None


@contextlib.contextmanager
def whole_files(*paths: Path) -> Iterator[list[Path]]:
    """Give a temporary name beside each of `paths`; when the block ends well, rename them in the order given, else remove them.

    The names are unique to the attempt. The last path is the one whose presence says that all are whole.
    """
    attempt = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary = [path.with_name(f".{path.name}.{attempt}.tmp") for path in paths]
    renamed: list[Path] = []
    try:
        with _one_line_when_full(paths[0].parent):
            yield temporary
            for path in temporary:
                with open(path, "rb+") as stream:
                    os.fsync(stream.fileno())
        for here, there in zip(temporary, paths, strict=True):
            renamed.append(there)
            os.replace(here, there)
        renamed.clear()
    finally:
        for path in (*temporary, *renamed):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`; when the block ends well, rename it to `path` (absent or empty), else remove it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        with _one_line_when_full(path.parent):
            yield temporary
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _one_line_when_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise InputError(f"{folder}: cannot be written to: {error.strerror}") from None


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C does, through its `finally` clauses, with exit code 143. For the main thread."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves the old content or the new."""
    with whole_files(path) as [temporary]:
        temporary.write_text(text, encoding="utf-8")
