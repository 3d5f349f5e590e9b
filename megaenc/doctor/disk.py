"""The folder that a run is saved in: space, speed, and the promises of its file system that a save relies on."""

import errno
import fcntl
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from megaenc.doctor.result import GIB, Finding, ProbeContext, note, ok, problem, text_of

_MB = 10**6
_PIECE = 4 * 2**20
_LITTLE_SPACE = 40 * GIB
"""Two checkpoints of the 1B model: 14 bytes for each of its 1.4 billion weights."""
_ROOM = GIB  # for temporary files
_MAKE_ROOM = "make room there, or raise the quota"
_SLOW = 50 * _MB  # bytes a second
_SECONDS = 2.0
_MOST = 512 * 2**20
_PASSING = {"tmpfs": "memory and lost when the machine stops", "overlay": "the container and lost with it"}


def existing(folder: Path) -> Path:
    """Return `folder`, or the nearest folder above it that is there, as far as this user may see."""
    folder = Path(os.path.realpath(folder))
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))


def space(asked: ProbeContext) -> list[Finding]:
    """Tell which file system it is, with free bytes and free names."""
    place = existing(Path(asked.save))
    about, kind = os.statvfs(place), file_system(place, asked.root)
    free, names = about.f_frsize * about.f_bavail, about.f_favail
    lost = f"what is saved there is in {_PASSING.get(kind)}: give --save a folder on a disk"
    little = "a checkpoint of the 1B model takes 20 GB, one of the 210M model 3: --keep-last keeps few of them"
    text = f"{free / GIB:,.1f} GiB free of {about.f_frsize * about.f_blocks / GIB:,.1f}"
    found = [
        note("folder", f"{place}, on {kind}", lost if kind in _PASSING else ""),
        note("space", text, little if free < _LITTLE_SPACE else ""),
    ]
    if about.f_files and names < 10_000:
        found.append(note("files", f"{names:,} more can be made", "a run writes a file for each rank and save: remove old ones"))
    return found


def temporary(asked: ProbeContext) -> list[Finding]:
    """Tell the room for temporary files, which launcher, compilers and tokenisers write."""
    what, advice = "temporary files", "make room there, or export TMPDIR=FOLDER"
    try:
        place = gettempdir()
    except OSError:
        return [problem(what, "no folder for them can be written to", advice)]
    about = os.statvfs(place)
    free = about.f_frsize * about.f_bavail
    return [note(what, f"{place}, {free / GIB:,.1f} GiB free", "" if free > _ROOM else advice)]


def file_system(place: Path, root: Path = Path("/")) -> str:
    """Return the type of the file system that holds `place`, as the kernel calls it."""
    mounts = [line.split()[1:3] for line in text_of(root / "proc/mounts").splitlines()]
    holding = [(len(mount), kind) for mount, kind in mounts if f"{place}/".startswith(f"{mount.rstrip('/')}/")]
    return max(reversed(holding), key=lambda each: each[0], default=(0, "an unknown file system"))[1]


def promises(asked: ProbeContext) -> list[Finding]:
    """Try locks, renaming, syncing and speed in a folder of their own that is removed again."""
    place, found = existing(Path(asked.save)), []
    try:
        with TemporaryDirectory(prefix=".megaenc-doctor-", dir=place) as name:
            for what, promise, advice in _PROMISES:
                try:
                    broken = promise(Path(name))
                except OSError as error:
                    broken = error.strerror or str(error)
                    advice = _MAKE_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else advice
                found.append(problem(what, broken, advice) if broken else ok(what, "kept"))
            return [*found, speed(Path(name))]
    except OSError as error:
        return [problem("writing", f"{place}: {error.strerror}", "give --save a folder that this user may write to")]


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
    piece, begin, written = os.urandom(_PIECE), time.perf_counter(), 0
    try:
        with open(folder / "written", "wb", buffering=0) as stream:
            while written < _MOST and time.perf_counter() - begin < _SECONDS:
                written += stream.write(piece)
                os.fsync(stream.fileno())
    except OSError as error:
        return problem("writing", f"{error.strerror} after {written / _MB:.0f} MB", _MAKE_ROOM)
    rate = written / (time.perf_counter() - begin)
    advice = "a checkpoint of the 1B model would take over six minutes: a faster folder, --async-save or a longer --save-interval"
    return note("writing", f"{rate / _MB:,.0f} MB/s by one process, synced", advice if rate < _SLOW else "")
