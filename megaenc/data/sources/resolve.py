"""`--input`: files of several kinds, folders of them, saved data sets and those of the Hugging Face Hub."""

import bisect
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from megaenc.data.sources.base import LineFile, TextGroup, TextSource
from megaenc.data.sources.text_files import TextBlock
from megaenc.errors import InputError

EXPECTED = "JSONL, Parquet or text files, a folder of them or of a saved data set, or the name of one on the Hugging Face Hub"
_SUFFIX_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text", ".text": "text", ".md": "text"}
_KIND_NAMES = {"jsonl": "JSONL", "text": "text", "parquet": "Parquet", "saved": "saved data sets"}
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@dataclass(frozen=True)
class InputConfig:
    """What text to read; for every command that reads any."""

    input: tuple[str, ...]
    """JSONL, Parquet or text files, folders of them or of a saved data set, names of data sets on the Hugging Face Hub."""
    sample_by: Literal["document", "paragraph", "line"] = field(default="document", kw_only=True)
    """What is a document in text files (.txt, .text, .md): the file, what stands between blank lines, or a line."""
    dataset_config: str | None = field(default=None, kw_only=True)
    """Configuration of a data set on the Hub, such as sample-10BT."""
    dataset_split: str = field(default="train", kw_only=True)
    """Split of a data set on the Hub, or of a saved one that has several."""


@dataclass(frozen=True)
class ResolvedInputs:
    """The sources of one command, in order."""

    sources: list[TextSource]
    origins: list[dict[str, Any]]
    """What each --input is: `path` (a name without folder), `bytes` on disk (None where not known), `files` of a folder, `config`
    and `split` of a data set."""
    messages: list[str]
    """What the user should be told, a line each."""

    @property
    def size(self) -> int:
        """Bytes on disk; a file of the Hub counts a fixed guess."""
        return sum(source.size for source in self.sources)

    @property
    def known_size(self) -> int | None:
        """`size`, or None where part of it is a guess."""
        return self.size if all(source.is_size_known for source in self.sources) else None

    def files(self) -> Iterator[tuple[str, int, int]]:
        """(path, bytes, time of the last change in ns) of every file, as found: what shows that the input is still the same."""
        for source in self.sources:
            yield from source.file_stats or [(source.name, source.end, 0)]

    def check_unchanged(self, spans: "Sequence[DocumentRange] | None" = None) -> None:
        """Raise InputError when a file that `spans` (None: everything) are read from is not what it was when it was found."""
        for span in full_ranges(self) if spans is None else spans:
            for path, size, changed in self.sources[span.source].file_stats_between(span.start, span.stop):
                try:
                    stat = os.stat(path)
                except OSError as error:
                    reason = error.strerror
                else:
                    if (stat.st_size, stat.st_mtime_ns) == (size, changed):
                        continue
                    reason = "found another time of its last change, expected the same"
                    if stat.st_size != size:
                        reason = f"found {stat.st_size:,} bytes, expected {size:,}"
                raise InputError(f"{path}: changed while it was read: {reason}; start again when nothing writes to it")


@dataclass(frozen=True)
class DocumentRange:
    """A run of documents of one source, between two places."""

    source: int
    start: int
    stop: int


