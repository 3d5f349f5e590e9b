"""Documents packed end to end in one row, and their attention mask."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megaenc.data.packing.packed_dataset import concat_ranges
from megaenc.model.functional import Rotation
from megaenc.objectives import Attention


@dataclass(frozen=True)
class PrefixRows:
    """Token indices of prefixes and suffixes under prefix attention.

    Each document is a prefix, whose tokens attend to each other, and a suffix, whose tokens attend
    to themselves and all tokens before them. Kernels with one mask per call attend to both
    separately. Built by `from_lengths`.

    prefix, suffix: int64[P] and int64[S - P], token indices in the row, which may be empty;
    cu_seqlens_prefix: int32, cumulative lengths of the prefixes that are not empty, from 0;
    cu_seqlens_suffix: int32[D + 1], those of all suffixes; longest_prefix, longest_suffix: most
    tokens of one.
    """

    prefix: torch.Tensor
    suffix: torch.Tensor
    cu_seqlens_prefix: torch.Tensor
    cu_seqlens_suffix: torch.Tensor
    longest_prefix: int
    longest_suffix: int

    @classmethod
    def from_lengths(
        cls, lengths: np.ndarray, prefixes: np.ndarray, device: torch.device
    ) -> "PrefixRows":
        """Return the PrefixRows of the documents of a row, with tensors on `device`.

        Nothing is checked; there is at least one document.

        Args:
            lengths: int64[D], tokens of each document, in order.
            prefixes: int64[D], tokens of each document's prefix, from 0 to its length.
            device: Device of the tensors.
        """
        in_prefix = concat_ranges(lengths) < np.repeat(prefixes, lengths)
        nonempty = prefixes[prefixes > 0]
        rest = lengths - prefixes
        rows = [np.flatnonzero(in_prefix), np.flatnonzero(~in_prefix)]
        ends = [
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) for counts in (nonempty, rest)
        ]
        tensors = (copy_to_device(torch.from_numpy(array), device) for array in (*rows, *ends))
        return cls(*tensors, int(prefixes.max()), int(rest.max()))


@dataclass
class PackedSequences(PackedSeqParams):
    """Document boundaries, attention mask and rotary positions of one row of tokens.

    Built by `from_cu_seqlens`: `documents` are (start, stop) in the row, `attention` is their mask,
    and `prefixes` are prefix lengths, empty except under Attention.PREFIX (`prefix_rows` has them
    for kernels); `spans` combines these three. A caller that wants dropout then sets
    `dropout_keys`, and `Encoder.forward` adds `rotation`, `local_rotation` and `output_rows` in a
    copy; they are None before. Backends keep derived data in `cache`. It is passed to the core
    attention as `packed_seq_params`, which, unlike `attention_mask`, reaches it in every recompute
    mode. `qkv_format` stays "sbhd", so that megatron-core's SelfAttention does not change the
    layout.
    """

    attention: Attention = Attention.BIDIRECTIONAL
    documents: list[tuple[int, int]] = field(default_factory=list)
    """(start, stop) of each document in the row"""
    prefixes: list[int] = field(default_factory=list)
    """prefix length of each document under Attention.PREFIX, else empty"""
    prefix_rows: PrefixRows | None = None
    """the prefixes as accelerator kernels need them"""
    rotation: Rotation | None = None
    """rotary positions of the tokens in their documents, set by the encoder"""
    local_rotation: Rotation | None = None
    """the same for layers with a window"""
    dropout_keys: torch.Tensor | None = None
    """int64[S], random numbers of the tokens that decide what is dropped; None: nothing"""
    output_rows: torch.Tensor | None = None
    """int64[N], the tokens whose hidden states are needed after the last layer, set by the encoder;
    None: all"""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """data that an attention backend derives once for all layers"""

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: list[int],
        attention: Attention,
        device: torch.device,
        prefixes: np.ndarray | None = None,
    ) -> "PackedSequences":
        """Return the PackedSequences of a row, without rotary positions and dropout.

        Args:
            cu_seqlens: Cumulative document lengths, increasing from 0 to the number of tokens,
                which is not checked; one document at least.
            attention: Mask within each document.
            device: Device of the model, to which tensors are copied.
            prefixes: int64[D], prefix length of each document, under prefix attention; else None.

        Raises:
            ValueError: `prefixes` do not fit the attention or the documents.
        """
        lengths = np.diff(np.array(cu_seqlens, dtype=np.int64))
        if (prefixes is None) == (attention == Attention.PREFIX):
            raise ValueError(
                f"{attention} attention: found prefixes {prefixes}, "
                "expected them only under prefix attention"
            )
        if prefixes is not None and (
            prefixes.shape != lengths.shape or (prefixes < 0).any() or (prefixes > lengths).any()
        ):
            raise ValueError(
                f"prefixes: found {prefixes}, expected for each document at most its length, "
                f"{lengths}"
            )
        device_cu_seqlens = copy_to_device(torch.tensor(cu_seqlens, dtype=torch.int32), device)
        longest = int(lengths.max())
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=device_cu_seqlens,
            cu_seqlens_kv=device_cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attention=attention,
            documents=list(pairwise(cu_seqlens)),
            prefixes=[] if prefixes is None else prefixes.tolist(),
            prefix_rows=None
            if prefixes is None
            else PrefixRows.from_lengths(lengths, prefixes, device),
        )

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (start, prefix end, stop) of each document, in order, as token indices.

        Tokens from `start` to before `prefix end` attend to each other, later ones to all tokens of
        their document before them; `prefix end` is `stop` under bidirectional and `start` under
        causal attention.
        """
        if self.attention == Attention.PREFIX:
            return [
                (start, start + prefix, stop)
                for (start, stop), prefix in zip(self.documents, self.prefixes, strict=True)
            ]
        bidirectional = self.attention == Attention.BIDIRECTIONAL
        return [(start, stop if bidirectional else start, stop) for start, stop in self.documents]


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a CPU tensor on a device, started without blocking.

    The copy is made from pinned memory in the current stream; a tensor that is pinned already must
    not change before the copy is done. On a CPU it is the tensor itself.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
