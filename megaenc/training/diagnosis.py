"""Which packs of a step give a loss or a gradient that is no finite number, and on which rank."""

import math
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megaenc.console import say
from megaenc.errors import InputError
from megaenc.ranks import rank
from megaenc.training.engine import BatchResult, Engine
from megaenc.training.plan import Plan
from megaenc.training.skipped import SkippedPacks
from megaenc.training.together import on_all

_SHOWN = 8  # ranges of packs or ranks that a line names


@dataclass(frozen=True)
class Findings:
    """What was found out about update number `step` by running its packs once more, the same on every rank."""

    step: int
    packs: dict[int, tuple[int, ...]]
    """The samples whose pack alone gives no finite loss or gradient, each with the ranks that saw it."""
    read: int
    """Packs of the step."""
    losses: tuple[int, ...]
    """The ranks whose share of the loss was no finite number in the step itself."""
    hosts: dict[int, str]
    """Of each rank named above."""

    def describe(self, plan: Plan) -> str:
        """What it comes from, as the end of a sentence."""
        if not self.packs:
            where = f"; in the step itself the loss of {self._places(self.losses)} was none" if self.losses else ""
            return f"from none of its {self.read} packs when each is run alone, which points to the hardware{where}"
        if len(self.packs) == self.read > 1:
            return f"from each of its {self.read} packs: the weights themselves are no good"
        corpora = {plan.data.corpora[plan.packs.corpus_of_sample(sample)].prefix for sample in self.packs}
        places = self._places({place for ranks in self.packs.values() for place in ranks})
        return f"from pack{'s' * (len(self.packs) > 1)} {_listed(self.packs)} of {', '.join(sorted(corpora))} on {places}"

    def remedy(self, plan: Plan) -> str:
        """What to do next."""
        if not self.packs:
            return "give the same command again, on other machines if it comes back"
        if len(self.packs) == self.read > 1:
            return "begin anew or from an earlier checkpoint with a lower --lr or longer --lr-warmup-iters"
        skipped = plan.skipped | SkippedPacks.of((sample, sample) for sample in self.packs)
        return f"give the same command with --skip-packs {' '.join(skipped.texts)}"

    def _places(self, ranks: Iterable[int]) -> str:
        """`rank 3 (node-1)`, or several with their hosts."""
        ranks = sorted(ranks)
        hosts = sorted({self.hosts[rank] for rank in ranks})
        return f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)} ({', '.join(hosts)})"


def diagnose(engine: Engine, step: int) -> Findings:
    """Run the packs of update `step` once more, each alone, on all ranks together; weights and optimizer stay the same."""
    plan, layout = engine.plan, engine.layout
    objective = plan.schedule.objective(step)
    loss_was_finite = bool(engine.own_loss.isfinite())
    rows: list[Sequence[int]] = engine.rows(step)
    if not (layout.sequence_parallel and plan.settings.data.seq_length % layout.tensor_model_parallel_size):
        rows = [[sample] for row in rows for sample in row]  # else one pack cannot be cut along its length
    with engine.unreduced():
        mine = {tuple(row): all(map(math.isfinite, engine.gradient_alone(row, objective))) for row in rows}
    bad: dict[int, list[int]] = defaultdict(list)
    read: set[int] = set()
    answers = on_all(lambda: (rank(), socket.gethostname(), loss_was_finite, mine))
    for where, _, _, finite in answers:
        read |= {sample for row in finite for sample in row}
        for sample in (sample for row, is_finite in finite.items() if not is_finite for sample in row):
            bad[sample].append(where)
    return Findings(
        step,
        {sample: tuple(ranks) for sample, ranks in sorted(bad.items())},
        len(read),
        tuple(where for where, _, finite, _ in answers if not finite),
        {where: host for where, host, _, _ in answers},
    )


def report_skipped(engine: Engine, step: int, result: BatchResult, skipped: int) -> None:
    """Report on all ranks why update `step` was left out, the `skipped`th; InputError beyond `--max-skipped-updates`."""
    findings, limit = diagnose(engine, step), engine.plan.settings.health.max_skipped_updates
    what = "gradient" if math.isfinite(result.loss_sum) else "loss"
    line = f"step {step}: {what} is no finite number, {findings.describe(engine.plan)}; update skipped, {skipped} so far"
    if skipped > limit:
        raise InputError(f"{line}, --max-skipped-updates allows {limit}; {findings.remedy(engine.plan)}")
    say(line)


def _listed(numbers: Iterable[int]) -> str:
    """`3` or `3-5 9`, as `--skip-packs` reads it, the end of many left out."""
    texts = SkippedPacks.of((number, number) for number in numbers).texts
    return " ".join(texts[:_SHOWN]) + (" ..." if len(texts) > _SHOWN else "")
