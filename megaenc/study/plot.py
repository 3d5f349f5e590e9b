"""A picture of a run: its loss in each phase, what the held-out text says, and the learning rate below."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import quiet, say
from megaenc.errors import InputError, one_line_errors
from megaenc.files import make_parent, whole_files
from megaenc.study.metrics import Row, read_steps, read_validations

# Okabe and Ito's colours for every kind of colour vision; an objective keeps its own throughout the picture.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "P")
_GREY = "#555555"
_FORMATS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class PlotFlags:
    """What `megaenc plot` takes."""

    run: Annotated[str, Positional, arg(metavar="RUN")]
    """Run folder (the --save of a pretraining run)."""
    output: str = "loss.png"
    """Picture to write, .png, .pdf or .svg; one that is there is replaced."""


@dataclass(frozen=True)
class Phase:
    """Steps first..last under one objective, or under several of which this is one."""

    objective: str
    first: int
    last: int
    steps: np.ndarray
    """int64[R]: those that have a row with a loss."""
    loss: np.ndarray
    """float64[R]"""
    share: float = 1.0
    """Its part of the logged steps first..last."""

    @property
    def smoothed(self) -> np.ndarray:
        """float64[R]: the mean over a window of a twentieth of the phase that never looks across its ends.

        It grows from the first step, where the loss is steep, and keeps looking back at the last, where single steps are noise.
        """
        half = max(1, len(self.loss) // 40)
        sums = np.concatenate([[0.0], np.cumsum(self.loss)])
        at = np.arange(len(self.loss))
        back = np.minimum(half, at)
        ahead = np.minimum(back, len(at) - 1 - at)
        return (sums[at + ahead + 1] - sums[at - back]) / (back + ahead + 1)


def phases_of(made: list[Row]) -> list[Phase]:
    """The phases that a run's updates have been through.

    Neighbours that are each shorter than a fiftieth of the steps, those of an alternation, are taken together, and like the
    objectives of a mixture each of theirs has a Phase over the same steps.
    """
    groups: list[list[Row]] = []
    for row in made:
        if not groups or groups[-1][-1]["phase"] != row["phase"]:
            groups.append([])
        groups[-1].append(row)
    stretches, before, short_before = [], 0, False
    for group in groups:
        steps = group[-1]["step"] - before
        before, short = group[-1]["step"], steps * 50 < made[-1]["step"]
        if short and short_before:
            stretches[-1] += group
        else:
            stretches.append(group)
        short_before = short
    phases, before = [], 0
    for stretch in stretches:
        for objective in dict.fromkeys(row["objective"] for row in stretch):
            rows = [row for row in stretch if row["objective"] == objective]
            scored = [row for row in rows if row["loss"] is not None]  # a batch without a target has no loss
            steps = np.array([row["step"] for row in scored], dtype=np.int64)
            loss = np.array([row["loss"] for row in scored], dtype=np.float64)
            share = len(rows) / len(stretch)
            phases.append(Phase(objective, before + 1, stretch[-1]["step"], steps, loss, share))
        before = stretch[-1]["step"]
    return phases


def validations_of(validated: list[Row]) -> dict[str, tuple[list[int], list[float]]]:
    """By objective the steps and losses of its validations."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in validated:
        for objective, result in row["objectives"].items():
            if result["loss"] is not None:
                steps, losses = found.setdefault(objective, ([], []))
                steps.append(row["step"])
                losses.append(result["loss"])
    return found


