"""What a grid has shown: mean and interval of every model on every data set, averages, how much the learning rate matters."""

import contextlib
import csv
import io
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from megaenc import flags, markdown
from megaenc.console import quiet, rich_console, say
from megaenc.errors import InputError, one_line_errors
from megaenc.files import write_whole
from megaenc.finetune.intervals import Kind
from megaenc.finetune.jobs import rate_name
from megaenc.finetune.results import Result, scan
from megaenc.finetune.summary_rows import RateRow, Row, Summary, summarise
from megaenc.output_paths import check_output_file, created_parent

_WIDTH = 80


@dataclass(frozen=True)
class SummaryFlags:
    """What `megaenc finetune summary` takes."""

    results: Annotated[str, Positional, arg(metavar="RESULTS")]
    """folder of results, the --output of a grid; what the study has published can be read too"""
    metrics: Literal["paper", "standard", "both"] = "both"
    """the paper's scores, those that are standard in the field, or both; learning rates are chosen by the paper's"""
    interval: Kind = "normal"
    """half width: 1.96 standard errors, as in the paper, or Student's t, which is honest about five seeds"""
    output: str = ""
    """also write all numbers to this file, as .json, .csv or .md"""


def shown(mean: float | None, half: float | None) -> str:
    """`91.65 (0.45)`, as the study prints it; a dash where there is none."""
    if mean is None:
        return "-"
    return f"{mean:.2f}" + (f" ({half:.2f})" if half is not None else "")


def tables(summary: Summary) -> list[Any]:
    """rich's tables: the scores, and what the learning rate changes. They fit 80 columns; long names are folded."""
    made = []
    for family in dict.fromkeys(row.family for row in summary.rows):
        rows = [row for row in summary.rows if row.family == family]
        table = _table(f"{family}, percent on test, 95 % interval over seeds", "model", "data set", "metric")
        compared = any(row.baseline is not None for row in rows)
        for name in ("mean (half)", *(["baseline"] if compared else []), "rate", "runs"):
            table.add_column(name, justify="right", no_wrap=True)
        before: tuple[str, str] = ("", "")
        for row in rows:
            place = summary.place(row)
            first = (row.model, place) != before
            mark = " !" if row.collapsed and row.metric == rows[0].metric else ""
            rate = rate_name(row.learning_rate) if row.learning_rate is not None else ""
            table.add_row(
                row.model if row.model != before[0] else "",
                place if first else "",
                row.metric,
                shown(row.mean, row.half) + mark,
                *([shown(row.baseline, None)] if compared else []),
                rate if first else "",
                row.runs if first else "",
            )
            before = (row.model, place)
        made.append(table)
    if any(len(row.means) + len(row.incomplete) > 1 for row in summary.rates):
        made.append(_rate_table(summary))
    return made


