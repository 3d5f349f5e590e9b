"""File locks, which end with their process."""

import contextlib
import errno
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

from megaenc.errors import InputError

_ATTEMPTS = 20  # other processes may keep removing the lock file


class FileLock:
    """Exclusive flock on the file `path`, from `acquire` to `release` or process end; `created`: the file was missing."""

    def __init__(self, path: Path) -> None:
        self.path, self.created = path, False

    def acquire(self) -> bool:
        """Create the file if missing and try to lock it without waiting; return whether this process now holds the lock.

        Raises OSError, without a file name if the file system does not support locks.
        """
        for _ in range(_ATTEMPTS):
            try:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                self.created = True
            except FileExistsError:
                try:
                    self._descriptor = os.open(self.path, os.O_RDWR)
                except FileNotFoundError:  # its owner has just removed it
                    continue
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.is_held():
                    return True
            except BlockingIOError:
                self.release()
                return False
            except BaseException:
                self.release()
                raise
            self.release()  # its previous owner has just removed it
        raise OSError(errno.ESTALE, "its inode number keeps changing")

    def is_held(self) -> bool:
        """Return whether the locked file is still the one at `path`; False if it was removed or replaced since."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock by closing the file, which is not removed."""
        os.close(self._descriptor)


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to lock `path` at once; yield whether it worked (True if the disk has no locks), and if so remove it after.

    A lock ends with its process. On a file system without locks every process gets it, so code that runs under a lock must write
    atomically and deterministically. Raises InputError if the file cannot be created.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path)
            if has_lock := lock.acquire():
                stack.callback(lock.release)
        except OSError as error:
            if error.filename is not None:
                raise InputError(f"{path.parent}: cannot be written to: {error.strerror}") from None
            has_lock = error.errno != errno.ESTALE
        if has_lock:
            stack.callback(path.unlink, missing_ok=True)
        yield has_lock


@contextlib.contextmanager
def wait_for_lock(path: Path, seconds: float = math.inf) -> Iterator[bool]:
    """Wait up to `seconds` to lock the file `path`; yield whether that worked, and if so remove the file after the block."""
    deadline = time.monotonic() + seconds
    while True:
        with try_lock(path) as has_lock:
            if has_lock or time.monotonic() > deadline:
                yield has_lock
                return
        time.sleep(0.2)


def is_locked(path: Path) -> bool:
    """Return whether any process has locked the file `path`, without changing it; False if it is missing or unreadable."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False
