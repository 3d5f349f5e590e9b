"""What a model reads, shown by changed tokens, and whether packed states are those of its own padded reading."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megaenc.convert.hf_model import first_line
from megaenc.finetune.attention import NAME
from megaenc.finetune.backbone import Attention, Backbone
from megaenc.finetune.packing import Packed, pack

_CLOSE = 1e-4
"""How far float32 states of two ways to compute the same may be apart, as a share of the largest."""
_MOVED = 1e-5
"""How far a state moves at least if it depends on a token, as a share of the largest."""
_CLOSE_16_BIT = 0.1
"""The same where one of them has 16 bits: rounding through all layers, but nothing read that should not be."""


class Probe:
    """Short random texts on which ways of reading are tried: each state depends on what it should and on nothing else."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        config = backbone.model.config
        special = {getattr(config, f"{role}_token_id", None) for role in ("pad", "bos", "eos", "sep", "cls", "mask", "unk")}
        self._usable = np.array([token for token in range(min(config.vocab_size, 1000)) if token not in special])
        # Shorter than a sliding window, which hides more than the direction does.
        self._length = min(6, backbone.context - 1, getattr(config, "sliding_window", None) or 6)

    def direction(self, read: Callable[[Packed], Tensor]) -> Attention | None:
        """What `read` shows: bidirectional if every token of a text moves every state of it, causal if none before it."""
        moved = self._moved(read)
        every = torch.ones_like(moved)
        return "bidirectional" if torch.equal(moved, every) else "causal" if torch.equal(moved, every.triu()) else None

    def read(self) -> Tensor:
        """float32[T, hidden]: the states of texts of several lengths, as the backbone reads them."""
        return self.backbone.states(self._packed_texts()).float()

    def wrong_in_16_bit(self, exactly: Tensor) -> str | None:
        """What is wrong with states of 16 bits, `exactly` being what `read` gave in float32; None if nothing is."""
        try:
            if _apart(self.read(), exactly, _CLOSE_16_BIT):
                return "computes other states"
            return "sees what the direction or another text hides" if self._leaks() else None
        except (RuntimeError, ValueError) as error:  # a shape that it cannot take, a machine that it does not run on
            return f"fails: {first_line(error)}"

    def _leaks(self) -> bool:
        """Whether a later token or another text moves a state that it should not; in 16 bits, faint influences round to none."""
        causal = self.backbone.attention == "causal"
        return (causal and bool(self._moved(self.backbone.states).tril(-1).any())) or (
            self.backbone.packed and self._mixes_texts()
        )

    def _moved(self, read: Callable[[Packed], Tensor]) -> Tensor:
        """bool[changed token, state] of one text."""
        size = self._length
        text = self._texts(size)[0]
        changed = np.tile(text, (size, 1))
        np.fill_diagonal(changed, self._other(text))
        # A longer text is among them, so that there is something to mask where texts are padded.
        states = read(pack([text, *changed, *self._texts(size + 1)], self.backbone.device))
        states = states[: (size + 1) * size].float().unflatten(0, (size + 1, size))
        return (states[1:] - states[0]).abs().amax(-1) > _MOVED * states.abs().max()

    def apart(self, *ways: Callable[[Packed], Tensor]) -> bool:
        """Whether two ways of reading give other states."""
        texts = self._packed_texts()
        return _apart(*(read(texts) for read in ways))

    def try_packed(self, own: Attention) -> str | None:
        """Make the model read packed; why not, where it cannot. `own`: how it reads by itself."""
        backbone, model, asked = self.backbone, self.backbone.model, self.backbone.attention
        kind = model.config.model_type
        if not model._can_set_attn_implementation() or not backbone.takes_positions:
            return f"{kind} computes attention or positions in a way of its own"
        attention_before = model.config._attn_implementation
        try:
            model.set_attn_implementation(NAME)
            backbone.packed = True
            states = {}
            for backbone.attention in (own, asked):
                backbone.states(pack(self._texts(1, 2), backbone.device))  # finds the windows
                states[backbone.attention] = backbone.states(self._packed_texts())
            wrong = self.direction(backbone.states) != asked or self._mixes_texts()
        except Exception as error:  # whatever a model does with what it does not know
            return self._unpacked(f"{kind} fails: {first_line(error)}", asked, attention_before)
        self._unpacked("", asked, attention_before)
        if wrong:
            return f"{kind} mixes what it should keep apart"
        for way in states:
            if way != own:
                backbone.point(way)
                if self.direction(backbone.read_own_way) != way:
                    continue  # transformers cannot read it that way, so there is nothing to compare with
            if _apart(states[way], backbone.read_own_way(self._packed_texts())):
                return f"{kind} computes other states packed"
        model.set_attn_implementation(NAME)
        backbone.packed = True
        return None

    def _unpacked(self, why: str, attention: Attention, implementation: str) -> str:
        """As it was before packing was tried; hands back `why`."""
        self.backbone.model.set_attn_implementation(implementation)
        self.backbone.packed, self.backbone.attention = False, attention
        return why

    def _mixes_texts(self) -> bool:
        """Whether other texts of a pack move a text's states."""
        first, second, other = self._texts(4, 5, 4)
        packs = (pack([first, second, other], self.backbone.device), pack([other, second, first], self.backbone.device))
        return _apart(*(self.backbone.states(texts)[4:9] for texts in packs))

    def _packed_texts(self) -> Packed:
        """Texts of several lengths, some beyond each sliding window."""
        context = self.backbone.context
        beyond = [min(window + 8, context) for window in self.backbone.windows if window < context]
        return pack(self._texts(*(min(length, context) for length in (5, 3, 7, 1, 7)), *beyond), self.backbone.device)

    def _texts(self, *lengths: int) -> list[np.ndarray]:
        random = np.random.default_rng(0)
        return [random.choice(self._usable, length) for length in lengths]

    def _other(self, text: np.ndarray) -> np.ndarray:
        """For each token another one."""
        return self._usable[(np.searchsorted(self._usable, text) + 1) % len(self._usable)]


def _apart(one: Tensor, other: Tensor, close: float = _CLOSE) -> bool:
    return not bool((one - other).abs().max() <= close * other.abs().max())  # nan is apart from all