def _rate_table(summary: Summary) -> Any:
    every = sorted({rate for row in summary.rates for rate in (*row.means, *row.incomplete)})
    table = _table("mean score by learning rate (* chosen on validation, x not every seed finished)", "model", "data set")
    for rate in every:
        table.add_column(rate_name(rate), justify="right", no_wrap=True)
    for name in ("spread", "near"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in summary.rates:
        star = {rate: "*" if rate == row.chosen else "" for rate in every}
        means = {rate: f"{mean:.1f}{star[rate]}" for rate, mean in row.means.items()} | dict.fromkeys(row.incomplete, "x")
        found = [means.get(rate, "") for rate in every]
        ends = [f"{row.spread:.1f}", f"{row.near_best}"] if row.means else ["", ""]
        table.add_row(row.model if row.model != before else "", summary.place(row), *found, *ends)
        before = row.model
    return table


def _table(title: str, *names: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def notes(summary: Summary) -> list[str]:
    """A line for each model and data set with collapsed or failed runs: which, and why."""
    lines = []
    for what, listed in (("collapsed", summary.collapsed), ("failed", summary.failed)):
        groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
        for result in listed:
            why = result.failure if result.failure is not None else result.test.collapsed
            groups[(result.model, summary.place(result), why if what == "collapsed" else "")].append(result)
        for (model, place, _), runs in groups.items():
            which = ", ".join(dict.fromkeys(f"{rate_name(run.learning_rate)} sd{run.seed}" for run in runs))
            why = runs[0].failure if what == "failed" else runs[0].test.collapsed
            lines.append(" ".join(f"{what}: {model} {place}: {why}: {which}".split()))
    return lines


def as_text(summary: Summary, suffix: str) -> str:
    """All numbers as .json, .csv (the scores alone) or .md."""
    if suffix == ".json":
        of = {name: [_plain(row) for row in getattr(summary, name)] for name in ("rows", "rates")}
        told = {name: [_where(result) for result in getattr(summary, name)] for name in ("collapsed", "failed")}
        return json.dumps(of | told, indent=1) + "\n"
    if suffix == ".csv":
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(Row.__dataclass_fields__)
        writer.writerows(["" if value is None else value for value in vars(row).values()] for row in summary.rows)
        return stream.getvalue()
    lines = [
        "| model | family | data set | trained on | metric | mean (half) | baseline | rate | runs | collapsed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in summary.rows:
        rate = rate_name(row.learning_rate) if row.learning_rate is not None else ""
        numbers = (shown(row.mean, row.half), shown(row.baseline, None), rate, row.runs, row.collapsed)
        fields = (row.model, row.family, row.dataset, row.train_on, row.metric, *numbers)
        lines.append("| " + " | ".join(map(markdown.text, fields)) + " |")
    lines += ["", "| model | data set | mean by learning rate | spread | within a point of the best |", "|---|---|---|---|---|"]
    for row in summary.rates:
        means = ", ".join(f"{rate_name(rate)}: {mean:.2f}" for rate, mean in row.means.items())
        names = f"{markdown.text(row.model)} | {markdown.text(summary.place(row))}"
        lines.append(f"| {names} | {means} | {row.spread:.2f} | {row.near_best} of {len(row.means)} |")
    return "\n".join([*lines, "", *(f"- {markdown.text(line)}" for line in notes(summary))]).rstrip() + "\n"


def _plain(row: Row | RateRow) -> dict[str, Any]:
    values = dict(vars(row))
    if isinstance(row, RateRow):
        values["means"] = {rate_name(rate): mean for rate, mean in row.means.items()}
        values["spread"] = None if math.isnan(row.spread) else row.spread
    return values


def _where(result: Result) -> dict[str, Any]:
    why = result.failure if result.failure is not None else result.test.collapsed
    names = ("model", "family", "dataset", "train_on", "learning_rate", "seed")
    return {name: getattr(result, name) for name in names} | {"why": why}


@one_line_errors
def summary_main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc finetune summary`."""
    quiet()
    settings = flags.parse(SummaryFlags, argv, prog="megaenc finetune summary", description=__doc__)
    output = Path(settings.output)
    if settings.output and output.suffix not in (".json", ".csv", ".md"):
        raise InputError(f"--output {output}: found the ending {output.suffix!r}, expected .json, .csv or .md")
    if settings.output:
        check_output_file(output, "--output")
    with created_parent(output, "--output") if settings.output else contextlib.nullcontext():
        found = scan(settings.results)
        summary = summarise(found, settings.metrics, settings.interval)
        if settings.output:
            write_whole(output, as_text(summary, output.suffix))
    _print(summary, found, settings)


def _print(summary: Summary, found: Sequence[Result], settings: SummaryFlags) -> None:
    """Print the tables, and a line for each thing that they leave open."""
    plain = {"markup": False, "emoji": False, "highlight": False}  # names are not rich's language
    console = rich_console(**plain, width=None if sys.stdout.isatty() else max(_WIDTH, _needed(summary)))
    for table in tables(summary):
        console.print(table)
    for line in notes(summary):
        say(line)
    if any(row.collapsed for row in summary.rows):
        say("! marks a mean of which a run has collapsed: its predictions are worthless, whatever its score")
    if settings.metrics == "standard" and not any(run.test is not None and run.test.metrics for run in found):
        say("these files hold the paper's scores alone: --metrics paper shows them")
    say(f"{len(found) - len(summary.failed):,} results, {len(summary.failed):,} failed runs")
    if settings.output:
        say(f"written: {settings.output}")


def _needed(summary: Summary) -> int:
    """Columns that the table of rates takes with names of 16 letters, which are folded where they are longer."""
    rates = {rate for row in summary.rates for rate in (*row.means, *row.incomplete)}
    return 30 + 6 * len(rates) + 12
