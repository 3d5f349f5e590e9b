"""What a process of the benchmark runs: one job after another.

It loads what all jobs need before it asks for the first, so that the next process is ready when the one before is done.
"""

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megaenc.console import overheard

Found = Iterator[tuple[list[str], Any]]


class Failed(Exception):
    """A job did not come to its end; the message says why."""


def machine(_: dict[str, Any], __: float) -> Found:
    """What figures depend on."""
    import torch

    from megaenc.backend import detect
    from megaenc.backend.device import host_has_bf16
    from megaenc.bench import report

    backend = detect()
    yield ["machine"], report.machine()
    about = {"backend": backend.name, "name": backend.description, "bf16": backend.has_bf16, "torch": torch.__version__}
    about |= {"peak_bf16": None if backend.is_host else backend.peak_flops(torch.bfloat16)}
    about |= {"host_bf16": host_has_bf16()}
    about |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if not backend.is_host:
        about["memory"] = torch.cuda.get_device_properties(0).total_memory
        about["compute_capability"] = list(torch.cuda.get_device_capability(0))
    about["lacking"] = _lacking(backend.device)
    yield ["device"], about


def _lacking(device: Any) -> dict[str, str]:
    """What cannot be had here and why, FIELD=VALUE of Kernels, as far as that is known without a trial."""
    import torch

    from megaenc.bench.gpu.variants import title
    from megaenc.errors import InputError
    from megaenc.model.attention_backends import ORDER, lacking
    from megaenc.model.transformer_engine import check_installed

    found = {title({"attention_backend": name}): lacking(name, device, torch.bfloat16) for name in ORDER}
    try:
        check_installed(None)
    except InputError:
        found[title({"transformer_impl": "transformer_engine"})] = "transformer-engine is not installed"
    return {name: why for name, why in found.items() if why}


def reference(job: dict[str, Any], _: float) -> Found:
    """See correctness.reference."""
    from megaenc.bench.gpu import correctness

    yield from correctness.reference(_setups(job), job["packs"], Path(job["folder"]))


def correctness(job: dict[str, Any], _: float) -> Found:
    """See correctness.compared."""
    from megaenc.bench.gpu import correctness

    yield from correctness.compared(_setups(job), job["packs"], Path(job["folder"]))


def parity(job: dict[str, Any], _: float) -> Found:
    """See parity.losses."""
    from megaenc.bench.gpu import parity

    for name, setup in _setups(job).items():
        yield from parity.losses(setup, job["packs"], job["updates"], name)


def speed(job: dict[str, Any], deadline: float) -> Found:
    """See speed.measured."""
    from megaenc.bench.gpu import speed

    timing = speed.Timing(**{**job["timing"], "objectives": tuple(job["timing"]["objectives"])})
    [setup] = _setups(job).values()
    yield from speed.measured(setup, timing, deadline)


def peer(job: dict[str, Any], deadline: float) -> Found:
    """See peer.beside."""
    from megaenc.bench.gpu import peer

    [setup] = _setups(job).values()
    yield from peer.beside(setup, job["objective"], job["documents"], job["passes"], Path(job["folder"]), deadline)


def _setups(job: dict[str, Any]) -> dict[str, Any]:
    from megaenc.bench.gpu.made import Setup

    return {name: Setup(**fields) for name, fields in job["setups"].items()}


def load(_: dict[str, Any], __: float) -> Found:
    """What takes its time to import; nothing that touches an accelerator, which may be at work for another process."""
    from megaenc.backend.megatron import import_megatron

    import_megatron()
    import torch.profiler  # noqa: F401

    import megaenc.bench.gpu.speed  # noqa: F401

    yield from ()


JOBS: dict[str, Callable[[dict[str, Any], float], Found]] = {
    each.__name__: each for each in (load, machine, reference, correctness, parity, speed, peer)
}


def findings(job: dict[str, Any]) -> Found:
    """What a job finds, then what it has said. Raises Failed, which any process can unpickle."""
    said: list[str] = []
    try:
        with overheard(said.append):  # which kernels were found wrong, for one
            yield from JOBS[job["kind"]](job, job.get("deadline", 0.0))
        if "name" in job:
            yield ["said", job["name"]], said
    except Exception as error:
        traceback.print_exc()
        raise Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    finally:
        _clear()


def _clear() -> None:
    """Leave the process groups that a failed job is still in."""
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        from megaenc.bench.gpu import made

        made.end()
