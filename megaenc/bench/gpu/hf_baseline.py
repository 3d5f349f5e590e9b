"""Speed of transformers and megaenc on one accelerator with the same documents, weights, precision and batch size.

transformers trains as in `megaenc bench pretrain`, with documents in random order and, time permitting, sorted by length, with
the largest of the tried batch sizes that fits; megaenc uses the same number of documents per step.
"""

import dataclasses
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaenc.bench import train_worker
from megaenc.bench.gpu import synthetic
from megaenc.bench.gpu.worker import JobResult
from megaenc.bench.pretrain import PADDED, SORTED, losses_match

OURS = "megaenc, as many documents"
MIN_BATCH = 4  # documents per step, below which transformers is skipped


def compare_with_hf(job: train_worker.TrainingJob, deadline: float) -> Iterator[JobResult]:
    """Yield speed, memory and loss of each contender, and whether losses agree; `job.batch` is halved until it fits."""
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("safetensors"):
        yield ["peer", "left out"], "transformers or safetensors is not installed"
        return
    rows: dict[str, dict[str, Any]] = {}
    train_worker.write_weights(job, lambda encoder: synthetic.fill_random_weights(encoder, job.shape.init_method_std))
    synthetic.free_memory()
    job, trials = _find_largest_batch(job)
    yield ["peer", "attention, seconds of a pass over one batch"], trials
    for name in (PADDED, OURS, SORTED):
        if time.monotonic() > deadline:
            yield ["peer", "left out", name], "no time left"
            continue
        while name not in rows:
            try:
                rows[name] = _measure_contender(job, name)
            except torch.OutOfMemoryError:
                if name != PADDED or job.batch <= MIN_BATCH:
                    yield ["peer", "left out", name], f"out of memory with {job.batch} documents per step"
                    break
                job = dataclasses.replace(job, batch=job.batch // 2)
            synthetic.free_memory()
        synthetic.free_memory()
        yield ["peer", "rows"], rows
    yield ["peer", "same_loss"], bool(rows) and losses_match([row["loss"] for row in rows.values()], job.bf16)
    Path(job.weights).unlink()


def _find_largest_batch(job: train_worker.TrainingJob) -> tuple[train_worker.TrainingJob, dict[str, Any]]:
    """Return the job with transformers' largest batch that fits and its fastest attention, and the seconds of each trial.

    Eager attention, which keeps all attention scores, does not fit any accelerator and is not tried.
    """
    kernels = ["sdpa"] + ["flash_attention_2"] * bool(torch.cuda.is_available() and importlib.util.find_spec("flash_attn"))
    trials: dict[str, Any] = {}
    while job.batch >= MIN_BATCH:
        for kernel in kernels:
            trial = dataclasses.replace(job, kernel=kernel, documents=job.batch, passes=1)
            try:
                trials[kernel] = train_worker.train_with_transformers(trial)["seconds"]
            except torch.OutOfMemoryError:
                pass
            except (ImportError, ValueError) as error:  # flash-attn does not support every model
                trials[f"{kernel} did not run"] = str(error)[:200]
            synthetic.free_memory()
        durations = {kernel: value for kernel, value in trials.items() if isinstance(value, float)}
        if durations:
            return dataclasses.replace(job, kernel=min(durations, key=durations.__getitem__)), trials | {"batch": job.batch}
        job = dataclasses.replace(job, batch=job.batch // 2)
    raise RuntimeError(f"transformers: no batch of {MIN_BATCH} documents or more fits")


def _measure_contender(job: train_worker.TrainingJob, name: str) -> dict[str, Any]:
    """Return the speed, memory and loss of one contender."""
    synthetic.reset_peak_memory()
    job = dataclasses.replace(job, by_length=name == SORTED)
    if name == OURS:
        backend = synthetic.init_process()
        results = train_worker.train_engine(
            synthetic.build_random_engine(job.build_plan(job.read_documents(), job.objective, batch=job.batch), backend), job
        )
        synthetic.destroy_process()
    else:
        results = train_worker.train_with_transformers(job)
    return {
        "tokens_per_second": job.read_documents().tokens * job.passes / results["seconds"],
        **{key: results[key] for key in ("seconds", "peak_memory", "loss")},
        "batch": job.batch,
        "attention": job.kernel,
    }
