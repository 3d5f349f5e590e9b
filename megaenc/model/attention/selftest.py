"""Self-test of attention backends on the current machine.

Values and gradients are compared with the formula in float32. Accelerator kernels have been
silently wrong for a mask, a head width or a device.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megaenc.backend.device import uses_tf32
from megaenc.counter_rng import normal_rows
from megaenc.errors import format_error
from megaenc.model.attention.backends import compute_attention, missing_requirement
from megaenc.model.attention.padded import MASK_BYTES_LIMIT, max_mask_bytes
from megaenc.model.kernels.selftest import SelfTestResult
from megaenc.model.packed_sequences import PackedSequences
from megaenc.objectives import Attention

_RESULT_NAMES = ("values", "gradients of queries", "gradients of keys", "gradients of values")
_LOUD_FACTOR = 8
_QUERY_SCALE = 2.0  # makes attention peaked, so that a wrong scale or mask is noticed


@dataclass(frozen=True)
class TrialPack:
    """Row of a self-test: `lengths` of its documents and their `prefixes`, in tokens.

    The prefixes, one for each document, are used under prefix attention only.
    """

    lengths: tuple[int, ...]  # one token, longer than a kernel's tile, no round length
    prefixes: tuple[int, ...]  # part of a document, most of it, none, all but one token, all

    @property
    def cu_seqlens(self) -> list[int]:
        """Return the cumulative document lengths, from 0 to the number of tokens."""
        return [0, *accumulate(self.lengths)]

    @property
    def loud(self) -> Tensor:
        """Return which tokens are scaled to detect leaks from them, bool[S, 1, 1].

        They are the tokens of every other document, from the second on. The tensor is on the CPU.
        """
        return torch.from_numpy(np.repeat(np.arange(len(self.lengths)) % 2 == 1, self.lengths))[
            :, None, None
        ]


_ACCELERATOR_PACK = TrialPack((5, 259, 1, 67, 130), (2, 200, 0, 66, 130))
# CPU kernels have smaller tiles, and the test takes longer.
_CPU_PACK = TrialPack((5, 41, 1, 33, 18), (2, 30, 0, 32, 18))
_MAX_TRIAL_LENGTH = 2048  # tokens; the formula needs its square on the CPU


def check_backend(
    name: str,
    *,
    heads: int,
    groups: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    masks: Iterable[Attention] = tuple(Attention),
    windows: Iterable[int | None] = (None,),
    seq_length: int = 0,
    packs: int = 1,
) -> SelfTestResult:
    """Return the result of testing an attention backend on a device, on this rank.

    An exception of the backend is a failure, and so are masks of cudnn above MASK_BYTES_LIMIT and
    a `missing_requirement`. `heads` (of queries), `groups` (key/value heads) and `head_dim` (width
    of a head) are those of this rank; `dtype` is that of queries, keys and values.

    Args:
        name: One of BACKENDS.
        windows: Windows of the model's layers, None for global attention; no iterator. They are
            cut to a quarter of the longest document of a trial.
        seq_length: Tokens of a pack; accelerators also try a document about as long, up to 2,048.
        packs: Packs of a micro-batch, for the size of the masks of cudnn.
    """
    worst = SelfTestResult(name, True, 0.0, error_tolerance(dtype, head_dim, device), "")
    if reason := missing_requirement(name, device, dtype):
        return dataclasses.replace(worst, available=False, error=None, reason=reason)
    masks = [(mask, window) for mask in masks for window in windows]
    if name == "cudnn" and (reason := _check_mask_memory(packs, seq_length, dtype, masks)):
        return dataclasses.replace(worst, error=None, reason=reason)
    for pack, queries, keys in _trial_packs(device, heads, groups, seq_length):
        tolerance = error_tolerance(dtype, max(pack.lengths) + head_dim, device)
        inputs = [x.to(dtype) for x in _draw_inputs(sum(pack.lengths), queries, keys, head_dim)]
        for mask, window in masks:
            window = None if window is None else min(window, max(pack.lengths) // 4)
            local = "" if window is None else f", {window} tokens to each side,"
            condition = f"under {mask} attention{local} with heads {head_dim} wide"
            try:
                for label, error in _compare_with_reference(
                    name, pack, inputs, mask, window, device
                ):
                    if not error <= tolerance:
                        failure = (
                            "NaN"
                            if math.isnan(error)
                            else f"off by {error:.2g} (tolerance {tolerance:.2g})"
                        )
                        return SelfTestResult(
                            name, True, error, tolerance, f"{label} {failure} {condition}"
                        )
                    if error >= worst.error:
                        worst = SelfTestResult(name, True, error, tolerance, "")
            except Exception as error:  # kernels raise errors of many types
                return SelfTestResult(
                    name,
                    True,
                    None,
                    tolerance,
                    f"{type(error).__name__} {condition}: {format_error(error)}",
                )
    return worst


def _trial_packs(
    device: torch.device, heads: int, groups: int, seq_length: int
) -> Iterator[tuple[TrialPack, int, int]]:
    """Yield (pack, query heads, key/value heads) of each trial.

    On an accelerator one trial is as long as the run's packs.
    """
    if device.type == "cpu":
        yield _CPU_PACK, heads, groups
        return
    yield _ACCELERATOR_PACK, heads, groups
    longest = min(seq_length, _MAX_TRIAL_LENGTH) + 3
    if longest > max(_ACCELERATOR_PACK.lengths):
        yield TrialPack((7, 33, longest), (3, 0, longest // 3)), heads // groups, 1


def _check_mask_memory(
    packs: int, seq_length: int, dtype: torch.dtype, masks: list[tuple[Attention, int | None]]
) -> str:
    """Return an error message if the masks of padded documents take too much memory.

    The text is empty if they do not.
    """
    needing_mask = [
        mask for mask, window in masks if mask != Attention.CAUSAL or window is not None
    ]
    if not needing_mask:
        return ""
    # The same micro-batch has a mask for each window.
    largest = max(needing_mask, key=needing_mask.count)
    needed = needing_mask.count(largest) * max_mask_bytes(packs, seq_length, dtype)
    if needed <= MASK_BYTES_LIMIT:
        return ""
    return (
        f"masks under {largest} attention take {needed / 2**30:.3g} GiB if documents fill "
        f"{packs:,} packs of {seq_length:,} "
        f"tokens, more than {MASK_BYTES_LIMIT / 2**30:.3g} GiB; "
        "try a smaller --micro-batch-size or --seq-length"
    )


def error_tolerance(dtype: torch.dtype, terms: int, device: torch.device) -> float:
    """Return the largest acceptable `max_relative_error` of an attention backend.

    It is 16 units of rounding of `dtype` (half its machine epsilon, or TF32's if the device rounds
    float32 to it), plus 4 units of float32 for each of `terms`. A correct kernel reaches 10 units
    with heads 8 wide and 5 with heads 64 or 96 wide; a scale that is 15 % off reaches 70 units of
    bfloat16.

    Args:
        dtype: Dtype of inputs and results.
        terms: Numbers that the backend sums in float32.
        device: Device of the backend.
    """
    unit = torch.finfo(dtype).eps / 2
    if dtype == torch.float32 and uses_tf32(device):
        unit = 2.0**-11
    return 16 * unit + 4 * terms * torch.finfo(torch.float32).eps / 2


def max_relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of a token's head, relative to its expected norm.

    The norm of the error is divided by the expected norm or by the root mean square of all expected
    norms, whichever is larger, so that it is not zero. The result is NaN for any NaN.

    Args:
        actual: [S, heads, D].
        expected: Of the same shape, not zero everywhere.
    """
    size = torch.linalg.vector_norm(expected, dim=-1)
    error = torch.linalg.vector_norm(actual - expected, dim=-1) / size.clamp(
        min=size.square().mean().sqrt()
    )
    return float(error.max())