def resolve_inputs(settings: InputConfig, keys: Sequence[str]) -> ResolvedInputs:
    """Look at every --input. Raises InputError for what is missing, empty, of no known kind or without the columns `keys`."""
    if not settings.input:
        raise InputError(f"--input: nothing given, expected {EXPECTED}")
    inputs, kinds = ResolvedInputs([], [], []), set()
    for name in settings.input:
        path = Path(name)
        if not os.path.exists(path) and _may_be_on_hub(name):
            from megaenc.data.sources.arrow_tables import HubDataset

            kinds.add("hub")
            source = HubDataset(name, settings.dataset_config, settings.dataset_split, keys)
            inputs.sources.append(source)
            origin = {"path": name, "bytes": None, "config": settings.dataset_config, "split": settings.dataset_split}
            inputs.messages.append(f"{name}: streamed from the Hugging Face Hub, {source.end:,} files")
        else:
            found = _find_files(path, inputs.messages) if os.path.isdir(path) and not _is_saved_dataset(path) else [_classify_file(path)]
            kinds |= {kind for kind, _ in found}
            sources = list(_build_sources(found, settings, keys))
            inputs.sources.extend(sources)
            origin = {"path": path.resolve().name, "bytes": sum(source.size for source in sources)}
            if path.is_dir():
                origin["files"] = sum(len(source.file_stats) for source in sources)
        inputs.origins.append(origin)
    # A flag that changes nothing is a mistake.
    if settings.sample_by != "document" and "text" not in kinds:
        raise InputError(f"--sample-by {settings.sample_by}: none of --input is a text file (.txt, .text, .md)")
    if settings.dataset_config is not None and "hub" not in kinds:
        raise InputError(f"--dataset-config {settings.dataset_config}: none of --input is a data set of the Hugging Face Hub")
    if settings.dataset_split != "train" and not kinds & {"hub", "saved"}:
        raise InputError(f"--dataset-split {settings.dataset_split}: none of --input is a data set, saved or on the Hub")
    return inputs


def read_blocks(inputs: ResolvedInputs, spans: Sequence[DocumentRange] | None = None) -> Iterator[TextBlock]:
    """The blocks of `spans` (None: of everything) in order. Raises InputError for what cannot be read."""
    before = [0, *accumulate(source.size for source in inputs.sources)]
    for span in full_ranges(inputs) if spans is None else spans:
        yield from inputs.sources[span.source].read_blocks(span.start, span.stop, before[span.source])


def read_texts(inputs: ResolvedInputs, key: str) -> Iterator[str]:
    """The text under `key` of every document. Raises InputError as `read_blocks` does and for a bad document."""
    for block in read_blocks(inputs):
        for (text,) in block.documents([key], False).texts:
            yield text


def full_ranges(inputs: ResolvedInputs) -> list[DocumentRange]:
    """Every source from its beginning to its end."""
    return [DocumentRange(number, 0, source.end) for number, source in enumerate(inputs.sources)]


def partition_inputs(inputs: ResolvedInputs, count: int) -> list[list[DocumentRange]]:
    """The input in at most `count` parts: together they are everything in order; alike in bytes, as far as places allow."""
    ends = list(accumulate(source.size for source in inputs.sources))
    edges = [(0, 0)]
    for number in range(1, count) if inputs.size else ():
        target = inputs.size * number // count
        at = bisect.bisect_right(ends, target)
        source = inputs.sources[at]
        place = source.find_split_point(target - (ends[at] - source.size))
        edges.append((at, place) if place < source.end else (at + 1, 0))
    edges.append((len(inputs.sources), 0))
    parts = []
    for (first, start), (last, stop) in pairwise(edges):
        spans = [DocumentRange(at, 0, inputs.sources[at].end) for at in range(first, last)]
        if spans:
            spans[0] = DocumentRange(first, start, spans[0].stop)
        if stop:
            spans.append(DocumentRange(last, start if last == first else 0, stop))
        if any(span.start < span.stop for span in spans):
            parts.append(spans)
    return parts or [full_ranges(inputs)]


def format_paths(paths: Sequence[str]) -> str:
    """The first names of a list of paths, for a message; bytes that are no UTF-8 do not break the line."""
    names = ", ".join(os.fsencode(path).decode("utf-8", "replace") for path in paths[:3])
    return f"{names} and {len(paths) - 3:,} more" if len(paths) > 3 else names


def _build_sources(found: Sequence[tuple[str, str]], settings: InputConfig, keys: Sequence[str]) -> Iterator[TextSource]:
    for kind, paths in groupby(found, key=lambda entry: entry[0]):
        if kind == "text" and settings.sample_by == "document":
            yield TextGroup([path for _, path in paths])
            continue
        for _, path in paths:
            if kind in ("parquet", "saved"):
                from megaenc.data.sources import arrow_tables  # pyarrow is not needed for JSONL, and takes its time

                is_file = kind == "parquet"
                yield from (
                    [arrow_tables.ParquetFile(path, keys)]
                    if is_file
                    else arrow_tables.find_saved_dataset_files(path, settings.dataset_split, keys)
                )
            else:
                yield LineFile(path, settings.sample_by if kind == "text" else None)


