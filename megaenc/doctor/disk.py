"""Checks of the --save directory: space, write speed and file system guarantees."""

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from megaenc.doctor.result import GIB, CheckContext, Finding, note, ok, problem, read_kernel_file

_MB = 10**6
_CHUNK_BYTES = 4 * 2**20
_MIN_FREE_BYTES = 40 * GIB
"""Two checkpoints of the 1B model, at 14 bytes for each of its 1.4 billion weights."""
_MIN_TEMP_BYTES = GIB
_MAKE_ROOM = "free space there, or raise the quota"
_MIN_WRITE_RATE = 50 * _MB  # bytes a second
_SECONDS = 2.0
_MAX_TEST_BYTES = 512 * 2**20
_VOLATILE = {
    "tmpfs": "memory and lost when the machine stops",
    "overlay": "the container and lost with it",
}
"""Risk by file system type."""


def nearest_existing_dir(directory: Path) -> Path:
    """Return the real path of `directory`, or of its nearest parent that exists.

    A path that this user cannot see counts as missing. The result may be a file.
    """
    directory = Path(os.path.realpath(directory))
    return next(place for place in (directory, *directory.parents) if os.path.exists(place))


def check_disk_space(context: CheckContext) -> list[Finding]:
    """Check type, free space and free inodes of the file system of `context.save`.

    It is that of the nearest existing parent. The finding on the type is a note if it loses files
    (tmpfs, overlay), that on space a note below 40 GiB, else they are ok. A third one, a note, is
    on inodes if fewer than 10,000 are free.
    """
    directory = nearest_existing_dir(Path(context.save))
    stats = os.statvfs(directory)
    kind = file_system_type(directory, context.root)
    free = stats.f_frsize * stats.f_bavail
    volatile_advice = f"files there are in {_VOLATILE.get(kind)}: give --save a directory on a disk"
    space_advice = (
        "a checkpoint of the 1B model takes 20 GB, one of the 210M model 3 GB: --keep-last limits "
        "their number"
    )
    text = f"{free / GIB:,.1f} GiB free of {stats.f_frsize * stats.f_blocks / GIB:,.1f}"
    findings = [
        note("directory", f"{directory}, on {kind}", volatile_advice if kind in _VOLATILE else ""),
        note("space", text, space_advice if free < _MIN_FREE_BYTES else ""),
    ]
    if stats.f_files and stats.f_favail < 10_000:
        advice = "each checkpoint has a file per rank: remove old files"
        findings.append(note("files", f"{stats.f_favail:,} more can be created", advice))
    return findings


def check_temp_space(context: CheckContext) -> list[Finding]:
    """Check the space for temporary files (TMPDIR or the system's directory).

    The finding is ok, a note below 1 GiB, or a problem if no directory is writable.
    """
    name = "temporary files"
    advice = "free space there, or export TMPDIR=DIRECTORY"
    try:
        directory = gettempdir()
    except OSError:
        return [problem(name, "no writable directory for them", advice)]
    free = shutil.disk_usage(directory).free
    return [
        note(
            name,
            f"{directory}, {free / GIB:,.1f} GiB free",
            "" if free > _MIN_TEMP_BYTES else advice,
        )
    ]


def file_system_type(place: Path, root: Path = Path("/")) -> str:
    """Return the file system type of the path `place` by /proc/mounts, such as "ext4".

    It is "an unknown file system" if no mount contains the path or /proc/mounts is unreadable.

    Args:
        place: Real absolute path, as of `nearest_existing_dir`.
        root: Directory that contains /proc.
    """
    mounts = [line.split()[1:3] for line in read_kernel_file(root / "proc/mounts").splitlines()]
    holding = [
        (len(mount), kind)
        for mount, kind in mounts
        if f"{place}/".startswith(f"{mount.rstrip('/')}/")
    ]
    return max(
        reversed(holding), key=lambda mount: mount[0], default=(0, "an unknown file system")
    )[1]


def check_file_system(context: CheckContext) -> list[Finding]:
    """Check locks and write speed in `context.save` or its nearest existing parent.

    Up to 512 MiB are written to a temporary directory there, for up to 2 s.

    Returns:
        The findings of `check_locks` and `measure_write_speed`, or one problem if the directory is
        not writable.
    """
    directory = nearest_existing_dir(Path(context.save))
    try:
        with TemporaryDirectory(prefix=".megaenc-doctor-", dir=directory) as name:
            return [check_locks(Path(name)), measure_write_speed(Path(name))]
    except OSError as error:
        return [
            problem(
                "writing",
                f"{directory}: {error.strerror}",
                "give --save a directory that this user may write to",
            )
        ]


def check_locks(directory: Path) -> Finding:
    """Lock a file in `directory` twice; return a problem unless the second lock fails.

    The locks are those of flock. The file, `lock`, is not removed.
    """
    advice = (
        "two commands could train in one directory: mount it with locks (Lustre: -o flock; NFS: "
        "with lockd)"
    )
    try:
        with open(directory / "lock", "w") as first, open(directory / "lock", "w") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return ok("locks", "kept")
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return problem("locks", error.strerror or str(error), _MAKE_ROOM if is_full else advice)
    return problem("locks", "given to two at a time", advice)


def measure_write_speed(directory: Path) -> Finding:
    """Measure the write speed in `directory` with fsync, for up to 2 s or 512 MiB.

    The finding is ok, a note below 50 MB/s, or a problem if writing fails. The file, `written`, is
    not removed.
    """
    piece = os.urandom(_CHUNK_BYTES)
    begin = time.perf_counter()
    written = 0
    try:
        with open(directory / "written", "wb", buffering=0) as stream:
            while written < _MAX_TEST_BYTES and time.perf_counter() - begin < _SECONDS:
                written += stream.write(piece)
                os.fsync(stream.fileno())
    except OSError as error:
        return problem("writing", f"{error.strerror} after {written / _MB:.0f} MB", _MAKE_ROOM)
    rate = written / (time.perf_counter() - begin)
    advice = (
        "a checkpoint of the 1B model would take over six minutes: a faster directory, "
        "--async-save or a longer --save-interval"
    )
    return note(
        "writing",
        f"{rate / _MB:,.0f} MB/s by one process, synced",
        advice if rate < _MIN_WRITE_RATE else "",
    )
