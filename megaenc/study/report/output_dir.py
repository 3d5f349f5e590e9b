"""The folder of a report: which of its files a report has written, and only those are replaced or removed.

Nothing outside the folder is written or removed: links in place of the folder, its subfolders or its files are refused.
"""

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from megaenc.atomic_io import atomic_write, find_stale_temp_files
from megaenc.errors import InputError
from megaenc.json_files import read_regular_file
from megaenc.study.report.html import GENERATOR_TAG

TABLES, FIGURES, PAGE = "tables", "figures", "index.html"
FILES = "files.txt"
"""Lists the files that a report has written in its subfolders, a line each: no others are ever removed."""

_LISTED = "# written by megaenc study report"
_WRITTEN = re.compile(rf"({TABLES}|{FIGURES})/[\w-]+\.(csv|md|tex|png|svg)")  # other lines of a list are ignored


def check_report_dir(output: Path) -> set[str]:
    """Return the files that an earlier report wrote, as names below `output`; none for a new or an empty folder.

    Raises InputError for anything but a report's folder: a file, a link, a folder that holds something else.
    """
    try:
        _check_entry_types(output)
        if not output.exists():
            return set()
        ours = GENERATOR_TAG in _read_text(output / PAGE)
        mark, *names = _read_text(output / FILES).splitlines() or [""]
        if mark == _LISTED:
            own = {FILES, TABLES, FIGURES, *([PAGE] if ours else [])}
        else:  # only leftovers of an attempt that was killed at once
            own, names = {name for name in (TABLES, FIGURES) if not _list_permanent_entries(output / name)}, []
        others = [name for name in _list_permanent_entries(output) if name not in own]
        if others and not (ours and mark == _LISTED):
            raise InputError(
                f"--output {output}: holds {others[0]} and no report; expected a new folder, an empty one or a report"
            )
        return {name for name in names if _WRITTEN.fullmatch(name) and _entry_type(output / name) == "file"}
    except OSError as error:
        raise InputError(f"--output {output}: cannot be read: {error.strerror}; expected another folder") from None


def _check_entry_types(output: Path) -> None:
    """Raise InputError for a link, or another kind of entry, in place of the report's own folders and files."""
    for name, expected in {"": "folder", TABLES: "folder", FIGURES: "folder", PAGE: "file", FILES: "file"}.items():
        if (found := _entry_type(output / name)) not in (expected, ""):
            where = f"--output {output}" + (f": {name}" if name else "")
            raise InputError(f"{where}: is a {found}, expected a {expected}; choose another folder")


def _entry_type(path: Path) -> str:
    """Return file, folder, symbolic link or special file, links not followed; "" for nothing. Raises OSError."""
    try:
        mode = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "symbolic link"}.get(mode, "special file")


def _list_permanent_entries(folder: Path) -> list[str]:
    """Return what a folder holds, temporary files left out."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp") if folder.is_dir() else []


def prepare_report_dir(output: Path, earlier: Collection[str], names: Iterable[str]) -> None:
    """Create the subfolders and list `names`, about to be written, with `earlier` ones. Raises InputError if it cannot."""
    for name in names:
        if name not in earlier and _entry_type(output / name):
            raise InputError(
                f"--output {output}: holds {name}, which no report wrote; expected another folder, or that file moved"
            )
    try:
        for folder in (output / TABLES, output / FIGURES):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be made: {error.strerror}") from None
    _write_file_list(output, {*earlier, *names})


def remove_stale_files(output: Path, earlier: Collection[str], names: Collection[str]) -> None:
    """Remove files that only the `earlier` report or an attempt that was killed has written, and list `names`."""
    _check_entry_types(output)
    own = {output / name for name in (*earlier, *names, PAGE, FILES)}
    stale = [output / name for name in set(earlier) - set(names)]
    for folder in (output, output / TABLES, output / FIGURES):
        if here := [path for path in own if path.parent == folder]:
            _unlink_files(folder, [*(path for path in stale if path.parent == folder), *find_stale_temp_files(*here)])
    _write_file_list(output, names)


def _unlink_files(folder: Path, files: Iterable[Path]) -> None:
    """Remove `files` of a folder, which is not reached through a link; what is no file stays."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for path in files:
                with contextlib.suppress(OSError):
                    os.unlink(path.name, dir_fd=descriptor)
        finally:
            os.close(descriptor)


def _write_file_list(output: Path, names: Iterable[str]) -> None:
    atomic_write(output / FILES, "".join(f"{line}\n" for line in (_LISTED, *sorted(names))))


def _read_text(file: Path) -> str:
    try:
        return read_regular_file(file).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
