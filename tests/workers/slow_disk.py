"""Pretraining on a slow disk: `slow_disk.py UPDATES SECONDS FLAGS...`.

Ranks begin to write their chunks after UPDATES more steps or after SECONDS; rank 0 prints which.
With KILLED in the environment, the process is killed where it would begin to write the chunks of
that step.
"""

import os
import signal
import sys
import time

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
    from megaenc.training.checkpoint import manager

    write = manager.write_chunks

    def slow(directory, rank, chunks):
        step = int(directory.name.split("_")[1].split(".")[0])
        deadline = time.monotonic() + seconds
        while made < step + updates and time.monotonic() < deadline:
            time.sleep(0.01)
        if os.environ.get("KILLED") == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        if get_rank() == 0:
            print(f"shards of step {step} are written after update {made}", flush=True)
        write(directory, rank, chunks)

    manager.write_chunks = slow


if __name__ == "__main__":
    from megaenc.backend import prepare_megatron

    prepare_megatron()
    slow_down(int(sys.argv.pop(1)), float(sys.argv.pop(1)))
    count_updates()
    main(prog="pretrain_encoder.py")
