"""A short run of a small model, causal first and bidirectional then, beside the same run on the host."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megaenc.bench.gpu.sizes import CLM, MLM

if TYPE_CHECKING:
    from megaenc.bench.gpu.made import Setup

TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
"""Of each update's loss, relative: rounding grows with the updates, a fault of a gradient grows past it."""


def losses(setup: "Setup", packs: int, updates: int, name: str) -> Iterator[tuple[list[str], Any]]:
    """Of `updates` updates, each of two micro-batches of `packs` packs, half of them for each objective."""
    from megaenc.bench.gpu import made  # here alone: what compares the losses needs no torch

    backend = made.begin()
    engine = made.Engine(setup.plan(CLM, MLM), backend)
    found: list[float] = []
    for step in range(1, updates + 1):
        if (step - 1) % max(1, updates // 2) == 0:
            made.lay(engine, setup, CLM if step <= updates // 2 else MLM, packs, 2)
        found.append(engine.update(step).result.loss)
    made.end()
    yield ["parity", name], found


def compare(found: dict[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Of what `losses` found, each kind of number on the device beside the host's, or beside float32 where that is all."""
    rows = []
    for kind, allowed in TOLERANCE.items():
        mine = found.get(f"device {kind}")
        beside = next((name for name in (f"host {kind}", "host float32") if found.get(name)), None)
        if not mine or beside is None:
            continue
        off = [abs(here - there) / abs(there) for here, there in zip(mine, found[beside], strict=True)]
        worst = max(off, key=lambda value: value if value == value else float("inf"))
        rows.append({"numbers": kind, "beside": beside, "worst": worst, "allowed": allowed, "passed": worst <= allowed})
    return rows
