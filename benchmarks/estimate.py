"""How near `megaenc estimate --calibrate` comes to what runs take here: memory of a rank and time of a step, in several layouts.

    python benchmarks/estimate.py --output estimate.json

Each round estimates, then trains a few steps, layout by layout; shown are medians over the rounds. The small preset with a
vocabulary of 32,768 (the model of the speed benchmarks) on the demo corpus unless --data-path and --tokenizer are given; about
fifteen minutes on two idle cores. Memory is the most that a rank has had resident (VmHWM); step time is that of whole updates.
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
class Settings:
    """The size of the comparison."""

    output: str = "estimate.json"
    """JSON file for the figures"""
    rounds: int = 3
    """times that each layout is estimated and run"""
    steps: int = 4
    """steps that are timed, after one that is not"""
    seq_length: int = 512
    """tokens of a pack"""
    micro_batch_size: int = 2
    """packs of a row"""
    global_batch_size: int = 8
    """packs of a step"""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """which layouts"""
    data_path: str = ""
    """corpus; the demo corpus unless given"""
    tokenizer: str = ""
    """its tokenizer"""


def flags_of(settings: Settings, layout: str) -> list[str]:
    """Of `megaenc pretrain` and `megaenc estimate` alike."""
    given = [*MODEL, *LAYOUTS[layout][1], "--train-iters", str(WARM_UP + settings.steps)]
    for name in ("seq_length", "micro_batch_size", "global_batch_size"):
        given += [f"--{name.replace('_', '-')}", str(getattr(settings, name))]
    return [*given, "--data-path", settings.data_path, "--tokenizer", settings.tokenizer]


def environment() -> dict[str, str]:
    """This repository's code, no accelerator; threads are shared out by the program."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def finish(command: list[str]) -> None:
    """Run to its end. InputError with the last line that it says where it fails."""
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    if done.returncode:
        from megaenc.errors import InputError

        errors = [text for text in done.stderr.splitlines() if text.startswith("error: ")] or done.stderr.splitlines()[-1:]
        raise InputError(errors[0].removeprefix("error: ") if errors else f"{command[2]} ended with {done.returncode}")


def estimated(settings: Settings, layout: str, folder: str) -> dict:
    """What the command says."""
    file = Path(folder) / "said.json"
    command = [sys.executable, "-P", "-m", "megaenc", "estimate", *flags_of(settings, layout), "--calibrate", "--no-suggest"]
    command += ["--gpus", str(LAYOUTS[layout][0]), "--output", str(file)]
    finish(command)
    return json.loads(file.read_text())["estimate"]


def measured(settings: Settings, layout: str, folder: str) -> list[dict]:
    """What each rank of a run has taken."""
    processes = LAYOUTS[layout][0]
    file = Path(folder) / "rank"
    launcher = [sys.executable, "-P"]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, __file__, "--worker", str(file), *flags_of(settings, layout)]
    finish(command)
    return [json.loads(Path(f"{file}{rank}").read_text()) for rank in range(processes)]


def train_and_note(file: str, flags: list[str]) -> None:
    """The pretraining command in this process; `file` gets the seconds of each update and the most memory."""
    import psutil

    from megaenc.backend import prepare_megatron

    prepare_megatron()
    from megaenc.processes import peak_resident_bytes
    from megaenc.training.command import main
    from megaenc.training.engine import Engine

    seconds, base, update, build = [], [], Engine.train_step, Engine.__init__

    def built(engine: Engine, *arguments):
        base.append(psutil.Process().memory_info().rss)
        build(engine, *arguments)

    def noted(engine: Engine, step: int):
        clock = time.perf_counter()
        made = update(engine, step)
        seconds.append(time.perf_counter() - clock)
        return made

    Engine.train_step, Engine.__init__ = noted, built
    main(flags)
    found = {"bytes": peak_resident_bytes(), "base": base[0], "seconds": seconds[WARM_UP:]}
    Path(file + os.environ.get("RANK", "0")).write_text(json.dumps(found))


def compare(settings: Settings, layout: str) -> dict:
    """One round of one layout: the rank that takes most and the step's median, as said and as they were."""
    with tempfile.TemporaryDirectory() as folder:
        said, ranks = estimated(settings, layout, folder), measured(settings, layout, folder)
    return {
        "bytes said": said["memory"]["bytes"],
        "bytes taken": max(rank["bytes"] for rank in ranks),
        "seconds said": said["steps"][0]["seconds"],
        "seconds taken": median(ranks[0]["seconds"]),
        "said": said,
        "ranks": ranks,
    }


def main(argv: list[str]) -> None:
    """Read the flags, go round, print the table."""
    from megaenc import flags
    from megaenc.bench.report import check_positive
    from megaenc.data.demo import ensure_demo
    from megaenc.errors import InputError

    settings = flags.parse(Settings, argv, prog="python benchmarks/estimate.py", description=__doc__)
    check_positive(settings, "rounds", "steps")
    for layout in settings.layouts:
        if layout not in LAYOUTS:
            raise InputError(f"--layouts {layout!r}: expected some of {', '.join(map(repr, LAYOUTS))}")
    if not settings.data_path:
        demo = ensure_demo(Path("demo"))
        settings = Settings(**vars(settings) | {"data_path": str(demo.data_prefix), "tokenizer": str(demo.tokenizer)})
    found: dict[str, list[dict]] = {layout: [] for layout in settings.layouts}
    print(f"{'layout':<22}{'GiB said':>9}{'taken':>7}{'':>9}{'s said':>9}{'taken':>7}", flush=True)
    for number in range(settings.rounds):
        for layout in settings.layouts:
            found[layout].append(compare(settings, layout))
            print(line(f"{layout}, round {number + 1}", found[layout][-1:]), flush=True)
            Path(settings.output).write_text(json.dumps({"settings": vars(settings), "layouts": found}, indent=1) + "\n")
    print("medians")
    for layout, rounds in found.items():
        print(line(layout, rounds))


def line(name: str, rounds: list[dict]) -> str:
    """A row of the table."""
    values = {key: median(one[key] for one in rounds) for key in rounds[0] if isinstance(rounds[0][key], float)}
    memory, seconds = (values[f"{key} said"] / values[f"{key} taken"] - 1 for key in ("bytes", "seconds"))
    gib = [values[f"bytes {word}"] / 2**30 for word in ("said", "taken")]
    times = [values[f"seconds {word}"] for word in ("said", "taken")]
    return (
        f"{name:<30}{gib[0]:>7.2f}{gib[1]:>7.2f} {100 * memory:>+6.1f} %{times[0]:>9.2f}{times[1]:>7.2f} {100 * seconds:>+6.1f} %"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        train_and_note(sys.argv[2], sys.argv[3:])
    else:
        from megaenc.errors import handle_command_errors

        handle_command_errors(main)(sys.argv[1:])
