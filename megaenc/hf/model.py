"""Loading and saving of transformers models in Hugging Face directories.

Neither network access nor code from the directory is used. transformers gets the config and weights
that were read here, never the directory, so that adapters, pickles, custom code and Hub kernels
named in its files are ignored. What is saved has the fields of older versions too.
"""

import copy
import dataclasses
import inspect
import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megaenc.errors import InputError, first_error_line, format_error
from megaenc.hf.checkpoint import CONFIG, FLOAT_DTYPES, HFCheckpoint, check_finite, shorten_repr
from megaenc.json_files import read_json_object

# Models for which transformers downloads kernels from the Hub.
_HUB_KERNEL_MODELS = ("mra", "rwkv", "yoso")
# Models tested with transformers 4.57.
_OLD_MODELS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "modernbert",
    "modernbert-decoder",
)
FULL = "full_attention"
LOCAL = "sliding_attention"
"""Kinds of layers in `layer_types`, and keys of `rope_parameters`, of models with local layers."""
_MAX_BUFFER_BYTES = 1 << 32  # masks and tables that a model computes itself
_MAX_MISSING_PARAMETERS = 1 << 24  # parameters that a directory may lack: a pooler or a head


def build_hf_config(values: dict[str, Any], model_type: str, where: str) -> Any:
    """Return transformers' config object for the fields of a config.json.

    Fields of older versions are accepted. NeoBERT is registered if needed (`register_neobert`).

    Args:
        values: The fields; not changed.
        model_type: A key of transformers' CONFIG_MAPPING, or neobert.
        where: Beginning of errors.

    Raises:
        InputError: A field is invalid, the type is unknown, or the weights are quantized.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for settings in (values, *(inner for inner in values.values() if isinstance(inner, dict))):
        if settings.get("quantization_config") is not None:
            quantization = str(settings["quantization_config"])[:60]
            raise InputError(
                f"{where}: field `quantization_config`: found {quantization}, expected none: "
                "download the model in bf16 or fp32"
            )
    # transformers' kernels would read it differently.
    if not isinstance(is_causal := values.get("is_causal", True), bool):
        raise InputError(
            f"{where}: field `is_causal`: found {shorten_repr(is_causal)}, expected true or false"
        )
    register_neobert(model_type)
    try:
        kind = CONFIG_MAPPING[model_type]
        # Class attributes (`attribute_map`) and methods (`to_dict`) are not fields.
        fields = {field.name for field in dataclasses.fields(kind)}
        reserved = {name for name in values if hasattr(kind, name) and name not in fields}
        reserved -= {
            name for name in reserved if isinstance(inspect.getattr_static(kind, name), property)
        }
        return kind.from_dict(
            {name: value for name, value in values.items() if name not in reserved}
            | {"model_type": model_type}
        )
    except Exception as error:
        # Validation raises huggingface_hub's errors, wrong types many others.
        raise InputError(
            f"{where}: {format_error(error)}; expected the config.json of a {model_type} model"
        ) from None


def register_neobert(model_type: Any) -> None:
    """Register NeoBERT with transformers, which lacks it, if `model_type` is neobert.

    Further calls have no effect.
    """
    if model_type == "neobert":
        import megaenc.hf.neobert_model  # noqa: F401


def find_model_class(architecture: str) -> Any:
    """Return the model class that config.json calls `architecture`, None if unknown.

    It is transformers' or, for a name that begins with NeoBERT, that of this package.
    """
    import transformers

    if architecture.startswith("NeoBERT"):
        from megaenc.hf import neobert_model

        return getattr(neobert_model, architecture, None)
    return getattr(transformers, architecture, None)


def find_base_class(config: Any) -> Any:
    """Return transformers' model class of a config object, without output layer.

    Raises:
        KeyError: transformers has no such class.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    return MODEL_MAPPING[type(config)]


def is_causal_decoder(config: Any) -> bool:
    """Return whether transformers' decoder of a config object is causal.

    A field of config.json can make it bidirectional. For an encoder's config the result means
    nothing.
    """
    if (
        hasattr(type(config), "use_bidirectional_attention")
        and config.use_bidirectional_attention is True
    ):
        return False  # other models ignore the field
    return getattr(config, "is_causal", True)


