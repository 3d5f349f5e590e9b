"""Check the correctness and measure the speed of one accelerator.

    benchmarks/gpu.sh --output gpu

machine: the device, its rate of a large matrix product and of a copy. correctness: loss and
gradients of a micro-batch against float32 on the host, for causal and bidirectional attention and
heads of 64 and 96. speed: training of the 1b, 610m and 210m models, MLM 40 % and CLM, on documents
of 12 to 2,048 tokens in micro-batches that fill the memory; where the time of a step goes; how
often the host waits for the device. peer: transformers and megaenc on the same documents, 610m
under MLM.

Each figure is printed and written to the output directory as soon as it is measured: results.jsonl
holds all values, results.txt the printed lines, libraries.log what libraries print. --seconds is
the time that is measured: starting and compiling do not count.
"""

import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

NEEDED = {
    "torch": "torch (2.11 or later, of the accelerator's own index)",
    "numpy": "numpy",
    "psutil": "psutil",
    "yaml": "PyYAML",
    "tyro": "tyro",
    "docstring_parser": "docstring-parser",
    "typeguard": "typeguard",
    "rich": "rich",
    "packaging": "packaging",
    "megatron": "megatron-core==0.16.1",
}
"""Packages by module, so that a bare machine gets one line for all that it lacks."""
if missing := [
    package for module, package in NEEDED.items() if not importlib.util.find_spec(module)
]:
    print(
        f"error: not installed: {', '.join(missing)}; see benchmarks/gpu.sh --help", file=sys.stderr
    )
    sys.exit(2)

import common  # noqa: E402
import synthetic  # noqa: E402
import work  # noqa: E402
from synthetic import BenchSetup  # noqa: E402

from megaenc import flags  # noqa: E402
from megaenc.backend.parallel_config import KernelConfig  # noqa: E402
from megaenc.console import capture_messages, print_rank_0, silence_libraries  # noqa: E402
from megaenc.errors import InputError, handle_command_errors  # noqa: E402
from megaenc.model.config import PRESETS, ModelConfig  # noqa: E402
from megaenc.output_paths import create_parent_dir  # noqa: E402
from megaenc.processes import exit_on_sigterm  # noqa: E402

if TYPE_CHECKING:
    import torch

    from megaenc.objectives import Objective
    from megaenc.training.engine import Engine

CLM = "clm"
MLM = "mlm(mask=0.4)"
PARTS = ("correctness", "speed", "peer")
PROCESS_SECONDS = 600.0
"""Time after which a part hangs."""
# Expandable segments reduce fragmentation by micro-batches of varying sizes. The second name is for
# older torch.
DEVICE_ENVIRONMENT = {
    name: "expandable_segments:True" for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
}
HOST_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class GpuBenchConfig:
    """Flags of `benchmarks/gpu.sh`: output, device, parts, time, models and kernels."""

    output: str = "gpu"
    """directory for results.jsonl, results.txt and libraries.log; results are added to those of an
    earlier call"""
    device: Literal["auto", "cpu"] = "auto"
    """auto: the first accelerator; cpu: this machine's CPU"""
    small: bool = False
    """run everything in miniature, as a test of the benchmark; its speeds are meaningless"""
    parts: tuple[Literal["correctness", "speed", "peer"], ...] = PARTS
    """parts to run, after the machine"""
    seconds: float = 8.0
    """seconds that each model and objective is measured"""
    models: tuple[str, ...] = ()
    """models of the part speed (default: 1b 610m 210m)"""
    kernels: tuple[str, ...] = ()
    """kernels of all parts as FIELD=VALUE, such as attention_backend=sdpa (default: those of a
    run)"""


@dataclass(frozen=True)
class BenchPreset:
    """Sizes of the parts."""

    correctness: Mapping[str, BenchSetup]
    """Model for each head dimension."""
    speed: Mapping[str, BenchSetup]
    peer: str
    """Model of the part peer."""
    micro_batches: int
    """Micro-batches of a step."""
    packs: int
    """Packs of a micro-batch; 0 fills the device memory."""
    documents: int
    """Documents of the part peer."""
    passes: int
    """Passes over them."""
    square: int
    """Rows of the large matrix product."""


def _setups_by_head_dim(
    heads: int, groups: int, layers: int, vocab_size: int, seq_length: int
) -> Mapping[str, BenchSetup]:
    """Return a model for each head dimension.

    Weights preserve the scale of activations, so that attention scores differ between tokens:
    initial weights, whose attention is nearly uniform, would hide faults of masks.
    """
    setups = {}
    for width in (64, 96):
        hidden = heads * width
        shape = ModelConfig(
            layers, hidden, 8 * hidden // 3 // 16 * 16, heads, groups, init_method_std=hidden**-0.5
        )
        setups[str(width)] = BenchSetup(shape=shape, vocab_size=vocab_size, seq_length=seq_length)
    return setups


