"""Python imports this when it starts: the faults that PLANTED names are put into the process that carries checks out.

A fault of attention is in all ranks, or "on rank 1" alone.
"""

import os
import signal
import sys


def break_attention(fault: str) -> None:
    """torch's own, which is what there is without an accelerator."""
    import torch.nn.functional as F

    right = F.scaled_dot_product_attention

    def doubles_gradients(query, *tensors, **others):
        return right(2 * query - query.detach(), *tensors, **others)

    def dies(*tensors, **others):
        os.kill(os.getpid(), signal.SIGSEGV)

    F.scaled_dot_product_attention = {"doubles gradients": doubles_gradients, "dies": dies}[fault]


if "megaenc.data.worker_pool import serve_worker" in " ".join(sys.orig_argv):
    rank = os.environ.get("RANK", "0")
    for fault in filter(None, os.environ.get("PLANTED", "").split(",")):
        fault, _, where = fault.partition(" on rank ")
        if rank != (where or rank):
            continue
        if fault.startswith("attention "):
            break_attention(fault.removeprefix("attention "))
        elif fault == "odd version":
            from importlib import metadata

            version = metadata.version
            metadata.version = lambda name, version=version: "5.99.0" if name == "transformers" else version(name)
        else:
            raise ValueError(f"PLANTED: no fault {fault!r}")
