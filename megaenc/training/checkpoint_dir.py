"""The directory `checkpoints` of a run, read without torch.

It knows steps, tracker, state and integrity of the checkpoints.
"""

import contextlib
import hashlib
import json
import socket
import stat
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular_file
from megaenc.training.run_init import PROGRESS_FIELDS

TRACKER_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
INDEX_FILE = "index.json"
"""File with the place of each part of each tensor."""


class DamagedCheckpointError(InputError):
    """InputError about a checkpoint that is missing, incomplete or has changed.

    Another checkpoint may be intact.
    """


class UnreadableCheckpointError(DamagedCheckpointError):
    """DamagedCheckpointError: the file system fails to read state.json or file sizes.

    The failure may be temporary or permanent, so that the checkpoint is not deleted.
    """


class CheckpointReadError(InputError):
    """InputError of a machine that cannot read a checkpoint, which may be intact.

    It is about a file other than state.json; a failure to read that one is an
    UnreadableCheckpointError.
    """


@contextlib.contextmanager
def name_machine() -> Iterator[None]:
    """Convert an OSError in the context into a CheckpointReadError.

    The new error names the file (OSError.filename) and this machine.
    """
    try:
        yield
    except FileNotFoundError as error:
        where = f"on {socket.gethostname()}, expected a directory that all nodes share"
        raise CheckpointReadError(f"{error.filename}: not found {where}") from None
    except OSError as error:
        remedy = "give the same command again when the disk can be read"
        raise CheckpointReadError(
            f"{error.filename}: {error.strerror} on {socket.gethostname()}; {remedy}"
        ) from None


@contextlib.contextmanager
def name_file(file: Path) -> Iterator[None]:
    """Raise an OSError of the context anew, with `file` as its path.

    It replaces the error's own path; errors of reading an open file have none.
    """
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None


class CheckpointDir:
    """Directory `checkpoints` of a run, read without communication between ranks.

    It holds a directory such as `iter_0000100` for each checkpoint, and a tracker file,
    latest_checkpointed_iteration.txt, that names the newest step. `CheckpointDir(directory)` keeps
    the path as `directory`, which need not exist.
    """

    def __init__(self, directory: Path):
        self.directory = directory

    def tracked_step(self) -> int | None:
        """Return the step of the newest checkpoint by the tracker file.

        None without the file. The checkpoint may be missing.

        Raises:
            InputError: The file cannot be read or has no number.
        """
        tracker = self.directory / TRACKER_FILE
        try:
            text = read_regular_file(tracker, limit=100).decode("utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(
                f"{tracker}: {error.strerror}; expected the number of the newest checkpoint's step"
            ) from None
        if not text.isdecimal():
            raise InputError(
                f"{tracker}: found {text!r}, expected the number of a step; remove the file to "
                "use the newest"
            )
        return int(text)

    def path(self, step: int) -> Path:
        """Return the path of the directory of a checkpoint, such as iter_0000100.

        It need not exist.
        """
        return self.directory / f"iter_{step:07d}"

    def steps(self) -> list[int]:
        """Return the sorted steps of all checkpoint directories, complete or not.

        The list is empty if `directory` does not exist. The tracker file is not read.
        """
        return sorted(
            int(path.name[5:])
            for path in self.directory.glob("iter_*")
            if path.name[5:].isdecimal()
        )

    def read_state(self, step: int) -> dict[str, Any]:
        """Return the content of state.json of the checkpoint of `step`.

        It has `step`, `identity` and `files` (size and SHA-256 by name); other fields may be
        missing. Its field `sha256` is compared and left out. Sizes of all files are compared, their
        contents are not.

        Raises:
            UnreadableCheckpointError: The file system fails to read it.
            DamagedCheckpointError: The checkpoint or one of its files is missing, state.json is
                invalid, or a file has another size.
        """
        path = self.path(step)
        if not path.is_dir():
            raise DamagedCheckpointError(f"{path}: missing, expected the checkpoint of step {step}")
        try:
            state = parse_json(read_regular_file(path / STATE_FILE))
            expected = state.pop(DIGEST_FIELD, None)
            if expected != json_digest(state):
                raise DamagedCheckpointError(
                    f"{path / STATE_FILE}: its content changed; the checkpoint is damaged"
                )
            if state["step"] != step:
                raise ValueError(f"step {state['step']}")
            texts = [
                *state.get("skip_packs", ()),
                *(entry["sha256"] for entry in state["files"].values()),
            ]
            kinds = (
                isinstance(state["identity"], dict)
                and state["files"]
                and all(isinstance(text, str) for text in texts)
            )
            if not (
                kinds and all(type(state.get(name, 0)) in (int, float) for name in PROGRESS_FIELDS)
            ):
                raise ValueError("fields of another kind")
            damage = find_size_damage(path, state["files"])
        except OSError as error:
            kind = (
                DamagedCheckpointError
                if isinstance(error, FileNotFoundError | NotADirectoryError)
                else UnreadableCheckpointError
            )
            raise kind(
                f"{path / STATE_FILE}: {error.strerror}; the checkpoint is incomplete"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{path / STATE_FILE}: not written by a save ({error!r}); the checkpoint is "
                "incomplete"
            ) from None
        if damage:
            raise DamagedCheckpointError(f"{damage}; the checkpoint is incomplete")
        return state

    def is_complete(self, step: int) -> bool:
        """Return whether a checkpoint has a valid state.json and all its files.

        Only the sizes of the files are compared. False if they cannot be read.
        """
        try:
            self.read_state(step)
        except DamagedCheckpointError:
            return False
        return True

    def steps_up_to_tracker(self) -> list[int]:
        """Return the sorted steps of checkpoints up to the tracked one, inclusive.

        The tracked step is included even if its checkpoint is missing. Without a tracker file all
        steps are returned. Later checkpoints may be left from before a rewind.

        Raises:
            InputError: The tracker file cannot be read or has no number.
        """
        tracked = self.tracked_step()
        steps = self.steps()
        if tracked is None:
            return steps
        return sorted({step for step in steps if step < tracked} | {tracked})


