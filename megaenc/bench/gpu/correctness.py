"""Comparison of an accelerator's loss, gradients and short runs with the host's.

The reference of gradients is float32 on the host with the same bfloat16-rounded weights and documents, through torch's scaled dot
product attention per document. Weights are larger than initial weights, whose nearly uniform attention would hide mask errors.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaenc.bench.gpu import synthetic
from megaenc.bench.gpu.presets import CLM, MLM
from megaenc.bench.gpu.worker import JobResult
from megaenc.bench.synthetic_docs import BenchSetup
from megaenc.training.engine import Engine
from megaenc.training.micro_batches import MicroBatchSpec

OBJECTIVES = (CLM, MLM)
# Relative error of the loss, and relative norm error of the worst parameter's gradient.
TOLERANCE = {"float32": {"loss": 1e-5, "gradient": 1e-3}, "bfloat16": {"loss": 1e-3, "gradient": 5e-2}}
FP8_FACTOR = 5.0  # factor of tolerances with 8-bit matrix products
LossAndGradients = tuple[float, dict[str, torch.Tensor]]


def build_engine(setup: BenchSetup, backend: Any) -> Engine:
    """Return an Engine on synthetic documents for CLM and MLM, with weights rounded to bfloat16 in any dtype."""
    engine = Engine(synthetic.build_plan(setup, *OBJECTIVES), backend)
    with torch.no_grad():
        for parameter in synthetic.unwrap_encoder(engine).parameters():
            parameter.copy_(parameter.bfloat16())
    return engine


def compute_gradients(engine: Engine, setup: BenchSetup, text: str, packs: int) -> LossAndGradients:
    """Return (mean loss of packs 0 to `packs` - 1, the summed loss's gradient by parameter, float32 on the host)."""
    objective, seed = setup.parse_objective(text), engine.plan.settings.seed
    with engine.no_grad_reduction():
        loss, _ = engine.local_loss_and_grad_norm(range(packs), objective)
        parameters = synthetic.unwrap_encoder(engine).named_parameters()
        gradients = {name: parameter.main_grad.to("cpu", torch.float32, copy=True) for name, parameter in parameters}
    batch = MicroBatchSpec(engine.plan.packs, tuple(range(packs)), objective, seed).build(torch.device("cpu"))
    return loss / batch.labels.numel(), gradients


def write_reference(setups: dict[str, BenchSetup], packs: int, folder: Path, deadline: float) -> Iterator[JobResult]:
    """Write loss and gradients of each setup and objective to "HEAD_DIM OBJECTIVE.pt" in `folder`; then yield a label."""
    for file, _, _, _, result in _iter_gradients(setups, packs, folder):
        torch.save(result, file)
    yield ["correctness", "reference"], "float32 on the host"


def compare_with_reference(setups: dict[str, BenchSetup], packs: int, folder: Path, deadline: float) -> Iterator[JobResult]:
    """Yield the rows so far that compare loss and gradients of each setup and objective with the files in `folder`."""
    rows: list[dict[str, Any]] = []
    for file, setup, text, engine, result in _iter_gradients(setups, packs, folder):
        comparison = compare_gradients(setup, text, result, torch.load(file, weights_only=True))
        rows.append(comparison | {"kernels": dataclasses.asdict(engine.kernels), "fused": engine.fused_kernels})
        yield ["correctness", "rows"], rows


def _iter_gradients(
    setups: dict[str, BenchSetup], packs: int, folder: Path
) -> Iterator[tuple[Path, BenchSetup, str, Engine, LossAndGradients]]:
    """Yield reference file, setup, objective, engine and computed loss and gradients for each setup and objective."""
    backend = synthetic.init_process()
    for name, setup in setups.items():
        engine = build_engine(setup, backend)
        for text in OBJECTIVES:
            yield folder / f"{name.split()[0]} {text}.pt", setup, text, engine, compute_gradients(engine, setup, text, packs)
    synthetic.destroy_process()


def compare_gradients(setup: BenchSetup, text: str, actual: LossAndGradients, expected: LossAndGradients) -> dict[str, Any]:
    """Return a row with the errors of loss and worst gradient, the tolerances, and whether both are within them."""
    kind = "bfloat16" if setup.bf16 else "float32"
    factor = FP8_FACTOR if setup.kernels.get("fp8_format") else 1.0
    allowed = {key: factor * tolerance for key, tolerance in TOLERANCE[kind].items()}
    (loss, gradient), (expected_loss, expected_gradients) = actual, expected
    errors = {name: relative_error(gradient[name], expected_gradients[name]) for name in expected_gradients if name in gradient}
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
        "not_compared": sorted(set(expected_gradients) ^ set(gradient)),
        "allowed": allowed,
        "passed": loss_error <= allowed["loss"] and errors[worst] <= allowed["gradient"],
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`, in float64; infinite if `expected` is zero."""
    norm = float(torch.linalg.vector_norm(expected.double()))
    return float(torch.linalg.vector_norm(actual.double() - expected.double())) / norm if norm else float("inf")


def run_losses(setups: dict[str, BenchSetup], packs: int, steps: int, deadline: float) -> Iterator[JobResult]:
    """Yield each setup's losses of `steps` steps of two micro-batches of `packs` packs, CLM then MLM; no time limit."""
    for name, setup in setups.items():
        engine = Engine(synthetic.build_plan(setup, *OBJECTIVES), synthetic.init_process())
        losses: list[float] = []
        for step in range(1, steps + 1):
            if (step - 1) % max(1, steps // 2) == 0:
                synthetic.configure_batches(engine, setup, CLM if step <= steps // 2 else MLM, packs, 2)
            losses.append(engine.train_step(step).metrics.loss)
        synthetic.destroy_process()
        yield ["parity", name], losses
