"""The folder that a run is saved in: space, speed, and the promises of its file system that a save relies on."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from megaenc.doctor.findings import Asked, Finding, note, ok, problem

_GIB, _MB = 2**30, 10**6
_PIECE = 4 * 2**20
_LITTLE_SPACE = 40 * _GIB
"""Two checkpoints of the 1B model: 14 bytes for each of its 1.4 billion weights."""
_ROOM = _GIB  # for temporary files
_MAKE_ROOM = "make room there, or raise the quota"
_SLOW = 50 * _MB  # bytes a second
_SECONDS = 2.0
_MOST = 512 * 2**20
_PASSING = {
    "tmpfs": "memory and lost when the machine stops",
    "overlay": "the container and lost with it",
}


def existing(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that is there, as far as this user may see."""
    folder = Path(os.path.realpath(folder))
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))


def space(asked: Asked) -> list[Finding]:
    """Which file system it is, with free bytes and free names."""
    place = existing(Path(asked.save))
    about = os.statvfs(place)
    free, kind = about.f_frsize * about.f_bavail, file_system(place, asked.root)
    found = [ok("folder", f"{place}, on {kind}")]
    if kind in _PASSING:
        found = [
            note("folder", f"{place}, on {kind}", f"what is saved there is in {_PASSING[kind]}: give --save a folder on a disk")
        ]
    text = f"{free / _GIB:,.1f} GiB free of {about.f_frsize * about.f_blocks / _GIB:,.1f}"
    if free < _LITTLE_SPACE:
        advice = "a checkpoint of the 1B model takes 20 GB, one of the 210M model 3: --keep-last keeps few of them"
        found.append(note("space", text, advice))
    else:
        found.append(ok("space", text))
    if about.f_files and about.f_favail < 10_000:
        found.append(
            note("files", f"{about.f_favail:,} more can be made", "a run writes a file for each rank and save: remove old ones")
        )
    return found


def temporary(asked: Asked) -> list[Finding]:
    """Room for temporary files, which launcher, compilers and tokenisers write."""
    what, advice = "temporary files", "make room there, or export TMPDIR=FOLDER"
    try:
        place = gettempdir()
    except OSError:
        return [problem(what, "no folder for them can be written to", advice)]
    about = os.statvfs(place)
    free = about.f_frsize * about.f_bavail
    text = f"{place}, {free / _GIB:,.1f} GiB free"
    return [ok(what, text) if free > _ROOM else note(what, text, advice)]


def file_system(place: Path, root: Path = Path("/")) -> str:
    """The type of the file system that holds `place`, as the kernel calls it."""
    best, kind = "", "an unknown file system"
    with suppress(OSError):
        for line in (root / "proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
            _, mount, there, *_ = line.split()
            inside = mount == "/" or f"{place}/".startswith(f"{mount}/")
            if inside and len(mount) >= len(best):
                best, kind = mount, there
    return kind


def promises(asked: Asked) -> list[Finding]:
    """Locks, renaming, syncing and speed, tried in a folder of their own that is removed again."""
    place = existing(Path(asked.save))
    try:
        with TemporaryDirectory(prefix=".megaenc-doctor-", dir=place) as name:
            found = [_kept(what, promise, Path(name), advice) for what, promise, advice in _PROMISES]
            return [*found, speed(Path(name))]
    except OSError as error:
        return [problem("writing", f"{place}: {error.strerror}", "give --save a folder that this user may write to")]


def _kept(what: str, promise: Callable[[Path], str], folder: Path, advice: str) -> Finding:
    try:
        broken = promise(folder)
    except OSError as error:
        broken = error.strerror or str(error)
        advice = _MAKE_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else advice
    return problem(what, broken, advice) if broken else ok(what, "kept")


def locks(folder: Path) -> str:
    """What is wrong with locks: a second holder, or none at all."""
    path = folder / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "given to two at a time"
    finally:
        os.close(first)
        os.close(second)


def renames(folder: Path) -> str:
    """What is wrong with renaming a file and a folder into another folder, over what is there."""
    for name in ("here", "there"):
        (folder / name).mkdir()
    (folder / "here" / "file").write_text("new")
    (folder / "there" / "file").write_text("old")
    os.replace(folder / "here" / "file", folder / "there" / "file")
    if (folder / "there" / "file").read_text() != "new":
        return "a file that was renamed over another has its content"
    os.rename(folder / "here", folder / "there" / "folder")
    return "" if (folder / "there" / "folder").is_dir() else "a folder that was renamed is not there"


def syncs(folder: Path) -> str:
    """Nothing: it raises what fsync does for a file and for a folder."""
    for path, how in ((folder / "synced", os.O_WRONLY | os.O_CREAT), (folder, os.O_RDONLY)):
        descriptor = os.open(path, how, 0o600)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return ""


_PROMISES = (
    ("locks", locks, "two commands could train in one folder: mount it with locks (Lustre: -o flock; NFS: with lockd)"),
    ("renaming", renames, "saves are renamed when they are whole: choose another file system"),
    ("syncing", syncs, "a save could be lost with the power though it was reported: choose another file system"),
)


def speed(folder: Path) -> Finding:
    """Bytes a second of one process that writes and syncs for a moment, which is what a checkpoint does."""
    piece, path = os.urandom(_PIECE), folder / "written"
    begin, written = time.perf_counter(), 0
    try:
        with open(path, "wb", buffering=0) as stream:
            while written < _MOST and time.perf_counter() - begin < _SECONDS:
                written += stream.write(piece)
                os.fsync(stream.fileno())
    except OSError as error:
        return problem("writing", f"{error.strerror} after {written / _MB:.0f} MB", _MAKE_ROOM)
    finally:
        path.unlink(missing_ok=True)
    return judged_speed(written / (time.perf_counter() - begin))


def judged_speed(rate: float) -> Finding:
    """The finding for `rate` bytes a second."""
    text = f"{rate / _MB:,.0f} MB/s by one process, synced"
    if rate < _SLOW:
        advice = (
            "a checkpoint of the 1B model would take over six minutes: a faster folder, --async-save or a longer --save-interval"
        )
        return note("writing", text, advice)
    return ok("writing", text)
