"""An estimate for the eye and as JSON; both say the same."""

import dataclasses
import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megaenc import __version__
from megaenc.console import format_duration, format_number
from megaenc.estimate.hardware import GIB, Rates
from megaenc.estimate.layout_case import CostTerm, LayoutCase
from megaenc.estimate.length_model import LengthModel
from megaenc.estimate.total import Estimate, flags_of

WORTH_SAYING = 1.03  # how much faster a layout must be to be suggested where the given one fits
_SHOWN_PHASES = 12


@dataclasses.dataclass(frozen=True)
class EstimateReport:
    """What is said of a run: the estimate of its own layout, and of a better one if there is one."""

    model: str
    vocabulary: str
    documents: LengthModel
    rates: Rates
    own: Estimate
    better: Estimate | None
    searched: bool
    price: float | None
    mfu: float | None

    def show(self, console: Console, *, explain: bool) -> None:
        """Print it."""
        own, case, said = self.own, self.own.case, self.as_json()
        precision = f"{said['parameters'] / 1e6:,.1f}M parameters in {'bf16' if case.bf16 else 'fp32'}"
        console.print(f"{self.model}: {precision}, {self.vocabulary}")
        console.print(f"{self.documents.source}\n{case.gpus:,} x {self.rates.source}\n{_layout(case)}", soft_wrap=True)
        for table in (_memory(own, self.rates), self._steps(said["estimate"]), self._phases(said["estimate"])):
            console.print(table)
        price = f", {own.hours * self.price:,.0f} at {self.price:g} an hour" if self.price else ""
        kept = "; saving is not counted" if own.seconds else ""
        hours = f"{own.hours:,.{0 if own.hours >= 10 else 2}f} device hours"
        console.print(f"the run: {_clock(own.seconds)}, {hours}{price}{kept}", soft_wrap=True)
        if explain:
            for title, terms, by in self._explained():
                table = Table(box=None, show_header=False, pad_edge=False)
                for justify in ("left", "right", "left"):
                    table.add_column(overflow="fold", justify=justify)
                for term in terms:
                    table.add_row(f"  {term.name}", f"{term.value / by:.4g}", term.formula)
                console.print(f"\n{title}")
                console.print(table)
        for line in self._advice():
            console.print(line, soft_wrap=True)

    def _steps(self, said: dict[str, Any]) -> Table:
        given, devices = " (given)" if self.mfu else "", said["devices"]
        rows = [
            (
                step["objective"],
                f"{100 * step['predicted_share']:.1f} %",
                f"{step['flops']:.3g}",
                f"{step['seconds']:.3g}{given}",
                f"{step['tokens_per_second']:,.0f}",
                f"{step['tokens_per_second'] / devices:,.0f}",
                f"{100 * step['model_flops_utilization']:.1f} %" if self.rates.peak else "-",
                f"{100 * step['pipeline_bubble']:.1f} %",
            )
            for step in said["steps"]
        ]
        return _table(("a step of", "predicted", "FLOP", "seconds", "tokens/s", "a device", "of peak", "idle in pipeline"), rows)

    def _phases(self, said: dict[str, Any]) -> Table:
        def taken(seconds: float) -> tuple[str, ...]:
            hours = seconds * said["devices"] / 3600
            return (_clock(seconds), f"{hours:,.1f}", *([f"{hours * self.price:,.0f}"] if self.price else []))

        phases, validation = self.own.phases, self.own.validation
        rows = [
            (phase.text, f"{phase.first:,} to {phase.last:,}", format_number(phase.tokens), f"{phase.flops:.3g}", *taken(phase.seconds))
            for phase in phases[:_SHOWN_PHASES]
        ]
        rows += [(f"... {len(phases) - _SHOWN_PHASES:,} more phases",)] if len(phases) > _SHOWN_PHASES else []
        rows += [("validation", "", "", "", *taken(validation))] if validation else []
        return _table(("phase", "steps", "tokens", "FLOP", "time", "device hours", *(["cost"] if self.price else [])), rows)

    def _explained(self) -> list[tuple[str, tuple[CostTerm, ...], float]]:
        """Return each table of terms with its title and what its numbers are counted in."""
        stage, stages = self.own.memory.stage, self.own.case.stages
        of = f" on stage {stage.number + 1} of {stages}" if stages > 1 else ""
        found = [(f"memory of a rank{of}, GiB", self.own.memory.terms, GIB)]
        for work, step in self.own.steps:
            found.append((f"a step of {work.objective}, seconds of its slowest stage", step.terms, 1.0))
            found.append((f"what one rank sends for a step of {work.objective}, GB", step.sent, 1e9))
        return [each for each in found if each[1]]

    def _advice(self) -> list[str]:
        own, better = self.own, self.better
        if not self.searched:
            return [] if own.fits else ["does not fit"]
        if better is None:
            return ["does not fit, and no layout of these devices does: take more of them, or larger ones"]
        faster = own.seconds / better.seconds
        if own.fits and (faster < WORTH_SAYING or better.case == own.case):
            return ["layout: none that was found is more than 3 % faster"]
        what = f"{faster:.2f} x as fast" if own.fits else "fits"
        said = f"{_clock(better.seconds)}, {better.hours:,.0f} device hours, {better.memory.total / GIB:.1f} GiB"
        return [f"a better layout ({what}: {said}):", "  " + " ".join(flags_of(better.case))]

    def as_json(self) -> dict[str, Any]:
        """Return everything, every term included."""
        better = None if self.better is None else {"flags": flags_of(self.better.case), **_json(self.better, self.rates)}
        return {
            "megaenc": __version__,
            "date": datetime.date.today().isoformat(),
            "model": self.model,
            "parameters": self.own.case.shape.parameter_count(self.own.case.vocab_size),
            "vocabulary": self.own.case.vocab_size,
            "documents": dataclasses.asdict(self.documents) | {"lengths": None},
            "machine": dataclasses.asdict(self.rates),
            "mfu_given": self.mfu,
            "estimate": _json(self.own, self.rates),
            "suggestion": better,
        }


