"""Pretraining on a disk that takes its time: `slow_disk.py UPDATES SECONDS FLAGS...`.

The writing of each shard begins when UPDATES more updates have been made, or after SECONDS; rank 0 says which had been by then.
"""

import sys
import time
from pathlib import Path

from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megaenc.dist_env import get_rank
from megaenc.training.command import main

made = 0


def count_updates() -> None:
    from megaenc.training.engine import Engine

    update = Engine.train_step

    def counted(self, step, *arguments, **named):
        global made
        result = update(self, step, *arguments, **named)
        made = step
        return result

    Engine.train_step = counted


def slow_down(updates: int, seconds: float) -> None:
    write = FileSystemWriterAsync.write_preloaded_data

    def slow(transforms, number, bucket, *arguments):
        step, deadline = int(Path(bucket[0]).parent.name.split("_")[1].split(".")[0]), time.monotonic() + seconds
        while made < step + updates and time.monotonic() < deadline:
            time.sleep(0.01)
        if get_rank() == 0 and number == 0:
            print(f"shards of step {step} are written after update {made}", flush=True)
        return write(transforms, number, bucket, *arguments)

    FileSystemWriterAsync.write_preloaded_data = staticmethod(slow)


if __name__ == "__main__":
    slow_down(int(sys.argv.pop(1)), float(sys.argv.pop(1)))
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    count_updates()
    main(prog="pretrain_encoder.py")
