"""Resolution of `--input` to text sources.

These are files of several kinds, directories, saved data sets and data sets on the Hub.
"""

import bisect
import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megaenc.console import format_paths
from megaenc.data.sources.base import LineFile, TextGroup, TextSource
from megaenc.data.sources.delimited_files import DelimitedFile
from megaenc.data.sources.text_files import UTF8, TextBlock, find_encoding, strip_compression_suffix
from megaenc.errors import InputError

EXPECTED = (
    "JSONL, CSV, TSV, Parquet or text files, a directory of them, of MDS shards or of a saved data "
    "set, or the name of one on the Hugging Face Hub"
)
_SUFFIX_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_KIND_NAMES = {
    "jsonl": "JSONL",
    "csv": "CSV",
    "tsv": "TSV",
    "text": "text",
    "parquet": "Parquet",
    "saved": "saved data sets",
    "mds": "indices of MDS shards",
}
_MDS_INDEX = "index.json"
_MDS_INDEX_START = re.compile(rb'\s*\{\s*("version"\s*:\s*\d+\s*,\s*)?"shards"\s*:\s*\[')
_MDS_SHARD = re.compile(r"\.mds(\.\w+)?$")  # raw or compressed
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

JsonKey = Annotated[str, tyro.conf.arg(aliases=("--json-keys",))]
"""Type of a flag `json_key`, which may also be spelled as that of `megaenc preprocess`."""


@dataclass(frozen=True)
class InputConfig:
    """Flags for text input, the same in all commands that read text; each is a field.

    `input`, the only flag without a default, is a tuple of files, directories, or names of data
    sets on the Hub. The constructor checks nothing, `resolve_inputs` does. `sample_by` is the unit
    of text files: "document" (the default), "paragraph" or "line". `dataset_config` (None: the
    default one) and `dataset_split` (train) are for data sets, `encoding` (UTF-8) for JSONL, CSV,
    TSV and text files, and `delimiter` for CSV and TSV (None: a comma or a tab).
    """

    input: tuple[str, ...]
    """JSONL, CSV, TSV, Parquet or text files, directories of them, of MDS shards or of a saved data
    set, or names of Hugging Face Hub data sets."""
    sample_by: Literal["document", "paragraph", "line"] = field(default="document", kw_only=True)
    """Unit of text files (.txt, .text, .md) that becomes a document: the file, a paragraph between
    blank lines, or a line."""
    dataset_config: str | None = field(default=None, kw_only=True)
    """Configuration of a data set on the Hub, such as sample-10BT."""
    dataset_split: str = field(default="train", kw_only=True)
    """Split of a data set on the Hub or of a saved data set with several splits."""
    encoding: str = field(default=UTF8, kw_only=True)
    """Encoding of JSONL, CSV, TSV and text files, such as latin1, cp1252 or utf-16."""
    delimiter: str | None = field(default=None, kw_only=True)
    """Character between the cells of CSV and TSV files, such as ';'; by default a comma in CSV, a
    tab in TSV."""


@dataclass(frozen=True)
class ResolvedInputs:
    """Text input of a command, as `resolve_inputs` returns it.

    `read_blocks` and `read_texts` read it. It has the `sources` in order, metadata of each --input
    (`origins`) and lines to print for the user (`messages`). Every origin has `path`, a name, and
    `bytes`, None for the Hub; a directory has the number of `files`, a data set on the Hub `config`
    and `split`, and token ids their column, `tokens`.
    """

    sources: list[TextSource]
    origins: list[dict[str, Any]]
    """Metadata of each --input: `path` (name without directory), `bytes` on disk (None if unknown),
    `files` of a directory, `config` and `split` of a data set, `tokens` (the column) if it was
    tokenized already."""
    messages: list[str]
    """Lines to print for the user."""

    @property
    def size(self) -> int:
        """Return the bytes on disk of all sources.

        256 MiB are assumed for each file of a Hub data set.
        """
        return sum(source.size for source in self.sources)

    @property
    def known_size(self) -> int | None:
        """Return the bytes on disk of all sources, or None if one is a Hub data set."""
        return self.size if all(source.is_size_known for source in self.sources) else None

    def file_stats(self) -> Iterator[tuple[str, int, int]]:
        """Yield (absolute path, bytes, modification time in ns) of each file, in order.

        Size and time are of the moment at which the input was resolved. For a Hub data set it is
        (name, number of files, 0).
        """
        for source in self.sources:
            yield from source.file_stats or [(source.name, source.end, 0)]

    def check_unchanged(self, ranges: "Sequence[DocumentRange] | None" = None) -> None:
        """Raise InputError if a local file is gone or changed since it was resolved.

        Its size and modification time are compared. Hub data sets are not checked.

        Args:
            ranges: Ranges whose files are checked; None: all.
        """
        for document_range in full_ranges(self) if ranges is None else ranges:
            for path, size, changed in self.sources[document_range.source].file_stats_between(
                document_range.start, document_range.stop
            ):
                try:
                    stat = os.stat(path)
                except OSError as error:
                    reason = error.strerror
                else:
                    if (stat.st_size, stat.st_mtime_ns) == (size, changed):
                        continue
                    reason = "found another modification time, expected the same"
                    if stat.st_size != size:
                        reason = f"found {stat.st_size:,} bytes, expected {size:,}"
                raise InputError(
                    f"{path}: changed while it was read: {reason}; "
                    "start again when nothing writes to it"
                )


