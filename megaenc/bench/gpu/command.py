"""The phases of `benchmarks/gpu.sh`, one after the other, and what is written after each."""

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megaenc import flags
from megaenc.backend.kernels import Kernels
from megaenc.bench import report
from megaenc.bench.gpu import variants
from megaenc.bench.gpu.crew import Crew, Failed
from megaenc.bench.gpu.sizes import CLM, FULL, MLM, PEER_TARGET, SMALL, TARGETS, Sizes
from megaenc.bench.gpu.table import table
from megaenc.console import quiet, say
from megaenc.errors import InputError, one_line_errors
from megaenc.files import stopped_by_sigterm, write_whole
from megaenc.output_paths import check_output_file, make_parent

DESCRIPTION = """Is what an accelerator computes right, and how fast is it? One accelerator, under nine minutes.

correctness: loss and gradients beside float32 on the host, both masks, heads 64 and 96 wide. parity: a short run beside the same
run on the host. speed: the 1b, 610m and 210m models, MLM 40 % and CLM, packs of documents of 12 to 2,048 tokens, micro-batches
that fill the card, where a step's time goes, where the host waits. peer: transformers on the 610m MLM work. compare: other
kernels on it.

Each phase knows what time is left; what there is no time for is left out, with a line that says so. JSON and a Markdown table are
written after each phase."""
ALL = ("correctness", "parity", "speed", "peer", "compare")
DEVICE = {name: "expandable_segments:True" for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
"""Memory in pieces that grow: micro-batches of varying sizes leave less of it unused. The second name is of older torch; where
there are no such pieces, torch says so and does without."""
HOST = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class GpuFlags:
    """What is measured."""

    output: str = "gpu.json"
    """JSON file for all figures; the table goes beside it, as .md, and what libraries say as .log"""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the first accelerator; cpu: this machine's processors"""
    small: bool = False
    """everything in miniature: a test of the benchmark, whose figures say nothing"""
    phases: tuple[Literal["correctness", "parity", "speed", "peer", "compare"], ...] = ALL
    """which of them"""
    seconds: float = 510.0
    """for all phases together"""
    models: tuple[str, ...] = ()
    """of speed: 1b 610m 210m, all unless given"""
    kernels: tuple[str, ...] = ()
    """FIELD=VALUE, as attention_backend=sdpa: by which kernels all of it is computed; the defaults unless given"""
    compare: tuple[str, ...] = ()
    """what else is tried on the 610m MLM work: FIELD=VALUE or FIELD=VALUE,FIELD=VALUE, ...; unless given every other value of
    each field that can be had here"""

    @property
    def sizes(self) -> Sizes:
        """How much is done."""
        return SMALL if self.small else FULL

    def check(self) -> None:
        """InputError, naming the flag."""
        report.check_positive(self, "seconds")
        known = self.sizes.speed
        for name in self.models:
            if name not in known:
                raise InputError(f"--models {name}: expected some of {', '.join(known)}")
        for kernels in (self.given, *self.tried):
            Kernels(**kernels)

    @property
    def given(self) -> dict[str, Any]:
        """The fields of Kernels that are not to be the default."""
        return variants.given(self.kernels, "--kernels")

    @property
    def tried(self) -> list[dict[str, Any]]:
        """By which other kernels the compared work is done; none: by all that are worth it."""
        return [self.given | variants.given(words.split(","), "--compare") for words in self.compare]


class Benchmark:
    """What is found so far, and the time that is left."""

    def __init__(self, settings: GpuFlags, folder: Path) -> None:
        self.settings, self.sizes, self.folder = settings, settings.sizes, folder
        self.begun = time.monotonic()
        self.found: dict[str, Any] = {"settings": asdict(settings), "phases": {}}
        self.found["targets"] = {"mfu": TARGETS, "peer": PEER_TARGET}
        self.found["kernels"] = {"asked": settings.given, "text": variants.title(settings.given)}

    @property
    def left(self) -> float:
        """Seconds."""
        return self.settings.seconds - (time.monotonic() - self.begun)

    def phase(self, name: str, crew: Crew, job: dict[str, Any], least: float, most: float) -> bool:
        """Let `crew` do `job` if `least` seconds are left, within `most`; whether all of it was done. What it finds is kept."""
        left = self.left
        if left < least:
            self._ended(name, 0.0, f"left out: {left:.0f} s left, {least:.0f} needed")
            return False
        clock, why = time.monotonic(), ""
        try:
            for path, value in crew.run(job | {"name": name}, most, left):
                put(self.found, path, value)
        except Failed as failure:
            why = f"cut short: {failure}"
        self._ended(name, time.monotonic() - clock, why)
        return not why

    def _ended(self, name: str, seconds: float, why: str) -> None:
        self.found["phases"][name] = {"seconds": round(seconds, 1), "ended": why or "done"}
        self.write()
        say(f"{name}: {why or 'done'}, {seconds:.0f} s; {max(0.0, self.left):.0f} s left")

    def write(self) -> None:
        """JSON and the table, each whole or not at all."""
        self.found["seconds"] = round(time.monotonic() - self.begun, 1)
        report.write(self.settings.output, finite(self.found))
        write_whole(Path(self.settings.output).with_suffix(".md"), table(self.found) + "\n")


def put(found: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Into nested dictionaries."""
    *way, last = path
    for name in way:
        found = found.setdefault(name, {})
    found[last] = value


def finite(value: Any) -> Any:
    """The same with None for what is no number of JSON's."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def unset(environment: dict[str, str]) -> dict[str, str]:
    """`environment`, unless its user has set one of these variables."""
    return {} if any(name in os.environ for name in environment) else environment


def run(settings: GpuFlags) -> dict[str, Any]:
    """All phases. Raises InputError for wrong settings."""
    settings.check()
    for suffix in (None, ".md", ".log"):
        path = Path(settings.output)
        check_output_file(path if suffix is None else path.with_suffix(suffix), "--output")
    make_parent(Path(settings.output), "--output")
    log = Path(settings.output).with_suffix(".log")
    host = settings.device == "cpu"
    with contextlib.ExitStack() as stack:
        stack.enter_context(stopped_by_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        benchmark = Benchmark(settings, folder)
        log.write_bytes(b"")
        device = stack.enter_context(Crew(HOST if host else unset(DEVICE), fresh=not host, log=log))
        # Where both are the host, one process does for both.
        beside = device if host else stack.enter_context(Crew(HOST, fresh=False, log=log))
        if not benchmark.phase("machine", device, {"kind": "machine"}, 0, 60):
            raise InputError(f"the device cannot be used: {benchmark.found['phases']['machine']['ended']}; see {log}")
        found = benchmark.found["device"]
        if not host and found["backend"] == "cpu":
            raise InputError("no accelerator found; --device cpu --small tries the benchmark without one")
        say(f"{found['name']}, torch {found['torch']}; {settings.seconds:.0f} s for all")
        for name, phase in PHASES.items():
            if name in settings.phases:
                phase(benchmark, device, beside)
    return benchmark.found


def _correctness(benchmark: Benchmark, device: Crew, host: Crew) -> None:
    sizes, work = benchmark.sizes, {}
    for name, model in sizes.widths.items():
        work[name] = {"model": asdict(model), "vocab_size": sizes.vocab_size, "seq_length": sizes.length}
    reference = {name: fields | {"bf16": False, "kernels": variants.plain()} for name, fields in work.items()}
    job = {"kind": "reference", "packs": 2, "folder": str(benchmark.folder)}
    if not benchmark.phase("correctness, reference", host, job | {"setups": reference}, 20, 60):
        return
    checked = {}
    for kind, bf16 in (("float32", False), ("bfloat16", True)):
        kernels = benchmark.settings.given if bf16 else for_float32(benchmark.settings.given)
        checked |= {f"{name} {kind}": fields | {"bf16": bf16, "kernels": kernels} for name, fields in work.items()}
    # On an accelerator about a hundred variants of kernels are compiled first, one after the other.
    benchmark.phase("correctness", device, job | {"kind": "correctness", "setups": checked}, 15, 120)


def for_float32(kernels: dict[str, Any]) -> dict[str, Any]:
    """The same without what takes 16-bit numbers alone."""
    return {name: value for name, value in kernels.items() if isinstance(value, bool) or value == "sdpa"}


def _parity(benchmark: Benchmark, device: Crew, host: Crew) -> None:
    from megaenc.bench.gpu import parity

    sizes = benchmark.sizes
    work = {"model": asdict(sizes.parity), "vocab_size": sizes.vocab_size, "seq_length": sizes.parity_length, "rate": 2e-3}
    job = {"kind": "parity", "packs": sizes.parity_packs, "updates": sizes.updates}
    kinds = {"float32": False, "bfloat16": True}
    # Without instructions for it, bfloat16 on the host takes minutes; float32 there is then what both are compared with.
    quick = benchmark.settings.small or benchmark.found["device"]["host_bf16"]
    there = {kind: bf16 for kind, bf16 in kinds.items() if quick or not bf16}
    for where, crew, which in (("host", host, there), ("device", device, kinds)):
        setups = {}
        for kind, bf16 in which.items():
            kernels = variants.plain() if where == "host" else benchmark.settings.given
            setups[f"{where} {kind}"] = work | {"bf16": bf16, "kernels": kernels if bf16 else for_float32(kernels)}
        if not benchmark.phase(f"parity, {where}", crew, job | {"setups": setups}, 15, 40):
            break
    benchmark.found["parity"]["rows"] = parity.compare(benchmark.found.setdefault("parity", {}))
    benchmark.write()


def _work(benchmark: Benchmark, model: str, kernels: dict[str, Any]) -> dict[str, Any]:
    sizes = benchmark.sizes
    return {
        "model": sizes.model(model),
        "vocab_size": sizes.speed_vocab_size,
        "seq_length": sizes.speed_length,
        "bf16": benchmark.found["device"]["bf16"],  # float32 on a processor without instructions for it
        "kernels": kernels,
    }


def _speed(benchmark: Benchmark, device: Crew, _: Crew) -> None:
    sizes = benchmark.sizes
    for model in benchmark.settings.models or sizes.speed:
        timing = {"name": model, "objectives": [MLM, CLM], "micro_batches": sizes.micro_batches}
        timing |= {"packs": sizes.packs, "seconds": sizes.seconds}
        setups = {model: _work(benchmark, model, benchmark.settings.given)}
        benchmark.phase(f"speed, {model}", device, {"kind": "speed", "setups": setups, "timing": timing}, 30, 90)


def _peer(benchmark: Benchmark, device: Crew, _: Crew) -> None:
    sizes = benchmark.sizes
    setups = {sizes.compared: _work(benchmark, sizes.compared, benchmark.settings.given)}
    job = {"kind": "peer", "setups": setups, "objective": MLM, "documents": sizes.documents, "passes": sizes.passes}
    job["folder"] = str(benchmark.folder)
    benchmark.phase("peer", device, job, 40, 130)
    rows = benchmark.found.get("peer", {}).get("rows", {})
    fullest = benchmark.found.get("speed", {}).get(sizes.compared, {}).get(MLM)
    benchmark.found.setdefault("peer", {})["ratios"] = ratios(rows, fullest)
    benchmark.write()


def ratios(rows: dict[str, dict[str, Any]], fullest: dict[str, Any] | None) -> dict[str, float]:
    """Times the tokens a second of each peer: as many documents an update, and with micro-batches that fill the card."""
    ours = {name: row["tokens_per_second"] for name, row in rows.items() if name.startswith("megaenc")}
    ours |= {"megaenc, card filled": fullest["tokens_per_second"]} if fullest else {}
    peers = {name: row["tokens_per_second"] for name, row in rows.items() if not name.startswith("megaenc")}
    return {f"{mine} / {peer}": value / there for peer, there in peers.items() for mine, value in ours.items()}


def _compare(benchmark: Benchmark, device: Crew, _: Crew) -> None:
    sizes, base = benchmark.sizes, benchmark.settings.given
    known = benchmark.found.get("speed", {}).get(sizes.compared, {}).get(MLM)
    packs = known["packs"] if known else sizes.packs
    tried = benchmark.settings.tried
    if not tried:
        lacking = benchmark.found["device"]["lacking"]
        tried, left_out = variants.worth_a_trial(base, known["kernels"] if known else None, lacking)
        put(benchmark.found, ["compare", "left out"], left_out)
    tried = ([] if known else [base]) + tried
    for number, kernels in enumerate(tried):
        title = variants.title(kernels)
        timing = {"name": f"{sizes.compared} {title}", "objectives": [MLM], "micro_batches": sizes.micro_batches}
        timing |= {"packs": packs, "seconds": sizes.seconds / 2, "looks": False}
        job = {"kind": "speed", "setups": {title: _work(benchmark, sizes.compared, kernels)}, "timing": timing}
        most = max(25.0, benchmark.left / (len(tried) - number))
        benchmark.phase(f"compare, {title}", device, job, 20, min(most, 45.0))


PHASES: dict[str, Callable[[Benchmark, Crew, Crew], None]] = {
    "correctness": _correctness,
    "parity": _parity,
    "speed": _speed,
    "peer": _peer,
    "compare": _compare,
}


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """`benchmarks/gpu.sh`."""
    quiet()
    settings = flags.parse(GpuFlags, argv, prog="benchmarks/gpu.sh", description=DESCRIPTION)
    found = run(settings)
    print(table(found))
    say(f"{settings.output}: written after {found['seconds']:.0f} s, with the table beside it")
