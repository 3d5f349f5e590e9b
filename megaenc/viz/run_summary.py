"""What a run has learnt: held-out loss and accuracy before and after, beside a guess that needs no learning."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import build_rich_console, format_duration, format_number, print_rank_0, silence_libraries
from megaenc.errors import handle_command_errors
from megaenc.viz.run_metrics import (
    read_held_out_validations,
    read_model_size_and_steps,
    read_start_progress,
    read_steps,
    training_seconds,
)


@dataclass(frozen=True)
class RunSummaryConfig:
    """What `megaenc summary` takes."""

    run: Annotated[str, Positional, arg(metavar="RUN")]
    """Run folder (the --save of a pretraining run)."""


@dataclass(frozen=True)
class HeldOutGain:
    """Held-out text under one objective, at the first and the last validation of a run."""

    objective: str
    loss: tuple[float, float]
    accuracy: tuple[float, float]
    most_frequent: float
    """accuracy of always guessing the token that is most frequent among the labels"""

    @property
    def times_most_frequent(self) -> float:
        """The last accuracy, as a multiple of that guess's; infinite for a guess that is never right."""
        return self.accuracy[1] / self.most_frequent if self.most_frequent else math.inf


@dataclass(frozen=True)
class RunSummary:
    """A run in a few numbers."""

    step: int
    train_iters: int
    first_validation: int
    last_validation: int
    parameters: int
    tokens: int
    seconds: float
    """in updates alone, those of a branch's parent not counted"""
    branched_at: int
    """the parent's step that a branch began with, else 0, and what had been read by then"""
    tokens_before: int
    learnt: list[HeldOutGain]
    """between the two validations"""


def summarise(run: str | Path) -> RunSummary:
    """Read a run folder. Raises InputError for what no run wrote, and where nothing was validated."""
    steps, facts, start_progress = read_steps(run), read_model_size_and_steps(run), read_start_progress(run)
    validations = read_held_out_validations(run)
    first, last, newest = validations[0], validations[-1], steps[-1]
    gains = []
    for objective, after in last["objectives"].items():
        before = first["objectives"].get(objective)
        if before is not None and None not in (*before.values(), *after.values()):  # else no target in the held-out packs
            pairs = ((before[name], after[name]) for name in ("loss", "accuracy"))
            gains.append(HeldOutGain(objective, *pairs, after["most_frequent"]))
    seconds = training_seconds(steps, start_progress["step"])
    counts = (newest["step"], facts["train_iters"], first["step"], last["step"], facts["parameters"], newest["tokens"])
    return RunSummary(*counts, seconds, start_progress["step"], start_progress["tokens"], gains)


def build_table(summary: RunSummary) -> Any:
    """Return rich's Table of `summary.learnt`."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("held-out text", overflow="fold")
    for name in (f"step {summary.first_validation}", f"step {summary.last_validation:,}", "most frequent token", "after / that"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in summary.learnt:
        table.add_row(f"{one.objective}: loss", *(f"{loss:.3f}" for loss in one.loss))
        shares = [f"{100 * share:.1f} %" for share in (*one.accuracy, one.most_frequent)]
        table.add_row(f"{one.objective}: accuracy", *shares, f"{one.times_most_frequent:.1f} x")
    return table


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc summary`."""
    silence_libraries()
    config = flags.parse(RunSummaryConfig, argv, prog="megaenc summary", description=__doc__)
    summary = summarise(config.run)
    plain = {"markup": False, "emoji": False, "highlight": False}  # names are not rich's language
    build_rich_console(**plain, width=None if sys.stdout.isatty() else 120).print(build_table(summary))
    speed = (summary.tokens - summary.tokens_before) / (summary.seconds or math.inf)
    timed = f", those after step {summary.branched_at:,}," if summary.branched_at else ""
    planned = "" if summary.step == summary.train_iters else f" of {summary.train_iters:,}"
    print_rank_0(
        f"{format_number(summary.parameters)} parameters, {summary.step:,}{planned} steps, {format_number(summary.tokens)} tokens{timed} "
        f"in {format_duration(summary.seconds)} ({speed:,.0f} tokens/s)"
    )
