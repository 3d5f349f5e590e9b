"""Report output directory: only files that an earlier report wrote are replaced or removed.

Symbolic links in place of the directory, its subdirectories or its files are refused.
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
"""List of the files that a report wrote to its subdirectories, one a line; no others are ever removed."""

_LIST_HEADER = "# written by megaenc study report"
_WRITTEN = re.compile(rf"({TABLES}|{FIGURES})/[\w-]+\.(csv|md|tex|png|svg)")  # other lines are ignored


def check_report_dir(output: Path) -> set[str]:
    """Return the paths, relative to `output`, of files an earlier report wrote (empty if new); InputError for other content.

    Raises InputError for a file, a symbolic link, or a directory with other content.
    """
    try:
        _check_entry_types(output)
        if not output.exists():
            return set()
        ours = GENERATOR_TAG in _read_text(output / PAGE)
        mark, *names = _read_text(output / FILES).splitlines() or [""]
        if mark == _LIST_HEADER:
            own = {FILES, TABLES, FIGURES, *([PAGE] if ours else [])}
        else:  # empty subdirectories may remain from a killed attempt
            own, names = {name for name in (TABLES, FIGURES) if not _list_permanent_entries(output / name)}, []
        others = [name for name in _list_permanent_entries(output) if name not in own]
        if others and not (ours and mark == _LIST_HEADER):
            raise InputError(
                f"--output {output}: contains {others[0]} and no report; expected a new or empty directory, or a report"
            )
        return {name for name in names if _WRITTEN.fullmatch(name) and _entry_type(output / name) == "file"}
    except OSError as error:
        raise InputError(f"--output {output}: cannot be read: {error.strerror}; choose another directory") from None


def _check_entry_types(output: Path) -> None:
    """Raise InputError if one of the report's directories or files is a link or of another type."""
    for name, expected in {"": "directory", TABLES: "directory", FIGURES: "directory", PAGE: "file", FILES: "file"}.items():
        if (entry_type := _entry_type(output / name)) not in (expected, ""):
            where = f"--output {output}" + (f": {name}" if name else "")
            raise InputError(f"{where}: is a {entry_type}, expected a {expected}; choose another directory")


def _entry_type(path: Path) -> str:
    """Return `file`, `directory`, `symbolic link` or `special file` without following links; "" if missing."""
    try:
        mode = stat.S_IFMT(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    return {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symbolic link"}.get(mode, "special file")


def _list_permanent_entries(folder: Path) -> list[str]:
    """Return the sorted names of a directory's entries except temporary files; empty if it is no directory."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".tmp") if folder.is_dir() else []


def prepare_report_dir(output: Path, earlier: Collection[str], names: Iterable[str]) -> None:
    """Create tables/ and figures/, list `names` and `earlier` in files.txt; InputError if one only in `names` exists."""
    for name in names:
        if name not in earlier and _entry_type(output / name):
            raise InputError(
                f"--output {output}: contains {name}, which no report wrote; move that file or choose another directory"
            )
    try:
        for folder in (output / TABLES, output / FIGURES):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be created: {error.strerror}") from None
    _write_file_list(output, {*earlier, *names})


def remove_stale_files(output: Path, earlier: Collection[str], names: Collection[str]) -> None:
    """Delete the `earlier` files that are not in `names`, and stale temporary files; then list `names` in files.txt."""
    _check_entry_types(output)
    own = {output / name for name in (*earlier, *names, PAGE, FILES)}
    stale = [output / name for name in set(earlier) - set(names)]
    for folder in (output, output / TABLES, output / FIGURES):
        if own_files := [path for path in own if path.parent == folder]:
            _unlink_files(folder, [*(path for path in stale if path.parent == folder), *find_stale_temp_files(*own_files)])
    _write_file_list(output, names)


def _unlink_files(folder: Path, files: Iterable[Path]) -> None:
    """Delete `files` in a directory that is not a symbolic link, ignoring errors."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for path in files:
                with contextlib.suppress(OSError):
                    os.unlink(path.name, dir_fd=descriptor)
        finally:
            os.close(descriptor)


def _write_file_list(output: Path, names: Iterable[str]) -> None:
    """Write the sorted `names` to FILES."""
    atomic_write(output / FILES, "".join(f"{line}\n" for line in (_LIST_HEADER, *sorted(names))))


def _read_text(file: Path) -> str:
    """Read a regular file as text; "" if it is missing."""
    try:
        return read_regular_file(file).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
