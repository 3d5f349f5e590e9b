"""Compare `megaenc estimate --calibrate` with measured runs: peak memory of a rank and step time, in several layouts.

    python benchmarks/estimate.py --output estimate.json

Each round estimates and then trains a few steps in each layout; results are medians over rounds. Trains the small preset with a
vocabulary of 32,768 on the demo corpus unless --data-path and --tokenizer are set; takes about fifteen minutes on two idle cores.
Memory is the peak resident memory of a rank (VmHWM).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 1
MODEL = ["--model", "small", "--vocab-size", "32768", "--objective-schedule", "mlm", "--eval-interval", "0"]

# name: (processes, flags)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "tensor parallel 2": (2, ["--tensor-model-parallel-size", "2"]),
    "pipeline parallel 2": (2, ["--pipeline-model-parallel-size", "2"]),
    "data parallel 2": (2, []),
}


@dataclass(frozen=True)
class EstimateBenchConfig:
    """Flags of the estimate benchmark."""

    output: str = "estimate.json"
    """JSON file for the results"""
    rounds: int = 3
    """estimates and runs of each layout"""
    steps: int = 4
    """timed steps, after one warm-up step"""
    seq_length: int = 512
    """tokens of a pack"""
    micro_batch_size: int = 2
    """packs of a micro-batch"""
    global_batch_size: int = 8
    """packs of a step"""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """layouts to compare"""
    data_path: str = ""
    """corpus (default: the demo corpus)"""
    tokenizer: str = ""
    """tokenizer of the corpus"""


def build_flags(settings: EstimateBenchConfig, layout: str) -> list[str]:
    """Return the flags of a layout, valid for both `megaenc pretrain` and `megaenc estimate`."""
    words = [*MODEL, *LAYOUTS[layout][1], "--train-iters", str(WARM_UP + settings.steps)]
    for name in ("seq_length", "micro_batch_size", "global_batch_size"):
        words += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    return [*words, "--data-path", settings.data_path, "--tokenizer", settings.tokenizer]


def build_environment() -> dict[str, str]:
    """Return an environment with this repository's code, without accelerators and OMP_NUM_THREADS."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return variables | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def run_command(command: list[str]) -> None:
    """Run a command to its end; raise InputError with its error message if it fails."""
    done = subprocess.run(command, env=build_environment(), capture_output=True, text=True, timeout=900)
    if done.returncode:
        from megaenc.errors import InputError

        errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")] or done.stderr.splitlines()[-1:]
        raise InputError(errors[0].removeprefix("error: ") if errors else f"{command[2]} ended with {done.returncode}")


def run_estimate(settings: EstimateBenchConfig, layout: str, folder: str) -> dict:
    """Return the estimate of `megaenc estimate --calibrate` for a layout."""
    file = Path(folder) / "said.json"
    command = [sys.executable, "-P", "-m", "megaenc", "estimate", *build_flags(settings, layout), "--calibrate", "--no-suggest"]
    command += ["--gpus", str(LAYOUTS[layout][0]), "--output", str(file)]
    run_command(command)
    return json.loads(file.read_text())["estimate"]


def run_training(settings: EstimateBenchConfig, layout: str, folder: str) -> list[dict]:
    """Train a layout and return the peak memory and step times of each rank."""
    processes = LAYOUTS[layout][0]
    file = Path(folder) / "rank"
    launcher = [sys.executable, "-P"]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, __file__, "--worker", str(file), *build_flags(settings, layout)]
    run_command(command)
    return [json.loads(Path(f"{file}{rank}").read_text()) for rank in range(processes)]


def train_and_record(file: str, flags: list[str]) -> None:
    """Run the pretraining command in this process and write step times and peak memory to `file` plus the rank."""
    import psutil

    from megaenc.backend import prepare_megatron

    prepare_megatron()
    from megaenc.processes import peak_resident_bytes
    from megaenc.training.command import main
    from megaenc.training.engine import Engine

    seconds, base, train_step, build = [], [], Engine.train_step, Engine.__init__

    def recorded_init(engine: Engine, *arguments):
        base.append(psutil.Process().memory_info().rss)
        build(engine, *arguments)

    def timed_step(engine: Engine, step: int):
        clock = time.perf_counter()
        result = train_step(engine, step)
        seconds.append(time.perf_counter() - clock)
        return result

    Engine.train_step, Engine.__init__ = timed_step, recorded_init
    main(flags)
    results = {"bytes": peak_resident_bytes(), "base": base[0], "seconds": seconds[WARM_UP:]}
    Path(file + os.environ.get("RANK", "0")).write_text(json.dumps(results))


def compare_layout(settings: EstimateBenchConfig, layout: str) -> dict:
    """Return estimated and measured peak memory and median step time of a layout in one round."""
    with tempfile.TemporaryDirectory() as folder:
        estimate, ranks = run_estimate(settings, layout, folder), run_training(settings, layout, folder)
    return {
        "bytes said": estimate["memory"]["bytes"],
        "bytes taken": max(rank["bytes"] for rank in ranks),
        "seconds said": estimate["steps"][0]["seconds"],
        "seconds taken": median(ranks[0]["seconds"]),
        "said": estimate,
        "ranks": ranks,
    }


def main(argv: list[str]) -> None:
    """Parse flags, run all rounds, print the table and write the results."""
    from common import check_positive

    from megaenc import flags
    from megaenc.data.demo import ensure_demo
    from megaenc.errors import InputError

    settings = flags.parse(EstimateBenchConfig, argv, prog="python benchmarks/estimate.py", description=__doc__)
    check_positive(settings, "rounds", "steps")
    for layout in settings.layouts:
        if layout not in LAYOUTS:
            raise InputError(f"--layouts {layout!r}: expected some of {', '.join(map(repr, LAYOUTS))}")
    if not settings.data_path:
        demo = ensure_demo(Path("demo"))
        settings = EstimateBenchConfig(**vars(settings) | {"data_path": str(demo.data_prefix), "tokenizer": str(demo.tokenizer)})
    results: dict[str, list[dict]] = {layout: [] for layout in settings.layouts}
    print(f"{'layout':<22}{'GiB est.':>9}{'run':>7}{'':>9}{'s est.':>9}{'run':>7}", flush=True)
    for number in range(settings.rounds):
        for layout in settings.layouts:
            results[layout].append(compare_layout(settings, layout))
            print(format_row(f"{layout}, round {number + 1}", results[layout][-1:]), flush=True)
            Path(settings.output).write_text(json.dumps({"settings": vars(settings), "layouts": results}, indent=1) + "\n")
    print("medians")
    for layout, rounds in results.items():
        print(format_row(layout, rounds))


def format_row(name: str, rounds: list[dict]) -> str:
    """Return a row of the table with medians over `rounds` and relative errors."""
    values = {key: median(one[key] for one in rounds) for key in rounds[0] if isinstance(rounds[0][key], float)}
    memory, seconds = (values[f"{key} said"] / values[f"{key} taken"] - 1 for key in ("bytes", "seconds"))
    gib = [values[f"bytes {word}"] / 2**30 for word in ("said", "taken")]
    times = [values[f"seconds {word}"] for word in ("said", "taken")]
    return (
        f"{name:<30}{gib[0]:>7.2f}{gib[1]:>7.2f} {100 * memory:>+6.1f} %{times[0]:>9.2f}{times[1]:>7.2f} {100 * seconds:>+6.1f} %"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        train_and_record(sys.argv[2], sys.argv[3:])
    else:
        from megaenc.errors import handle_command_errors

        handle_command_errors(main)(sys.argv[1:])
