"""Plot the losses of a run, or the held-out losses of several runs together.

The plot of one run has the training loss by phase, the held-out loss and the learning rate.
"""

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.atomic_io import atomic_files
from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.objectives import PseudoPerplexity, compute_perplexity
from megaenc.output_paths import check_output_file, create_parent_with_rollback
from megaenc.viz.run_metrics import (
    HeldOutCurves,
    Row,
    held_out_curves,
    is_pseudo_perplexity,
    read_held_out_validations,
    read_start_progress,
    read_steps,
    read_validations,
)
from megaenc.viz.style import (
    AXIS_LABELS,
    GREY,
    HELD_OUT,
    LEGEND,
    Against,
    assign_styles,
    format_count_ticks,
    style_axes,
    without_math_text,
)

_FORMATS = (".png", ".pdf", ".svg")
# Also on a named validation set: NAME/pseudo_perplexity(...).
_SHIFTED = re.compile(rf"(?P<measure>([^(/]+/)?{PseudoPerplexity.name}\(.*),shift=(?P<shift>\d+)\)")
_LETTER = 0.0125  # width of a letter, as a fraction of the panel's width


@dataclass(frozen=True)
class PlotConfig:
    """Options of `megaenc plot`.

    `run`, a tuple of paths of run directories, is positional; at least one is required, which
    `write_plot` checks. The flags are `output`, a .png, .pdf or .svg file, "loss.png" by default,
    which is replaced if it exists, and `against`, the quantity on the x axis: step (the default),
    tokens, predicted_tokens or flops.
    """

    run: Annotated[tuple[str, ...], Positional, arg(metavar="RUN")]
    """run directories (--save of pretraining runs); with several, their held-out losses are plotted
    together"""
    output: str = "loss.png"
    """image file to write, .png, .pdf or .svg; an existing one is replaced"""
    against: Against = "step"
    """quantity on the x axis: step, tokens, predicted_tokens (tokens with a loss) or flops
    (training FLOPs)"""


