"""Documents that lie end to end in one row, and the attention they are read under."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megaenc.model.functional import Rotation
from megaenc.objectives import Attention


@dataclass(frozen=True)
class PrefixRows:
    """The rows of a pack in two parts, prefixes and the rest, for kernels that know one mask a call."""

    prefix: torch.Tensor  # int64[P], the rows of prefixes; may be empty
    suffix: torch.Tensor  # int64[S - P], never empty
    cu_seqlens_prefix: torch.Tensor  # int32, of the prefixes that are not empty
    cu_seqlens_suffix: torch.Tensor  # int32[D + 1]
    longest_prefix: int
    longest_suffix: int

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, prefixes: np.ndarray, device: torch.device) -> "PrefixRows":
        """`lengths` and `prefixes`: int64[D]."""
        places = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        in_prefix = places < np.repeat(prefixes, lengths)
        some, rest = prefixes[prefixes > 0], lengths - prefixes
        rows = [np.flatnonzero(in_prefix), np.flatnonzero(~in_prefix)]
        ends = [np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) for counts in (some, rest)]
        tensors = (copy_to_device(torch.from_numpy(array), device) for array in (*rows, *ends))
        return cls(*tensors, int(prefixes.max()), int(rest.max()))


@dataclass
class PackedSequences(PackedSeqParams):
    """Documents of one row and the attention they are read under; travels to core attention as `packed_seq_params`.

    `qkv_format` stays "sbhd", so that megatron-core's SelfAttention leaves the layout alone. Unlike an object passed as
    `attention_mask` it reaches the core attention through every recompute mode.
    """

    attention: Attention = Attention.BIDIRECTIONAL
    documents: list[tuple[int, int]] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    """Of each document, under Attention.PREFIX."""
    prefix_rows: PrefixRows | None = None
    """The same for the kernels of accelerators."""
    rotation: Rotation | None = None
    """Which the encoder puts in: of each token by its place in its document."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What an attention has made of the above for all layers, by a key of its own."""

    @classmethod
    def from_edges(
        cls, edges: list[int], attention: Attention, device: torch.device, prefixes: np.ndarray | None = None
    ) -> "PackedSequences":
        """Build it of documents between `edges` (0 first, the row's length last); ValueError if their `prefixes` do not fit."""
        lengths = np.diff(np.array(edges, dtype=np.int64))
        if (prefixes is None) == (attention == Attention.PREFIX):
            raise ValueError(f"{attention} attention: found prefixes {prefixes}, expected them under prefix attention alone")
        if prefixes is not None and (prefixes.shape != lengths.shape or (prefixes < 0).any() or (prefixes >= lengths).any()):
            raise ValueError(f"prefixes: found {prefixes}, expected for each document less than its length, {lengths}")
        cu_seqlens = copy_to_device(torch.tensor(edges, dtype=torch.int32), device)
        longest = int(lengths.max())
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attention=attention,
            documents=list(pairwise(edges)),
            prefixes=[] if prefixes is None else prefixes.tolist(),
            prefix_rows=None if prefixes is None else PrefixRows.from_lengths(lengths, prefixes, device),
        )

    def spans(self) -> list[tuple[int, int, int]]:
        """(start, prefix, stop) of each document: what lies before `prefix` sees each other, the rest what comes before it."""
        if self.attention == Attention.PREFIX:
            return [(start, start + prefix, stop) for (start, stop), prefix in zip(self.documents, self.prefixes, strict=True)]
        whole = self.attention == Attention.BIDIRECTIONAL
        return [(start, stop if whole else start, stop) for start, stop in self.documents]


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, made on the host, on `device`, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