def _compare_with_reference(
    name: str,
    pack: TrialPack,
    inputs: list[Tensor],
    mask: Attention,
    window: int | None,
    device: torch.device,
) -> Iterator[tuple[str, float]]:
    """Yield (label, maximum relative error) of the results of a backend.

    The change of each result if other documents change is compared, too.
    """
    packing = PackedSequences.from_cu_seqlens(
        pack.cu_seqlens, mask, device, np.array(pack.prefixes) if mask == Attention.PREFIX else None
    )
    references = reference_attention(*(x.float() for x in inputs), packing.spans(), window)
    results = _run_backend(name, inputs, packing, window, device)
    for label, actual, expected in zip(_RESULT_NAMES, results, references, strict=True):
        yield label, max_relative_error(actual, expected)
    loud_results = _run_backend(
        name, [torch.where(pack.loud, x * _LOUD_FACTOR, x) for x in inputs], packing, window, device
    )
    quiet = ~pack.loud.flatten()
    for label, actual, expected in zip(_RESULT_NAMES, loud_results, results, strict=True):
        yield (
            f"{label}, when other documents change,",
            max_relative_error(actual[quiet], expected[quiet]),
        )


def _run_backend(
    name: str,
    inputs: list[Tensor],
    packing: PackedSequences,
    window: int | None,
    device: torch.device,
) -> tuple[Tensor, ...]:
    """Return a backend's values and gradients on the CPU.

    `inputs` are q, k, v and the upstream gradient.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # With gaps, as layers pass a slice of the joint projection.
        strided = F.pad(v, (0, v.size(-1)))[..., : v.size(-1)]
        return compute_attention(name, q, k, strided, packing, window=window)

    return _with_gradients(attend, *(x.to(device) for x in inputs))


def _with_gradients(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, upstream: Tensor
) -> tuple[Tensor, ...]:
    """Return the values of `attend` and the gradients of q, k and v, on the CPU.

    Each is float32[S, heads, dim].
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, upstream)
    return tuple(x.detach().float().cpu() for x in (out, *gradients))


