"""transformers beside this project on the same work: documents, weights, precision, documents of an update.

The peer is that of `megaenc bench pretrain`: a plain loop, batches padded to their longest document, bfloat16 by autocast,
torch's fused AdamW; once with documents as they come and, where there is time, once sorted by length. Its batch is the largest of
those tried that fits; this project takes as many documents an update.
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
from megaenc.bench.gpu.worker import Finding
from megaenc.bench.pretrain import PADDED, SORTED, same_losses

OURS = "megaenc, as many documents"
SMALLEST = 4  # documents of an update: a peer that has no room for them is left out


def compare_with_hf(work: train_worker.TrainingJob, deadline: float) -> Iterator[Finding]:
    """Yield a row for each side, and how they compare. `work` has the largest batch to try."""
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("safetensors"):
        yield ["peer", "left out"], "transformers or safetensors is not installed"
        return
    rows: dict[str, dict[str, Any]] = {}
    train_worker.write_weights(work, lambda encoder: synthetic.fill(encoder, work.shape.init_method_std))
    synthetic.clean()
    work, trials = _best(work)
    yield ["peer", "attention, seconds of a pass over one batch"], trials
    for name in (PADDED, OURS, SORTED):
        if time.monotonic() > deadline:
            yield ["peer", "left out", name], "no time left"
            continue
        while name not in rows:
            try:
                rows[name] = _row(work, name)
            except torch.OutOfMemoryError:
                if name != PADDED or work.batch <= SMALLEST:
                    yield ["peer", "left out", name], f"out of memory with {work.batch} documents an update"
                    break
                work = dataclasses.replace(work, batch=work.batch // 2)
            synthetic.clean()
        synthetic.clean()
        yield ["peer", "rows"], rows
    yield ["peer", "same_loss"], bool(rows) and same_losses([row["loss"] for row in rows.values()], work.bf16)
    Path(work.weights).unlink()


def _best(work: train_worker.TrainingJob) -> tuple[train_worker.TrainingJob, dict[str, Any]]:
    """Return `work` with the largest batch that fits the peer and its fastest attention, and the seconds of each.

    Eager attention keeps all scores of all heads, which no accelerator's memory has room for: it is not tried.
    """
    kernels = ["sdpa"] + ["flash_attention_2"] * bool(torch.cuda.is_available() and importlib.util.find_spec("flash_attn"))
    trials: dict[str, Any] = {}
    while work.batch >= SMALLEST:
        for kernel in kernels:
            tried = dataclasses.replace(work, kernel=kernel, documents=work.batch, passes=1)
            try:
                trials[kernel] = train_worker.train_with_transformers(tried)["seconds"]
            except torch.OutOfMemoryError:
                pass
            except (ImportError, ValueError) as error:  # of flash-attn, which does not take every model
                trials[f"{kernel} did not run"] = str(error)[:200]
            synthetic.clean()
        taken = {kernel: value for kernel, value in trials.items() if isinstance(value, float)}
        if taken:
            return dataclasses.replace(work, kernel=min(taken, key=taken.__getitem__)), trials | {"batch": work.batch}
        work = dataclasses.replace(work, batch=work.batch // 2)
    raise RuntimeError(f"transformers: no batch of {SMALLEST} documents or more fits")


def _row(work: train_worker.TrainingJob, name: str) -> dict[str, Any]:
    """Return what the side `name` takes; this project has the documents of each batch end to end."""
    synthetic.forget_peak()
    work = dataclasses.replace(work, by_length=name == SORTED)
    if name == OURS:
        backend = synthetic.begin()
        found = train_worker.train_engine(
            synthetic.filled(work.plan(work.read(), work.objective, batch=work.batch), backend), work
        )
        synthetic.end()
    else:
        found = train_worker.train_with_transformers(work)
    return {
        "tokens_per_second": work.read().tokens * work.passes / found["seconds"],
        **{key: found[key] for key in ("seconds", "peak_memory", "loss")},
        "batch": work.batch,
        "attention": work.kernel,
    }
