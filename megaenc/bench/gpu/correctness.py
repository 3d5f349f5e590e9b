"""Loss and gradients of one micro-batch, beside those of the host in float32: both masks, both widths of a head.

The host's are the reference: the same weights, rounded to bfloat16, and the same documents through torch's scaled dot product,
document by document. Weights are larger than a new model's, which would look at all tokens alike and tell no mask from another.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaenc.bench.gpu import made
from megaenc.bench.gpu.made import Setup
from megaenc.bench.gpu.sizes import CLM, MLM
from megaenc.objectives import Attention, Objective
from megaenc.randomness import SampleRandomness
from megaenc.training.engine import Engine

OBJECTIVES = (CLM, MLM)
TOLERANCE = {"float32": {"loss": 1e-5, "gradient": 1e-3}, "bfloat16": {"loss": 1e-3, "gradient": 5e-2}}
"""Largest errors: of the loss, relative; of the gradient of the worst parameter, norm of the difference over norm."""
FP8_TIMES = 5.0
"""More than that is allowed where products are of 8-bit numbers."""


def engine_for(setup: Setup, backend: Any) -> Engine:
    """A model whose weights are numbers of bfloat16, whatever it computes in."""
    engine = made.Engine(setup.plan(*OBJECTIVES), backend)
    with torch.no_grad():
        for parameter in made.encoder_of(engine).parameters():
            parameter.copy_(parameter.bfloat16())
    return engine


def gradients(engine: Engine, setup: Setup, text: str, packs: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss over `packs` packs and, by parameter, the gradient of the summed one, float32 on the host."""
    objective = setup.objective(text)
    with engine.unreduced():
        loss, _ = engine.gradient_alone(range(packs), objective)
        parameters = made.encoder_of(engine).named_parameters()
        found = {name: parameter.main_grad.to("cpu", torch.float32, copy=True) for name, parameter in parameters}
    return loss / predictions(engine, objective, packs), found


def predictions(engine: Engine, objective: Objective, packs: int) -> int:
    """Of the first `packs` packs."""
    seed, read = engine.plan.settings.seed, [engine.plan.packs[number] for number in range(packs)]
    return sum(len(objective.targets(pack, SampleRandomness(seed, pack.sample, pack.epoch)).labels) for pack in read)


def reference(setups: dict[str, Setup], packs: int, folder: Path) -> Iterator[tuple[list[str], Any]]:
    """Write what the host finds to `folder`; `setups` by the width of a head, in float32."""
    backend = made.begin()
    for width, setup in setups.items():
        engine = engine_for(setup, backend)
        for number, text in enumerate(OBJECTIVES):
            loss, found = gradients(engine, setup, text, packs)
            torch.save({"loss": loss, "gradients": found}, folder / f"{width}-{number}.pt")
    made.end()
    yield ["correctness", "reference"], "float32 on the host"


def compared(setups: dict[str, Setup], packs: int, folder: Path) -> Iterator[tuple[list[str], Any]]:
    """A row for each of `setups`, in the numbers that it says, and each objective."""
    backend = made.begin()
    rows: list[dict[str, Any]] = []
    for name, setup in setups.items():
        engine = engine_for(setup, backend)
        for number, text in enumerate(OBJECTIVES):
            expected = torch.load(folder / f"{name.split()[0]}-{number}.pt", weights_only=True)
            loss, found = gradients(engine, setup, text, packs)
            here = row(setup, text, (loss, found), (expected["loss"], expected["gradients"]))
            rows.append(here | {"kernels": made.chosen(engine), "fused": made.fused(engine)})
            yield ["correctness", "rows"], rows
    made.end()


Found = tuple[float, dict[str, torch.Tensor]]


def row(setup: Setup, text: str, found: Found, expected: Found) -> dict[str, Any]:
    """What the errors are and whether they are small enough."""
    kind = "bfloat16" if setup.bf16 else "float32"
    times = FP8_TIMES if setup.kernels.get("fp8_format") else 1.0
    allowed = {what: times * tolerance for what, tolerance in TOLERANCE[kind].items()}
    (loss, gradient), (right, correct) = found, expected
    errors = {name: error(gradient[name], correct[name]) for name in correct if name in gradient}
    others = sorted(set(correct) ^ set(gradient))
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    loss_error = abs(loss - right) / abs(right)
    causal = setup.objective(text).attention == Attention.CAUSAL
    return {
        "head_dim": setup.shape.head_dim,
        "attention": "causal" if causal else "bidirectional",
        "numbers": kind,
        "loss": loss,
        "reference_loss": right,
        "loss_error": loss_error,
        "gradient_error": errors[worst],
        "worst_parameter": worst,
        "not_compared": others,
        "allowed": allowed,
        "passed": loss_error <= allowed["loss"] and errors[worst] <= allowed["gradient"],
    }


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm, in float64; infinite where nothing was expected, since every parameter has a gradient."""
    norm = float(torch.linalg.vector_norm(expected.double()))
    return float(torch.linalg.vector_norm(found.double() - expected.double())) / norm if norm else float("inf")
