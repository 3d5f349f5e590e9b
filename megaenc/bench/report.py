"""Helpers of all benchmarks: machine description, worker processes, summaries and the JSON report."""

import contextlib
import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from megaenc.atomic_io import atomic_write, exit_on_sigterm
from megaenc.console import print_rank_0
from megaenc.errors import InputError
from megaenc.output_paths import create_parent_dir
from megaenc.processes import Worker, WorkerDied, read_processor_name, usable_core_count

_PACKAGES = ("megaenc", "torch", "megatron-core", "transformers", "tokenizers", "gigatoken", "datasets", "numpy")
_LAST_BYTES = 3000  # output of a failed process that is kept


def describe_machine() -> dict[str, Any]:
    """Return processor, usable cores, memory in GiB, accelerators, load, package versions and time as a JSON object."""
    import torch

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}",
        "processor": read_processor_name(),
        "cores": usable_core_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "load": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "packages": {each.name: each.version for each in importlib.metadata.distributions() if each.name in _PACKAGES},
    }


@contextlib.contextmanager
def run_workers(work: Callable[[Any], Any], item: Any, *environments: Mapping[str, str]) -> Iterator[list[Worker]]:
    """Start a process per environment for `work(item)`; yield the Workers, then kill them; WorkerDied if one ends early."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        workers = []
        try:
            for environment in environments:
                workers.append(Worker(work, environment, output))
                stack.callback(workers[-1].kill)
                workers[-1].send(item)
            yield workers
        except WorkerDied as error:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_BYTES))
            raise WorkerDied(error.worker, f"{error}\n{output.read().decode(errors='replace')}".rstrip()) from None


def check_positive(config: Any, *names: str) -> None:
    """Raise InputError for the first of the fields `names` of `config` that is not above 0, naming its flag."""
    for name in names:
        if not getattr(config, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(config, name)}: expected more than 0")


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return {"median": m, "lowest": l, "highest": h} of at least one value."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def write_report(path: str | Path, results: dict[str, Any]) -> None:
    """Write `results` as JSON to `path`, the file of --output, atomically, and create its missing parent folders."""
    create_parent_dir(Path(path), "--output")
    atomic_write(Path(path), json.dumps(results, indent=1) + "\n")


def run_benchmark(measure: Callable[[Any], dict[str, Any]], format_table: Callable[[dict[str, Any]], str], config: Any) -> None:
    """Call `measure(config)`; write the results as JSON to `config.output` and print them with `format_table`."""
    with exit_on_sigterm():
        results = measure(config)
        write_report(config.output, results)
        print_rank_0(format_table(results))
        print_rank_0(f"written to {config.output}")
