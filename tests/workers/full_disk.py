"""Pretraining on a disk that fills up: `full_disk.py RANK:FUNCTION FLAGS...`.

The function has no space from the second save on.
"""

import errno
import os
import sys

from megaenc.backend import prepare_megatron
from megaenc.training.command import main

FUNCTIONS = {"shard": "write_chunks", "metadata": "publish_chunks"}


def fill(name: str) -> None:
    """Let a function that writes files of a checkpoint fail from its second call on."""
    from megaenc.training.checkpoint import manager

    before = getattr(manager, name)
    calls = []

    def full(*arguments):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return before(*arguments)

    setattr(manager, name, full)


if __name__ == "__main__":
    rank, _, what = sys.argv.pop(1).partition(":")
    prepare_megatron()
    if rank == os.environ.get("RANK", "0"):
        fill(FUNCTIONS[what])
    main(prog="pretrain_encoder.py")
