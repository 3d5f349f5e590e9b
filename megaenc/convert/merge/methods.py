"""Methods that merge the weights of checkpoints, and the record of a merge.

A method (linear, SLERP or TIES) gets one tensor of each checkpoint, in float32 and of equal shape,
and returns the merged one, computed in float64 and rounded once to float32.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

METHODS = ("linear", "slerp", "ties")
_CHUNK = 1 << 22  # elements that are in memory as float64 at a time
_PARALLEL = 1e-6  # sine of the angle below which SLERP divides by rounding errors


@dataclass(frozen=True)
class MergedCheckpoint:
    """Checkpoint that was merged.

    Args:
        run: Absolute path of the run directory.
        step: Step of the checkpoint.
        identity: Digest of the run's identity.
        sha256: `json_digest` of the content of the checkpoint's state.json, whatever its format.
        weight: Its weight in the average before it is divided by their sum; with slerp 1 - t or t;
            None with TIES and for its base.
    """

    run: str
    step: int
    identity: str
    sha256: str
    weight: float | None = None

    @property
    def label(self) -> str:
        """Return directory name and step, such as `clm-42@1000`."""
        return f"{Path(self.run).name}@{self.step}"

    def describe(self) -> str:
        """Return the label with the weight if there is one, such as `clm-42@1000 (0.5)`."""
        return self.label if self.weight is None else f"{self.label} ({self.weight:.4g})"


@dataclass(frozen=True)
class MergeRecord:
    """Record of a merge in run.json, as `merge` returns it.

    method: one of METHODS; checkpoints: those that were merged, in order; base and density: those
    of TIES, None for other methods.
    """

    method: str
    checkpoints: tuple[MergedCheckpoint, ...]
    base: MergedCheckpoint | None = None
    density: float | None = None

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Return the record of `values`, the field `merge` of a run.json.

        Types of values are not checked.

        Raises:
            KeyError: `checkpoints` or `base` is missing.
            TypeError: Another field is unknown or missing.
        """
        parts = tuple(MergedCheckpoint(**part) for part in values["checkpoints"])
        base = values["base"] and MergedCheckpoint(**values["base"])
        return cls(**values | {"checkpoints": parts, "base": base})

    def as_dict(self) -> dict[str, Any]:
        """Return the record as the plain values that `parse` reads."""
        values = dataclasses.asdict(self)
        return values | {"checkpoints": list(values["checkpoints"])}


def merge_linear(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the average of `tensors` with `weights`, float32 of their shape.

    It is computed in float64.

    Args:
        tensors: Tensors of equal shape.
        weights: One for each, 0 or more; they are divided by their sum, which must exceed 0 (not
            checked).
    """
    total = math.fsum(weights)

    def average(parts: list[Tensor]) -> Tensor:
        result = weights[0] * parts[0]
        for weight, part in zip(weights[1:], parts[1:], strict=True):
            result += weight * part
        return result.div_(total)

    return _combine_chunks(average, tensors)


def merge_slerp(tensors: Sequence[Tensor], t: float) -> Tensor:
    """Return the spherical interpolation between two tensors, float32 of their shape.

    Shoemake 1985: sin((1 - t) w) / sin(w) a + sin(t w) / sin(w) b with the angle w between a and b
    as flat vectors, which keep their lengths in the sum. It is linear if a and b are parallel or
    opposite, or one of them is zero.

    Args:
        tensors: Two tensors a and b of equal shape, on the CPU.
        t: Position from a (0) to b (1).
    """
    dots = np.zeros(3)  # of (a, a), (b, b), (a, b)
    for parts in _iter_chunks(tensors):
        a = parts[0].numpy()
        b = parts[1].numpy()
        dots += a @ a, b @ b, a @ b
    length = math.sqrt(dots[0]) * math.sqrt(dots[1])
    angle = math.acos(min(1.0, max(-1.0, dots[2] / length))) if length else 0.0
    first = 1 - t
    second = t
    if math.sin(angle) > _PARALLEL:
        first = math.sin((1 - t) * angle) / math.sin(angle)
        second = math.sin(t * angle) / math.sin(angle)
    return _combine_chunks(lambda parts: first * parts[0] + second * parts[1], tensors)


def merge_ties(base: Tensor, tensors: Sequence[Tensor], thresholds: Sequence[float]) -> Tensor:
    """Return `base` plus the differences of `tensors` to it, merged by TIES, float32.

    This is algorithm 1 of arXiv 2306.01708 with lambda = 1: differences below the checkpoint's
    threshold become 0; the sign of their sum is elected for each element; those of this sign are
    averaged. Elements whose sum is 0 stay as in `base`.

    Args:
        base: Tensor of the checkpoint from which the others were trained.
        tensors: Tensors of the same shape, one of each checkpoint.
        thresholds: Magnitude of each checkpoint below which a difference becomes 0, by
            `trim_threshold`.
    """

    def merge(parts: list[Tensor]) -> Tensor:
        base_part, *tensor_parts = parts
        trimmed = []
        for part, threshold in zip(tensor_parts, thresholds, strict=True):
            difference = part - base_part
            trimmed.append(difference.masked_fill_(difference.float().abs() < threshold, 0.0))
        elected = torch.stack(trimmed).sum(dim=0).sign()
        total = torch.zeros_like(base_part)
        count = torch.zeros_like(base_part)
        for difference in trimmed:
            agrees = difference.sign() == elected
            total += difference * agrees
            count += agrees
        return base_part + total / count.clamp(min=1)

    return _combine_chunks(merge, [base, *tensors])


def magnitudes(base: Tensor, tensor: Tensor) -> np.ndarray:
    """Return |tensor - base| of each element as a flat float32 array.

    It is rounded as `merge_ties` compares it.
    """
    return (
        _combine_chunks(lambda parts: (parts[1] - parts[0]).abs(), [base, tensor]).flatten().numpy()
    )


def trim_threshold(values: np.ndarray, density: float) -> float:
    """Return the smallest magnitude that is kept if only the largest are.

    These are a fraction `density` of `values`, rounded to a whole number, and at least one; all
    values that equal the smallest are kept, too.

    Args:
        values: Magnitudes, by `magnitudes`, of all tensors of a checkpoint, as a flat array that is
            not empty; reordered in place.
        density: Fraction above 0, up to 1.
    """
    index = len(values) - max(1, round(density * len(values)))
    values.partition(index)
    return float(values[index])


def _iter_chunks(tensors: Sequence[Tensor]):
    """Yield lists of equal flat parts of each of `tensors` in float64."""
    for parts in zip(*(tensor.reshape(-1).split(_CHUNK) for tensor in tensors), strict=True):
        yield [part.double() for part in parts]


def _combine_chunks(combine: Callable[[list[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return `combine`'s result as float32, computed in chunks of `tensors`.

    Args:
        combine: Elementwise function of float64 parts of `tensors`.
    """
    result = torch.empty(tensors[0].shape, dtype=torch.float32)
    for target, parts in zip(result.view(-1).split(_CHUNK), _iter_chunks(tensors), strict=True):
        target.copy_(combine(parts))
    return result
