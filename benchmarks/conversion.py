"""Measure memory and time of converting presets from and to Hugging Face.

    python benchmarks/conversion.py --model 1b --output conversion.json

Weights are random. Each conversion runs in a new process, whose peak resident memory is measured;
converting a tiny model gives the memory of the program without weights. Needs disk space for three
times the weights.
"""

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
DIRECTIONS = {
    "from-hf": ["--input", "hf", "--output", "core"],
    "to-hf": ["--load", "core", "--output", "again"],
}


@dataclass(frozen=True)
class ConversionBenchConfig:
    """Flags of the conversion benchmark."""

    output: str = "conversion.json"
    """JSON file for the results"""
    model: str = "1b"
    """model preset"""
    vocab_size: int = 128256
    """vocabulary size"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """dtype of the weights"""
    threads: int = 2
    """threads of a conversion"""
    directory: str = ""
    """working directory (default: the system's directory for temporary files)"""


def write_source(directory: Path, name: str, vocab_size: int, dtype: str) -> None:
    """Write a Hugging Face EuroBERT with random weights, one shard per layer.

    `name` is a preset, or `none` for a tiny model.
    """
    import torch
    from safetensors.torch import save_file

    from megaenc.convert.architectures import FAMILIES, build_export_config
    from megaenc.convert.from_hf import read_hf_shapes
    from megaenc.convert.safetensors_writer import DTYPES
    from megaenc.data.tokenizer.tokenizer import train_tokenizer
    from megaenc.model.config import ModelConfig, get_preset
    from megaenc.objectives import Attention

    model = get_preset(name) if name != "none" else ModelConfig(1, 8, 8, 2, 2)
    model = dataclasses.replace(model, vocab_size=vocab_size)
    directory.mkdir(parents=True)
    tokenizer = train_tokenizer(["a few words for a tokenizer of hardly more than bytes"], 300)
    tokenizer.save_pretrained(directory)
    family = FAMILIES["eurobert"]
    config = build_export_config(
        family,
        Attention.BIDIRECTIONAL,
        model,
        vocab_size=model.vocab_size,
        context=2048,
        tokenizer=tokenizer,
        dtype=DTYPES[dtype],
    )
    config.save_pretrained(directory)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in read_hf_shapes(config, family).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else name
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, shapes in shards.items():
        save_file(
            {name: (0.02 * torch.randn(shape)).to(DTYPES[dtype]) for name, shape in shapes.items()},
            directory / file,
        )
    index = {name: file for file, shapes in shards.items() for name in shapes}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def run_in_new_process(function: Callable, *arguments) -> None:
    """Call `function` in a new process.

    Its memory does not count in the peak of later child processes.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__} ended with {process.exitcode}")


def measure_conversion(directory: Path, direction: str, threads: int) -> dict[str, float]:
    """Run a conversion in `directory` and return its peak resident bytes and seconds."""
    command = [sys.executable, "-P", "-m", "megaenc", "convert", direction, *DIRECTIONS[direction]]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
    }
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {"peak_bytes": usage.ru_maxrss * 1024, "seconds": time.monotonic() - began}


def measure_all(settings: ConversionBenchConfig, work: Path) -> dict:
    """Return seconds, peak memory and its ratio to the weights' size, by direction."""
    run_in_new_process(write_source, work / "small" / "hf", "none", 300, settings.dtype)
    run_in_new_process(
        write_source, work / "large" / "hf", settings.model, settings.vocab_size, settings.dtype
    )
    shards = (work / "large" / "hf").glob("*.safetensors")
    weights = sum(file.stat().st_size for file in shards)
    result = {
        "model": settings.model,
        "dtype": settings.dtype,
        "weights_bytes": weights,
        "cores": os.cpu_count(),
    }
    for direction in DIRECTIONS:
        program = measure_conversion(work / "small", direction, settings.threads)["peak_bytes"]
        large = measure_conversion(work / "large", direction, settings.threads)
        ratios = {
            "peak_ratio": large["peak_bytes"] / weights,
            "peak_ratio_beyond_program": (large["peak_bytes"] - program) / weights,
        }
        result[direction] = large | {"program_bytes": program} | ratios
        sizes = f"peak {large['peak_bytes'] / 1e9:.2f} GB for {weights / 1e9:.2f} GB of weights"
        excess = f"{ratios['peak_ratio_beyond_program']:.2f} without the program itself"
        print(
            f"{direction}: {large['seconds']:.1f} s, {sizes} ({ratios['peak_ratio']:.2f}; "
            f"{excess})",
            flush=True,
        )
    return result


def main() -> None:
    """Parse flags, run the benchmark and write its results."""
    import common

    from megaenc import flags
    from megaenc.console import silence_libraries

    silence_libraries()
    settings = flags.parse(ConversionBenchConfig, None, prog="conversion.py", description=__doc__)
    with tempfile.TemporaryDirectory(dir=settings.directory or None) as work:
        result = measure_all(settings, Path(work))
    common.write_report(settings.output, result)


if __name__ == "__main__":
    main()
