"""Weights and optimizer state as megatron-core's sharded tensors: global names and offsets, whatever the layout."""

from typing import Any

from megaenc.training.engine import Engine


def sharded_state(engine: Engine, is_loading: bool) -> dict[str, Any]:
    """What `dist_checkpointing` saves of `engine`, or (`is_loading`) what it is to load into it."""
    model = {str(number): chunk.module.sharded_state_dict(prefix="model.") for number, chunk in enumerate(engine.chunks)}
    return {"model": model, "optimizer": engine.optimizer.sharded_state_dict(model, is_loading=is_loading)}


def fill(engine: Engine, loaded: dict[str, Any]) -> None:
    """Put what was loaded for `sharded_state` into `engine`."""
    for number, chunk in enumerate(engine.chunks):
        fill_module(chunk.module, loaded["model"][str(number)])
    engine.optimizer.load_state_dict(loaded["optimizer"])


def fill_module(module, state: dict[str, Any]) -> None:
    """Put weights under their checkpoint names into `module` (Float16Module passes state dicts on by itself)."""
    module.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
