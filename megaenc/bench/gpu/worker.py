"""What a process of the benchmark runs: one job after another.

It loads what all jobs need before it asks for the first, so that the next process is ready when the one before is done.
"""

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megaenc.console import overheard

Found = Iterator[tuple[list[str], Any]]


class Failed(Exception):
    """A job did not come to its end; the message says why."""


def machine() -> Found:
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


def measurements(job: dict[str, Any]) -> Found:
    """What a job on setups finds."""
    from megaenc.bench.gpu import correctness, parity, peer, speed
    from megaenc.bench.gpu.made import Setup

    setups = {name: Setup(**fields) for name, fields in job["setups"].items()}
    setup = next(iter(setups.values()))
    match job["kind"]:
        case "reference":
            yield from correctness.reference(setups, job["packs"], Path(job["folder"]))
        case "correctness":
            yield from correctness.compared(setups, job["packs"], Path(job["folder"]))
        case "parity":
            for name, each in setups.items():
                yield from parity.losses(each, job["packs"], job["updates"], name)
        case "speed":
            timing = speed.Timing(**{**job["timing"], "objectives": tuple(job["timing"]["objectives"])})
            yield from speed.measured(setup, timing, job["deadline"])
        case "peer":
            work = (job["objective"], job["documents"], job["passes"], Path(job["folder"]), job["deadline"])
            yield from peer.beside(setup, *work)


def findings(job: dict[str, Any]) -> Found:
    """What a job finds, then what it has said; {} only loads what takes its time to import and touches no accelerator.

    Raises Failed, which any process can unpickle.
    """
    from megaenc.backend.megatron import import_megatron

    import_megatron()
    import torch.distributed
    import torch.profiler

    import megaenc.bench.gpu.speed  # noqa: F401

    if not job:
        return
    said: list[str] = []
    try:
        with overheard(said.append):  # which kernels were found wrong, for one
            yield from machine() if job["kind"] == "machine" else measurements(job)
        yield ["said", job["name"]], said
    except Exception as error:
        traceback.print_exc()
        raise Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    finally:
        if torch.distributed.is_initialized():  # a failed job is still in its process groups
            from megaenc.bench.gpu import made

            made.end()
