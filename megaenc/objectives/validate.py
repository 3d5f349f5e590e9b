"""Checks of an objective's targets on real packs before a run begins.

They are mainly for plug-ins.
"""

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.errors import InputError
from megaenc.objectives.base import Attention, Objective, SoftLabels, Targets

_SUM_TOLERANCE = (
    1e-3  # of the sum of a label distribution; float32 rounds thousands of probabilities far less
)


def check_targets(objective: Objective, pack: Pack, seed: int) -> None:
    """Check that an objective makes valid Targets of a pack.

    They must be as the docstring of Targets says and the same twice, and the pack must stay
    unchanged. Without classes, labels must be the pack's tokens `shift` after their predictions.

    Args:
        seed: Seed of the draws of the objective.

    Raises:
        InputError: They are invalid, or the objective raises an error.
    """
    randomness = SampleRandomness(seed, pack.sample, pack.epoch)
    tokens = pack.tokens.copy()
    edges = pack.cu_seqlens.copy()
    try:
        targets = objective.targets(pack, randomness)
        second_targets = objective.targets(pack, randomness)
        complaint = _find_violation(objective, pack, targets)
        if not complaint and not all(map(np.array_equal, targets.parts, second_targets.parts)):
            complaint = (
                "gives other targets when called again, expected a pure function of the pack and "
                "its randomness"
            )
        if not (np.array_equal(pack.tokens, tokens) and np.array_equal(pack.cu_seqlens, edges)):
            complaint = "changes the pack, expected a copy of what it changes"
    except InputError as error:
        complaint = str(error)
    except Exception as error:  # foreign code may raise anything
        complaint = f"raises {type(error).__name__}: {error}"
    if complaint:
        raise InputError(f"objective `{objective.describe()}`, pack {pack.sample}: {complaint}")


def _find_violation(objective: Objective, pack: Pack, targets: Targets) -> str:
    """Return a description of the first error in `targets`, or an empty string."""
    length = len(pack.tokens)
    documents = len(pack.cu_seqlens) - 1
    for name in ("inputs", "predict_at", "labels"):
        array = getattr(targets, name)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.int64:
            return f"`{name}` is {_describe_kind(array)}, expected a flat array of int64"
    inputs, predict_at, labels, prefixes, weights, count, soft_labels = targets
    if len(inputs) != length:
        return f"`inputs` holds {len(inputs)} tokens, expected {length}, as many as the pack"
    size = objective.vocabulary.size
    outputs = objective.classes or size
    if inputs.min() < 0 or inputs.max() >= size:
        return (
            f"`inputs` holds the id {inputs.min() if inputs.min() < 0 else inputs.max()}, "
            f"expected 0 to {size - 1}"
        )
    if len(predict_at) != len(labels):
        return (
            f"`predict_at` holds {len(predict_at)} positions and `labels` {len(labels)}, "
            "expected equal numbers"
        )
    if len(predict_at) and (
        predict_at[0] < 0 or predict_at[-1] >= length or (np.diff(predict_at) <= 0).any()
    ):
        return f"`predict_at` is not increasing from 0 or more to less than {length}"
    document = np.repeat(np.arange(documents), np.diff(pack.cu_seqlens))
    predicted = predict_at + objective.shift
    beyond = predicted >= length
    wrong = beyond | (document[predict_at] != document[np.where(beyond, 0, predicted)])
    if wrong.any():
        return (
            f"position {predict_at[wrong][0]} predicts a token of another document (`shift` is "
            f"{objective.shift})"
        )
    wrong = (labels < 0) | (labels >= outputs)
    if wrong.any():
        return f"`labels` holds {labels[wrong][0]}, expected 0 to {outputs - 1}"
    wrong = pack.tokens[predicted] != labels
    if wrong.any() and not objective.classes:
        position = predict_at[wrong][0]
        label = labels[wrong][0]
        token = pack.tokens[predicted][wrong][0]
        return (
            f"position {position} should predict id {label}, but {objective.shift} further "
            f"(`shift`) the pack holds {token}; "
            "expected the labels to be the pack's tokens at predict_at + shift"
        )
    if weights is not None:
        if (
            not isinstance(weights, np.ndarray)
            or weights.dtype != np.float32
            or weights.shape != labels.shape
        ):
            return (
                f"`weights` is {_describe_kind(weights)}, expected float32[{len(labels)}], "
                "one for each label"
            )
        wrong = ~(np.isfinite(weights) & (weights >= 0))
        if wrong.any():
            return f"`weights` holds {weights[wrong][0]}, expected finite numbers of 0 or more"
    if soft_labels is not None and (
        complaint := _find_soft_label_violation(soft_labels, len(labels), outputs)
    ):
        return complaint
    if count is not None and (type(count) is not int or count < 0 or (not count and len(labels))):
        return f"`count` is {count!r}, expected a whole number above 0, or 0 without predictions"
    if (objective.attention == Attention.PREFIX) != (prefixes is not None):
        return (
            f"under {objective.attention} attention `prefixes` is "
            f"{'missing' if prefixes is None else 'given'}"
        )
    if prefixes is not None:
        lengths = np.diff(pack.cu_seqlens)
        if prefixes.shape != lengths.shape or (prefixes < 0).any() or (prefixes > lengths).any():
            return f"`prefixes` does not hold, for each of {documents} documents, 0 to its length"
    return ""


def _describe_kind(value: object) -> str:
    """Return dtype and shape of an array, or the type of another value."""
    return (
        f"{value.dtype}{list(value.shape)}"
        if isinstance(value, np.ndarray)
        else type(value).__name__
    )


def _find_soft_label_violation(soft_labels: SoftLabels, count: int, size: int) -> str:
    """Return a description of the first error in label distributions, or "".

    Args:
        count: Number of predictions.
        size: Number of outputs.
    """
    for name, array, dtype in zip(
        SoftLabels._fields, soft_labels, (np.int64, np.float32), strict=True
    ):
        if (
            not isinstance(array, np.ndarray)
            or array.dtype != dtype
            or array.ndim != 2
            or len(array) != count
        ):
            return (
                f"`soft_labels.{name}` is {_describe_kind(array)}, "
                f"expected {np.dtype(dtype)}[{count}, K], a row for each label"
            )
    ids, probabilities = soft_labels
    if ids.shape != probabilities.shape:
        return (
            f"`soft_labels` holds {ids.shape[1]} ids and {probabilities.shape[1]} probabilities a "
            "row, expected equal numbers"
        )
    wrong = (ids < 0) | (ids >= size)
    if wrong.any():
        return f"`soft_labels.ids` holds {ids[wrong][0]}, expected 0 to {size - 1}"
    wrong = ~(np.isfinite(probabilities) & (probabilities >= 0))
    if wrong.any():
        return (
            f"`soft_labels.probabilities` holds {probabilities[wrong][0]}, "
            "expected finite numbers of 0 or more"
        )
    sums = probabilities.sum(axis=1, dtype=np.float64)
    wrong = np.abs(sums - 1) > _SUM_TOLERANCE
    if wrong.any():
        return (
            f"`soft_labels.probabilities` of prediction {wrong.argmax()} add up to "
            f"{sums[wrong][0]:g}, expected 1"
        )
    return ""
