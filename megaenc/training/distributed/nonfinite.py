"""Diagnosis of steps whose loss or gradient is NaN or infinite."""

import math
import socket

import numpy as np
import torch
from torch.distributed import ReduceOp

from megaenc.backend.reductions import gather_lowest, reduce_over_ranks
from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.training.engine import BatchSums, Engine
from megaenc.training.skip_ranges import SkippedPacks

_NAMED_RANKS = 8


def diagnose_nonfinite_step(engine: Engine, step: int) -> tuple[str, str]:
    """Rerun each pack of `step` to find those with a non-finite loss or gradient.

    All ranks call this together, after the engine has computed the step and not applied it. Weights
    and optimizer are unchanged; gradients are zero afterwards.

    Returns:
        Cause and remedy, phrases without a full stop, the same on all ranks. The cause fits after
        "loss is NaN, ": it names the faulty packs by index in the data order, or says that all are
        faulty (diverged weights) or none is (hardware).
    """
    plan = engine.plan
    objectives = [objective for _, objective in plan.schedule.objectives(step)]
    data = plan.data_at(step)
    loss_was_finite = math.isfinite(engine.local_sums.loss_sum)
    local_samples = [sample for row in engine.micro_batch_samples(step) for sample in row]
    with engine.no_grad_reduction():
        results = {
            sample: [
                engine.local_loss_and_grad_norm([sample], objective, data.train)
                for objective in objectives
            ]
            for sample in local_samples
        }
    local_faulty = {sample for sample, pairs in results.items() if not np.isfinite(pairs).all()}
    samples = [
        plan.sample_at(position)
        for position in range(plan.samples_read(step - 1), plan.samples_read(step))
    ]
    is_finite = reduce_over_ranks(
        [sample not in local_faulty for sample in samples], ReduceOp.MIN, torch.uint8
    )
    packs = {sample for sample, finite in zip(samples, is_finite, strict=True) if not finite}
    pack_count = len(samples)
    if not packs:
        places = _format_ranks_with_hosts(not loss_was_finite)
        where = f"; in the step itself the loss of {places} was not finite" if places else ""
        cause = (
            f"from none of its {pack_count} packs when each is run separately, which points to "
            f"the hardware{where}"
        )
        return cause, "give the same command again, on other machines if it happens again"
    if len(packs) == pack_count > 1:
        remedy = (
            "start over or branch from an earlier checkpoint with a lower --lr or longer "
            "--lr-warmup-iters"
        )
        return f"from each of its {pack_count} packs: the weights have diverged", remedy
    corpora = {data.corpora[data.train.corpus_of_sample(sample)].prefix for sample in packs}
    places = _format_ranks_with_hosts(bool(local_faulty))
    faulty = SkippedPacks.from_indices(packs)
    cause = (
        f"from pack{'s' * (len(packs) > 1)} {faulty.format_short()} of "
        f"{', '.join(sorted(corpora))} on {places}"
    )
    return (
        cause,
        f"give the same command with --skip-packs {' '.join((plan.skipped | faulty).texts)}",
    )


def report_skipped_step(engine: Engine, step: int, metrics: BatchSums, skipped_count: int) -> None:
    """Print on rank 0 why `step` was skipped, or end the run after too many.

    All ranks call this together, after the step. The text goes to standard output. Gradients are
    zero afterwards. See `diagnose_nonfinite_step`.

    Args:
        metrics: Sums of the step over all ranks.
        skipped_count: Steps that the run has skipped so far, with this one.

    Raises:
        InputError: `skipped_count` exceeds --max-skipped-updates, on all ranks.
    """
    cause, remedy = diagnose_nonfinite_step(engine, step)
    limit = engine.plan.settings.health.max_skipped_updates
    quantity = "gradient" if math.isfinite(metrics.loss_sum) else "loss"
    line = (
        f"step {step}: {quantity} is NaN or infinite, {cause}; step skipped, {skipped_count} so far"
    )
    if skipped_count > limit:
        raise InputError(f"{line}, --max-skipped-updates allows {limit}; {remedy}")
    print_rank_0(line)


def _format_ranks_with_hosts(is_named: bool) -> str:
    """Return text such as `rank 3 (node-1)` for the ranks that pass True.

    All ranks call this together. If these ranks are many, only the lowest are named; the text is
    empty if there are none.
    """
    hosts, count = gather_lowest(socket.gethostname() if is_named else None, limit=_NAMED_RANKS)
    if not count:
        return ""
    more = f" and {count - len(hosts)} more" if count > len(hosts) else ""
    ranks = f"rank{'s' * (count > 1)} {SkippedPacks.from_indices(hosts).format_short()}{more}"
    return f"{ranks} ({', '.join(sorted(set(hosts.values())))})"
