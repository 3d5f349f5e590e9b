"""The attention backend of a run: the first of those asked for that computes right on every rank."""

from collections.abc import Collection, Sequence

import torch

from megaenc.backend import Backend, Layout
from megaenc.console import say
from megaenc.errors import InputError
from megaenc.model import ModelConfig
from megaenc.model.attention_backends import ORDER
from megaenc.model.attention_check import check_backend
from megaenc.model.verdict import Verdict
from megaenc.objectives import Attention
from megaenc.training.plan import Plan, validated_objectives
from megaenc.training.together import on_all


def attention_of(plan: Plan, backend: Backend) -> str:
    """The backend for the masks that `plan` trains and validates under; see `choose_attention`."""
    objectives = validated_objectives(plan.schedule, plan.vocabulary) if plan.validation else plan.schedule.objectives()
    masks = {objective.attention for objective in objectives.values()}
    settings = plan.settings
    return choose_attention(
        settings.kernels.attention_backend,
        settings.shape,
        settings.layout,
        plan.dtype,
        masks,
        backend,
        seq_length=settings.data.seq_length,
        packs=settings.micro_batch_size,
    )


def choose_attention(
    asked: str,
    shape: ModelConfig,
    layout: Layout,
    dtype: torch.dtype,
    masks: Collection[Attention],
    backend: Backend,
    *,
    seq_length: int = 0,
    packs: int = 1,
) -> str:
    """The backend `asked` for, under "auto" the first of ORDER, that is right on all ranks, which call this together.

    `packs` of `seq_length` tokens: of a micro-batch; without them long documents are not tried. One that is wrong or fails is
    named on the console. InputError where none is right.
    """
    names = ORDER if asked == "auto" else (asked,)
    share = layout.tensor_model_parallel_size
    verdicts: dict[str, Verdict] = {}

    def first_right(start: int) -> int:
        """Its place among `names`, from `start` on, on this rank; their number where none is."""
        for place in range(start, len(names)):
            if names[place] not in verdicts:
                verdicts[names[place]] = check_backend(
                    names[place],
                    heads=shape.num_attention_heads // share,
                    groups=shape.num_query_groups // share,
                    head_dim=shape.head_dim,
                    dtype=dtype,
                    device=backend.device,
                    masks=[mask for mask in Attention if mask in masks],
                    seq_length=seq_length,
                    packs=packs,
                )
            if verdicts[names[place]].right:
                return place
        return len(names)

    place, agreed = 0, False
    while not agreed:  # once, unless a rank differs from the others
        found = on_all(lambda start=place: (first_right(start), verdicts))
        place = max(first for first, _ in found)
        agreed = all(first == place for first, _ in found)
    refused = {name: [theirs.get(name) for _, theirs in found] for name in names[:place]}
    tried = [f"{name} is not used: {_complaint(of)}" for name, of in refused.items() if any(v and v.available for v in of)]
    if place < len(names):
        for line in tried:
            say(f"attention by {line}")
        return names[place]
    if asked == "auto":
        raise InputError(f"--attention-backend auto: no attention computes right here: {'; '.join(tried)}")
    raise InputError(f"--attention-backend {asked}: {_complaint(refused[asked])}; expected one that computes right here, or auto")


def _complaint(verdicts: Sequence[Verdict | None]) -> str:
    """What speaks against a backend, from the verdicts of the ranks (None where a rank did not try it)."""
    against = [(rank, verdict) for rank, verdict in enumerate(verdicts) if verdict and not verdict.right]
    rank, verdict = min(against, key=lambda pair: not pair[1].available)  # what was computed says more than what is missing
    return verdict.why + (f", on rank {rank}" if len(against) < len(verdicts) else "")
