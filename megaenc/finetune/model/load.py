"""Loading of a Hugging Face folder as a backbone, with a proof, by changed tokens, that it reads in the direction asked for."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaenc.console import print_rank_0
from megaenc.convert.hf_checkpoint import HFCheckpoint
from megaenc.convert.hf_model import config_of, load_model
from megaenc.errors import InputError, first_line
from megaenc.finetune.model.backbone import Attention, Backbone, Packed, pack
from megaenc.finetune.model.fingerprint import check_model_folder

_CLOSE = 1e-4
"""The largest difference of float32 states that count as the same, as a share of the largest state."""
_MOVED = 1e-5
"""The least move of a state that depends on a token, as a share of the largest state."""
_CLOSE_16_BIT = 0.1
"""As `_CLOSE`, where one of them has 16 bits: rounding through all layers."""


def load_backbone(folder: str, attention: Attention, *, device: torch.device | str, dtype: torch.dtype) -> Backbone:
    """Load the model of a Hugging Face folder, reading under `attention`; code that it holds is never run.

    It is proved first that each state is moved by all tokens of its text, or by no later one, and by no other text, and that
    packed states equal the model's own padded ones. InputError for what cannot be loaded or read so.

    Parameters are cast to `dtype`. One that loses digits keeps its value as the attribute `unrounded`, from which the optimizer's
    master weights start.
    """
    backbone = Backbone(_load(folder).to(device), attention)
    with torch.no_grad():
        _settle(backbone, folder)
        probe = AttentionProbe(backbone)
        exactly = probe.read()
        for parameter in backbone.parameters():
            exact, parameter.data = parameter.data, parameter.data.to(dtype)
            if not torch.equal(parameter.float(), exact):
                parameter.unrounded = exact
        why_not = probe.wrong_in_16_bit(exactly) if dtype != torch.float32 else None
        if why_not is not None and backbone.packed and backbone.device.type != "cpu":
            backbone.one_kernel = False  # an accelerator's, for these numbers alone
            without, why_not = why_not, probe.wrong_in_16_bit(exactly)
            if why_not is None:
                print_rank_0(
                    f"{folder}: attention reads the texts of each length by themselves: the kernel for all texts {without}"
                )
        if why_not is not None:
            raise InputError(f"--model {folder}: {why_not} in {dtype}; expected --precision fp32")
    return backbone


def _load(folder: str) -> Any:
    """Load transformers' model without a head, in float32 and eval mode. Raises InputError if the folder holds none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    check_model_folder(folder)
    hf = HFCheckpoint(Path(folder), "--model")
    config = config_of(hf)
    kind = MODEL_MAPPING.get(type(config), None)
    if not isinstance(kind, type) or config.is_encoder_decoder or not hasattr(config, "max_position_embeddings"):
        raise InputError(f"--model {folder}: found a {config.model_type} model, expected an encoder or a decoder of text")
    # The pooler is not used, and few folders hold its weights.
    pooled = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}
    model, report = load_model(hf, config, kind, f"the weights of a {config.model_type} model", **pooled)
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        some = ", ".join(missing[:3]) + (", ..." if missing[3:] else "")
        what = f"{len(missing)} weights are missing ({some})"
        raise InputError(f"--model {folder}: {what}, expected those of a {config.model_type} model")
    # torch gives the padding token's row no gradient, but some tokenizers (the study's) pad with the token that ends texts.
    model.get_input_embeddings().padding_idx = None
    model.config.use_cache = False
    return model.eval()


def _settle(backbone: Backbone, folder: str) -> None:
    """Make the model read packed in the direction asked for, or else padded; InputError where neither can be shown to work."""
    try:
        probe = AttentionProbe(backbone)
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
    print_rank_0(f"{folder}: texts are padded to like lengths, not packed: {why_not}")


