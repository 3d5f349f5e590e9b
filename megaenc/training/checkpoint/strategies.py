"""Saving and loading of megatron-core's checkpoints by the first replica of the model, however many others there are.

megatron-core itself gathers on all ranks what each saves, on rank 0 what each loads, and reads each tensor on all replicas.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import LoadPlan, StorageReader
from torch.distributed.checkpoint.planner import LoadItemType

from megaenc.backend import detect_backend
from megaenc.backend.checkpoint_patches import plan_saves_in, read_by


def is_in_first_replica() -> bool:
    """Return whether this rank holds a part of the first replica of the model, which saves and loads; rank 0 always does."""
    return parallel_state.get_data_parallel_rank() == 0


def gather_in_first_replica(value: Any) -> list[Any]:
    """Return on rank 0 the picklable `value` of each rank of the first replica, on others []; all ranks call it together."""
    if not is_in_first_replica():
        return []
    group = parallel_state.get_model_parallel_group()
    values: list = [None] * group.size()
    dist.gather_object(value, values if group.rank() == 0 else None, dst=dist.get_global_rank(group, 0), group=group)
    return values if group.rank() == 0 else []


def start_save(state: dict[str, Any], folder: Path) -> AsyncRequest:
    """Plan the save of the sharded `state` to `folder`, and return megatron-core's request; all ranks call it together.

    torch's planner checks on rank 0 that the ranks of the first replica save each element of each tensor once.
    """
    strategy = _FirstReplicaSave("torch_dist", 1)
    options = {"sharded_strategy": strategy, "async_sharded_save": True}
    return dist_checkpointing.save(state, str(folder), validate_access_integrity=False, **options)


def load(state: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the sharded `state` filled from the checkpoint in `folder`, read once; all ranks call it together."""
    return dist_checkpointing.load(state, folder, sharded_strategy=_FirstReplicaLoad(), validate_access_integrity=False)


class _FirstReplicaSave(TorchDistSaveShardedStrategy):
    """Strategy in which the ranks of the first replica plan a save among themselves."""

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> AsyncRequest:
        """Return the request to save this rank's shards; on ranks of other replicas it does nothing."""
        if not is_in_first_replica():
            if any(is_main_replica(each.replica_id) for each in nested_values(sharded_state_dict)):
                raise RuntimeError("a rank outside of the first replica of the model holds a shard that no other rank has")
            return AsyncRequest(None, (), [])
        with plan_saves_in(parallel_state.get_model_parallel_group()):
            return super().async_save(sharded_state_dict, checkpoint_dir)


class _FirstReplicaLoad(TorchDistLoadShardedStrategy):
    """Strategy in which the ranks of the first replica read tensors, each its own, and broadcast them to the other replicas."""

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> dict[str, Any]:
        """Return `sharded_state_dict` with tensors in the place of their descriptions."""
        with read_by(_read):
            loaded = super().load(sharded_state_dict, checkpoint_dir)
        replicas = parallel_state.get_data_parallel_group()
        if replicas.size() > 1:
            device, source = detect_backend().device, dist.get_global_rank(replicas, 0)
            for tensor in (each.detach() for each in nested_values(loaded) if isinstance(each, torch.Tensor)):
                buffer = tensor.to(device).contiguous()  # the tensor itself if it can be sent
                dist.broadcast(buffer, source, replicas)
                if buffer is not tensor:
                    tensor.copy_(buffer)
        return loaded


def _read(state: dict[str, Any], reader: StorageReader, planner: checkpoint.LoadPlanner) -> None:
    """Read `state` as this rank alone plans it; outside of the first replica without its tensors. Raises RuntimeError."""
    if not is_in_first_replica():
        reader.prepare_local_plan = _without_tensors
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is called by another name now, as megatron-core does
        try:
            checkpoint.load_state_dict(state, reader, planner=planner, no_dist=True)
        except checkpoint.CheckpointException as error:  # no Exception, but on one rank only, which must end the others
            raise RuntimeError(str(error)) from error


def _without_tensors(plan: LoadPlan) -> LoadPlan:
    """Return `plan` without the tensors that it reads."""
    return dataclasses.replace(plan, items=[item for item in plan.items if item.type != LoadItemType.TENSOR])