FULL = BenchPreset(
    # Not a multiple of 128, to test padding
    correctness=_setups_by_head_dim(6, 2, 2, vocab_size=2000, seq_length=2048),
    speed={
        name: BenchSetup(
            shape=PRESETS[name], vocab_size=128256, seq_length=2048, learning_rate=1e-6
        )
        for name in ("1b", "610m", "210m")
    },
    peer="610m",
    micro_batches=4,
    packs=0,
    documents=64,
    passes=3,
    square=8192,
)
_MINIATURE = ModelConfig(2, 128, 256, 2, 1)
SMALL = BenchPreset(
    correctness=_setups_by_head_dim(3, 1, 1, vocab_size=500, seq_length=96),
    speed={
        "miniature": BenchSetup(
            shape=_MINIATURE, vocab_size=500, seq_length=128, learning_rate=1e-6
        )
    },
    peer="miniature",
    micro_batches=2,
    packs=2,
    documents=8,
    passes=1,
    square=256,
)


@dataclass(frozen=True)
class Job:
    """What a part needs to know in its own process."""

    directory: str
    """Directory of the results."""
    scratch: str
    """Directory of files that parts leave for each other."""
    small: bool
    kernels: dict[str, Any]
    """Fields of KernelConfig that differ from the defaults."""
    seconds: float
    """Seconds of measuring."""
    bf16: bool = True
    """Whether the device has bfloat16."""
    model: str = ""
    """Model of the part speed."""

    @property
    def preset(self) -> BenchPreset:
        """Return the sizes."""
        return SMALL if self.small else FULL

    def report(self, line: str, kind: str, **values: Any) -> None:
        """Print a line, and add it and its values to the results."""
        with open(Path(self.directory, "results.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")
        with open(Path(self.directory, "results.txt"), "a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


# ---- kernels ------------------------------------------------------------------------------------


def parse_kernels(words: Sequence[str]) -> dict[str, Any]:
    """Return the KernelConfig fields that FIELD=VALUE words set, by name.

    Raises:
        InputError: A word is no field with one of its values.
    """
    values = {name: _allowed_values(hint) for name, hint in get_type_hints(KernelConfig).items()}
    kernels: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        name = name.replace("-", "_")
        if name not in values or not text:
            raise InputError(
                f"--kernels {word}: expected FIELD=VALUE with FIELD one of {', '.join(values)}"
            )
        allowed = {str(value).lower(): value for value in values[name]}
        if text.lower() not in allowed:
            raise InputError(f"--kernels {word}: expected one of {', '.join(allowed)}")
        kernels[name] = allowed[text.lower()]
    return kernels


def _allowed_values(hint: Any) -> tuple[Any, ...]:
    """Return all values of a type hint of booleans, literals and None."""
    if hint is bool:
        return True, False
    if hint is NoneType:
        return (None,)
    return tuple(value for part in get_args(hint) for value in (_allowed_values(part) or (part,)))


def reference_kernels() -> dict[str, Any]:
    """Return the KernelConfig fields that select torch's own operations.

    They are the reference of all checks.
    """
    switches = [name for name, hint in get_type_hints(KernelConfig).items() if hint is bool]
    return {"attention_backend": "sdpa"} | dict.fromkeys(switches, False)


def configure_setup(setup: BenchSetup, bf16: bool, kernels: dict[str, Any]) -> BenchSetup:
    """Return a setup with another dtype and kernels.

    In float32 kernels that support 16-bit numbers only are left out.
    """
    if not bf16:
        kernels = {
            name: value
            for name, value in kernels.items()
            if isinstance(value, bool) or value == "sdpa"
        }
    return replace(setup, bf16=bf16, kernels=kernels)


# ---- machine ------------------------------------------------------------------------------------


def measure_machine(job: Job) -> dict[str, Any]:
    """Report the device and its rates.

    Returns:
        Whether it is a CPU, and whether it has bfloat16.
    """
    import torch
    from gemm_shapes import Stopwatch, measure_references

    from megaenc.backend import detect_backend

    backend = detect_backend()
    about = {
        "backend": backend.name,
        "name": backend.description,
        "bf16": backend.has_bf16,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if not backend.is_cpu:
        about["peak_bf16"] = backend.peak_flops(torch.bfloat16)
        about["memory"] = torch.cuda.get_device_properties(0).total_memory
    square, copy = measure_references(
        job.preset.square, Stopwatch(backend.device, 0.5), backend.device
    )
    line = (
        f"{about['name']}, torch {about['torch']}: a large product {square:.3g} TFLOP/s, a copy "
        f"{copy:.3g} TB/s"
    )
    rates = {"square_tflops": square, "copy_terabytes_per_second": copy}
    job.report(
        line,
        "machine",
        machine=common.describe_machine(),
        device=about,
        kernels=job.kernels,
        **rates,
    )
    return {"is_cpu": backend.is_cpu, "bf16": backend.has_bf16}


# ---- correctness --------------------------------------------------------------------------------

OBJECTIVES = (CLM, MLM)
PACKS = 2
# Relative error of the loss, and relative norm error of the worst parameter's gradient.
TOLERANCE = {
    "float32": {"loss": 1e-5, "gradient": 1e-3},
    "bfloat16": {"loss": 1e-3, "gradient": 5e-2},
}
FP8_FACTOR = 5.0  # factor of tolerances with 8-bit matrix products
LossAndGradients = tuple[float, dict[str, "torch.Tensor"]]


def build_engine(setup: BenchSetup, backend: Any) -> "Engine":
    """Return an Engine on synthetic documents for CLM and MLM.

    Weights are rounded to bfloat16 in any dtype.
    """
    import torch

    from megaenc.training.engine import Engine

    engine = Engine(synthetic.build_packed_plan(setup, *OBJECTIVES), backend)
    with torch.no_grad():
        for parameter in synthetic.unwrap_encoder(engine).parameters():
            parameter.copy_(parameter.bfloat16())
    return engine


def compute_gradients(engine: "Engine", setup: BenchSetup, text: str) -> LossAndGradients:
    """Return the mean loss of the first packs, and the gradients of its sum.

    Gradients are float32 on the host, by parameter.
    """
    import torch

    from megaenc.training.micro_batches import MicroBatchSpec

    objective = setup.parse_objective(text)
    with engine.no_grad_reduction():
        loss, _ = engine.local_loss_and_grad_norm(range(PACKS), objective)
        parameters = synthetic.unwrap_encoder(engine).named_parameters()
        gradients = {
            name: parameter.main_grad.to("cpu", torch.float32, copy=True)
            for name, parameter in parameters
        }
    spec = MicroBatchSpec(
        engine.plan.packs, tuple(range(PACKS)), objective, engine.plan.settings.seed
    )
    return loss / spec.build(torch.device("cpu")).predictions.labels.numel(), gradients


def iter_gradients(
    setups: Sequence[BenchSetup], scratch: str
) -> Iterator[tuple[Path, BenchSetup, str, LossAndGradients]]:
    """Yield loss and gradients for each setup and objective, with the reference file."""
    backend = synthetic.init_process()
    for setup in setups:
        engine = build_engine(setup, backend)
        for text in OBJECTIVES:
            yield (
                Path(scratch, f"{setup.shape.head_dim} {text}.pt"),
                setup,
                text,
                compute_gradients(engine, setup, text),
            )
    synthetic.destroy_process()


def write_reference(job: Job) -> None:
    """Write loss and gradients of each setup and objective in float32.

    They are computed by torch's own operations.
    """
    import torch

    setups = [
        configure_setup(setup, False, reference_kernels())
        for setup in job.preset.correctness.values()
    ]
    for file, _, _, result in iter_gradients(setups, job.scratch):
        torch.save(result, file)


def check_correctness(job: Job) -> None:
    """Report how far loss and gradients are from the files of `write_reference`.

    There is a comparison for each setup and objective.
    """
    import torch

    models = job.preset.correctness.values()
    setups = [
        configure_setup(setup, bf16, job.kernels) for bf16 in (False, True) for setup in models
    ]
    for file, setup, text, result in iter_gradients(setups, job.scratch):
        row = compare_gradients(setup, text, result, torch.load(file, weights_only=True))
        line = (
            f"correctness, {row['attention']}, heads of {row['head_dim']}, {row['numbers']}: "
            f"{'passed' if row['passed'] else 'FAILED'}, loss off by {row['loss_error']:.1e}, "
            f"gradient of {row['worst_parameter']} by {row['gradient_error']:.1e}"
        )
        job.report(line, "correctness", **row)


def compare_gradients(
    setup: BenchSetup, text: str, actual: LossAndGradients, expected: LossAndGradients
) -> dict[str, Any]:
    """Return a row with the errors of loss and worst gradient, and their tolerances.

    It also has whether both are within them.
    """
    kind = "bfloat16" if setup.bf16 else "float32"
    factor = FP8_FACTOR if setup.kernels.get("fp8_format") else 1.0
    allowed = {key: factor * tolerance for key, tolerance in TOLERANCE[kind].items()}
    loss, gradients = actual
    expected_loss, expected_gradients = expected
    errors = {}
    for name in expected_gradients.keys() & gradients.keys():
        errors[name] = relative_error(gradients[name], expected_gradients[name])
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    loss_error = abs(loss - expected_loss) / abs(expected_loss)
    return {
        "head_dim": setup.shape.head_dim,
        "attention": str(setup.parse_objective(text).attention),
        "numbers": kind,
        "loss": loss,
        "reference_loss": expected_loss,
        "loss_error": loss_error,
        "gradient_error": errors[worst],
        "worst_parameter": worst,
        "not_compared": sorted(expected_gradients.keys() ^ gradients.keys()),
        "allowed": allowed,
        "passed": loss_error <= allowed["loss"] and errors[worst] <= allowed["gradient"],
    }


def relative_error(actual: "torch.Tensor", expected: "torch.Tensor") -> float:
    """Return the norm of the difference over the norm of `expected`, in float64.

    It is infinite if `expected` is zero.
    """
    norm = float(expected.double().norm())
    return float((actual.double() - expected.double()).norm()) / norm if norm else float("inf")


# ---- speed --------------------------------------------------------------------------------------


@dataclass
class SpeedMeasurement:
    """Speed measurement of an engine; shrinks micro-batches when out of memory."""

    engine: "Engine"
    setup: BenchSetup
    peak_flops: float
    micro_batches: int
    seconds: float
    packs: int = 1
    steps: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def fill_memory(self, objectives: Sequence[str]) -> None:
        """Set `packs` to the largest micro-batch that fits under all objectives."""
        from megaenc.training.distributed.largest_batch import (
            find_largest_batch,
            largest_indexable,
            measure_room,
        )

        synthetic.configure_batches(self.engine, self.setup, objectives[0], 1, 1)
        self.engine.train_step(next(self.steps))  # allocates the optimizer state
        if self.engine.device.type != "cpu":
            candidates = range(
                1, max(1, largest_indexable(self.setup.shape, self.setup.seq_length)) + 1
            )
            self.packs = find_largest_batch(
                self.engine,
                list(map(self.setup.parse_objective, objectives)),
                candidates,
                measure_room(),
            )

    def measure(self, objective: str) -> dict[str, Any]:
        """Return an objective's speed row; reduce `packs` if out of memory.

        The row has tokens/s, FLOP/s, memory and loss.
        """
        import torch

        from megaenc.training.distributed.largest_batch import discard_batch

        while True:
            try:
                synthetic.configure_batches(
                    self.engine, self.setup, objective, self.packs, self.micro_batches
                )
                return self._measure_once()
            except torch.OutOfMemoryError:
                if self.packs == 1:
                    raise
            discard_batch(self.engine)
            self.packs = min(self.packs - 1, int(0.9 * self.packs))

    def _measure_once(self) -> dict[str, Any]:
        """Return the speed row of the configured objective and micro-batch."""
        from megaenc.training.engine import BatchSums

        self.engine.train_step(next(self.steps))  # compiles
        synthetic.reset_peak_memory()
        results = []
        durations: list[float] = []
        while len(durations) < 3 or sum(durations) < self.seconds:
            usage: dict[str, float] = {}
            with work.measure_usage(usage):
                results.append(self.engine.train_step(next(self.steps)))
            durations.append(usage["seconds"])
        total = sum((result.metrics for result in results), BatchSums())
        tokens = len(durations) * self.micro_batches * self.packs * self.setup.seq_length
        rate = total.flops / sum(durations)
        return {
            "tokens_per_second": tokens / sum(durations),
            "tokens_per_second_of_steps": common.summarize(
                [tokens / len(durations) / each for each in durations]
            ),
            "flops_per_second": rate,
            "flops_per_step": total.flops / len(durations),
            "attention_flops_per_step": self.engine.attention_flops(next(self.steps)),
            "model_flops_utilization": rate / self.peak_flops if self.peak_flops else None,
            "peak_memory": work.peak_memory(),
            "packs": self.packs,
            "micro_batches": self.micro_batches,
            "steps": len(durations),
            "seconds_per_step": sum(durations) / len(durations),
            "predicted": total.predicted / len(durations),
            "loss": total.loss,
            "finite": all(result.is_applied for result in results),
            "kernels": self.engine.kernel_metadata,
        }


def measure_speed(job: Job) -> None:
    """Report speed and time by group of both objectives, then the host's waits."""
    import torch

    engine_class = build_profiled_engine()
    setup = replace(job.preset.speed[job.model], bf16=job.bf16, kernels=job.kernels)
    backend = synthetic.init_process()
    engine = synthetic.build_random_engine(
        synthetic.build_packed_plan(setup, *OBJECTIVES), backend, engine_class
    )
    peak = backend.peak_flops(torch.bfloat16 if setup.bf16 else torch.float32)
    measurement = SpeedMeasurement(engine, setup, peak, job.preset.micro_batches, job.seconds)
    if job.preset.packs:
        measurement.packs = job.preset.packs
    else:
        measurement.fill_memory(OBJECTIVES)
    for objective in (MLM, CLM):
        row = measurement.measure(objective)
        job.report(
            format_speed(job.model, objective, row),
            "speed",
            model=job.model,
            objective=objective,
            **row,
        )
        breakdown = profile_steps(engine, measurement.steps, row)
        line = f"  {', '.join(breakdown['text'])}"
        job.report(line, "breakdown", model=job.model, objective=objective, **breakdown)
    waits = count_synchronizations(engine, setup.parse_objective(MLM))
    if waits:
        line = (
            f"  the host waits for the device {waits['of_a_micro_batch']:.0f} times in a "
            "micro-batch"
        )
        job.report(line, "synchronizations", model=job.model, **waits)
    synthetic.destroy_process()


def format_speed(model: str, objective: str, row: dict[str, Any]) -> str:
    """Return a speed row as a line."""
    utilization = row["model_flops_utilization"]
    share = "" if utilization is None else f" ({100 * utilization:.1f} % of the peak)"
    fused = [name for name, is_fused in row["kernels"]["fused"].items() if is_fused]
    return (
        f"{model}, {objective}: {row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['flops_per_second'] / 1e12:.3g} TFLOP/s{share}, "
        f"{row['peak_memory'] / 2**30:.1f} GiB, {row['micro_batches']} x {row['packs']} packs, "
        f"loss {row['loss']:.3f}"
        f"{'' if row['finite'] else ' NOT FINITE'}; attention by {row['kernels']['attention']}, "
        f"fused: {', '.join(fused) or 'none'}"
        f"{', fp8 ' + row['kernels']['fp8_format'] if row['kernels']['fp8_format'] else ''}"
    )


# ---- where the time of a step goes --------------------------------------------------------------

MATMUL = "matrix products"
FORWARD = "attention forward"
BACKWARD = "attention backward"
ELEMENTWISE = "elementwise"
LOSS = "loss"
OPTIMIZER = "optimizer"
BUFFERS = "gradient buffers"
COMMUNICATION = "communication"
IDLE = "idle"
# The order matters: flash attention kernels are also named cutlass, and backward kernels contain
# forward names.
KERNEL_NAMES = (
    (ELEMENTWISE, r"norm_(forward|backward)_kernel|rotary|glu_(forward|backward)"),
    (COMMUNICATION, r"nccl|rccl|msccl|gloo:|c10d::"),
    (
        BACKWARD,
        r"flash_bwd|FlashAttnBwd|flash_bprop|sdpa\w*bprop|fmha_cutlassB|fmha\w*bwd|FmhaBwd|bwd_kernel_(dk|dq|fuse)|bwd_preprocess|"
        r"attn\w*bwd|dot_do_o|convert_dq|attention\w*_backward|_AttentionBackward",
    ),
    (
        FORWARD,
        r"flash_fwd|FlashAttnFwd|flash_fprop|sdpa\w*fprop|fmha_cutlassF|fmha\w*fwd|FmhaFwd|attn_fwd|attn\w*fwd|"
        r"scaled_dot_product|varlen_attn|^_Attention\b",
    ),
    (OPTIMIZER, r"[aA]dam|multi_tensor_(apply|l2norm|scale)|LpNormFunctor"),
    (LOSS, r"cross_entropy|SoftMax|softmax|nll_loss|logsumexp|(?<![a-z])loss"),
    (
        MATMUL,
        r"gemm|gemv|nvjet|cutlass|Cijk_|splitK|triton_(tem_fused_)?(mm|bmm)|"
        r"^aten::(mm|addmm|addmm_|bmm|baddbmm|mv|_scaled_mm|mkldnn\w*)$|^mkldnn",
    ),
    (
        BUFFERS,
        r"Memcpy|Memset|copyBuffer|fillBuffer|FillFunctor|CUDAFunctor_?[aA]dd<float>|copy_kernel|"
        r"^aten::(copy_|zero_|fill_|clone|_to_copy)$",
    ),
)
GROUPS = (MATMUL, FORWARD, BACKWARD, ELEMENTWISE, LOSS, OPTIMIZER, BUFFERS, COMMUNICATION, IDLE)
PROFILED_STEPS = 2
MAX_KERNELS = 12  # kernels listed in the results

KernelEvent = namedtuple("KernelEvent", "name start_ns seconds")
"""Executed kernel: name, start in ns of the system clock, and duration in seconds."""
TimeWindow = namedtuple("TimeWindow", "group start_ns end_ns")
"""Time window in ns in which the host worked for one group."""


def classify_kernel(name: str) -> str:
    """Return the group of a kernel or host operation by its name.

    It is the elementwise group if no pattern matches.
    """
    return next((group for group, pattern in KERNEL_NAMES if re.search(pattern, name)), ELEMENTWISE)


def sum_by_group(events: Sequence[KernelEvent], windows: Sequence[TimeWindow]) -> dict[str, float]:
    """Return seconds by group.

    Products, attention and communication are grouped by kernel name, others by time window, else by
    name.
    """
    seconds = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        group = classify_kernel(event.name)
        if group not in (MATMUL, FORWARD, BACKWARD, COMMUNICATION):
            group = next(
                (
                    window.group
                    for window in windows
                    if window.start_ns <= event.start_ns <= window.end_ns
                ),
                group,
            )
        seconds[group] += event.seconds
    return seconds


def build_profiled_engine() -> "type[Engine]":
    """Return an Engine class that records the time windows of a step's parts.

    They are those of loss, gradient clearing and optimizer.
    """
    import torch

    from megaenc.training.engine import Engine

    class ProfiledEngine(Engine):
        """Engine that appends its windows to `windows`, if that is a list.

        It synchronizes the accelerator around each window, so that kernels can be assigned to
        windows by time.
        """

        windows: list[TimeWindow] | None = None

        def __init__(self, *args: Any, **others: Any) -> None:
            super().__init__(*args, **others)
            head = synthetic.unwrap_encoder(self).output_layer
            head.forward = self._window(LOSS)(head.forward)
            self.zero_grad = self._window(BUFFERS)(self.zero_grad)
            self._optimizer_step = self._window(OPTIMIZER)(self._optimizer_step)

        def forward_and_backward(
            self, rows: Sequence[Sequence[int]], objective: "Objective"
        ) -> None:
            """Run forward and backward of a micro-batch per row of pack numbers.

            Gradients are kept.
            """
            specs = self._list_specs(self.plan.packs, rows, objective, self.plan.settings.seed)
            self.run_micro_batches(specs, (), train=True)

        def attention_flops(self, step: int) -> int:
            """Return the FLOPs of attention in a step, forward and backward.

            They are summed over the documents of its micro-batches.
            """
            shape = self.plan.settings.shape
            batches = [spec.build(torch.device("cpu")) for spec in self.micro_batch_specs(step)]
            spans = [span for batch in batches for span in batch.spans()]
            return sum(
                shape.attention_flops(stop - begin, prefix=prefix - begin)
                for begin, prefix, stop in spans
            )

        @contextlib.contextmanager
        def _window(self, group: str) -> Iterator[None]:
            """Record the block as a time window of `group`."""
            if self.windows is None:
                yield
                return
            work.synchronize_device()
            start = time.time_ns()
            yield
            work.synchronize_device()
            self.windows.append(TimeWindow(group, start, time.time_ns()))

    return ProfiledEngine


def profile_steps(engine: Any, steps: Iterator[int], timed: dict[str, Any]) -> dict[str, Any]:
    """Profile two steps; return one's seconds and rate by group, and slow kernels.

    Idle time is the rest of the step time measured without the profiler, which slows the host;
    `timed` is the row of that measurement.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences start and stop messages
    is_host = engine.device.type == "cpu"
    engine.windows = windows = []
    with profile(
        activities=[ProfilerActivity.CPU if is_host else ProfilerActivity.CUDA]
    ) as profiled:
        for _ in range(PROFILED_STEPS):
            engine.train_step(next(steps))
        work.synchronize_device()
    engine.windows = None
    events = list(iter_kernel_events(is_host, profiled))
    seconds = {
        group: value / PROFILED_STEPS for group, value in sum_by_group(events, windows).items()
    }
    seconds[IDLE] = max(0.0, timed["seconds_per_step"] - sum(seconds.values()))
    totals: Counter[str] = Counter()
    for event in events:
        totals[event.name] += event.seconds / PROFILED_STEPS
    rates = count_work(engine, timed)
    return {
        "seconds": seconds,
        "text": format_breakdown(seconds, rates),
        "work": rates,
        "kernels": [
            (name[:160], classify_kernel(name), value)
            for name, value in totals.most_common(MAX_KERNELS)
        ],
    }


def count_work(engine: Any, timed: dict[str, Any]) -> dict[str, tuple[float, str]]:
    """Return the work of a step by group, with its unit.

    It is the FLOP of products and attention, and the bytes that the others must move. Of each
    layer's values per token: norms with their residual additions 16 H, split and rotation 4 q + 8
    k, SwiGLU 8 F; 8 bytes of each of its weights' gradients per micro-batch. Of a logit four
    values; of a parameter 30 bytes in AdamW, with the float32 gradient, moments and master weight.
    """
    settings = engine.plan.settings
    shape = settings.shape
    value_bytes = 2 if settings.bf16 else 4
    tokens = timed["packs"] * timed["micro_batches"] * settings.data.seq_length
    keys = shape.head_dim * shape.num_query_groups
    values = 16 * shape.hidden_size + 4 * shape.query_size + 8 * keys + 8 * shape.ffn_hidden_size
    vocab_size = engine.plan.vocabulary.size
    parameters = shape.parameter_count(vocab_size)
    layers = parameters - 2 * vocab_size * shape.hidden_size
    attention = timed["attention_flops_per_step"]
    return {
        MATMUL: (timed["flops_per_step"] - attention, "FLOP/s"),
        "attention": (attention, "FLOP/s"),
        ELEMENTWISE: (
            value_bytes * shape.num_layers * tokens * values + 8 * timed["micro_batches"] * layers,
            "B/s",
        ),
        LOSS: (4 * value_bytes * timed["predicted"] * vocab_size, "B/s"),
        OPTIMIZER: (30 * parameters, "B/s"),
    }


def format_breakdown(
    seconds: dict[str, float], work_by_group: dict[str, tuple[float, str]]
) -> list[str]:
    """Return each group's percentage of the time, with its rate.

    Rates are in T(FLOP or bytes) per second.
    """
    total = sum(seconds.values())
    merged = {MATMUL: seconds[MATMUL], "attention": seconds[FORWARD] + seconds[BACKWARD]}
    merged |= {
        group: value
        for group, value in seconds.items()
        if group not in (MATMUL, FORWARD, BACKWARD) and value
    }
    texts = []
    for group, value in merged.items():
        text = f"{group} {100 * value / total:.1f} %"
        if group in work_by_group and value:
            amount, unit = work_by_group[group]
            text += f" at {amount / value / 1e12:.3g} T{unit}"
        texts.append(text)
    return texts


def iter_kernel_events(is_host: bool, profiled: Any) -> Iterator[KernelEvent]:
    """Yield the accelerator's kernels with their own seconds.

    On a CPU they are the operations.
    """
    from torch.autograd import DeviceType

    first = profiled.profiler.kineto_results.trace_start_ns()
    for event in profiled.events():
        duration = event.self_cpu_time_total if is_host else event.time_range.elapsed_us()
        if (event.device_type == DeviceType.CPU) == is_host and duration > 0:
            name = ": ".join([*_iter_attention_parents(event), event.name])
            yield KernelEvent(name, first + int(1000 * event.time_range.start), duration / 1e6)


def _iter_attention_parents(event: Any) -> Iterator[str]:
    """Yield the name of the attention that a host operation is part of, if any.

    A product within attention is not a layer's.
    """
    parent = event.cpu_parent
    while parent is not None:
        if classify_kernel(parent.name) in (FORWARD, BACKWARD):
            yield parent.name
            return
        parent = parent.cpu_parent


def count_synchronizations(engine: Any, objective: "Objective") -> dict[str, Any] | None:
    """Return how often the host waits in a micro-batch, also by line; None on a CPU.

    Uses torch.cuda.set_sync_debug_mode on steps of one and of three micro-batches.
    """
    if engine.device.type == "cpu":
        return None
    few = _count_waits(engine, objective, 1)
    more = _count_waits(engine, objective, 3)
    places = {place: count / 2 for place, count in (more - few).items()}
    return {"of_a_micro_batch": sum(places.values()), "places": places}


def _count_waits(engine: Any, objective: "Objective", micro_batches: int) -> Counter[str]:
    """Return the number of host synchronizations in a step by source line.

    A line has the last three parts of its path.
    """
    import torch

    packs = engine.sampler.micro_batch_size
    rows = [range(number * packs, (number + 1) * packs) for number in range(micro_batches)]
    engine.zero_grad()
    engine.forward_and_backward(rows, objective)  # warm-up
    engine.zero_grad()
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # warns about itself too
        try:
            engine.forward_and_backward(rows, objective)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    engine.zero_grad()
    waits = [one for one in caught if "called a synchronizing" in str(one.message)]
    return Counter(f"{'/'.join(Path(one.filename).parts[-3:])}:{one.lineno}" for one in waits)


# ---- transformers -------------------------------------------------------------------------------

OURS = "megaenc"
PADDED = "transformers, padded"
SORTED = "transformers, by length"
MIN_BATCH = 4  # documents per step, below which transformers is skipped


def compare_with_transformers(job: Job) -> None:
    """Report speed, memory and loss of each contender on the same documents.

    The batch is halved until it fits.
    """
    import torch

    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("safetensors"):
        job.report("peer: left out, transformers or safetensors is not installed", "peer")
        return
    preset = job.preset
    setup = replace(preset.speed[preset.peer], bf16=job.bf16, kernels=job.kernels)
    training = work.TrainingJob(
        **vars(setup),
        objective=MLM,
        documents=preset.documents,
        batch=min(preset.documents, 32),
        passes=preset.passes,
        weights=str(Path(job.scratch, "weights.safetensors")),
    )
    deviation = training.shape.init_method_std
    work.write_weights(training, lambda encoder: synthetic.fill_random_weights(encoder, deviation))
    training = find_largest_batch_of_transformers(training)
    rows: dict[str, dict[str, Any]] = {}
    for name in (PADDED, OURS, SORTED):
        while name not in rows:
            synthetic.free_memory()
            try:
                rows[name] = measure_contender(training, name)
            except torch.OutOfMemoryError:
                if name != PADDED or training.batch <= MIN_BATCH:
                    job.report(
                        f"peer, {name}: out of memory with {training.batch} documents a step",
                        "peer",
                        name=name,
                    )
                    break
                training = replace(training, batch=training.batch // 2)
        if row := rows.get(name):
            padded = rows.get(PADDED, row)
            line = (
                f"peer, {name}: {row['tokens_per_second']:,.0f} tokens/s, "
                f"{row['tokens_per_second'] / padded['tokens_per_second']:.2f} times padded "
                "transformers, "
                f"{row['peak_memory'] / 2**30:.1f} GiB, {row['batch']} documents a step, loss "
                f"{row['loss']:.5f}"
            )
            job.report(line, "peer", model=preset.peer, name=name, **row)


def find_largest_batch_of_transformers(training: work.TrainingJob) -> work.TrainingJob:
    """Return the job with transformers' largest batch that fits and fastest attention.

    Eager attention, which keeps all attention scores, does not fit any accelerator and is not
    tried.
    """
    import torch

    kernels = ["sdpa"]
    if torch.cuda.is_available() and importlib.util.find_spec("flash_attn"):
        kernels.append("flash_attention_2")
    while training.batch >= MIN_BATCH:
        seconds: dict[str, float] = {}
        for kernel in kernels:
            trial = replace(training, kernel=kernel, documents=training.batch, passes=1)
            # Flash-attn does not support every model.
            with contextlib.suppress(torch.OutOfMemoryError, ImportError, ValueError):
                seconds[kernel] = work.train_with_transformers(trial)["seconds"]
            synthetic.free_memory()
        if seconds:
            return replace(training, kernel=min(seconds, key=seconds.__getitem__))
        training = replace(training, batch=training.batch // 2)
    raise RuntimeError(f"transformers: no batch of {MIN_BATCH} documents or more fits")


def measure_contender(training: work.TrainingJob, name: str) -> dict[str, Any]:
    """Return the speed, memory and loss of one contender."""
    synthetic.reset_peak_memory()
    training = replace(training, by_length=name == SORTED)
    documents = training.read_documents()
    if name == OURS:
        backend = synthetic.init_process()
        plan = training.build_plan(documents, training.objective, batch=training.batch)
        results = work.train_engine(synthetic.build_random_engine(plan, backend), training)
        synthetic.destroy_process()
    else:
        results = work.train_with_transformers(training)
    row = {key: results[key] for key in ("seconds", "peak_memory", "loss")}
    row["tokens_per_second"] = documents.tokens * training.passes / results["seconds"]
    return row | {"batch": training.batch, "attention": training.kernel}


# ---- all parts ----------------------------------------------------------------------------------


def run_part(arguments: tuple[Callable[[Job], Any], Job]) -> Any:
    """Call a part in this process and show megaenc's messages.

    The output of libraries goes to the log.
    """
    part, job = arguments
    log = os.open(Path(job.directory, "libraries.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    with capture_messages(lambda message: job.report(f"  {message}", "message", text=message)):
        try:
            return part(job)
        except Exception:
            traceback.print_exc()  # into the log
            raise


def run_all(config: GpuBenchConfig) -> bool:
    """Run the machine and the selected parts, each in a process of its own.

    Returns:
        Whether all ended.
    """
    preset = SMALL if config.small else FULL
    for name in config.models:
        if name not in preset.speed:
            raise InputError(f"--models {name}: expected some of {', '.join(preset.speed)}")
    common.check_positive(config, "seconds")
    kernels = parse_kernels(config.kernels)
    create_parent_dir(Path(config.output, "results.jsonl"), "--output")
    has_all_ended = True
    with exit_on_sigterm(), tempfile.TemporaryDirectory() as scratch:
        job = Job(
            config.output,
            scratch,
            config.small,
            kernels,
            config.seconds if not config.small else 0.1,
        )
        # The user's own setting of the allocator stays.
        device_environment = (
            {} if DEVICE_ENVIRONMENT.keys() & os.environ.keys() else DEVICE_ENVIRONMENT
        )
        device_environment = HOST_ENVIRONMENT if config.device == "cpu" else device_environment

        def run(
            part: Callable[[Job], Any], job: Job, environment: dict[str, str] = device_environment
        ) -> Any:
            nonlocal has_all_ended
            try:
                return common.run_processes(
                    run_part, (part, job), environment, seconds=PROCESS_SECONDS
                )[0]
            except RuntimeError as error:
                has_all_ended = False
                job.report(
                    f"{part.__name__} {job.model}: {error}",
                    "failure",
                    part=part.__name__,
                    model=job.model,
                )

        machine = run(measure_machine, job)
        if machine is None:
            raise InputError(f"the device cannot be used; see {config.output}/libraries.log")
        if config.device == "auto" and machine["is_cpu"]:
            raise InputError(
                "no accelerator found; test the benchmark without one with --device cpu --small"
            )
        job = replace(job, bf16=machine["bf16"])
        for part in PARTS:
            if part not in config.parts:
                continue
            if part == "correctness":
                run(write_reference, job, HOST_ENVIRONMENT)
                run(check_correctness, job)
            elif part == "speed":
                for model in config.models or preset.speed:
                    run(measure_speed, replace(job, model=model))
            else:
                run(compare_with_transformers, job)
    return has_all_ended


@handle_command_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark; exit code 1 if a part failed."""
    silence_libraries()
    config = flags.parse(GpuBenchConfig, argv, prog="benchmarks/gpu.sh", description=__doc__)
    has_all_ended = run_all(config)
    print_rank_0(f"{config.output}: results.jsonl, results.txt, libraries.log")
    if not has_all_ended:
        sys.exit(1)


if __name__ == "__main__":
    main()
