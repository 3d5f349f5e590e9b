"""Pretraining on a disk that is full where argv[1] says, from the second save on: `RANK:FUNCTION`, the rest are flags."""

import errno
import os
import sys

from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megaenc.training.command import main

WRITERS = {
    "common": (TorchCommonSaveStrategy, "save_common"),
    "shard": (FileSystemWriterAsync, "write_preloaded_data"),
    "metadata": (FileSystemWriterAsync, "finish"),
}


def fill(owner: type, name: str) -> None:
    """Let the second call, and all after it, of a method of megatron-core run out of space."""
    before, calls = getattr(owner, name), []

    def full(*arguments, **named):
        calls.append(1)
        if len(calls) <= (2 if name == "write_preloaded_data" else 1):  # a save has two shards a rank
            return before(*arguments, **named)
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if name != "write_preloaded_data":
            raise error
        _, number, _, results, running, _ = arguments  # it hands its errors on, and is called without an instance
        results.put((number, error))
        return running.get()

    setattr(owner, name, staticmethod(full) if name == "write_preloaded_data" else full)


if __name__ == "__main__":
    rank, _, what = sys.argv.pop(1).partition(":")
    if rank == os.environ.get("RANK", "0"):
        fill(*WRITERS[what])
    main(prog="pretrain_encoder.py")
