"""Selection of an attention backend that computes correct results on every rank."""

from collections.abc import Collection, Sequence
from typing import Any

import torch

from megaenc.backend import Backend, ParallelConfig
from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.model import ModelConfig
from megaenc.model.attention.backends import BACKENDS, exclude_flash_attn, flash_attn_versions
from megaenc.model.attention.selftest import check_backend
from megaenc.model.kernels.selftest import SelfTestResult
from megaenc.objectives import Attention
from megaenc.training.distributed.collectives import all_gather_call
from megaenc.training.plan import Plan


def select_plan_attention(plan: Plan, backend: Backend) -> str:
    """Return the attention backend: the flag's, for "auto" the first, that passes self-tests; InputError if none does."""
    objectives = plan.validation_objectives if plan.validation else plan.schedule.final_objectives()
    masks = {objective.attention for objective in objectives.values()}
    settings, requested = plan.settings, plan.settings.kernels.attention_backend
    phases = [phase.settings for phase in settings.phase_configs]
    batch_shape = {"seq_length": max(each.data.seq_length for each in phases)}
    batch_shape["packs"] = max(each.micro_batch_size for each in phases)
    return select_attention(requested, settings.shape, settings.layout, plan.dtype, masks, backend, **batch_shape)


def select_attention(
    requested: str,
    shape: ModelConfig,
    layout: ParallelConfig,
    dtype: torch.dtype,
    masks: Collection[Attention],
    backend: Backend,
    **batch_shape: int,
) -> str:
    """Return `requested`, or for "auto" the first backend, that passes self-tests on all ranks together; else InputError.

    All ranks call it together. `batch_shape`: `seq_length` and `packs` of a micro-batch, without which long documents are not
    tested. With "auto", backends whose test fails are reported on the console, as are versions of flash-attn.
    """
    tensor, failures = layout.tensor_model_parallel_size, []
    sizes = {"heads": shape.num_attention_heads // tensor, "groups": shape.num_query_groups // tensor, "head_dim": shape.head_dim}
    sizes |= {"dtype": dtype, "device": backend.device, "masks": [mask for mask in Attention if mask in masks], **batch_shape}
    sizes["windows"] = tuple(dict.fromkeys(shape.layer_windows))
    for name in BACKENDS if requested == "auto" else (requested,):
        results = _check_on_all_ranks(name, sizes, failures)
        if all(result.passed for result in results):
            for line in failures:
                print_rank_0(f"attention by {line}")
            return name
        if requested != "auto":
            raise InputError(
                f"--attention-backend {requested}: {_describe_failure(results)}; expected a backend that works here, or auto"
            )
        if any(result.available for result in results):
            failures.append(f"{name} is not used: {_describe_failure(results)}")
    raise InputError(f"--attention-backend auto: no attention backend works here: {'; '.join(failures)}")


def _check_on_all_ranks(name: str, sizes: dict[str, Any], failures: list[str]) -> list[SelfTestResult]:
    """Return each rank's result of testing backend `name`, which on no rank computes by a version of flash-attn that failed.

    A version that fails on any rank is excluded on all, with a line in `failures`, as long as each rank has another one.
    """
    while True:
        results = all_gather_call(lambda: check_backend(name, **sizes))
        if name != "flash" or all(result.passed for result in results) or not any(result.available for result in results):
            return results
        versions = all_gather_call(lambda: flash_attn_versions(sizes["device"]))
        failed = {own[0] for own, result in zip(versions, results, strict=True) if own and not result.passed}
        if not failed or not all(set(own) - failed for own in versions):
            return results
        failures.append(f"flash-attn {', '.join(map(str, sorted(failed)))} is not used: {_describe_failure(results)}")
        for version in failed:
            exclude_flash_attn(version)


def _describe_failure(results: Sequence[SelfTestResult]) -> str:
    """Return the reason why a backend failed, and on which rank, from the `results` of all ranks."""
    failures = [(rank, result) for rank, result in enumerate(results) if not result.passed]
    rank, result = min(failures, key=lambda pair: not pair[1].available)  # a wrong result explains more than a missing package
    return result.reason + (f", on rank {rank}" if len(failures) < len(results) else "")
