"""Comparisons that follow from measured rows, and headlines of jobs for the console."""

import math
from collections.abc import Callable, Sequence
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


def format_headline(name: str, results: dict[str, Any]) -> str:
    """Return the figures of the job `name`, such as "speed, 1b", in one line; empty if it has none."""
    phase, _, part = name.partition(", ")
    return HEADLINES[phase](results, part) if phase in HEADLINES and results.get(phase) else ""


def _correctness_headline(results: dict[str, Any], part: str) -> str:
    """Return the number of passed comparisons, and those that failed."""
    rows = results["correctness"].get("rows", [])
    if part or not rows:
        return ""
    failed = [
        f"{row['numbers']} {row['attention']} with heads of {row['head_dim']} (loss off by {row['loss_error']:.1e}, "
        f"gradient by {row['gradient_error']:.1e})"
        for row in rows
        if not row["passed"]
    ]
    return f"{len(rows) - len(failed)} of {len(rows)} passed" + (f"; FAILED: {', '.join(failed)}" if failed else "")


def _speed_headline(results: dict[str, Any], model: str) -> str:
    """Return a model's utilization of the peak and tokens/s by objective."""
    target = results["targets"]["mfu"].get(model)
    goal = f" (goal {100 * target:.0f} %)" if target else ""
    lines = []
    for objective, row in results["speed"].get(model, {}).items():
        if "tokens_per_second" in row:
            share = "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} % of the peak{goal}, "
            lines.append(f"{objective} {share}{row['tokens_per_second']:,.0f} tokens/s{'' if row['finite'] else ', NOT FINITE'}")
    return "; ".join(lines)


def _parity_headline(results: dict[str, Any], part: str) -> str:
    """Return the largest error of the device's short run by dtype, and its verdict."""
    if part != "device":
        return ""
    rows = [(row, "passed" if row["passed"] else "FAILED") for row in results["parity"]["rows"]]
    return "; ".join(
        f"{row['numbers']} {verdict}, largest error {row['worst']:.1e} (allowed {row['allowed']:.0e})" for row, verdict in rows
    )


def _peer_headline(results: dict[str, Any], part: str) -> str:
    """Return megaenc's speed relative to padded transformers, and whether initial losses agree."""
    peer, goal = results["peer"], results["targets"]["peer"]
    if isinstance(peer.get("left out"), str):
        return peer["left out"]
    lines = [f"{name}: {ratio:.2f} times (goal {goal:g})" for name, ratio in peer["ratios"].items() if name.endswith("padded")]
    if "same_loss" in peer:
        lines.append("initial losses agree" if peer["same_loss"] else "initial losses DIFFER")
    return "; ".join(lines)


def _compare_headline(results: dict[str, Any], part: str) -> str:
    """Return the relative speed of a variant, or the packs of a micro-batch that all variants can take."""
    compare = results["compare"]
    if part == "packs":
        return f"{compare['packs']} in a micro-batch" if "packs" in compare else ""
    if not (row := compare.get("rows", {}).get(part)):
        return ""
    ratio = format_ratio(compare, part)
    relation = f"{ratio} times {compare['base']}" if part in compare["ratios"] else ratio
    return f"{relation}, {row['tokens_per_second']:,.0f} tokens/s"


HEADLINES: dict[str, Callable[[dict[str, Any], str], str]] = {
    "correctness": _correctness_headline,
    "speed": _speed_headline,
    "parity": _parity_headline,
    "peer": _peer_headline,
    "compare": _compare_headline,
}
