"""Nothing is half-written: files and folders get a name of their own first and are renamed when they are whole."""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megaenc.errors import InputError

MAX_TEXT = 64 << 20
"""The most bytes that are read of a file of settings or facts, which by rights take kilobytes."""
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def refuse_existing(path: Path, flag: str) -> None:
    """Raise InputError when `path` is a file or a folder with something in it, or the working directory.

    `flag` names where the path came from.
    """
    try:
        str(path).encode()
        place = _place(path)
        empty = place.is_dir() and not any(place.iterdir())
        exists = place.exists() or path.is_symlink()
        here = empty and place == Path.cwd()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be looked at: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{flag} {str(path)!r}: not UTF-8, or holds a null character; expected another name") from None
    if here:  # whoever stands in it would be left standing in what was replaced
        raise InputError(f"{flag} {path}: the folder that this command runs in, expected another name")
    if exists and not empty:
        raise InputError(f"{flag} {path}: exists already; remove it or choose another name")


def check_parent(path: Path, flag: str) -> None:
    """Raise InputError if the folder that `path` goes into cannot be created or written to. Leaves nothing on the disk."""
    missing = _missing_parents(path)
    try:
        make_parent(path, flag)
        temporary = _temporary(_place(path))
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.unlink()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot write to the folder {path.parent}: {error.strerror}") from None
    finally:
        _remove_empty(missing)


def check_output_file(path: Path, flag: str) -> None:
    """Raise InputError if no file can be written to `path`: for a folder or a device, or if its folder cannot be made.

    What this creates is removed again. Call it before the work, and `make_parent` before the file is written.
    """
    try:
        place = _place(path)
        kind = "a folder" if place.is_dir() else "" if place.is_file() or not place.exists() else "no regular file"
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be looked at: {error.strerror}") from None
    if kind:
        raise InputError(f"{flag} {path}: found {kind}, expected the name of a file")
    check_parent(path, flag)


def make_parent(path: Path, flag: str) -> None:
    """Create the folder that `path` goes into. Raises InputError when that cannot be."""
    parent = _place(path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot create the folder {parent}: {error.strerror}") from None


@contextlib.contextmanager
def created_parent(path: Path, flag: str) -> Iterator[None]:
    """Create the folder that `path` goes into; if the block fails, remove what it created unless a file is in it.

    Raises InputError, naming `flag`, if it cannot be created.
    """
    missing = _missing_parents(path)
    try:
        make_parent(path, flag)
        yield
    except BaseException:
        _remove_empty(missing)
        raise


def _missing_parents(path: Path) -> list[Path]:
    """Return the folders above `path` that do not exist yet, innermost first."""
    try:
        return [folder for folder in _place(path).parents if not folder.exists()]
    except OSError:  # a name that is too long, say: `make_parent` reports it
        return []


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove `folders`, innermost first, and those in them, unless a file is in one."""
    inside = (Path(folder) for folder, _, _ in os.walk(folders[0], topdown=False)) if folders else ()
    for folder in chain(inside, folders):
        with contextlib.suppress(OSError):  # holds what is to stay
            folder.rmdir()


def _place(path: Path) -> Path:
    """Where `path` leads, `..` and links followed, whether anything is there or not."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def whole_files(*paths: Path, last_look: Callable[[], None] | None = None) -> Iterator[list[Path]]:
    """Yield a temporary name next to each of `paths`; rename all to `paths`, in order, if the block succeeds, else remove them.

    Files that `paths` name already are replaced, all of them or none, and never removed: a signal, an error or a kill leaves the
    old content or the new (a kill between two renames: each file old or new). The temporary names are unique to the attempt. The
    last path is the one whose presence marks the set as complete. `last_look` is called when all is on the disk, right before the
    first rename: if it raises, nothing is changed. Raises InputError if the folder cannot be written to.
    """
    temporary = [_temporary(path) for path in paths]
    try:
        with _final_names(temporary, paths), _one_line(paths[0].parent, *_UNUSABLE):
            yield temporary
            for path in temporary:
                with open(path, "rb+") as stream:
                    os.fsync(stream.fileno())
            if last_look is not None:
                last_look()
            if len(paths) == 1:
                os.replace(temporary[0], paths[0])
            else:
                _uninterrupted(lambda: _replace_all(temporary, paths))
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):  # the first error is the one to report
                path.unlink()


