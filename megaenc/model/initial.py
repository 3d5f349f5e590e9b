"""Initial weights as a pure function of (seed, name, row): the same model whatever the layout."""

from collections.abc import Iterator

import numpy as np
import torch
from megatron.core import parallel_state

from megaenc.model.config import ModelConfig
from megaenc.randomness import normal_rows


def global_names(encoder: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of this rank under their names in the whole model; a tied output layer has the embedding's."""
    offset = encoder.decoder.layers[0].layer_number - 1 if len(encoder.decoder.layers) else 0
    for name, parameter in encoder.named_parameters():
        if name.startswith("decoder.layers."):
            number, rest = name.removeprefix("decoder.layers.").split(".", 1)
            name = f"decoder.layers.{int(number) + offset}.{rest}"
        elif name == "output_layer.weight" and encoder.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield name, parameter


@torch.no_grad()
def draw_weights(encoder: torch.nn.Module, model: ModelConfig, vocab_size: int, seed: int) -> torch.nn.Module:
    """Fill `encoder`: matrices with N(0, init_method_std), norms with one; biases and rows of padding are zero."""
    for name, parameter in global_names(encoder):
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            values = _shard(name, parameter, vocab_size, seed) * np.float32(model.init_method_std)
            parameter.copy_(torch.from_numpy(values))
    return encoder


def _shard(name: str, parameter: torch.nn.Parameter, vocab_size: int, seed: int) -> np.ndarray:
    """float32: this rank's rows and columns of the standard normal matrix called `name`."""
    rows, columns = parameter.shape
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):  # row parallel: every rank has all rows, some columns
        return normal_rows(seed, name, range(rows), columns * size)[:, columns * rank : columns * (rank + 1)]
    if name.endswith(".linear_fc1.weight"):  # a rank holds its part of the gate, then its part of the up projection
        half = rows // 2
        gate, up = (half * (rank + part * size) for part in (0, 1))
        return np.concatenate([normal_rows(seed, name, range(start, start + half), columns) for start in (gate, up)])
    start = rows * rank
    stop = start + rows
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        stop = max(start, min(stop, vocab_size))
    values = np.zeros((rows, columns), dtype=np.float32)
    values[: stop - start] = normal_rows(seed, name, range(start, stop), columns)
    return values