def figure(made: list[Row], validated: list[Row], title: str) -> Any:
    """matplotlib's Figure of a run, from the rows of its steps and of its validations."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter

    phases, validations = phases_of(made), validations_of(validated)
    styles = _styles([*(phase.objective for phase in phases), *validations])
    last = phases[-1].last

    picture = Figure(figsize=(9, 5.4), dpi=150, layout="constrained")
    loss, rate = picture.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for phase, (bottom, top) in zip(phases, _bands(phases), strict=True):
        colour, _ = styles[phase.objective]
        for panel in (loss, rate):
            panel.axvspan(phase.first - 1, phase.last, bottom, top, color=colour, alpha=0.07, linewidth=0)
        loss.plot(phase.steps, phase.loss, color=colour, alpha=0.3, linewidth=0.8)
        loss.plot(phase.steps, phase.smoothed, color=colour, linewidth=1.8)
        if phase.last - phase.first >= last / 50:  # a label on a sliver would cover its neighbours'
            middle = (phase.first - 1 + phase.last) / 2
            place = {"transform": loss.get_xaxis_transform(), "ha": "center", "va": "top"}
            loss.text(middle, top - 0.03, phase.objective, color=colour, fontweight="bold", **place)
    for objective, (steps, losses) in validations.items():
        colour, marker = styles[objective]
        loss.plot(
            steps,
            losses,
            color=colour,
            marker=marker,
            markersize=4.5,
            markerfacecolor="white",
            linestyle=":",
            linewidth=1,
            clip_on=False,
            zorder=3,
            label=f"held out, {objective}",
        )
    handles, _ = loss.get_legend_handles_labels()
    handles.insert(0, Line2D([], [], color=_GREY, linewidth=1.8, label="training, smoothed"))
    handles.insert(1, Line2D([], [], color=_GREY, linewidth=0.8, alpha=0.5, label="training, as logged"))
    loss.legend(handles=handles, frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1, 0.92))
    loss.set_ylabel("loss (nats a predicted token)")
    loss.set_xlim(0, last)
    loss.margins(y=0.12)

    rate.plot([row["step"] for row in made], [row["learning_rate"] for row in made], color=_GREY, linewidth=1.4)
    peak = max(row["learning_rate"] for row in made)
    rate.set_yticks([0, peak], ["0", f"{peak:g}"])
    rate.set_ylim(0, 1.15 * peak)
    rate.set_ylabel("learning\nrate")
    rate.set_xlabel("step")
    tokens_a_step = made[-1]["tokens"] / last
    above = loss.secondary_xaxis("top", functions=(lambda step: step * tokens_a_step, lambda tokens: tokens / tokens_a_step))
    above.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _short(tokens)))
    above.set_xlabel("tokens")
    loss.set_title(title, loc="left", fontsize=11, pad=8)
    for panel in (loss, rate):
        panel.spines[["right"]].set_visible(False)
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    rate.spines[["top"]].set_visible(False)
    return picture


def plot(run: str | Path, output: str | Path) -> None:
    """Write the picture of run folder `run` to `output`. Raises InputError for a folder or a name that cannot be used."""
    output = Path(output)
    if output.suffix.lower() not in _FORMATS:
        raise InputError(f"--output {output}: found the ending {output.suffix!r}, expected {', '.join(_FORMATS)}")
    picture = figure(read_steps(run), read_validations(run), str(run))
    make_parent(output, "--output")
    with whole_files(output) as [temporary]:
        picture.savefig(temporary, format=output.suffix.lower().removeprefix("."))


def _bands(phases: list[Phase]) -> list[tuple[float, float]]:
    """Bottom and top of each phase's shade: those over the same steps lie above each other, as high as their shares."""
    bands: list[tuple[float, float]] = []
    for at, phase in enumerate(phases):
        beside = at > 0 and phases[at - 1].first == phase.first
        top = bands[-1][0] if beside else 1.0
        bands.append((max(top - phase.share, 0.0), top))
    return bands


def _styles(objectives: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each objective, in the order in which they come up."""
    names = list(dict.fromkeys(objectives))
    return {name: (_COLOURS[at % len(_COLOURS)], _MARKERS[at % len(_MARKERS)]) for at, name in enumerate(names)}


def _short(count: float) -> str:
    """1500000 as 1.5M."""
    if count <= 0:
        return "0"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:g}{('', 'k', 'M', 'G', 'T')[power]}"


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc plot`."""
    quiet()
    settings = flags.parse(PlotFlags, argv, prog="megaenc plot", description=__doc__)
    plot(settings.run, settings.output)
    say(f"{settings.output}: the loss of {settings.run}")