def _replace_all(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Rename each source to its target, all of them or none: a failure puts back the files that were there before."""
    backups = [_temporary(path) for path in targets]
    replaced = 0
    try:
        for target, backup in zip(targets, backups, strict=True):
            with contextlib.suppress(FileNotFoundError):
                _back_up(target, backup)
        for source, target in zip(sources, targets, strict=True):
            os.replace(source, target)
            replaced += 1
    except BaseException:
        for target, backup in list(zip(targets, backups, strict=True))[:replaced]:
            try:
                os.replace(backup, target)
            except FileNotFoundError:
                target.unlink()
        raise
    finally:
        for backup in backups:
            with contextlib.suppress(OSError):
                backup.unlink()


def _back_up(path: Path, backup: Path) -> None:
    """Give a file a second name, or copy it if the file system has no hard links. Raises OSError."""
    try:
        os.link(path, backup)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(path, backup)


def _uninterrupted(call: Callable[[], None]) -> None:
    """Run `call` to its end, whatever signals arrive: their handlers raise in the main thread, and this is another."""
    begun, ended = threading.Lock(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                call()
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()

    try:
        threading.Thread(target=run).start()
        ended.wait()
    finally:
        if not begun.acquire(blocking=False):  # else the interrupt came before the thread, which now does nothing
            ended.wait()
    if errors:
        raise errors[0]


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
        try:
            temporary.mkdir()
        except OSError as error:  # ENOENT in /proc, a name that is too long, and whatever a file system answers
            raise InputError(f"{path}: cannot be written to: {error.strerror}") from None
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
    """Raise InputError, naming `place`, for an OSError of one of `numbers`, and for any error if the disk is full.

    Libraries that write by themselves (tokenizers, torch) raise errors without a number.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in numbers:
            reason = error.strerror
        elif os.strerror(errno.ENOSPC) in str(error) or (not isinstance(error, OSError) and _is_full(place)):
            reason = os.strerror(errno.ENOSPC)
        else:
            raise
        raise InputError(f"{place}: cannot be written to: {reason}") from None


def _is_full(place: Path) -> bool:
    """Return if no block is free on the disk of `place`, a folder."""
    try:
        return os.statvfs(place).f_bavail == 0
    except OSError:
        return False


@contextlib.contextmanager
def _final_names(temporary: Sequence[Path], paths: Sequence[Path]) -> Iterator[None]:
    """Turn an OSError about one of the files `temporary` into an InputError about its final name in `paths`."""
    try:
        yield
    except OSError as error:
        names = dict(zip(map(str, temporary), paths, strict=True))
        if (path := names.get(str(error.filename))) is None:
            raise
        raise InputError(f"{path}: cannot be written to: {error.strerror}") from None


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


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Run the block under the lock `path` (see `locked`), after the processes that hold it. Raises InputError like `locked`."""
    while True:
        with locked(path) as mine:
            if mine:
                yield
                return
        time.sleep(0.2)


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
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
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


def read_regular(path: Path, limit: int = MAX_TEXT) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises OSError, with a reason in `strerror`, for anything else: a FIFO or a device, which could block or never end, and a
    larger file, which could exhaust the memory.
    """
    with open(path, "rb", opener=lambda name, mode: os.open(name, mode | os.O_NONBLOCK)) as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = stream.read(min(limit, max(status.st_size, 1 << 20)) + 1)  # a buffer of all that is allocated at once
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes, the most that is read of such a file", str(path))
    return content


def parse_json(content: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError, with the reason, for anything else, deep nesting included."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from None


def read_json_object(path: Path, expected: str = "a JSON object", limit: int = MAX_TEXT) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises InputError with one line, `PATH: REASON; expected EXPECTED`, for a file that is missing, unreadable, not a regular
    file, larger than `limit` bytes, not UTF-8, not JSON, nested too deeply or not an object.
    """
    try:
        values = parse_json(read_regular(path, limit))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected {expected}") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); expected {expected}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: found {type(values).__name__}; expected {expected}")
    return values
