"""Runs in turn under one torchrun: `in_turn.py JOBS.json`.

Each uses as many of its processes as it wants. Between two runs all processes leave the process
groups; those of the next run join new ones, with its layout.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch.distributed import TCPStore

from megaenc.training.command import main


@contextlib.contextmanager
def beginning_with(weights: str | None) -> Iterator[None]:
    """Start engines that are built in this block with the weights in this file."""
    if weights is None:
        yield
        return
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    from megaenc.model.encoder import named_global_parameters
    from megaenc.training import engine

    given = torch.load(weights)
    build = engine.build_model_chunks

    @torch.no_grad()
    def build_with_given_weights(*arguments, **options):
        chunks = build(*arguments, **options)
        for chunk in chunks:
            for name, parameter in named_global_parameters(chunk):
                parameter.copy_(given[name])
        return chunks

    with mock.patch.object(engine, "build_model_chunks", build_with_given_weights):
        yield


def run_all(jobs: list[dict]) -> None:
    """Run `jobs`, the fields of each `runs.Job`."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    launcher = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    # Each run has a store of its own.
    os.environ |= {
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "localhost",
    }
    # They stay open: torch remembers the port of a closed one, and fails if the system hands it
    # out again.
    stores = []
    for number, job in enumerate(jobs):
        if rank == 0:
            if job["copy_of"]:
                shutil.copytree(job["copy_of"], job["save"])
            stores.append(
                TCPStore("localhost", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
            )
            launcher.set(f"port {number}", str(stores[-1].port))
        if rank < job["processes"]:
            os.environ["MASTER_PORT"] = launcher.get(f"port {number}").decode()
            os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(job["processes"])
            with beginning_with(job["weights"]):
                main([*job["flags"], "--save", job["save"]], prog="in_turn.py")
        if launcher.add(f"left {number}", 1) == world:
            launcher.set(f"over {number}", "")
        launcher.wait([f"over {number}"])


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
