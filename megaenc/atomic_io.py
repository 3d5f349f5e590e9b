"""Atomic writes of files and directories, and file locks.

A write goes to a temporary name, which is synced to disk and renamed. A lock ends with its process.
"""

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megaenc.errors import InputError

_LOCK_ATTEMPTS = 20  # other processes may keep removing the lock file
_UNWRITABLE_ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
)


def resolve_path(path: Path) -> Path:
    """Return `path` as an absolute path without `..` and symbolic links.

    The path need not exist.
    """
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def atomic_files(
    *paths: Path, before_rename: Callable[[], None] | None = None
) -> Iterator[list[Path]]:
    """Yield a temporary path for each of `paths`; rename all after the `with` block.

    Each is next to its path, in a directory that must exist, and ends in .tmp; the block must
    create all files. They are then synced to disk and renamed in order, or removed on an error. New
    files appear together or not at all, but for a kill between two renames, so the last one marks
    the set as complete; existing files are replaced one by one.

    Args:
        before_rename: Called before the first rename; an error in it counts as one of the block.

    Raises:
        InputError: A write or rename fails, or the block has not created a file. Other errors pass.
    """
    temporary = [temporary_path(path) for path in paths]
    try:
        final_paths = dict(zip(map(str, temporary), paths, strict=True))
        with convert_write_errors(paths[0].parent, *_UNWRITABLE_ERRNOS, final_paths=final_paths):
            yield temporary
            for path in temporary:
                with open(path, "rb+") as stream:
                    os.fsync(stream.fileno())
            if before_rename is not None:
                before_rename()
            _rename_all(temporary, paths)
    finally:
        for path in temporary:  # the first error is the one to report
            remove_path(path)


