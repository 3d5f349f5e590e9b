"""The work folder of `--partitions`: parts of a corpus, each written whole, so that work goes on where it was stopped."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaenc.atomic_io import FileLock, atomic_files, atomic_write, temporary_path
from megaenc.console import ProgressLine
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers
from megaenc.errors import InputError
from megaenc.json_files import read_json_object
from megaenc.output_paths import create_parent_dir

_PLAN, _LOCK, _MERGED = "plan.json", "lock", "merged"
_OWN_FILES = re.compile(r"plan\.json|lock|merged|part-\d{5,}(-.*\.(bin|idx)|\.json)|\..*\.tmp")


def read_merge_record(folder: Path) -> dict[str, str]:
    """The sha256, by name, of the files that the parts in `folder` were joined into, where these were perhaps not all renamed.

    What bears such a name and has that sha256 is their work; nothing is noted before they are joined.
    """
    try:
        return read_json_object(folder / _MERGED)
    except InputError:
        return {}


class PartitionStore:
    """`count` parts, numbered from 0, each a corpus a key: part-00001-KEY.bin and .idx, and part-00001.json, written last."""

    def __init__(self, folder: Path, keys: Sequence[str], dtype: str, count: int) -> None:
        self.folder, self.count = folder, count
        self._keys, self._dtype = keys, dtype

    def missing_partitions(self) -> list[int]:
        """The parts that are not there, or not as their notes tell."""
        return [number for number in range(self.count) if self._note(number) is None]

    def write(
        self, number: int, fill: Callable[[list[IndexedWriter]], dict[str, int]], last_look: Callable[[], None] | None = None
    ) -> None:
        """Write part `number`: `fill` gives its documents to a writer a key and returns the counts to be noted.

        `last_look` may still refuse the part, by an InputError, when it is on the disk.
        """
        paths = [*self._files(number), self._note_path(number)]
        with atomic_files(*paths, last_look=last_look) as [*files, note], open_writers(files, self._dtype) as writers:
            counts = fill(writers)
            hashes = [writer.finish() for writer in writers]
            sizes = [path.stat().st_size for path in files]
            note.write_text(json.dumps({"counts": counts, "sha256": hashes, "bytes": sizes}) + "\n")

    def merge(self, writers: Sequence[IndexedWriter]) -> list[dict[str, int]]:
        """Append all parts in order, a writer a key; return their counts. Raises InputError for a part that has been changed."""
        notes = [self._note(number) for number in range(self.count)]
        total = sum(sum(note["bytes"]) for note in notes)
        done = 0
        with ProgressLine("joining the parts", total) as progress:
            for number, note in enumerate(notes):
                files = self._files(number)
                count = len(writers)
                for *pair, writer, hashes in zip(files[:count], files[count:], writers, note["sha256"], strict=True):
                    try:
                        writer.append_corpus(*pair, hashes)
                    except InputError as error:
                        again = f"remove {self._note_path(number)} and start the same command again"
                        raise InputError(f"{error}; {again}") from None
                done += sum(note["bytes"])
                progress.update(done)
        return [note["counts"] for note in notes]

    def record_merge(self, hashes: dict[str, str]) -> None:
        """Note that the parts are joined into files of these sha256, by name, which are about to be renamed."""
        atomic_write(self.folder / _MERGED, json.dumps(hashes) + "\n")

    def _files(self, number: int) -> list[Path]:
        """Return the .bin of each key, then the .idx of each."""
        return [self.folder / f"part-{number + 1:05}-{key}{end}" for end in (".bin", ".idx") for key in self._keys]

    def _note_path(self, number: int) -> Path:
        return self.folder / f"part-{number + 1:05}.json"

    def _note(self, number: int) -> dict[str, Any] | None:
        try:
            note = read_json_object(self._note_path(number))
            whole = note["bytes"] == [path.stat().st_size for path in self._files(number)]
            whole &= [sorted(hashes) for hashes in note["sha256"]] == [["bin", "idx"]] * len(self._keys)
            whole &= all(type(value) is str for hashes in note["sha256"] for value in hashes.values())
            return note if whole and all(type(count) is int for count in note["counts"].values()) else None
        except (OSError, InputError, KeyError, TypeError, AttributeError):
            return None


@contextlib.contextmanager
def open_work_folder(folder: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Have `folder` to oneself; it is removed when the block ends well, or holds no part.

    `plan` is what the parts depend on, a field a flag. Raises InputError when another process works in the folder, or when it
    holds parts of another plan or something else.
    """
    try:
        foreign = sorted(name for name in os.listdir(folder) if not _OWN_FILES.fullmatch(name))
    except FileNotFoundError:
        foreign = []
    except OSError as error:
        raise InputError(f"{folder}: cannot be looked into: {error.strerror}") from None
    if foreign:
        raise InputError(
            f"{folder}: holds `{foreign[0]}`, expected nothing but parts of a corpus; choose another --output-prefix"
        )
    lock = _lock_folder(folder)
    try:
        for path in folder.glob(".*.tmp"):  # of an attempt that was killed
            with contextlib.suppress(OSError):  # where nothing can be written the plan says so
                path.unlink()
        _check_plan(folder, plan)
        try:
            yield
        except BaseException:
            if not any(folder.glob("part-*.json")):
                with contextlib.suppress(OSError):  # the first error is to be told
                    _remove_folder(folder)
            raise
        try:
            _remove_folder(folder)
        except OSError as error:
            raise InputError(f"{folder}: cannot be removed: {error.strerror}; the corpus is whole without it") from None
    finally:
        lock.close()


def _lock_folder(folder: Path) -> FileLock:
    lock = FileLock(folder / _LOCK)
    while True:
        create_parent_dir(lock.path, "--output-prefix")
        try:
            if lock.take():
                return lock
        except FileNotFoundError:  # another process has just removed its folder
            continue
        except OSError as error:  # which names no file if the file system knows no locks
            verb = "locked" if error.filename is None else "written to"
            raise InputError(f"{folder}: cannot be {verb}: {error.strerror}") from None
        raise InputError(f"{folder}: another process is at work there; expected to have this folder to oneself")


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    path = folder / _PLAN
    if any(folder.glob("part-*.json")):
        found = read_json_object(path, f"what the parts next to it are made of; remove {folder}")
        for field, value in plan.items():
            was, now = json.dumps(found.get(field)), json.dumps(value)
            if was != now:
                raise InputError(
                    f"{path}: field `{field}`: found {was[:80]}, expected {now[:80]}; "
                    f"give the first command's flags to go on with its parts, or remove {folder}"
                )
    atomic_write(path, json.dumps(plan, indent=2) + "\n")


def _remove_folder(folder: Path) -> None:
    """Under another name first, so that no half of it can be mistaken for the whole."""
    rubbish = temporary_path(folder)
    os.rename(folder, rubbish)
    shutil.rmtree(rubbish)