def _draw_inputs(tokens: int, heads: int, groups: int, head_dim: int) -> list[Tensor]:
    """Return random q, k and v, and an upstream gradient, all float32.

    q and the gradient are [S, heads, dim], k and v [S, groups, dim].
    """
    inputs = []
    for name, count, size in (
        ("q", heads, _QUERY_SCALE),
        ("k", groups, 1.0),
        ("v", groups, 1.0),
        ("upstream", heads, 1.0),
    ):
        rows = normal_rows(
            0, f"attention check: {name}", range(tokens), count * head_dim
        ) * np.float32(size)
        inputs.append(torch.from_numpy(rows).view(tokens, count, head_dim))
    return inputs


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upstream: Tensor,
    spans: list[tuple[int, int, int]],
    window: int | None = None,
) -> tuple[Tensor, ...]:
    """Return float32 attention by its formula, and the gradients of q, k and v.

    The results are in this order, with the shapes of q, q, k and v. All tensors are on the CPU. The
    factor of the scores is 1 / sqrt(D).

    Args:
        q: Queries float32[S, H, D].
        k: Keys float32[S, G, D].
        v: Values float32[S, G, D].
        upstream: Gradient of the output, float32[S, H, D].
        spans: (start, prefix end, stop) of each document, as of `PackedSequences.spans`.
        window: Tokens to each side that are attended to; None: all.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        repeats = q.size(1) // k.size(1)
        parts = []
        q = q.transpose(0, 1)
        k = k.repeat_interleave(repeats, dim=1).transpose(0, 1)
        v = v.repeat_interleave(repeats, dim=1).transpose(0, 1)
        for start, prefix, stop in spans:
            mask = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
            mask[: prefix - start, : prefix - start] = True
            if window is not None:
                mask &= torch.ones_like(mask).triu(-window).tril(window)
            scores = (q[:, start:stop] @ k[:, start:stop].mT * q.size(-1) ** -0.5).masked_fill(
                ~mask, float("-inf")
            )
            parts.append(scores.softmax(-1) @ v[:, start:stop])
        return torch.cat(parts, dim=1).transpose(0, 1)

    return _with_gradients(attend, q, k, v, upstream)
