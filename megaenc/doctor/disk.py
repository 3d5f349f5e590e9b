"""The folder that a run is saved in: space, speed, and the promises of its file system that a save relies on."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from megaenc.doctor.findings import GIB, Asked, Finding, note, ok, problem, text_of

_MB = 10**6
_PIECE = 4 * 2**20
_LITTLE_SPACE = 40 * GIB
"""Two checkpoints of the 1B model: 14 bytes for each of its 1.4 billion weights."""
_ROOM = GIB  # for temporary files
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
    text, advice = f"{place}, on {kind}", f"what is saved there is in {_PASSING.get(kind)}: give --save a folder on a disk"
    found = [note("folder", text, advice) if kind in _PASSING else ok("folder", text)]
    text = f"{free / GIB:,.1f} GiB free of {about.f_frsize * about.f_blocks / GIB:,.1f}"
    advice = "a checkpoint of the 1B model takes 20 GB, one of the 210M model 3: --keep-last keeps few of them"
    found.append(note("space", text, advice) if free < _LITTLE_SPACE else ok("space", text))
    if about.f_files and about.f_favail < 10_000:
        advice = "a run writes a file for each rank and save: remove old ones"
        found.append(note("files", f"{about.f_favail:,} more can be made", advice))
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
    text = f"{place}, {free / GIB:,.1f} GiB free"
    return [ok(what, text) if free > _ROOM else note(what, text, advice)]


def file_system(place: Path, root: Path = Path("/")) -> str:
    """The type of the file system that holds `place`, as the kernel calls it."""
    mounts = [line.split()[1:3] for line in text_of(root / "proc/mounts").splitlines()]
    holding = [(len(mount), kind) for mount, kind in mounts if f"{place}/".startswith(f"{mount.rstrip('/')}/")]
    return max(reversed(holding), key=lambda each: each[0], default=(0, "an unknown file system"))[1]


def promises(asked: Asked) -> list[Finding]:
    """Try locks, renaming, syncing and speed in a folder of their own that is removed again."""
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
    """Return what is wrong with locks: a second holder, or none at all."""
    with open(folder / "lock", "w") as first, open(folder / "lock", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        return "given to two at a time"


def renames(folder: Path) -> str:
    """Return what is wrong with renaming a file and a folder into another folder, over what is there."""
    here, there = folder / "here", folder / "there"
    for place, content in ((here, "new"), (there, "old")):
        place.mkdir()
        (place / "file").write_text(content)
    os.replace(here / "file", there / "file")
    if (there / "file").read_text() != "new":
        return "a file that was renamed over another has its content"
    os.rename(here, there / "folder")
    return "" if (there / "folder").is_dir() else "a folder that was renamed is not there"


def syncs(folder: Path) -> str:
    """Return nothing: it raises what fsync does for a file and for a folder."""
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
    """Measure bytes a second of one process that writes and syncs for a moment, which is what a checkpoint does."""
    piece, path = os.urandom(_PIECE), folder / "written"
    begin, written = time.perf_counter(), 0
    try:
        with open(path, "wb", buffering=0) as stream:
            while written < _MOST and time.perf_counter() - begin < _SECONDS:
                written += stream.write(piece)
                os.fsync(stream.fileno())
    except OSError as error:
        return problem("writing", f"{error.strerror} after {written / _MB:.0f} MB", _MAKE_ROOM)
    return judged_speed(written / (time.perf_counter() - begin))


def judged_speed(rate: float) -> Finding:
    """Judge `rate` bytes a second."""
    text = f"{rate / _MB:,.0f} MB/s by one process, synced"
    advice = "a checkpoint of the 1B model would take over six minutes: a faster folder, --async-save or a longer --save-interval"
    return note("writing", text, advice) if rate < _SLOW else ok("writing", text)
