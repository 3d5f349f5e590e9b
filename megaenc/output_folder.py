"""Folders for a command's output, created before its work and removed again if the command fails."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megaenc.errors import InputError
from megaenc.files import make_parent


@contextlib.contextmanager
def created_parent(path: Path, flag: str) -> Iterator[None]:
    """Create the folder that `path` goes into; if the block fails, remove the folders that were created and are still empty.

    Raises InputError, naming `flag`, if `path` cannot be written.
    """
    missing = _missing_parents(path, flag)
    try:
        make_parent(path, flag)
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # not created, or not empty any more
                folder.rmdir()
        raise


def _missing_parents(path: Path, flag: str) -> list[Path]:
    """The folders above `path` that do not exist yet, innermost first. Raises InputError for a path that cannot be."""
    try:
        if path.is_dir():
            raise InputError(f"{flag} {path}: is a folder; expected the name of a file")
        return [folder for folder in path.absolute().parents if not folder.exists() and not folder.is_symlink()]
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written to: {error.strerror}; expected another name") from None
