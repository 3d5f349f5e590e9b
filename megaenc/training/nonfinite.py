"""Diagnosis of steps whose loss or gradient is NaN or infinite: the packs and ranks that cause it."""

import math
import socket
from collections.abc import Iterable, Sequence

from megaenc.console import print_rank_0
from megaenc.dist_env import get_rank
from megaenc.errors import InputError
from megaenc.training.distributed.collectives import all_gather_call
from megaenc.training.engine import Engine, StepMetrics
from megaenc.training.skip_ranges import SkippedPacks


def diagnose_nonfinite_step(engine: Engine, step: int) -> tuple[str, str]:
    """Rerun packs of `step` separately on all ranks to find non-finite ones; return two texts, the cause and a remedy.

    All ranks call this together and get the same texts. Weights and optimizer are unchanged.
    """
    plan, layout = engine.plan, engine.layout
    objectives, data = [objective for _, objective in plan.schedule.objectives(step)], plan.data_at(step)
    loss_was_finite = bool(engine.local_loss_sum.isfinite())
    rows: list[Sequence[int]] = engine.micro_batch_samples(step)
    if not (layout.sequence_parallel and data.train.seq_length % layout.tensor_model_parallel_size):
        rows = [[sample] for row in rows for sample in row]  # unless a single pack cannot be split along the sequence
    with engine.no_grad_reduction():
        results = {
            tuple(row): [engine.local_loss_and_grad_norm(row, objective, data.train) for objective in objectives] for row in rows
        }
    is_finite_by_row = {row: all(math.isfinite(value) for pair in pairs for value in pair) for row, pairs in results.items()}
    answers = all_gather_call(lambda: (get_rank(), socket.gethostname(), loss_was_finite, is_finite_by_row))
    samples = [(at, sample, is_finite) for at, _, _, rows in answers for row, is_finite in rows.items() for sample in row]
    packs = {sample for _, sample, is_finite in samples if not is_finite}
    pack_count = len({sample for _, sample, _ in samples})
    if not packs:
        losses = [answer for answer in answers if not answer[2]]
        where = f"; in the step itself the loss of {_format_ranks_with_hosts(losses)} was not finite" if losses else ""
        cause = f"from none of its {pack_count} packs when each is run separately, which points to the hardware{where}"
        return cause, "give the same command again, on other machines if it happens again"
    if len(packs) == pack_count > 1:
        remedy = "start over or branch from an earlier checkpoint with a lower --lr or longer --lr-warmup-iters"
        return f"from each of its {pack_count} packs: the weights have diverged", remedy
    corpora = {data.corpora[data.train.corpus_of_sample(sample)].prefix for sample in packs}
    ranks = {at for at, _, is_finite in samples if not is_finite}
    places = _format_ranks_with_hosts(answer for answer in answers if answer[0] in ranks)
    faulty = SkippedPacks.from_numbers(packs)
    cause = f"from pack{'s' * (len(packs) > 1)} {faulty.format_short()} of {', '.join(sorted(corpora))} on {places}"
    return cause, f"give the same command with --skip-packs {' '.join((plan.skipped | faulty).texts)}"


def report_skipped_step(engine: Engine, step: int, metrics: StepMetrics, skipped_count: int) -> None:
    """Print the cause of the skipped `step`; InputError on all ranks if `skipped_count` exceeds --max-skipped-updates."""
    (cause, remedy), limit = diagnose_nonfinite_step(engine, step), engine.plan.settings.health.max_skipped_updates
    quantity = "gradient" if math.isfinite(metrics.loss_sum) else "loss"
    line = f"step {step}: {quantity} is NaN or infinite, {cause}; step skipped, {skipped_count} so far"
    if skipped_count > limit:
        raise InputError(f"{line}, --max-skipped-updates allows {limit}; {remedy}")
    print_rank_0(line)


def _format_ranks_with_hosts(answers: Iterable[tuple]) -> str:
    """Return text such as `rank 3 (node-1)` for `answers`, tuples that begin with rank and host."""
    ranks, hosts = zip(*(answer[:2] for answer in answers), strict=True)
    return f"rank{'s' * (len(ranks) > 1)} {SkippedPacks.from_numbers(ranks).format_short()} ({', '.join(sorted(set(hosts)))})"
