"""Messages of one rank in one step: `communication.py STEP DIRECTORY FLAGS...`.

Every collective and message from the beginning of STEP to that of the next one is written to
DIRECTORY/rank_N.json, with its kind, its group and its bytes, unless the rank is alone in the
group.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from collectives import Recorder

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank


def name_of(wanted):
    """Return the purpose of a group of megatron-core."""
    from megatron.core import parallel_state as groups

    several = {
        "world": [dist.group.WORLD],
        "tensor": [groups.get_tensor_model_parallel_group()],
        "model": [groups.get_model_parallel_group()],
        "embedding": [groups.get_embedding_group()],
        "data": [
            groups.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
            groups.get_data_parallel_group(with_context_parallel=True),
            groups.get_data_parallel_group(),
        ],
        "optimizer": [groups.get_intra_distributed_optimizer_instance_group()],
    }
    found = "another"
    for name, alike in several.items():
        for group in alike:
            if getattr(group, "group_name", None) == wanted.group_name:
                found = name
    return found


def main(step: int, directory: Path, flags: list[str]) -> None:
    prepare_megatron()
    from megaenc.backend import ParallelConfig
    from megaenc.training import trainer
    from megaenc.training.command import main

    train_step = trainer.Trainer.train_step
    calls = []
    predicted = []

    def record(kind, group, size):
        if group.size() > 1:
            calls.append((kind, "pipeline" if kind == "send" else name_of(group), size))

    recorder = Recorder(record)

    def recorded(self, number):
        if number == step:
            recorder.__enter__()
        elif number == step + 1:
            recorder.__exit__(None, None, None)
            record = {"calls": calls, "predicted": predicted[-1]}
            (directory / f"rank_{get_rank()}.json").write_text(json.dumps(record))
        report = train_step(self, number)
        predicted.append(report.result.metrics.predicted)
        return report

    trainer.Trainer.train_step = recorded
    ParallelConfig.check_device = lambda self: None  # gloo can, though there is nothing to gain
    main(flags, prog="communication.py")


if __name__ == "__main__":
    silence_libraries()
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
