"""What every benchmark tells: the machine, medians with their spread, a JSON file."""

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
_LAST_BYTES = 3000  # printed by a process that failed


def machine() -> dict[str, Any]:
    """What figures depend on: processor, usable cores, memory in GiB, accelerators, load before the start, versions, time."""
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
def at_work(work: Callable[[Any], Any], item: Any, *environments: Mapping[str, str]) -> Iterator[list[Worker]]:
    """Have a process in each of `environments` call `work(item)`, which ends with the block.

    Raises WorkerEnded with the last that they printed if one ends before it is done.
    """
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


def check_positive(settings: Any, *names: str) -> None:
    """InputError for the first of these flags that is not above 0."""
    for name in names:
        if not getattr(settings, name) > 0:
            raise InputError(f"--{name.replace('_', '-')} {getattr(settings, name)}: expected more than 0")


def spread(values: Sequence[float]) -> dict[str, float]:
    """`median`, `lowest` and `highest` of at least one value."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def write(path: str | Path, found: dict[str, Any]) -> None:
    """Write `found` as JSON, whole or not at all. Raises InputError where the file cannot be written."""
    create_parent_dir(Path(path), "--output")
    atomic_write(Path(path), json.dumps(found, indent=1) + "\n")


def run(bench: Callable[[Any], dict[str, Any]], table: Callable[[dict[str, Any]], str], settings: Any) -> None:
    """Measure with `bench`, write the figures to `settings.output` and print their `table`."""
    with exit_on_sigterm():
        found = bench(settings)
        write(settings.output, found)
        print_rank_0(table(found))
        print_rank_0(f"written to {settings.output}")
