"""A Hugging Face model without its head, which reads packed texts in one direction, proved by what a changed token moves."""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megaenc.finetune.attention import Reading, reading
from megaenc.finetune.packing import Packed

Attention = Literal["bidirectional", "causal"]


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
