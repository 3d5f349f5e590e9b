"""Loss and gradients of one micro-batch, and the losses of a short run, beside those of the host.

The gradients' reference is float32 on the host: the same weights, rounded to bfloat16, and the same documents through torch's
scaled dot product, document by document. Weights are larger than a new model's, which would look at all tokens alike and tell no
mask from another.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaenc.bench.gpu import synthetic
from megaenc.bench.gpu.presets import CLM, MLM
from megaenc.bench.gpu.worker import Finding
from megaenc.bench.synthetic_docs import Setup
from megaenc.training.engine import Engine
from megaenc.training.micro_batches import MicroBatchSpec

OBJECTIVES = (CLM, MLM)
# Largest errors: of the loss, relative; of the gradient of the worst parameter, norm of the difference over norm.
TOLERANCE = {"float32": {"loss": 1e-5, "gradient": 1e-3}, "bfloat16": {"loss": 1e-3, "gradient": 5e-2}}
FP8_TIMES = 5.0  # more than that is allowed where products are of 8-bit numbers
Found = tuple[float, dict[str, torch.Tensor]]


def engine_for(setup: Setup, backend: Any) -> Engine:
    """Return a model whose weights are numbers of bfloat16, whatever it computes in."""
    engine = Engine(synthetic.plan_of(setup, *OBJECTIVES), backend)
    with torch.no_grad():
        for parameter in synthetic.encoder_of(engine).parameters():
            parameter.copy_(parameter.bfloat16())
    return engine


def gradients(engine: Engine, setup: Setup, text: str, packs: int) -> Found:
    """Return the mean loss over `packs` packs and, by parameter, the gradient of the summed one, float32 on the host."""
    objective, seed = setup.objective_of(text), engine.plan.settings.seed
    with engine.no_grad_reduction():
        loss, _ = engine.local_grad_norm(range(packs), objective)
        parameters = synthetic.encoder_of(engine).named_parameters()
        found = {name: parameter.main_grad.to("cpu", torch.float32, copy=True) for name, parameter in parameters}
    batch = MicroBatchSpec(engine.plan.packs, tuple(range(packs)), objective, seed).build(torch.device("cpu"))
    return loss / batch.labels.numel(), found


def reference(setups: dict[str, Setup], packs: int, folder: Path, deadline: float) -> Iterator[Finding]:
    """Write what the host finds to `folder`; `setups` by the width of a head, in float32."""
    for file, _, _, _, found in _each(setups, packs, folder):
        torch.save(found, file)
    yield ["correctness", "reference"], "float32 on the host"


def compared(setups: dict[str, Setup], packs: int, folder: Path, deadline: float) -> Iterator[Finding]:
    """Yield rows for each of `setups` (by the width of a head and a word), in the numbers that it says."""
    rows: list[dict[str, Any]] = []
    for file, setup, text, engine, found in _each(setups, packs, folder):
        here = row(setup, text, found, torch.load(file, weights_only=True))
        rows.append(here | {"kernels": dataclasses.asdict(engine.kernels), "fused": engine.fused_kernels})
        yield ["correctness", "rows"], rows


def _each(setups: dict[str, Setup], packs: int, folder: Path) -> Iterator[tuple[Path, Setup, str, Engine, Found]]:
    """Yield the gradients for each model and objective, and the file of the reference's."""
    backend = synthetic.begin()
    for name, setup in setups.items():
        engine = engine_for(setup, backend)
        for text in OBJECTIVES:
            yield folder / f"{name.split()[0]} {text}.pt", setup, text, engine, gradients(engine, setup, text, packs)
    synthetic.end()


def row(setup: Setup, text: str, found: Found, expected: Found) -> dict[str, Any]:
    """Return what the errors are and whether they are small enough."""
    kind = "bfloat16" if setup.bf16 else "float32"
    times = FP8_TIMES if setup.kernels.get("fp8_format") else 1.0
    allowed = {what: times * tolerance for what, tolerance in TOLERANCE[kind].items()}
    (loss, gradient), (right, correct) = found, expected
    errors = {name: error(gradient[name], correct[name]) for name in correct if name in gradient}
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))
    loss_error = abs(loss - right) / abs(right)
    return {
        "head_dim": setup.shape.head_dim,
        "attention": str(setup.objective_of(text).attention),
        "numbers": kind,
        "loss": loss,
        "reference_loss": right,
        "loss_error": loss_error,
        "gradient_error": errors[worst],
        "worst_parameter": worst,
        "not_compared": sorted(set(correct) ^ set(gradient)),
        "allowed": allowed,
        "passed": loss_error <= allowed["loss"] and errors[worst] <= allowed["gradient"],
    }


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the difference's norm over the norm, in float64; infinite where that is 0, since every parameter has a gradient."""
    norm = float(torch.linalg.vector_norm(expected.double()))
    return float(torch.linalg.vector_norm(found.double() - expected.double())) / norm if norm else float("inf")


def run_losses(setups: dict[str, Setup], packs: int, updates: int, deadline: float) -> Iterator[Finding]:
    """Yield the losses of `updates` updates, each of two micro-batches of `packs` packs: causal first, bidirectional then."""
    for name, setup in setups.items():
        engine = Engine(synthetic.plan_of(setup, *OBJECTIVES), synthetic.begin())
        found: list[float] = []
        for step in range(1, updates + 1):
            if (step - 1) % max(1, updates // 2) == 0:
                synthetic.configure_batches(engine, setup, CLM if step <= updates // 2 else MLM, packs, 2)
            found.append(engine.train_step(step).result.loss)
        synthetic.end()
        yield ["parity", name], found
