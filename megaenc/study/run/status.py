"""Show the state of each stage of a study: waiting, running, done or failed.

The table also has the reason of a failure or a wait. Only the study directory is read.

megaenc study status configs/study/mini.yaml --output study

On a terminal the table is refreshed until all stages are done (Ctrl-C ends it); to a file or a pipe
it is written once.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from megaenc import flags
from megaenc.console import format_duration, print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run import stage_log
from megaenc.study.run.command import resolve_study_dir, select_stages
from megaenc.study.run.eta import EtaEstimator
from megaenc.study.run.executor import format_progress
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.stage import StageRunner
from megaenc.study.run.stage_log import total_seconds

# Colors of states, in the order of the table.
_STYLES = {"failed": "red", "running": "yellow", "waiting": "dim", "done": "green"}
_REFRESH_SECONDS = 2.0


@dataclass(frozen=True)
class StatusConfig:
    """Flags of `megaenc study status`, each a field; only `manifest` is positional.

    `manifest` is the YAML file, `output` the study directory, which is required, and `data` the
    directory of relative data paths, "" for that of the manifest. `only`, a tuple of
    names, limits the stages (`select_stages`); () shows all.
    """

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file, or the name of a packaged one such as study/mini."""
    output: str = ""
    """Study directory: the --output of `megaenc study run`."""
    data: str = ""
    """Directory that relative data paths of the manifest start from; default: that of the file, or
    the current one for a packaged manifest."""
    only: tuple[str, ...] = ()
    """Stages to show with all that they need, as for `megaenc study run`."""


@dataclass(frozen=True)
class StatusRow:
    """State of one stage, a row of the table.

    `stage` is the id, `state` "failed", "running", "waiting" or "done". `progress` is text such as
    `120 of 300 steps`, and `fraction` the same from 0 to 1. `seconds` is the total duration of all
    attempts. `reason` is that of a failure, the stages that it waits for, or the number of runs
    without a score; else "".
    """

    stage: str
    state: Literal["failed", "running", "waiting", "done"]
    progress: str
    fraction: float
    """completed fraction, from 0 to 1"""
    seconds: float
    """total duration of all attempts"""
    reason: str
    """reason of a failure, stages that it waits for, or number of runs without a score; else
    empty"""


def build_table(
    stages: Iterable[StageRunner], study: Path, mismatches: Mapping[str, str] | None = None
) -> list[StatusRow]:
    """Return a StatusRow per stage, in order, from output, logs and locks.

    Args:
        stages: Each after those that it needs.
        study: Study directory.
        mismatches: Errors by id of stale stages, which count as failed, as of `find_mismatches`;
            None to regard none.
    """
    table: dict[str, StatusRow] = {}
    for stage in stages:
        log = stage_log.log_path(study, stage.id)
        attempts = stage_log.read_attempts(log)
        seconds = total_seconds(attempts)
        done, total = stage.progress()
        fraction = done / total if total else 0.0
        needs = [need for need in stage.needs if need in table and table[need].state != "done"]
        state = "waiting"
        reason = f"needs {', '.join(needs)}" if needs else ""
        if any(table[need].state == "failed" for need in needs):
            reason += ", which failed"
        if mismatches and stage.id in mismatches:
            state = "failed"
            reason = mismatches[stage.id]
        elif stage.is_done() and not needs:
            state = "done"
            fraction = 1.0
            reason = stage.describe_failed_runs() if isinstance(stage, FinetuneStage) else ""
        elif stage_log.is_stage_locked(study, stage.id):
            state = "running"
            reason = ""
            if attempts and attempts[-1].end_time is None:
                seconds += time.time() - attempts[-1].start_time
        elif attempts and attempts[-1].is_failed:
            state = "failed"
            reason = f"{attempts[-1].outcome}: {attempts[-1].message} ({log})"
        table[stage.id] = StatusRow(
            stage.id, state, format_progress(done, total, stage.unit), fraction, seconds, reason
        )
    return list(table.values())


