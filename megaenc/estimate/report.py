"""An estimate for the eye and as JSON; both say the same."""

import dataclasses
import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megaenc import __version__
from megaenc.console import clock, number
from megaenc.estimate.case import Term
from megaenc.estimate.documents import Documents
from megaenc.estimate.layouts import WORTH_SAYING, flags_of
from megaenc.estimate.machines import GIB, Rates
from megaenc.estimate.time import StepTime
from megaenc.estimate.whole import Estimate

_SHOWN_PHASES = 12


@dataclasses.dataclass(frozen=True)
class Report:
    """What is said of a run: the estimate of its own layout, and of a better one if there is one."""

    model: str
    vocabulary: str
    documents: Documents
    rates: Rates
    own: Estimate
    better: Estimate | None
    searched: bool
    price: float | None
    mfu: float | None

    def show(self, console: Console, *, explain: bool) -> None:
        """Print it."""
        own, case = self.own, self.own.case
        millions = case.shape.parameters(case.vocab_size) / 1e6
        console.print(f"{self.model}: {millions:,.1f}M parameters in {'bf16' if case.bf16 else 'fp32'}, {self.vocabulary}")
        console.print(f"{self.documents.source}", soft_wrap=True)
        console.print(f"{case.gpus:,} x {self.rates.source}", soft_wrap=True)
        console.print(_layout(own), soft_wrap=True)
        console.print(_memory(own, self.rates))
        console.print(_steps(own, self.rates, self.mfu))
        console.print(_phases(own, self.price))
        console.print(self._whole(), soft_wrap=True)
        if explain:
            for title, terms in self._explained():
                console.print(f"\n{title}")
                console.print(_terms(terms))
        for line in self._advice():
            console.print(line, soft_wrap=True)

    def _whole(self) -> str:
        own = self.own
        price = f", {own.hours * self.price:,.0f} at {self.price:g} an hour" if self.price else ""
        kept = "; saving is not counted" if own.seconds else ""
        return f"the run: {_clock(own.seconds)}, {own.hours:,.{0 if own.hours >= 10 else 2}f} device hours{price}{kept}"

    def _explained(self) -> list[tuple[str, tuple[Term, ...]]]:
        stage = self.own.memory.stage
        of = f" on stage {stage.number + 1} of {self.own.case.stages}" if self.own.case.stages > 1 else ""
        found = [(f"memory of a rank{of}, GiB", self.own.memory.terms)]
        for work, step in self.own.steps:
            if step.terms:
                found.append((f"a step of {work.objective}, seconds of its slowest stage", step.terms))
            if step.sent:
                found.append((f"what one rank sends for a step of {work.objective}, GB", step.sent))
        return found

    def _advice(self) -> list[str]:
        if not self.searched or self.mfu is not None:
            return [] if self.own.fits else ["does not fit"]
        if self.better is None:
            return ["does not fit, and no layout of these devices does: take more of them, or larger ones"]
        faster = self.own.seconds / self.better.seconds
        if self.own.fits and (faster < WORTH_SAYING or self.better.case == self.own.case):
            return ["layout: none that was found is more than 3 % faster"]
        gib = self.better.memory.total / GIB
        what = f"{faster:.2f} x as fast" if self.own.fits else "fits"
        said = f"{_clock(self.better.seconds)}, {self.better.hours:,.0f} device hours, {gib:.1f} GiB"
        return [f"a better layout ({what}: {said}):", "  " + " ".join(flags_of(self.better.case))]

    def as_json(self) -> dict[str, Any]:
        """Everything, every term included."""
        better = None if self.better is None else {"flags": flags_of(self.better.case), **_json(self.better, self.rates)}
        return {
            "megaenc": __version__,
            "date": datetime.date.today().isoformat(),
            "model": self.model,
            "parameters": self.own.case.shape.parameters(self.own.case.vocab_size),
            "vocabulary": self.own.case.vocab_size,
            "documents": dataclasses.asdict(self.documents) | {"lengths": None},
            "machine": dataclasses.asdict(self.rates),
            "mfu_given": self.mfu,
            "estimate": _json(self.own, self.rates),
            "suggestion": better,
        }


