"""Readers of Hugging Face model directories.

They read config.json, and safetensors one tensor at a time.
"""

import contextlib
import math
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

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
# Prefixes in models with an output layer.
_WITH_OUTPUT_LAYER = (
    "model.",
    "lm_head.",
    "head.",
    "decoder.",
)
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOAT_DTYPES = ("F32", "BF16", "F16")
# Older versions of transformers saved these angles with the weights.
_COMPUTED = ".rotary_emb.inv_freq"
# Fields of config.json that tell transformers how to load a model (its source and code) or what it
# returns besides states.
_LOADING = re.compile(
    "_.*|attn_implementation|auto_map|configuration_files|distributed_config|dtype"
    "|experts_implementation|fusion_config|id2label|kernel_config|label2id|name_or_path"
    "|num_labels|output_attentions|output_hidden_states|problem_type|return_dict|torch_dtype"
    "|transformers_weights|trust_remote_code|use_kernels"
)
# Fields that count layers or parts of layers, which cost memory before any weight is checked.
_COUNT = re.compile(r".*(layer|group|expert|block|stage|head)s?(_num)?")
# Limits of these counts, unless a directory has more tensors.
_MAX_COUNT = 4096
_MAX_EXPERTS = 1 << 15


class TensorHeader(NamedTuple):
    """Tuple `file`, `dtype`, `shape` of a tensor, from its safetensors file's header.

    `file` is a Path, `dtype` text as safetensors names it, such as BF16.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]


class HFCheckpoint:
    """Hugging Face model directory with its config and the headers of its weights.

    `HFCheckpoint(path, flag)` takes the Path of a local directory, and the flag for errors
    (--input); it raises InputError if a file is missing or damaged, or the weights are a pickle.
    `config` is the content of config.json without the fields about loading, such as `auto_map`,
    `dtype` and `id2label`; `headers` has the TensorHeader of each weight by its name in the files.
    Weights are read only in `slices`.
    """

    def __init__(self, path: Path, flag: str = "--input"):
        """Read config.json and the headers of the directory `path`.

        Args:
            flag: Flag that the directory was given with, for errors.

        Raises:
            InputError: A file is missing or damaged, or the weights are a pickle.
        """
        self.path = path
        self.flag = flag
        if not os.path.isdir(path):  # False for a name that is too long too
            raise InputError(
                f"{flag} {path}: no such directory, expected one with {CONFIG} and {WEIGHTS} (hf "
                "download gets it from the Hub)"
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
                        first_file = self.headers[name].file.name
                        raise InputError(
                            f"{file}: holds `{name}` a second time (it is in {first_file} already)"
                        )
                    header = tensors.get_slice(name)
                    if not name.endswith(_COMPUTED):
                        self.headers[name] = TensorHeader(
                            file, header.get_dtype(), tuple(header.get_shape())
                        )
        for name, file in indexed.items():
            if not name.endswith(_COMPUTED) and (
                name not in self.headers or self.headers[name].file.name != file
            ):
                raise InputError(f"{path / file}: no tensor `{name}`, which {INDEX} says is there")
        _check_counts(self.config, max(_MAX_COUNT, len(self.headers)), self.config_file)

    @contextlib.contextmanager
    def slices(self) -> Iterator[dict[str, Any]]:
        """Yield the safetensors slice (lazy tensor) of each weight by name, as a dict.

        Names are those in the files. In the `with` block, after which the files are closed,
        `slice[:]` reads the weight as a torch tensor on the CPU, in its stored dtype.

        Raises:
            InputError: A file is damaged or not a regular file.
        """
        with contextlib.ExitStack() as stack:
            opened = {
                file: stack.enter_context(_open_safetensors(file, "pt")) for file in self.files
            }
            yield {
                name: opened[header.file].get_slice(name) for name, header in self.headers.items()
            }


class TrainableHFCheckpoint(HFCheckpoint):
    """Hugging Face model directory from which training starts.

    `TrainableHFCheckpoint(path)` takes the Path of a local directory; it raises InputError if a
    file is unusable. It also has the weight `shapes` by name and the `generation` config, {} if
    there is none. `tensor` and `iter_row_chunks` read one weight. `shapes` and methods have their
    names in a model with an output layer (`model.norm.weight`); `headers` has those in the files,
    which omit `model.` for a model without one.
    """

    def __init__(self, path: Path):
        """Read config.json, generation_config.json and the headers in `path`.

        Raises:
            InputError: A file is unusable.
        """
        super().__init__(path)
        generation = path / GENERATION
        self.generation: dict[str, Any] = (
            _read_generation_config(generation) if generation.exists() else {}
        )
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, tuple[Path, str]] = {}
        for stored, (file, _, shape) in self.headers.items():
            name = stored if stored.startswith(_WITH_OUTPUT_LAYER) else f"model.{stored}"
            if name in self._stored:
                raise InputError(
                    f"{file}: holds `{stored}` a second time (it is in "
                    f"{self._stored[name][0].name} already)"
                )
            self._stored[name] = (file, stored)
            self.shapes[name] = shape

    @property
    def dtypes(self) -> set[str]:
        """Return the weights' dtypes as safetensors names them, such as BF16."""
        return {header.dtype for header in self.headers.values()}

    def check(self, expected: Mapping[str, tuple[int, ...]], optional: set[str]) -> None:
        """Check that the directory has the `expected` weights and no others.

        Args:
            expected: Shape of each weight by name, as in `shapes`.
            optional: Names of other weights, of any shape, that the directory may have.

        Raises:
            InputError: A weight is missing, unexpected, of another shape, or not F32, BF16 or F16.
        """
        for name, shape in expected.items():
            if name not in self.shapes:
                raise InputError(
                    f"{self.path}: no tensor `{name}`, expected one of shape {list(shape)}"
                )
            if self.shapes[name] != tuple(shape):
                raise InputError(
                    f"{self.path}: tensor `{name}`: found shape {list(self.shapes[name])}, "
                    f"expected {list(shape)}"
                )
        for name, (file, stored) in self._stored.items():
            if name not in expected and name not in optional:
                raise InputError(
                    f"{file}: tensor `{stored}`: found a weight that the model of {CONFIG} does "
                    "not have"
                )
            if (dtype := self.headers[stored].dtype) not in FLOAT_DTYPES:
                raise InputError(
                    f"{file}: tensor `{stored}`: found dtype {dtype}, "
                    f"expected one of {', '.join(FLOAT_DTYPES)}"
                )

    def tensor(self, name: str) -> "Tensor":
        """Return the weight `name` on the CPU, in its stored dtype.

        The file is closed again to free its pages.

        Args:
            name: Key of `shapes`; another one is a KeyError.

        Raises:
            InputError: A number is NaN or infinite, or the file is damaged.
        """
        file, stored = self._stored[name]
        with _open_safetensors(file, "pt") as tensors:
            tensor = tensors.get_tensor(stored)
        check_finite(tensor, stored, file)
        return tensor

    def iter_row_chunks(self, name: str, rows: int) -> "Iterator[Tensor]":
        """Yield the weight `name`, in its stored dtype, as tensors of `rows` rows.

        The tensors are on the CPU, and the last one may have fewer rows.

        Args:
            name: Key of `shapes`; another one is a KeyError.

        Raises:
            InputError: A number is NaN or infinite, or the file is damaged.
        """
        file, stored = self._stored[name]
        for start in range(0, self.shapes[name][0], rows):
            with _open_safetensors(file, "pt") as tensors:
                part = tensors.get_slice(stored)[start : start + rows]
            check_finite(part, stored, file)
            yield part


