"""Transformers' model of a Hugging Face folder, without the network and without code that the folder names.

transformers gets the settings and the weights that were read here and never the folder: so neither an adapter, a pickle, custom
code nor a kernel of the Hub that a file asks for is looked at, whatever is installed.
"""

import copy
import dataclasses
import inspect
import math
from importlib.metadata import version
from typing import Any

from megaenc.convert.hf_checkpoint import HFCheckpoint
from megaenc.errors import InputError, first_error_line, format_error

_HUB_KERNEL_MODELS = (
    "mra",
    "rwkv",
    "yoso",
)  # models of which transformers computes a part by kernels that it fetches from the Hub
_MAX_BUFFER_BYTES = 1 << 32  # the most bytes of masks and tables that a model computes for itself
_MAX_MISSING_PARAMETERS = 1 << 24  # parameters that a folder may lack: a pooler or a head


def build_hf_config(values: dict[str, Any], model_type: str, where: str) -> Any:
    """Build transformers' own config for the settings `values` as a model of `model_type`, a key of CONFIG_MAPPING.

    Fields of older versions are understood. InputError, naming `where`, for what is no such config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for settings in (values, *(inner for inner in values.values() if isinstance(inner, dict))):
        if settings.get("quantization_config") is not None:
            found = str(settings["quantization_config"])[:60]
            raise InputError(f"{where}: field `quantization_config`: found {found}, expected none: get the model in bf16 or fp32")
    try:
        kind = CONFIG_MAPPING[model_type]
        # What a class shares with all of its configs (`attribute_map`) or computes (`to_dict`) is no setting.
        fields = {field.name for field in dataclasses.fields(kind)}
        taken = {name for name in values if hasattr(kind, name) and name not in fields}
        taken -= {name for name in taken if isinstance(inspect.getattr_static(kind, name), property)}
        return kind.from_dict({name: value for name, value in values.items() if name not in taken} | {"model_type": model_type})
    except Exception as error:  # validation raises errors of huggingface_hub, others come from whatever a wrong type leads to
        raise InputError(f"{where}: {format_error(error)}; expected the config.json of a {model_type} model") from None


def load_hf_config(folder: HFCheckpoint) -> Any:
    """Build transformers' config of `folder`. InputError for a family that transformers does not know or a wrong field."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    where, model_type = str(folder.config_file), folder.config.get("model_type")
    if model_type == "sl_model":  # the study's released models: EuroBERT's weights under a name of their own
        model_type = "eurobert"
    if model_type == "mistral" and "layer_types" in folder.config:  # as transformers' AutoConfig takes it
        model_type = "ministral"
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        known = f"one that transformers {version('transformers')} knows"
        raise InputError(f"{where}: field `model_type`: found {str(model_type)[:60]!r}, expected {known}")
    if model_type in _HUB_KERNEL_MODELS:
        raise InputError(f"{where}: field `model_type`: found {model_type}, which runs code from the Hub; expected another")
    return build_hf_config(folder.config, model_type, where)


def load_model(folder: HFCheckpoint, config: Any, kind: type, expected: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Load the weights of `folder` into transformers' class `kind`, in float32 and eval mode; also return its loading report.

    `options` go to the class, `expected` says in errors which model was. InputError for settings or weights that make no such
    model; how much memory they would take is looked at before any is taken.
    """
    import torch

    config = copy.deepcopy(config)
    try:
        config._attn_implementation = None  # nor that of a config inside: transformers chooses what is best of its own
        with torch.device("meta"):
            empty = kind(copy.deepcopy(config), **options)
    except Exception as error:  # whatever a wrong setting leads to
        raise InputError(f"{folder.config_file}: {first_error_line(error)}; expected {expected}") from None
    stored = sum(math.prod(header.shape) for header in folder.headers.values())
    parameters = sum(parameter.numel() for parameter in empty.parameters())
    if parameters > 2 * stored + _MAX_MISSING_PARAMETERS:  # an embedding may be counted a second time as the output layer
        raise InputError(
            f"{folder.config_file}: describes a model of {parameters:,} parameters, and the files hold {stored:,}; "
            f"expected {expected}"
        )
    computed = sum(buffer.numel() * buffer.element_size() for buffer in empty.buffers())
    if computed > _MAX_BUFFER_BYTES:
        raise InputError(
            f"{folder.config_file}: describes a model that computes masks and tables of {computed:,} bytes for itself; "
            f"expected at most {_MAX_BUFFER_BYTES:,}: a smaller `max_position_embeddings`"
        )
    del empty
    try:
        with folder.slices() as weights:
            return kind.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                attn_implementation=None,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # whatever tensors of the right names and wrong types lead to
        raise InputError(f"{folder.flag} {folder.path}: {first_error_line(error)}; expected {expected}") from None
