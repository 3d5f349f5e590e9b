"""What was found, as Markdown: what has not been found yet, or never will be, is left out."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megaenc.bench.gpu.groups import GROUPS
from megaenc.bench.gpu.variants import title

GIB = 2**30


def table(found: dict[str, Any]) -> str:
    """All of it, in sections."""
    parts = [_head(found)]
    for section in (_correctness, _parity, _speed, _breakdown, _synchronisations, _peer, _phases):
        lines = list(section(found))
        if lines:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _head(found: dict[str, Any]) -> str:
    device, machine = found.get("device", {}), found.get("machine", {})
    peak = device.get("peak_bf16")
    rate = f"; dense bf16 peak {peak / 1e12:,.0f} TFLOP/s" if peak else ""
    small = "\n\n**In miniature: these figures say nothing about speed.**" if found["settings"]["small"] else ""
    return (
        f"# On {device.get('name', 'an unknown device')}\n\n{machine.get('time', '')}, torch {device.get('torch', '?')}, "
        f"CUDA {device.get('cuda')}, HIP {device.get('hip')}, {machine.get('cores', '?')} cores{rate}. "
        f"Kernels asked for: {found['kernels']['text']}.{small}"
    )


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _verdict(passed: bool) -> str:
    return "pass" if passed else "**FAIL**"


def _error(value: float | None) -> str:
    return "no number" if value is None or value != value else f"{value:.1e}"


def _correctness(found: dict[str, Any]) -> Iterator[str]:
    rows = found.get("correctness", {}).get("rows")
    if not rows:
        return
    yield "## Correctness: one micro-batch beside float32 on the host\n"
    titles = ("head", "attention", "numbers", "loss", "reference", "loss off by", "allowed", "gradient", "allowed", "worst", "")
    yield from _grid(
        titles,
        (
            (
                str(row["head_dim"]),
                row["attention"],
                row["numbers"],
                f"{row['loss']:.6f}",
                f"{row['reference_loss']:.6f}",
                _error(row["loss_error"]),
                _error(row["allowed"]["loss"]),
                _error(row["gradient_error"]),
                _error(row["allowed"]["gradient"]),
                f"`{row['worst_parameter']}`",
                _verdict(row["passed"]),
            )
            for row in rows
        ),
    )
    others = sorted({name for row in rows for name in row["not_compared"]})
    if others:
        yield f"\nNot compared, being called otherwise with these kernels: {', '.join(others)}."


def _parity(found: dict[str, Any]) -> Iterator[str]:
    parity = found.get("parity", {})
    runs = {name: losses for name, losses in parity.items() if name.startswith(("host ", "device "))}
    if not runs:
        return
    yield "## Parity: losses of a short run, CLM then MLM, on the device and on the host\n"
    steps = range(max(map(len, runs.values())))
    yield from _grid(("update", *runs), ((str(step + 1), *(f"{run[step]:.5f}" for run in runs.values())) for step in steps))
    for row in parity.get("rows", ()):
        yield (
            f"\n{row['numbers']} beside {row['beside']}: off by {_error(row['worst'])} at most, "
            f"{_error(row['allowed'])} allowed: {_verdict(row['passed'])}"
        )


def _speed(found: dict[str, Any]) -> Iterator[str]:
    models = found.get("speed", {})
    rows = [(model, objective, row) for model, each in models.items() for objective, row in each.items() if "mfu" in row]
    if not rows:
        return
    yield "## Speed\n"
    titles = ("model", "objective", "tokens/s", "TFLOP/s", "MFU", "target", "", "peak memory", "micro-batch", "an update", "loss")
    yield from _grid(titles, (_speed_row(found, *row) for row in rows))
    yield (
        "\nTFLOP/s: executed, of matrix products and attention, a causal mask's hidden half left out. Peak memory: of tensors. "
        "A micro-batch: packs in one row."
    )
    for name, row in {model: row for model, _, row in rows}.items():
        yield f"\n{name}: {title(row['kernels'])}{_fused(row.get('fused'))}"


def _fused(used: dict[str, bool] | None) -> str:
    """Which of the fused kernels are used, where that is known."""
    if not used:
        return ""
    mine, others = ([name for name, is_used in used.items() if is_used is which] for which in (True, False))
    return f"; fused: {', '.join(mine) or 'none'}" + (f", by torch: {', '.join(others)}" if others else "")


def _speed_row(found: dict[str, Any], model: str, objective: str, row: dict[str, Any]) -> tuple[str, ...]:
    target, mfu = found["targets"]["mfu"].get(model), row["mfu"]
    judged = target is not None and mfu is not None
    return (
        model,
        objective,
        f"{row['tokens_per_second']:,.0f}",
        f"{row['flops_per_second'] / 1e12:,.3g}",
        "unknown peak" if mfu is None else f"{100 * mfu:.1f} %",
        f"{100 * target:.0f} %" if target else "",
        ("hit" if mfu >= target else f"**missed by {100 * (target - mfu):.1f}**") if judged else "",
        f"{row['peak_memory'] / GIB:.1f} GiB",
        f"{row['packs']} x {row['micro_batches']}",
        f"{row['seconds_per_update']:.3f} s",
        f"{row['loss']:.3f}" + ("" if row["finite"] else " **not finite**"),
    )


def _breakdown(found: dict[str, Any]) -> Iterator[str]:
    columns = [(model, text, each) for model, both in found.get("breakdown", {}).items() for text, each in both.items()]
    if not columns:
        return
    yield "## Where a step goes, in percent of its time\n"
    names = [f"{model} {objective}" for model, objective, _ in columns]
    rows = [(group, *(f"{100 * each['shares'].get(group, 0):.1f}" for *_, each in columns)) for group in GROUPS]
    for row, key in (
        ("matrix products, TFLOP/s", "matrix_flops_per_second"),
        ("attention, TFLOP/s", "attention_flops_per_second"),
    ):
        rows.append((row, *("" if each[key] is None else f"{each[key] / 1e12:,.3g}" for *_, each in columns)))
    yield from _grid(("", *names), rows)
    for model, objective, each in columns:
        if not each["by_time_too"]:
            yield f"\n{model} {objective}: the device's clock is not the host's, so groups are by names alone."
        kernels = ", ".join(f"`{name[:60]}`" for name in each["attention_kernels"])
        row, target = found["speed"][model][objective], found["targets"]["mfu"].get(model)
        missed = target is not None and row["mfu"] is not None and row["mfu"] < target
        yield f"\n{model} {objective}: attention by {kernels or 'no kernel of a known name'}."
        if missed:
            yield f"Missed its target. Next thing to try: {each['next']}."


def _synchronisations(found: dict[str, Any]) -> Iterator[str]:
    models = found.get("synchronisations", {})
    if not models:
        return
    yield "## Where the host waits for the device\n"
    for model, each in models.items():
        if "left out" in each:
            yield f"- {model}: not looked for, {each['left out']}"
            continue
        places = ", ".join(f"{place} ({count:g})" for place, count in each["places"].items()) or "none"
        often = f"{each['of_a_micro_batch']:g} times in a micro-batch ({places})"
        yield f"- {model}: {often}, {each['of_an_update']:g} times an update beside"


def _peer(found: dict[str, Any]) -> Iterator[str]:
    peer = found.get("peer", {})
    if not peer.get("rows"):
        return
    yield "## Beside transformers\n"
    titles = ("", "tokens/s", "peak memory", "documents an update", "loss at the start")
    yield from _grid(
        titles,
        (
            (
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{row['peak_memory'] / GIB:.1f} GiB",
                str(row["batch"]),
                f"{row['loss']:.5f}",
            )
            for name, row in peer["rows"].items()
        ),
    )
    if "same_loss" in peer:
        yield f"\nThe same loss at the start: {_verdict(peer['same_loss'])}"
    for name, ratio in peer.get("ratios", {}).items():
        target = found["targets"]["peer"]
        judged = f" (target {target:g}: {'hit' if ratio >= target else '**missed**'})" if name.endswith("padded") else ""
        yield f"\n{name}: {ratio:.2f} times{judged}"


def _phases(found: dict[str, Any]) -> Iterator[str]:
    yield "## Phases\n"
    yield from _grid(("phase", "seconds", ""), ((name, f"{p['seconds']:.0f}", p["ended"]) for name, p in found["phases"].items()))
    for line, names in _said(found).items():
        yield f"\nSaid in {', '.join(names)}: {line}"
    for part in ("speed", "peer", "compare"):
        for name, each in found.get(part, {}).items():
            left = each.get("left out") if part == "speed" else each if name == "left out" else None
            if left:
                told = left if isinstance(left, str) else ", ".join(f"{what}: {why}" for what, why in left.items())
                yield f"\nLeft out of {part}{f', {name}' if part == 'speed' else ''}: {told}"


def _said(found: dict[str, Any]) -> dict[str, list[str]]:
    """Each line that the program said, and in which phases."""
    lines: dict[str, list[str]] = {}
    for phase, said in found.get("said", {}).items():
        for line in dict.fromkeys(said):
            lines.setdefault(line, []).append(phase)
    return lines