def _json(found: Estimate, rates: Rates) -> dict[str, Any]:
    case, memory = found.case, found.memory
    return {
        "devices": case.gpus,
        "layout": dataclasses.asdict(case.layout) | {"split": list(case.split), "data_parallel": case.data},
        "micro_batch_size": case.micro_batch_size,
        "micro_batches": case.micro_batches,
        "memory": {
            "stage": memory.stage.number,
            "parameters": memory.stage.parameters,
            "bytes": memory.total,
            "available": rates.memory,
            "fits": found.fits,
            "terms": [dataclasses.asdict(term) for term in memory.terms],
        },
        "steps": [
            {
                "objective": work.objective,
                "predicted_share": work.predicted / work.tokens,
                **dataclasses.asdict(step),
                "tokens_per_second": case.global_batch_size * case.seq_length / step.seconds,
                "model_flops_utilization": step.flops / step.seconds / (rates.peak * case.gpus) if rates.peak else None,
            }
            for work, step in found.steps
        ],
        "phases": [dataclasses.asdict(phase) | {"device_hours": phase.seconds * case.gpus / 3600} for phase in found.phases],
        "validation_seconds": found.validation,
        "seconds": found.seconds,
        "device_hours": found.hours,
        "flops": sum(phase.flops for phase in found.phases),
        "tokens": sum(phase.tokens for phase in found.phases),
    }


def _layout(case: LayoutCase) -> str:
    layout = case.layout
    told = [layout.describe(case.shape.num_layers, case.gpus)]
    told += ["distributed optimizer"] * layout.use_distributed_optimizer + ["gradients overlap"] * layout.overlap_grad_reduce
    told += [f"{layout.recompute_granularity} recomputation"] * bool(layout.recompute_granularity)
    return (
        f"{', '.join(told)}; a step is {case.global_batch_size:,} packs of {case.seq_length:,} tokens, "
        f"{case.micro_batches:,} x {case.micro_batch_size} at once on each rank"
    )


def _memory(found: Estimate, rates: Rates) -> Table:
    names, values = zip(*((term.name, f"{term.value / GIB:.2f}") for term in found.memory.terms), strict=True)
    judged = f"{rates.memory / GIB:.1f}: " + ("fits" if found.fits else "too much")
    return _table(("GiB", *names, "together", "of"), [("a rank", *values, f"{found.memory.total / GIB:.1f}", judged)])


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if at else "left", overflow="ellipsis" if at else "fold")
    for row in rows:
        table.add_row(*row)
    return table


def _clock(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 2 * 86400 else format_duration(seconds)
