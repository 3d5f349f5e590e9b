"""Loaded state compared bit by bit: `loaded_state.py RUN,RUN,... STEP FLAGS...`.

Each rank prints how many elements it holds, and how many bytes of tensors it has read.
"""

import dataclasses
import sys
from pathlib import Path

import torch


def held_chunks(tensor):
    """Return chunks of all that the rank holds, not only its part, in new memory."""
    values = torch.full_like(tensor.values, 7.0)
    held = range(tensor.start, tensor.start + values.numel())
    return values, list(dataclasses.replace(tensor, values=values, local_range=held).chunks())


def main(directories: list[str], step: int, flags: list[str]) -> None:
    from megaenc import backend
    from megaenc.dist_env import get_rank
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    plan = build_plan(parse_config(flags, "loaded_state.py"))
    layout = plan.settings.layout
    device = backend.init_distributed(
        layout, plan.settings.seed, layout.chunks_per_stage(plan.settings.shape.num_layers)
    )
    from megaenc.training.checkpoint import chunk_files
    from megaenc.training.checkpoint.loader import CheckpointLoader
    from megaenc.training.checkpoint.state_tensors import list_engine_state
    from megaenc.training.engine import Engine

    read_into = chunk_files._read_into
    counts = []

    def count_and_read(stream, view):
        counts.append(len(view))
        read_into(stream, view)

    chunk_files._read_into = count_and_read
    for directory in directories:
        engine = Engine(plan, device, init_weights=False)
        checkpoints = CheckpointLoader(Path(directory) / "checkpoints")
        for tensor in list_engine_state(engine):
            tensor.values.fill_(float("nan"))
        counts.clear()
        checkpoints.load(engine, step)
        read = sum(counts)
        updates, reader = checkpoints.open_verified(step)
        assert {group["step"] for group in engine.optimizer.param_groups} == {updates} == {step}
        compared = 0
        for tensor in list_engine_state(engine):
            expected, chunks = held_chunks(tensor)
            reader.read(chunks)
            name = tensor.prefix + tensor.shards[0].key
            assert torch.equal(tensor.values, expected), f"{directory}: {name} on rank {get_rank()}"
            compared += expected.numel()
        print(
            f"{Path(directory).name}: rank {get_rank()} holds {compared} elements as saved, "
            f"has read {read} bytes",
            flush=True,
        )
    backend.destroy_distributed()


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3:])
