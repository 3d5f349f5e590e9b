"""Patches of megatron-core's checkpoint strategies, which have no argument for the ranks that plan a save or a load together."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist


@contextlib.contextmanager
def plan_saves_in(group: dist.ProcessGroup) -> Iterator[None]:
    """Make the ranks of `group` plan a save among themselves inside the context, instead of all ranks."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    plan = strategies.save_state_dict_async_plan

    def plan_in_group(state: dict[str, Any], writer: Any, _: None, *arguments: Any, **options: Any) -> Any:
        return plan(state, writer, group, *arguments, **options)

    strategies.save_state_dict_async_plan = plan_in_group
    try:
        yield
    finally:
        strategies.save_state_dict_async_plan = plan


@contextlib.contextmanager
def read_by(read: Callable[..., None]) -> Iterator[None]:
    """Make `read`, called as torch's `load_state_dict`, read checkpoints inside the context, instead of all ranks together."""
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    checkpoint = strategies.checkpoint
    strategies.checkpoint = SimpleNamespace(load_state_dict=read)
    try:
        yield
    finally:
        strategies.checkpoint = checkpoint
