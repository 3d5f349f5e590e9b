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
from megaenc.convert.hf_model import load_hf_config, load_model
from megaenc.errors import InputError, first_error_line
from megaenc.finetune.model.backbone import AttentionDirection, Backbone, PackedTexts, pack_texts
from megaenc.finetune.model.fingerprint import check_model_folder

_TOLERANCE = 1e-4
"""The largest difference of float32 states that count as the same, as a share of the largest state."""
_MIN_INFLUENCE = 1e-5
"""The least move of a state that depends on a token, as a share of the largest state."""
_TOLERANCE_16_BIT = 0.1
"""As `_TOLERANCE`, where one of them has 16 bits: rounding through all layers."""


def load_backbone(folder: str, attention: AttentionDirection, *, device: torch.device | str, dtype: torch.dtype) -> Backbone:
    """Load the model of a Hugging Face folder, reading under `attention`; code that it holds is never run.

    It is proved first that each state is moved by all tokens of its text, or by no later one, and by no other text, and that
    packed states equal the model's own padded ones. InputError for what cannot be loaded or read so.

    Parameters are cast to `dtype`. One that loses digits keeps its value as the attribute `unrounded`, from which the optimizer's
    master weights start.
    """
    backbone = Backbone(_load_hf_model(folder).to(device), attention)
    with torch.no_grad():
        _select_attention(backbone, folder)
        probe = AttentionProbe(backbone)
        exactly = probe.compute_states()
        for parameter in backbone.parameters():
            exact, parameter.data = parameter.data, parameter.data.to(dtype)
            if not torch.equal(parameter.float(), exact):
                parameter.unrounded = exact
        why_not = probe.find_16_bit_error(exactly) if dtype != torch.float32 else None
        if why_not is not None and backbone.is_packed and backbone.device.type != "cpu":
            backbone.use_varlen_kernel = False  # an accelerator's, for these numbers alone
            without, why_not = why_not, probe.find_16_bit_error(exactly)
            if why_not is None:
                print_rank_0(
                    f"{folder}: attention reads the texts of each length by themselves: the kernel for all texts {without}"
                )
        if why_not is not None:
            raise InputError(f"--model {folder}: {why_not} in {dtype}; expected --precision fp32")
    return backbone