def _rename_all(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Rename each source to its target, in order.

    On an error or a signal those targets that are new are removed, the last one first.
    """
    new = [
        (source, target)
        for source, target in zip(sources, targets, strict=True)
        if not os.path.lexists(target)
    ]
    try:
        for source, target in zip(sources, targets, strict=True):
            os.replace(source, target)
    except BaseException:
        for source, target in reversed(new):
            if not source.exists():  # it was renamed
                remove_path(target)
        raise


def find_stale_temp_files(*paths: Path) -> list[Path]:
    """Return, sorted, the temporary files for `paths`, one or more of one directory.

    They are those of `atomic_files`, `atomic_write` and `atomic_dir`, also of writers that still
    run. The list is empty if the directory is missing or unreadable.
    """
    names = "|".join(re.escape(path.name) for path in paths)
    temporary = re.compile(rf"\.({names})\.\d+-[0-9a-f]{{8}}\.tmp")
    try:
        return sorted(path for path in paths[0].parent.iterdir() if temporary.fullmatch(path.name))
    except OSError:
        return []


def remove_path(path: Path) -> None:
    """Remove a file, a symbolic link, or a directory with its content.

    Errors such as a missing path or permission are ignored; part of a directory may then stay.
    """
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def longest_file_name(*paths: Path) -> str:
    """Return the file name with the most bytes that writing any of `paths` needs.

    It is one that `temporary_path` gives, for checks against the file system's limit. There must
    be at least one path.
    """
    return max(
        (temporary_path(path).name for path in paths), key=lambda name: len(os.fsencode(name))
    )


def temporary_path(path: Path) -> Path:
    """Return a path next to `path` for a temporary file, unique to this call.

    Its name is `.NAME.PID-RANDOM.tmp`. Nothing is created.
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


@contextlib.contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield a new temporary directory, and rename it to `path` after the `with` block.

    On an error it is removed. The parent directory of `path` must exist, and `path` must be absent
    or an empty directory, which only the rename checks. The content is synced to disk before.

    Raises:
        InputError: The directory cannot be written, in the block too, or `path` is a file or not
            empty after the block. Other errors of the block pass.
    """
    target = resolve_path(path)
    temporary = temporary_path(target)
    try:
        try:
            temporary.mkdir()
        except OSError as error:  # ENOENT in /proc, a name that is too long and so on
            raise InputError(f"{path}: cannot be written to: {error.strerror}") from None
        with convert_write_errors(target.parent, *_UNWRITABLE_ERRNOS):
            yield temporary
            for entry in (*temporary.rglob("*"), temporary):
                fsync_path(entry)
        try:
            with convert_write_errors(path, *_UNWRITABLE_ERRNOS):
                os.rename(temporary, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise InputError(
                f"{path}: created meanwhile by another process ({error.strerror}); "
                "choose another name"
            ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk.

    File systems that cannot do so are ignored.

    Raises:
        OSError: The path is missing, or flushing fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems do not support this for directories
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def convert_write_errors(
    path: Path,
    *errnos: int,
    kind: type[InputError] = InputError,
    name_host: bool = False,
    final_paths: Mapping[str, Path] | None = None,
) -> Iterator[None]:
    """Convert errors of writing in the `with` block into an InputError on `path`.

    Other errors, also OSErrors, pass.

    Args:
        path: File or directory that is written, which the error names.
        errnos: OSErrors to convert; none: all. ENOSPC always is, and on a full disk also errors of
            other types, as libraries that write files (tokenizers, torch) raise.
        kind: Class of the error; an InputError not of this class becomes one, with its message.
        name_host: Whether the message names this machine.
        final_paths: Final path by `filename` of the OSError, a temporary file. Such an error is
            always converted, and the message names the final path in place of `path`.
    """
    try:
        yield
    except InputError as error:
        if isinstance(error, kind):
            raise
        raise kind(str(error)) from None
    except Exception as error:
        cause = error
        # torch's writer raises its own error after the OSError.
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            cause = error.__context__
        is_os_error = isinstance(cause, OSError)
        final_path = (final_paths or {}).get(str(cause.filename)) if is_os_error else None
        if final_path is not None:
            path = final_path
            reason = cause.strerror
        elif is_os_error and (cause.errno in errnos or not errnos):
            reason = cause.strerror
        elif os.strerror(errno.ENOSPC) in str(error) or (
            not isinstance(error, OSError) and _is_disk_full(path)
        ):
            reason = os.strerror(errno.ENOSPC)
        else:
            raise
        place = f"{path} on {socket.gethostname()}" if name_host else path
        raise kind(f"{place}: cannot be written to: {reason}") from None


def _is_disk_full(directory: Path) -> bool:
    """Return whether the disk of `directory` has no free block."""
    try:
        status = os.statvfs(directory)
        return status.f_blocks > 0 and status.f_bavail == 0  # some file systems report no sizes
    except OSError:
        return False


def atomic_write(path: Path, text: str) -> None:
    """Write `text` as UTF-8 to `path` through a temporary file.

    The directory must exist. A crash leaves either the old or the new content.

    Raises:
        InputError: The file cannot be written.
    """
    with atomic_files(path) as [temporary]:
        temporary.write_text(text, encoding="utf-8")


class FileLock:
    """Exclusive flock on the file `path`, from `acquire` to `release` or process end.

    `created` tells whether `acquire` has created the file, which is not removed. `try_lock` is
    simpler: it releases the lock and removes the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.created = False

    def acquire(self) -> bool:
        """Try to lock the file without waiting; return whether this process has the lock.

        A missing file is created. Do not call it again before `release`, unless it has
        returned False.

        Raises:
            OSError: The file cannot be created or opened. If the error's `filename` is None, the
                file system does not support locks or, with errno ESTALE, other processes keep
                replacing the file.
        """
        for _ in range(_LOCK_ATTEMPTS):
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
        """Return whether the locked file is still the one at `path`.

        False if it was removed or replaced since. Call it only while this process has the lock.
        """
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock by closing the file, which is not removed.

        Call it once after each `acquire` that has returned True.
        """
        os.close(self._descriptor)


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to lock the file `path` without waiting; yield whether that worked.

    If so, the lock is held during the `with` block and the file removed after it; the block runs in
    any case. Missing parent directories are created and stay. A lock ends with its process. On a
    file system without locks every process gets it, so code that runs under a lock must write
    atomically and deterministically.

    Raises:
        InputError: The file cannot be created.
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
    """Wait up to `seconds` to lock the file `path`; yield whether that worked.

    By default there is no limit; with 0 it tries at least once. If it worked, the lock is held
    during the `with` block and the file removed after it; the block runs in any case. Errors are
    those of `try_lock`.
    """
    deadline = time.monotonic() + seconds
    while True:
        with try_lock(path) as has_lock:
            if has_lock or time.monotonic() > deadline:
                yield has_lock
                return
        time.sleep(0.2)


def is_locked(path: Path) -> bool:
    """Return whether any process, this one too, has locked the file `path`.

    The file is not changed. The check itself may lock it for a moment, in which `acquire` returns
    False. False if it is missing or unreadable, or its file system has no locks.
    """
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
