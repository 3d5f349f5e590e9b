"""The proof of an export: the folder, loaded as its users load it, computes what megatron-core's model computes.

Both compute in float32, whatever their weights are stored in: then what differs is the model and not the rounding.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megaenc.convert.safetensors_writer import tensor_bytes
from megaenc.errors import InputError
from megaenc.objectives import Attention

MAX_PROBE_LENGTH = 32  # tokens of the longest document
_VARIANT_LENGTH = 8  # tokens of the document of which one after the other is changed
_TOLERANCE = 1e-4  # of the largest number up to 10; of larger ones, 1e-5 of them
_KERNELS = ("eager", "sdpa")
_CHUNK_ROWS = 8192  # of an output layer that are widened at once


@dataclass(frozen=True)
class ProbeBatch:
    """Fixed tokens: documents of three lengths, and a short one with each of its tokens changed in turn."""

    documents: tuple[Tensor, ...]  # int64[length], the longest first
    variants: Tensor  # int64[1 + n, n]; row 0 is as it was, row k has another token k - 1

    @classmethod
    def build(cls, vocab_size: int, context: int) -> "ProbeBatch":
        """Return it for a model with so many rows that reads so many tokens."""
        lengths = [max(1, min(MAX_PROBE_LENGTH, context) * part // 3) for part in (3, 2, 1)]
        stream = (torch.arange(sum(lengths) + _VARIANT_LENGTH) * 7919 + 11) % vocab_size
        *documents, short = stream.split([*lengths, _VARIANT_LENGTH])
        short = short[: min(_VARIANT_LENGTH, context)]
        variants = short.repeat(len(short) + 1, 1)
        variants[1:].diagonal().copy_((short + vocab_size // 2 + 1) % vocab_size)
        return cls(tuple(documents), variants)


class ProbeOutputs(NamedTuple):
    """Logits (or states, of a model without an output layer), float32."""

    documents: list[Tensor]  # [length, V] each
    variants: Tensor  # [1 + n, n, V]


def compute_core_outputs(encoder: Any, probe: ProbeBatch, attention: Attention, head: bool) -> ProbeOutputs:
    """What megatron-core's model makes of `probe`: all documents end to end in one pack. `head`: whether to the logits."""
    from megaenc.model.packed_sequences import PackedSequences

    parts = [*probe.documents, *probe.variants]
    positions = [torch.arange(len(part)) for part in parts]
    device = next(encoder.parameters()).device
    packing = PackedSequences.from_edges([0, *accumulate(map(len, parts))], attention, device)
    if not head:
        encoder.head = lambda hidden, predict_at, labels: hidden.squeeze(1)
    with torch.inference_mode(), _computing_in_float32(encoder, encoder.output_layer if head else None):
        tokens, places = torch.cat(parts)[None].to(device), torch.cat(positions).to(encoder.angles.device)
        rows = encoder(tokens, places, packing, None).cpu()
    if head:
        rows = rows[:, : encoder.vocab_size]
    *documents, variants = rows.split([*map(len, probe.documents), probe.variants.numel()])
    return ProbeOutputs(documents, variants.unflatten(0, tuple(probe.variants.shape)))


def verify_export(
    folder: Path, probe: ProbeBatch, expected: ProbeOutputs, attention: Attention, digests: dict[str, str]
) -> dict[str, Any]:
    """Load the model in `folder` and compare; return what conversion.json says. InputError where anything differs."""
    from megaenc.backend.device import detect_backend

    model, architecture = _load_export(folder)
    _check_window(model.config)
    _check_weights(model, digests)
    model = model.eval().requires_grad_(False).to(detect_backend().device)
    largest = max(float(rows.abs().max()) for rows in (*expected.documents, expected.variants))
    tolerance = max(_TOLERANCE, _TOLERANCE * largest / 10)
    _check_mask(_measure_influence(expected.variants, "megatron-core"), attention, "megatron-core's model")
    kernels = {}
    for kernel in _KERNELS:
        model.set_attn_implementation(kernel)
        kernels[kernel] = _compare_outputs(model, probe, expected, attention, f"{kernel} attention", tolerance)
    return {
        "transformers": version("transformers"),
        "torch": torch.__version__,
        "class": architecture,
        "attention": str(attention),
        "compared": "logits" if model.get_output_embeddings() is not None else "states",
        "computed_in": "float32",
        "documents": [len(document) for document in probe.documents],
        "largest": largest,
        "largest_difference": kernels,
        "tolerance": tolerance,
        "mask": {name: str(attention) for name in ("megatron-core", *_KERNELS)},
        "sha256": digests,
    }


class _VerificationError(InputError):
    """The export is not the model."""