def _load_hf_model(folder: str) -> Any:
    """Load transformers' model without a head, in float32 and eval mode. Raises InputError if the folder holds none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    check_model_folder(folder)
    hf = HFCheckpoint(Path(folder), "--model")
    config = load_hf_config(hf)
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


def _select_attention(backbone: Backbone, folder: str) -> None:
    """Make the model read packed in the direction asked for, or else padded; InputError where neither can be shown to work."""
    try:
        probe = AttentionProbe(backbone)
        own = probe.detect_direction(backbone.compute_padded_states)
    except Exception as error:  # whatever settings lead to that a model can be built of and not computed with
        raise InputError(
            f"--model {folder}: the model computes no states: {first_error_line(error)}; check its config.json"
        ) from None
    why_not = "its own reading is neither bidirectional nor causal" if own is None else probe.enable_packing(own)
    if why_not is None:
        return
    backbone.set_direction(backbone.attention)
    found = probe.detect_direction(backbone.compute_states)
    if found != backbone.attention or probe.is_different(backbone.compute_states, backbone.compute_padded_states):
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
        self._length = min(6, backbone.context_length - 1, getattr(config, "sliding_window", None) or 6)

    def detect_direction(self, read: Callable[[PackedTexts], Tensor]) -> AttentionDirection | None:
        """Return bidirectional if every token of a text moves every state of it under `read`, causal if none before it."""
        moved = self._compute_influence(read)
        every = torch.ones_like(moved)
        return "bidirectional" if torch.equal(moved, every) else "causal" if torch.equal(moved, every.triu()) else None

    def compute_states(self) -> Tensor:
        """Compute float32[T, hidden]: the states of texts of several lengths, as the backbone reads them."""
        return self.backbone.compute_states(self._pack_probe_texts()).float()

    def find_16_bit_error(self, exactly: Tensor) -> str | None:
        """Return what is wrong with states of 16 bits next to `exactly`, what `read` gave in float32; None if nothing is."""
        backbone = self.backbone
        try:
            if _is_different(self.compute_states(), exactly, _TOLERANCE_16_BIT):
                return "computes other states"
            # In 16 bits faint influences round to none: only what should not be is looked for.
            ahead = backbone.attention == "causal" and bool(self._compute_influence(backbone.compute_states).tril(-1).any())
            return (
                "sees what the direction or another text hides"
                if ahead or (backbone.is_packed and self._are_texts_mixed())
                else None
            )
        except (RuntimeError, ValueError) as error:  # a shape that it cannot take, a machine that it does not run on
            return f"fails: {first_error_line(error)}"

    def _compute_influence(self, read: Callable[[PackedTexts], Tensor]) -> Tensor:
        """Compute bool[changed token, state] of one text."""
        size = self._length
        text = self._draw_texts(size)[0]
        changed = np.tile(text, (size, 1))
        np.fill_diagonal(changed, self._usable[(np.searchsorted(self._usable, text) + 1) % len(self._usable)])
        # A longer text is among them, so that there is something to mask where texts are padded.
        states = read(pack_texts([text, *changed, *self._draw_texts(size + 1)], self.backbone.device))
        states = states[: (size + 1) * size].float().unflatten(0, (size + 1, size))
        return (states[1:] - states[0]).abs().amax(-1) > _MIN_INFLUENCE * states.abs().max()

    def is_different(self, *ways: Callable[[PackedTexts], Tensor]) -> bool:
        """Return whether two ways of reading give other states."""
        texts = self._pack_probe_texts()
        return _is_different(*(read(texts) for read in ways))

    def enable_packing(self, own: AttentionDirection) -> str | None:
        """Make the model read packed; return why not, where it cannot. `own`: how it reads by itself."""
        backbone, asked = self.backbone, self.backbone.attention
        kind = backbone.model.config.model_type
        if not backbone.model._can_set_attn_implementation() or not backbone.accepts_position_ids:
            return f"{kind} computes attention or positions in a way of its own"
        states = {}
        try:
            backbone.set_packed(True)
            for backbone.attention in (own, asked):
                backbone.compute_states(pack_texts(self._draw_texts(1, 2), backbone.device))  # finds the windows
                states[backbone.attention] = backbone.compute_states(self._pack_probe_texts())
            wrong = self.detect_direction(backbone.compute_states) != asked or self._are_texts_mixed()
        except Exception as error:  # whatever a model does with what it does not know
            return f"{kind} fails: {first_error_line(error)}"
        finally:
            backbone.attention = asked
            backbone.set_packed(False)
        if wrong:
            return f"{kind} mixes what it should keep apart"
        for way in states:
            if way != own:
                backbone.set_direction(way)
                if self.detect_direction(backbone.compute_padded_states) != way:
                    continue  # transformers cannot read it that way, so there is nothing to compare with
            if _is_different(states[way], backbone.compute_padded_states(self._pack_probe_texts())):
                return f"{kind} computes other states packed"
        backbone.set_packed(True)
        return None

    def _are_texts_mixed(self) -> bool:
        """Return whether other texts of a pack move a text's states."""
        first, second, other = self._draw_texts(4, 5, 4)
        packs = (
            pack_texts([first, other, second], self.backbone.device),
            pack_texts([other, first, second], self.backbone.device),
        )
        return _is_different(*(self.backbone.compute_states(texts)[8:] for texts in packs))

    def _pack_probe_texts(self) -> PackedTexts:
        """Texts of several lengths, some beyond each sliding window."""
        context = self.backbone.context_length
        beyond = sorted(min(window + 8, context) for window in self.backbone.sliding_windows if window < context)
        return pack_texts(self._draw_texts(*(min(length, context) for length in (1, 3, 5, 7, 7)), *beyond), self.backbone.device)

    def _draw_texts(self, *lengths: int) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        return [random.choice(self._usable, length) for length in lengths]


def _is_different(one: Tensor, other: Tensor, close: float = _TOLERANCE) -> bool:
    return not bool((one - other).abs().max() <= close * other.abs().max())  # nan is apart from all
