"""Checks of output paths before a command starts, and missing parents."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megaenc.atomic_io import find_stale_temp_files, resolve_path, temporary_path
from megaenc.console import format_paths, print_rank_0
from megaenc.errors import InputError


def refuse_existing(path: Path, flag: str) -> None:
    """Raise InputError, naming `flag`, if the output `path` exists or cannot be used.

    It may be missing or an empty directory. It must not be a file, a nonempty directory, the
    working directory or inaccessible.
    """
    try:
        str(path).encode()
        target = resolve_path(path)
        empty = target.is_dir() and not any(target.iterdir())
        exists = target.exists() or path.is_symlink()
        is_cwd = empty and target == Path.cwd()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be accessed: {error.strerror}") from None
    except ValueError:
        raise InputError(
            f"{flag} {str(path)!r}: not UTF-8, or holds a null character; expected another name"
        ) from None
    if is_cwd:  # the shell would keep the replaced directory as its working directory
        raise InputError(
            f"{flag} {path}: the directory that this command runs in, expected another name"
        )
    if exists and not empty:
        raise InputError(f"{flag} {path}: exists already; remove it or choose another name")


def report_stale_files(*paths: Path) -> None:
    """Print the existing temporary files for `paths`, such as stopped runs leave.

    Only rank 0 prints, to stdout, nothing if there are none. `paths` are one or more of one
    directory. Files of a live writer are printed too, and none is removed: a process id in the name
    may now belong to another process or to another machine.
    """
    stale_files = find_stale_temp_files(*paths)
    if stale_files:
        size = 0
        for file in (
            file for path in stale_files for file in (path, *path.rglob("*")) if not file.is_dir()
        ):
            with contextlib.suppress(OSError):
                size += file.stat().st_size
        print_rank_0(
            f"{paths[0].parent}: {len(stale_files)} unfinished by a stopped run, "
            f"{size / 1e6:,.1f} MB; remove them unless "
            f"another process is writing them: {format_paths([path.name for path in stale_files])}"
        )


def check_parent_writable(path: Path, flag: str) -> None:
    """Raise InputError, naming `flag`, if `path` could not be created.

    A temporary file is created, and removed again, in the nearest existing directory above `path`,
    as other commands may be creating the directories between.
    """
    target = resolve_path(path)
    try:
        directory = next(directory for directory in target.parents if directory.exists())
        temporary = temporary_path(directory / target.name)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.unlink()
    except OSError as error:
        raise InputError(
            f"{flag} {path}: cannot write to the directory {path.parent}: {error.strerror}"
        ) from None


def check_output_file(
    path: Path, flag: str, *, inputs: Iterable[str | Path] = (), overwrite: bool = True
) -> None:
    """Raise InputError if the file `path` cannot or must not be written.

    It cannot if it is a directory or a device, or has no writable parent. Call it before the work,
    and `create_parent_dir` before the file is written.

    Args:
        flag: Flag that names the file, for errors.
        inputs: Files and directories of the command's input; the file must be none of them and in
            none of them (see `refuse_input`).
        overwrite: Whether an existing file may be replaced.
    """
    try:
        target = resolve_path(path)
        exists = os.path.lexists(path)
        kind = ""
        if target.is_dir():
            kind = "a directory"
        elif target.exists() and not target.is_file():
            kind = "no regular file"
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be accessed: {error.strerror}") from None
    except ValueError:
        raise InputError(
            f"{flag} {str(path)!r}: holds a null character; expected another name"
        ) from None
    if kind:
        raise InputError(f"{flag} {path}: found {kind}, expected the name of a file")
    refuse_input(path, flag, inputs)
    if exists and not overwrite:
        raise InputError(
            f"{flag} {path}: exists already; give --overwrite to replace it, or choose another name"
        )
    check_parent_writable(path, flag)


def refuse_input(path: Path, flag: str, inputs: Iterable[str | Path]) -> None:
    """Raise InputError, naming `flag`, if the existing file `path` is in an input.

    It is one of the `inputs`, or in a directory among them. Links are followed. A missing `path`
    passes, and inputs that do not exist, such as names on the Hub, are left out.
    """
    if not os.path.lexists(path):
        return
    # A link is replaced, not its target: both places count.
    places = [resolve_path(path), resolve_path(path.parent) / path.name]
    for source in inputs:
        if not os.path.exists(source):
            continue
        if os.path.exists(path) and os.path.samefile(path, source):
            raise InputError(f"{flag} {path}: is the input {source}, expected another name")
        if any(place.is_relative_to(resolve_path(Path(source))) for place in places):
            raise InputError(
                f"{flag} {path}: is a file of the input {source}, expected another name"
            )


def create_parent_dir(path: Path, flag: str) -> None:
    """Create the missing parent directories of `path`.

    Raises:
        InputError: That fails; the message names `flag`.
    """
    parent = resolve_path(path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{flag} {path}: cannot create the directory {parent}: {error.strerror}"
        ) from None


@contextlib.contextmanager
def create_parent_with_rollback(path: Path, flag: str) -> Iterator[None]:
    """Create the missing parents of `path`, and remove them if the `with` block fails.

    Only those that are empty are removed.

    Raises:
        InputError: They cannot be created; the message names `flag`.
    """
    with remove_new_parents_on_error(path):
        create_parent_dir(path, flag)
        yield


@contextlib.contextmanager
def remove_new_parents_on_error(*paths: Path) -> Iterator[None]:
    """Remove new parent directories of `paths` if the `with` block fails.

    New ones did not exist before the block. Only those that are empty are removed.
    """
    existing: set[Path] = set()
    new: set[Path] = set()
    for directory in (directory for path in paths for directory in resolve_path(path).parents):
        if directory not in existing and directory not in new:
            # Such as too long a name, which its creation will report.
            with contextlib.suppress(OSError):
                (existing if directory.exists() else new).add(directory)
    try:
        yield
    except BaseException:
        for directory in sorted(new, key=lambda directory: len(directory.parts), reverse=True):
            with contextlib.suppress(OSError):  # not empty, or never created
                directory.rmdir()
        raise
