"""Faults named in PLANTED, put into the process that runs the checks.

Python imports this module at start. A fault is in all ranks, or "on rank 1" only.
"""

import os
import signal
import sys


def die(*_, **__) -> None:
    """Replace torch's attention, the only one without an accelerator, with a crash."""
    os.kill(os.getpid(), signal.SIGSEGV)


if "megaenc.data.worker_pool import serve_worker" in " ".join(sys.orig_argv):
    rank = os.environ.get("RANK", "0")
    for fault in filter(None, os.environ.get("PLANTED", "").split(",")):
        fault, _, where = fault.partition(" on rank ")
        if rank != (where or rank):
            continue
        if fault == "attention dies":
            import torch.nn.functional as F

            F.scaled_dot_product_attention = die
        elif fault == "odd version":
            from importlib import metadata

            version = metadata.version
            metadata.version = lambda name, version=version: (
                "5.99.0" if name == "transformers" else version(name)
            )
        else:
            raise ValueError(f"PLANTED: no fault {fault!r}")
