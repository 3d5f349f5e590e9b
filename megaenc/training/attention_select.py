"""Selection of an attention backend that computes correct results on every rank."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megaenc.backend import Backend, ParallelConfig
from megaenc.backend.reductions import gather_lowest, reduce_over_ranks
from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.model import ModelConfig
from megaenc.model.attention.backends import (
    BACKENDS,
    exclude_flash_attn,
    exclude_unmeasured_flash_attn,
    flash_attn_versions,
)
from megaenc.model.attention.selftest import check_backend
from megaenc.model.kernels.selftest import SelfTestResult
from megaenc.objectives import Attention
from megaenc.training.distributed.collectives import call_on_all
from megaenc.training.plan import Plan


def select_plan_attention(plan: Plan, backend: Backend) -> str:
    """Return the attention backend of a run, which passes self-tests on all ranks.

    All ranks call this together; it has the effects of `select_attention`, with the masks, sizes
    and data type of `plan`.

    Raises:
        InputError: The backend of --attention-backend fails, or all do with "auto".
    """
    objectives = plan.schedule.final_objectives()
    if plan.has_validation:
        objectives |= plan.validation_objectives
    masks = {objective.attention for objective in objectives.values()}
    settings = plan.settings
    requested = settings.kernels.attention_backend
    phases = [phase.settings for phase in settings.phase_configs]
    batch_shape = {"seq_length": max(phase.data.seq_length for phase in phases)}
    batch_shape["packs"] = max(phase.packs_at_once for phase in phases)
    return select_attention(
        requested, settings.shape, settings.layout, plan.dtype, masks, backend, **batch_shape
    )


def select_attention(
    requested: str,
    shape: ModelConfig,
    layout: ParallelConfig,
    dtype: torch.dtype,
    masks: Collection[Attention],
    backend: Backend,
    **batch_shape: int,
) -> str:
    """Return the name of an attention backend that passes self-tests on all ranks.

    All ranks call this together. They raise InputError if the requested backend fails, or with
    "auto" all do. Rank 0 prints backends and versions of flash-attn that are installed and failed
    before the one that passes. Versions of flash-attn that fail are not used in this process again.

    Args:
        requested: Name of the backend; "auto" for the first of BACKENDS that passes.
        masks: Kinds of attention that are needed.
        backend: Hardware of this process, on which the tests run.
        **batch_shape: `seq_length`, tokens of a pack (default 0: no long document is tested), and
            `packs`, packs of a micro-batch (default 1).
    """
    tensor = layout.tensor_model_parallel_size
    failures = []
    sizes = {
        "heads": shape.num_attention_heads // tensor,
        "groups": shape.num_query_groups // tensor,
        "head_dim": shape.head_dim,
    }
    sizes |= {
        "dtype": dtype,
        "device": backend.device,
        "masks": [mask for mask in Attention if mask in masks],
        **batch_shape,
    }
    sizes["windows"] = tuple(dict.fromkeys(shape.layer_windows))
    if requested == "auto":
        exclude_unmeasured_flash_attn(backend.device)
    for name in BACKENDS if requested == "auto" else (requested,):
        available_count, failure = _check_on_all_ranks(name, sizes, failures)
        if not failure:
            for line in failures:
                print_rank_0(f"attention by {line}")
            return name
        if requested != "auto":
            raise InputError(
                f"--attention-backend {requested}: {failure}; expected a backend that works here, "
                "or auto"
            )
        if available_count:
            failures.append(f"{name} is not used: {failure}")
    raise InputError(
        f"--attention-backend auto: no attention backend works here: {'; '.join(failures)}"
    )


def _check_on_all_ranks(name: str, sizes: dict[str, Any], failures: list[str]) -> tuple[int, str]:
    """Check the attention backend `name` on all ranks.

    A version of flash-attn that fails on any rank is excluded on all, with a line in `failures`, as
    long as each has another one.

    Returns:
        The number of ranks on which the backend is available, and the reason why it failed on one;
        empty if it passes on all.
    """
    while True:
        if name == "flash" and flash_attn_versions(sizes["device"])[:1] == [4]:
            print_rank_0("attention: compiling flash-attn 4, about 20 seconds the first time")
        result = call_on_all(lambda: check_backend(name, **sizes))
        counts = reduce_over_ranks([result.available, not result.passed], ReduceOp.SUM)
        failure = _describe_failure(result, counts[1])
        if name != "flash" or not all(counts):
            return counts[0], failure
        versions = flash_attn_versions(sizes["device"])
        failed, _ = gather_lowest(versions[0] if versions and not result.passed else None)
        for version in failed.values():
            if not any(reduce_over_ranks([not set(versions) - {version}], ReduceOp.SUM)):
                break
        else:
            return counts[0], failure
        failures.append(f"flash-attn {version} is not used: {failure}")
        exclude_flash_attn(version)


def _describe_failure(result: SelfTestResult, failed_count: int) -> str:
    """Return the reason why a backend failed, and on which rank.

    Args:
        result: Result of this rank.
        failed_count: Number of ranks on which it failed.
    """
    reason = result.reason or None
    # A wrong result explains more than a missing package.
    wrong, _ = gather_lowest(reason if result.available else None)
    for rank, text in (wrong or gather_lowest(reason)[0]).items():
        return text + (f", on rank {rank}" if failed_count < dist.get_world_size() else "")
    return ""