@dataclass(frozen=True)
class DocumentRange:
    """Documents of one source between two of its split points, a frozen dataclass.

    `source` is its 0-based index in `ResolvedInputs.sources`. The documents begin at split point
    `start` and end before `stop`, see `TextSource`.
    """

    source: int
    start: int
    stop: int


def resolve_inputs(
    settings: InputConfig, keys: Sequence[str], token_dtype: str | None = None
) -> ResolvedInputs:
    """Return the sources of every --input, with their metadata and messages.

    Files are opened, but only headers and footers are read; those of a directory are in order of
    their paths. Data sets of the Hub are looked up, which is printed. The messages are not.

    Args:
        keys: JSON keys or columns of the texts; columns must exist.
        token_dtype: None for texts. Else `keys` are columns of MDS shards with token ids of this
            dtype, such as `int64`, in bytes; empty: in arrays, which have a dtype.

    Raises:
        InputError: An input, its columns or a flag cannot be used.
    """
    if not settings.input:
        raise InputError(f"--input: missing, expected {EXPECTED}")
    settings = replace(settings, encoding=find_encoding(settings.encoding))
    delimiter = settings.delimiter
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
        raise InputError(
            f"--delimiter {delimiter!r}: expected one character, such as ';' or $'\\t' for a tab"
        )
    inputs = ResolvedInputs([], [], [])
    kinds: set[str] = set()
    for name in settings.input:
        path = Path(name)
        if token_dtype is not None and not os.path.isdir(path) and not _is_mds_index(path):
            raise InputError(
                f"{name}: not a directory, expected one of MDS shards with --input-tokens; "
                "download a data set of the Hub with `hf download`"
            )
        if not os.path.exists(path) and _may_be_on_hub(name):
            from megaenc.data.sources.arrow_tables import HubDataset

            kinds.add("hub")
            source = HubDataset(name, settings.dataset_config, settings.dataset_split, keys)
            inputs.sources.append(source)
            origin = {
                "path": name,
                "bytes": None,
                "config": settings.dataset_config,
                "split": settings.dataset_split,
            }
            inputs.messages.append(
                f"{name}: streamed from the Hugging Face Hub, {source.end:,} files"
            )
        else:
            is_tokens = token_dtype is not None
            shard_files = []
            if os.path.isdir(path) and (is_tokens or not _is_saved_dataset(path)):
                files, shard_files = _find_files(path, inputs.messages, is_tokens)
            else:
                files = [_classify_file(path)]
            kinds |= {kind for kind, _ in files}
            sources = list(_build_sources(files, shard_files, settings, keys, token_dtype))
            if not sources and files[0][0] == "mds":
                raise InputError(f"{name}: found no shard in its index.json, expected MDS shards")
            inputs.sources.extend(sources)
            origin = {"path": path.resolve().name, "bytes": sum(source.size for source in sources)}
            if os.path.isdir(path):
                origin["files"] = sum(len(source.file_stats) for source in sources)
            if is_tokens:
                origin["tokens"] = keys[0]
        inputs.origins.append(origin)
    if len(settings.input) > 1:
        inputs.messages.extend(_find_files_read_twice(inputs))
    _check_flags_have_effect(settings, kinds)
    return inputs


