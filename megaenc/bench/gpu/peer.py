"""transformers beside this project on the same work: documents, weights, precision, documents of an update.

The peer is that of `megaenc bench pretrain`: a plain loop, batches padded to their longest document, bfloat16 by autocast,
torch's fused AdamW; once with documents as they come and, where there is time, once sorted by length. Its batch is the largest of
those tried that fits; this project takes as many documents an update.
"""

import dataclasses
import gc
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megaenc.bench import turns
from megaenc.bench.gpu import made
from megaenc.bench.gpu.made import Setup
from megaenc.bench.pretrain import PADDED, SORTED, TOLERANCE
from megaenc.data.run_data import RunData
from megaenc.training.engine import Engine

OURS = "megaenc, as many documents"
BATCHES = (32, 16, 8, 4)


def kernels(host: bool) -> list[str]:
    """transformers' attentions worth a trial: eager keeps all scores of all heads, which no accelerator's memory has room for."""
    if host:
        return ["sdpa"]
    return ["sdpa"] + ["flash_attention_2"] * bool(importlib.util.find_spec("flash_attn"))


def beside(
    setup: Setup, objective: str, documents: int, passes: int, folder: Path, deadline: float
) -> Iterator[tuple[list[str], Any]]:
    """A row for each side, and how they compare. Their weights lie in `folder` meanwhile, whose owner outlives this process."""
    if not importlib.util.find_spec("transformers") or not importlib.util.find_spec("safetensors"):
        yield ["peer", "left out"], "transformers or safetensors is not installed"
        return
    work = turns.Work(
        model=setup.model,
        vocab_size=setup.vocab_size,
        objective=objective,
        documents=documents,
        shortest=setup.shortest,
        longest=setup.seq_length,
        batch=min(documents, BATCHES[0]),
        passes=passes,
        bf16=setup.bf16,
        weights=str(folder / "weights.safetensors"),
    )
    rows: dict[str, dict[str, Any]] = {}
    made.begin()
    _write_weights(setup, work)
    made.end()
    work, trials = _best(work)
    yield ["peer", "attention, seconds of a pass over one batch"], trials
    for name, turn in (
        (PADDED, turns.train_with_transformers),
        (OURS, partial(_ours, setup)),
        (SORTED, _sorted),
    ):
        if time.monotonic() > deadline:
            yield ["peer", "left out", name], "no time left"
            continue
        while name not in rows:
            try:
                rows[name] = _row(work, turn)
            except torch.OutOfMemoryError:
                halves = name == PADDED and work.batch > BATCHES[-1]
                if not halves:
                    yield ["peer", "left out", name], f"out of memory with {work.batch} documents an update"
                    break
                work = dataclasses.replace(work, batch=work.batch // 2)
            _clean()
        _clean()
        yield ["peer", "rows"], rows
    yield ["peer", "same_loss"], same_loss(rows, setup.bf16)
    Path(work.weights).unlink()


def same_loss(rows: dict[str, dict[str, Any]], bf16: bool) -> bool:
    """Whether all sides began with the same loss over all documents, within rounding."""
    losses = [row["loss"] for row in rows.values()]
    return bool(losses) and all(abs(loss - losses[0]) <= TOLERANCE[bf16] * losses[0] for loss in losses)


def _write_weights(setup: Setup, work: turns.Work) -> None:
    """Those that the engine is filled with, for transformers."""
    from megaenc.backend import Layout, detect
    from megaenc.model.encoder import build_encoder

    encoder = build_encoder(setup.shape, setup.vocab_size, setup.seq_length, Layout(), torch.float32, seed=None)
    made.fill(encoder.named_parameters(), setup.shape.init_method_std, detect().device)
    turns.save_for_peer(dict(encoder.named_parameters()), work)


def _best(work: turns.Work) -> tuple[turns.Work, dict[str, Any]]:
    """`work` with the largest batch that fits the peer and its fastest attention, and the seconds of each."""
    trials: dict[str, Any] = {}
    for batch in (each for each in BATCHES if each <= work.batch and work.documents % each == 0):
        for kernel in kernels(not torch.cuda.is_available()):
            tried = dataclasses.replace(work, batch=batch, kernel=kernel, documents=batch, passes=1)
            try:
                trials[kernel] = turns.train_with_transformers(tried)["seconds"]
            except torch.OutOfMemoryError:
                pass
            except (ImportError, ValueError) as error:  # of flash-attn, which does not take every model
                trials[f"{kernel} did not run"] = str(error)[:200]
            _clean()
        taken = {kernel: value for kernel, value in trials.items() if isinstance(value, float)}
        if taken:
            return dataclasses.replace(work, batch=batch, kernel=min(taken, key=taken.__getitem__)), trials | {"batch": batch}
    raise RuntimeError(f"transformers: no batch of {BATCHES[-1]} documents or more fits")


def _ours(setup: Setup, work: turns.Work) -> dict[str, Any]:
    """The engine on the documents of each batch end to end."""
    backend = made.begin()
    documents = work.read()
    plan = dataclasses.replace(setup.plan(work.objective), data=RunData((), (), (), documents, None))
    engine = made.filled(Engine(plan, backend, drawn=False))
    made.lay(engine, setup, work.objective, work.batch, 1)
    result = engine.evaluate(documents, work.documents // work.batch, setup.objective(work.objective))
    found: dict[str, Any] = {"loss": result.loss, "predicted": result.predicted}
    engine.update(1)  # what is made once is made here
    with turns.clock(found, made.wait):
        for step in range(2, work.updates + 2):
            engine.update(step)
    del engine
    made.end()
    return found


def _sorted(work: turns.Work) -> dict[str, Any]:
    return turns.train_with_transformers(dataclasses.replace(work, by_length=True))


def _row(work: turns.Work, turn: Callable[[turns.Work], dict[str, Any]]) -> dict[str, Any]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    found = turn(work)
    tokens = work.read().tokens * work.passes
    return {
        "tokens_per_second": tokens / found["seconds"],
        "seconds": found["seconds"],
        "peak_memory": found["peak_memory"],
        "loss": found["loss"],
        "batch": work.batch,
        "attention": work.kernel,
    }


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
