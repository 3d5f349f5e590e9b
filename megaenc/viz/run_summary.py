"""Print the held-out loss and accuracy of a run at its first and last validation.

The accuracy of the most frequent token stands next to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import format_duration, format_number, print_rank_0, silence_libraries
from megaenc.errors import handle_command_errors
from megaenc.objectives import compute_perplexity
from megaenc.tables import print_tables
from megaenc.viz.run_metrics import (
    is_pseudo_perplexity,
    read_held_out_validations,
    read_model_size_and_steps,
    read_start_progress,
    read_steps,
    training_seconds,
)


@dataclass(frozen=True)
class RunSummaryConfig:
    """Options of `megaenc summary`: the run directory `run`, positional and required."""

    run: Annotated[str, Positional, arg(metavar="RUN")]
    """run directory (--save of a pretraining run)"""


@dataclass(frozen=True)
class HeldOutGain:
    """Held-out scores of one `objective` at the first and last validation of a run.

    `summarise` builds it. `loss`, in nats per predicted token, and `accuracy`, a fraction from 0 to
    1, are pairs (first, last). `most_frequent` is the accuracy of always predicting the most
    frequent label, at the last validation. `corpora` has the pair of losses by prefix of each
    corpus of a blend; it is empty without a blend.
    """

    objective: str
    loss: tuple[float, float]
    """first and last, in nats a predicted token"""
    accuracy: tuple[float, float]
    """first and last, as fractions"""
    most_frequent: float
    """accuracy of always predicting the most frequent label, at the last validation"""
    corpora: dict[str, tuple[float, float]] = field(default_factory=dict)
    """loss at both validations on the held-out text of each corpus of a blend, by prefix"""

    @property
    def times_most_frequent(self) -> float:
        """Return the last accuracy over that of always predicting the most frequent label.

        It is infinite if the accuracy of that label is 0.
        """
        return self.accuracy[1] / self.most_frequent if self.most_frequent else math.inf


@dataclass(frozen=True)
class RunSummary:
    """Key numbers of a run, and the change of its held-out losses, by `summarise`.

    `step` is the last logged one of `train_iters`, `parameters` the model's size. `tokens` are
    those up to `step`, including the `tokens_before` of a branch's parent up to step `branched_at`
    (both 0 without a branch); `seconds` is the time of the run's own training steps. `gains`, a
    list of HeldOutGain, compares the validations at steps `first_validation` and `last_validation`,
    which may be the same one. `is_same_text` is whether both read the same packs.
    """

    step: int
    """last logged step"""
    train_iters: int
    """planned steps"""
    first_validation: int
    """step of the first validation"""
    last_validation: int
    """step of the last validation"""
    parameters: int
    tokens: int
    """tokens up to `step`, with those of a branch's parent"""
    seconds: float
    """time in training steps, without those of a branch's parent"""
    branched_at: int
    """parent's step that a branch started from; else 0"""
    tokens_before: int
    """tokens of the parent at that step"""
    gains: list[HeldOutGain]
    """change between the two validations, for each objective with scores at both"""
    is_same_text: bool = True
    """whether both validations read the same packs"""


def summarise(run: str | Path) -> RunSummary:
    """Return the RunSummary of a run directory.

    `gains` lacks objectives without scores, or with a score that is None, at one of the two
    validations, and may be empty.

    Raises:
        InputError: A file is missing or invalid, or the run has no step or no validation.
    """
    steps = read_steps(run)
    facts = read_model_size_and_steps(run)
    start_progress = read_start_progress(run)
    validations = read_held_out_validations(run)
    first = validations[0]
    last = validations[-1]
    newest = steps[-1]
    gains = []
    for objective, after in last["objectives"].items():
        before = first["objectives"].get(objective)
        # None: the held-out packs have no target
        if before is not None and None not in (*before.values(), *after.values()):
            gains.append(
                HeldOutGain(
                    objective,
                    (before["loss"], after["loss"]),
                    (before["accuracy"], after["accuracy"]),
                    after["most_frequent"],
                    _pair_corpora(before, after),
                )
            )
    return RunSummary(
        step=newest["step"],
        train_iters=facts["train_iters"],
        first_validation=first["step"],
        last_validation=last["step"],
        parameters=facts["parameters"],
        tokens=newest["tokens"],
        seconds=training_seconds(steps, start_progress["step"]),
        branched_at=start_progress["step"],
        tokens_before=start_progress["tokens"],
        gains=gains,
        is_same_text=first.get("held_out") == last.get("held_out"),
    )


def _pair_corpora(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the losses by corpus that both validations have."""
    earlier = before.get("by_corpus", {})
    later = after.get("by_corpus", {})
    losses = {prefix: (earlier.get(prefix), loss) for prefix, loss in later.items()}
    return {prefix: pair for prefix, pair in losses.items() if None not in pair}


def build_table(summary: RunSummary) -> Any:
    """Return a rich table of held-out loss and accuracy, at first and last validation.

    Rows are by objective and corpus of `summary.gains`, which may be empty.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("held-out text", overflow="fold")
    for name in (
        f"step {summary.first_validation}",
        f"step {summary.last_validation:,}",
        "most frequent token",
        "after / that",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for gain in summary.gains:
        table.add_row(f"{gain.objective}: loss", *(f"{loss:.3f}" for loss in gain.loss))
        for prefix, losses in gain.corpora.items():
            table.add_row(f"  of {prefix}", *(f"{loss:.3f}" for loss in losses))
        percentages = [
            f"{100 * fraction:.1f} %" for fraction in (*gain.accuracy, gain.most_frequent)
        ]
        if is_pseudo_perplexity(gain.objective):
            table.add_row(
                f"{gain.objective}: perplexity",
                *(f"{compute_perplexity(loss):,.1f}" for loss in gain.loss),
            )
        table.add_row(
            f"{gain.objective}: accuracy", *percentages, f"{gain.times_most_frequent:.1f} x"
        )
    return table


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc summary`: print held-out losses, size and tokens/s of a run.

    Invalid input ends the process with code 2 and a line on stderr.

    Args:
        argv: Command line without the program's name; None for that of the process.
    """
    silence_libraries()
    config = flags.parse(RunSummaryConfig, argv, prog="megaenc summary", description=__doc__)
    summary = summarise(config.run)
    print_tables([build_table(summary)], 120)
    if not summary.is_same_text:
        print_rank_0(
            "the two validations read different packs (text or length of their phases), which is a "
            "part of the change"
        )
    speed = (summary.tokens - summary.tokens_before) / (summary.seconds or math.inf)
    timed = f", those after step {summary.branched_at:,}," if summary.branched_at else ""
    planned = "" if summary.step == summary.train_iters else f" of {summary.train_iters:,}"
    print_rank_0(
        f"{format_number(summary.parameters)} parameters, {summary.step:,}{planned} steps, "
        f"{format_number(summary.tokens)} tokens{timed} in {format_duration(summary.seconds)} "
        f"({speed:,.0f} tokens/s)"
    )
