"""Results of the GPU benchmark as Markdown, without sections that have no results."""

import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from megaenc.bench.gpu.kernel_groups import GROUPS
from megaenc.bench.gpu.variants import format_kernels
from megaenc.bench.gpu.verdicts import format_ratio

GIB = 2**30
Results = dict[str, Any]

# Header of each table, and the format of a row from its fields.
CORRECTNESS = (
    "| head | attention | numbers | loss | reference | loss off by | allowed | gradient | allowed | worst |  |",
    "| {head_dim} | {attention} | {numbers} | {loss:.6f} | {reference_loss:.6f} | {loss_error:.1e} | {allowed[loss]:.1e} "
    "| {gradient_error:.1e} | {allowed[gradient]:.1e} | `{worst_parameter}` | {passed} |",
)
SPEED = (
    "| model | objective | tokens/s | TFLOP/s | MFU | target |  | peak memory | micro-batch | an update | loss |",
    "| {model} | {objective} | {tokens_per_second:,.0f} | {tflops:,.3g} | {of_peak} | {target} | {verdict} | {gib:.1f} GiB "
    "| {packs} x {micro_batches} | {seconds_per_update:.3f} s | {loss:.3f}{warning} |",
)
PEER = (
    "|  | tokens/s | peak memory | documents an update | loss at the start |",
    "| {name} | {tokens_per_second:,.0f} | {gib:.1f} GiB | {batch} | {loss:.5f} |",
)
COMPARE = (
    "| kernels | tokens/s | relative to {base} | packs | peak memory | loss |",
    "| {name} | {tokens_per_second:,.0f} | {ratio} | {packs} | {gib:.1f} GiB | {loss:.3f}{warning} |",
)
PHASES = ("| phase | seconds |  |", "| {name} | {seconds:.0f} | {ended} |")


class _CellFormatter(string.Formatter):
    """Formatter that prints booleans as verdicts, and None and NaN as NaN."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, bool):
            return "pass" if value else "**FAIL**"
        return "NaN" if value is None or value != value else super().format_field(value, format_spec)


_format_cells = _CellFormatter().vformat


def format_table(results: Results) -> str:
    """Return all results as Markdown: a title with the device, then a section of tables per kind of result that exists."""
    parts = [_format_header(results)]
    for name, (heading, section) in SECTIONS.items():
        if lines := list(section(results, results.get(name, {}))):
            parts.append("\n".join([f"## {heading}\n", *lines]))
    return "\n\n".join(parts)


def _format_header(results: Results) -> str:
    """Return the title and the description of the device."""
    device, machine = results.get("device", {}), results.get("machine", {})
    peak = device.get("peak_bf16")
    rate = f"; dense bf16 peak {peak / 1e12:,.0f} TFLOP/s" if peak else ""
    small = "\n\n**In miniature: these speeds are meaningless.**" if results["settings"]["small"] else ""
    return (
        f"# On {device.get('name', 'an unknown device')}\n\n{machine.get('time', '')}, torch {device.get('torch', '?')}, "
        f"CUDA {device.get('cuda')}, HIP {device.get('hip')}, {machine.get('cores', '?')} cores{rate}. "
        f"Requested kernels: {results['kernels']['text']}.{small}"
    )


def _iter_table_lines(titles: str, form: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; none without rows."""
    for number, row in enumerate(rows):
        if not number:
            yield titles
            yield "|" + "---|" * (titles.count("|") - 1)
        yield _format_cells(form, (), row)


def _correctness_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about loss and gradients."""
    rows = part.get("rows", [])
    yield from _iter_table_lines(*CORRECTNESS, rows)
    if others := sorted({name for row in rows for name in row["not_compared"]}):
        yield f"\nNot compared, since these kernels rename them: {', '.join(others)}."


def _parity_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about losses of short runs."""
    runs = {name: losses for name, losses in part.items() if name.startswith(("host ", "device "))}
    form = "| {update} | " + " | ".join(f"{{losses[{number}]:.5f}}" for number in range(len(runs))) + " |"
    steps = enumerate(zip(*runs.values(), strict=True), 1)
    yield from _iter_table_lines(
        f"| update | {' | '.join(runs)} |", form, ({"update": step, "losses": losses} for step, losses in steps)
    )
    for row in part.get("rows", ()):
        yield _format_cells("\n{numbers} against {beside}: largest error {worst:.1e}, allowed {allowed:.1e}: {passed}", (), row)


def _format_verdict(row: Results, target: float | None) -> str:
    """Return whether a speed row reaches its MFU target, as text; empty without a target."""
    if target is None or row["mfu"] is None:
        return ""
    return "hit" if row["mfu"] >= target else f"**missed by {100 * (target - row['mfu']):.1f}**"


def _format_warning(row: Results) -> str:
    """Return a mark for a speed row with steps that were not applied."""
    return "" if row["finite"] else " **not finite**"


