"""How far a study is: each stage, whether it waits, runs, is done or has failed, and why. Asks the folders and nothing else.

megaenc study status configs/study/mini.yaml --output study

On a terminal the table is live until all is done (Ctrl-C ends it); to a file or a pipe it is written once.
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
from megaenc.study.run.executor import format_progress
from megaenc.study.run.finetune_stage import FinetuneStage
from megaenc.study.run.stage import StageRunner
from megaenc.study.run.stage_log import EtaEstimator, total_seconds

_STYLES = {"failed": "red", "running": "yellow", "waiting": "dim", "done": "green"}  # of states, in the order of the table
_REFRESH_SECONDS = 2.0  # seconds


@dataclass(frozen=True)
class StatusConfig:
    """What `megaenc study status` takes."""

    manifest: Annotated[str, Positional, arg(metavar="MANIFEST")]
    """The study as a YAML file: configs/study/*.yaml."""
    output: str = ""
    """Folder of the study, as `megaenc study run` got it."""
    data: str = ""
    """Folder in which the manifest's relative paths of data begin; the manifest's own unless given."""
    only: tuple[str, ...] = ()
    """Stages to show with what they need, as `megaenc study run` takes them."""


@dataclass(frozen=True)
class StatusRow:
    """A stage, as its folder and its log say."""

    stage: str
    state: Literal["failed", "running", "waiting", "done"]
    progress: str
    share: float
    """from 0 to 1"""
    seconds: float
    """of all tries"""
    why: str
    """of a failure, or what is waited for"""


def build_table(stages: Iterable[StageRunner], study: Path, unfit: Mapping[str, str] | None = None) -> list[StatusRow]:
    """Return every stage, each after what it needs; `find_mismatches`: what is wrong with what is there of some."""
    found: dict[str, StatusRow] = {}
    for stage in stages:
        grid = stage if isinstance(stage, FinetuneStage) else None
        names = [stage.id, *(part.id for part in grid.split_by_training_set())] if grid else [stage.id]
        tries = {name: stage_log.read_attempts(stage_log.log_path(study, name)) for name in names}
        last = {name: of_name[-1] for name, of_name in tries.items() if of_name}
        done, total = stage.progress()
        seconds, share = sum(map(total_seconds, tries.values())), done / total if total else 0.0
        needs = [need for need in stage.needs if need in found and found[need].state != "done"]
        state, why = "waiting", f"needs {', '.join(needs)}" if needs else ""
        if any(found[need].state == "failed" for need in needs):
            why += ", which failed"
        if unfit and stage.id in unfit:
            state, why = "failed", unfit[stage.id]
        elif stage.is_done() and not needs:
            state, share = "done", 1.0
            why = (
                f"{lost} runs have no score: their rate made the loss no number"
                if grid and (lost := grid.count_failed_runs())
                else ""
            )
        elif running := [name for name in names if stage_log.is_locked(study, name)]:
            state, why = "running", ""
            seconds += sum(
                time.time() - last[name].start_time for name in running if name in last and last[name].end_time is None
            )
        elif failed := [name for name in last if last[name].is_failed]:
            one, log = last[failed[-1]], stage_log.log_path(study, failed[-1])
            state, why = "failed", f"{one.outcome}: {one.message} ({log})"
        found[stage.id] = StatusRow(stage.id, state, format_progress(done, total, stage.unit), share, seconds, why)
    return list(found.values())


def find_mismatches(stages: Iterable[StageRunner]) -> dict[str, str]:
    """Return why stages that are there are not those of the manifest, or not of what is there of those that they need."""
    found = {}
    for stage in stages:
        try:
            stage.check()
        except InputError as error:
            found[stage.id] = str(error)
    return found


def format_headline(table: Sequence[StatusRow], left: float | None) -> str:
    """Say the whole in one line."""
    counts = Counter(row.state for row in table)
    words = ", ".join(f"{counts[state]:,} {state}" for state in ("done", "running", "waiting", "failed") if counts[state])
    share = sum(row.share for row in table) / len(table)
    rest = f", about {format_duration(left)} left" if left else ""
    return f"{len(table):,} stages: {words}; {100 * share:.0f} %{rest}"


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """The command `megaenc study status`."""
    silence_libraries()
    settings = flags.parse(StatusConfig, argv, prog="megaenc study status", description=__doc__)
    study = resolve_study_dir(settings.output, "status")
    stages = select_stages(build_graph(read_manifest(settings.manifest, settings.data or None), study).stages, settings.only)
    wrong = find_mismatches(stages)
    if sys.stdout.isatty():
        _show_live(stages, study, wrong)
        return
    table = build_table(stages, study, wrong)
    print_rank_0(format_headline(table, _estimate_remaining_seconds(stages, study, table)))
    widths = [max(map(len, column)) for column in zip(*(_format_cells(row)[:4] for row in table), strict=True)]
    for row in table:
        *cells, why = _format_cells(row)
        print_rank_0("  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), why]).rstrip())


def _estimate_remaining_seconds(stages: Sequence[StageRunner], study: Path, table: Sequence[StatusRow]) -> float | None:
    """Return the seconds that are left at the present pace: with as many at a time as run now."""
    remaining = EtaEstimator(stages, study)
    for stage, row in zip(stages, table, strict=True):
        remaining.record_progress(stage, row.share)
    running = sum(row.state == "running" for row in table)
    return remaining.remaining_seconds(running) if running else None


def _format_cells(row: StatusRow) -> tuple[str, str, str, str, str]:
    return row.stage, row.state, row.progress, format_duration(row.seconds) if row.seconds else "", row.why


def _show_live(stages: Sequence[StageRunner], study: Path, unfit: Mapping[str, str] | None = None) -> None:
    """Show the table until all is done; what needs attention stands first."""
    from rich.box import SIMPLE_HEAD
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    with Live(auto_refresh=False, screen=False) as live:
        while True:
            table = build_table(stages, study, unfit)
            title = format_headline(table, _estimate_remaining_seconds(stages, study, table))
            drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD, expand=True)
            for name, ratio in (("stage", 3), ("state", None), ("progress", None), ("time", None), ("", 4)):
                drawn.add_column(name, ratio=ratio, no_wrap=name != "", overflow="fold" if not name else "ellipsis")
            for row in sorted(table, key=lambda row: [*_STYLES].index(row.state)):
                stage, state, *rest = _format_cells(row)
                drawn.add_row(Text(stage), Text(state, style=_STYLES[state]), *map(Text, rest))
            live.update(drawn, refresh=True)
            if all(row.state == "done" for row in table):
                return
            time.sleep(_REFRESH_SECONDS)