def check_finite(tensor: "Tensor", name: str, file: Path) -> None:
    """Raise InputError if a weight has a NaN or an infinite number.

    Args:
        name: Name of the weight in `file`; the error has both.
    """
    if not tensor.numel():
        return
    # Both are NaN if one number is. `isfinite` allocates copies and is a hundred times slower.
    for extreme in tensor.aminmax():
        if not extreme.isfinite():
            raise InputError(
                f"{file}: tensor `{name}`: found {extreme.item()}, expected finite weights; "
                "download or train it again"
            )


def _drop_loading_fields(value: Any) -> Any:
    """Return config.json's content without fields that tell how to load a model.

    These fields are dropped at any depth.
    """
    if isinstance(value, dict):
        return {
            name: _drop_loading_fields(inner)
            for name, inner in value.items()
            if not _LOADING.fullmatch(name)
        }
    return [_drop_loading_fields(inner) for inner in value] if isinstance(value, list) else value


def _check_counts(values: Any, limit: int, file: Path) -> None:
    """Raise InputError, naming `file` and field, if a count in `values` is too high.

    Counts are those of layers or their parts; `limit` is the maximum.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            _check_counts(value, limit, file)
        elif _COUNT.fullmatch(name) and isinstance(value, int | float):
            maximum = max(limit, _MAX_EXPERTS) if "expert" in name else limit
            if value > maximum:
                raise InputError(
                    f"{file}: field `{name}`: found {shorten_repr(value)}, "
                    f"expected at most {maximum} for this number of weights"
                )


def _find_weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the weight files of a directory, and the file name of each tensor.

    The names are from the index; there are none without one.
    """
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS], {}
    if not (path / INDEX).exists():
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            raise InputError(
                f"{path / pickles[0]}: a pickle, which could run any code when loaded; "
                f"expected {WEIGHTS} (save_pretrained of transformers writes it)"
            )
        raise InputError(
            f"{path}: no {WEIGHTS} and no {INDEX} there, expected the weights of a model"
        )
    index = read_json_object(path / INDEX, "the file of each tensor").get("weight_map")
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(file, str) for file in index.values())
    ):
        raise InputError(f"{path / INDEX}: found no `weight_map`, expected the file of each tensor")
    for file in sorted({*index.values()}):
        if Path(file).name != file or "\0" in file:
            raise InputError(
                f"{path / INDEX}: found {shorten_repr(file)}, "
                "expected the name of a file in the same directory"
            )
        if not (path / file).exists():
            raise InputError(
                f"{path / file}: missing, and {INDEX} lists it; download the directory again"
            )
    return [path / file for file in sorted({*index.values()})], index


