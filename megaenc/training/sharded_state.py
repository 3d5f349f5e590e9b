"""Weights and optimizer state as megatron-core's sharded tensors: global names and offsets, whatever the layout.

On the disk the optimizer's state looks the same with and without `--use-distributed-optimizer`: `optimizer.state.exp_avg.*` and
`optimizer.state.exp_avg_sq.*` for each weight, and in bfloat16 its float32 master as `optimizer.state.fp32_param.*`.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

from megaenc.training.engine import Engine

# The one form of a distributed optimizer's state that every other layout can load.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def sharded_state(engine: Engine, is_loading: bool) -> dict[str, Any]:
    """What `dist_checkpointing` saves of `engine`, or (`is_loading`) what it is to load into it. All ranks call this together."""
    if not is_loading:
        engine.gather_parameters()
        for optimizer in engine.optimizer.chained_optimizers:  # zeros for each weight that no update has reached yet
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    model = model_state(engine)
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA)
    if "param_groups" in optimizer:  # float32 without the distributed optimizer: one level less than the others
        optimizer = {"optimizer": optimizer}
    for tensors in optimizer.get("param_state", {}).values():
        master = tensors.pop("param")
        if engine.plan.settings.bf16:
            replace_prefix_for_sharding(master, "optimizer.state.param.", "optimizer.state.fp32_param.")
            tensors["fp32_param"] = master
    return {"model": model, "optimizer": optimizer}


def fill(engine: Engine, loaded: dict[str, Any]) -> None:
    """Put what was loaded for `sharded_state` into `engine`."""
    fill_model(engine, loaded["model"])
    optimizer = loaded["optimizer"]
    if engine.layout.use_distributed_optimizer:
        optimizer["param_state_sharding_type"] = _METADATA["distrib_optim_sharding_type"]
        if not engine.plan.settings.bf16:  # what was put into the model is what the optimizer updates
            [of_rank] = engine.optimizer.chained_optimizers
            in_buffers = (parameter for buffer in of_rank.buffers for parameter in buffer.param_index_map)
            for number, parameter in enumerate(in_buffers):  # as the distributed optimizer numbers them
                optimizer["param_state"][number]["param"] = parameter.detach()
    elif not engine.plan.settings.bf16:
        optimizer = optimizer["optimizer"]
    engine.optimizer.load_state_dict(optimizer)


def model_state(engine: Engine) -> dict[str, Any]:
    """Return the sharded weights of the parts of the model, by their numbers."""
    return {str(number): chunk.module.sharded_state_dict(prefix="model.") for number, chunk in enumerate(engine.chunks)}


def fill_model(engine: Engine, loaded: dict[str, Any]) -> None:
    """Put what was loaded for `model_state` into the model of `engine`."""
    for number, chunk in enumerate(engine.chunks):
        fill_module(chunk.module, loaded[str(number)])


def fill_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Put weights under their checkpoint names into `module` (Float16Module passes state dicts on by itself)."""
    module.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
