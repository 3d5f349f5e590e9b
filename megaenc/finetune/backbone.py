"""A Hugging Face model without its head, which reads packed texts in one direction, proved by what a changed token moves."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaenc.console import say
from megaenc.errors import InputError
from megaenc.finetune.attention import Reading, reading
from megaenc.finetune.packing import Packed
from megaenc.finetune.probe import Attention, Probe, first_line


class Backbone(nn.Module):
    """Token states of packed texts, by the transformers model `model`.

    `packed`: texts are read end to end. Else, for a model that cannot do that, in padded rectangles of texts of like length.
    """

    def __init__(self, model: Any, attention: Attention):
        super().__init__()
        self.model = model
        self.attention: Attention = attention
        self.packed = False
        self.one_kernel = True
        """Whether packed attention may use an accelerator's kernel for all texts."""
        self.hidden_size: int = model.config.hidden_size
        self.first_position = _first_position(model)
        self.context: int = model.config.max_position_embeddings - self.first_position
        """The longest text, in tokens."""
        self.windows: set[int] = set()
        """The sliding windows that layers have asked packed attention for."""
        # transformers reads a decoder with `is_causal: false` with a window as wide to each side as it was to one.
        self.wide_window = any(getattr(module, "is_causal", False) for module in model.modules())
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._padding = model.config.pad_token_id or 0

    @property
    def device(self) -> torch.device:
        return self.model.device

    def states(self, packed: Packed) -> Tensor:
        """[T, hidden_size]: the last layer's states after the final norm, in the order of `packed.tokens`."""
        tokens = packed.tokens if packed.order is None else packed.tokens[packed.order]
        states = self._end_to_end(packed, tokens) if self.packed else self._padded(packed, tokens)
        return states if packed.back is None else states.index_select(0, packed.back)

    def _end_to_end(self, packed: Packed, tokens: Tensor) -> Tensor:
        with reading(Reading(packed, self.attention == "causal", self.wide_window, self.windows, self.one_kernel)):
            out = self.model(input_ids=tokens[None], position_ids=packed.position_ids[None] + self.first_position)
        return out.last_hidden_state[0]

    def _padded(self, packed: Packed, tokens: Tensor) -> Tensor:
        """Rectangles of the texts by length, padded and masked at the texts' ends."""
        shapes = rectangles(packed.groups)
        parts = []
        for lengths, row in zip(shapes, tokens.split([sum(lengths) for lengths in shapes]), strict=True):
            columns = torch.arange(lengths[-1], device=row.device)
            seen = columns < torch.tensor(lengths, device=row.device)[:, None]
            ids = torch.full(seen.shape, self._padding, device=row.device).masked_scatter(seen, row)
            positions = {"position_ids": (columns + self.first_position).expand_as(ids)} if self.takes_positions else {}
            parts.append(self.model(input_ids=ids, attention_mask=seen.long(), **positions).last_hidden_state[seen])
        return torch.cat(parts)

    def read_own_way(self, packed: Packed) -> Tensor:
        """What `states` is compared with: all texts in one rectangle, the model left to find positions by itself. [T, hidden]"""
        texts = packed.tokens.split(packed.lengths)
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=self._padding)
        seen = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(packed.lengths, device=ids.device)[:, None]
        return self.model(input_ids=ids, attention_mask=seen.long()).last_hidden_state[seen]

    def point(self, attention: Attention) -> None:
        """Have the model itself read that way, as far as transformers lets it; packed attention does not ask it."""
        causal = attention == "causal"
        self.model.config.is_causal = causal
        for module in self.model.modules():
            if hasattr(module, "is_causal"):  # which attention without a mask goes by
                module.is_causal = causal


def rectangles(groups: tuple[tuple[int, int], ...]) -> list[list[int]]:
    """Lengths of texts, shortest first, by the rectangle that pads them: at most 8 tokens or a tenth longer than its first."""
    found: list[list[int]] = []
    for texts, length in groups:
        if not found or length > found[-1][0] + max(8, found[-1][0] // 10):
            found.append([])
        found[-1] += [length] * texts
    return found


def _first_position(model: nn.Module) -> int:
    """0; in models like RoBERTa, whose learned positions are an embedding with a padding index, the one after that."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def load_backbone(folder: str, attention: Attention, *, device: torch.device | str, dtype: torch.dtype) -> Backbone:
    """The model of a Hugging Face folder or of a name on the Hub, reading under `attention`; code that it holds is never run.

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
    """transformers' model without a head, in float32 and eval mode. InputError where there is none."""
    from safetensors import SafetensorError
    from transformers import AutoModel
    from transformers.models.auto.modeling_auto import MODEL_MAPPING
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = _config(folder)
    kind = MODEL_MAPPING.get(type(config), None)
    if not isinstance(kind, type) or config.is_encoder_decoder or not hasattr(config, "max_position_embeddings"):
        raise InputError(f"--model {folder}: found a {config.model_type} model, expected an encoder or a decoder of text")
    # What pools a text's states is not read, and few folders hold its weights.
    pooled = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}
    try:
        model, report = AutoModel.from_pretrained(
            folder, config=config, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **pooled
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"--model {folder}: {first_line(error)}; expected the weights of a {config.model_type} model") from None
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


def _config(folder: str) -> Any:
    """The folder's config, of a class of transformers'; InputError where it is none, or what else a model needs is missing."""
    from transformers import AutoConfig, PreTrainedConfig

    path = Path(folder)
    if path.is_dir():
        for what, patterns in {
            "config.json": ("config.json",),
            "*.safetensors": ("*.safetensors",),
            "tokenizer.json": ("tokenizer.json", "vocab.*", "*.model", "tokenizer_config.json"),
        }.items():
            if not any(next(path.glob(pattern), None) for pattern in patterns):
                raise InputError(f"--model {folder}: no {what} there, expected the config, weights and tokenizer of a model")
    elif path.exists() or folder.startswith((".", "/", "~")) or folder.count("/") > 1:
        raise InputError(f"--model {folder}: no such folder; expected a Hugging Face folder, or a name on the Hub")
    try:
        values, _ = PreTrainedConfig.get_config_dict(folder)
        if values.get("model_type") == "sl_model":  # the study's released models: EuroBERT's weights under a name of their own
            from transformers import EuroBertConfig

            return EuroBertConfig.from_dict(values | {"model_type": "eurobert"})
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # validation raises errors of huggingface_hub, others come from whatever a wrong type leads to
        raise InputError(f"--model {folder}: {first_line(error)}; expected the config.json of a Hugging Face model") from None


def _settle(backbone: Backbone, folder: str) -> None:
    """Have the model read packed in the direction asked for, or else padded; InputError where neither can be shown to work."""
    probe = Probe(backbone)
    own = probe.direction(backbone.read_own_way)
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
