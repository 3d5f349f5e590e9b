"""Pretraining with a slow rank: `slow_rank.py RANK:SECONDS FLAGS...`.

The rank sleeps before each micro-batch.
"""

import os
import sys
import time

from megaenc.training import micro_batches
from megaenc.training.command import main


def slow_data(seconds: float) -> None:
    quick = micro_batches.build_micro_batch

    def micro_batch(*arguments):
        time.sleep(seconds)
        return quick(*arguments)

    micro_batches.build_micro_batch = micro_batch


if __name__ == "__main__":
    rank, seconds = sys.argv.pop(1).split(":")
    if rank == os.environ.get("RANK", "0"):
        slow_data(float(seconds))
    main(prog="pretrain_encoder.py")
