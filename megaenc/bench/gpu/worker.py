"""Jobs of the GPU benchmark as run in a worker process.

A job names a generator of this package as MODULE.FUNCTION with its arguments. A worker imports shared libraries before its first
job, so that it is ready when the previous one ends.
"""

import importlib
import traceback
from collections.abc import Iterator
from typing import Any

from megaenc.console import capture_messages

JobResult = tuple[list[str], Any]
"""Nested keys of the results, and the value to store there."""


class JobFailed(Exception):
    """Error for a job that raised an exception, ran out of time or whose process died."""


def describe_device(deadline: float) -> Iterator[JobResult]:
    """Yield the machine's description, then the device's: name, bf16, peak, memory, and kernels it lacks, with reasons."""
    import torch
    from megatron.core.extensions import transformer_engine

    from megaenc.backend import detect_backend
    from megaenc.backend.device import cpu_has_bf16
    from megaenc.bench import report
    from megaenc.model.attention.backends import BACKENDS, missing_requirement

    backend = detect_backend()
    yield ["machine"], report.describe_machine()
    missing = {f"attention_backend={name}": missing_requirement(name, backend.device, torch.bfloat16) for name in BACKENDS}
    if not transformer_engine.HAVE_TE:
        missing["transformer_impl=transformer_engine"] = "transformer-engine is not installed"
    about = {
        "backend": backend.name,
        "name": backend.description,
        "bf16": backend.has_bf16,
        "torch": torch.__version__,
        "peak_bf16": None if backend.is_cpu else backend.peak_flops(torch.bfloat16),
        "host_bf16": cpu_has_bf16(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "lacking": {name: why for name, why in missing.items() if why},
    }
    if not backend.is_cpu:
        about["memory"] = torch.cuda.get_device_properties(0).total_memory
        about["compute_capability"] = list(torch.cuda.get_device_capability(0))
    yield ["device"], about


def run_job(job: dict[str, Any]) -> Iterator[JobResult]:
    """Yield the (keys, value) results of a job, then its messages; for an empty job, only import libraries.

    Raises JobFailed, which every process can unpickle.
    """
    from megaenc.backend.megatron import import_megatron

    import_megatron()
    import torch.distributed

    from megaenc.bench.gpu import speed, synthetic  # noqa: F401

    if not job:
        return
    messages: list[str] = []
    module, _, name = job["kind"].partition(".")
    try:
        function = getattr(importlib.import_module(f"megaenc.bench.gpu.{module}"), name)
        with capture_messages(messages.append):  # such as kernels that failed their self-test
            yield from function(**job.get("arguments", {}), deadline=job["deadline"])
        yield ["said", job["name"]], messages
    except Exception as error:
        traceback.print_exc()
        raise JobFailed(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    finally:
        if torch.distributed.is_initialized():  # left over by a failed job
            synthetic.destroy_process()