def find_mismatches(stages: Iterable[StageRunner]) -> dict[str, str]:
    """Return the errors of `StageRunner.check` by stage id; {} if all stages pass.

    Such a stage's output does not match the manifest or its inputs.
    """
    mismatches = {}
    for stage in stages:
        try:
            stage.check()
        except InputError as error:
            mismatches[stage.id] = str(error)
    return mismatches


def format_headline(table: Sequence[StatusRow], remaining_seconds: float | None) -> str:
    """Return one line on the study: stages by state, completed percentage, time left.

    The percentage is the mean over stages, each with the same weight. The time is left out if it is
    None or 0.

    Args:
        table: At least one row.
    """
    counts = Counter(row.state for row in table)
    words = ", ".join(
        f"{counts[state]:,} {state}"
        for state in ("done", "running", "waiting", "failed")
        if counts[state]
    )
    fraction = sum(row.fraction for row in table) / len(table)
    rest = f", about {format_duration(remaining_seconds)} left" if remaining_seconds else ""
    return f"{len(table):,} stages: {words}; {100 * fraction:.0f} %{rest}"


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of the states of a study's stages.

    On a terminal, refresh it until all stages are done, so that a failed stage needs Ctrl-C. Failed
    stages do not change the exit code; wrong input exits with 2.

    Args:
        argv: The flags; None: those of this process.
    """
    silence_libraries()
    settings = flags.parse(StatusConfig, argv, prog="megaenc study status", description=__doc__)
    study = resolve_study_dir(settings.output, "status")
    stages = select_stages(
        build_graph(read_manifest(settings.manifest, settings.data or None), study).stages,
        settings.only,
    )
    mismatches = find_mismatches(stages)
    if sys.stdout.isatty():
        _show_live(stages, study, mismatches)
        return
    table = build_table(stages, study, mismatches)
    print_rank_0(format_headline(table, _estimate_remaining_seconds(stages, study, table)))
    widths = [
        max(map(len, column))
        for column in zip(*(_format_cells(row)[:4] for row in table), strict=True)
    ]
    for row in table:
        *cells, reason = _format_cells(row)
        print_rank_0(
            "  ".join(
                [*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), reason]
            ).rstrip()
        )


def _estimate_remaining_seconds(
    stages: Sequence[StageRunner], study: Path, table: Sequence[StatusRow]
) -> float | None:
    """Return the seconds left with as many stages in parallel as run now.

    They are None if unknown or if no stage runs.
    """
    eta = EtaEstimator(stages, study)
    for stage, row in zip(stages, table, strict=True):
        eta.record_progress(stage, row.fraction)
    running = sum(row.state == "running" for row in table)
    return eta.remaining_seconds(running) if running else None


def _format_cells(row: StatusRow) -> tuple[str, str, str, str, str]:
    """Return the cells of a row: stage, state, progress, duration, reason."""
    return (
        row.stage,
        row.state,
        row.progress,
        format_duration(row.seconds) if row.seconds else "",
        row.reason,
    )


def _show_live(
    stages: Sequence[StageRunner], study: Path, mismatches: Mapping[str, str] | None = None
) -> None:
    """Refresh the table on the terminal until all stages are done.

    Failed and running stages come first.
    """
    from rich.box import SIMPLE_HEAD
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    with Live(auto_refresh=False, screen=False) as live:
        while True:
            table = build_table(stages, study, mismatches)
            title = format_headline(table, _estimate_remaining_seconds(stages, study, table))
            rich_table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, expand=True)
            for name, ratio in (
                ("stage", 3),
                ("state", None),
                ("progress", None),
                ("time", None),
                ("", 4),
            ):
                rich_table.add_column(
                    name,
                    ratio=ratio,
                    no_wrap=name != "",
                    overflow="fold" if not name else "ellipsis",
                )
            for row in sorted(table, key=lambda row: [*_STYLES].index(row.state)):
                stage, state, *rest = _format_cells(row)
                rich_table.add_row(Text(stage), Text(state, style=_STYLES[state]), *map(Text, rest))
            live.update(rich_table, refresh=True)
            if all(row.state == "done" for row in table):
                return
            time.sleep(_REFRESH_SECONDS)
