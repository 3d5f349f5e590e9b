"""Which packs of a step give a loss or a gradient that is no finite number, and on which rank."""

import math
import socket
from collections.abc import Iterable, Sequence

from megaenc.console import print_rank_0
from megaenc.dist_env import get_rank
from megaenc.errors import InputError
from megaenc.training.dist.collectives import all_gather_call
from megaenc.training.engine import Engine, StepMetrics
from megaenc.training.skip_ranges import SkippedPacks


def find_nonfinite_packs(engine: Engine, step: int) -> tuple[str, str]:
    """Run the packs of update `step` once more, each alone, on all ranks together; weights and optimizer stay the same.

    Return on every rank what the fault comes from, as the end of a sentence, and what to do next.
    """
    plan, layout = engine.plan, engine.layout
    objective = plan.schedule.objective(step)
    loss_was_finite = bool(engine.local_loss_sum.isfinite())
    rows: list[Sequence[int]] = engine.micro_batch_samples(step)
    if not (layout.sequence_parallel and plan.settings.data.seq_length % layout.tensor_model_parallel_size):
        rows = [[sample] for row in rows for sample in row]  # else one pack cannot be cut along its length
    with engine.no_grad_reduction():
        mine = {tuple(row): all(map(math.isfinite, engine.local_grad_norm(row, objective))) for row in rows}
    answers = all_gather_call(lambda: (get_rank(), socket.gethostname(), loss_was_finite, mine))
    seen = [(where, sample, is_finite) for where, _, _, finite in answers for row, is_finite in finite.items() for sample in row]
    packs = {sample for _, sample, is_finite in seen if not is_finite}  # whose own loss or gradient is not finite
    read = len({sample for _, sample, _ in seen})
    if not packs:
        losses = [answer for answer in answers if not answer[2]]
        where = f"; in the step itself the loss of {_format_ranks_with_hosts(losses)} was none" if losses else ""
        cause = f"from none of its {read} packs when each is run alone, which points to the hardware{where}"
        return cause, "give the same command again, on other machines if it comes back"
    if len(packs) == read > 1:
        remedy = "begin anew or from an earlier checkpoint with a lower --lr or longer --lr-warmup-iters"
        return f"from each of its {read} packs: the weights themselves are no good", remedy
    corpora = {plan.data.corpora[plan.packs.corpus_of_sample(sample)].prefix for sample in packs}
    ranks = {where for where, _, is_finite in seen if not is_finite}
    places = _format_ranks_with_hosts(answer for answer in answers if answer[0] in ranks)
    faulty = SkippedPacks.from_numbers(packs)
    cause = f"from pack{'s' * (len(packs) > 1)} {faulty.format_short()} of {', '.join(sorted(corpora))} on {places}"
    return cause, f"give the same command with --skip-packs {' '.join((plan.skipped | faulty).texts)}"


def report_skipped_step(engine: Engine, step: int, result: StepMetrics, skipped: int) -> None:
    """Report on all ranks why update `step` was left out, the `skipped`th; InputError beyond `--max-skipped-updates`."""
    (cause, remedy), limit = find_nonfinite_packs(engine, step), engine.plan.settings.health.max_skipped_updates
    what = "gradient" if math.isfinite(result.loss_sum) else "loss"
    line = f"step {step}: {what} is no finite number, {cause}; update skipped, {skipped} so far"
    if skipped > limit:
        raise InputError(f"{line}, --max-skipped-updates allows {limit}; {remedy}")
    print_rank_0(line)


def _format_ranks_with_hosts(answers: Iterable[tuple]) -> str:
    """Return `rank 3 (node-1)`, or several with their hosts, of answers that begin with both."""
    ranks, hosts = zip(*(answer[:2] for answer in answers), strict=True)
    return f"rank{'s' * (len(ranks) > 1)} {SkippedPacks.from_numbers(ranks).format_short()} ({', '.join(sorted(set(hosts)))})"
