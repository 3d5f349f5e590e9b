"""Nothing is half-written: files and folders get a name of their own first and are renamed when they are whole."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megaenc.errors import InputError

_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def refuse_existing(path: Path, flag: str) -> None:
    """Raise InputError when `path` is a file or a folder with something in it, or the working directory.

    `flag` names where the path came from.
    """
    try:
        place = _place(path)
        empty = place.is_dir() and not any(place.iterdir())
        exists = place.exists() or path.is_symlink()
        here = empty and place == Path.cwd()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be looked at: {error.strerror}") from None
    if here:  # whoever stands in it would be left standing in what was replaced
        raise InputError(f"{flag} {path}: the folder that this command runs in, expected another name")
    if exists and not empty:
        raise InputError(f"{flag} {path}: exists already; remove it or choose another name")


def make_parent(path: Path, flag: str) -> None:
    """Create the folder that `path` goes into. Raises InputError when that cannot be."""
    parent = _place(path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot create the folder {parent}: {error.strerror}") from None


def _place(path: Path) -> Path:
    """Where `path` leads, `..` and links followed, whether anything is there or not."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def whole_files(*paths: Path, last_look: Callable[[], None] | None = None) -> Iterator[list[Path]]:
    """Give a temporary name beside each of `paths`; when the block ends well, rename them in the order given, else remove them.

    The names are unique to the attempt. The last path is the one whose presence says that all are whole. `last_look` is called
    when all is on the disk, right before the first is renamed: what it raises leaves nothing. Raises InputError where the folder
    cannot be written to.
    """
    temporary = [_temporary(path) for path in paths]
    renamed: list[Path] = []
    try:
        with _one_line(paths[0].parent, *_UNUSABLE):
            yield temporary
            for path in temporary:
                with open(path, "rb+") as stream:
                    os.fsync(stream.fileno())
            if last_look is not None:
                last_look()
            for here, there in zip(temporary, paths, strict=True):
                renamed.append(there)
                os.replace(here, there)
        renamed.clear()
    finally:
        for path in (*temporary, *renamed):
            with contextlib.suppress(
                OSError
            ):  # where nothing can be written nothing can be removed: the first error is to be told
                path.unlink()


def left_behind(*paths: Path) -> list[Path]:
    """The temporary files and folders of `paths`, all of one folder, that attempts at work or killed have put beside them."""
    names = "|".join(re.escape(path.name) for path in paths)
    temporary = re.compile(rf"\.({names})\.\d+-[0-9a-f]{{8}}\.tmp")
    try:
        return sorted(path for path in paths[0].parent.iterdir() if temporary.fullmatch(path.name))
    except OSError:
        return []


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def longest_name(*paths: Path) -> str:
    """The longest name in bytes, be it a temporary one, that writing one of `paths` takes."""
    return max((_temporary(path).name for path in paths), key=lambda name: len(os.fsencode(name)))


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`; when the block ends well, rename it to `path` (absent or empty), else remove it.

    All of it is on the disk before it is renamed. Raises InputError where the folder cannot be written, or something has taken
    its place meanwhile.
    """
    place = _place(path)
    temporary = _temporary(place)
    try:
        with _one_line(path, *_UNUSABLE, errno.ENAMETOOLONG):
            temporary.mkdir()
        with _one_line(place.parent, *_UNUSABLE):
            yield temporary
            for inside in (*temporary.rglob("*"), temporary):
                sync(inside)
        try:
            with _one_line(path, *_UNUSABLE):
                os.rename(temporary, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise InputError(f"{path}: something has come there meanwhile ({error.strerror}); choose another name") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Put a file or the names in a folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of file systems that know no such thing for folders
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _one_line(place: Path, *numbers: int) -> Iterator[None]:
    """InputError, naming `place`, for an OSError of one of `numbers`."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise
        raise InputError(f"{place}: cannot be written to: {error.strerror}") from None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Try to have something to oneself, of which the file `path` is the lock; whether it is. There is no file afterwards.

    A lock ends with its process, however that ends. On a file system without locks everybody gets it, so what is done under one
    must be written whole and the same by all. Raises InputError where no file can be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    except OSError as error:
        raise InputError(f"{path.parent}: cannot be written to: {error.strerror}") from None
    try:
        mine = _lock(descriptor, path)
        try:
            yield mine
        finally:
            if mine:
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return os.stat(path).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:  # the one before has just removed it
        return False


def is_locked(path: Path) -> bool:
    """Whether somebody has `path` (see `locked`), asked without writing anything. False where it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # of a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block like Ctrl-C does, through its `finally` clauses, with exit code 143. For the main thread.

    So does SIGHUP (129), with which a terminal ends, unless it is ignored as under nohup. It comes from shell and kernel both, so
    the second changes nothing.
    """

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves the old content or the new."""
    with whole_files(path) as [temporary]:
        temporary.write_text(text, encoding="utf-8")
