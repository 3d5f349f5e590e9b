"""The lock of a run directory, which only one process group may train in."""

import contextlib
import os
import time
from pathlib import Path

from megaenc.atomic_io import FileLock
from megaenc.console import print_rank_0
from megaenc.errors import InputError

LOCK_FILE = ".lock"
_MESSAGE_AFTER = 5.0  # seconds
_ACQUIRE_ATTEMPTS = 20  # while other processes may be removing the directory


class RunLock(FileLock):
    """Lock of a run `directory` by its file `.lock`, acquired by the constructor.

    It is held until `release` or the end of the process, so that only one run trains in the
    directory, which is created if missing. Only rank 0 creates one. The constructor raises
    InputError if another process holds the lock for `patience` seconds, 0 by default, or if it
    cannot be acquired; `check` raises one if the lock was lost since.
    """

    def __init__(self, directory: Path, patience: float = 0.0):
        """Acquire the lock of `directory`, which is created if missing.

        Args:
            directory: Run directory.
            patience: Seconds to wait for another process that holds the lock: after a restart by
                torchrun, the replaced processes may still be exiting on another machine.

        Raises:
            InputError: Another process holds the lock, or it cannot be acquired.
        """
        super().__init__(directory / LOCK_FILE)
        self.directory = directory
        try:
            self._wait(patience)
        except OSError as error:
            if error.filename is None:
                self.remove()
                reason = f"cannot be locked ({error.strerror}); expected a file system with locks"
            elif os.path.exists(self.path):
                reason = (
                    f"{LOCK_FILE}: {error.strerror}; expected a file that you may write, as its "
                    "owner can allow"
                )
            else:
                reason = f"{error.strerror}; expected a writable directory"
            raise InputError(f"--save {directory}: {reason}") from None

    def _wait(self, patience: float) -> None:
        """Try to acquire the lock for `patience` seconds.

        Raises:
            InputError: Another process still holds it.
        """
        deadline = time.monotonic() + patience
        next_message = time.monotonic() + _MESSAGE_AFTER
        while not self.acquire():
            if time.monotonic() >= deadline:
                raise InputError(
                    f"--save {self.directory}: another process is training in this directory; wait "
                    "for it or choose another"
                )
            if time.monotonic() >= next_message:
                next_message = deadline
                print_rank_0(
                    f"--save {self.directory}: another process holds its lock; waiting up to "
                    f"{patience:.0f} s"
                )
            time.sleep(0.1)

    def acquire(self) -> bool:
        """Try to acquire the lock without waiting; return False if another process has it.

        The constructor calls it, so call it again only after `release`. Directory and lock file are
        created if missing.

        Raises:
            OSError: They cannot be created or opened, or the file system does not support locks.
        """
        for _ in range(_ACQUIRE_ATTEMPTS):
            # Another process may be removing the directories.
            with contextlib.suppress(FileNotFoundError):
                if not self.directory.exists():
                    self.directory.mkdir(parents=True, exist_ok=True)
                return super().acquire()
        return super().acquire()

    def check(self) -> None:
        """Raise InputError if the lock file was removed or replaced since `acquire`.

        Another process may then train in the directory. Call it before each write there, and not
        after `remove` or `release`.
        """
        if not self.is_held():
            raise InputError(
                f"{self.path}: found it removed or replaced, expected the lock of this run, which "
                "stops because another process "
                "may write to the directory: give the same command again when no other process "
                "is left"
            )

    def refresh(self) -> None:
        """Set the lock file's time to now, because scratch disks purge old files.

        Raises:
            InputError: The lock file was removed or replaced.
        """
        self.check()
        os.utime(self._descriptor)

    def remove(self) -> None:
        """Remove the lock file if this object has created it; `release` must follow.

        Until then the lock is held on the removed file, which excludes only processes that have
        opened it before. Errors of the removal are ignored.
        """
        if self.created:
            with contextlib.suppress(OSError):
                self.path.unlink()
