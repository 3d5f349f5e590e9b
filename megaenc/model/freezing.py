"""Parts of a model that a phase freezes, by name."""

import re
from collections.abc import Sequence

from megaenc.errors import InputError
from megaenc.model.config import ModelConfig


def parse_freeze(texts: Sequence[str], model: ModelConfig) -> frozenset[str]:
    """Return the parts of a model that --freeze names, as `find_part` returns them.

    Args:
        texts: Values of the flag, such as ("embedding", "layers.0-7", "head"), layer 7 included.

    Raises:
        InputError: A value names nothing that the model has, such as a head whose only weight is
            the embedding's, or nothing is left to train.
    """
    parts = {"embedding", *(f"layers.{index}" for index in range(model.num_layers))}
    known = f"embedding, layers.0-{model.num_layers - 1} or layers of it"
    has_output_matrix = model.untie_embeddings_and_output_weights
    if model.prediction_head or model.output_layer_bias or has_output_matrix:
        parts.add("head")
        known += ", head"
    frozen: set[str] = set()
    for text in texts:
        names = {text}
        if match := re.fullmatch(r"layers\.(\d{1,6})-(\d{1,6})", text):
            names = {f"layers.{index}" for index in range(int(match[1]), int(match[2]) + 1)}
        if not names or not names <= parts:
            raise InputError(f"--freeze {text}: not a part of this model, expected {known}")
        frozen |= names
    if frozen == parts:
        raise InputError(
            f"--freeze {' '.join(texts)}: found all parts of the model, expected to leave one "
            "to train"
        )
    return frozenset(frozen)


def canonical_freeze(texts: Sequence[str] | None, model: ModelConfig) -> list[str] | None:
    """Return values of --freeze in a form that equal parts share.

    The order is embedding, layers by number, head. Layers that follow each other are one range,
    such as layers.0-7; a single one is layers.0. Without values, None or empty, the result is None.

    Raises:
        InputError: As `parse_freeze`.
    """
    frozen = parse_freeze(texts or (), model)
    result = ["embedding"] if "embedding" in frozen else []
    indices = [index for index in range(model.num_layers) if f"layers.{index}" in frozen]
    for first in indices:
        if first - 1 in indices:
            continue
        last = first
        while last + 1 in indices:
            last += 1
        result.append(f"layers.{first}-{last}" if last > first else f"layers.{first}")
    return result + (["head"] if "head" in frozen else []) or None


def find_part(name: str, model: ModelConfig) -> str:
    """Return the part that a weight belongs to: embedding, layers.I or head.

    Layers count from 0. The norm after the embedding belongs to it, and that after the layers to
    the last layer. An unknown name gives head.

    Args:
        name: Name of the weight as of `named_global_parameters`, which gives a tied output layer
            the name of the embedding.
    """
    if name.startswith("decoder.layers."):
        return f"layers.{name.split('.')[2]}"
    if name.startswith("decoder."):
        return f"layers.{model.num_layers - 1}"
    return "embedding" if name.startswith("embedding") else "head"
