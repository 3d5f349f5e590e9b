"""Estimate of a run as printed tables and as JSON."""

import dataclasses
import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megaenc import __version__
from megaenc.console import format_duration, format_number
from megaenc.estimate.devices import GIB, Device, Utilization
from megaenc.estimate.layout_case import LayoutCase
from megaenc.estimate.length_model import LengthModel
from megaenc.estimate.memory import compute_save_cost
from megaenc.estimate.total import Estimate, format_layout_flags

MIN_SPEEDUP = 1.03  # of a suggested layout if the configured one fits
_MAX_PHASES = 12


@dataclasses.dataclass(frozen=True)
class EstimateReport:
    """Estimate of a run's layout and of a suggested layout, if there is one.

    `build_report` builds it; `print` shows it, `to_dict` is for JSON. `model` and `vocabulary` are
    texts about them, `documents` has the lengths, and `utilization` is that of `device`. `estimate`
    is of the run's layout; `is_searched` tells whether another was searched, and `suggestion` is
    None if not, or if no layout fits. `price` is that of a device hour, in any currency; None to
    print no cost.
    """

    model: str
    vocabulary: str
    documents: LengthModel
    device: Device
    utilization: Utilization
    estimate: Estimate
    suggestion: Estimate | None
    is_searched: bool
    price: float | None

    def print(self, console: Console) -> None:
        """Print memory, step times, phases, and the suggested layout's flags to `console`."""
        estimate = self.estimate
        case = estimate.case
        values = self.to_dict()
        precision = (
            f"{values['parameters'] / 1e6:,.1f}M parameters in {'bf16' if case.bf16 else 'fp32'}"
        )
        console.print(f"{self.model}: {precision}, {self.vocabulary}")
        console.print(f"{self.documents.source}\n{_describe_layout(case)}", soft_wrap=True)
        speed = (
            f"{100 * self.utilization.share:.3g} % of {self.device.peak / 1e12:,.4g} TFLOP/s in "
            "bf16"
        )
        console.print(
            f"{case.gpus:,} x {self.device.name} at {speed} ({self.utilization.source})",
            soft_wrap=True,
        )
        console.print(_memory_table(estimate, self.device))
        console.print(_format_save_cost(values["estimate"]["saving"]), soft_wrap=True)
        console.print(self._steps_table(values["estimate"]))
        console.print(self._phases_table(values["estimate"]))
        price = (
            f", {estimate.hours * self.price:,.0f} at {self.price:g} an hour" if self.price else ""
        )
        hint = "; without saving" if estimate.seconds else ""
        hours = f"{estimate.hours:,.{0 if estimate.hours >= 10 else 2}f} device hours"
        console.print(
            f"the run: {format_duration(estimate.seconds)}, {hours}{price}{hint}", soft_wrap=True
        )
        for line in self._suggestion_lines():
            console.print(line, soft_wrap=True)

    def _steps_table(self, values: dict[str, Any]) -> Table:
        """Return the table of step times and throughput by objective."""
        rows = []
        for step in values["steps"]:
            row = (
                step["objective"],
                f"{100 * step['predicted_share']:.1f} %",
                f"{step['flops']:.3g}",
                f"{step['seconds']:.3g}",
                f"{step['tokens_per_second']:,.0f}",
                f"{step['tokens_per_second'] / values['devices']:,.0f}",
                f"{100 * values['pipeline_idle']:.1f} %",
            )
            rows.append(row)
        return _build_table(
            (
                "a step of",
                "predicted",
                "FLOP",
                "seconds",
                "tokens/s",
                "a device",
                "idle in pipeline",
            ),
            rows,
        )

    def _phases_table(self, values: dict[str, Any]) -> Table:
        """Return the table of time and cost by phase."""

        def cost_cells(seconds: float) -> tuple[str, ...]:
            hours = seconds * values["devices"] / 3600
            return (
                format_duration(seconds),
                f"{hours:,.1f}",
                *([f"{hours * self.price:,.0f}"] if self.price else []),
            )

        phases = self.estimate.phases
        validation = self.estimate.validation
        rows = [
            (
                phase.text,
                f"{phase.first:,} to {phase.last:,}",
                format_number(phase.tokens),
                f"{phase.flops:.3g}",
                *cost_cells(phase.seconds),
            )
            for phase in phases[:_MAX_PHASES]
        ]
        rows += (
            [(f"... {len(phases) - _MAX_PHASES:,} more phases",)]
            if len(phases) > _MAX_PHASES
            else []
        )
        rows += [("validation", "", "", "", *cost_cells(validation))] if validation else []
        return _build_table(
            (
                "phase",
                "steps",
                "tokens",
                "FLOP",
                "time",
                "device hours",
                *(["cost"] if self.price else []),
            ),
            rows,
        )

    def _suggestion_lines(self) -> list[str]:
        """Return lines with the suggested layout as flags, or the reason for none."""
        estimate = self.estimate
        better = self.suggestion
        if not self.is_searched:
            return [] if estimate.fits else ["does not fit"]
        if better is None:
            return [
                "does not fit, and no layout on these devices does: "
                "raise --gpus or choose a larger --gpu"
            ]
        is_simpler = _count_replica_ranks(better.case) < _count_replica_ranks(estimate.case)
        if estimate.fits and not is_simpler and estimate.seconds < MIN_SPEEDUP * better.seconds:
            return ["layout: it fits, and no layout is simpler"]
        if not estimate.fits:
            gain = "fits"
        elif is_simpler:
            gain = "simpler"
        else:
            gain = f"{estimate.seconds / better.seconds:.2f} x as fast"
        cost = (
            f"{format_duration(better.seconds)}, {better.hours:,.0f} device hours, "
            f"{better.memory.total / GIB:.1f} GiB"
        )
        return [
            f"a better layout ({gain}: {cost}):",
            "  " + " ".join(format_layout_flags(better.case)),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file: inputs, estimate and suggestion.

        The keys are `megaenc` (its version), `date`, `model`, `parameters`, `vocabulary`,
        `documents`, `device`, `utilization`, `estimate` and `suggestion`, which is as `estimate`,
        with `flags` too, or None if there is none. The values are JSON types.
        """
        better = (
            None
            if self.suggestion is None
            else {
                "flags": format_layout_flags(self.suggestion.case),
                **_estimate_to_dict(self.suggestion, self.device),
            }
        )
        return {
            "megaenc": __version__,
            "date": datetime.date.today().isoformat(),
            "model": self.model,
            "parameters": self.estimate.case.shape.parameter_count(self.estimate.case.vocab_size),
            "vocabulary": self.estimate.case.vocab_size,
            "documents": dataclasses.asdict(self.documents),
            "device": {
                "name": self.device.name,
                "peak": self.device.peak,
                "per_node": self.device.per_node,
            },
            "utilization": dataclasses.asdict(self.utilization),
            "estimate": _estimate_to_dict(self.estimate, self.device),
            "suggestion": better,
        }


def _count_replica_ranks(case: LayoutCase) -> int:
    """Return the number of ranks that share a replica of the model."""
    return case.tensor_parallel_size * case.num_stages


def _estimate_to_dict(estimate: Estimate, device: Device) -> dict[str, Any]:
    """Return an estimate as a JSON object."""
    case = estimate.case
    memory = estimate.memory
    return {
        "devices": case.gpus,
        "layout": dataclasses.asdict(case.layout)
        | {"split": list(case.split), "data_parallel": case.data_parallel_size},
        "micro_batch_size": case.micro_batch_size,
        "micro_batches": case.micro_batches,
        "memory": {
            "stage": memory.stage.index,
            "parameters": memory.stage.parameters,
            "bytes": memory.total,
            "available": device.memory,
            "fits": estimate.fits,
            "terms": memory.terms,
        },
        "saving": dataclasses.asdict(compute_save_cost(case, device.per_node)),
        "pipeline_idle": estimate.idle,
        "steps": [
            dataclasses.asdict(step)
            | {"tokens_per_second": case.global_batch_size * case.seq_length / step.seconds}
            for step in estimate.steps
        ],
        "phases": [
            dataclasses.asdict(phase) | {"device_hours": phase.seconds * case.gpus / 3600}
            for phase in estimate.phases
        ],
        "validation_seconds": estimate.validation,
        "seconds": estimate.seconds,
        "device_hours": estimate.hours,
        "flops": sum(phase.flops for phase in estimate.phases),
        "tokens": sum(phase.tokens for phase in estimate.phases),
    }


def _describe_layout(case: LayoutCase) -> str:
    """Return a layout and its batch as one line."""
    layout = case.layout
    parts = [layout.describe(case.shape.num_layers, case.gpus)]
    parts += ["distributed optimizer"] * layout.use_distributed_optimizer + [
        "gradients overlap"
    ] * layout.overlap_grad_reduce
    parts += [f"{layout.recompute_granularity} recomputation"] * bool(layout.recompute_granularity)
    return (
        f"{', '.join(parts)}; a step is {case.global_batch_size:,} packs of {case.seq_length:,} "
        f"tokens, {case.micro_batches:,} micro-batch{'es' * (case.micro_batches != 1)} of "
        f"{case.packs_at_once} on each rank"
    )


def _memory_table(estimate: Estimate, device: Device) -> Table:
    """Return the table of a rank's memory by term."""
    terms = estimate.memory.terms
    values = [f"{value / GIB:.2f}" for value in terms.values()]
    verdict = f"{device.memory / GIB:.1f}: " + ("fits" if estimate.fits else "too much")
    return _build_table(
        ("GiB", *terms, "together", "of"),
        [("a rank", *values, f"{estimate.memory.total / GIB:.1f}", verdict)],
    )


def _format_save_cost(saving: dict[str, Any]) -> str:
    """Return the size of a checkpoint and the host memory of a save as one line."""
    ranks = f"{saving['ranks_per_node']} rank{'s' * (saving['ranks_per_node'] != 1)}"
    return (
        f"a save: {saving['total'] / 1e9:,.2f} GB; "
        f"it takes {saving['synchronous'] / GIB:,.2f} GiB of host memory on a node of "
        f"{ranks}, with --async-save {saving['asynchronous'] / GIB:,.2f}"
    )


def _build_table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    """Return a table with column names and rows."""
    table = Table(box=box.SIMPLE_HEAD)
    for column, name in enumerate(names):
        table.add_column(
            name, justify="right" if column else "left", overflow="ellipsis" if column else "fold"
        )
    for row in rows:
        table.add_row(*row)
    return table