def load_hf_config(directory: HFCheckpoint) -> Any:
    """Return transformers' config object for the config.json of a directory.

    Raises:
        InputError: The model type is unknown or needs code of the Hub, a field is wrong, or the
            weights are quantized.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    where = str(directory.config_file)
    model_type = directory.config.get("model_type")
    # The study's released models have EuroBERT's weights under another name.
    if model_type == "sl_model":
        model_type = "eurobert"
    # As transformers' AutoConfig does.
    if model_type == "mistral" and "layer_types" in directory.config:
        model_type = "ministral"
    register_neobert(model_type)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        known = f"one that transformers {version('transformers')} knows"
        raise InputError(
            f"{where}: field `model_type`: found {str(model_type)[:60]!r}, expected {known}"
        )
    if model_type in _HUB_KERNEL_MODELS:
        raise InputError(
            f"{where}: field `model_type`: found {model_type}, which runs code from the Hub; "
            "expected another"
        )
    return build_hf_config(directory.config, model_type, where)


def find_position_offset(model: Any) -> int:
    """Return the first position of a text in the model's table of positions.

    `model` is transformers'. The result is above 0 in RoBERTa's, else 0, also for a model without a
    table.
    """
    from torch import nn

    tables = (
        module for name, module in model.named_modules() if name.endswith("position_embeddings")
    )
    padding = (table.padding_idx for table in tables if isinstance(table, nn.Embedding))
    return next((index + 1 for index in padding if index is not None), 0)


def load_masked_lm(directory: HFCheckpoint, config: Any) -> Any:
    """Load the masked language model of a directory, in float32, on the CPU.

    It is in eval mode. A decoder with bidirectional attention (`is_causal_decoder`) is accepted;
    its class is transformers' ForCausalLM. Left-over weights are ignored.

    Args:
        config: Config object, as `load_hf_config` returns it.

    Raises:
        InputError: It is another model, lacks weights, or `load_model` refuses it.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = f"{directory.flag} {directory.path}"
    decoder = any(name.endswith("ForCausalLM") for name in config.architectures or ())
    if decoder and is_causal_decoder(config):
        raise InputError(
            f"{where}: {config.architectures[0]} reads causally; expected a masked language model"
        )
    kind = (MODEL_FOR_CAUSAL_LM_MAPPING if decoder else MODEL_FOR_MASKED_LM_MAPPING).get(
        type(config), None
    )
    if not isinstance(kind, type) or not hasattr(config, "max_position_embeddings"):
        raise InputError(
            f"{where}: found a {config.model_type} model; expected a masked language model"
        )
    model, report = load_model(directory, config, kind, "a masked language model")
    if report["missing_keys"]:
        raise InputError(
            f"{where}: no weights `{min(report['missing_keys'])}`; expected a masked language model"
        )
    return model.eval()


