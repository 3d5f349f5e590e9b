"""What is in the folder `checkpoints` of a run, as can be told by a look at its files: for planning, before torch is set up."""

import hashlib
import json
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular_file
from megaenc.training.run_init import PROGRESS_FIELDS

TRACKER_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
_WITHOUT_DIGEST = {"step", *PROGRESS_FIELDS, "losses", "skip_packs", "identity", "files"}
"""The fields of a `read_state.json` without a digest, as runs once wrote it: any other is a damaged name."""


class DamagedCheckpointError(InputError):
    """A checkpoint that is not as it was saved; another may be."""


class UnreadableCheckpointError(DamagedCheckpointError):
    """One that the file system does not let be looked at, for now or for good."""


class CheckpointDir:
    """The folder `checkpoints` of a run: one `iter_0000100` a save, and a tracker file that names the newest."""

    def __init__(self, folder: Path):
        self.folder = folder

    def tracked_step(self) -> int | None:
        """Return the step that the tracker names, if there is one. InputError if that is no number or cannot be read."""
        tracker = self.folder / TRACKER_FILE
        try:
            text = read_regular_file(tracker, limit=100).decode("utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{tracker}: {error.strerror}; expected the number of the newest checkpoint's step") from None
        if not text.isdecimal():
            raise InputError(f"{tracker}: found {text!r}, expected the number of a step; remove it to go on from the newest")
        return int(text)

    def path(self, step: int) -> Path:
        """Return where the checkpoint of `step` is."""
        return self.folder / f"iter_{step:07d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints that are there, whole or not, in order."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("iter_*") if path.name[5:].isdecimal())

    def read_state(self, step: int) -> dict[str, Any]:
        """Return the JSON of the checkpoint of `step`, if every file is there in its size; Damaged names what is not."""
        path = self.path(step)
        if not path.is_dir():
            raise DamagedCheckpointError(f"{path}: missing, expected the checkpoint of step {step}")
        try:
            state = parse_json(read_regular_file(path / STATE_FILE))
            expected = state.pop(DIGEST_FIELD, None)
            if state.keys() - _WITHOUT_DIGEST if expected is None else expected != json_digest(state):
                raise DamagedCheckpointError(f"{path / STATE_FILE}: its content changed; the checkpoint is damaged")
            if state["step"] != step:
                raise ValueError(f"step {state['step']}")
            texts = [*state.get("skip_packs", ()), *(entry["sha256"] for entry in state["files"].values())]
            kinds = isinstance(state["identity"], dict) and state["files"] and all(isinstance(text, str) for text in texts)
            if not (kinds and all(type(state.get(name, 0)) in (int, float) for name in PROGRESS_FIELDS)):
                raise ValueError("fields of another kind")
            damage = find_size_damage(path, state["files"])
        except OSError as error:
            kind = (
                DamagedCheckpointError if isinstance(error, FileNotFoundError | NotADirectoryError) else UnreadableCheckpointError
            )
            raise kind(f"{path / STATE_FILE}: {error.strerror}; the checkpoint is incomplete") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{path / STATE_FILE}: not what a save wrote ({error!r}); the checkpoint is incomplete"
            ) from None
        if damage:
            raise DamagedCheckpointError(f"{damage}; the checkpoint is incomplete")
        return state

    def is_complete(self, step: int) -> bool:
        """Return whether every file of the checkpoint of `step` is there in its size."""
        try:
            self.read_state(step)
        except DamagedCheckpointError:
            return False
        return True

    def steps_up_to_tracker(self) -> list[int]:
        """Return in order the steps up to that of the tracker, there or not (later ones may be left), or all without one."""
        named, steps = self.tracked_step(), self.steps()
        return steps if named is None else sorted({step for step in steps if step < named} | {named})


DIGEST_FIELD = "sha256"
"""The field of `read_state.json` with the SHA-256 of the others."""

_THREADS = 4  # hashing leaves Python's lock alone; a core does some 0.5 to 2 GB/s


def json_digest(fields: dict[str, Any]) -> str:
    """Return the SHA-256 of JSON fields, in hexadecimal, whatever their order and the white space between them."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def file_digest(file: Path) -> dict[str, Any]:
    """Return `{"bytes": size, "sha256": hexadecimal}` of a file. Raises OSError."""
    with open(file, "rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def file_digests(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return the `file_digest` of several files at once, by name. Raises OSError."""
    files = list(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip([file.name for file in files], pool.map(file_digest, files), strict=True))


def find_size_damage(folder: Path, expected: dict[str, dict[str, Any]]) -> str | None:
    """Return what is missing or of another size, by a look at the folder alone; None if nothing is."""
    for name, entry in expected.items():
        file = folder / name
        try:
            status = file.stat() if name == file.name else None
        except FileNotFoundError:
            return f"{file}: missing"
        if status is None or not stat.S_ISREG(status.st_mode):
            return f"{file}: no regular file of the checkpoint"
        if status.st_size != entry["bytes"]:
            return f"{file}: found {status.st_size} bytes, expected {entry['bytes']}"
    return None


def find_content_damage(folder: Path, expected: dict[str, dict[str, Any]]) -> str | None:
    """Return the first file whose content is another than `expected`; None if all are as they were written."""
    try:
        found = file_digests(folder / name for name in expected)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    for name, entry in expected.items():
        if found[name]["sha256"] != entry["sha256"]:
            here, there = found[name]["sha256"][:12], str(entry["sha256"])[:12]
            return f"{folder / name}: its content changed (SHA-256 {here}..., expected {there}...)"
    return None
