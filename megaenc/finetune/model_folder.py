"""A Hugging Face folder with a model to be fine-tuned: what has to be there, and digests of what a run reads of it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from megaenc.console import ProgressLine
from megaenc.errors import InputError
from megaenc.files import write_whole
from megaenc.json_files import read_json, read_json_object

KNOWN = ".fingerprints.json"
"""Beside the results: the digests of weights that were read before."""
_NEEDED = ("config.json", "*.safetensors", "tokenizer.json")
_OF_MODEL = ("config.json", "*.safetensors")
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_AT_ONCE = 1 << 24  # bytes
_READ: dict[str, str] = {}
"""Digests that this process has computed, by `_mark`."""


def check_model_folder(folder: str) -> None:
    """Raise InputError for a path that is no folder, or one without a configuration, weights or a tokenizer."""
    path = Path(folder)
    if not os.path.isdir(path):  # False for a name that is too long too
        raise InputError(
            f"--model {folder}: no such folder; expected a Hugging Face model, as `megaenc convert to-hf` writes it, or "
            "`hf download NAME --local-dir FOLDER` fetches it"
        )
    for needed in _NEEDED:
        if not _files(path, (needed,)):
            raise InputError(f"--model {folder}: no {needed} there, expected {', '.join(_NEEDED[:-1])} and {_NEEDED[-1]}")
    read_json_object(path / "config.json", "the configuration of a model")


def model_fingerprints(folders: Sequence[str], results: str, *, keep: bool = True) -> list[str]:
    """SHA-256 of the configuration and the weights of each folder, a second or so for each gigabyte that is read the first time.

    What was read before is in a file of the folder `results`, if there is one, under where it is and the sizes and times of its
    files. `keep` adds to that file what is read.
    """
    path = Path(results, KNOWN)
    known, marks = _known(path) | _READ, [_mark(folder) for folder in folders]
    new = {mark: folder for mark, folder in zip(marks, folders, strict=True) if mark not in known}
    if not new:
        return [known[mark] for mark in marks]
    sizes = {mark: sum(file.stat().st_size for file in _files(Path(folder), _OF_MODEL)) for mark, folder in new.items()}
    before = 0
    with ProgressLine("reading the models' weights once", total=sum(sizes.values()), closing=False) as line:
        for mark, folder in new.items():
            line.update(before, model=Path(folder).name)
            known[mark] = _digest(Path(folder), _OF_MODEL, lambda done, before=before: line.update(before + done))
            before += sizes[mark]
            if _mark(folder) == mark:
                _READ[mark] = known[mark]
    if keep:
        keep_fingerprints(results)
    return [known[mark] for mark in marks]


def keep_fingerprints(results: str) -> None:
    """Add the digests that this process has computed to the file of them in the folder `results`, if there is such a folder."""
    path = Path(results, KNOWN)
    known = _known(path)
    if path.parent.is_dir() and not _READ.items() <= known.items():
        with contextlib.suppress(InputError):  # without it they are read again, and that is all
            write_whole(path, json.dumps(known | _READ))


def _known(path: Path) -> dict[str, str]:
    """What the file holds, by `_mark`; nothing where there is none or it cannot be read."""
    return {mark: digest for mark, digest in read_json(path).items() if isinstance(digest, str)}


def _mark(folder: str) -> str:
    """Changes with whatever is done to the files: the time of a file's last change cannot be set, as that of its content can."""
    files = [(path, path.stat()) for path in _files(Path(folder), _OF_MODEL)]
    about = [(str(path.resolve()), stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in files]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def model_stamp(folder: str) -> str:
    """Names, sizes and times of the files that make a model and its tokenizer: at once, where a fingerprint takes seconds."""
    files = [(path.name, path.stat()) for path in _files(Path(folder), (*_OF_MODEL, *_OF_TOKENIZER))]
    return hashlib.sha256(str([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]).encode()).hexdigest()


def tokenizer_fingerprint(folder: str) -> str:
    """SHA-256 of the tokenizer's files."""
    return _digest(Path(folder), _OF_TOKENIZER)


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _digest(folder: Path, patterns: tuple[str, ...], progress: Callable[[int], None] = lambda done: None) -> str:
    """Of the names and the contents; `progress` is told how many bytes are read."""
    whole, done = hashlib.sha256(), 0
    for path in _files(folder, patterns):
        content = hashlib.sha256()
        try:
            with open(path, "rb") as stream:
                while piece := stream.read(_AT_ONCE):
                    content.update(piece)
                    progress(done := done + len(piece))
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
        whole.update(path.name.encode() + b"\0" + content.digest())
    return whole.hexdigest()