DIGEST_FIELD = "sha256"
"""Field of `state.json` with the SHA-256 of the other fields."""

_THREADS = 4  # hashing releases the GIL; a core hashes some 0.5 to 2 GB/s


def json_digest(fields: dict[str, Any]) -> str:
    """Return the SHA-256, 64 hexadecimal digits, of a JSON-ready dictionary.

    It does not depend on the order of the keys.
    """
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def file_digest(file: Path) -> dict[str, Any]:
    """Return size and SHA-256 of `file`.

    Returns:
        {"bytes": size, "sha256": hexadecimal}.

    Raises:
        OSError: The file cannot be read.
    """
    with name_file(file), open(file, "rb") as stream:
        return {
            "bytes": file.stat().st_size,
            "sha256": hashlib.file_digest(stream, "sha256").hexdigest(),
        }


def file_digests(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of `files` by file name, computed by threads.

    Files must have different names, without their directories.

    Returns:
        {"bytes": size, "sha256": hexadecimal} of each file.

    Raises:
        OSError: A file cannot be read.
    """
    files = list(files)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip([file.name for file in files], pool.map(file_digest, files), strict=True))


def find_size_damage(directory: Path, expected: dict[str, dict[str, Any]]) -> str | None:
    """Return a message on the first file that is missing, irregular or of wrong size.

    Args:
        expected: Sizes and SHA-256 of the files of `directory` by name, as of `file_digests`.

    Returns:
        The message; None if all files match.

    Raises:
        OSError: The size of a file cannot be read.
    """
    for name, entry in expected.items():
        file = directory / name
        try:
            status = file.stat() if name == file.name else None
        except FileNotFoundError:
            return f"{file}: missing"
        if status is None or not stat.S_ISREG(status.st_mode):
            return f"{file}: no regular file of the checkpoint"
        if status.st_size != entry["bytes"]:
            return f"{file}: found {status.st_size} bytes, expected {entry['bytes']}"
    return None


def find_content_damage(directory: Path, expected: dict[str, dict[str, Any]]) -> str | None:
    """Return a message on the first file whose SHA-256 differs from the expected one.

    Args:
        expected: Sizes and SHA-256 of the files of `directory` by name, as of `file_digests`.

    Returns:
        The message; None if all files match.

    Raises:
        OSError: A file is missing or cannot be read.
    """
    digests = file_digests(directory / name for name in expected)
    for name, entry in expected.items():
        digest = digests[name]["sha256"]
        if digest != entry["sha256"]:
            expected_digest = str(entry["sha256"])[:12]
            return (
                f"{directory / name}: its content changed (SHA-256 {digest[:12]}..., expected "
                f"{expected_digest}...)"
            )
    return None


def checkpoints_to_delete(
    older: Iterable[int],
    keep_last: int | None,
    keep_every: int | None,
    keep_steps: Collection[int] = (),
) -> list[int]:
    """Return the sorted steps of `older` that no rule keeps; none without rules.

    Without `keep_last` and `keep_every` there is no rule, and nothing is to be deleted.

    Args:
        older: Steps of the checkpoints before a newly saved one, in any order.
        keep_last: Number of newest checkpoints to keep, with the newly saved one; None for 1.
        keep_every: Steps that are multiples of it are kept; None for no such rule.
        keep_steps: Further steps to keep.
    """
    if keep_last is None and keep_every is None:
        return []
    old = sorted(older, reverse=True)[(keep_last or 1) - 1 :]
    return [
        step
        for step in reversed(old)
        if step not in keep_steps and (not keep_every or step % keep_every)
    ]
