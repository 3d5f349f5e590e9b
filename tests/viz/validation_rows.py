"""Changed validations of a run."""

from collections.abc import Callable
from pathlib import Path

from run_directories import write_rows

from megaenc.viz.run_metrics import read_validations


def rewrite(run: Path, change: Callable[[dict], object]) -> None:
    rows = read_validations(run)
    for row in rows:
        change(row)
    write_rows(run / "validation.jsonl", rows)
