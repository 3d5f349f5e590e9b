"""Where preprocessing writes: which names, whether they are free, and what stopped runs have left beside them."""

import contextlib
import hashlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from megaenc.atomic_io import longest_file_name, find_stale_temp_files
from megaenc.console import print_rank_0
from megaenc.data.sources.resolve import format_paths
from megaenc.errors import InputError
from megaenc.output_paths import refuse_existing

_SUFFIXES = (".bin", ".json", ".idx")  # in the order of renaming: nothing opens a corpus that has no .idx


def output_prefixes(output_prefix: str, keys: Sequence[str]) -> list[Path]:
    """The corpus prefix of each key. Raises InputError when the flags name none, one twice, or one that cannot be a file."""
    if not Path(output_prefix).name or output_prefix.endswith("/"):
        raise InputError(f"--output-prefix {output_prefix}: ends in no file name; expected something like out/corpus")
    if not keys or len(set(keys)) < len(keys):
        raise InputError(f"--json-keys {' '.join(keys)}: expected one or more different keys")
    for key in keys:
        if not key or "/" in key:
            raise InputError(f"--json-keys {key!r}: cannot be part of a file name; expected a key without `/`")
    prefixes = [Path(f"{output_prefix}_{key}_document") for key in keys]
    longest = os.fsencode(longest_file_name(*output_files(prefixes)))
    if len(longest) > (most := _max_name_length(prefixes[0].parent)):
        shortened = longest[:32].decode("utf-8", "replace")
        raise InputError(
            f"--output-prefix and --json-keys: a file name of {len(longest)} bytes (`{shortened}...`), expected {most} at most"
        )
    return prefixes


def output_files(prefixes: Sequence[Path]) -> list[Path]:
    """All files of the corpora, in the order of renaming: every .bin, then every .json, then every .idx."""
    return [Path(f"{prefix}{suffix}") for suffix in _SUFFIXES for prefix in prefixes]


def refuse_existing_outputs(prefixes: Sequence[Path], but: Collection[Path] = ()) -> None:
    """Raise InputError when a file of the corpora is there, unless it is one of `but`."""
    for path in reversed(output_files(prefixes)):
        if path not in but:
            refuse_existing(path, "--output-prefix")


def report_stale_files(*paths: Path) -> None:
    """Say which temporary files and folders of `paths`, all of one folder, are there.

    They are not removed: a number in the name may by now be another process's, or that of a process on another machine.
    """
    found = find_stale_temp_files(*paths)
    if found:
        size = 0
        for file in (file for path in found for file in (path, *path.rglob("*")) if not file.is_dir()):
            with contextlib.suppress(OSError):
                size += file.stat().st_size
        print_rank_0(
            f"{paths[0].parent}: {len(found)} unfinished by a stopped run, {size / 1e6:,.1f} MB; remove them unless another "
            f"process is at work on them: {format_paths([path.name for path in found])}"
        )


def find_outputs_by_hash(prefixes: Sequence[Path], hashes: dict[str, str]) -> set[Path]:
    """The files of the corpora that are there and have the sha256 that `hashes` tells by name."""
    found = set()
    for path in output_files(prefixes):
        if path.name in hashes and path.is_file() and compute_sha256(path) == hashes[path.name]:
            found.add(path)
    return found


def compute_sha256(path: Path) -> str:
    """The sha256 of a file. Raises InputError for one that cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def _max_name_length(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except OSError:  # not there yet
        return 255