def _speed_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about training speed."""
    rows = {}
    for model, objective, row in ((model, *pair) for model, each in part.items() for pair in each.items() if "mfu" in pair[1]):
        target = results["targets"]["mfu"].get(model)
        rows[model, objective] = row | {
            "model": model,
            "objective": objective,
            "tflops": row["flops_per_second"] / 1e12,
            "gib": row["peak_memory"] / GIB,
            "of_peak": "unknown peak" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %",
            "target": f"{100 * target:.0f} %" if target else "",
            "verdict": _format_verdict(row, target),
            "warning": _format_warning(row),
        }
    yield from _iter_table_lines(*SPEED, rows.values())
    if rows:
        yield (
            "\nTFLOP/s: matrix products and attention, without the masked half of causal attention. "
            "Peak memory: of tensors. Micro-batch: packs x micro-batches per step."
        )
    for model, row in {model: row for (model, _), row in rows.items()}.items():
        used = row.get("fused") or {}
        mine, others = (", ".join(name for name, is_used in used.items() if is_used is is_listed) for is_listed in (True, False))
        fused = (f"; fused: {mine or 'none'}" if used else "") + (f", by torch: {others}" if others else "")
        yield f"\n{model}: {format_kernels(row['kernels'])}{fused}"


def _breakdown_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about the parts of a step."""
    columns = {(model, text): each for model, both in part.items() for text, each in both.items()}
    rows = {group: [f"{100 * each['shares'].get(group, 0):.1f}" for each in columns.values()] for group in GROUPS}
    for label, key in (("matrix products", "matrix_flops_per_second"), ("attention", "attention_flops_per_second")):
        rates = [each[key] for each in columns.values()]
        rows[f"{label}, TFLOP/s"] = ["" if rate is None else f"{rate / 1e12:,.3g}" for rate in rates]
    lines = [{"line": " | ".join([group, *cells])} for group, cells in rows.items() if cells]
    yield from _iter_table_lines(f"|  | {' | '.join(map(' '.join, columns))} |", "| {line} |", lines)
    for (model, objective), each in columns.items():
        if not each["by_time_too"]:
            yield f"\n{model} {objective}: device and host clocks differ, so kernels are grouped by name only."
        kernels = ", ".join(f"`{name[:60]}`" for name in each["attention_kernels"])
        yield f"\n{model} {objective}: attention by {kernels or 'unknown kernels'}."
        if "missed" in _format_verdict(results["speed"][model][objective], results["targets"]["mfu"].get(model)):
            yield f"Missed its target. Suggestion: {each['next']}."


def _synchronization_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about host synchronizations."""
    for model, each in part.items():
        if "left out" in each:
            yield f"- {model}: not measured, {each['left out']}"
            continue
        places = ", ".join(f"{place} ({count:g})" for place, count in each["places"].items()) or "none"
        count = f"{each['of_a_micro_batch']:g} per micro-batch ({places})"
        yield f"- {model}: {count}, {each['of_an_update']:g} more per step"


def _hf_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about the comparison with transformers."""
    if not part.get("rows"):
        return
    yield from _iter_table_lines(
        *PEER, (row | {"name": name, "gib": row["peak_memory"] / GIB} for name, row in part["rows"].items())
    )
    if "same_loss" in part:
        yield _format_cells("\nSame initial loss: {same_loss}", (), part)
    target = results["targets"]["peer"]
    for name, ratio in part.get("ratios", {}).items():
        verdict = f" (target {target:g}: {'hit' if ratio >= target else '**missed**'})" if name.endswith("padded") else ""
        yield f"\n{name}: {ratio:.2f} times{verdict}"


def _compare_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about kernel variants."""
    rows = part.get("rows", {})
    if not rows:
        return
    titles, form = COMPARE
    columns = (
        row | {"name": name, "ratio": format_ratio(part, name), "gib": row["peak_memory"] / GIB, "warning": _format_warning(row)}
        for name, row in rows.items()
    )
    yield from _iter_table_lines(titles.format_map(part), form, columns)
    count = next(iter(rows.values()))["micro_batches"]
    yield f"\n{count} micro-batches per step, of at most {part['packs']} packs, which fit with torch's own operations."


def _phases_section(results: Results, part: Results) -> Iterator[str]:
    """Yield the lines about phases, messages of libraries and skipped measurements."""
    yield from _iter_table_lines(*PHASES, ({"name": name, **phase} for name, phase in part.items()))
    lines: dict[str, list[str]] = {}
    for phase, messages in results.get("said", {}).items():
        for line in dict.fromkeys(messages):
            lines.setdefault(line, []).append(phase)
    for line, names in lines.items():
        yield f"\nMessage in {', '.join(names)}: {line}"
    speed = {f"speed, {name}": each for name, each in results.get("speed", {}).items()}
    for name, each in {**speed, "peer": results.get("peer", {}), "compare": results.get("compare", {})}.items():
        if skipped := each.get("left out"):
            text = skipped if isinstance(skipped, str) else ", ".join(f"{item}: {why}" for item, why in skipped.items())
            yield f"\nSkipped in {name}: {text}"


SECTIONS: dict[str, tuple[str, Callable[[Results, Results], Iterator[str]]]] = {
    "correctness": ("Correctness: one micro-batch against float32 on the host", _correctness_section),
    "speed": ("Speed", _speed_section),
    "breakdown": ("Breakdown of a step, in percent of its time", _breakdown_section),
    "synchronisations": ("Host synchronizations", _synchronization_section),
    "parity": ("Parity: losses of a short run, CLM then MLM, on device and host", _parity_section),
    "peer": ("Comparison with transformers", _hf_section),
    "compare": ("Comparison of kernels", _compare_section),
    "phases": ("Phases", _phases_section),
}