def _load_export(folder: Path) -> tuple[Any, str]:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    kind = getattr(transformers, architecture)
    model, report = kind.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[what]:
            raise _VerificationError(f"{architecture} finds {what.replace('_', ' ')}: {sorted(map(str, report[what]))[0]}")
    return model, architecture


def _check_window(config: Any) -> None:
    """No text here is as long as a window, so a window would not show in any number."""
    if (window := getattr(config, "sliding_window", None)) is not None:
        raise _VerificationError(f"config.json: field `sliding_window`: found {window}, expected none")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise _VerificationError(f"config.json: field `layer_types`: found {kind}, expected full_attention in every layer")


def _check_weights(model: Any, digests: dict[str, str]) -> None:
    state = model.state_dict()
    for name, digest in digests.items():
        if hashlib.sha256(memoryview(tensor_bytes(state[name]))).hexdigest() != digest:
            raise _VerificationError(f"`{name}` is not what was written")


def _compare_outputs(
    model: Any, probe: ProbeBatch, expected: ProbeOutputs, attention: Attention, who: str, tolerance: float
) -> dict[str, float]:
    """The largest absolute difference over all tokens: of documents of one length, and of some that have to be padded.

    _Failed where one is beyond `tolerance`, or the mask is not that of `attention`.
    """
    tokens = pad_sequence(probe.documents, batch_first=True, padding_value=model.config.pad_token_id or 0)
    seen = pad_sequence([torch.ones_like(document) for document in probe.documents], batch_first=True)
    variants, padded = _compute_hf_outputs(model, probe.variants), _compute_hf_outputs(model, tokens, seen)
    differences = [(here[: len(wanted)] - wanted).abs().max() for here, wanted in zip(padded, expected.documents, strict=True)]
    found = {
        "without padding": float((variants - expected.variants).abs().max()),
        "with padding": float(torch.stack(differences).max()),
    }
    _check_mask(_measure_influence(variants, who), attention, who)
    for what, difference in found.items():
        if not difference <= tolerance:  # NaN is no pass
            raise _VerificationError(f"{who}, {what}: logits differ by {difference:.2e}, expected at most {tolerance:.1e}")
    return found


def _compute_hf_outputs(model: Any, tokens: Tensor, seen: Tensor | None = None) -> Tensor:
    """Logits, or states, [rows, tokens, V] on the host."""
    head = model.get_output_embeddings()
    device = model.device
    with torch.inference_mode(), _computing_in_float32(model, head):
        mask = None if seen is None else seen.to(device)
        output = model(input_ids=tokens.to(device), attention_mask=mask, use_cache=False)
    return (output.last_hidden_state if head is None else output.logits).float().cpu()


def _measure_influence(variants: Tensor, who: str) -> Tensor:
    """bool[n, n]: whether position j moved when token i was changed. By more than any rounding moves it."""
    moved = (variants[1:] - variants[0]).abs().amax(dim=-1)
    if not moved.isfinite().all():
        raise _VerificationError(f"{who}: found numbers that are not finite")
    return moved > 1e-5 * variants.abs().max()


def _check_mask(sees: Tensor, attention: Attention, who: str) -> None:
    expected = torch.ones_like(sees).triu() if attention == Attention.CAUSAL else torch.ones_like(sees)
    wrong = (sees != expected).nonzero().tolist()
    if wrong:
        token, position = wrong[0]
        verb = "sees" if sees[token, position] else "does not see"
        raise _VerificationError(f"{who} is not {attention}: position {position} {verb} token {token}")


@contextmanager
def _computing_in_float32(model: Any, head: Any) -> Iterator[None]:
    """Let a model that is stored in bfloat16 compute in float32: each layer's weights are widened while it computes.

    So only one layer is in memory in both; of `head`, the output layer, a piece at a time.
    """
    narrow = next(model.parameters()).dtype
    if narrow == torch.float32:
        yield
        return
    handles = []
    for module in model.modules():
        if module is head or not list(module.parameters(recurse=False)):
            continue
        if "Embedding" in type(module).__name__:
            handles.append(module.register_forward_hook(lambda module, inputs, output: output.float()))
            continue
        handles.append(module.register_forward_pre_hook(lambda module, inputs: _cast_parameters(module, torch.float32)))
        handles.append(module.register_forward_hook(lambda module, inputs, output: _cast_parameters(module, narrow)))
    if head is not None:
        head.forward = partial(_project_in_chunks, head)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if head is not None:
            del head.forward


def _cast_parameters(module: Any, dtype: torch.dtype) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)  # there and back is exact


def _project_in_chunks(head: Any, hidden: Tensor, weight: Tensor | None = None, labels: None = None) -> Tensor:
    """What the output layer computes without labels: a plain product."""
    weight = head.weight if weight is None else weight
    return torch.cat([F.linear(hidden, rows.float()) for rows in weight.split(_CHUNK_ROWS)], dim=-1)
