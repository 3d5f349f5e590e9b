"""The lock of a run directory: one process group at a time trains in it."""

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from megaenc.console import say
from megaenc.errors import InputError

LOCK = ".lock"
_MESSAGE_AFTER = 5.0  # seconds
_TRIES = 20  # to open a file in a directory that others may be removing


class FolderLock:
    """The lock on the directory of `--save`, which is created if it is missing; held until `close` or the end of the process."""

    def __init__(self, folder: Path, patience: float = 0.0):
        """Take the lock. Raise InputError if it cannot be taken, or if another process holds it for `patience` seconds more.

        Those that torchrun replaces may be on their way out still, on another machine.
        """
        self.folder = folder
        self._created: list[Path] = []  # directories, the innermost last
        self._created_file = False
        try:
            self._descriptor = self._take(patience)
        except BaseException:
            self._remove_folders()
            raise

    def _take(self, patience: float) -> int:
        deadline, next_message = time.monotonic() + patience, time.monotonic() + _MESSAGE_AFTER
        replaced = 0
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(descriptor):
                    return descriptor
                replaced += 1  # the process before has just removed it
                if replaced == _TRIES:
                    raise OSError(errno.ESTALE, "its inode number changes from look to look")
            except BaseException as error:
                os.close(descriptor)
                if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
                    self._remove_file()
                    raise InputError(
                        f"--save {self.folder}: cannot be locked ({error.strerror}); expected a file system with locks"
                    ) from None
                if not isinstance(error, BlockingIOError):
                    raise
                if time.monotonic() >= deadline:
                    raise InputError(
                        f"--save {self.folder}: another process is training in this folder; wait for it or choose another"
                    ) from None
                if time.monotonic() >= next_message:
                    next_message = deadline
                    say(f"--save {self.folder}: another process holds it; waiting up to {patience:.0f} s for that to end")
                time.sleep(0.1)
            else:
                os.close(descriptor)

    def _open(self) -> int:
        """Open the lock file; it and the directories above it are created if they are missing."""
        for remaining in reversed(range(_TRIES)):
            try:
                missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
                for folder in reversed(missing):
                    with contextlib.suppress(FileExistsError):
                        folder.mkdir()
                        self._created.append(folder)
                with contextlib.suppress(FileExistsError):
                    descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                    self._created_file = True
                    return descriptor
                return os.open(self.folder / LOCK, os.O_RDWR)
            except OSError as error:
                if not (remaining and isinstance(error, FileNotFoundError)):
                    raise InputError(f"--save {self.folder}: {error.strerror}; expected a folder to write to") from None
        raise AssertionError("unreachable")

    def _is_current(self, descriptor: int) -> bool:
        """Return whether the lock file is still the one that was opened as `descriptor`."""
        try:
            return os.path.samestat(os.stat(self.folder / LOCK), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def is_held(self) -> bool:
        """Return whether this process still has the directory to itself: nobody has removed or replaced the lock file."""
        return self._is_current(self._descriptor)

    def check(self) -> None:
        """Raise InputError if the lock is lost, so that another process may train in the directory."""
        if not self.is_held():
            raise InputError(
                f"{self.folder / LOCK}: found it removed or replaced, expected the lock of this run; it stops, as another may "
                "write to the folder now: give the same command again when no other is left"
            )

    def refresh(self) -> None:
        """Check the lock, and renew the time of its file: purges of scratch disks remove old files."""
        self.check()
        os.utime(self._descriptor)

    def close(self) -> None:
        """Release the lock; the end of the process releases it too."""
        os.close(self._descriptor)

    def undo(self) -> None:
        """Remove the lock file, and the directories above it that are empty, as far as this lock has created them."""
        if self.is_held():
            self._remove_file()
        self._remove_folders()

    def _remove_file(self) -> None:
        if self._created_file:
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()

    def _remove_folders(self) -> None:
        for folder in reversed(self._created):
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()
