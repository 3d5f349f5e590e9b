"""Measure the matrix products and elementwise kernels of a layer on one GPU.

    python benchmarks/gemm_shapes.py --output shapes.json

Products are those of the presets' layers with micro-batches that filled an H200, forward and both
gradients, in bfloat16, with each library for them that torch offers and, with --autotune, by
torch.compile. They are compared with a large square product. Elementwise kernels are megaenc's,
compared with a copy. Each row is printed as soon as it is measured. --device cpu --packs 1 tries
the script without a GPU.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megaenc import flags
from megaenc.atomic_io import atomic_write
from megaenc.errors import InputError, handle_command_errors
from megaenc.model.config import ModelConfig, get_preset
from megaenc.output_paths import check_output_file

PACK = 2048
PACKS = {"210m": 165, "610m": 55, "1b": 34}
"""Packs of a micro-batch that filled an H200."""
LIBRARIES = ("cublas", "cublaslt")
CALLS = 5
"""Calls between two readings of the clock."""


@dataclass(frozen=True)
class GemmShapesConfig:
    """Flags of the benchmark."""

    output: str = "shapes.json"
    """JSON file for the results"""
    models: tuple[str, ...] = tuple(PACKS)
    """presets whose layers are measured"""
    packs: int | None = None
    """packs of 2,048 tokens of a micro-batch (default: 165, 55 and 34 for 210m, 610m and 1b)"""
    seconds: float = 0.2
    """time for each product or kernel"""
    square: int = 8192
    """rows and columns of the square product"""
    autotune: bool = False
    """also measure what torch.compile finds for each product, which takes minutes"""
    device: str = "cuda"
    """cuda, also for AMD, or cpu"""


class Stopwatch:
    """Timer of calls on a device."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        """Measure calls on `device`, each kind for about `seconds`."""
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._seconds = seconds

    def measure(self, call: Callable[[], Any]) -> float:
        """Return the median seconds of a call, after one that is not counted."""
        call()
        self._synchronize()
        times: list[float] = []
        while sum(times) * CALLS < self._seconds:
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            self._synchronize()
            times.append((time.perf_counter() - start) / CALLS)
        return statistics.median(times)


def measure_references(size: int, watch: Stopwatch, device: torch.device) -> tuple[float, float]:
    """Return the TFLOP/s of a square bfloat16 product, and the TB/s of a copy.

    The product has `size` rows.
    """
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product_seconds = watch.measure(lambda: square @ square)
    source = torch.empty(
        2**29 if device.type == "cuda" else 2**24, device=device, dtype=torch.bfloat16
    )
    target = torch.empty_like(source)
    copy_seconds = watch.measure(lambda: target.copy_(source))
    return 2 * size**3 / product_seconds / 1e12, 2 * source.nbytes / copy_seconds / 1e12


def build_products(
    tokens: int, inputs: int, outputs: int, device: torch.device
) -> dict[str, Callable[..., Tensor]]:
    """Return the three products of a linear layer by name; each takes no argument.

    The weight's gradient is added to a float32 buffer, as in a run.
    """
    x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
    products = {"forward": lambda: x @ weight.t(), "input's gradient": lambda: gradient @ weight}
    if device.type == "cuda":
        main = torch.zeros(outputs, inputs, device=device)
        products["weight's gradient"] = lambda: torch.addmm(
            main, gradient.t(), x, out_dtype=torch.float32, out=main
        )
    else:  # without `out_dtype`
        products["weight's gradient"] = lambda: gradient.t() @ x
    return products


def measure_products(
    config: GemmShapesConfig, watch: Stopwatch, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for each product of each model: shape, and TFLOP/s by library."""
    libraries = LIBRARIES if device.type == "cuda" and not torch.version.hip else ("default",)
    for model in config.models:
        tokens = PACK * (config.packs or PACKS.get(model, 16))
        for matrix, (outputs, inputs) in get_preset(model).linear_shapes(1).items():
            flops = 2 * tokens * inputs * outputs
            for name, call in build_products(tokens, inputs, outputs, device).items():
                rates = {}
                for library in libraries:
                    if library != "default":
                        torch.backends.cuda.preferred_blas_library(library)
                    rates[library] = flops / watch.measure(call) / 1e12
                if config.autotune:
                    compiled = torch.compile(call, mode="max-autotune-no-cudagraphs")
                    rates["compiled"] = flops / watch.measure(compiled) / 1e12
                shape = {"tokens": tokens, "inputs": inputs, "outputs": outputs}
                yield {"model": model, "matrix": matrix, "product": name, **shape, "tflops": rates}


