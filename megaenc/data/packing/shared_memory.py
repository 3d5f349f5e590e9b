"""Arrays that all processes of a run need alike: made by one process of each machine, and there in memory once.

They lie in memory that has no name in any file system and goes with the last process that has it, however that ends. What tells
the others where it is, and whose turn it is to make it, is a note of some bytes in the folder for temporary files.
"""

import contextlib
import fcntl
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

_RUN_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")  # what processes of one run have in common, and no others have
_ALIGNMENT = 64  # bytes


def share_arrays(key: tuple[object, ...], make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` makes, read-only where there are several processes; `key` says which they are, in plain values.

    One process makes them while the others wait; if it is killed meanwhile, the next one does. A process that cannot get at
    another's, or that asks when nobody has them any more, makes its own; those of a container share among themselves.
    """
    if not has_local_peers():
        return make()
    try:
        folder = _user_folder()
        visible = os.readlink("/proc/self/ns/pid")  # processes see each other if theirs is the same
    except OSError:
        return make()
    common = key, [os.environ.get(part) for part in _RUN_VARIABLES], visible
    name = hashlib.blake2b(repr(common).encode(), digest_size=16).hexdigest()
    with contextlib.suppress(PermissionError), _lock_note(folder / name) as note:  # another's memory may be closed to us
        found = _open_published(note, name)
        if found is not None:
            return found
        _remove_stale_notes(folder)
        return _publish(note, folder / name, make())
    return make()


def has_local_peers() -> bool:
    """Whether there is anybody on this machine to share with."""
    return get_local_world_size() > 1


def hash_array(array: np.ndarray) -> str:
    """Of the numbers in a contiguous array: a key for what is made of it."""
    return hashlib.blake2b(array.data, digest_size=16, person=str(array.dtype).encode()).hexdigest()


def _user_folder() -> Path:
    """This user's own; OSError if there can be none."""
    folder = Path(tempfile.gettempdir()) / f"megaenc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(folder)  # others could put something there
    return folder


@contextlib.contextmanager
def _lock_note(path: Path) -> Iterator[int]:
    """Wait for the note at `path`, and have it to oneself: its descriptor."""
    while True:
        note = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # of a file system without locks: everybody then makes their own at worst
            fcntl.flock(note, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(note).st_ino:
                break
        os.close(note)  # its writer has gone, and the note with it
    try:
        yield note
    finally:
        os.close(note)


def _open_published(note: int, name: str) -> Arrays | None:
    """What the process has that wrote the note; None where nothing is written or it has gone. PermissionError: it is not ours."""
    try:
        written = parse_json(os.pread(note, 1 << 16, 0))
        memory = os.open(f"/proc/{written['process']}/fd/{written['descriptor']}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        raise
    except (ValueError, KeyError, TypeError, OSError):
        return None
    try:
        # Numbers of processes and files are given out again: only what was opened tells whether it is the memory of this name.
        is_named = os.readlink(f"/proc/self/fd/{memory}").startswith(f"/memfd:{name} ")
        if not (is_named and fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE):
            return None
        return _map_arrays(memory, written["arrays"])[1]
    except (ValueError, KeyError, TypeError, OSError):
        return None
    finally:
        os.close(memory)


def _publish(note: int, path: Path, arrays: Arrays) -> Arrays:
    """Put `arrays` where others find them, as long as this process has them; `note` is open at `path`."""
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
        readable = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)  # before Linux 6.7 no other may be mapped
        try:
            pages, found = _map_arrays(readable, places)
        finally:
            os.close(readable)
    except OSError:
        os.close(memory)
        return arrays
    weakref.finalize(pages, _withdraw, os.getpid(), memory, path, os.fstat(note).st_ino)
    written = {"process": os.getpid(), "descriptor": memory, "arrays": places}
    os.ftruncate(note, 0)
    os.pwrite(note, json.dumps(written).encode(), 0)
    return found


def _map_arrays(memory: int, places: list[dict]) -> tuple[mmap.mmap, Arrays]:
    pages = mmap.mmap(memory, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    arrays = []
    for place in places:
        count, dtype = int(np.prod(place["shape"], dtype=np.int64)), np.dtype(place["dtype"])
        arrays.append(np.frombuffer(pages, dtype, count, place["start"] if count else 0).reshape(place["shape"]))
    return pages, tuple(arrays)


def _withdraw(process: int, memory: int, path: Path, inode: int) -> None:
    """The process that made the arrays has no more use for them: nobody else is told of them."""
    if os.getpid() != process:  # a copy of the process, made by fork
        return
    os.close(memory)
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def _remove_stale_notes(folder: Path) -> None:
    """Remove the notes of processes that were killed."""
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
