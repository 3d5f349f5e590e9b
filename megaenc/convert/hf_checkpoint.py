"""A Hugging Face model folder: its config.json and its safetensors, one tensor at a time."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from megaenc.errors import InputError
from megaenc.json_files import read_json_object

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = ("F32", "BF16", "F16")
_COMPUTED = ".rotary_emb.inv_freq"  # older versions of transformers saved these angles with the weights
# Fields of config.json that tell transformers how to load a model (from where, by whose code) or what it returns besides states.
_LOADING = re.compile(
    "_.*|attn_implementation|auto_map|configuration_files|distributed_config|dtype|experts_implementation|fusion_config|id2label"
    "|kernel_config|label2id|name_or_path|num_labels|output_attentions|output_hidden_states|problem_type|return_dict|torch_dtype"
    "|transformers_weights|trust_remote_code|use_kernels"
)
# Fields that count layers, or parts of one, each of which costs memory before any weight is compared with them.
_COUNT = re.compile(r".*(layer|group|expert|block|stage|head)s?(_num)?")
_MOST, _MOST_EXPERTS = 4096, 1 << 15  # of any of them, unless a folder holds more tensors


class TensorHeader(NamedTuple):
    """A tensor as the header of its file describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class HFCheckpoint:
    """The settings of a model and the headers of its weights, by the names that the files give them. No pickle is ever read.

    `config` is what config.json says of the model, without what it says of how to load it.
    """

    def __init__(self, path: Path, flag: str = "--input"):
        """Read config.json and the headers. InputError, naming the file, for what is missing, damaged or a pickle.

        `flag` names where the path came from.
        """
        self.path, self.flag = path, flag
        if not os.path.isdir(path):  # False for a name that is too long too
            raise InputError(
                f"{flag} {path}: no such folder, expected one with {CONFIG} and {WEIGHTS} (hf download gets it from the Hub)"
            )
        self.config_file = path / CONFIG
        values = read_json_object(self.config_file, f"the {CONFIG} of a Hugging Face model")
        self.config: dict[str, Any] = _drop_loading_fields(values)
        self.files, indexed = _find_weight_files(path)
        self.headers: dict[str, TensorHeader] = {}
        for file in self.files:
            with _open_safetensors(file, "np") as tensors:
                for name in tensors.keys():  # noqa: SIM118, which is no dict
                    if name in self.headers:
                        already = self.headers[name].file.name
                        raise InputError(f"{file}: holds `{name}` a second time (it is in {already} already)")
                    header = tensors.get_slice(name)
                    if not name.endswith(_COMPUTED):
                        self.headers[name] = TensorHeader(file, header.get_dtype(), tuple(header.get_shape()))
        for name, file in indexed.items():
            if not name.endswith(_COMPUTED) and (name not in self.headers or self.headers[name].file.name != file):
                raise InputError(f"{path / file}: no tensor `{name}`, which {INDEX} says is there")
        _check_counts(self.config, max(_MOST, len(self.headers)), self.config_file)

    @contextlib.contextmanager
    def slices(self) -> Iterator[dict[str, Any]]:
        """Yield the safetensors slice of each weight by its name; a slice can be read while the block lasts."""
        with contextlib.ExitStack() as stack:
            opened = {file: stack.enter_context(_open_safetensors(file, "pt")) for file in self.files}
            yield {name: opened[header.file].get_slice(name) for name, header in self.headers.items()}


