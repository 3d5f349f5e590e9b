"""Runs that compute: a layer of attention, trained for a few steps on the job's threads."""

import hashlib
import os
import sys
from pathlib import Path

import torch

THREADS_OF_SERVER = len(os.listdir("/proc/self/task"))
"""When this was imported; more than one would not survive a fork."""


def train(seed: int, threads: int) -> str:
    """SHA-256 of the weights at the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    layer = torch.nn.TransformerEncoderLayer(96, 4, 384, batch_first=True, dropout=0.0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    for _ in range(5):
        loss = layer(torch.randn(16, 100, 96)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([weight.detach().flatten() for weight in layer.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def run(job, report) -> None:
    """Leave the hash beside the model, with the threads that the server had."""
    name = f"{job.train_on}_{job.seed}_{job.learning_rate}"
    Path(job.model.location, name).write_text(f"{train(job.seed, job.protocol.threads)} {THREADS_OF_SERVER}")
    import fake_runs

    fake_runs.run(job, report)


if __name__ == "__main__":
    print(train(int(sys.argv[1]), int(sys.argv[2])))
