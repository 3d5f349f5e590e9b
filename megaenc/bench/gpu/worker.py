"""What a process of the benchmark runs: `python -m megaenc.bench.gpu.worker`, a job a line on stdin, what it finds on stdout.

A job names a generator of this folder as MODULE.FUNCTION, and its arguments. The process loads what all jobs need before it asks
for the first, so that the next process is ready when the one before is done.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from megaenc.console import overheard, quiet


def machine(deadline: float) -> Iterator[tuple[list[str], Any]]:
    """Yield what figures depend on; `lacking`: by FIELD=VALUE of Kernels, what cannot be had here and why."""
    import torch
    from megatron.core.extensions import transformer_engine

    from megaenc.backend import detect
    from megaenc.backend.device import host_has_bf16
    from megaenc.bench import report
    from megaenc.model.attention_backends import ORDER, lacking

    backend = detect()
    yield ["machine"], report.machine()
    missing = {f"attention_backend={name}": lacking(name, backend.device, torch.bfloat16) for name in ORDER}
    if not transformer_engine.HAVE_TE:
        missing["transformer_impl=transformer_engine"] = "transformer-engine is not installed"
    about = {
        "backend": backend.name,
        "name": backend.description,
        "bf16": backend.has_bf16,
        "torch": torch.__version__,
        "peak_bf16": None if backend.is_host else backend.peak_flops(torch.bfloat16),
        "host_bf16": host_has_bf16(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "lacking": {name: why for name, why in missing.items() if why},
    }
    if not backend.is_host:
        about["memory"] = torch.cuda.get_device_properties(0).total_memory
        about["compute_capability"] = list(torch.cuda.get_device_capability(0))
    yield ["device"], about


def serve() -> None:
    """Answer each job with what it finds, `{"path": [...], "value": ...}` a line, then `{"end": null}` or what went wrong.

    The first line of all says that it is ready.
    """
    quiet()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    # What takes its time to import; nothing that touches an accelerator, which may be at work for another process.
    from megaenc.backend.megatron import import_megatron

    import_megatron()
    import torch.distributed

    from megaenc.bench.gpu import made, speed  # noqa: F401

    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        job, said = json.loads(line), []
        try:
            module, _, name = job["kind"].partition(".")
            function = getattr(importlib.import_module(f"megaenc.bench.gpu.{module}"), name)
            with overheard(said.append):  # which kernels were found wrong, for one
                for path, value in function(**job.get("arguments", {}), deadline=job["deadline"]):
                    print(json.dumps({"path": path, "value": value}), file=answers)
            print(json.dumps({"path": ["said", job["name"]], "value": said}), file=answers)
            end = None
        except Exception as error:
            traceback.print_exc()
            end = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if torch.distributed.is_initialized():  # the process groups that a failed job is still in
            made.end()
        print(json.dumps({"end": end}), file=answers)


if __name__ == "__main__":
    serve()
