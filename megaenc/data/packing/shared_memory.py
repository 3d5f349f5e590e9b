"""Read-only arrays that the processes of a run on one machine compute once and share.

They lie in anonymous memory (memfd), which is freed with the last process that maps it. A small note file in the temporary
folder names the process and descriptor that hold them and serves as the lock of the process that computes them.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import json
import mmap
import os
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from megaenc.dist_env import get_local_world_size
from megaenc.json_files import parse_json

Arrays = tuple[np.ndarray, ...]

_RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")  # identify a run
_ALIGNMENT = 64  # bytes

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


def share_arrays(key: tuple[object, ...], compute: Callable[[], Arrays]) -> Arrays:
    """Return `compute()`'s arrays, run once per machine and shared read-only under `key`, or run here without sharing.

    `key`, plain values, identifies the arrays. Other processes wait; if the computing one is killed, the next takes over. A
    process that cannot map another's arrays, or asks after all holders have released them, computes its own; containers do not
    share with each other. The arrays of a run with one process are not shared, and writable.
    """
    if not has_local_peers():
        return compute()
    try:
        folder = _user_folder()
        namespace = os.readlink("/proc/self/ns/pid")  # processes of one PID namespace see each other
    except OSError:
        return compute()
    identity = key, [os.environ.get(name) for name in _RUN_VARIABLES], namespace
    name = hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()
    # The memory of another process may be inaccessible.
    with contextlib.suppress(PermissionError), _lock_note(folder / name) as note:
        arrays = _open_published(note, name)
        if arrays is not None:
            return arrays
        _remove_stale_notes(folder)
        return _publish(note, folder / name, compute())
    return compute()


def has_local_peers() -> bool:
    """Return whether the run has more than one process on this machine."""
    return get_local_world_size() > 1


def hash_array(array: np.ndarray) -> str:
    """Return a hash in hex of the dtype and contents of a contiguous array, for use in keys of `share_arrays`."""
    return hashlib.blake2b(array.data, digest_size=16, person=str(array.dtype).encode()).hexdigest()


def _user_folder() -> Path:
    """Return this user's private folder for notes, creating it if needed. Raises OSError if that is impossible."""
    folder = Path(tempfile.gettempdir()) / f"megaenc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(folder)  # another user could write there
    return folder


@contextlib.contextmanager
def _lock_note(path: Path) -> Iterator[int]:
    """Open and lock the note at `path`, yield its descriptor and close it afterwards."""
    while True:
        note = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # without file locks each process computes its own at worst
            fcntl.flock(note, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(note).st_ino:
                break
        os.close(note)  # its writer has deleted the note meanwhile
    try:
        yield note
    finally:
        os.close(note)


def _open_published(note: int, name: str) -> Arrays | None:
    """Map the arrays that the note names; return None if there are none. Raises PermissionError if access is denied."""
    try:
        written = parse_json(os.pread(note, 1 << 16, 0))
        memory = os.open(f"/proc/{written['process']}/fd/{written['descriptor']}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        raise
    except (ValueError, KeyError, TypeError, OSError):
        return None
    try:
        # Process ids and descriptors are reused: check that the opened file is the memory of this name.
        is_named = os.readlink(f"/proc/self/fd/{memory}").startswith(f"/memfd:{name} ")
        if not (is_named and fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE):
            return None
        return _map_arrays(memory, written["arrays"])[1]
    except (ValueError, KeyError, TypeError, OSError):
        return None
    finally:
        os.close(memory)


def _publish(note: int, path: Path, arrays: Arrays) -> Arrays:
    """Copy `arrays` to shared memory, name it in the open `note` at `path` for this process's lifetime and return the mapping."""
    places, size = [], 0
    for array in arrays:
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        places.append({"start": size, "dtype": array.dtype.str, "shape": array.shape})
        size += array.nbytes
    if not size:
        return arrays
    memory = os.memfd_create(path.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(memory, "wb", closefd=False) as stream:
            for array, place in zip(arrays, places, strict=True):
                stream.seek(place["start"])
                stream.write(np.ascontiguousarray(array).data)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        # Before Linux 6.7 only a read-only descriptor may be mapped.
        readable = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages, mapped = _map_arrays(readable, places)
        finally:
            os.close(readable)
    except OSError:
        os.close(memory)
        return arrays
    weakref.finalize(pages, _withdraw, os.getpid(), memory, path, os.fstat(note).st_ino)
    written = {"process": os.getpid(), "descriptor": memory, "arrays": places}
    os.ftruncate(note, 0)
    os.pwrite(note, json.dumps(written).encode(), 0)
    return mapped


def _map_arrays(memory: int, layout: list[dict]) -> tuple[ctypes.Array, Arrays]:
    """Map the memory at a descriptor read-only; return the mapping and its arrays, laid out as `layout` describes."""
    pages = _map_read_only(memory)
    arrays = []
    for place in layout:
        count, dtype = int(np.prod(place["shape"], dtype=np.int64)), np.dtype(place["dtype"])
        array = np.frombuffer(pages, dtype, count, place["start"] if count else 0)
        array.flags.writeable = False
        arrays.append(array.reshape(place["shape"]))
    return pages, tuple(arrays)


def _map_read_only(memory: int) -> ctypes.Array:
    """Map the memory at a descriptor, until the last array on it is deleted.

    Python's mmap would keep a duplicate of the descriptor, and thousands of corpora more open files than a process may have.
    """
    size = os.fstat(memory).st_size
    address = _LIBC.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, memory, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    pages = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(pages, _LIBC.munmap, address, size).atexit = False  # other threads may still read
    return pages


def _withdraw(process: int, memory: int, path: Path, inode: int) -> None:
    """Close the shared memory and delete its note, if `process` is this process."""
    if os.getpid() != process:  # a forked child
        return
    os.close(memory)
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


@functools.cache
def _remove_stale_notes(folder: Path) -> None:
    """Delete the notes of processes that no longer exist, once a process."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
                written = os.pread(note, 1 << 16, 0)
                if not written or not Path(f"/proc/{parse_json(written)['process']}").exists():
                    path.unlink()
            finally:
                os.close(note)
