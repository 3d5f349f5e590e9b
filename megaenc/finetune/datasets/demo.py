"""Demo sets of all four families, made on the spot from the documentation of what is installed."""

from pathlib import Path

NAMES = ("demo_sc", "demo_tc", "demo_qa", "demo_ir")


def ensure_demo_sets(folder: str | Path) -> Path:
    raise NotImplementedError
