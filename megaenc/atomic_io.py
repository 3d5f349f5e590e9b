"""Nothing is half-written: files and folders get a name of their own first and are renamed when they are whole."""

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megaenc.errors import InputError

_TRIES = 20  # to lock a file that others may be removing
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def resolve_path(path: Path) -> Path:
    """Return the path that `path` leads to, `..` and links followed, whether anything is there or not."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def atomic_files(*paths: Path, last_look: Callable[[], None] | None = None) -> Iterator[list[Path]]:
    """Yield a temporary name next to each of `paths`; rename all to `paths`, in order, if the block succeeds, else remove them.

    Files that `paths` name already are replaced, all of them or none, and never removed: a signal, an error or a kill leaves the
    old content or the new (a kill between two renames: each file old or new). The temporary names are unique to the attempt. The
    last path is the one whose presence marks the set as complete. `last_look` is called when all is on the disk, right before the
    first rename: if it raises, nothing is changed. Raises InputError if the folder cannot be written to.
    """
    temporary = [temporary_path(path) for path in paths]
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
        for path in temporary:  # the first error is the one to report
            remove_path(path)


def _replace_all(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Rename each source to its target, all of them or none: a failure puts back the files that were there before."""
    backups = [temporary_path(path) for path in targets]
    replaced = 0
    try:
        for target, backup in zip(targets, backups, strict=True):
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.link(target, backup)
                except FileNotFoundError:
                    raise
                except OSError:  # of a file system without hard links
                    shutil.copy2(target, backup)
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
            remove_path(backup)


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


def find_stale_temp_files(*paths: Path) -> list[Path]:
    """The temporary files and folders of `paths`, all of one folder, that attempts at work or killed have put beside them."""
    names = "|".join(re.escape(path.name) for path in paths)
    temporary = re.compile(rf"\.({names})\.\d+-[0-9a-f]{{8}}\.tmp")
    try:
        return sorted(path for path in paths[0].parent.iterdir() if temporary.fullmatch(path.name))
    except OSError:
        return []


def remove_path(path: Path) -> None:
    """Remove a file or a folder with all that is in it, as far as that can be done."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def longest_file_name(*paths: Path) -> str:
    """The longest name in bytes, be it a temporary one, that writing one of `paths` takes."""
    return max((temporary_path(path).name for path in paths), key=lambda name: len(os.fsencode(name)))


def temporary_path(path: Path) -> Path:
    """Return a hidden name next to `path` that no other attempt has."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Give a temporary folder beside `path`; when the block ends well, rename it to `path` (absent or empty), else remove it.

    All of it is on the disk before it is renamed. Raises InputError where the folder cannot be written, or something has taken
    its place meanwhile.
    """
    place = resolve_path(path)
    temporary = temporary_path(place)
    try:
        try:
            temporary.mkdir()
        except OSError as error:  # ENOENT in /proc, a name that is too long, and whatever a file system answers
            raise InputError(f"{path}: cannot be written to: {error.strerror}") from None
        with _one_line(place.parent, *_UNUSABLE):
            yield temporary
            for inside in (*temporary.rglob("*"), temporary):
                fsync_path(inside)
        try:
            with _one_line(path, *_UNUSABLE):
                os.rename(temporary, place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise InputError(f"{path}: something has come there meanwhile ({error.strerror}); choose another name") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fsync_path(path: Path) -> None:
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
    """Return whether no block is free on the disk of `place`, a folder."""
    try:
        status = os.statvfs(place)
        return status.f_blocks > 0 and status.f_bavail == 0  # some file systems report no sizes
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


class FileLock:
    """A lock on the file `path`, which is created if it is missing; held until `close` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path, self.created = path, False

    def take(self) -> bool:
        """Return whether the lock could be taken. Raises OSError, without a file name if the file system knows no locks."""
        for _ in range(_TRIES):
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                self.created = True
            except FileExistsError:
                try:
                    self._descriptor = os.open(self.path, os.O_RDWR)
                except FileNotFoundError:  # its process has just removed it
                    continue
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.is_held():
                    return True
            except BlockingIOError:
                self.close()
                return False
            except BaseException:
                self.close()
                raise
            self.close()  # the process before has just removed it
        raise OSError(errno.ESTALE, "its inode number changes from look to look")

    def is_held(self) -> bool:
        """Return whether this process still has the lock to itself: nobody has removed or replaced its file."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to have something to oneself, of which the file `path` is the lock; whether it is. There is no file afterwards.

    A lock ends with its process, however that ends. On a file system without locks everybody gets it, so what is done under one
    must be written whole and the same by all. Raises InputError where no file can be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            if mine := lock.take():
                stack.callback(lock.close)
        except OSError as error:
            if error.filename is not None:
                raise InputError(f"{path.parent}: cannot be written to: {error.strerror}") from None
            mine = error.errno != errno.ESTALE
        if mine:
            stack.callback(path.unlink, missing_ok=True)
        yield mine


@contextlib.contextmanager
def wait_for_lock(path: Path, seconds: float = math.inf) -> Iterator[bool]:
    """Run the block under the lock `path` (see `try_lock`), after the processes that hold it; False if that takes `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with try_lock(path) as mine:
            if mine or time.monotonic() > deadline:
                yield mine
                return
        time.sleep(0.2)


def is_locked(path: Path) -> bool:
    """Whether somebody has `path` (see `try_lock`), asked without writing anything. False where it cannot be read."""
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
def exit_on_sigterm() -> Iterator[None]:
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


def atomic_write(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves the old content or the new."""
    with atomic_files(path) as [temporary]:
        temporary.write_text(text, encoding="utf-8")