def load_model(
    directory: HFCheckpoint, config: Any, kind: type, expected: str, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a model of class `kind` with the weights of a directory, and a report.

    The model is in float32 on the CPU, in eval mode. Missing and left-over weights are no error:
    the report, a dict of transformers, lists their names (`missing_keys`, `unexpected_keys`).

    Args:
        config: Config object, as `load_hf_config` returns it; not changed.
        kind: Model class of transformers; its constructor gets `options` (`add_pooling_layer`).
        expected: Description of the model for errors.

    Raises:
        InputError: Config or weights are of another model, or weights are too few or not finite.
    """
    import torch

    config = copy.deepcopy(config)
    try:
        # Also of nested configs: transformers selects its best one.
        config._attn_implementation = None
        with torch.device("meta"):
            empty = kind(copy.deepcopy(config), **options)
    except Exception as error:  # wrong fields raise errors of many types
        raise InputError(
            f"{directory.config_file}: {first_error_line(error)}; expected {expected}"
        ) from None
    stored = sum(math.prod(header.shape) for header in directory.headers.values())
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    if parameters > 2 * stored + _MAX_MISSING_PARAMETERS:  # a tied embedding may be counted twice
        raise InputError(
            f"{directory.config_file}: describes a model of {parameters:,} parameters, "
            f"and the files hold {stored:,}; expected {expected}"
        )
    computed = sum(buffer.numel() * buffer.element_size() for buffer in empty.buffers())
    if computed > _MAX_BUFFER_BYTES:
        raise InputError(
            f"{directory.config_file}: describes a model with computed masks and tables of "
            f"{computed:,} bytes; "
            f"expected at most {_MAX_BUFFER_BYTES:,}: a smaller `max_position_embeddings`"
        )
    del empty
    try:
        with directory.slices() as weights:
            model, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                attn_implementation=None,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                **options,
            )
    except Exception as error:
        # Tensors with the right names and wrong dtypes raise errors of many types.
        raise InputError(
            f"{directory.flag} {directory.path}: {first_error_line(error)}; expected {expected}"
        ) from None
    for name, stored_shape, shape in sorted(report["mismatched_keys"]):
        file, stored = _find_stored(directory, model, name)
        raise InputError(
            f"{file}: tensor `{stored}`: found shape {list(stored_shape)}, "
            f"but {list(shape)} by config.json; expected {expected}"
        )
    for name, parameter in model.named_parameters():
        file, stored = _find_stored(directory, model, name)
        if stored in directory.headers and (dtype := directory.headers[stored].dtype) not in (
            *FLOAT_DTYPES,
            "F64",
        ):
            raise InputError(
                f"{file}: tensor `{stored}`: found dtype {dtype}, "
                f"expected one of {', '.join(FLOAT_DTYPES)}"
            )
        check_finite(parameter.detach(), stored, file)
    return model, report


def _find_stored(directory: HFCheckpoint, model: Any, name: str) -> tuple[Path, str]:
    """Return the file of a model's parameter and its name there.

    Without a file, the directory.
    """
    # A model without head may be in a file of one with a head, and the other way round.
    prefix = f"{model.base_model_prefix}."
    for stored in (name, prefix + name, name.removeprefix(prefix)):
        if stored in directory.headers:
            return directory.headers[stored].file, stored
    return directory.path, name


def save_hf_config(config: Any, directory: Path) -> None:
    """Write config.json to `directory`, with the fields that older versions read.

    `config` is transformers' object. The directory is created if missing, and its
    config.json replaced. transformers before 5 ignores `rope_parameters` and silently computes with
    its own defaults instead.
    """
    config.save_pretrained(directory)
    values = read_json_object(directory / CONFIG)
    values |= _build_older_fields(values)
    (directory / CONFIG).write_text(
        json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def save_hf_model(model: Any, directory: Path) -> None:
    """Write the transformers `model` to `directory`, its config by `save_hf_config`.

    The directory and its parents are created, files of the same names replaced. Weights are
    safetensors in the model's dtype; there is no tokenizer. All files have the permissions that the
    umask gives.
    """
    model.save_pretrained(directory)
    save_hf_config(model.config, directory)
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / CONFIG, file)  # safetensors' own is 0600, whatever the umask


def find_lowest_version(config: Any) -> str:
    """Return the lowest tested version of transformers that gives a model's numbers.

    It is "4.57" or "5.3", the tested ones, or "" for untested models. `config` is transformers'
    config object. 4.57 has no EuroBERT, ignores `is_causal`, knows ModernBERT's layers only in its
    own order, and gives the local layers of its decoder the rotary base of the global ones.
    """
    kind = config.model_type
    if kind == "eurobert" or (kind in _OLD_MODELS and getattr(config, "is_causal", None) is False):
        return "5.3"
    if kind == "modernbert" and _find_global_period(config.layer_types) is None:
        return "5.3"
    if (
        kind == "modernbert-decoder"
        and config.rope_parameters[FULL] != config.rope_parameters[LOCAL]
    ):
        return "5.3"
    return "4.57" if kind in _OLD_MODELS else ""


def _build_older_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields in which older versions read rotary bases and layers.

    Versions before 5 do not know `rope_parameters`, nor ModernBERT's `layer_types`.
    """
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return {}
    if "rope_type" in rope:
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        return {"rope_theta": rope["rope_theta"]} | (
            {} if rope["rope_type"] == "default" else {"rope_scaling": scaling}
        )
    if not {FULL, LOCAL} <= set(rope):
        return {}
    if values["model_type"].startswith("gemma3"):
        fields = {
            "rope_theta": rope[FULL]["rope_theta"],
            "rope_local_base_freq": rope[LOCAL]["rope_theta"],
        }
        scaling = {name: value for name, value in rope[FULL].items() if name != "rope_theta"}
        return fields | ({} if scaling["rope_type"] == "default" else {"rope_scaling": scaling})
    if values["model_type"].startswith("modernbert"):
        fields = {
            "global_rope_theta": rope[FULL]["rope_theta"],
            "local_rope_theta": rope[LOCAL]["rope_theta"],
        }
        period = _find_global_period(values["layer_types"])
        return fields | ({} if period is None else {"global_attn_every_n_layers": period})
    return {}


def _find_global_period(kinds: list[str]) -> int | None:
    """Return n if the layers with full attention are 0, n, 2 n, ..., else None."""
    layer_count = len(kinds)
    full = [layer for layer, kind in enumerate(kinds) if kind == FULL]
    period = full[1] if len(full) > 1 else layer_count
    return period if full == list(range(0, layer_count, period)) else None
