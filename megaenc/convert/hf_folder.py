"""A Hugging Face model folder: its config.json and its safetensors, one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaenc.errors import InputError

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = ("F32", "BF16", "F16")
_COMPUTED = ".rotary_emb.inv_freq"  # older versions of transformers saved these angles with the weights


class HFFolder:
    """Names, shapes and dtypes of all weights, known from the files' headers; the weights themselves are read when asked for.

    Weights have the names that a model with an output layer gives them (`model.norm.weight`), whether the folder is of such a
    model or of one without, which leaves `model.` out.
    """

    def __init__(self, path: Path):
        """Read config.json and the headers. InputError, naming the file, for what is missing, damaged or a pickle."""
        self.path = path
        if not path.is_dir():
            raise InputError(
                f"--input {path}: no such folder, expected one with {CONFIG} and {WEIGHTS} (hf download gets it from the Hub)"
            )
        self.config_file = path / CONFIG
        self.config: dict[str, Any] = read_json(self.config_file)
        generation = path / GENERATION
        self.generation: dict[str, Any] = _generation(generation) if generation.is_file() else {}
        self.files, indexed = _weight_files(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: set[str] = set()
        self._stored: dict[str, tuple[Path, str]] = {}
        for file in self.files:
            self._read_header(file)
        stored = {(file.name, name) for file, name in self._stored.values()}
        for name, file in indexed.items():
            if (file, name) not in stored and not name.endswith(_COMPUTED):
                raise InputError(f"{path / file}: no tensor `{name}`, which {INDEX} says is there")

    def _read_header(self, file: Path) -> None:
        with _opened(file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118, which is no dict
                if stored.endswith(_COMPUTED):
                    continue
                name = stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"
                if name in self._stored:
                    raise InputError(f"{file}: holds `{stored}` a second time (it is in {self._stored[name][0].name} already)")
                header = tensors.get_slice(stored)
                dtype = header.get_dtype()
                if dtype not in _DTYPES:
                    raise InputError(f"{file}: tensor `{stored}`: found dtype {dtype}, expected one of {', '.join(_DTYPES)}")
                self._stored[name] = (file, stored)
                self.shapes[name] = tuple(header.get_shape())
                self.dtypes.add(dtype)

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: set[str]) -> None:
        """InputError names the first weight that is missing, of another shape, or neither `expected` nor `optional`."""
        for name, shape in expected.items():
            if name not in self.shapes:
                raise InputError(f"{self.path}: no tensor `{name}`, expected one of shape {list(shape)}")
            if self.shapes[name] != tuple(shape):
                raise InputError(f"{self.path}: tensor `{name}`: found shape {list(self.shapes[name])}, expected {list(shape)}")
        for name, (file, stored) in self._stored.items():
            if name not in expected and name not in optional:
                raise InputError(f"{file}: tensor `{stored}`: found a weight that {CONFIG} has no place for")

    def tensor(self, name: str) -> Tensor:
        """The weight `name`. It lies in the pages of its file, which leave memory with it: so the file is not kept open."""
        file, stored = self._stored[name]
        with _opened(file) as tensors:
            return tensors.get_tensor(stored)

    def in_parts(self, name: str, rows: int) -> Iterator[Tensor]:
        """The same in pieces of `rows` rows, for the largest ones."""
        file, stored = self._stored[name]
        for start in range(0, self.shapes[name][0], rows):
            with _opened(file) as tensors:
                yield tensors.get_slice(stored)[start : start + rows]


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that hold the weights, and what the index, where there is one, says which tensor is in."""
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS], {}
    if not (path / INDEX).is_file():
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            raise InputError(
                f"{path / pickles[0]}: a pickle, which could run any code when it is loaded, so it is not; expected {WEIGHTS} "
                "(save_pretrained of transformers writes it)"
            )
        raise InputError(f"{path}: no {WEIGHTS} and no {INDEX} there, expected the weights of a model")
    index = read_json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise InputError(f"{path / INDEX}: found no `weight_map`, expected the file of each tensor")
    for file in sorted({*index.values()}):
        if Path(file).name != file:
            raise InputError(f"{path / INDEX}: found {file!r}, expected the name of a file in the same folder")
        if not (path / file).is_file():
            raise InputError(f"{path / file}: missing, and {INDEX} says that weights are there; get the whole folder again")
    return [path / file for file in sorted({*index.values()})], index


def _generation(file: Path) -> dict[str, Any]:
    """What generation_config.json holds, if transformers takes it for that."""
    from transformers import GenerationConfig

    values = read_json(file)
    try:
        GenerationConfig.from_dict(values).validate()
    except Exception as error:  # whatever a wrong type leads to
        raise InputError(f"{file}: {' '.join(str(error).split())[:200]}; expected how the model writes text") from None
    ends = values.get("eos_token_id")
    if not all(type(token) is int for token in (ends if isinstance(ends, list) else [] if ends is None else [ends])):
        raise InputError(f"{file}: field `eos_token_id`: found {ends!r}, expected ids of tokens")
    return values


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; InputError where there is none."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}; expected the {file.name} of a Hugging Face model") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: no JSON ({error})") from None
    if not isinstance(values, dict):
        raise InputError(f"{file}: found a {type(values).__name__}, expected an object")
    return values


class _opened:
    """safe_open, whose errors become one line."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> Any:
        try:
            self._tensors = safe_open(self.file, "pt")
            return self._tensors.__enter__()
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.file}: no whole safetensors file ({error}); get it again") from None

    def __exit__(self, *error: Any) -> None:
        self._tensors.__exit__(*error)
