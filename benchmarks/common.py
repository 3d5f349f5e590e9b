"""Helpers of all benchmarks: machine, processes, summaries and the JSON report."""

import importlib.metadata
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from megaenc.atomic_io import atomic_write
from megaenc.console import silence_libraries
from megaenc.dist_env import die_with_parent
from megaenc.errors import InputError, format_error
from megaenc.machine import read_processor_name, usable_core_count
from megaenc.output_paths import create_parent_dir
from megaenc.processes import KILL_TIMEOUT, set_child_environment

_PACKAGES = (
    "megaenc",
    "torch",
    "megatron-core",
    "transformers",
    "tokenizers",
    "gigatoken",
    "datasets",
    "numpy",
)


def describe_machine() -> dict[str, Any]:
    """Return processor, memory, accelerators, load, package versions and time.

    Memory is in GiB.
    """
    import torch

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": f"{platform.system()} {platform.release()}",
        "processor": read_processor_name(),
        "cores": usable_core_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": [
            torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
        ],
        "load": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "packages": {
            each.name: each.version
            for each in importlib.metadata.distributions()
            if each.name in _PACKAGES
        },
    }


def peak_resident_bytes() -> float:
    """Return the peak resident bytes of this process since it started its program.

    getrusage would report the parent's value if that was larger at the fork.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024.0 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def run_processes(
    work: Callable[[Any], Any],
    item: Any,
    *environments: Mapping[str, str],
    seconds: float | None = None,
) -> list[Any]:
    """Call `work(item)` in a new process for each of `environments`, all at once.

    Args:
        work: Function of a module.
        item: Argument that can be pickled.
        environments: Variables of each process besides those of this one.
        seconds: Time limit of each process.

    Raises:
        InputError: `work` raised it.
        RuntimeError: A process failed in another way, or ran out of time. The others are killed.
    """
    context = multiprocessing.get_context("spawn")
    processes = {}
    try:
        for environment in environments:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(sender, os.getpid(), work, item))
            with set_child_environment(environment):
                process.start()
            sender.close()
            processes[receiver] = process
        results: dict[Connection, Any] = {}
        while len(results) < len(processes):
            ready = multiprocessing.connection.wait(processes.keys() - results.keys(), seconds)
            if not ready:
                raise RuntimeError(f"{work.__name__}: took more than {seconds:.0f} s")
            for receiver in ready:
                results[receiver] = _receive(receiver, work.__name__)
        for process in processes.values():
            process.join(KILL_TIMEOUT)  # cleans up after libraries
        return [results[receiver] for receiver in processes]
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _answer(sender: Connection, parent: int, work: Callable[[Any], Any], item: Any) -> None:
    """Send the result of `work(item)`, or the exception, to the parent process."""
    die_with_parent(parent)
    silence_libraries()
    try:
        sender.send((work(item), None))
    except Exception as error:  # any library's
        if not isinstance(error, InputError):  # the parent may lack what unpickles it
            error = RuntimeError(f"{type(error).__name__}: {format_error(error, 1000)}")
        sender.send((None, error))


def _receive(receiver: Connection, name: str) -> Any:
    """Return what a process sends; raise its exception, or RuntimeError if it died."""
    try:
        result, error = receiver.recv()
    except EOFError:
        raise RuntimeError(f"{name}: its process died") from None
    if isinstance(error, InputError):
        raise error
    if error:
        raise RuntimeError(f"{name}: {error}")
    return result


def check_positive(config: Any, *names: str) -> None:
    """Check that the fields `names` of `config` are above 0.

    Raises:
        InputError: A field is not; the message names the first one.
    """
    for name in names:
        if not getattr(config, name) > 0:
            raise InputError(
                f"--{name.replace('_', '-')} {getattr(config, name)}: expected more than 0"
            )


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Return {"median": m, "lowest": l, "highest": h} of at least one value."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def write_report(path: str | Path, results: dict[str, Any]) -> None:
    """Write `results` as JSON to `path`, the file of --output, atomically."""
    create_parent_dir(Path(path), "--output")
    atomic_write(Path(path), json.dumps(results, indent=1) + "\n")
