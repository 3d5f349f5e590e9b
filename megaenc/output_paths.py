"""Checks of the paths that a command will write, made before its work, and the folders above them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megaenc.atomic_io import resolve_path, temporary_path
from megaenc.errors import InputError


def refuse_existing(path: Path, flag: str) -> None:
    """Raise InputError when `path` is a file or a folder with something in it, or the working directory.

    `flag` names where the path came from.
    """
    try:
        str(path).encode()
        place = resolve_path(path)
        empty = place.is_dir() and not any(place.iterdir())
        exists = place.exists() or path.is_symlink()
        here = empty and place == Path.cwd()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be looked at: {error.strerror}") from None
    except ValueError:
        raise InputError(f"{flag} {str(path)!r}: not UTF-8, or holds a null character; expected another name") from None
    if here:  # whoever stands in it would be left standing in what was replaced
        raise InputError(f"{flag} {path}: the folder that this command runs in, expected another name")
    if exists and not empty:
        raise InputError(f"{flag} {path}: exists already; remove it or choose another name")


def check_parent_writable(path: Path, flag: str) -> None:
    """Raise InputError if the folder that `path` goes into cannot be created or written to.

    A file is created and removed in the nearest folder that exists; other commands may be creating the ones below it.
    """
    place = resolve_path(path)
    try:
        folder = next(folder for folder in place.parents if folder.exists())
        temporary = temporary_path(folder / place.name)
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.unlink()
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot write to the folder {path.parent}: {error.strerror}") from None


def check_output_file(path: Path, flag: str) -> None:
    """Raise InputError if no file can be written to `path`: for a folder or a device, or if its folder cannot be made.

    Call it before the work, and `create_parent_dir` before the file is written.
    """
    try:
        place = resolve_path(path)
        kind = "a folder" if place.is_dir() else "" if place.is_file() or not place.exists() else "no regular file"
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be looked at: {error.strerror}") from None
    if kind:
        raise InputError(f"{flag} {path}: found {kind}, expected the name of a file")
    check_parent_writable(path, flag)


def create_parent_dir(path: Path, flag: str) -> None:
    """Create the folder that `path` goes into. Raises InputError when that cannot be."""
    parent = resolve_path(path).parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot create the folder {parent}: {error.strerror}") from None


@contextlib.contextmanager
def create_parent_with_rollback(path: Path, flag: str) -> Iterator[None]:
    """Create the folder that `path` goes into; if the block fails, remove the folders that it created and are empty.

    Raises InputError, naming `flag`, if it cannot be created.
    """
    with remove_new_parents_on_error(path):
        create_parent_dir(path, flag)
        yield


@contextlib.contextmanager
def remove_new_parents_on_error(*paths: Path) -> Iterator[None]:
    """If the block fails, remove the folders above `paths` that did not exist before and are empty."""
    existing: set[Path] = set()
    new: set[Path] = set()
    for folder in (folder for path in paths for folder in resolve_path(path).parents):
        if folder not in existing and folder not in new:
            with contextlib.suppress(OSError):  # a name that is too long, say: whoever creates it reports that
                (existing if folder.exists() else new).add(folder)
    try:
        yield
    except BaseException:
        for folder in sorted(new, key=lambda folder: len(folder.parts), reverse=True):
            with contextlib.suppress(OSError):  # holds what is to stay, or was never created
                folder.rmdir()
        raise
