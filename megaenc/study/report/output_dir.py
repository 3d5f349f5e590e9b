"""Output directory of a report.

Only files that an earlier report wrote are replaced or removed.
"""

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

from megaenc.atomic_io import atomic_write
from megaenc.errors import InputError
from megaenc.json_files import read_regular_file

TABLES = "tables"
FIGURES = "figures"
PAGE = "index.html"
FILES = "files.txt"
"""List of the files that a report wrote to its subdirectories, one a line; no others are ever
removed."""

_LIST_HEADER = "# written by megaenc study report"
# other lines are ignored
_WRITTEN = re.compile(rf"({TABLES}|{FIGURES})/[\w-]+\.(csv|md|tex|png|svg)")


def check_report_dir(output: Path) -> set[str]:
    """Return the files of an earlier report in the directory `output`.

    They are those of tables and figures that its files.txt lists, relative to it, whether or not
    they exist; empty for a new or empty directory. Nothing is written or created.

    Raises:
        InputError: The path is a file or a symbolic link, or a directory that is neither empty nor
            a report (by the first line of files.txt), or it cannot be read.
    """
    try:
        for name in ("", TABLES, FIGURES, PAGE, FILES):
            path = output / name
            is_directory = name not in (PAGE, FILES)
            if path.is_symlink() or (
                path.exists() and not (path.is_dir() if is_directory else path.is_file())
            ):
                expected = "directory" if is_directory else "regular file"
                raise InputError(
                    f"--output {path}: found a link or another kind of file, expected a {expected}"
                )
        entries = (
            sorted(path.name for path in output.iterdir() if path.suffix != ".tmp")
            if output.exists()
            else []
        )
        if not entries:
            return set()
        lines = (
            read_regular_file(output / FILES).decode("utf-8", errors="replace").splitlines()
            if FILES in entries
            else []
        )
    except OSError as error:
        raise InputError(
            f"--output {output}: cannot be read: {error.strerror}; choose another directory"
        ) from None
    if not lines or lines[0] != _LIST_HEADER:
        raise InputError(
            f"--output {output}: contains {entries[0]} and no report; expected a new or empty "
            "directory, or a report"
        )
    return {name for name in lines[1:] if _WRITTEN.fullmatch(name)}


def prepare_report_dir(output: Path, earlier: Collection[str], names: Collection[str]) -> None:
    """Create a directory and its subdirectories for a report, with files.txt.

    The list files.txt has `earlier` and `names`, so that an interrupted report can be repeated.

    Args:
        output: Directory, created with its parents; it may exist.
        earlier: Files of an earlier report, by `check_report_dir`.
        names: Files of the report in tables and figures, relative to `output`.

    Raises:
        InputError: One of `names` exists and is not in `earlier`, or the directory cannot be
            written.
    """
    for name in names:
        if name not in earlier and (output / name).exists():
            raise InputError(
                f"--output {output}: contains {name}, which no report wrote; move that file or "
                "choose another directory"
            )
    try:
        output.mkdir(parents=True, exist_ok=True)
        # first, so that a killed attempt can be repeated
        _write_file_list(output, {*earlier, *names})
        for directory in (output / TABLES, output / FIGURES):
            directory.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {output}: cannot be created: {error.strerror}") from None


def remove_stale_files(output: Path, earlier: Collection[str], names: Collection[str]) -> None:
    """Delete the `earlier` files that are not in `names`, and list `names` only.

    The list is files.txt in `output`, to which all names are relative. Files that cannot be deleted
    are left, and no longer listed.

    Raises:
        InputError: The list cannot be written.
    """
    for name in set(earlier).difference(names):
        with contextlib.suppress(OSError):
            (output / name).unlink()
    _write_file_list(output, names)


def _write_file_list(output: Path, names: Collection[str]) -> None:
    atomic_write(output / FILES, "".join(f"{line}\n" for line in (_LIST_HEADER, *sorted(names))))
