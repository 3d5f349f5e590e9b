"""Memory and time of conversions: a preset with random weights comes in from a Hugging Face folder and goes out again.

    python benchmarks/conversion.py --model 1b --output conversion.json

Each conversion is a process of its own. Its peak is that of its resident memory; what the program takes without weights is
measured by the conversion of a model of next to none. Three times the weights are needed on the disk.
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
DIRECTIONS = {"from-hf": ["--input", "hf", "--output", "core"], "to-hf": ["--load", "core", "--output", "again"]}


@dataclass(frozen=True)
class Settings:
    """The size of the benchmark."""

    output: str = "conversion.json"
    """JSON file for the figures"""
    model: str = "1b"
    """preset of the model"""
    vocab_size: int = 128256
    """rows of its vocabulary"""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """of the weights"""
    threads: int = 2
    """threads of a conversion"""
    folder: str = ""
    """where to work; the system's folder for temporary files unless given"""


def write_source(folder: Path, name: str, vocab_size: int, dtype: str) -> None:
    """A EuroBERT folder of the preset `name` (`none`: next to no model) with a shard a layer, drawn one by one."""
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
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(["a few words for a tokenizer of hardly more than bytes"], 300)
    tokenizer.save_pretrained(folder)
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
    config.save_pretrained(folder)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in read_hf_shapes(config, family).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else name
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    for file, shapes in shards.items():
        save_file({name: (0.02 * torch.randn(shape)).to(DTYPES[dtype]) for name, shape in shapes.items()}, folder / file)
    index = {name: file for file, shapes in shards.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def in_a_process(function: Callable, *arguments) -> None:
    """Call `function` in a new process: the peak of one that is started later would count what this one has held."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__} ended with {process.exitcode}")


def converted(folder: Path, direction: str, threads: int) -> dict[str, float]:
    """Peak of the resident memory in bytes, and seconds, of the command in `folder`."""
    command = [sys.executable, "-P", "-m", "megaenc", "convert", direction, *DIRECTIONS[direction]]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {"peak_bytes": usage.ru_maxrss * 1024, "seconds": time.monotonic() - began}


def figures(settings: Settings, work: Path) -> dict:
    """By direction: seconds, peak, the program's own part of it, and the ratio of both, and of the rest alone, to the weights."""
    in_a_process(write_source, work / "small" / "hf", "none", 300, settings.dtype)
    in_a_process(write_source, work / "large" / "hf", settings.model, settings.vocab_size, settings.dtype)
    shards = (work / "large" / "hf").glob("*.safetensors")
    weights = sum(file.stat().st_size for file in shards)
    result = {"model": settings.model, "dtype": settings.dtype, "weights_bytes": weights, "cores": os.cpu_count()}
    for direction in DIRECTIONS:
        program = converted(work / "small", direction, settings.threads)["peak_bytes"]
        found = converted(work / "large", direction, settings.threads)
        ratios = {
            "peak_ratio": found["peak_bytes"] / weights,
            "peak_ratio_beyond_program": (found["peak_bytes"] - program) / weights,
        }
        result[direction] = found | {"program_bytes": program} | ratios
        sizes = f"peak {found['peak_bytes'] / 1e9:.2f} GB for {weights / 1e9:.2f} GB of weights"
        alone = f"{ratios['peak_ratio_beyond_program']:.2f} without the program itself"
        print(f"{direction}: {found['seconds']:.1f} s, {sizes} ({ratios['peak_ratio']:.2f}; {alone})", flush=True)
    return result


def main() -> None:
    from megaenc import flags
    from megaenc.bench import report
    from megaenc.console import silence_libraries

    silence_libraries()
    settings = flags.parse(Settings, None, prog="conversion.py", description=__doc__)
    with tempfile.TemporaryDirectory(dir=settings.folder or None) as work:
        result = figures(settings, Path(work))
    report.write_report(settings.output, result)


if __name__ == "__main__":
    main()