@dataclass(frozen=True)
class PlottedPhase:
    """Logged losses of one `objective` in a section of a run, by `split_phases`.

    A section is a phase, or several short ones. It reaches from `start`, the end of the section
    before, to `end`; `x` are the positions of the R losses. All are in units of the x axis. `x` and
    `loss` (nats per predicted token) are float64[R]; R may be 0. `fraction` of the section's logged
    steps have this objective; its background reaches from `band_top - fraction` to `band_top` of
    the panel's height, as the objectives of a section are stacked.
    """

    objective: str
    start: float
    """in units of the x axis, like `end` and `x`"""
    end: float
    x: np.ndarray
    """float64[R], positions of the logged steps with a loss"""
    loss: np.ndarray
    """float64[R]"""
    fraction: float = 1.0
    """fraction of the section's logged steps with this objective"""
    band_top: float = 1.0
    """upper edge of its background, as a fraction of the panel's height; those of a section's
    objectives are stacked"""

    @property
    def smoothed(self) -> np.ndarray:
        """Return the centred moving average of `loss`, float64[R].

        Its window is a 20th of the R losses, at least three, and shorter at both ends, so that it
        stays centred.
        """
        half = max(1, len(self.loss) // 40)
        sums = np.concatenate([[0.0], np.cumsum(self.loss)])
        index = np.arange(len(self.loss))
        back = np.minimum(half, index)
        ahead = np.minimum(back, len(index) - 1 - index)
        return (sums[index + ahead + 1] - sums[index - back]) / (back + ahead + 1)


def split_phases(
    steps: list[Row], against: Against = "step", start_progress: Row | None = None
) -> list[PlottedPhase]:
    """Return the parts of a run to plot, by section and objective, in their order.

    A section is a phase, or several short ones in a row: neighbouring phases shorter than a
    fiftieth of the run's steps up to the last row, as in an alternation. Steps without a loss are
    left out of the curves; the curve of an objective that never has one is empty.

    Args:
        steps: Rows of metrics.jsonl, at least one, all with the field `against`.
        against: Field of the rows on the x axis.
        start_progress: `step` and the field `against` before the first step; None: 0.
    """
    before = 0
    start = 0
    if start_progress:
        before = start_progress["step"]
        start = start_progress[against]
    short_steps = (steps[-1]["step"] - before) / 50
    sections: list[list[Row]] = []
    short_before = False
    for _, rows in itertools.groupby(steps, key=lambda row: row["phase"]):
        group = list(rows)
        short = group[-1]["step"] - before < short_steps
        before = group[-1]["step"]
        if short and short_before:
            sections[-1] += group
        else:
            sections.append(group)
        short_before = short
    phases = []
    for section in sections:
        band_top = 1.0
        for objective in dict.fromkeys(row["objective"] for row in section):
            rows = [row for row in section if row["objective"] == objective]
            # a batch without targets has no loss
            scored = [row for row in rows if row["loss"] is not None]
            x = np.array([row[against] for row in scored], dtype=np.float64)
            loss = np.array([row["loss"] for row in scored], dtype=np.float64)
            fraction = len(rows) / len(section)
            phases.append(
                PlottedPhase(objective, start, section[-1][against], x, loss, fraction, band_top)
            )
            band_top = max(band_top - fraction, 0.0)
        start = section[-1][against]
    return phases


@without_math_text
def draw_run(
    steps: list[Row],
    validation_rows: list[Row],
    title: str,
    against: Against = "step",
    start_progress: Row | None = None,
) -> Any:
    """Draw the losses of one run above its learning rate; return a matplotlib Figure.

    They are the training loss by phase and the held-out losses. Further panels have the losses by
    position in the last validation, and in a blend the changes of each corpus's held-out loss. The
    figure is not pyplot's, so it need not be closed.

    Args:
        steps: Rows of metrics.jsonl, at least one.
        validation_rows: Rows of validation.jsonl; may be empty.
        against: Field on the x axis, which the rows of both must have.
        start_progress: `step` and the field `against` before the first step; None: 0.
    """
    from matplotlib.figure import Figure

    phases = split_phases(steps, against, start_progress)
    validations = held_out_curves(validation_rows, against)
    style = assign_styles([*(phase.objective for phase in phases), *validations])
    first = phases[0].start
    last = phases[-1].end

    is_by_position = any(
        "by_position" in result
        for row in validation_rows[-1:]
        for result in row["objectives"].values()
    )
    is_blend = bool(_find_corpus_losses(validation_rows)[1])
    count = is_by_position + is_blend
    figure = Figure(figsize=(9, 5.4 + 2.2 * count), dpi=150, layout="constrained")
    loss, rate, *others = figure.subplots(2 + count, 1, height_ratios=(5, 1, 2, 2)[: 2 + count])
    rate.sharex(loss)
    loss.tick_params(labelbottom=False)
    if is_by_position:
        _draw_positions(others[0], validation_rows[-1], style)
    if is_blend:
        _draw_corpora(others[-1], validation_rows, against)
    for phase in phases:
        colour, _ = style[phase.objective]
        bottom = max(phase.band_top - phase.fraction, 0.0)
        for panel in (loss, rate):
            panel.axvspan(
                phase.start,
                phase.end,
                bottom,
                phase.band_top,
                color=colour,
                alpha=0.07,
                linewidth=0,
            )
    _draw_losses(loss, phases, validations, style)
    _draw_rate(rate, steps, against)
    if against == "step" and steps[-1]["tokens"] and last:
        tokens_a_step = steps[-1]["tokens"] / last
        above = loss.secondary_xaxis(
            "top",
            functions=(lambda step: step * tokens_a_step, lambda count: count / tokens_a_step),
        )
        format_count_ticks(above.xaxis)
        above.set_xlabel("tokens")
    elif against != "step":
        format_count_ticks(rate.xaxis)
    loss.set_xlim(first, last if last > first else first + 1)
    loss.set_title(title, loc="left", fontsize=11, pad=8)
    style_axes(loss, rate)
    loss.spines[["top"]].set_visible(True)
    return figure


def _draw_losses(
    panel: Any,
    phases: list[PlottedPhase],
    validations: HeldOutCurves,
    style: dict[str, tuple[str, str]],
) -> None:
    """Draw the training loss of each phase and the held-out losses, with a legend."""
    from matplotlib.lines import Line2D

    width = (phases[-1].end - phases[0].start) or 1
    labelled: set[str] = set()
    for phase in phases:
        colour, _ = style[phase.objective]
        panel.plot(phase.x, phase.loss, color=colour, alpha=0.3, linewidth=0.8)
        panel.plot(
            phase.x,
            phase.smoothed,
            color=colour,
            linewidth=1.8,
            marker="." if len(phase.x) == 1 else None,
        )
        # in a narrower phase the label would overlap its neighbours
        if (phase.end - phase.start) / width >= _LETTER * len(phase.objective):
            labelled.add(phase.objective)
            panel.text(
                (phase.start + phase.end) / 2,
                phase.band_top - 0.03,
                phase.objective,
                color=colour,
                fontweight="bold",
                transform=panel.get_xaxis_transform(),
                ha="center",
                va="top",
            )
    for objective, (x, losses) in validations.items():
        colour, marker = style[objective]
        panel.plot(
            x,
            losses,
            **HELD_OUT,
            color=colour,
            marker=marker,
            markersize=4.5,
            linestyle=":",
            linewidth=1,
            zorder=3,
            label=f"held out, {objective}",
        )
    handles = [
        Line2D([], [], color=GREY, linewidth=1.8, label="training, smoothed"),
        Line2D([], [], color=GREY, linewidth=0.8, alpha=0.5, label="training, as logged"),
        *panel.get_legend_handles_labels()[0],
    ]
    for objective in dict.fromkeys(
        phase.objective for phase in phases if phase.objective not in labelled
    ):
        handles.append(
            Line2D([], [], color=style[objective][0], linewidth=5, alpha=0.4, label=objective)
        )
    panel.legend(handles=handles, **LEGEND, loc="upper right", bbox_to_anchor=(1, 0.92))
    panel.set_ylabel("loss (nats a predicted token)")
    panel.margins(y=0.12)


def _draw_rate(panel: Any, steps: list[Row], against: Against) -> None:
    panel.plot(
        [row[against] for row in steps],
        [row["learning_rate"] for row in steps],
        color=GREY,
        linewidth=1.4,
    )
    peak = max(row["learning_rate"] for row in steps)
    if peak:
        panel.set_yticks([0, peak], ["0", f"{peak:g}"])
        panel.set_ylim(0, 1.15 * peak)
    panel.set_ylabel("learning\nrate")
    panel.set_xlabel(AXIS_LABELS[against])


def _find_corpus_losses(validation_rows: list[Row]) -> tuple[str, list[Row]]:
    """Return the last validated objective with losses by corpus, and its rows.

    Both are empty if no objective has them.
    """
    objectives = validation_rows[-1]["objectives"] if validation_rows else {}
    names = [name for name, result in objectives.items() if result.get("by_corpus")]
    if not names:
        return "", []
    return names[-1], [
        row for row in validation_rows if row["objectives"].get(names[-1], {}).get("by_corpus")
    ]


def _draw_corpora(panel: Any, validation_rows: list[Row], against: Against) -> None:
    """Draw the change of held-out loss by corpus, under one objective.

    There is a line per corpus. The change is since the first validation that has the corpus.
    """
    objective, rows = _find_corpus_losses(validation_rows)
    prefixes = list(rows[-1]["objectives"][objective]["by_corpus"])
    for prefix, (colour, marker) in assign_styles(prefixes).items():
        losses = np.array(
            [row["objectives"][objective]["by_corpus"].get(prefix) for row in rows],
            dtype=np.float64,
        )
        x = [row[against] for row in rows]
        name = Path(prefix).name.removesuffix("_document")
        first = losses[np.isfinite(losses)][:1]  # empty without a loss
        panel.plot(
            x,
            losses - first.sum(),
            **HELD_OUT,
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            label=name,
        )
    panel.axhline(0, color=GREY, linewidth=0.8)
    panel.legend(**LEGEND, loc="best", title=f"held out, {objective}", title_fontsize=8)
    panel.set_xlabel(AXIS_LABELS[against])
    panel.set_ylabel("change\nof loss")
    panel.margins(y=0.12)
    style_axes(panel)


def _draw_positions(panel: Any, validation: Row, style: dict[str, tuple[str, str]]) -> None:
    """Draw the held-out losses of one validation by position in the document.

    There is a line per objective.
    """
    for objective, result in validation["objectives"].items():
        if losses := result.get("by_position"):
            # grey: without a loss over all positions
            colour, marker = style.get(objective, (GREY, "o"))
            values = np.array(list(losses.values()), dtype=np.float64)
            panel.plot(
                list(losses),
                values,
                **HELD_OUT,
                color=colour,
                marker=marker,
                markersize=4.5,
                linewidth=1.2,
            )
    panel.set_xlabel(f"position in the document, at step {validation['step']:,}")
    panel.set_ylabel("held-out\nloss")
    panel.margins(y=0.12)
    style_axes(panel)


def name_runs(runs: Sequence[str | Path]) -> dict[str, Path]:
    """Return the run directories, as given, by a short name; nothing is read.

    Names are the shortest endings of the resolved paths that differ, all of the same number of
    parts (of one run the last part); the order is that of `runs`.

    Raises:
        InputError: A run is given twice, also by another path.
    """
    paths = [Path(run).resolve() for run in runs]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise InputError(f"{runs[index]}: given twice, expected different runs")
    count = 0
    names = []
    while len(set(names)) < len(paths):
        count += 1
        names = [
            os.fsencode("/".join(path.parts[-count:])).decode("utf-8", "backslashreplace")
            for path in paths
        ]
    return dict(zip(names, map(Path, runs), strict=True))


@without_math_text
def draw_comparison(curves: dict[str, HeldOutCurves], against: Against) -> tuple[Any, str]:
    """Draw the held-out losses of several runs; return (Figure, phrase about it).

    There is a panel per objective common to all runs; the phrase, without capital and full stop and
    not drawn, names these and those left out. Pseudo-perplexities that differ only in `shift=` of
    their names count as one, of which each run's curve with the lowest last loss is drawn.

    Args:
        curves: Result of `held_out_curves` by name of each run, at least one run.
        against: Quantity of the curves' x values, for the axes.

    Raises:
        InputError: No objective is common to all runs.
    """
    from matplotlib.figure import Figure

    merged = {name: _merge_shifts(run_curves) for name, run_curves in curves.items()}
    curves = {name: run_curves for name, (run_curves, _) in merged.items()}
    shifts = {name: run_shifts for name, (_, run_shifts) in merged.items()}
    objectives = list(
        dict.fromkeys(objective for run_curves in curves.values() for objective in run_curves)
    )
    shared = [
        objective
        for objective in objectives
        if all(objective in run_curves for run_curves in curves.values())
    ]
    if not shared:
        objectives_by_run = "; ".join(
            f"{name} has {', '.join(run_curves) or 'none'}" for name, run_curves in curves.items()
        )
        raise InputError(
            f"no objective that all runs were validated under: {objectives_by_run}; expected one "
            "in common"
        )
    style = assign_styles(list(curves))
    columns = min(3, len(shared))
    rows = -(-len(shared) // columns)
    figure = Figure(figsize=(max(6.4, 4.9 * columns), 4.3 * rows), dpi=150, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, objective in zip(panels, shared, strict=False):
        is_perplexity = is_pseudo_perplexity(objective)
        for index, (name, run_curves) in enumerate(curves.items()):
            colour, marker = style[name]
            x, losses = run_curves[objective]
            last = f"{losses[-1]:.3f}"
            if is_perplexity:
                last += f", {compute_perplexity(losses[-1]):,.1f}{shifts[name].get(objective, '')}"
            panel.plot(
                x,
                losses,
                **HELD_OUT,
                color=colour,
                marker=marker,
                markersize=4,
                markevery=max(1, len(x) // 12),
                linewidth=1.6,
                zorder=3 + index,
                label=f"{name}  ({last})",
            )
        panel.set_title(objective, loc="left", fontsize=11, fontweight="bold")
        panel.set_xlabel(AXIS_LABELS[against])
        panel.set_ylabel("held-out loss (nats a predicted token)")
        panel.set_xlim(0, max(run_curves[objective][0][-1] for run_curves in curves.values()) or 1)
        panel.margins(y=0.08)
        title = "run (last loss, perplexity)" if is_perplexity else "run (last loss)"
        panel.legend(**LEGEND, title=title, title_fontsize=9, alignment="left", loc="best")
        if against != "step":
            format_count_ticks(panel.xaxis)
        style_axes(panel)
    for panel in panels[len(shared) :]:  # unused panels of the last row
        panel.set_visible(False)
    summary = f"the held-out losses of {len(curves)} runs under {', '.join(shared)}"
    runs_without = {
        name: [run for run in curves if name not in curves[run]]
        for name in objectives
        if name not in shared
    }
    left_out = [f"{name} ({', '.join(runs)})" for name, runs in runs_without.items()]
    if left_out:
        summary += f"; left out, as some runs lack it: {', '.join(left_out)}"
    return figure, summary


def _merge_shifts(curves: HeldOutCurves) -> tuple[HeldOutCurves, dict[str, str]]:
    """Return the curves of one run, merged over the shifts of pseudo-perplexities.

    Of several shifts, which are those of the run's objectives, the curve whose last loss is lowest
    is kept for each number of passes.

    Returns:
        The curves by name, and the text of the kept shift by name; "" without a shift.
    """
    merged: HeldOutCurves = {}
    shifts: dict[str, str] = {}
    for objective, curve in curves.items():
        match = _SHIFTED.fullmatch(objective)
        name = f"{match['measure']})" if match else objective
        if name not in merged or curve[1][-1] < merged[name][1][-1]:
            merged[name] = curve
            shifts[name] = f", shift {match['shift']}" if match else ""
    return merged, shifts


def write_plot(runs: Sequence[str | Path], output: str | Path, against: Against = "step") -> str:
    """Draw one run, or the held-out losses of several, to an image file.

    Returns a phrase on the plot, such as `the loss of runs/a`, without a full stop.

    Args:
        runs: Run directories, at least one.
        output: .png, .pdf or .svg file; an existing one is replaced, a missing directory created.
        against: Quantity on the x axis.

    Raises:
        InputError: There is no run, a run or the output file is invalid, or several runs have no
            objective in common.
    """
    output = Path(output)
    if output.suffix.lower() not in _FORMATS:
        raise InputError(
            f"--output {output}: found the ending {output.suffix!r}, expected {', '.join(_FORMATS)}"
        )
    check_output_file(output, "--output")
    if not runs:
        raise InputError(
            "RUN: missing, expected one or more run directories (see megaenc plot --help)"
        )
    with create_parent_with_rollback(output, "--output"):
        figure, summary = _draw_runs(runs, against)
        with atomic_files(output) as [temporary]:
            figure.savefig(temporary, format=output.suffix.lower().removeprefix("."))
    return summary


def _draw_runs(runs: Sequence[str | Path], against: Against) -> tuple[Any, str]:
    """Read and draw one run or several.

    Returns:
        The matplotlib Figure and a one-line description.
    """
    if len(runs) == 1:
        run = runs[0]
        title = os.fsencode(run).decode("utf-8", "replace")
        figure = draw_run(
            read_steps(run, against),
            read_validations(run, against),
            title,
            against,
            read_start_progress(run),
        )
        return figure, f"the loss of {title}"
    held_out = {
        name: read_held_out_validations(run, against) for name, run in name_runs(runs).items()
    }
    figure, summary = draw_comparison(
        {name: held_out_curves(rows, against) for name, rows in held_out.items()}, against
    )
    if not _have_same_text(held_out.values()):
        flags_of_text = (
            "data, --valid-data-path, --split, --seq-length, --eval-iters, --global-batch-size or "
            "phases"
        )
        summary += f"; NOT on the same held-out text: {flags_of_text} differ"
    return figure, summary


def _have_same_text(validations: Iterable[Sequence[Row]]) -> bool:
    """Return whether runs were validated on the same text at the same steps.

    A run with phases has several texts. Runs without a step in common must have the same ones.
    """
    texts_by_step: dict[int, list[str | None]] = {}
    texts_by_run = set()
    for rows in validations:
        texts_by_run.add(frozenset(row.get("held_out") for row in rows))
        for row in rows:
            texts_by_step.setdefault(row["step"], []).append(row.get("held_out"))
    common = [texts for texts in texts_by_step.values() if len(texts) > 1]
    if not common:
        return len(texts_by_run) == 1
    return all(len(set(texts)) == 1 for texts in common)


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run `megaenc plot`: draw the losses of runs to the image file --output.

    A line with the file and the phrase of `write_plot` is printed. Invalid input ends the process
    with code 2 and a line on stderr.

    Args:
        argv: Command line without the program's name; None for that of the process.
    """
    silence_libraries()
    config = flags.parse(PlotConfig, argv, prog="megaenc plot", description=__doc__)
    summary = write_plot(config.run, config.output, config.against)
    print_rank_0(f"{config.output}: {summary}")
