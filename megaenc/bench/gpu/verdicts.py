"""Comparisons that follow from measured rows: errors of short runs, and speeds relative to peers and other kernels."""

import math
from collections.abc import Sequence
from typing import Any

# Relative tolerance of each loss in a short run; wrong gradients exceed the accumulated rounding.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}


def derive_results(results: dict[str, Any], full_row: dict[str, Any] | None) -> None:
    """Store in `results` the comparisons of all rows so far; `full_row`: speed row of the compared model, if measured."""
    parity, peer, compare = (results.get(name) for name in ("parity", "peer", "compare"))
    if parity:
        parity["rows"] = compare_runs(parity)
    if peer:
        peer["ratios"] = compute_ratios(peer.get("rows", {}), full_row)
    if compare:
        compare["ratios"] = compare_rates(compare["base"], compare.get("rows", {}))


def compare_runs(losses: dict[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return a row per dtype with the worst relative error of the device's losses against the host's, and its verdict."""
    rows = []
    for kind, allowed in TOLERANCE.items():
        own = losses.get(f"device {kind}")
        reference = next((name for name in (f"host {kind}", "host float32") if losses.get(name)), None)
        if own and reference:
            errors = [abs(actual - expected) / abs(expected) for actual, expected in zip(own, losses[reference], strict=True)]
            worst = max(errors, key=lambda value: (math.isnan(value), value))
            rows.append({"numbers": kind, "beside": reference, "worst": worst, "allowed": allowed, "passed": worst <= allowed})
    return rows


def compute_ratios(rows: dict[str, dict[str, Any]], full_row: dict[str, Any] | None) -> dict[str, float]:
    """Return megaenc's speed relative to each peer, keyed "OURS / PEER", with equal batches and with full micro-batches."""
    sides = rows | ({"megaenc, card filled": full_row} if full_row else {})
    rates = {name: row["tokens_per_second"] for name, row in sides.items()}
    ours = [name for name in rates if name.startswith("megaenc")]
    return {f"{mine} / {name}": rates[mine] / rates[name] for name in rates if name not in ours for mine in ours}


def compare_rates(base: str, rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the speed of each variant relative to variant `base`, by name; only of those with as many packs as `base`."""
    if base not in rows:
        return {}
    same_packs = {name: row for name, row in rows.items() if row["packs"] == rows[base]["packs"]}
    return {name: row["tokens_per_second"] / rows[base]["tokens_per_second"] for name, row in same_packs.items()}


def format_ratio(part: dict[str, Any], name: str) -> str:
    """Return the relative speed of variant `name` as text, or why it is not compared; `part`: the compare phase's results."""
    if part["base"] not in part["rows"]:
        return f"not compared, {part['base']} not measured"
    if name not in part["ratios"]:
        return f"not like for like, {part['rows'][name]['packs']} packs"
    return f"{part['ratios'][name]:.2f}"
