"""What watching a run and saving it cost in step time: short runs with and without, in turns, on this machine's processors.

    python benchmarks/monitoring.py --output monitoring.json

Timed is the whole loop: from the beginning of one update to the beginning of the next, with rows, boards and saves in between.
The small preset on the demo corpus, unless --data-path and --tokenizer are given; about eight minutes on two idle cores.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 5

RUN = ["--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "4", "--eval-interval", "0"]
RUN += ["--log-interval", "1", "--no-bf16"]

# What is compared, the first being what the others are compared with. FOLDER and HALF are put in: a folder that is removed
# afterwards, and half of the steps, so that one save lies among those that are timed.
MONITORING = ["--save", "FOLDER", "--tensorboard-dir", "FOLDER/events", "--wandb-project", "benchmark"]
MONITORING += ["--log-straggler", "--straggler-interval", "10"]
ARMS: dict[str, list[str]] = {
    "without": [],
    "monitoring": MONITORING,
    "monitoring, a save": [*MONITORING, "--async-save", "--save-interval", "HALF"],
}


@dataclass(frozen=True)
class Settings:
    """The size of the benchmark."""

    output: str = "monitoring.json"
    """JSON file for the figures"""
    model: str = "small"
    """preset of the model"""
    rounds: int = 5
    """times that each is run"""
    steps: int = 30
    """steps of a run, the first five of which are not timed"""
    threads: int = 2
    """threads of the one process"""
    minutes: float = 8.0
    """no round is begun that would end later than this"""
    save_interval: int = 1000
    """steps between saves to reckon the cost of one for"""
    data_path: str = ""
    """corpus; the demo corpus unless given"""
    tokenizer: str = ""
    """its tokenizer"""


@dataclass(frozen=True)
class Timed:
    """A run but for its first steps."""

    steps: list[float]
    """Seconds from the beginning of each update to that of the next."""
    monitor: list[float]
    """Of them in the monitor itself, which makes the rows and hands them on."""


def timed_run(settings: Settings, arm: str) -> Timed:
    """One run of `arm`."""
    with tempfile.TemporaryDirectory() as folder:
        words = {"FOLDER": f"{folder}/run", "HALF": str(settings.steps // 2)}
        given = [words.get(flag, flag.replace("FOLDER", words["FOLDER"])) for flag in ARMS[arm]]
        if settings.data_path:
            given += ["--data-path", settings.data_path, "--tokenizer", settings.tokenizer]
        times = Path(folder) / "times.json"
        command = [
            sys.executable,
            __file__,
            "--timed",
            str(times),
            "--model",
            settings.model,
            *RUN,
            "--train-iters",
            str(settings.steps),
            *given,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": str(settings.threads), "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=600)
        noted = json.loads(times.read_text())
    steps = [after - before for before, after in pairwise(noted["begun"][WARM_UP:])]
    return Timed(steps, noted["monitor"][WARM_UP : WARM_UP + len(steps)])


def train_and_note(file: str, flags: list[str]) -> None:
    """The pretraining command in this process; `file` gets the time at which each update begins, and the seconds of its row."""
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    from megaenc.training.command import main
    from megaenc.training.engine import Engine
    from megaenc.training.logging.metrics_logger import MetricsLogger

    begun, update, monitor, show = [], Engine.train_step, [], MetricsLogger.log_step

    def noted(engine: Engine, step: int):
        begun.append(time.perf_counter())
        return update(engine, step)

    def shown(self: MetricsLogger, *arguments):
        clock = time.perf_counter()
        show(self, *arguments)
        monitor.append(time.perf_counter() - clock)

    Engine.train_step, MetricsLogger.log_step = noted, shown
    main(flags)
    Path(file).write_text(json.dumps({"begun": begun, "monitor": monitor}))


def rounds(settings: Settings) -> dict[str, list[Timed]]:
    """The runs of each arm, one a round; each round begins with another arm."""
    found: dict[str, list[Timed]] = {arm: [] for arm in ARMS}
    began, names = time.monotonic(), list(ARMS)
    for number in range(settings.rounds):
        spent = time.monotonic() - began
        if number and spent * (number + 1) / number > 60 * settings.minutes:
            break
        for arm in names[number % len(names) :] + names[: number % len(names)]:
            found[arm].append(timed_run(settings, arm))
            print(f"round {number + 1}: {arm}: {median(found[arm][-1].steps):.4f} s a step", flush=True)
    return found


def figures(settings: Settings, found: dict[str, list[Timed]]) -> dict:
    """Of each arm the seconds a step, and how much more that is than the first arm's of the same round, in percent.

    A step is a run's median step, which a single save does not touch; `mean` is that of all steps, a save among them.
    `monitor_percent` is what the monitor itself takes of a step: less than all that it costs, and hardly touched by what else the
    machine does.
    """
    arms, base = {}, [median(run.steps) for run in next(iter(found.values()))]
    for arm, runs in found.items():
        medians, means = [median(run.steps) for run in runs], [mean(run.steps) for run in runs]
        more = [100 * (here / there - 1) for here, there in zip(medians, base, strict=True)]
        arms[arm] = {
            "step_seconds": median(medians),
            "spread": [min(medians), max(medians)],
            "mean_seconds": median(means),
            "monitor_percent": median(100 * sum(run.monitor) / sum(run.steps) for run in runs),
            "more_percent": median(more),
            "more_percent_of_each_round": more,
        }
    names = list(found)
    # What one save adds to all steps that were timed together.
    added = [sum(here.steps) - sum(there.steps) for here, there in zip(found[names[2]], found[names[1]], strict=True)]
    share = 100 * median(added) / (settings.save_interval * arms[names[0]]["step_seconds"])
    return {
        "cores": os.cpu_count(),
        "rounds": len(base),
        "timed_steps": settings.steps - WARM_UP - 1,
        "arms": arms,
        "seconds_a_save_adds": median(added),
        "seconds_a_save_adds_of_each_round": added,
        "save_interval": settings.save_interval,
        "saves_more_percent": share,
        "together_more_percent": arms[names[1]]["more_percent"] + share,
    }


def table(result: dict) -> str:
    """The figures for the eye."""
    lines = [f"{'':24}{'s a step':>10}{'lowest':>10}{'highest':>10}{'mean':>10}{'monitor':>10}{'more':>10}"]
    for arm, row in result["arms"].items():
        low, high = row["spread"]
        lines.append(
            f"{arm:24}{row['step_seconds']:10.4f}{low:10.4f}{high:10.4f}{row['mean_seconds']:10.4f}"
            f"{row['monitor_percent']:8.2f} %{row['more_percent']:8.2f} %"
        )
    lines.append(
        f"a save adds {result['seconds_a_save_adds']:.2f} s: every {result['save_interval']:,} steps "
        f"{result['saves_more_percent']:.2f} %, with monitoring {result['together_more_percent']:.2f} %"
    )
    return "\n".join(lines)


def main() -> None:
    from megaenc import flags
    from megaenc.bench import report

    settings = flags.parse(Settings, None, prog="monitoring.py", description=__doc__)
    result = figures(settings, rounds(settings))
    report.write_report(settings.output, result)
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--timed"]:
        train_and_note(sys.argv[2], sys.argv[3:])
    else:
        main()
