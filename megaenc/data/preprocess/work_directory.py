"""Work directory of `--partitions`, shared by processes on any number of nodes.

Each partition of a corpus is written atomically. Files: plan.json, with which the directory
appears; part-00001-KEY.bin, .idx and, for deduplication, .keys for each key, then part-00001.json,
written last; `merged`, hashes of the outputs about to be renamed; claims.

The bytes of a partition and of the merged outputs depend only on the plan. Two processes that write
the same ones, which claims make rare, replace files by equal files.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megaenc.atomic_io import atomic_files, atomic_write, fsync_path, remove_path, temporary_path
from megaenc.console import ProgressLine, print_rank_0
from megaenc.data.indexed.indexed_dataset import IndexedWriter, open_writers
from megaenc.data.preprocess.claims import Claim, ClaimDirectory
from megaenc.data.preprocess.deduplicate import Deduplication, find_duplicates
from megaenc.data.preprocess.outputs import MERGE_RECORD, compute_sha256
from megaenc.errors import InputError
from megaenc.json_files import read_json_object, read_json_or_empty
from megaenc.output_paths import create_parent_dir

_PLAN = "plan.json"
_KNOWN_FILES = re.compile(
    r"plan\.json|merged|(part-\d{5,}|merge)\.claim"
    r"|part-\d{5,}(-.*\.(bin|idx|keys)|\.json)|\..*\.tmp"
)


@dataclass
class Partition:
    """Partition that is being written, in the order of the JSON keys.

    `WorkDirectory.new_partition` yields it. The block adds documents to `writers`, one for each
    key, sets `counts` and, for deduplication, appends each key's array of
    `TokenizedBlock.band_keys` to the key's list in `band_keys`, which is empty without
    deduplication.
    """

    writers: list[IndexedWriter]
    band_keys: list[list[np.ndarray]]
    counts: dict[str, int] = field(default_factory=dict)


class WorkDirectory:
    """Directory of the `count` partitions of a preprocessing run, shared by processes.

    It is made by `WorkDirectory(path, plan, keys, dtype, count, deduplication)`, of which
    `deduplication` is None by default. The bytes of partitions depend on the `plan` (see
    `PreprocessJob.build_plan`). Each partition, of 0-based index, has a .bin of tokens of `dtype`,
    an .idx and, with `deduplication`, a .keys for each of `keys`, and a JSON record of plan, counts
    and hashes. Nothing is read or written before `open`. Then `new_partition` writes each of
    `missing_partitions` under a claim of `acquire`, before `merge` and `remove`.
    """

    def __init__(
        self,
        path: Path,
        plan: dict[str, Any],
        keys: Sequence[str],
        dtype: str,
        count: int,
        deduplication: Deduplication | None = None,
    ) -> None:
        self.path = Path(os.path.realpath(path))  # a link is not renamed
        self.count = count
        self._plan = json.loads(json.dumps(plan))
        self._digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
        self._keys = keys
        self._dtype = dtype
        self._deduplication = deduplication
        self._suffixes = ("bin", "idx") if deduplication is None else ("bin", "idx", "keys")
        self._claims = ClaimDirectory(self.path)

    def open(self) -> None:
        """Join the processes that work in the directory, or create it.

        Missing parents are created. The directory appears with its plan by one rename.

        Raises:
            InputError: It holds foreign files or another plan, or cannot be written.
        """
        plan = self.path / _PLAN
        while True:
            if not self._list_names():
                self._create()
            if plan.exists():
                self._check_plan(plan)
                return
            # It appears with its plan and goes as a whole: the files are of somebody else.
            if self.path.exists():
                raise InputError(
                    f"{self.path}: holds no {_PLAN} of a corpus, expected the one next to its "
                    "partitions; "
                    "choose another --output-prefix"
                )

    def is_gone(self) -> bool:
        """Return whether there is no directory of this plan at the path (any more).

        It was removed after the merge, or replaced.
        """
        return read_json_or_empty(self.path / _PLAN) != self._plan

    def missing_partitions(self) -> list[int]:
        """Return the 0-based indices, ascending, of partitions that are not complete."""
        return [index for index in range(self.count) if not self.is_complete(index)]

    def is_complete(self, index: int) -> bool:
        """Return whether the partition of 0-based `index` is complete.

        It has a valid JSON record of this plan, and files of the recorded sizes.
        """
        return self._read_record(index) is not None

    def acquire(self, index: int | None) -> Claim | None:
        """Return a claim on the partition of 0-based `index`, or on the merge for None.

        The result is None if a live process holds it. The caller must enter the claim at once, see
        `ClaimDirectory.acquire`.

        Raises:
            InputError: The directory cannot be written to.
            FileNotFoundError: The directory is gone.
        """
        try:
            return self._claims.acquire("merge" if index is None else self._name(index))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written to: {error.strerror}") from None

    @contextlib.contextmanager
    def new_partition(self, index: int) -> Iterator[Partition]:
        """Yield the partition of 0-based `index` to fill in the `with` block.

        Its files appear after the block, only if it succeeds, the record last. The writers are
        finished here. Files of the same partition are replaced. The caller should hold a claim on
        it.

        Raises:
            InputError: The directory is gone, or a file cannot be written.
        """

        def check() -> None:
            if self.is_gone():
                raise InputError(
                    f"{self.path}: was removed by another process; run the same command again"
                )

        files = self._files(index)
        keys = len(self._keys)
        with (
            atomic_files(*files, self._record_path(index), before_rename=check) as [
                *temporary,
                record,
            ],
            open_writers(temporary[: 2 * keys], self._dtype) as writers,
        ):
            band_keys: list[list[np.ndarray]] = (
                [] if self._deduplication is None else [[] for _ in self._keys]
            )
            partition = Partition(writers, band_keys)
            yield partition
            hashes = [writer.finish() for writer in writers]
            for path, arrays, hashed in zip(temporary[2 * keys :], band_keys, hashes, strict=False):
                with open(path, "wb") as stream:
                    np.save(stream, np.concatenate([self._deduplication([]), *arrays], axis=2))
                hashed["keys"] = compute_sha256(path)
            sizes = [path.stat().st_size for path in temporary]
            content = {
                "plan": self._digest,
                "counts": partition.counts,
                "sha256": hashes,
                "bytes": sizes,
            }
            record.write_text(json.dumps(content) + "\n")

    def merge(self, writers: Sequence[IndexedWriter]) -> tuple[dict[str, int], list[int]]:
        """Append all partitions to `writers`, one per key, without duplicates.

        Duplicates stay if there is no deduplication. The writers are not finished. Progress is
        printed.

        Returns:
            The sums of the partitions' counts by name, and the number of duplicates left out of
            each key.

        Raises:
            InputError: A partition changed or is missing.
        """
        if missing := self.missing_partitions():
            raise InputError(
                f"{self._record_path(missing[0])}: changed after it was written; "
                "run the same command again"
            )
        records = [self._read_record(index) for index in range(self.count)]
        keeps = [self._find_kept(place, records) for place in range(len(self._keys))]
        removed = [0] * len(self._keys)
        done = 0
        with ProgressLine(
            "merging the partitions", sum(sum(record["bytes"]) for record in records)
        ) as progress:
            for index, record in enumerate(records):
                files = self._files(index)
                for place, (writer, hashes) in enumerate(
                    zip(writers, record["sha256"], strict=True)
                ):
                    mask = keeps[place][index]
                    with self._name_record_in_errors(index):
                        writer.append_corpus(
                            files[place], files[len(writers) + place], hashes, mask
                        )
                    removed[place] += 0 if mask is None else int((~mask).sum())
                done += sum(record["bytes"])
                progress.update(done)
        counts = {
            name: sum(record["counts"][name] for record in records) for name in records[0]["counts"]
        }
        return counts, removed

    def record_merge(self, hashes: dict[str, str]) -> None:
        """Write the hashes of outputs, before they are renamed, to the file `merged`.

        `hashes` has the sha256 by file name.

        Raises:
            InputError: The file cannot be written.
        """
        atomic_write(self.path / MERGE_RECORD, json.dumps(hashes) + "\n")

    def remove(self) -> None:
        """Remove the directory after the merge, unless it is gone or of another plan.

        Raises:
            InputError: It cannot be removed.
        """
        try:
            if not self.is_gone():
                _remove_directory(self.path)
        except FileNotFoundError:  # another process merged too, after a pause of this one
            return
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be removed: {error.strerror}; "
                "the corpus is complete without it"
            ) from None

    def leave(self) -> int:
        """Return the number of complete partitions; call it when an error ends the work.

        The result is 0 if the directory is gone. The directory is removed if it holds nothing but
        its plan: no partition and no claim.
        """
        with contextlib.suppress(OSError):  # the first error is the one to report
            names = [name for name in os.listdir(self.path) if not name.startswith(".")]
            if names == [_PLAN] and not self.is_gone():
                _remove_directory(self.path)
        return self.count - len(self.missing_partitions())

    def _find_kept(
        self, place: int, records: Sequence[dict[str, Any]]
    ) -> Sequence[np.ndarray | None]:
        """Return for each partition which documents of key index `place` stay.

        Each is bool[documents], or None for all.
        """
        if self._deduplication is None:
            return [None] * len(records)
        paths = [self._files(index)[2 * len(self._keys) + place] for index in range(self.count)]
        for index, (path, record) in enumerate(zip(paths, records, strict=True)):
            if compute_sha256(path) != record["sha256"][place]["keys"]:
                with self._name_record_in_errors(index):
                    raise InputError(
                        f"{path}: sha256 differs from the recorded one; "
                        "the file has changed since it was written"
                    )
        sizes = [np.load(path, mmap_mode="r").shape[2] for path in paths]
        duplicates = find_duplicates(
            sum(sizes),
            self._deduplication.bands,
            lambda band: (np.load(path, mmap_mode="r")[band] for path in paths),
        )
        return np.split(~duplicates, np.cumsum(sizes)[:-1])

    def _name(self, index: int) -> str:
        """Return the name of a partition, with which all of its files begin."""
        return f"part-{index + 1:05}"

    def _files(self, index: int) -> list[Path]:
        """Return the .bin of each key, then each .idx, then with deduplication each .keys."""
        return [
            self.path / f"{self._name(index)}-{key}.{suffix}"
            for suffix in self._suffixes
            for key in self._keys
        ]

    def _record_path(self, index: int) -> Path:
        return self.path / f"{self._name(index)}.json"

    @contextlib.contextmanager
    def _name_record_in_errors(self, index: int) -> Iterator[None]:
        """Append to an InputError of the block how to write the partition again."""
        try:
            yield
        except InputError as error:
            raise InputError(
                f"{error}; remove {self._record_path(index)} and run the same command again"
            ) from None

    def _read_record(self, index: int) -> dict[str, Any] | None:
        """Return the record of a partition, or None if it is not valid.

        It must exist, belong to this plan and match the sizes of the files.
        """
        try:
            record = read_json_object(self._record_path(index))
            is_complete = record["plan"] == self._digest
            is_complete &= record["bytes"] == [path.stat().st_size for path in self._files(index)]
            is_complete &= [sorted(hashes) for hashes in record["sha256"]] == [
                list(self._suffixes)
            ] * len(self._keys)
            is_complete &= all(
                type(value) is str for hashes in record["sha256"] for value in hashes.values()
            )
            return (
                record
                if is_complete and all(type(count) is int for count in record["counts"].values())
                else None
            )
        except (OSError, InputError, KeyError, TypeError, AttributeError):
            return None

    def _list_names(self) -> list[str]:
        """Return the names in the directory; none if it is missing.

        Raises:
            InputError: It holds a foreign file.
        """
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from None
        if foreign := sorted(name for name in names if not _KNOWN_FILES.fullmatch(name)):
            raise InputError(
                f"{self.path}: holds `{foreign[0]}`, expected only partitions of a corpus; "
                "choose another --output-prefix"
            )
        return names

    def _check_plan(self, path: Path) -> None:
        """Raise InputError for the first field of the stored plan that differs."""
        stored_plan = read_json_object(
            path, f"the plan of the partitions next to it; remove {self.path}"
        )
        for name in dict.fromkeys([*self._plan, *stored_plan]):
            stored = json.dumps(stored_plan.get(name))
            requested = json.dumps(self._plan.get(name))
            if stored != requested:
                raise InputError(
                    f"{path}: field `{name}`: found {stored[:80]}, expected {requested[:80]}; "
                    f"give the first command's flags to resume it, or remove {self.path}"
                )

    def _create(self) -> None:
        """Create the directory with its plan by a rename, unless another process does.

        Raises:
            InputError: It cannot be written.
        """
        create_parent_dir(self.path, "--output-prefix")
        temporary = temporary_path(self.path)
        try:
            temporary.mkdir()
            plan = temporary / _PLAN
            plan.write_text(json.dumps(self._plan, indent=2) + "\n", encoding="utf-8")
            fsync_path(plan)
            os.rename(temporary, self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise InputError(f"{self.path}: cannot be written to: {error.strerror}") from None
        finally:
            remove_path(temporary)


def _remove_directory(directory: Path) -> None:
    """Delete the directory, after a rename.

    So no half-deleted one can be mistaken for a work directory.
    """
    rubbish = temporary_path(directory)
    os.rename(directory, rubbish)
    shutil.rmtree(rubbish, ignore_errors=True)
    if rubbish.exists():  # NFS keeps files that a process overtaken in a pause still has open
        print_rank_0(f"{rubbish}: cannot be removed completely; remove it")
