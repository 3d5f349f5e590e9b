"""Safe unpickling of checkpoints: their pickles are read with allow-lists and rewritten before torch unpickles them."""

import contextlib
import hashlib
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, planner
from torch.distributed.checkpoint import metadata as dcp
from torch.serialization import _get_layout

from megaenc.console import truncate_text
from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_regular_file
from megaenc.training.checkpoint_dir import DamagedCheckpointError

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
EXTRA_STATES = "extra_states"
"""File that replaces every pickled object among the tensors, written next to the rewritten files."""
SHARD = re.compile(r"__\d+_\d+\.distcp")
# Bytes; `.metadata` has some 400 for each shard of a tensor, and 1b on 8 ranks has 8,000 shards.
_LIMITS = {METADATA: 32 << 20, COMMON: 1 << 20, FORMAT: 1 << 10}
_WRITTEN_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_WRITTEN_FORMAT |= {"common_backend": "torch", "common_backend_version": 1}


class _RefusedPickleError(Exception):
    """An opcode or class in a pickle that the allow-lists refuse."""


def _get_enum_member(kind: Any, name: Any) -> Enum:
    """Return a member of an enumeration, the only permitted use of `getattr` in a pickle."""
    if not (isinstance(kind, EnumType) and type(name) is str and name in kind.__members__):
        raise _RefusedPickleError("builtins.getattr")
    return kind[name]


_CLASSES = (
    *(dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata),
    *(dcp.ChunkStorageMetadata, dcp.TensorProperties, planner.SavePlan, planner.WriteItem, planner.TensorWriteData),
    *(filesystem._StorageInfo, filesystem._StoragePrefix),
)
_CALLS: dict[Callable, tuple[type, ...]] = {  # with the types of their arguments
    torch.Size: (tuple,),
    _get_layout: (str,),
    planner.WriteItemType: (int,),
    dcp._MEM_FORMAT_ENCODING: (int,),
    _get_enum_member: (EnumType, str),
}
_GLOBALS = {(value.__module__, value.__qualname__): value for value in (*_CLASSES, *_CALLS) if value is not _get_enum_member}
_GLOBALS |= {("torch", "Size"): torch.Size, ("builtins", "getattr"): _get_enum_member}  # Python 3.11.2 writes members by getattr
_GLOBALS |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_PLAIN = (
    *(pickle.MARK, pickle.STOP, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT, pickle.BINUNICODE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_TUPLE),
    *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.APPEND, pickle.APPENDS, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINGET, pickle.LONG_BINGET),
)


def _opcode_handlers(*codes: bytes) -> dict[int, Callable]:
    """Return the handlers of the opcodes `codes` in Python's own unpickler."""
    return {code[0]: pickle._Unpickler.dispatch[code[0]] for code in codes}


def _type_name(value: Any) -> str:
    """Return the name of `value` if it is a class or function, else the name of its class."""
    return value.__name__ if callable(value) else type(value).__name__


class _PlainUnpickler(pickle._Unpickler):  # not the C one, with which a pickle can change attributes of a class
    """Unpickler of plain values that accepts only the protocol and the opcodes that a save writes.

    No opcode imports anything, and memory is bounded by a constant times the size of the pickle (see `_count_items`).
    """

    PROTOCOL = 2
    dispatch: ClassVar[dict] = _opcode_handlers(*_PLAIN, pickle.BINPUT, pickle.LONG_BINPUT)

    def __init__(self, content: bytes) -> None:
        header = pickle.PROTO + bytes([self.PROTOCOL])
        if not content.startswith(header):
            raise ValueError(f"begins with {content[:2]!r}, expected a pickle of protocol {self.PROTOCOL}")
        super().__init__(io.BytesIO(content[len(header) :]))
        self._budget = len(content)

    def _count_items(self, items: int) -> None:
        """Count copied items and raise ValueError if they exceed the bytes of the pickle, as they never do in a save's."""
        self._budget -= items
        if self._budget < 0:
            raise ValueError("unpickling it would take much more memory than its size allows")

    def _check_keys(self, keys: list) -> None:
        """Raise _RefusedPickleError for dictionary keys that are not strings or integers: hashing others may take forever."""
        for key in keys:
            if type(key) not in (str, int):
                raise _RefusedPickleError(f"the hash of a {type(key).__name__}")

    def load_setitem(self) -> None:
        """Handle opcode SETITEM: set an item of a dictionary; _RefusedPickleError for a key of an unsafe class."""
        self._check_keys(self.stack[-2:-1])
        super().load_setitem()

    def load_setitems(self) -> None:
        """Handle opcode SETITEMS: set items of a dictionary; _RefusedPickleError for a key of an unsafe class."""
        self._check_keys(self.stack[::2])
        super().load_setitems()

    def load_global(self) -> None:
        """Handle opcode GLOBAL, a class or function: always raise _RefusedPickleError, as plain values have none."""
        module, name = (self.readline()[:-1].decode("utf-8", errors="replace") for _ in range(2))
        raise _RefusedPickleError(f"{module}.{name}")

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.GLOBAL[0]] = load_global


