"""The lock of a run directory: one process group at a time trains in it."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

from megaenc.console import say
from megaenc.errors import InputError

LOCK = ".lock"
_SILENT = 5.0  # seconds
_TRIES = 20  # to open a file in a directory that others may be removing


class FolderLock:
    """The lock on the directory of `--save`, which is created if it is missing; held until `close` or the end of the process."""

    def __init__(self, folder: Path, patience: float = 0.0):
        """Take the lock. InputError if that cannot be, or if another process holds it for `patience` seconds more.

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
        deadline, said = time.monotonic() + patience, time.monotonic() + _SILENT
        while True:
            descriptor = self._open()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(descriptor):
                    return descriptor
                os.close(descriptor)  # of a file that the process before has just removed
            except BaseException as error:
                os.close(descriptor)
                if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
                    raise InputError(
                        f"--save {self.folder}: cannot be locked ({error.strerror}); expected a file system with locks"
                    ) from None
                if not isinstance(error, BlockingIOError):
                    raise
                if time.monotonic() >= deadline:
                    raise InputError(
                        f"--save {self.folder}: another process is training in this folder; wait for it or choose another"
                    ) from None
                if time.monotonic() >= said:
                    said = deadline
                    say(f"--save {self.folder}: another process holds it; waiting up to {patience:.0f} s for that to end")
                time.sleep(0.1)

    def _open(self) -> int:
        """Open the lock file; it and the directories above it are created if they are missing."""
        for remaining in reversed(range(_TRIES)):
            try:
                missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
                for folder in reversed(missing):
                    with contextlib.suppress(FileExistsError):
                        folder.mkdir()
                        self._created.append(folder)
                self._created_file = False
                with contextlib.suppress(FileExistsError):
                    descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                    self._created_file = True
                    return descriptor
                return os.open(self.folder / LOCK, os.O_RDWR)
            except OSError as error:
                if not (remaining and isinstance(error, FileNotFoundError)):
                    raise InputError(f"--save {self.folder}: {error.strerror}; expected a folder to write to") from None
        raise AssertionError("unreachable")

    def _is_there(self, descriptor: int) -> bool:
        """Return whether the lock file is still the one that was opened as `descriptor`."""
        try:
            return os.path.samestat(os.stat(self.folder / LOCK), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def is_held(self) -> bool:
        """Return whether this process still has the directory to itself: nobody has removed or replaced the lock file."""
        return self._is_there(self._descriptor)

    def check(self) -> None:
        """Raise InputError if the lock is lost, so that another process may train in the directory."""
        if not self.is_held():
            raise InputError(
                f"{self.folder / LOCK}: found it removed or replaced, expected the lock of this run; it stops, as another may "
                "write to the folder now: give the same command again when no other is left"
            )

    def close(self) -> None:
        """Give the directory free; the end of the process, however it comes, does so too."""
        os.close(self._descriptor)

    def undo(self) -> None:
        """Remove the lock file, and the directories above it that are empty, as far as this lock has created them."""
        if self._created_file and self.is_held():
            with contextlib.suppress(OSError):
                (self.folder / LOCK).unlink()
        self._remove_folders()

    def _remove_folders(self) -> None:
        for folder in reversed(self._created):
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()
