"""Fingerprints (SHA-256) of Hugging Face models, and checks of their files."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megaenc.atomic_io import atomic_write
from megaenc.console import ProgressLine
from megaenc.errors import InputError
from megaenc.json_files import read_json_object, read_json_or_empty

FINGERPRINT_FILE = ".fingerprints.json"
"""Name of the file in the results directory that caches fingerprints of weights."""
_REQUIRED_FILES = ("config.json", "*.safetensors", "tokenizer.json")
_MODEL_FILES = ("config.json", "*.safetensors")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_COMPUTED_DIGESTS: dict[str, str] = {}
"""Fingerprints computed by this process, by file key (see `_compute_file_key`)."""


def check_model_directory(directory: str) -> None:
    """Check that a directory has the files of a Hugging Face model.

    Raises:
        InputError: config.json, weights in *.safetensors or tokenizer.json are missing, or
            config.json is unreadable.
    """
    path = Path(directory)
    if not os.path.isdir(path):  # False for a name that is too long too
        raise InputError(
            f"--model {directory}: no such directory; expected a Hugging Face model, "
            "as `megaenc convert to-hf` writes it, or "
            "`hf download NAME --local-dir DIRECTORY` fetches it"
        )
    if missing := [needed for needed in _REQUIRED_FILES if not _list_files(path, (needed,))]:
        raise InputError(
            f"--model {directory}: no {missing[0]}, expected {', '.join(_REQUIRED_FILES[:-1])} "
            f"and {_REQUIRED_FILES[-1]}"
        )
    read_json_object(path / "config.json", "the configuration of a model")


def compute_model_fingerprints(directories: Sequence[str], results: str) -> list[str]:
    """Return the SHA-256 (hex) of each directory's config.json and weights, in order.

    It takes about a second per gigabyte, with a progress line, unless this process or
    .fingerprints.json in the directory `results` has the fingerprint for files of this path, size
    and time. That file is only read, and may be missing; `save_fingerprints` writes it.

    Raises:
        InputError: A file cannot be read.
    """
    known = _read_fingerprint_file(results) | _COMPUTED_DIGESTS
    marks = [_compute_file_key(directory) for directory in directories]
    new = {
        mark: directory
        for mark, directory in zip(marks, directories, strict=True)
        if mark not in known
    }
    if not new:
        return [known[mark] for mark in marks]
    sizes = {
        mark: sum(file.stat().st_size for file in _list_files(Path(directory), _MODEL_FILES))
        for mark, directory in new.items()
    }
    before = 0
    with ProgressLine(
        "reading the models' weights once", total=sum(sizes.values()), closing=False
    ) as line:
        for mark, directory in new.items():
            line.update(before, model=Path(directory).name)
            known[mark] = _hash_files(
                Path(directory),
                _MODEL_FILES,
                lambda done, before=before: line.update(before + done),
            )
            before += sizes[mark]
            if _compute_file_key(directory) == mark:
                _COMPUTED_DIGESTS[mark] = known[mark]
    return [known[mark] for mark in marks]


def save_fingerprints(results: str) -> None:
    """Add fingerprints computed by this process to .fingerprints.json in `results`.

    Nothing is written if the directory `results` is missing. Errors of writing are ignored.
    """
    known = _read_fingerprint_file(results)
    if Path(results).is_dir() and not _COMPUTED_DIGESTS.items() <= known.items():
        with contextlib.suppress(InputError):  # the file only saves time
            atomic_write(Path(results, FINGERPRINT_FILE), json.dumps(known | _COMPUTED_DIGESTS))


def _read_fingerprint_file(results: str) -> dict[str, str]:
    """Read cached fingerprints by file key; empty without a readable file."""
    return {
        mark: digest
        for mark, digest in read_json_or_empty(Path(results, FINGERPRINT_FILE)).items()
        if isinstance(digest, str)
    }


def _compute_file_key(directory: str) -> str:
    """Return a SHA-256 of paths, inodes, sizes and times of a model's files.

    Unlike mtime, ctime cannot be set.
    """
    files = [(path, path.stat()) for path in _list_files(Path(directory), _MODEL_FILES)]
    about = [
        (str(path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for path, stat in files
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def compute_model_stamp(directory: str) -> str:
    """Return a SHA-256 (hex) of names, sizes and times of a directory's model files.

    Times are those of the last change. The files are config.json, weights and those of the
    tokenizer; missing ones are left out, and contents are not read. An equal stamp means that the
    model is probably unchanged.
    """
    files = [
        (path.name, path.stat())
        for path in _list_files(Path(directory), (*_MODEL_FILES, *_TOKENIZER_FILES))
    ]
    return hashlib.sha256(
        str([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]).encode()
    ).hexdigest()


def compute_tokenizer_fingerprint(directory: str) -> str:
    """Return the SHA-256 (hex) of names and contents of a directory's tokenizer files.

    Files that are missing are left out.

    Raises:
        InputError: A file cannot be read.
    """
    return _hash_files(Path(directory), _TOKENIZER_FILES)


def _list_files(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted(
        {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    )


def _hash_files(
    directory: Path, patterns: tuple[str, ...], progress: Callable[[int], None] = lambda done: None
) -> str:
    """Return the SHA-256 of names and contents of the files that match `patterns`.

    Args:
        progress: Callback that receives the number of bytes read.
    """
    digest = hashlib.sha256()
    done = 0
    for path in _list_files(directory, patterns):
        content = hashlib.sha256()
        try:
            with open(path, "rb") as stream:
                while piece := stream.read(1 << 24):
                    content.update(piece)
                    done += len(piece)
                    progress(done)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        digest.update(path.name.encode() + b"\0" + content.digest())
    return digest.hexdigest()