class TrainableHFCheckpoint(HFCheckpoint):
    """Names, shapes and dtypes of all weights of a model that training can start from, and the weights one by one.

    Weights have the names that a model with an output layer gives them (`model.norm.weight`), whether the folder is of such a
    model or of one without, which leaves `model.` out.
    """

    def __init__(self, path: Path):
        """Read config.json, generation_config.json and the headers. InputError for what HFFolder or training cannot take."""
        super().__init__(path)
        generation = path / GENERATION
        self.generation: dict[str, Any] = _read_generation_config(generation) if generation.exists() else {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, tuple[Path, str]] = {}
        for stored, (file, dtype, shape) in self.headers.items():
            name = stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"
            if name in self._stored:
                raise InputError(f"{file}: holds `{stored}` a second time (it is in {self._stored[name][0].name} already)")
            if dtype not in _DTYPES:
                raise InputError(f"{file}: tensor `{stored}`: found dtype {dtype}, expected one of {', '.join(_DTYPES)}")
            self._stored[name], self.shapes[name] = (file, stored), shape

    @property
    def dtypes(self) -> set[str]:
        """The dtypes of the weights, as safetensors calls them."""
        return {header.dtype for header in self.headers.values()}

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

    def tensor(self, name: str) -> "Tensor":
        """The weight `name`. It lies in the pages of its file, which leave memory with it: so the file is not kept open."""
        file, stored = self._stored[name]
        with _open_safetensors(file, "pt") as tensors:
            return tensors.get_tensor(stored)

    def iter_row_chunks(self, name: str, rows: int) -> "Iterator[Tensor]":
        """The same in pieces of `rows` rows, for the largest ones."""
        file, stored = self._stored[name]
        for start in range(0, self.shapes[name][0], rows):
            with _open_safetensors(file, "pt") as tensors:
                yield tensors.get_slice(stored)[start : start + rows]


def _drop_loading_fields(value: Any) -> Any:
    """Drop the fields, at any depth, that tell transformers how to load a model."""
    if isinstance(value, dict):
        return {name: _drop_loading_fields(inner) for name, inner in value.items() if not _LOADING.fullmatch(name)}
    return [_drop_loading_fields(inner) for inner in value] if isinstance(value, list) else value


def _check_counts(values: Any, most: int, file: Path) -> None:
    """InputError for more layers, or parts of one, than a model has whose weights a folder can hold."""
    for name, value in values.items():
        if isinstance(value, dict):
            _check_counts(value, most, file)
        elif _COUNT.fullmatch(name) and isinstance(value, int | float):
            allowed = max(most, _MOST_EXPERTS) if "expert" in name else most
            if value > allowed:
                raise InputError(
                    f"{file}: field `{name}`: found {shorten_repr(value)}, expected at most {allowed}, as the weights tell"
                )


def _find_weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that hold the weights, and what the index, where there is one, says which tensor is in."""
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS], {}
    if not (path / INDEX).exists():
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            raise InputError(
                f"{path / pickles[0]}: a pickle, which could run any code when it is loaded, so it is not; expected {WEIGHTS} "
                "(save_pretrained of transformers writes it)"
            )
        raise InputError(f"{path}: no {WEIGHTS} and no {INDEX} there, expected the weights of a model")
    index = read_json_object(path / INDEX, "the file of each tensor").get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
        raise InputError(f"{path / INDEX}: found no `weight_map`, expected the file of each tensor")
    for file in sorted({*index.values()}):
        if Path(file).name != file or "\0" in file:
            raise InputError(f"{path / INDEX}: found {shorten_repr(file)}, expected the name of a file in the same folder")
        if not (path / file).exists():
            raise InputError(f"{path / file}: missing, and {INDEX} says that weights are there; get the whole folder again")
    return [path / file for file in sorted({*index.values()})], index


def _read_generation_config(file: Path) -> dict[str, Any]:
    """What generation_config.json holds, if transformers takes it for that."""
    from transformers import GenerationConfig

    values = read_json_object(file, "how the model writes text")
    try:
        GenerationConfig.from_dict(values).validate()
    except Exception as error:  # whatever a wrong type leads to
        raise InputError(f"{file}: {' '.join(str(error).split())[:200]}; expected how the model writes text") from None
    ends = values.get("eos_token_id")
    if not all(type(token) is int for token in (ends if isinstance(ends, list) else [] if ends is None else [ends])):
        raise InputError(f"{file}: field `eos_token_id`: found {shorten_repr(ends)}, expected ids of tokens")
    return values


def shorten_repr(value: Any) -> str:
    """Return `value` for an error message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def _open_safetensors(file: Path, framework: str) -> Iterator[Any]:
    """Open the safetensors of a regular file; InputError for any other."""
    if not file.is_file():  # a FIFO has no end
        raise InputError(f"{file}: not a regular file, expected the weights of a model")
    try:
        tensors = safe_open(file, framework)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: no whole safetensors file ({error}); get it again") from None
    with tensors:
        yield tensors
