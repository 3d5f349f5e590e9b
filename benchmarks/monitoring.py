"""Measure the cost of monitoring and checkpointing in step time on this CPU.

    python benchmarks/monitoring.py --output monitoring.json

Step times are from the start of one step to the start of the next, including logging and saving.
Trains the small preset on the demo corpus unless --data-path and --tokenizer are set; takes about
eight minutes on two idle cores.
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

RUN = [
    "--seq-length",
    "64",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "4",
    "--eval-interval",
    "0",
]
RUN += ["--log-interval", "1", "--no-bf16"]

# Flags of each arm; the first is the baseline. DIRECTORY stands for a temporary directory, HALF for
# half of the steps, so that one save is among the timed steps.
MONITORING = [
    "--save",
    "DIRECTORY",
    "--tensorboard-dir",
    "DIRECTORY/events",
    "--wandb-project",
    "benchmark",
]
MONITORING += ["--log-straggler", "--straggler-interval", "10"]
ARMS: dict[str, list[str]] = {
    "without": [],
    "monitoring": MONITORING,
    "monitoring, a save": [*MONITORING, "--async-save", "--save-interval", "HALF"],
}


@dataclass(frozen=True)
class MonitoringBenchConfig:
    """Flags of the monitoring benchmark."""

    output: str = "monitoring.json"
    """JSON file for the results"""
    model: str = "small"
    """model preset"""
    rounds: int = 5
    """runs of each arm"""
    steps: int = 30
    """steps of a run, of which the first five are not timed"""
    threads: int = 2
    """threads of the process"""
    minutes: float = 8.0
    """time limit: no round starts that would exceed it"""
    save_interval: int = 1000
    """steps between saves over which the cost of one is spread"""
    data_path: str = ""
    """corpus (default: the demo corpus)"""
    tokenizer: str = ""
    """tokenizer of the corpus"""


@dataclass(frozen=True)
class TimedRun:
    """Times of a run without its warm-up steps."""

    steps: list[float]
    """Seconds from the start of each step to the next."""
    monitor: list[float]
    """Seconds of each step in the metrics logger."""


def run_timed(settings: MonitoringBenchConfig, arm: str) -> TimedRun:
    """Run one arm and return its times."""
    with tempfile.TemporaryDirectory() as directory:
        words = {"DIRECTORY": f"{directory}/run", "HALF": str(settings.steps // 2)}
        run_flags = [
            words.get(flag, flag.replace("DIRECTORY", words["DIRECTORY"])) for flag in ARMS[arm]
        ]
        if settings.data_path:
            run_flags += ["--data-path", settings.data_path, "--tokenizer", settings.tokenizer]
        times = Path(directory) / "times.json"
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
            *run_flags,
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(settings.threads),
            "WANDB_MODE": "offline",
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=600)
        recorded = json.loads(times.read_text())
    steps = [after - before for before, after in pairwise(recorded["begun"][WARM_UP:])]
    return TimedRun(steps, recorded["monitor"][WARM_UP : WARM_UP + len(steps)])


def train_and_record(file: str, flags: list[str]) -> None:
    """Run the pretraining command here and record times of each step in `file`.

    They are the start and the logging time.
    """
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    from megaenc.training.callbacks.metrics_logger import MetricsLogger
    from megaenc.training.command import main
    from megaenc.training.engine import Engine

    starts = []
    train_step = Engine.train_step
    monitor = []
    after_step = MetricsLogger.after_step

    def timed_step(engine: Engine, step: int, *arguments):
        starts.append(time.perf_counter())
        return train_step(engine, step, *arguments)

    def timed_log(self: MetricsLogger, *arguments):
        clock = time.perf_counter()
        after_step(self, *arguments)
        monitor.append(time.perf_counter() - clock)

    Engine.train_step = timed_step
    MetricsLogger.after_step = timed_log
    main(flags)
    Path(file).write_text(json.dumps({"begun": starts, "monitor": monitor}))


def run_rounds(settings: MonitoringBenchConfig) -> dict[str, list[TimedRun]]:
    """Run each arm once per round; return the runs by arm.

    Each round starts with another arm.
    """
    runs: dict[str, list[TimedRun]] = {arm: [] for arm in ARMS}
    start = time.monotonic()
    names = list(ARMS)
    for number in range(settings.rounds):
        spent = time.monotonic() - start
        if number and spent * (number + 1) / number > 60 * settings.minutes:
            break
        for arm in names[number % len(names) :] + names[: number % len(names)]:
            runs[arm].append(run_timed(settings, arm))
            print(
                f"round {number + 1}: {arm}: {median(runs[arm][-1].steps):.4f} s a step", flush=True
            )
    return runs


def summarize_runs(settings: MonitoringBenchConfig, runs_by_arm: dict[str, list[TimedRun]]) -> dict:
    """Return the step time of each arm and its excess over the baseline, in percent.

    The baseline is that of the same round. Step times are medians of a run, which exclude a single
    save; `mean_seconds` includes it. `monitor_percent` is the share of the metrics logger, a robust
    lower bound of the cost of monitoring.
    """
    arms = {}
    base = [median(run.steps) for run in next(iter(runs_by_arm.values()))]
    for arm, runs in runs_by_arm.items():
        medians = [median(run.steps) for run in runs]
        means = [mean(run.steps) for run in runs]
        more = [
            100 * (value / reference - 1) for value, reference in zip(medians, base, strict=True)
        ]
        arms[arm] = {
            "step_seconds": median(medians),
            "spread": [min(medians), max(medians)],
            "mean_seconds": median(means),
            "monitor_percent": median(100 * sum(run.monitor) / sum(run.steps) for run in runs),
            "more_percent": median(more),
            "more_percent_of_each_round": more,
        }
    names = list(runs_by_arm)
    # Total seconds that one save adds to the timed steps.
    added = [
        sum(value.steps) - sum(reference.steps)
        for value, reference in zip(runs_by_arm[names[2]], runs_by_arm[names[1]], strict=True)
    ]
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


def format_table(result: dict) -> str:
    """Return the results as a table for the console."""
    lines = [
        f"{'':24}{'s a step':>10}{'lowest':>10}{'highest':>10}{'mean':>10}{'monitor':>10}"
        f"{'more':>10}"
    ]
    for arm, row in result["arms"].items():
        low, high = row["spread"]
        lines.append(
            f"{arm:24}{row['step_seconds']:10.4f}{low:10.4f}{high:10.4f}{row['mean_seconds']:10.4f}"
            f"{row['monitor_percent']:8.2f} %{row['more_percent']:8.2f} %"
        )
    lines.append(
        f"a save adds {result['seconds_a_save_adds']:.2f} s: every {result['save_interval']:,} "
        "steps "
        f"{result['saves_more_percent']:.2f} %, with monitoring "
        f"{result['together_more_percent']:.2f} %"
    )
    return "\n".join(lines)


def main() -> None:
    """Parse flags, run the benchmark, write and print its results."""
    import common

    from megaenc import flags

    settings = flags.parse(MonitoringBenchConfig, None, prog="monitoring.py", description=__doc__)
    result = summarize_runs(settings, run_rounds(settings))
    common.write_report(settings.output, result)
    print(format_table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--timed"]:
        train_and_record(sys.argv[2], sys.argv[3:])
    else:
        main()
