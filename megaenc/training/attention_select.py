"""The attention backend of a run: the first of those asked for that computes right on every rank."""

from collections.abc import Collection, Sequence

import torch

from megaenc.backend import Backend, ParallelConfig
from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.model import ModelConfig
from megaenc.model.attention.backends import BACKENDS
from megaenc.model.attention.selftest import check_backend
from megaenc.model.kernels.selftest import SelfTestResult
from megaenc.objectives import Attention
from megaenc.training.dist.collectives import all_gather_call
from megaenc.training.plan import Plan, validation_objectives


def select_plan_attention(plan: Plan, backend: Backend) -> str:
    """Choose the backend for the masks that `plan` trains and validates under; see `select_attention`."""
    objectives = validation_objectives(plan.schedule, plan.vocabulary) if plan.validation else plan.schedule.final_objectives()
    masks = {objective.attention for objective in objectives.values()}
    settings, asked = plan.settings, plan.settings.kernels.attention_backend
    of_batch = {"seq_length": settings.data.seq_length, "packs": settings.micro_batch_size}
    return select_attention(asked, settings.shape, settings.layout, plan.dtype, masks, backend, **of_batch)


def select_attention(
    asked: str,
    shape: ModelConfig,
    layout: ParallelConfig,
    dtype: torch.dtype,
    masks: Collection[Attention],
    backend: Backend,
    **of_batch: int,
) -> str:
    """Return the backend `asked` for, under "auto" the first of ORDER, that is right on all ranks, which call this together.

    `of_batch`: `seq_length` and `packs` of a micro-batch; without them long documents are not tried. One that is wrong or fails
    is named on the console. InputError where none is right.
    """
    tensor, refused = layout.tensor_model_parallel_size, []
    sizes = {"heads": shape.num_attention_heads // tensor, "groups": shape.num_query_groups // tensor, "head_dim": shape.head_dim}
    sizes |= {"dtype": dtype, "device": backend.device, "masks": [mask for mask in Attention if mask in masks], **of_batch}
    for name in BACKENDS if asked == "auto" else (asked,):
        verdicts = all_gather_call(lambda name=name: check_backend(name, **sizes))
        if all(verdict.passed for verdict in verdicts):
            for line in refused:
                print_rank_0(f"attention by {line}")
            return name
        if asked != "auto":
            raise InputError(
                f"--attention-backend {asked}: {_complaint(verdicts)}; expected one that computes right here, or auto"
            )
        if any(verdict.available for verdict in verdicts):
            refused.append(f"{name} is not used: {_complaint(verdicts)}")
    raise InputError(f"--attention-backend auto: no attention computes right here: {'; '.join(refused)}")


def _complaint(verdicts: Sequence[SelfTestResult]) -> str:
    """Return what speaks against a backend, from the verdicts of the ranks."""
    against = [(rank, verdict) for rank, verdict in enumerate(verdicts) if not verdict.passed]
    rank, verdict = min(against, key=lambda pair: not pair[1].available)  # what was computed says more than what is missing
    return verdict.reason + (f", on rank {rank}" if len(against) < len(verdicts) else "")
