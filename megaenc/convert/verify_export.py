"""Verification that an export computes the same as megatron-core's model.

The export is loaded with transformers. Both compute in float32, whatever the dtype of the weights,
so that differences are not due to rounding.
"""

import hashlib
from collections.abc import Iterator, Sequence
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
from megaenc.hf.model import find_model_class
from megaenc.objectives import Attention

_PROBE_LENGTH = 32  # tokens of the longest document, if no layer has a window
_VARIANT_LENGTH = 8  # tokens of the document whose tokens are changed in turn
_TOLERANCE = 1e-4  # absolute for outputs up to 10; 1e-5 of the largest output otherwise
_KERNELS = ("eager", "sdpa")
_GLOBAL = "full_attention"
_LOCAL = "sliding_attention"
_CHUNK_ROWS = 8192  # of an output layer that are cast to float32 at a time


@dataclass(frozen=True)
class ProbeBatch:
    """Fixed token ids with which two models are compared, by `build`.

    documents: three Tensors, int64[length], the longest first. variants: int64[1 + n, n], a short
    document with each token changed in turn: row 0 is the original, row k has another token k - 1.
    """

    documents: tuple[Tensor, ...]
    variants: Tensor

    @classmethod
    def build(cls, vocab_size: int, context: int, window: int | None = None) -> "ProbeBatch":
        """Return the ProbeBatch for a model, on the CPU.

        Args:
            vocab_size: Number of token ids.
            context: Maximum length of a document in tokens.
            window: Window of local layers, tokens to each side; None: none. The longest document
                has 3 * `window` tokens or more if `context` allows.
        """
        longest = _PROBE_LENGTH if window is None else max(_PROBE_LENGTH, 3 * window)
        lengths = [max(1, min(longest, context) * part // 3) for part in (3, 2, 1)]
        stream = (torch.arange(sum(lengths) + _VARIANT_LENGTH) * 7919 + 11) % vocab_size
        *documents, short = stream.split([*lengths, _VARIANT_LENGTH])
        short = short[: min(_VARIANT_LENGTH, context)]
        variants = short.repeat(len(short) + 1, 1)
        variants[1:].diagonal().copy_((short + vocab_size // 2 + 1) % vocab_size)
        return cls(tuple(documents), variants)


class ProbeOutputs(NamedTuple):
    """A model's float32 logits, or hidden states, for a ProbeBatch.

    documents: Tensors [length, V or H]; variants: Tensor [1 + n, n, V or H]. They are on the CPU,
    and logits are without padding of the vocabulary.
    """

    documents: list[Tensor]
    variants: Tensor


def compute_core_outputs(
    encoder: Any, probe: ProbeBatch, attention: Attention, encoder_only: bool = False
) -> ProbeOutputs:
    """Return megatron-core's logits for `probe`, all packed in one row, in float32.

    The encoder computes on its device, with weights cast to float32 while they are used. Its dtype
    and mode (training or evaluation) stay; its `post_process` becomes not `encoder_only`.

    Args:
        encoder: Encoder of a single rank, with all layers.
        attention: Attention mask to compute with.
        encoder_only: Return hidden states instead.
    """
    from megaenc.model.linear_cross_entropy import Predictions
    from megaenc.model.packed_sequences import PackedSequences

    parts = [*probe.documents, *probe.variants]
    positions = [torch.arange(len(part)) for part in parts]
    device = next(encoder.parameters()).device
    packing = PackedSequences.from_cu_seqlens([0, *accumulate(map(len, parts))], attention, device)
    with torch.inference_mode(), _computing_in_float32(encoder, encoder.output_layer):
        tokens = torch.cat(parts)[None].to(device)
        position_ids = torch.cat(positions).to(encoder.angles.device)
        encoder.post_process = not encoder_only
        outputs = encoder(tokens, position_ids, packing, Predictions(None)).cpu()
    rows = outputs.squeeze(1) if encoder_only else outputs[:, : encoder.vocab_size]
    *documents, variants = rows.split([*map(len, probe.documents), probe.variants.numel()])
    return ProbeOutputs(documents, variants.unflatten(0, tuple(probe.variants.shape)))


def verify_export(
    directory: Path,
    probe: ProbeBatch,
    expected: ProbeOutputs,
    attention: Attention,
    digests: dict[str, str],
    windows: Sequence[int | None],
) -> dict[str, Any]:
    """Check an export's weights, outputs and mask; return results for conversion.json.

    transformers computes in float32 on this process's device. A difference is an InputError; that
    of outputs may be up to 1e-4, or 1e-5 of the largest output if that is more.

    Args:
        directory: Export with config.json and weights.
        probe: Token ids that both models compute.
        expected: Outputs of megatron-core for them, by `compute_core_outputs`.
        attention: Attention that the export must have.
        digests: SHA-256 of each weight, by its name in the export, as of `write_shards`.
        windows: Window of each layer in tokens to each side, None if it is global.
    """
    from megaenc.backend.device import detect_backend

    model, architecture = _load_export(directory)
    _check_windows(model.config, windows, attention)
    state = model.state_dict()
    for name, digest in digests.items():
        if hashlib.sha256(memoryview(tensor_bytes(state[name]))).hexdigest() != digest:
            raise _VerificationError(f"`{name}` is not what was written")
    del state  # it would keep weights that are cast or copied to a device
    model = model.eval().requires_grad_(False).to(detect_backend().device)
    largest = max(float(rows.abs().max()) for rows in (*expected.documents, expected.variants))
    tolerance = max(_TOLERANCE, _TOLERANCE * largest / 10)
    _check_mask(
        _measure_influence(expected.variants, "megatron-core"), attention, "megatron-core's model"
    )
    kernels = {}
    for kernel in _KERNELS:
        model.set_attn_implementation(kernel)
        kernels[kernel] = _compare_outputs(
            model, probe, expected, attention, f"{kernel} attention", tolerance
        )
    return {
        "transformers": version("transformers"),
        "torch": torch.__version__,
        "class": architecture,
        "attention": str(attention),
        "compared": "hidden states" if model.get_output_embeddings() is None else "logits",
        "computed_in": "float32",
        "documents": [len(document) for document in probe.documents],
        "largest": largest,
        "largest_difference": kernels,
        "tolerance": tolerance,
        "mask": {name: str(attention) for name in ("megatron-core", *_KERNELS)},
        "sha256": digests,
    }


class _VerificationError(InputError):
    """An export that differs from the run's model."""


def _load_export(directory: Path) -> tuple[Any, str]:
    """Load the model of an export with the class of its config.

    Returns:
        The model, and the name of its class.
    """
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(directory)
    (architecture,) = config.architectures
    model_class = find_model_class(architecture)
    model, report = model_class.from_pretrained(
        directory, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise _VerificationError(
                f"{architecture} finds {kind.replace('_', ' ')}: "
                f"{sorted(map(str, report[kind]))[0]}"
            )
    return model, architecture


def _check_windows(config: Any, windows: Sequence[int | None], attention: Attention) -> None:
    """Raise an error if layers in the config have other windows than `windows`.

    Probe texts might not reveal it.
    """
    # Without a list, a window is that of all layers.
    kinds = getattr(config, "layer_types", None) or [_LOCAL] * len(windows)
    # Gemma's windows, and those of transformers' causal models, count the token that attends.
    counts_itself = attention == Attention.CAUSAL or hasattr(config, "use_bidirectional_attention")
    # The weights tell the number of layers.
    for layer_index, (kind, expected) in enumerate(zip(kinds, windows, strict=False)):
        window = getattr(config, "sliding_window", None) if kind == _LOCAL else None
        expected_kind = _GLOBAL if expected is None else _LOCAL
        right = "none" if expected is None else expected + counts_itself
        if (window or "none") != right:
            name = "sliding_window"
            actual = window or "none"
        elif kind != expected_kind and getattr(config, "layer_types", None):
            name = "layer_types"
            actual = kind
            right = expected_kind
        else:
            continue
        raise _VerificationError(
            f"config.json: layer {layer_index}: field `{name}`: found {actual}, expected {right}"
        )


def _compare_outputs(
    model: Any,
    probe: ProbeBatch,
    expected: ProbeOutputs,
    attention: Attention,
    label: str,
    tolerance: float,
) -> dict[str, float]:
    """Return the largest differences between outputs of `model` and `expected`.

    They are absolute, without and with padding. Raises an error, which begins with `label`, if one
    exceeds `tolerance` or the mask is not that of `attention`.
    """
    tokens = pad_sequence(
        probe.documents, batch_first=True, padding_value=model.config.pad_token_id or 0
    )
    mask = pad_sequence(
        [torch.ones_like(document) for document in probe.documents], batch_first=True
    )
    variants = _compute_hf_outputs(model, probe.variants)
    padded = _compute_hf_outputs(model, tokens, mask)
    differences = [
        (actual[: len(rows)] - rows).abs().max()
        for actual, rows in zip(padded, expected.documents, strict=True)
    ]
    largest = {
        "without padding": float((variants - expected.variants).abs().max()),
        "with padding": float(torch.stack(differences).max()),
    }
    _check_mask(_measure_influence(variants, label), attention, label)
    for case, difference in largest.items():
        if not difference <= tolerance:  # also fails for NaN
            raise _VerificationError(
                f"{label}, {case}: outputs differ by {difference:.2e}, "
                f"expected at most {tolerance:.1e}"
            )
    return largest


def _compute_hf_outputs(model: Any, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Compute transformers' logits, float32[rows, tokens, V] on the CPU.

    A model without an output layer gives hidden states instead, float32[rows, tokens, H].
    """
    device = model.device
    with torch.inference_mode(), _computing_in_float32(model, model.get_output_embeddings()):
        mask = None if attention_mask is None else attention_mask.to(device)
        output = model(input_ids=tokens.to(device), attention_mask=mask, use_cache=False)
    states = output.logits if "logits" in output else output.last_hidden_state
    return states.float().cpu()


def _measure_influence(variants: Tensor, label: str) -> Tensor:
    """Return bool[n, n]: whether the output at position j changes with token i.

    Changes that rounding explains do not count.
    """
    change = (variants[1:] - variants[0]).abs().amax(dim=-1)
    if not change.isfinite().all():
        raise _VerificationError(f"{label}: found outputs that are not finite")
    return change > 1e-5 * variants.abs().max()


def _check_mask(influence: Tensor, attention: Attention, label: str) -> None:
    """Raise an error if `influence` is not the mask of `attention`.

    Args:
        influence: By `_measure_influence`.
        label: Beginning of the error.
    """
    expected = (
        torch.ones_like(influence).triu()
        if attention == Attention.CAUSAL
        else torch.ones_like(influence)
    )
    wrong = (influence != expected).nonzero().tolist()
    if wrong:
        token, position = wrong[0]
        verb = "attends" if influence[token, position] else "does not attend"
        raise _VerificationError(
            f"{label} is not {attention}: position {position} {verb} to token {token}"
        )


@contextmanager
def _computing_in_float32(model: Any, head: Any) -> Iterator[None]:
    """Make a bfloat16 model compute in float32 within the block.

    The weights of a module are cast only while it runs, and those of the output layer `head`, if
    there is one, in chunks.
    """
    dtype = next(model.parameters()).dtype
    if dtype == torch.float32:
        yield
        return
    handles = []
    for module in model.modules():
        if module is head or not list(module.parameters(recurse=False)):
            continue
        if "Embedding" in type(module).__name__:
            handles.append(
                module.register_forward_hook(lambda module, inputs, output: output.float())
            )
            continue
        handles.append(
            module.register_forward_pre_hook(
                lambda module, inputs: _cast_parameters(module, torch.float32)
            )
        )
        handles.append(
            module.register_forward_hook(
                lambda module, inputs, output: _cast_parameters(module, dtype)
            )
        )
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
    """Cast a module's own parameters to `dtype` in place."""
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(dtype)  # bfloat16 to float32 and back is exact


def _project_in_chunks(
    head: Any, hidden: Tensor, weight: Tensor | None = None, *of_loss: Any
) -> Tensor:
    """Return the output layer's logits of `hidden` in float32, in chunks of rows.

    It replaces the `forward` of the output layer; `of_loss`, its arguments for the loss, are not
    needed.
    """
    weight = head.weight if weight is None else weight
    logits = torch.cat(
        [F.linear(hidden, rows.float()) for rows in weight.split(_CHUNK_ROWS)], dim=-1
    )
    return logits if head.bias is None else logits + head.bias.float()