class _MetadataUnpickler(_PlainUnpickler):
    """Unpickler of `.metadata` that builds objects of a few classes which only hold values."""

    PROTOCOL = 4
    dispatch: ClassVar[dict] = _opcode_handlers(*_PLAIN, pickle.FRAME, pickle.MEMOIZE, pickle.SHORT_BINUNICODE)

    def _check_keys(self, keys: list) -> None:
        """Raise _RefusedPickleError for keys other than strings, integers and MetadataIndex objects of plain values."""
        others = [key for key in keys if type(key) is not dcp.MetadataIndex]
        super()._check_keys(others)
        for key in (key for key in keys if type(key) is dcp.MetadataIndex):
            if type(key.fqn) is not str or type(key.offset) not in (torch.Size, type(None)):
                raise _RefusedPickleError("the hash of a MetadataIndex of other values")

    def load_stack_global(self) -> None:
        """Handle opcode STACK_GLOBAL: push a class or function of the allow-list, else raise _RefusedPickleError."""
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:  # others may take forever to print or hash
            raise _RefusedPickleError("a class without a name")
        if (module, name) not in _GLOBALS:
            raise _RefusedPickleError(f"{module}.{name}")
        self.append(_GLOBALS[module, name])

    def load_newobj(self) -> None:
        """Handle opcode NEWOBJ: push an empty object of a class of the allow-list, else raise _RefusedPickleError."""
        arguments, cls = self.stack.pop(), self.stack.pop()
        if cls not in _CLASSES or arguments != ():
            raise _RefusedPickleError(f"{_type_name(cls)} as no save does")
        self.append(cls.__new__(cls))

    def load_reduce(self) -> None:
        """Handle opcode REDUCE: replace an allowed function on the stack by its result; _RefusedPickleError for others."""
        arguments, function = self.stack.pop(), self.stack[-1]
        kinds = _CALLS.get(function, ()) if callable(function) else ()
        expected = type(arguments) is tuple and len(arguments) == len(kinds) and all(map(isinstance, arguments, kinds))
        if not (kinds and expected):
            raise _RefusedPickleError(
                "builtins.getattr" if function is _get_enum_member else f"{_type_name(function)} as no save does"
            )
        self._count_items(len(arguments[0]) if function is torch.Size else 1)
        self.stack[-1] = function(*arguments)

    def load_build(self) -> None:
        """Handle opcode BUILD: set attributes of an object of a class of the allow-list, else raise _RefusedPickleError."""
        state, value = self.stack[-1], self.stack[-2]
        if type(value) not in _CLASSES or type(state) is not (tuple if type(value) is dcp.TensorProperties else dict):
            raise _RefusedPickleError(f"a change of {_type_name(value)}")
        self._count_items(len(state))
        if type(state) is dict and not all(type(name) is str and not name.startswith("__") for name in state):
            raise _RefusedPickleError(f"a change of a method of {type(value).__name__}")
        super().load_build()

    dispatch |= {pickle.STACK_GLOBAL[0]: load_stack_global, pickle.NEWOBJ[0]: load_newobj}
    dispatch |= {pickle.REDUCE[0]: load_reduce, pickle.BUILD[0]: load_build}
    dispatch |= {pickle.SETITEM[0]: _PlainUnpickler.load_setitem, pickle.SETITEMS[0]: _PlainUnpickler.load_setitems}


