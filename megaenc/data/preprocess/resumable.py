"""Work folder of `--partitions`: partitions of a corpus, each written atomically, so that preprocessing can be resumed."""

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
    """Return the sha256, by file name, of the outputs that a merge of `folder` began to rename; {} without such a record.

    Files with these hashes may be overwritten: an interrupted merge wrote them.
    """
    try:
        return read_json_object(folder / _MERGED)
    except InputError:
        return {}


class PartitionStore:
    """Store of partitions 0..count-1 in a work folder, each a .bin and .idx per key and a JSON record of counts and hashes.

    Files: part-00001-KEY.bin and .idx for each key, then part-00001.json, which is written last.
    """

    def __init__(self, folder: Path, keys: Sequence[str], dtype: str, count: int) -> None:
        self.folder, self.count = folder, count
        self._keys, self._dtype = keys, dtype

    def missing_partitions(self) -> list[int]:
        """Return the numbers, from 0, of partitions without a valid JSON record or of other file sizes than recorded."""
        return [number for number in range(self.count) if self._read_record(number) is None]

    def write(
        self, number: int, fill: Callable[[list[IndexedWriter]], dict[str, int]], before_rename: Callable[[], None] | None = None
    ) -> None:
        """Write a partition's files or none; `fill` fills a writer per key and returns counts; `before_rename` may veto.

        The files appear together. `before_rename` may refuse the written partition by raising InputError.
        """
        paths = [*self._files(number), self._record_path(number)]
        with atomic_files(*paths, before_rename=before_rename) as [*files, record], open_writers(files, self._dtype) as writers:
            counts = fill(writers)
            hashes = [writer.finish() for writer in writers]
            sizes = [path.stat().st_size for path in files]
            record.write_text(json.dumps({"counts": counts, "sha256": hashes, "bytes": sizes}) + "\n")

    def merge(self, writers: Sequence[IndexedWriter]) -> list[dict[str, int]]:
        """Append all partitions to `writers`, one per key; return each partition's counts; InputError if one changed."""
        records = [self._read_record(number) for number in range(self.count)]
        total = sum(sum(record["bytes"]) for record in records)
        done = 0
        with ProgressLine("merging the partitions", total) as progress:
            for number, record in enumerate(records):
                files = self._files(number)
                count = len(writers)
                for *pair, writer, hashes in zip(files[:count], files[count:], writers, record["sha256"], strict=True):
                    try:
                        writer.append_corpus(*pair, hashes)
                    except InputError as error:
                        hint = f"remove {self._record_path(number)} and run the same command again"
                        raise InputError(f"{error}; {hint}") from None
                done += sum(record["bytes"])
                progress.update(done)
        return [record["counts"] for record in records]

    def record_merge(self, hashes: dict[str, str]) -> None:
        """Write `hashes`, the sha256 by file name of the outputs to rename next, to the work folder's file `merged`."""
        atomic_write(self.folder / _MERGED, json.dumps(hashes) + "\n")

    def _files(self, number: int) -> list[Path]:
        """Return the .bin of each key, then the .idx of each."""
        return [self.folder / f"part-{number + 1:05}-{key}{end}" for end in (".bin", ".idx") for key in self._keys]

    def _record_path(self, number: int) -> Path:
        """Return the path of the JSON record of a partition."""
        return self.folder / f"part-{number + 1:05}.json"

    def _read_record(self, number: int) -> dict[str, Any] | None:
        """Return the record of a partition, or None if it is missing, invalid or does not match the file sizes."""
        try:
            record = read_json_object(self._record_path(number))
            is_complete = record["bytes"] == [path.stat().st_size for path in self._files(number)]
            is_complete &= [sorted(hashes) for hashes in record["sha256"]] == [["bin", "idx"]] * len(self._keys)
            is_complete &= all(type(value) is str for hashes in record["sha256"] for value in hashes.values())
            return record if is_complete and all(type(count) is int for count in record["counts"].values()) else None
        except (OSError, InputError, KeyError, TypeError, AttributeError):
            return None


@contextlib.contextmanager
def open_work_folder(folder: Path, plan: dict[str, Any]) -> Iterator[None]:
    """Lock a work folder of `plan` for the block; remove it after success or without partitions; InputError if unusable.

    `plan` is what the partitions depend on, with a field per flag. Raises InputError if another process uses the folder, or if it
    holds partitions of another plan or foreign files.
    """
    try:
        foreign = sorted(name for name in os.listdir(folder) if not _OWN_FILES.fullmatch(name))
    except FileNotFoundError:
        foreign = []
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    if foreign:
        raise InputError(f"{folder}: holds `{foreign[0]}`, expected only partitions of a corpus; choose another --output-prefix")
    lock = _lock_folder(folder)
    try:
        for path in folder.glob(".*.tmp"):  # of a killed attempt
            with contextlib.suppress(OSError):  # if the folder is read-only, writing the plan reports it
                path.unlink()
        _check_plan(folder, plan)
        try:
            yield
        except BaseException:
            if not any(folder.glob("part-*.json")):
                with contextlib.suppress(OSError):  # report the first error
                    _remove_folder(folder)
            raise
        try:
            _remove_folder(folder)
        except OSError as error:
            raise InputError(f"{folder}: cannot be removed: {error.strerror}; the corpus is complete without it") from None
    finally:
        lock.release()


def _lock_folder(folder: Path) -> FileLock:
    """Create and lock the work folder and return the lock. Raises InputError if another process holds it."""
    lock = FileLock(folder / _LOCK)
    while True:
        create_parent_dir(lock.path, "--output-prefix")
        try:
            if lock.acquire():
                return lock
        except FileNotFoundError:  # another process has just removed the folder
            continue
        except OSError as error:  # without a file name if the file system has no locks
            verb = "locked" if error.filename is None else "written to"
            raise InputError(f"{folder}: cannot be {verb}: {error.strerror}") from None
        raise InputError(f"{folder}: another process is using this folder; wait for it or choose another --output-prefix")


def _check_plan(folder: Path, plan: dict[str, Any]) -> None:
    """Write `plan` to the folder. Raises InputError if it holds partitions of another plan."""
    path = folder / _PLAN
    if any(folder.glob("part-*.json")):
        stored_plan = read_json_object(path, f"the plan of the partitions next to it; remove {folder}")
        for field, value in plan.items():
            stored, requested = json.dumps(stored_plan.get(field)), json.dumps(value)
            if stored != requested:
                raise InputError(
                    f"{path}: field `{field}`: found {stored[:80]}, expected {requested[:80]}; "
                    f"give the first command's flags to resume it, or remove {folder}"
                )
    atomic_write(path, json.dumps(plan, indent=2) + "\n")


def _remove_folder(folder: Path) -> None:
    """Rename the folder, so that no half-deleted one can be mistaken for a work folder, and delete it."""
    rubbish = temporary_path(folder)
    os.rename(folder, rubbish)
    shutil.rmtree(rubbish)