def _check_flags_have_effect(settings: InputConfig, kinds: Collection[str]) -> None:
    """Raise InputError if a flag is given that no source of the `kinds` reads."""
    needs = (
        ("sample_by", {"text"}, "a text file (.txt, .text, .md)"),
        ("dataset_config", {"hub"}, "a data set of the Hugging Face Hub"),
        ("dataset_split", {"hub", "saved"}, "a data set, saved or on the Hub"),
        ("encoding", {"jsonl", "csv", "tsv", "text"}, "a JSONL, CSV, TSV or text file"),
        ("delimiter", {"csv", "tsv"}, "a CSV or TSV file"),
    )
    for name, needed, expected in needs:
        value = getattr(settings, name)
        if value != getattr(InputConfig, name) and not kinds & needed:
            text = repr(value) if name == "delimiter" else value
            raise InputError(f"--{name.replace('_', '-')} {text}: none of --input is {expected}")


def _find_files_read_twice(inputs: ResolvedInputs) -> list[str]:
    """Return a message about files that are read more than once, if any.

    A file may have several names.
    """
    known = set()
    repeated = []
    for source in inputs.sources:
        for path, *_ in source.file_stats:
            stat = os.stat(path)
            if (stat.st_dev, stat.st_ino) in known:
                repeated.append(path)
            known.add((stat.st_dev, stat.st_ino))
    if not repeated:
        return []
    return [f"--input: {len(repeated):,} files are read more than once: {format_paths(repeated)}"]


def read_blocks(
    inputs: ResolvedInputs, ranges: Sequence[DocumentRange] | None = None
) -> Iterator[TextBlock]:
    """Yield the unparsed TextBlocks of `ranges` (None: of all input), in order.

    Their positions count from the start of all input.

    Raises:
        InputError: The input cannot be read.
    """
    before = [0, *accumulate(source.size for source in inputs.sources)]
    for document_range in full_ranges(inputs) if ranges is None else ranges:
        yield from inputs.sources[document_range.source].read_blocks(
            document_range.start, document_range.stop, before[document_range.source]
        )


def read_texts(inputs: ResolvedInputs, key: str) -> Iterator[str]:
    """Yield the text under `key` of each document of the input, in order.

    `key` is a JSON key or a column. Text files have the same text under every key. A text may be
    empty.

    Raises:
        InputError: The input or a document cannot be read, or has no text under `key`.
    """
    for block in read_blocks(inputs):
        for (text,) in block.parse([key], False).texts:
            yield text


def full_ranges(inputs: ResolvedInputs) -> list[DocumentRange]:
    """Return one DocumentRange per source, in order, that covers all its documents."""
    return [DocumentRange(index, 0, source.end) for index, source in enumerate(inputs.sources)]


def partition_inputs(inputs: ResolvedInputs, count: int) -> list[list[DocumentRange]]:
    """Return 1 to `count` partitions of the input, each a list of ranges.

    They are in order, of similar size in bytes on disk, and together hold all documents. There are
    fewer than `count` if the sources have too few split points.
    """
    ends = list(accumulate(source.size for source in inputs.sources))
    boundaries = [(0, 0)]
    for partition in range(1, count) if inputs.size else ():
        target = inputs.size * partition // count
        index = bisect.bisect_right(ends, target)
        source = inputs.sources[index]
        split_point = source.find_split_point(target - (ends[index] - source.size))
        boundaries.append((index, split_point) if split_point < source.end else (index + 1, 0))
    boundaries.append((len(inputs.sources), 0))
    parts = []
    for (first, start), (last, stop) in pairwise(boundaries):
        ranges = [
            DocumentRange(index, 0, inputs.sources[index].end) for index in range(first, last)
        ]
        if ranges:
            ranges[0] = DocumentRange(first, start, ranges[0].stop)
        if stop:
            ranges.append(DocumentRange(last, start if last == first else 0, stop))
        if any(document_range.start < document_range.stop for document_range in ranges):
            parts.append(ranges)
    return parts or [full_ranges(inputs)]


