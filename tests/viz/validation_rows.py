"""Validations of a run that are changed."""

from collections.abc import Callable
from pathlib import Path

from run_folders import write_rows

from megaenc.viz.run_metrics import read_validations


def rewrite(run: Path, change: Callable[[dict], object]) -> None:
    """Change each validation of a run."""
    rows = read_validations(run)
    for row in rows:
        change(row)
    write_rows(run / "validation.jsonl", rows)