def rewrite_pickles(folder: Path, entries: dict[str, dict[str, Any]] | None = None) -> dict[str, bytes]:
    """Return checkpoint `folder`'s pickles as bytes by name, rewritten; InputError if not plain or not as in `entries`.

    These are `.metadata`, `common.pt` and `metadata.json`, and `extra_states` in place of objects among the tensors; torch reads
    the tensors with its own allow-list. `entries`: size and SHA-256 of the verified files. InputError, naming file and class,
    for anything but plain values; DamagedCheckpointError if a file has changed since its verification.
    """
    contents = {}
    for name, limit in _LIMITS.items():
        with _convert_read_errors(folder / name):
            contents[name] = read_regular_file(folder / name, limit)
            if entries is not None and hashlib.sha256(contents[name]).hexdigest() != entries[name]["sha256"]:
                raise DamagedCheckpointError(f"{folder / name}: its content changed while it was read; the checkpoint is damaged")
    with _convert_read_errors(folder / FORMAT):
        if (checkpoint_format := parse_json(contents[FORMAT])) != _WRITTEN_FORMAT:
            raise ValueError(f"found {checkpoint_format}")
    with _convert_read_errors(folder / COMMON):
        rewritten = {COMMON: _build_archive(_read_plain_values(contents[COMMON])), EXTRA_STATES: _build_archive([None])}
    with _convert_read_errors(folder / METADATA):
        rewritten[METADATA] = pickle.dumps(_replace_objects(_MetadataUnpickler(contents[METADATA]).load()))
    return rewritten | {FORMAT: json.dumps(_WRITTEN_FORMAT).encode()}


def check_loadable(folder: Path) -> None:
    """Raise RuntimeError if the new checkpoint `folder` cannot be loaded: common.pt not plain, or .metadata too large."""
    try:
        _read_plain_values(read_regular_file(folder / COMMON, _LIMITS[COMMON]))
        if (size := (folder / METADATA).stat().st_size) > _LIMITS[METADATA]:
            raise ValueError(f"{METADATA} has {size:,} bytes, expected at most {_LIMITS[METADATA]:,}")
    except Exception as error:
        raise RuntimeError(f"{folder}: the saved checkpoint cannot be loaded: {type(error).__name__}: {error}") from error


def _read_plain_values(content: bytes) -> Any:
    """Return the values in the `content` of `common.pt`; raise for anything but dictionaries, lists, text and numbers."""
    values = _PlainUnpickler(_read_archived_pickle(content)).load()
    _check_value_count(values, len(content))
    return values


def _replace_objects(metadata: dcp.Metadata) -> dcp.Metadata:
    """Return the part of `metadata` needed for loading, with pickled objects redirected to the file EXTRA_STATES."""
    kinds, storage = dict(metadata.state_dict_metadata), {}
    stand_in = filesystem._StorageInfo(EXTRA_STATES, 0, len(_build_archive([None])))
    for index, info in metadata.storage_data.items():
        if type(info) is not filesystem._StorageInfo or info.transform_descriptors or not SHARD.fullmatch(info.relative_path):
            raise _RefusedPickleError(f"a transform, or reads another file than {SHARD.pattern}")
        storage[index] = info
        if type(kinds.get(index.fqn)) is not dcp.TensorStorageMetadata:
            if "._extra_state/" not in index.fqn:
                raise _RefusedPickleError(f"an object in the place of the tensor {index.fqn}")
            storage[index], kinds[index.fqn] = stand_in, dcp.BytesStorageMetadata()
    if others := {type(kind).__name__ for kind in kinds.values()} - {"TensorStorageMetadata", "BytesStorageMetadata"}:
        raise _RefusedPickleError(", ".join(sorted(others)))
    return dcp.Metadata(kinds, storage_data=storage)


def _read_archived_pickle(content: bytes) -> bytes:
    """Return the pickle inside the uncompressed archive `content` of torch.save."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        [entry] = (entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(content):
            raise ValueError(f"{entry.filename} is compressed")
        return archive.read(entry)


def _build_archive(value: Any) -> bytes:
    """Return the bytes that torch.save writes for `value`."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _check_value_count(value: Any, limit: int) -> None:
    """Raise ValueError if the nested `value` holds more than `limit` values, repeated references counted each time."""
    pending, count = [value], 0
    while pending:
        each = pending.pop()
        pending.extend(each.values() if type(each) is dict else each if type(each) in (list, tuple) else ())
        count += 1
        if count + len(pending) > limit:
            raise ValueError("its values would take much more memory than its size allows")


@contextlib.contextmanager
def _convert_read_errors(file: Path) -> Iterator[None]:
    """Convert errors of reading the pickles of `file` inside the context into an InputError of one line."""
    try:
        yield
    except _RefusedPickleError as error:
        raise InputError(
            f"{file}: unpickling it would call {truncate_text(str(error))}, expected tensors and plain values; "
            "it was not read: do not use this checkpoint"
        ) from None
    except InputError:
        raise
    except Exception as error:  # any error of a malformed pickle
        raise InputError(f"{file}: not written by a save ({truncate_text(repr(error))}); do not use this checkpoint") from None
