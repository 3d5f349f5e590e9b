"""Phases of `benchmarks/gpu.sh` and the report that is written after each."""

import contextlib
import json
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
from megaenc.bench.gpu import variants, verdicts
from megaenc.bench.gpu.presets import CLM, FULL, HF_TARGET, MLM, SMALL, TARGETS, BenchPreset
from megaenc.bench.gpu.table import format_table
from megaenc.bench.gpu.verdicts import TOLERANCE
from megaenc.bench.gpu.worker import JobFailed
from megaenc.bench.gpu.worker_pool import WorkerPool
from megaenc.bench.synthetic_docs import BenchSetup
from megaenc.bench.train_worker import TrainingJob
from megaenc.console import print_rank_0, silence_libraries
from megaenc.errors import InputError, handle_command_errors
from megaenc.output_paths import check_output_file, create_parent_dir

DESCRIPTION = """Check the correctness and measure the speed of one accelerator, in under nine minutes.

correctness: loss and gradients against float32 on the host, for both masks and head dimensions 64 and 96. speed: the 1b, 610m and
210m models, MLM 40 % and CLM, documents of 12 to 2,048 tokens, micro-batches that fill the memory, with a breakdown of the step
time and of host synchronizations. parity: a short run against the same run on the host. peer: transformers on the 610m MLM work.
compare: other kernels on the same work, in micro-batches that fit with all of them.

Phases run in this order, and each job prints its figures. Jobs for which no time is left are skipped and
reported. JSON and a Markdown table are written after each phase."""
PHASES = ("correctness", "speed", "parity", "peer", "compare")
# Expandable segments reduce fragmentation by micro-batches of varying sizes. The second name is for older torch.
DEVICE_ENVIRONMENT = {name: "expandable_segments:True" for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
HOST_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class GpuBenchConfig:
    """Flags of `benchmarks/gpu.sh`: JSON file for results, device, phases, time limit, models and kernels."""

    output: str = "gpu.json"
    """JSON file for all results; the table is written next to it as .md, output of libraries as .log"""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the first accelerator; cpu: this machine's CPU"""
    small: bool = False
    """run everything in miniature, as a test of the benchmark; its speeds are meaningless"""
    phases: tuple[Literal["correctness", "speed", "parity", "peer", "compare"], ...] = PHASES
    """phases to run"""
    seconds: float = 510.0
    """time limit of all phases together"""
    models: tuple[str, ...] = ()
    """models of the speed phase (default: 1b 610m 210m)"""
    kernels: tuple[str, ...] = ()
    """kernels of all phases as FIELD=VALUE, such as attention_backend=sdpa (default: those of a run)"""
    compare: tuple[str, ...] = ()
    """kernels of the compare phase as FIELD=VALUE or FIELD=VALUE,FIELD=VALUE (default: every other available value of each
    field)"""


def select_preset(config: GpuBenchConfig) -> BenchPreset:
    """Return the sizes of all phases: the miniature BenchPreset with --small, else the full one."""
    return SMALL if config.small else FULL


def parse_kernel_flags(config: GpuBenchConfig) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the KernelConfig fields of --kernels, and those of each --compare value added to them; raise InputError."""
    kernels = variants.parse_kernels(config.kernels, "--kernels")
    return kernels, [kernels | variants.parse_kernels(words.split(","), "--compare") for words in config.compare]


class Benchmark:
    """Results so far, remaining time and worker pools of a benchmark, with a method `run_PHASE` for each phase."""

    def __init__(self, config: GpuBenchConfig, folder: Path, device: WorkerPool, host: WorkerPool) -> None:
        """Prepare empty results; `device` and `host` run the jobs on the accelerator and on the host."""
        self.config, self.preset, self.folder = config, select_preset(config), folder
        self.device, self.host, self.start = device, host, time.monotonic()
        self.kernels, self.compared_kernels = parse_kernel_flags(config)
        self.results: dict[str, Any] = {
            "settings": asdict(config),
            "phases": {},
            "targets": {"mfu": TARGETS, "peer": HF_TARGET},
            "kernels": {"asked": self.kernels, "text": variants.format_kernels(self.kernels)},
        }

    @property
    def seconds_left(self) -> float:
        """Return the seconds left of --seconds for all phases together; below 0 if they are over."""
        return self.config.seconds - (time.monotonic() - self.start)

    def run_phase(
        self, name: str, pool: WorkerPool, kind: str, min_seconds: float, max_seconds: float, /, **arguments: Any
    ) -> bool:
        """Run a job if `min_seconds` are left; keep even partial results, write them; return whether it completed."""
        clock, seconds_left, status = time.monotonic(), self.seconds_left, ""
        if seconds_left < min_seconds:
            status = f"left out: {seconds_left:.0f} s left, {min_seconds:.0f} needed"
        else:
            try:
                for (*path, key), value in pool.run(
                    {"name": name, "kind": kind, "arguments": arguments}, max_seconds, seconds_left
                ):
                    self.results_at(*path)[key] = value
            except JobFailed as failure:
                status = f"cut short: {failure}"
        verdicts.derive_results(self.results, self.full_batch_row)
        seconds = time.monotonic() - clock
        self.results["phases"][name] = {"seconds": round(seconds, 1), "ended": status or "done"}
        self.write()
        lines = list(filter(None, (status, verdicts.format_headline(name, self.results)))) or ["done"]
        print_rank_0(f"{name}: {'; '.join(lines)} ({seconds:.0f} s, {max(0.0, self.seconds_left):.0f} s left)")
        return not status

    @property
    def full_batch_row(self) -> dict[str, Any] | None:
        """Return the MLM speed row of the compared model; None if the speed phase did not measure it."""
        return self.results.get("speed", {}).get(self.preset.compared_model, {}).get(MLM)

    def results_at(self, *way: str) -> dict[str, Any]:
        """Return the dictionary of results under the nested keys `way`, created if missing."""
        part = self.results
        for name in way:
            part = part.setdefault(name, {})
        return part

    def write(self) -> None:
        """Write all results so far to the JSON file of --output and, as Markdown tables, next to it as .md."""
        self.results["seconds"] = round(time.monotonic() - self.start, 1)
        report.write_report(self.config.output, json.loads(json.dumps(self.results), parse_constant=lambda _: None))
        atomic_write(Path(self.config.output).with_suffix(".md"), format_table(self.results) + "\n")

    def run_phases(self) -> None:
        """Run the selected phases in the order of PHASES."""
        for name in PHASES:
            if name in self.config.phases:
                getattr(self, f"run_{name}")()

    def run_correctness(self) -> None:
        """Compare loss and gradients of a micro-batch on the device with float32 on the host; store the rows."""
        models, arguments = self.preset.correctness.items(), {"packs": 2, "folder": self.folder}
        reference = {width: _configure_setup(setup, "float32", variants.reference_kernels()) for width, setup in models}
        configured = {
            f"{width} {kind}": _configure_setup(setup, kind, self.kernels) for kind in TOLERANCE for width, setup in models
        }
        if self.run_phase(
            "correctness, reference", self.host, "correctness.write_reference", 20, 60, setups=reference, **arguments
        ):
            # An accelerator first compiles about a hundred kernel variants in sequence.
            self.run_phase(
                "correctness", self.device, "correctness.compare_with_reference", 15, 120, setups=configured, **arguments
            )

    def run_speed(self) -> None:
        """Measure and store the training speed of each of --models (or the preset's) with MLM and CLM."""
        for model in self.config.models or self.preset.speed:
            arguments = self._speed_arguments(model, self.kernels) | {"name": model, "objectives": (MLM, CLM)}
            self.run_phase(f"speed, {model}", self.device, "speed.measure_speed", 30, 90, **arguments)

    def _speed_arguments(self, model: str, kernels: dict[str, Any]) -> dict[str, Any]:
        """Return the job arguments that all speed measurements of `model` share; float32 if the device lacks bfloat16."""
        preset = self.preset
        setup = replace(preset.speed[model], bf16=self.results["device"]["bf16"], kernels=kernels)
        return {"setup": setup, "packs": preset.packs, "micro_batches": preset.micro_batches, "seconds": preset.seconds}

    def run_parity(self) -> None:
        """Train a few steps on host and device; store the losses."""
        preset = self.preset
        # Without bfloat16 instructions the host takes minutes; then float32 is the reference of both.
        has_fast_bf16 = self.config.small or self.results["device"]["host_bf16"]
        for name, pool, kernels, kinds in (
            ("host", self.host, variants.reference_kernels(), TOLERANCE if has_fast_bf16 else ("float32",)),
            ("device", self.device, self.kernels, TOLERANCE),
        ):
            arguments = {"setups": {f"{name} {kind}": _configure_setup(preset.parity, kind, kernels) for kind in kinds}}
            arguments |= {"packs": preset.parity_packs, "steps": preset.steps}
            if not self.run_phase(f"parity, {name}", pool, "correctness.run_losses", 15, 40, **arguments):
                break

    def run_peer(self) -> None:
        """Measure transformers and megaenc on the same documents; store their speeds."""
        preset = self.preset
        job = TrainingJob(
            **vars(self._speed_arguments(preset.compared_model, self.kernels)["setup"]),
            objective=MLM,
            documents=preset.documents,
            batch=min(preset.documents, 32),
            passes=preset.passes,
            weights=str(self.folder / "weights.safetensors"),
        )
        self.run_phase("peer", self.device, "hf_baseline.compare_with_hf", 40, 130, job=job)

    def run_compare(self) -> None:
        """Store the speed of the chosen kernels and of each variant, in micro-batches that also fit with torch's own."""
        part, base = self.results_at("compare"), self.kernels
        part["base"] = variants.format_kernels(base)
        # Torch's own operations keep more activations than the kernels that replace them.
        setup = self._speed_arguments(self.preset.compared_model, base | variants.reference_kernels())["setup"]
        if not self.run_phase("compare, packs", self.device, "speed.find_common_packs", 40, 90, setup=setup, objective=MLM):
            return
        self._measure_variant(base, 45.0)
        base_row = part.get("rows", {}).get(part["base"]) or self.full_batch_row
        candidates = self.compared_kernels
        if not candidates:
            missing = self.results["device"]["lacking"]
            candidates, part["left out"] = variants.candidate_variants(base, base_row and base_row["kernels"], missing)
        for remaining, kernels in zip(range(len(candidates), 0, -1), candidates, strict=True):
            self._measure_variant(kernels, min(max(25.0, self.seconds_left / remaining), 45.0))

    def _measure_variant(self, kernels: dict[str, Any], max_seconds: float) -> None:
        """Store a variant's speed, in micro-batches of as many packs as the base's, and the ratios of all so far."""
        part, title = self.results_at("compare"), variants.format_kernels(kernels)
        arguments = self._speed_arguments(self.preset.compared_model, kernels)
        arguments |= {"name": title, "objective": MLM, "seconds": self.preset.seconds / 2}
        arguments["packs"] = part.get("rows", {}).get(part["base"], part)["packs"]
        self.run_phase(f"compare, {title}", self.device, "speed.measure_variant", 20, max_seconds, **arguments)


def _configure_setup(setup: BenchSetup, numbers: str, kernels: dict[str, Any]) -> BenchSetup:
    """Return a setup with another dtype and kernels; in float32 without kernels that support 16-bit numbers only."""
    if numbers == "float32":
        kernels = {name: value for name, value in kernels.items() if isinstance(value, bool) or value == "sdpa"}
    return replace(setup, bf16=numbers == "bfloat16", kernels=kernels)


def defaults_unless_set(environment: dict[str, str]) -> dict[str, str]:
    """Return `environment`, or an empty dictionary if the user has set one of its variables."""
    return {} if any(name in os.environ for name in environment) else environment


def run_benchmark(config: GpuBenchConfig) -> dict[str, Any]:
    """Run the selected phases, writing the report after each job; return all results; InputError for flags or device."""
    report.check_positive(config, "seconds")
    models = select_preset(config).speed
    for name in config.models:
        if name not in models:
            raise InputError(f"--models {name}: expected some of {', '.join(models)}")
    parse_kernel_flags(config)
    output, is_host = Path(config.output), config.device == "cpu"
    log = output.with_suffix(".log")
    for path in (output, output.with_suffix(".md"), log):
        check_output_file(path, "--output")
    create_parent_dir(output, "--output")
    with contextlib.ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log.write_bytes(b"")
        device_pool = stack.enter_context(
            WorkerPool(HOST_ENVIRONMENT if is_host else defaults_unless_set(DEVICE_ENVIRONMENT), fresh=not is_host, log=log)
        )
        # With --device cpu, one pool serves as both.
        host_pool = device_pool if is_host else stack.enter_context(WorkerPool(HOST_ENVIRONMENT, fresh=False, log=log))
        benchmark = Benchmark(config, folder, device_pool, host_pool)
        if not benchmark.run_phase("machine", device_pool, "worker.describe_device", 0, 60):
            raise InputError(f"the device cannot be used: {benchmark.results['phases']['machine']['ended']}; see {log}")
        device_results = benchmark.results["device"]
        if not is_host and device_results["backend"] == "cpu":
            raise InputError("no accelerator found; test the benchmark without one with --device cpu --small")
        print_rank_0(f"{device_results['name']}, torch {device_results['torch']}; {config.seconds:.0f} s for all phases")
        benchmark.run_phases()
    return benchmark.results


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `benchmarks/gpu.sh`: run the phases, write JSON, Markdown and log files, and print the tables."""
    silence_libraries()
    config = flags.parse(GpuBenchConfig, argv, prog="benchmarks/gpu.sh", description=DESCRIPTION)
    results = run_benchmark(config)
    print(format_table(results))
    print_rank_0(f"{config.output}: written after {results['seconds']:.0f} s, with the table next to it")
