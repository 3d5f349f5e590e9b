"""Python imports this when it starts: the faults that PLANTED names are put into the process that carries checks out.

A fault is in all ranks, or "on rank 1" alone.
"""

import os
import signal
import sys


def die(*_, **__) -> None:
    """In the place of torch's own attention, which is what there is without an accelerator."""
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
