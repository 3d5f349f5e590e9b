"""A Hugging Face folder becomes a backbone that reads as asked for, shown before it is used."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaenc.console import say
from megaenc.convert.hf_folder import HFFolder
from megaenc.convert.hf_model import config_of, first_line, load_model
from megaenc.errors import InputError
from megaenc.finetune.backbone import Attention, Backbone
from megaenc.finetune.model_folder import check_model_folder
from megaenc.finetune.probe import Probe


def load_backbone(folder: str, attention: Attention, *, device: torch.device | str, dtype: torch.dtype) -> Backbone:
    """The model of a Hugging Face folder, reading under `attention`; code that it holds is never run.

    Before it is returned, changed tokens have shown what it reads (each state is moved by all tokens of its text and by no other,
    or by no later one), and packed states have been equal to the model's own padded ones. InputError for what cannot be
    loaded or read so.

    Parameters are cast to `dtype`. One that was more exact keeps what it was as its attribute `unrounded`, which the optimizer's
    master weights start from.
    """
    backbone = Backbone(_load(folder).to(device), attention)
    with torch.no_grad():
        _settle(backbone, folder)
        probe = Probe(backbone)
        exactly = probe.read()
        for parameter in backbone.parameters():
            exact, parameter.data = parameter.data, parameter.data.to(dtype)
            if not torch.equal(parameter.float(), exact):
                parameter.unrounded = exact
        if dtype != torch.float32:
            _settle_16_bit(backbone, folder, probe, exactly, dtype)
    return backbone


def _load(folder: str) -> Any:
    """Load transformers' model without a head, in float32 and eval mode. InputError for a folder that holds none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    check_model_folder(folder)
    hf = HFFolder(Path(folder), "--model")
    config = config_of(hf)
    kind = MODEL_MAPPING.get(type(config), None)
    if not isinstance(kind, type) or config.is_encoder_decoder or not hasattr(config, "max_position_embeddings"):
        raise InputError(f"--model {folder}: found a {config.model_type} model, expected an encoder or a decoder of text")
    # What pools a text's states is not read, and few folders hold its weights.
    pooled = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}
    model, report = load_model(hf, config, kind, f"the weights of a {config.model_type} model", **pooled)
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
        raise InputError(
            f"--model {folder}: {len(missing)} weights are missing ({some}), expected those of a {config.model_type} model"
        )
    # The padding token's row gets no gradient from torch, and some tokenizers (the study's) pad with the token that ends texts.
    # Nothing is computed for padding here, so each token is like the others.
    model.get_input_embeddings().padding_idx = None
    model.config.use_cache = False
    return model.eval()


def _settle(backbone: Backbone, folder: str) -> None:
    """Have the model read packed in the direction asked for, or else padded; InputError where neither can be shown to work."""
    try:
        probe = Probe(backbone)
        own = probe.direction(backbone.read_own_way)
    except Exception as error:  # whatever settings lead to that a model can be built of and not computed with
        raise InputError(f"--model {folder}: the model computes no states: {first_line(error)}; check its config.json") from None
    why_not = "its own reading is neither bidirectional nor causal" if own is None else probe.try_packed(own)
    if why_not is None:
        return
    backbone.point(backbone.attention)
    found = probe.direction(backbone.states)
    if found != backbone.attention or probe.apart(backbone.states, backbone.read_own_way):
        raise InputError(
            f"--model {folder}: found {found or 'another'} attention in {backbone.model.config.model_type}, "
            f"expected that it reads with {backbone.attention} attention (not packed either: {why_not})"
        )
    say(f"{folder}: texts are padded to like lengths, not packed: {why_not}")


def _settle_16_bit(backbone: Backbone, folder: str, probe: Probe, exactly: Tensor, dtype: torch.dtype) -> None:
    """Have the model compute in `dtype` what it computed `exactly`; accelerators have a kernel of their own for these numbers."""
    why_not = probe.wrong_in_16_bit(exactly)
    if why_not is not None and backbone.packed and backbone.device.type != "cpu":
        backbone.one_kernel = False
        without, why_not = why_not, probe.wrong_in_16_bit(exactly)
        if why_not is None:
            say(f"{folder}: attention reads the texts of each length by themselves: the kernel for all texts {without}")
    if why_not is not None:
        raise InputError(f"--model {folder}: {why_not} in {dtype}; expected --precision fp32")