def _classify_file(path: Path) -> tuple[str, str]:
    """(kind, path) of what was named itself: by its name, else JSONL, but Parquet is known by its first bytes."""
    if _is_saved_dataset(path):
        return "saved", str(path)
    if not os.path.exists(path):
        raise InputError(f"{path}: no such file or folder; expected {EXPECTED}")
    if not path.is_file():
        raise InputError(f"{path}: not a file; expected {EXPECTED}")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: is empty; expected {EXPECTED}")
    try:
        with open(path, "rb") as stream:
            is_parquet = stream.read(4) == b"PAR1"
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return "parquet" if is_parquet else _kind_from_suffix(path.name) or "jsonl", str(path)


def _find_files(folder: Path, remarks: list[str]) -> list[tuple[str, str]]:
    """(kind, path) of what can be read under `folder`, in the order of the paths; hidden names are left alone.

    Links are followed, each folder once: under the first of its paths that the walk comes to, names in their order.
    """
    found, unknown, again = [], [], []
    visited = {_folder_identity(folder)}

    def unreadable(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}")

    for where, folders, files in os.walk(folder, onerror=unreadable, followlinks=True):
        inner = os.path.relpath(where, folder)
        here = []
        for name in sorted(folders):
            path, full = os.path.normpath(os.path.join(inner, name)), os.path.join(where, name)
            if name.startswith("."):
                continue
            if (identity := _folder_identity(full)) in visited:
                again.append(path)
                continue
            visited.add(identity)
            if _is_saved_dataset(Path(full)):
                found.append((path, "saved", full))
            else:
                here.append(name)
        folders[:] = here
        for name in files:
            path, full = os.path.normpath(os.path.join(inner, name)), os.path.join(where, name)
            if name.startswith("."):
                continue
            if (kind := _kind_from_suffix(name)) and os.path.isfile(full):
                found.append((path, kind, full))
            else:
                unknown.append(path)
    unknown.sort()
    if not found:
        raise InputError(f"{folder}: holds nothing to read{f' but {format_paths(unknown)}' if unknown else ''}; expected {EXPECTED}")
    if unknown:
        remarks.append(f"{folder}: {len(unknown):,} left out, of no kind that can be read: {format_paths(unknown)}")
    if again:
        remarks.append(f"{folder}: {len(again):,} folders left out, as links have them read under another path: {format_paths(again)}")
    found.sort()
    counts = {kind: sum(entry[1] == kind for entry in found) for kind in sorted({entry[1] for entry in found})}
    remarks.append(f"{folder}: " + ", ".join(f"{count:,} {_KIND_NAMES[kind]}" for kind, count in counts.items()))
    return [(kind, full) for _, kind, full in found]


def _folder_identity(folder: str | Path) -> tuple[int, int]:
    try:
        stat = os.stat(folder)
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from None
    return stat.st_dev, stat.st_ino


def _kind_from_suffix(name: str) -> str | None:
    """jsonl, text or parquet by the end of a file's name; None for another."""
    if name.endswith(".parquet"):
        return "parquet"
    bare = re.sub(r"\.(gz|zst)$", "", name)
    return _SUFFIX_KINDS.get(os.path.splitext(bare)[1])


def _is_saved_dataset(path: Path) -> bool:
    # os.path and not Path, which raises an error for a name that is too long.
    has_splits = os.path.isfile(path / "dataset_dict.json")
    return has_splits or all(os.path.isfile(path / name) for name in ("state.json", "dataset_info.json"))


def _may_be_on_hub(name: str) -> bool:
    """Whether `name` can be one of the Hub: `owner/name` or `name`, and neither its folder nor its ending makes it a path."""
    is_path = _kind_from_suffix(name) is not None or name.endswith((".gz", ".zst")) or ("/" in name and os.path.isdir(Path(name).parent))
    return _HUB_NAME.fullmatch(name) is not None and not is_path
