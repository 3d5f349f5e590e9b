"""The pickles inside a checkpoint, read through allow-lists before torch and megatron-core unpickle them."""

import io
import json
import pickle
import re
from enum import Enum, EnumType
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import get_unsafe_globals_in_checkpoint

from megaenc.errors import InputError

METADATA, COMMON, FORMAT = ".metadata", "common.pt", "metadata.json"
_KNOWN_FILES = re.compile(r"\.metadata|common\.pt|metadata\.json|state\.json|__\d+_\d+\.distcp")
_WRITTEN_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_WRITTEN_FORMAT |= {"common_backend": "torch", "common_backend_version": 1}

_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}.metadata", name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (f"{_DCP}.metadata", "TensorProperties"),
    *((f"{_DCP}.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    *((f"{_DCP}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)),
}


class _Refused(Exception):
    pass


def _member(kind: Any, name: Any) -> Enum:
    """What `getattr` does for a member of an enumeration, and nothing else that it could do."""
    if not (isinstance(kind, EnumType) and type(name) is str and name in kind.__members__):
        raise _Refused("builtins.getattr")
    return kind[name]


class _MetadataReader(pickle._Unpickler):  # in Python: the C one lets a pickle change the attributes of a class it names
    dispatch: ClassVar[dict] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # by which Python 3.11.2, Debian 12's, writes members of an enumeration
            return _member
        if (module, name) not in _ALLOWED:
            raise _Refused(f"{module}.{name}")
        return super().find_class(module, name)

    def load_build(self) -> None:
        if callable(self.stack[-2]):
            raise _Refused(f"a change of {self.stack[-2].__name__}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def check_pickles(folder: Path) -> None:
    """InputError, naming file and class, where loading `folder` would unpickle more than tensors and plain values.

    These are all that loading unpickles: `.metadata`, `common.pt` and the objects that `.metadata` finds in the shards. The
    tensors there torch itself reads through its own allow-list.
    """
    for file in sorted(folder.iterdir()):
        if not _KNOWN_FILES.fullmatch(file.name) or not file.is_file():
            raise InputError(
                f"{file}: no file that a save writes; expected .metadata, common.pt, metadata.json and *.distcp alone"
            )
    with _expected(folder / FORMAT):
        found = json.loads((folder / FORMAT).read_text(encoding="utf-8"))
        if found != _WRITTEN_FORMAT:
            raise ValueError(f"found {found}")
    with _expected(folder / COMMON):
        _check_tensors(io.BytesIO((folder / COMMON).read_bytes()))
    with _expected(folder / METADATA):
        metadata = _MetadataReader(io.BytesIO((folder / METADATA).read_bytes())).load()
        objects = _objects(metadata)
    for name, offset, length in objects:
        with _expected(folder / name), open(folder / name, "rb") as stream:
            stream.seek(offset)
            _check_tensors(io.BytesIO(stream.read(length)))


def _objects(metadata: Metadata) -> list[tuple[str, int, int]]:
    """File, offset and length of every object that is not a tensor: torch unpickles these freely."""
    objects = []
    for index, info in metadata.storage_data.items():
        if not _KNOWN_FILES.fullmatch(info.relative_path) or info.transform_descriptors:
            raise _Refused(f"{info}")
        if type(metadata.state_dict_metadata.get(index.fqn)) is not TensorStorageMetadata:
            objects.append((info.relative_path, info.offset, info.length))
    return objects


def _check_tensors(stream: io.BytesIO) -> None:
    """Read what torch.save wrote, weights only, whatever the environment allows torch to do."""
    if unsafe := get_unsafe_globals_in_checkpoint(stream):
        raise _Refused(", ".join(sorted(unsafe)))
    stream.seek(0)
    torch.load(stream, map_location="cpu", weights_only=True)


class _expected:
    """Turns what reading the pickles of `file` raises into one line."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, _Refused):
            raise InputError(
                f"{self.file}: unpickling it would call {error}, expected tensors and plain values; it was not read: "
                "do not use this checkpoint"
            ) from None
        if isinstance(error, Exception):  # whatever a pickle that no save wrote leads to
            raise InputError(f"{self.file}: not what a save wrote ({error!r}); do not use this checkpoint") from None