class AttentionProbe:
    """Short random texts on which ways of reading are tried: each state depends on what it should and on nothing else."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        config = backbone.model.config
        special = {getattr(config, f"{role}_token_id", None) for role in ("pad", "bos", "eos", "sep", "cls", "mask", "unk")}
        self._usable = np.array([token for token in range(min(config.vocab_size, 1000)) if token not in special])
        # Shorter than a sliding window, which hides more than the direction does.
        self._length = min(6, backbone.context - 1, getattr(config, "sliding_window", None) or 6)

    def direction(self, read: Callable[[Packed], Tensor]) -> Attention | None:
        """Return bidirectional if every token of a text moves every state of it under `read`, causal if none before it."""
        moved = self._moved(read)
        every = torch.ones_like(moved)
        return "bidirectional" if torch.equal(moved, every) else "causal" if torch.equal(moved, every.triu()) else None

    def read(self) -> Tensor:
        """Compute float32[T, hidden]: the states of texts of several lengths, as the backbone reads them."""
        return self.backbone.states(self._packed_texts()).float()

    def wrong_in_16_bit(self, exactly: Tensor) -> str | None:
        """Return what is wrong with states of 16 bits next to `exactly`, what `read` gave in float32; None if nothing is."""
        backbone = self.backbone
        try:
            if _apart(self.read(), exactly, _CLOSE_16_BIT):
                return "computes other states"
            # In 16 bits faint influences round to none: only what should not be is looked for.
            ahead = backbone.attention == "causal" and bool(self._moved(backbone.states).tril(-1).any())
            return "sees what the direction or another text hides" if ahead or (backbone.packed and self._mixes_texts()) else None
        except (RuntimeError, ValueError) as error:  # a shape that it cannot take, a machine that it does not run on
            return f"fails: {first_line(error)}"

    def _moved(self, read: Callable[[Packed], Tensor]) -> Tensor:
        """Compute bool[changed token, state] of one text."""
        size = self._length
        text = self._texts(size)[0]
        changed = np.tile(text, (size, 1))
        np.fill_diagonal(changed, self._usable[(np.searchsorted(self._usable, text) + 1) % len(self._usable)])
        # A longer text is among them, so that there is something to mask where texts are padded.
        states = read(pack([text, *changed, *self._texts(size + 1)], self.backbone.device))
        states = states[: (size + 1) * size].float().unflatten(0, (size + 1, size))
        return (states[1:] - states[0]).abs().amax(-1) > _MOVED * states.abs().max()

    def apart(self, *ways: Callable[[Packed], Tensor]) -> bool:
        """Return whether two ways of reading give other states."""
        texts = self._packed_texts()
        return _apart(*(read(texts) for read in ways))

    def try_packed(self, own: Attention) -> str | None:
        """Make the model read packed; return why not, where it cannot. `own`: how it reads by itself."""
        backbone, asked = self.backbone, self.backbone.attention
        kind = backbone.model.config.model_type
        if not backbone.model._can_set_attn_implementation() or not backbone.takes_positions:
            return f"{kind} computes attention or positions in a way of its own"
        states = {}
        try:
            backbone.read_packed(True)
            for backbone.attention in (own, asked):
                backbone.states(pack(self._texts(1, 2), backbone.device))  # finds the windows
                states[backbone.attention] = backbone.states(self._packed_texts())
            wrong = self.direction(backbone.states) != asked or self._mixes_texts()
        except Exception as error:  # whatever a model does with what it does not know
            return f"{kind} fails: {first_line(error)}"
        finally:
            backbone.attention = asked
            backbone.read_packed(False)
        if wrong:
            return f"{kind} mixes what it should keep apart"
        for way in states:
            if way != own:
                backbone.point(way)
                if self.direction(backbone.read_own_way) != way:
                    continue  # transformers cannot read it that way, so there is nothing to compare with
            if _apart(states[way], backbone.read_own_way(self._packed_texts())):
                return f"{kind} computes other states packed"
        backbone.read_packed(True)
        return None

    def _mixes_texts(self) -> bool:
        """Return whether other texts of a pack move a text's states."""
        first, second, other = self._texts(4, 5, 4)
        packs = (pack([first, other, second], self.backbone.device), pack([other, first, second], self.backbone.device))
        return _apart(*(self.backbone.states(texts)[8:] for texts in packs))

    def _packed_texts(self) -> Packed:
        """Texts of several lengths, some beyond each sliding window."""
        context = self.backbone.context
        beyond = sorted(min(window + 8, context) for window in self.backbone.windows if window < context)
        return pack(self._texts(*(min(length, context) for length in (1, 3, 5, 7, 7)), *beyond), self.backbone.device)

    def _texts(self, *lengths: int) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        return [random.choice(self._usable, length) for length in lengths]


def _apart(one: Tensor, other: Tensor, close: float = _CLOSE) -> bool:
    return not bool((one - other).abs().max() <= close * other.abs().max())  # nan is apart from all