def measure_ranges(inputs: ResolvedInputs, ranges: Sequence[DocumentRange]) -> tuple[float, float]:
    """Return the bytes on disk of the input before `ranges`, and those in them.

    Both are estimates from split points. There is at least one range, and each begins where the
    one before it ends.
    """
    before = [0, *accumulate(source.size for source in inputs.sources)]

    def measure(index: int, split_point: int) -> float:
        source = inputs.sources[index]
        return before[index] + source.size * split_point / max(source.end, 1)

    start = measure(ranges[0].source, ranges[0].start)
    return start, measure(ranges[-1].source, ranges[-1].stop) - start


def _build_sources(
    files: Sequence[tuple[str, str]],
    shard_files: Sequence[str],
    settings: InputConfig,
    keys: Sequence[str],
    token_dtype: str | None,
) -> Iterator[TextSource]:
    """Yield a source for each (kind, path), or for a group of whole text files.

    Raises:
        InputError: A source cannot be read, or no index lists one of `shard_files`.
    """
    # An index may list the shards of subdirectories, which have an index of their own.
    known_shards: set[str] = set()
    listed_files: set[str] = set()
    for kind, paths in groupby(files, key=lambda entry: entry[0]):
        if kind == "text" and settings.sample_by == "document":
            yield TextGroup([path for _, path in paths], settings.encoding)
            continue
        for _, path in paths:
            if kind in ("parquet", "saved"):
                # A slow import of pyarrow, not needed for JSONL.
                from megaenc.data.sources import arrow_tables

                if kind == "parquet":
                    yield arrow_tables.ParquetFile(path, keys)
                else:
                    yield from arrow_tables.find_saved_dataset_files(
                        path, settings.dataset_split, keys
                    )
            elif kind == "mds":
                # A slow import of pydantic.
                from megaenc.data.sources import mds

                listed = mds.read_index(path)
                for shard in listed:
                    listed_files.update(os.path.realpath(file) for file in shard.files)
                shards = [shard for shard in listed if shard.path not in known_shards]
                known_shards.update(shard.path for shard in shards)
                if shards:
                    yield mds.MdsDataset(path, shards, keys, token_dtype)
            elif kind in ("csv", "tsv"):
                yield DelimitedFile(
                    path, keys, kind == "csv", settings.encoding, settings.delimiter
                )
            else:
                yield LineFile(
                    path, settings.sample_by if kind == "text" else None, settings.encoding
                )
    unlisted = [file for file in shard_files if os.path.realpath(file) not in listed_files]
    if unlisted:
        raise InputError(
            f"{format_paths(unlisted)}: found MDS shards that no index.json lists; copy the data "
            "set again, or remove them"
        )


def _classify_file(path: Path) -> tuple[str, str]:
    """Return (kind, path) of an --input that is no directory of files.

    The kind follows from the first bytes of Parquet or of an index of MDS shards, or from the
    suffix; it is jsonl by default.

    Raises:
        InputError: The file is missing, empty or unreadable.
    """
    if _is_saved_dataset(path):
        return "saved", str(path)
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or directory; expected {EXPECTED}")
    if not path.is_file():
        raise InputError(f"{path}: not a file; expected {EXPECTED}")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: is empty; expected {EXPECTED}")
    try:
        with open(path, "rb") as stream:
            is_parquet = stream.read(4) == b"PAR1"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if _is_mds_index(path):
        return "mds", str(path)
    return "parquet" if is_parquet else _kind_from_suffix(path.name) or "jsonl", str(path)


