"""The lock of a run directory: one process group at a time trains in it."""

import contextlib
import os
import time
from pathlib import Path

from megaenc.atomic_io import FileLock
from megaenc.console import print_rank_0
from megaenc.errors import InputError

LOCK_FILE = ".lock"
_MESSAGE_AFTER = 5.0  # seconds
_TRIES = 20  # to open a file in a directory that others may be removing


class RunLock(FileLock):
    """The lock on the directory of `--save`, which is created if it is missing; held until `close` or the end of the process."""

    def __init__(self, folder: Path, patience: float = 0.0):
        """Take the lock. Raise InputError if it cannot be taken, or if another process holds it for `patience` seconds more.

        Those that torchrun replaces may be on their way out still, on another machine.
        """
        super().__init__(folder / LOCK_FILE)
        self.folder = folder
        self._missing: list[Path] = []  # directories that were not there before, the innermost first
        try:
            self._wait(patience)
        except OSError as error:
            if error.filename is None:
                self._remove_file()
                reason = f"cannot be locked ({error.strerror}); expected a file system with locks"
            else:
                reason = f"{error.strerror}; expected a folder to write to"
            self._remove_folders()
            raise InputError(f"--save {folder}: {reason}") from None
        except BaseException:
            self._remove_folders()
            raise

    def _wait(self, patience: float) -> None:
        deadline, next_message = time.monotonic() + patience, time.monotonic() + _MESSAGE_AFTER
        while not self.take():
            if time.monotonic() >= deadline:
                raise InputError(
                    f"--save {self.folder}: another process is training in this folder; wait for it or choose another"
                )
            if time.monotonic() >= next_message:
                next_message = deadline
                print_rank_0(f"--save {self.folder}: another process holds it; waiting up to {patience:.0f} s for that to end")
            time.sleep(0.1)

    def take(self) -> bool:
        """Return whether the lock could be taken; its file and the directories above are created if missing. Raises OSError."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):  # another process is removing the directories
                missing = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
                if missing:
                    self._missing = list(dict.fromkeys([*missing, *self._missing]))
                    self.folder.mkdir(parents=True, exist_ok=True)
                return super().take()
        return super().take()

    def check(self) -> None:
        """Raise InputError if the lock is lost, so that another process may train in the directory."""
        if not self.is_held():
            raise InputError(
                f"{self.path}: found it removed or replaced, expected the lock of this run; it stops, as another may "
                "write to the folder now: give the same command again when no other is left"
            )

    def refresh(self) -> None:
        """Check the lock, and renew the time of its file: purges of scratch disks remove old files."""
        self.check()
        os.utime(self._descriptor)

    def remove_created(self) -> None:
        """Remove the lock file, and the directories above it that are empty, as far as this lock has created them."""
        if self.is_held():
            self._remove_file()
        self._remove_folders()

    def _remove_file(self) -> None:
        if self.created:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _remove_folders(self) -> None:
        for folder in self._missing:
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()
