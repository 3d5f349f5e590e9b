"""Work folder of `--partitions`: partitions of a corpus, each written atomically, shared by processes on any number of nodes.

Files: plan.json, with which the folder appears; part-00001-KEY.bin, .idx and, for deduplication, .keys for each key, then
part-00001.json, written last; `merged`, hashes of the outputs about to be renamed; claims.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaenc.atomic_io import atomic_files, atomic_write, fsync_path, remove_path, temporary_path
from megaenc.console import ProgressLine, print_rank_0
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers
from megaenc.data.preprocess.claims import CLAIM_NAME, Claim, ClaimFolder
from megaenc.data.preprocess.deduplicate import Deduplication, find_duplicates
from megaenc.data.preprocess.outputs import compute_sha256
from megaenc.errors import InputError
from megaenc.json_files import read_json_object, read_json_or_empty
from megaenc.output_paths import create_parent_dir

_PLAN, _MERGED, _MERGE = "plan.json", "merged", "merge"
_RECORD_NAME = re.compile(r"part-(\d{5,})\.json")
_OWN_FILES = re.compile(
    r"plan\.json|merged|(part-\d{5,}|merge)\.claim-\d+|part-\d{5,}(-.*\.(bin|idx|keys)|\.json)|\..*\.tmp"
    r"|lock"  # of earlier versions
)
_FOLDER_ID = "folder"  # field of plan.json that differs between folders of equal plans

BandKeys = list[list[np.ndarray]]
"""Arrays uint64[bands, words, documents] of successive documents by JSON key; without deduplication an empty list."""


class PartitionExists(Exception):
    """Error that another process wrote the same partition meanwhile."""


def read_merge_record(folder: Path) -> dict[str, str]:
    """Return the sha256, by file name, of the outputs that a merge of `folder` began to rename; {} without such a record.

    Files with these hashes may be overwritten: an interrupted merge wrote them.
    """
    return read_json_or_empty(folder / _MERGED)


class PartitionStore:
    """Store of partitions 0..count-1 in a work folder of `plan`, on which their content depends, with a field per flag.

    Each has a .bin and .idx per key and a JSON record of plan, counts and hashes.
    """

    def __init__(
        self,
        folder: Path,
        plan: dict[str, Any],
        keys: Sequence[str],
        dtype: str,
        count: int,
        deduplication: Deduplication | None = None,
    ) -> None:
        self.folder, self.count = Path(os.path.realpath(folder)), count  # a link is not renamed
        self._plan, self._keys, self._dtype, self._deduplication = plan, keys, dtype, deduplication
        self._digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._suffixes = ("bin", "idx") if deduplication is None else ("bin", "idx", "keys")
        self._claims = ClaimFolder(self.folder)
        self._folder_id: Any = None

    def open(self) -> None:
        """Join the processes that work in the folder, or create it; InputError for foreign files or another plan.

        A folder of another plan without partitions or live processes is replaced. The folder appears with its plan by one rename.
        """
        while True:
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                names = self._list_names()
                if names is not None and not self._is_replaceable(names):
                    self._folder_id = self._check_plan()
                    return
                if names:
                    _remove_folder(self.folder)
                self._create()

    def is_gone(self) -> bool:
        """Return whether the folder that was opened is gone: removed after the merge, or replaced."""
        return read_json_or_empty(self.folder / _PLAN).get(_FOLDER_ID) != self._folder_id

    def missing_partitions(self) -> list[int]:
        """Return the numbers, from 0, of partitions that are not complete."""
        return [number for number in range(self.count) if not self.is_complete(number)]

    def is_complete(self, number: int) -> bool:
        """Return whether a partition has a valid JSON record of this plan, and files of the recorded sizes."""
        return self._read_record(number) is not None

    def acquire(self, number: int | None) -> Claim | None:
        """Return a claim on a partition, or on the merge if None; None if a live process holds it; InputError if unwritable.

        Raises FileNotFoundError if the folder is gone.
        """
        try:
            return self._claims.acquire(_MERGE if number is None else self._name(number))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be written to: {error.strerror}") from None

    def read_progress(self) -> tuple[set[int], dict[int | None, float]]:
        """Return the numbers of recorded partitions, and the amount done by number of each claimed one; None: the merge."""
        names = os.listdir(self.folder)
        complete = {int(match[1]) - 1 for name in names if (match := _RECORD_NAME.fullmatch(name))}
        numbers = {self._name(number): number for number in range(self.count) if number not in complete} | {_MERGE: None}
        claims = [name for name in names if (match := CLAIM_NAME.fullmatch(name)) and match[1] in numbers]
        return complete, {numbers[name]: state.done for name, state in self._claims.read_live(claims).items()}

    def write(
        self,
        number: int,
        fill: Callable[[list[IndexedWriter], BandKeys], dict[str, int]],
        check: Callable[[], None] | None = None,
    ) -> None:
        """Write a partition's files or none; `fill` fills a writer and a list per key and returns counts; `check` may veto.

        The files appear together. Raises PartitionExists if another process wrote it meanwhile, InputError if the folder is gone.
        """
        paths = [*self._files(number), self._record_path(number)]

        def before_rename() -> None:
            if check is not None:
                check()
            if self.is_complete(number):
                raise PartitionExists
            if self.is_gone():
                raise InputError(f"{self.folder}: was removed by another process; run the same command again")

        keys = len(self._keys)
        with (
            atomic_files(*paths, before_rename=before_rename) as [*files, record],
            open_writers(files[: 2 * keys], self._dtype) as writers,
        ):
            band_keys: BandKeys = [] if self._deduplication is None else [[] for _ in self._keys]
            counts = fill(writers, band_keys)
            hashes = [writer.finish() for writer in writers]
            for path, arrays, hashed in zip(files[2 * keys :], band_keys, hashes, strict=False):
                with open(path, "wb") as stream:
                    np.save(stream, np.concatenate([self._deduplication([]), *arrays], axis=2))
                hashed["keys"] = compute_sha256(path)
            sizes = [path.stat().st_size for path in files]
            record.write_text(json.dumps({"plan": self._digest, "counts": counts, "sha256": hashes, "bytes": sizes}) + "\n")

    def merge(self, writers: Sequence[IndexedWriter], claim: Claim | None = None) -> tuple[list[dict[str, int]], list[int]]:
        """Append all partitions to `writers`, one per key, without duplicates if these are to be removed.

        Returns each partition's counts and the number of duplicates of each key. `claim` publishes the bytes done. Raises
        InputError if a partition changed or is missing.
        """
        if missing := self.missing_partitions():
            raise InputError(f"{self._record_path(missing[0])}: changed after it was written; run the same command again")
        records = [self._read_record(number) for number in range(self.count)]
        keeps = [self._find_kept(place, records) for place in range(len(self._keys))]
        removed = [0] * len(self._keys)
        done = 0
        with ProgressLine("merging the partitions", sum(sum(record["bytes"]) for record in records)) as progress:
            for number, record in enumerate(records):
                files = self._files(number)
                for place, (writer, hashes) in enumerate(zip(writers, record["sha256"], strict=True)):
                    mask = keeps[place][number]
                    with self._name_record_in_errors(number):
                        writer.append_corpus(files[place], files[len(writers) + place], hashes, mask)
                    removed[place] += 0 if mask is None else int((~mask).sum())
                done += sum(record["bytes"])
                progress.update(done)
                if claim is not None:
                    claim.done = done
        return [record["counts"] for record in records], removed

    def count_bytes(self) -> int:
        """Return the size of all partitions' files in bytes, as recorded."""
        return sum(sum(record["bytes"]) for number in range(self.count) if (record := self._read_record(number)))

    def record_merge(self, hashes: dict[str, str]) -> None:
        """Write `hashes`, the sha256 by file name of the outputs to rename next, to the work folder's file `merged`."""
        atomic_write(self.folder / _MERGED, json.dumps(hashes) + "\n")

    def remove(self) -> None:
        """Remove the folder after the merge. Raises InputError if that fails."""
        try:
            if not self.is_gone():
                _remove_folder(self.folder)
        except FileNotFoundError:  # another process merged too, after a pause of this one
            return
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be removed: {error.strerror}; the corpus is complete without it") from None

    def leave(self) -> int:
        """Return the number of partitions after an error; remove the folder if there are none and nobody else works in it."""
        with contextlib.suppress(OSError):  # the first error is the one to report
            complete, claims = self.read_progress()
            if not complete and not claims and not self.is_gone():
                _remove_folder(self.folder)
        return self.count - len(self.missing_partitions())

    def _find_kept(self, place: int, records: Sequence[dict[str, Any]]) -> Sequence[np.ndarray | None]:
        """Return bool[documents] for each partition: which documents of key number `place` stay; None if all."""
        if self._deduplication is None:
            return [None] * len(records)
        paths = [self._files(number)[2 * len(self._keys) + place] for number in range(self.count)]
        for number, (path, record) in enumerate(zip(paths, records, strict=True)):
            if compute_sha256(path) != record["sha256"][place]["keys"]:
                with self._name_record_in_errors(number):
                    raise InputError(f"{path}: sha256 differs from the recorded one; the file has changed since it was written")
        sizes = [np.load(path, mmap_mode="r").shape[2] for path in paths]
        duplicates = find_duplicates(
            sum(sizes), self._deduplication.bands, lambda band: (np.load(path, mmap_mode="r")[band] for path in paths)
        )
        return np.split(~duplicates, np.cumsum(sizes)[:-1])

    def _name(self, number: int) -> str:
        """Return the name of a partition, with which all of its files begin."""
        return f"part-{number + 1:05}"

    def _files(self, number: int) -> list[Path]:
        """Return the .bin of each key, then the .idx of each, then with deduplication the .keys of each."""
        return [self.folder / f"{self._name(number)}-{key}.{suffix}" for suffix in self._suffixes for key in self._keys]

    def _record_path(self, number: int) -> Path:
        """Return the path of the JSON record of a partition."""
        return self.folder / f"{self._name(number)}.json"

    @contextlib.contextmanager
    def _name_record_in_errors(self, number: int) -> Iterator[None]:
        """Append to an InputError of the block how to write the partition again."""
        try:
            yield
        except InputError as error:
            raise InputError(f"{error}; remove {self._record_path(number)} and run the same command again") from None

    def _read_record(self, number: int) -> dict[str, Any] | None:
        """Return the record of a partition, or None if it is missing, invalid, of another plan or of other file sizes."""
        try:
            record = read_json_object(self._record_path(number))
            is_complete = record["plan"] == self._digest
            is_complete &= record["bytes"] == [path.stat().st_size for path in self._files(number)]
            is_complete &= [sorted(hashes) for hashes in record["sha256"]] == [list(self._suffixes)] * len(self._keys)
            is_complete &= all(type(value) is str for hashes in record["sha256"] for value in hashes.values())
            return record if is_complete and all(type(count) is int for count in record["counts"].values()) else None
        except (OSError, InputError, KeyError, TypeError, AttributeError):
            return None

    def _list_names(self) -> list[str] | None:
        """Return the names in the folder, None if it is missing. Raises InputError for a foreign file."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be read: {error.strerror}") from None
        if foreign := sorted(name for name in names if not _OWN_FILES.fullmatch(name)):
            raise InputError(
                f"{self.folder}: holds `{foreign[0]}`, expected only partitions of a corpus; choose another --output-prefix"
            )
        return names

    def _is_replaceable(self, names: list[str]) -> bool:
        """Return whether the folder has neither this plan nor partitions nor live processes.

        Raises InputError for files without a plan: the folder appears with its plan and goes as a whole, so that they are of
        somebody else.
        """
        if any(map(_RECORD_NAME.fullmatch, names)):
            return False
        stored = read_json_or_empty(self.folder / _PLAN)
        if names and not {_FOLDER_ID, "tokenizer"} & stored.keys():
            if not self.folder.exists():
                raise FileNotFoundError(self.folder)
            raise InputError(
                f"{self.folder}: holds no {_PLAN} of a corpus, expected the one next to its partitions; "
                "choose another --output-prefix"
            )
        is_own = all(json.dumps(stored.get(field)) == json.dumps(value) for field, value in self._plan.items())
        return not (is_own and _FOLDER_ID in stored) and not self._claims.read_live(names)

    def _check_plan(self) -> Any:
        """Return the id in the stored plan. Raises InputError with the first field that differs from this plan."""
        path = self.folder / _PLAN
        if not self.folder.exists():
            raise FileNotFoundError(self.folder)
        stored_plan = read_json_object(path, f"the plan of the partitions next to it; remove {self.folder}")
        for field in dict.fromkeys([*self._plan, *stored_plan]):
            stored, requested = json.dumps(stored_plan.get(field)), json.dumps(self._plan.get(field))
            if stored != requested and field != _FOLDER_ID:
                raise InputError(
                    f"{path}: field `{field}`: found {stored[:80]}, expected {requested[:80]}; "
                    f"give the first command's flags to resume it, or remove {self.folder}"
                )
        if _FOLDER_ID not in stored_plan:
            raise InputError(f"{path}: field `{_FOLDER_ID}`: missing, as in those of earlier versions; remove {self.folder}")
        return stored_plan[_FOLDER_ID]

    def _create(self) -> None:
        """Create the folder with its plan by a rename, unless another process does so first. Raises InputError."""
        create_parent_dir(self.folder, "--output-prefix")
        temporary = temporary_path(self.folder)
        try:
            temporary.mkdir()
            plan = temporary / _PLAN
            plan.write_text(json.dumps({**self._plan, _FOLDER_ID: secrets.token_hex(8)}, indent=2) + "\n", encoding="utf-8")
            fsync_path(plan)
            os.rename(temporary, self.folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise InputError(f"{self.folder}: cannot be written to: {error.strerror}") from None
        finally:
            remove_path(temporary)


def _remove_folder(folder: Path) -> None:
    """Rename the folder, so that no half-deleted one can be mistaken for a work folder, and delete it."""
    rubbish = temporary_path(folder)
    os.rename(folder, rubbish)
    shutil.rmtree(rubbish, ignore_errors=True)
    if rubbish.exists():  # NFS keeps files that a process overtaken in a pause still has open
        print_rank_0(f"{rubbish}: cannot be removed completely; remove it")