def _find_files(
    directory: Path, messages: list[str], is_tokens: bool = False
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the readable files under `directory`, and the shards of MDS.

    Hidden names are skipped. Links are followed, but each directory is read only once, under its
    first path. What was found and left out is appended to `messages`. In a directory of MDS shards
    only its index is read; with `is_tokens`, only such directories are read.

    Returns:
        (kind, path) of each file to read, sorted by path, and the paths of the shards, which an
        index may list.
    """
    entries = []
    shard_files = []
    neighbours = []
    unknown = []
    duplicates = []
    visited = {_directory_identity(directory)}

    def unreadable(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}")

    for parent, directories, names in os.walk(directory, onerror=unreadable, followlinks=True):
        inner = os.path.relpath(parent, directory)
        unvisited = []
        for name, is_new in _visit_directories(parent, directories, visited):
            path = os.path.normpath(os.path.join(inner, name))
            full = os.path.join(parent, name)
            if not is_new:
                duplicates.append(path)
            elif not is_tokens and _is_saved_dataset(Path(full)):
                entries.append((path, "saved", full))
            else:
                unvisited.append(name)
        directories[:] = unvisited
        names = [name for name in names if not name.startswith(".")]
        # A damaged index does not begin as one; reading it raises an error.
        has_index = _MDS_INDEX in names and (
            any(map(_MDS_SHARD.search, names)) or _is_mds_index(os.path.join(parent, _MDS_INDEX))
        )
        for name in names:
            path = os.path.normpath(os.path.join(inner, name))
            full = os.path.join(parent, name)
            kind = None if is_tokens else _kind_from_suffix(name)
            if _MDS_SHARD.search(name):
                shard_files.append(full)
            elif has_index and name == _MDS_INDEX:
                entries.append((path, "mds", full))
            elif has_index:
                neighbours.append(path)
            elif kind and os.path.isfile(full):
                entries.append((path, kind, full))
            else:
                unknown.append(path)
    unknown.sort()
    neighbours.sort()
    shard_files.sort()
    if not entries:
        names = [os.path.relpath(file, directory) for file in shard_files] + unknown
        expected = "MDS shards and their index.json with --input-tokens" if is_tokens else EXPECTED
        raise InputError(
            f"{directory}: holds nothing to "
            f"read{f' but {format_paths(names)}' if names else ''}; expected {expected}"
        )
    reasons = {
        "left out, next to an index of MDS shards": neighbours,
        f"left out, {'not MDS' if is_tokens else 'unknown kind of file'}": unknown,
        "directories left out, read under another path": duplicates,
    }
    for reason, paths in reasons.items():
        if paths:
            messages.append(f"{directory}: {len(paths):,} {reason}: {format_paths(paths)}")
    entries.sort()
    counts = Counter(kind for _, kind, _ in entries)
    parts = [f"{counts[kind]:,} {_KIND_NAMES[kind]}" for kind in sorted(counts)]
    messages.append(f"{directory}: {', '.join(parts)}")
    return [(kind, full) for _, kind, full in entries], shard_files


def _visit_directories(
    parent: str, names: Sequence[str], visited: set[tuple[int, int]]
) -> Iterator[tuple[str, bool]]:
    """Yield the visible ones of sorted directory `names`, and whether each is new.

    They are in `parent`. New ones are added to `visited`, as (device, inode).
    """
    for name in sorted(names):
        if not name.startswith("."):
            identity = _directory_identity(os.path.join(parent, name))
            yield name, identity not in visited
            visited.add(identity)


def _directory_identity(directory: str | Path) -> tuple[int, int]:
    """Return (device, inode) of a directory.

    Raises:
        InputError: It cannot be read.
    """
    try:
        stat = os.stat(directory)
    except OSError as error:
        raise InputError(f"{directory}: cannot be read: {error.strerror}") from None
    return stat.st_dev, stat.st_ino


def _kind_from_suffix(name: str) -> str | None:
    """Return the kind of a file by its suffix, or None for an unknown one.

    Kinds are jsonl, csv, tsv, text and parquet.
    """
    name = name.lower()
    if name.endswith(".parquet"):
        return "parquet"
    return _SUFFIX_KINDS.get(os.path.splitext(strip_compression_suffix(name))[1])


def _is_mds_index(path: str | Path) -> bool:
    """Return whether a file is named and begins as the index of MDS shards."""
    if os.path.basename(path) != _MDS_INDEX or not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as stream:
        return _MDS_INDEX_START.match(stream.read(1024)) is not None
    return False


def _is_saved_dataset(path: Path) -> bool:
    """Return whether a directory was written by the `save_to_disk` method of datasets."""
    # os.path, because Path raises an error for a name that is too long.
    has_splits = os.path.isfile(path / "dataset_dict.json")
    return has_splits or all(
        os.path.isfile(path / name) for name in ("state.json", "dataset_info.json")
    )


def _may_be_on_hub(name: str) -> bool:
    """Return whether `name` looks like a Hub name and not like a local path.

    Hub names are `owner/name` and `name`.
    """
    is_path = (
        _kind_from_suffix(name) is not None
        or strip_compression_suffix(name) != name
        or ("/" in name and os.path.isdir(Path(name).parent))
    )
    return _HUB_NAME.fullmatch(name) is not None and not is_path
