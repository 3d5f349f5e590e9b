"""What one rank sends in a step of the pretraining command: `communication.py STEP FOLDER FLAGS...`.

Every collective and message from the beginning of STEP to that of the next one is written to FOLDER/rank_N.json, with its kind,
its group, its bytes and the line that called it.
"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank

# Of torch's operations: the argument whose bytes count, the whole of what a collective is about.
KINDS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all-to-all", 0),
    "send": ("send", 0),
}
RECEIVED = {"recv_"}  # the other end of a message that counts where it is sent


class Recorder(TorchDispatchMode):
    """All of torch's collectives and messages between its beginning and its end."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.record(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def record(self, name, args):
        if name in RECEIVED:
            return
        kind, number = KINDS.get(name, (name, 0))
        tensors = [x for x in torch.utils._pytree.tree_leaves(args[number]) if isinstance(x, torch.Tensor)]
        [group] = [
            dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        ]
        frames = [f for f in traceback.extract_stack()[:-2] if "/torch/" not in f.filename]
        called = next((f for f in reversed(frames) if "/megatron/" in f.filename or "/megaenc/" in f.filename), frames[-1])
        self.rows.append({
            "kind": kind,
            "group": "pipeline" if kind == "send" else group_names().get(group.group_name, "another"),
            "ranks": group.size(),
            "bytes": sum(x.numel() * x.element_size() for x in tensors),
            "caller": f"{Path(called.filename).name}: {called.name}",
        })  # fmt: skip


def group_names():
    """What megatron-core's groups are for."""
    from megatron.core import parallel_state as groups

    several = {
        "world": dist.group.WORLD,
        "data": groups.get_data_parallel_group(),
        "tensor": groups.get_tensor_model_parallel_group(),
        "pipeline": groups.get_pipeline_model_parallel_group(),
        "model": groups.get_model_parallel_group(),
        "embedding": groups.get_embedding_group(),
    }
    for with_context in (True, False):
        several[f"data {with_context}"] = groups.get_data_parallel_group(with_context_parallel=with_context)
    several["data intra"] = groups.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    several["optimizer"] = groups.get_intra_distributed_optimizer_instance_group()
    return {
        group.group_name: name.split()[0] for name, group in several.items() if group is not None and hasattr(group, "group_name")
    }


def main(step: int, folder: Path, flags: list[str]) -> None:
    prepare_megatron()
    from megaenc.backend import ParallelConfig
    from megaenc.training import trainer
    from megaenc.training.command import main

    train_step, recorder = trainer._Trainer.train_step, Recorder()

    def recorded(self, number):
        if number == step:
            recorder.__enter__()
        elif number == step + 1:
            recorder.__exit__(None, None, None)
            (folder / f"rank_{get_rank()}.json").write_text(
                json.dumps({"calls": recorder.rows, "predicted": self.metrics.predicted})
            )
        return train_step(self, number)

    trainer._Trainer.train_step = recorded
    ParallelConfig.check_device = lambda self: None  # gloo can, though there is nothing to gain
    main(flags, prog="communication.py")


if __name__ == "__main__":
    silence_libraries()
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
