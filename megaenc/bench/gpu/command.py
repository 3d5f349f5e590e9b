"""The phases of `benchmarks/gpu.sh`, one after the other, and what is written after each."""

import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megaenc import flags
from megaenc.atomic_io import atomic_write, exit_on_sigterm
from megaenc.bench import report
from megaenc.bench.gpu import variants
from megaenc.bench.gpu.presets import CLM, FULL, MLM, PEER_TARGET, SMALL, TARGETS, BenchPreset
from megaenc.bench.gpu.table import table
from megaenc.bench.gpu.worker import JobFailed
from megaenc.bench.gpu.worker_pool import WorkerPool
from megaenc.bench.synthetic_docs import Setup
from megaenc.bench.train_worker import TrainingJob
from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_output_file, create_parent_dir

DESCRIPTION = """Is what an accelerator computes right, and how fast is it? One accelerator, under nine minutes.

correctness: loss and gradients beside float32 on the host, both masks, heads 64 and 96 wide. parity: a short run beside the same
run on the host. speed: the 1b, 610m and 210m models, MLM 40 % and CLM, packs of documents of 12 to 2,048 tokens, micro-batches
that fill the card, where a step's time goes, where the host waits. peer: transformers on the 610m MLM work. compare: other
kernels on it.

Each phase knows what time is left; what there is no time for is left out, with a line that says so. JSON and a Markdown table are
written after each phase."""
ALL = ("correctness", "parity", "speed", "peer", "compare")
# Memory in pieces that grow: micro-batches of varying sizes leave less of it unused. The second name is of older torch.
DEVICE = {name: "expandable_segments:True" for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
# Of each loss of a short run, relative: rounding grows with the updates, a fault of a gradient grows past it.
TOLERANCE = {"float32": 1e-3, "bfloat16": 1e-2}
HOST = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class GpuBenchConfig:
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


def sizes_of(settings: GpuBenchConfig) -> BenchPreset:
    """Return how much is done."""
    return SMALL if settings.small else FULL


def kernels_of(settings: GpuBenchConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the fields of Kernels that are not to be the default, and those of what is compared. Raises InputError."""
    given = variants.given(settings.kernels, "--kernels")
    return given, [given | variants.given(words.split(","), "--compare") for words in settings.compare]


class Benchmark:
    """What is found so far, and the time that is left. A phase of the name of each of ALL makes more of it."""

    def __init__(self, settings: GpuBenchConfig, folder: Path, device: WorkerPool, host: WorkerPool) -> None:
        """`device`, `host`: who does jobs on the accelerator and beside it."""
        self.settings, self.sizes, self.folder = settings, sizes_of(settings), folder
        self.device, self.host, self.begun = device, host, time.monotonic()
        self.given, self.tried = kernels_of(settings)
        self.found: dict[str, Any] = {
            "settings": asdict(settings),
            "phases": {},
            "targets": {"mfu": TARGETS, "peer": PEER_TARGET},
            "kernels": {"asked": self.given, "text": variants.title(self.given)},
        }

    @property
    def left(self) -> float:
        """Seconds."""
        return self.settings.seconds - (time.monotonic() - self.begun)

    def phase(self, name: str, crew: WorkerPool, kind: str, least: float, most: float, /, **arguments: Any) -> bool:
        """Let `crew` do a job if `least` seconds are left, within `most`; whether all of it was done. What it finds is kept."""
        clock, left, why = time.monotonic(), self.left, ""
        if left < least:
            why = f"left out: {left:.0f} s left, {least:.0f} needed"
        else:
            try:
                for (*way, last), value in crew.run({"name": name, "kind": kind, "arguments": arguments}, most, left):
                    self.part(*way)[last] = value
            except JobFailed as failure:
                why = f"cut short: {failure}"
        seconds = time.monotonic() - clock
        self.found["phases"][name] = {"seconds": round(seconds, 1), "ended": why or "done"}
        self.write()
        print_rank_0(f"{name}: {why or 'done'}, {seconds:.0f} s; {max(0.0, self.left):.0f} s left")
        return not why

    @property
    def fullest(self) -> dict[str, Any] | None:
        """The row of the speed of what the peer and other kernels are compared on, if there is one yet."""
        return self.found.get("speed", {}).get(self.sizes.compared, {}).get(MLM)

    def part(self, *way: str) -> dict[str, Any]:
        """Return what is found so far under these names, one inside the other."""
        part = self.found
        for name in way:
            part = part.setdefault(name, {})
        return part

    def write(self) -> None:
        """Write JSON and the table, each whole or not at all."""
        self.found["seconds"] = round(time.monotonic() - self.begun, 1)
        report.write(self.settings.output, json.loads(json.dumps(self.found), parse_constant=lambda _: None))
        atomic_write(Path(self.settings.output).with_suffix(".md"), table(self.found) + "\n")

    def correctness(self) -> None:
        """Compare one micro-batch with float32 on the host."""
        models, work = self.sizes.correctness.items(), {"packs": 2, "folder": self.folder}
        reference = {width: _by(setup, "float32", variants.plain()) for width, setup in models}
        checked = {f"{width} {kind}": _by(setup, kind, self.given) for kind in TOLERANCE for width, setup in models}
        if self.phase("correctness, reference", self.host, "correctness.reference", 20, 60, setups=reference, **work):
            # On an accelerator about a hundred variants of kernels are compiled first, one after the other.
            self.phase("correctness", self.device, "correctness.compared", 15, 120, setups=checked, **work)

    def parity(self) -> None:
        """Compare a short run with the same on the host."""
        sizes, part = self.sizes, self.part("parity")
        # Without instructions for it, bfloat16 on the host takes minutes; float32 there is then what both are compared with.
        quick = self.settings.small or self.found["device"]["host_bf16"]
        for where, crew, kernels, kinds in (
            ("host", self.host, variants.plain(), TOLERANCE if quick else ("float32",)),
            ("device", self.device, self.given, TOLERANCE),
        ):
            work = {"setups": {f"{where} {kind}": _by(sizes.parity, kind, kernels) for kind in kinds}}
            work |= {"packs": sizes.parity_packs, "updates": sizes.updates}
            if not self.phase(f"parity, {where}", crew, "correctness.run_losses", 15, 40, **work):
                break
        part["rows"] = compare_runs(part)
        self.write()

    def speed(self) -> None:
        """Time each model."""
        for model in self.settings.models or self.sizes.speed:
            work = self._timing(model, self.given) | {"name": model, "objectives": (MLM, CLM)}
            self.phase(f"speed, {model}", self.device, "speed.measured", 30, 90, **work)

    def _timing(self, model: str, kernels: dict[str, Any]) -> dict[str, Any]:
        """Return what all timed updates of `model` have; float32 on a processor without instructions for bfloat16."""
        sizes = self.sizes
        setup = replace(sizes.speed[model], bf16=self.found["device"]["bf16"], kernels=kernels)
        return {"setup": setup, "packs": sizes.packs, "micro_batches": sizes.micro_batches, "seconds": sizes.seconds}

    def peer(self) -> None:
        """Time transformers on the same work."""
        sizes, part = self.sizes, self.part("peer")
        work = TrainingJob(
            **vars(self._timing(sizes.compared, self.given)["setup"]),
            objective=MLM,
            documents=sizes.documents,
            batch=min(sizes.documents, 32),
            passes=sizes.passes,
            weights=str(self.folder / "weights.safetensors"),
        )
        self.phase("peer", self.device, "hf_baseline.compare_with_hf", 40, 130, work=work)
        part["ratios"] = ratios(part.get("rows", {}), self.fullest)
        self.write()

    def compare(self) -> None:
        """Time other kernels, all with the same micro-batches: half of what fills the card, for some need more memory."""
        model, base, known = self.sizes.compared, self.given, self.fullest
        tried = self.tried
        if not tried:
            lacking = self.found["device"]["lacking"]
            tried, self.part("compare")["left out"] = variants.candidate_variants(base, known and known["kernels"], lacking)
        packs = max(1, known["packs"] // 2) if known else self.sizes.packs
        less = {"objectives": (MLM,), "packs": packs, "seconds": self.sizes.seconds / 2, "looks": False}
        for left, kernels in zip(range(len(tried) + 1, 0, -1), [base, *tried], strict=True):
            title, most = variants.title(kernels), min(max(25.0, self.left / left), 45.0)
            work = self._timing(model, kernels) | less | {"name": f"{model} {title}"}
            self.phase(f"compare, {title}", self.device, "speed.measured", 20, most, **work)


def _by(setup: Setup, numbers: str, kernels: dict[str, Any]) -> Setup:
    """Return the same in `numbers` of a kind and by `kernels`; by those in float32 that do not take 16-bit numbers only."""
    if numbers == "float32":
        kernels = {name: value for name, value in kernels.items() if isinstance(value, bool) or value == "sdpa"}
    return replace(setup, bf16=numbers == "bfloat16", kernels=kernels)


def compare_runs(found: dict[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Compare the losses of short runs: each kind of number on the device with the host's, or with float32 where that is all."""
    rows = []
    for kind, allowed in TOLERANCE.items():
        mine = found.get(f"device {kind}")
        beside = next((name for name in (f"host {kind}", "host float32") if found.get(name)), None)
        if mine and beside:
            off = [abs(here - there) / abs(there) for here, there in zip(mine, found[beside], strict=True)]
            worst = max(off, key=lambda value: (math.isnan(value), value))
            rows.append({"numbers": kind, "beside": beside, "worst": worst, "allowed": allowed, "passed": worst <= allowed})
    return rows


def ratios(rows: dict[str, dict[str, Any]], fullest: dict[str, Any] | None) -> dict[str, float]:
    """Return times the tokens a second of each peer: as many documents an update, and with micro-batches that fill the card."""
    sides = rows | ({"megaenc, card filled": fullest} if fullest else {})
    rates = {name: row["tokens_per_second"] for name, row in sides.items()}
    ours = [name for name in rates if name.startswith("megaenc")]
    return {f"{mine} / {name}": rates[mine] / rates[name] for name in rates if name not in ours for mine in ours}


def unset(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment`, unless its user has set one of these variables."""
    return {} if any(name in os.environ for name in environment) else environment


def run(settings: GpuBenchConfig) -> dict[str, Any]:
    """Run all phases. Raises InputError for wrong settings."""
    report.check_positive(settings, "seconds")
    known = sizes_of(settings).speed
    for name in settings.models:
        if name not in known:
            raise InputError(f"--models {name}: expected some of {', '.join(known)}")
    kernels_of(settings)
    output, host = Path(settings.output), settings.device == "cpu"
    log = output.with_suffix(".log")
    for path in (output, output.with_suffix(".md"), log):
        check_output_file(path, "--output")
    create_parent_dir(output, "--output")
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log.write_bytes(b"")
        device = stack.enter_context(WorkerPool(HOST if host else unset(DEVICE), fresh=not host, log=log))
        # Where both are the host, one process does for both.
        beside = device if host else stack.enter_context(WorkerPool(HOST, fresh=False, log=log))
        benchmark = Benchmark(settings, folder, device, beside)
        if not benchmark.phase("machine", device, "worker.machine", 0, 60):
            raise InputError(f"the device cannot be used: {benchmark.found['phases']['machine']['ended']}; see {log}")
        found = benchmark.found["device"]
        if not host and found["backend"] == "cpu":
            raise InputError("no accelerator found; --device cpu --small tries the benchmark without one")
        print_rank_0(f"{found['name']}, torch {found['torch']}; {settings.seconds:.0f} s for all")
        for name in ALL:
            if name in settings.phases:
                getattr(benchmark, name)()
    return benchmark.found


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """`benchmarks/gpu.sh`."""
    silence_libraries()
    settings = flags.parse(GpuBenchConfig, argv, prog="benchmarks/gpu.sh", description=DESCRIPTION)
    found = run(settings)
    print(table(found))
    print_rank_0(f"{settings.output}: written after {found['seconds']:.0f} s, with the table beside it")
