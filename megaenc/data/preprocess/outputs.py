"""Output files of preprocessing: their names, and checks for existing ones.

Remains of interrupted runs may be overwritten.
"""

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from megaenc.atomic_io import longest_file_name
from megaenc.errors import InputError
from megaenc.json_files import read_json_or_empty
from megaenc.output_paths import refuse_existing

MERGE_RECORD = "merged"
"""File of a work directory with the sha256, by file name, of the outputs that a merge renames."""
# In the order of renaming: a corpus without .idx cannot be opened.
_SUFFIXES = (".bin", ".json", ".idx")


def output_prefixes(output_prefix: str, keys: Sequence[str]) -> list[Path]:
    """Return the corpus prefix of each JSON key, OUTPUT_PREFIX_KEY_document.

    Raises:
        InputError: There is no key, a key is repeated, empty or has a `/`, `output_prefix` ends
            without a file name, or a file name is too long.
    """
    if not Path(output_prefix).name or output_prefix.endswith("/"):
        raise InputError(
            f"--output-prefix {output_prefix}: ends without a file name; "
            "expected something like out/corpus"
        )
    if not keys or len(set(keys)) < len(keys):
        raise InputError(f"--json-keys {' '.join(keys)}: expected one or more different keys")
    for key in keys:
        if not key or "/" in key:
            raise InputError(
                f"--json-keys {key!r}: cannot be part of a file name; expected a key without `/`"
            )
    prefixes = [Path(f"{output_prefix}_{key}_document") for key in keys]
    longest = os.fsencode(longest_file_name(*output_files(prefixes)))
    most = 255  # bytes, if the directory does not exist yet
    with contextlib.suppress(OSError):
        most = os.pathconf(prefixes[0].parent, "PC_NAME_MAX")
    if len(longest) > most:
        shortened = longest[:32].decode("utf-8", "replace")
        raise InputError(
            "--output-prefix and --json-keys: "
            f"a file name of {len(longest)} bytes (`{shortened}...`), expected {most} at most"
        )
    return prefixes


def output_files(prefixes: Sequence[Path]) -> list[Path]:
    """Return the paths of all files of the corpora, in order of renaming.

    These are every .bin, then every .json, then every .idx.
    """
    return [Path(f"{prefix}{suffix}") for suffix in _SUFFIXES for prefix in prefixes]


def refuse_outputs(prefixes: Sequence[Path], work_directory: Path | None = None) -> None:
    """Raise InputError if a .bin, .json or .idx of one of the corpora exists.

    Files with the sha256 that the record of a merge in `work_directory` lists may be overwritten:
    an interrupted merge wrote them. With None, none may.
    """
    paths = output_files(prefixes)
    existing = [path for path in paths if os.path.lexists(path)]
    recorded: dict[str, str] = {}
    if work_directory is not None and existing:
        # A merge writes it before the first output appears.
        recorded = read_json_or_empty(work_directory / MERGE_RECORD)
        if not recorded and existing == paths:
            raise InputError(
                f"--output-prefix {paths[-1]}: exists already; "
                "if another process of this command has written it, nothing is "
                "left to do, else remove it or choose another name"
            )
    for path in reversed(paths):
        if not (
            path.name in recorded and path.is_file() and compute_sha256(path) == recorded[path.name]
        ):
            refuse_existing(path, "--output-prefix")


def compute_sha256(path: Path) -> str:
    """Return the sha256 of a file in hex.

    Raises:
        InputError: The file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