def _json(found: Estimate, rates: Rates) -> dict[str, Any]:
    case = found.case
    return {
        "devices": case.gpus,
        "layout": dataclasses.asdict(case.layout) | {"split": list(case.split), "data_parallel": case.data},
        "micro_batch_size": case.micro_batch_size,
        "micro_batches": case.micro_batches,
        "memory": {
            "stage": found.memory.stage.number,
            "parameters": found.memory.stage.parameters,
            "bytes": found.memory.total,
            "available": rates.memory,
            "fits": found.fits,
            "terms": [dataclasses.asdict(term) for term in found.memory.terms],
        },
        "steps": [
            {
                "objective": work.objective,
                "predicted_share": work.predicted / work.tokens,
                "flops": step.flops,
                "seconds": step.seconds,
                "tokens_per_second": case.global_batch_size * case.seq_length / step.seconds,
                "model_flops_utilization": utilization(found, step, rates),
                "pipeline_bubble": step.bubble,
                "terms": [dataclasses.asdict(term) for term in step.terms],
                "sent": [dataclasses.asdict(term) for term in step.sent],
            }
            for work, step in found.steps
        ],
        "phases": [dataclasses.asdict(phase) | {"device_hours": phase.seconds * case.gpus / 3600} for phase in found.phases],
        "validation_seconds": found.validation,
        "seconds": found.seconds,
        "device_hours": found.hours,
        "flops": found.flops,
        "tokens": found.tokens,
    }


def utilization(found: Estimate, step: StepTime, rates: Rates) -> float | None:
    """Share of the peak of all devices; None where the peak is not known."""
    return step.flops / step.seconds / (rates.peak * found.case.gpus) if rates.peak else None


def _layout(found: Estimate) -> str:
    case = found.case
    told = case.layout.describe(case.shape.num_layers, case.gpus)
    more = "".join(
        f", {text}"
        for given, text in (
            (case.layout.use_distributed_optimizer, "distributed optimizer"),
            (case.layout.overlap_grad_reduce, "gradients overlap"),
            (case.layout.recompute_granularity, f"{case.layout.recompute_granularity} recomputation"),
        )
        if given
    )
    return (
        f"{told}{more}; a step is {case.global_batch_size:,} packs of {case.seq_length:,} tokens, "
        f"{case.micro_batches:,} x {case.micro_batch_size} at once on each rank"
    )


def _memory(found: Estimate, rates: Rates) -> Table:
    table = _table("GiB", *(term.name for term in found.memory.terms), "together", "of")
    values = [f"{term.value / GIB:.2f}" for term in found.memory.terms]
    total = f"{found.memory.total / GIB:.1f}"
    table.add_row("a rank", *values, total, f"{rates.memory / GIB:.1f}: " + ("fits" if found.fits else "too much"))
    return table


def _steps(found: Estimate, rates: Rates, mfu: float | None) -> Table:
    table = _table("a step of", "predicted", "FLOP", "seconds", "tokens/s", "a device", "of peak", "idle in pipeline")
    case = found.case
    for work, step in found.steps:
        speed = case.global_batch_size * case.seq_length / step.seconds
        share = utilization(found, step, rates)
        table.add_row(
            work.objective,
            f"{100 * work.predicted / work.tokens:.1f} %",
            f"{step.flops:.3g}",
            f"{step.seconds:.3g}" + (" (given)" if mfu else ""),
            f"{speed:,.0f}",
            f"{speed / case.gpus:,.0f}",
            "-" if share is None else f"{100 * share:.1f} %",
            f"{100 * step.bubble:.1f} %",
        )
    return table


def _phases(found: Estimate, price: float | None) -> Table:
    table = _table("phase", "steps", "tokens", "FLOP", "time", "device hours", *(["cost"] if price else []))
    for phase in found.phases[:_SHOWN_PHASES]:
        hours = phase.seconds * found.case.gpus / 3600
        row = [
            phase.text,
            f"{phase.first:,} to {phase.last:,}",
            number(phase.tokens),
            f"{phase.flops:.3g}",
            _clock(phase.seconds),
        ]
        table.add_row(*row, f"{hours:,.1f}", *([f"{hours * price:,.0f}"] if price else []))
    if len(found.phases) > _SHOWN_PHASES:
        table.add_row(f"... {len(found.phases) - _SHOWN_PHASES:,} more phases")
    if found.validation:
        hours = found.validation * found.case.gpus / 3600
        table.add_row(
            "validation", "", "", "", _clock(found.validation), f"{hours:,.1f}", *([f"{hours * price:,.0f}"] if price else [])
        )
    return table


def _terms(terms: tuple[Term, ...]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    table.columns[1].justify = "right"
    scale = {"bytes": GIB, "s": 1.0}
    for term in terms:
        by = 1e9 if term.name in ("tensor parallel", "pipeline", "data parallel") else scale[term.unit]
        table.add_row(f"  {term.name}", f"{term.value / by:.4g}", term.formula)
    return table


def _clock(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 2 * 86400 else clock(seconds)


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table