def build_kernels(
    shape: ModelConfig, tokens: int, device: torch.device
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Return a call of each elementwise kernel and the bytes that it moves, by name.

    The kernels are megaenc's; the bytes are those that a kernel has to read and write.
    """
    from megaenc.model.kernels.cross_entropy import logits_to_gradient_, softmax_statistics
    from megaenc.model.kernels.glu import glu
    from megaenc.model.kernels.norm import layer_norm, rms_norm
    from megaenc.model.kernels.rotary import rotate

    hidden = shape.hidden_size
    ffn = shape.ffn_hidden_size
    width = shape.head_dim
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    stream = torch.randn(tokens, hidden, **options)
    residual = torch.randn(tokens, hidden, **options)
    gated = torch.randn(tokens, 2 * ffn, **options)
    heads = torch.randn(tokens, 1, shape.num_attention_heads, width, **options)
    weight = torch.ones(hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(2, tokens, 1, 1, width // 2, device=device)
    vocabulary = 128_256
    predictions = min(tokens, 4096)
    logits = torch.randn(predictions, vocabulary, device=device, dtype=torch.bfloat16)
    labels = torch.randint(vocabulary, (predictions,), device=device)
    top, total = softmax_statistics(logits, labels, 0, vocabulary)[:2]
    summed = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    gradient = torch.randn_like(gated[:, :ffn])

    def backward(outputs: Any, inputs: tuple[Tensor, ...], gradients: Any) -> None:
        torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    calls: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, norm in (("norm", rms_norm), ("layer_norm", layer_norm)):
        forward = partial(norm, stream, weight, 1e-5, residual)
        calls[f"{name} with residual, forward"] = forward, 4 * 2 * tokens * hidden
        call = partial(backward, forward(), (stream, weight, residual), (summed, summed))
        calls[f"{name} with residual, backward"] = call, 4 * 2 * tokens * hidden
    for name in ("silu", "gelu", "gelu_pytorch_tanh"):
        calls[f"gated {name}, forward"] = partial(glu, gated, name), 3 * 2 * tokens * ffn
        calls[f"gated {name}, backward"] = (
            partial(backward, glu(gated, name), (gated,), gradient),
            5 * 2 * tokens * ffn,
        )
    return calls | {
        "loss, forward": (
            lambda: softmax_statistics(logits, labels, 0, vocabulary),
            2 * logits.numel(),
        ),
        "loss, gradient": (
            lambda: logits_to_gradient_(logits, labels, top, total, 0, vocabulary),
            2 * 2 * logits.numel(),
        ),
        "rotary of the queries": (
            lambda: rotate(heads.detach(), *angles, 1),
            2 * 2 * heads.numel() + 4 * angles.numel(),
        ),
    }


def measure_kernels(
    config: GemmShapesConfig, watch: Stopwatch, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a row for each elementwise kernel of each model: its TB/s."""
    for model in config.models:
        tokens = PACK * (config.packs or PACKS.get(model, 16))
        for name, (call, size) in build_kernels(get_preset(model), tokens, device).items():
            yield {
                "model": model,
                "kernel": name,
                "terabytes_per_second": size / watch.measure(call) / 1e12,
            }


@handle_command_errors
def main(argv: list[str] | None = None) -> None:
    """Measure, print each row at once, and write all of them to --output."""
    config = flags.parse_with_config(
        GemmShapesConfig, argv, prog="benchmarks/gemm_shapes.py", description=__doc__
    )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "--device cuda: this machine has no accelerator; --device cpu --packs 1 tries the "
            "script"
        )
    check_output_file(Path(config.output), "--output")
    torch.manual_seed(0)
    device = torch.device(config.device)
    watch = Stopwatch(device, config.seconds)
    is_gpu = device.type == "cuda"
    peak, copy = measure_references(config.square, watch, device)
    name = torch.cuda.get_device_name(device) if is_gpu else "cpu"
    print(f"{name}: square product {peak:.3g} TFLOP/s, copy {copy:.3g} TB/s", flush=True)
    results: dict[str, Any] = {
        "config": dataclasses.asdict(config),
        "device": name,
        "torch": torch.__version__,
    }
    results |= {
        "square_tflops": peak,
        "copy_terabytes_per_second": copy,
        "products": [],
        "kernels": [],
    }
    for row in measure_products(config, watch, device):
        results["products"].append(row)
        rates = ", ".join(
            f"{library} {rate:.3g} ({100 * rate / peak:.0f} %)"
            for library, rate in row["tflops"].items()
        )
        shape = f"{row['tokens']} x {row['inputs']} x {row['outputs']}"
        print(
            f"{row['model']} {row['matrix']} {row['product']}, {shape}: {rates} TFLOP/s", flush=True
        )
        atomic_write(Path(config.output), json.dumps(results, indent=1) + "\n")
    for row in measure_kernels(config, watch, device) if is_gpu else ():
        results["kernels"].append(row)
        rate = row["terabytes_per_second"]
        print(
            f"{row['model']} {row['kernel']}: {rate:.3g} TB/s, {100 * rate / copy:.0f} % of a copy",
            flush=True,
        )
        atomic_write(Path(config.output), json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
