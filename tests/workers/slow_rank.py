"""Pretraining in which one rank is slow: `slow_rank.py RANK:WHERE:SECONDS FLAGS...`.

WHERE is `data`, which sleeps before each micro-batch, or `compute`, which repeats a matrix product in each layer.
"""

import os
import sys
import time

import torch

from megaenc.model.layer import EncoderLayer
from megaenc.training import micro_batches
from megaenc.training.command import main


def slow_data(seconds: float) -> None:
    quick = micro_batches.build_micro_batch

    def micro_batch(*arguments):
        time.sleep(seconds)
        return quick(*arguments)

    micro_batches.build_micro_batch = micro_batch


def slow_compute(seconds: float) -> None:
    matrix = torch.ones(128, 128)
    quick = EncoderLayer.forward

    def forward(self, *arguments, **named):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            matrix @ matrix
        return quick(self, *arguments, **named)

    EncoderLayer.forward = forward


if __name__ == "__main__":
    rank, where, seconds = sys.argv.pop(1).split(":")
    if rank == os.environ.get("RANK", "0"):
        {"data": slow_data, "compute": slow_compute}[where](float(seconds))
    main(prog="pretrain_encoder.py")