def _read_generation_config(file: Path) -> dict[str, Any]:
    """Read generation_config.json.

    Raises:
        InputError: Transformers does not accept it.
    """
    from transformers import GenerationConfig

    values = read_json_object(file, "a generation config")
    try:
        GenerationConfig.from_dict(values).validate()
    except Exception as error:  # wrong types raise errors of many types
        raise InputError(
            f"{file}: {' '.join(str(error).split())[:200]}; expected a generation config"
        ) from None
    ends = values.get("eos_token_id")
    tokens = ends if isinstance(ends, list) else [ends]
    if ends is not None and not all(type(token) is int for token in tokens):
        raise InputError(
            f"{file}: field `eos_token_id`: found {shorten_repr(ends)}, expected ids of tokens"
        )
    return values


def shorten_repr(value: Any) -> str:
    """Return `repr(value)` for error messages, cut if it is longer than 60 characters.

    A longer one has its first 57 characters and `...`.
    """
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_positive(value: Any, name: str, where: str) -> float:
    """Return `value`, a finite number above 0, as a float.

    Args:
        name: Field of the value, for errors.
        where: File of the field, for errors.

    Raises:
        InputError: It is no finite number above 0; bool and text are none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(
            f"{where}: field `{name}`: found {shorten_repr(value)}, expected a number above 0"
        )
    return float(value)


@contextlib.contextmanager
def _open_safetensors(file: Path, framework: str) -> Iterator[Any]:
    """Open a safetensors file with tensors of `framework` ("np" or "pt").

    Raises:
        InputError: It is damaged or not a regular file.
    """
    if not file.is_file():  # a FIFO has no end
        raise InputError(f"{file}: not a regular file, expected the weights of a model")
    try:
        tensors = safe_open(file, framework)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file}: not a complete safetensors file ({error}); download it again"
        ) from None
    with tensors:
        yield tensors
