"""Training engine on synthetic documents in a single process with one accelerator."""

import dataclasses
import gc

import numpy as np
import torch

from megaenc import backend as distributed
from megaenc.backend import Backend, ParallelConfig, prepare_megatron
from megaenc.bench.synthetic_docs import BenchSetup
from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan

CORPUS_TOKENS = 1 << 21  # approximate tokens of the synthetic documents


def build_plan(setup: BenchSetup, *objectives: str, tokens: int = CORPUS_TOKENS) -> Plan:
    """Return the Plan of a run on packs of concatenated synthetic documents, about `tokens` tokens, with `objectives`."""
    count = max(8, 2 * tokens // (setup.shortest + setup.seq_length))
    packs = ConcatPackedDataset(setup.build_documents(count), np.arange(count), setup.seq_length, 0)
    return setup.build_plan(packs, *objectives)


def init_process() -> Backend:
    """Initialize megatron-core and torch.distributed in this process alone and return its Backend."""
    prepare_megatron()
    return distributed.init_distributed(ParallelConfig(), 0)


def free_memory() -> None:
    """Collect garbage and free the accelerator memory that torch caches without using it."""
    gc.collect()
    torch.cuda.empty_cache()


def reset_peak_memory() -> None:
    """Reset the accelerator's peak memory statistics; do nothing without one."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def destroy_process() -> None:
    """Destroy the process groups and free memory, so that this process can be initialized again."""
    distributed.destroy_distributed()
    free_memory()


def configure_batches(engine: Engine, setup: BenchSetup, objective: str, packs: int, micro_batches: int) -> None:
    """Make an engine train `objective` with `micro_batches` micro-batches of `packs` packs per step from now on."""
    sizes = {"micro_batch_size": packs, "global_batch_size": packs * micro_batches}
    settings = dataclasses.replace(engine.plan.settings, **sizes)
    engine.plan = dataclasses.replace(engine.plan, settings=settings, schedule=setup.build_schedule(objective))
    engine.sampler = dataclasses.replace(engine.sampler, **sizes)


def unwrap_encoder(engine: Engine) -> torch.nn.Module:
    """Return the engine's encoder module without megatron-core's wrappers."""
    [model] = engine.chunks
    while hasattr(model, "module"):
        model = model.module
    return model


@torch.no_grad()
def fill_random_weights(encoder: torch.nn.Module, deviation: float) -> None:
    """Fill weights with normal numbers of `deviation` (seed 0, on the device), biases with 0, norms with 1."""
    device = distributed.detect_backend().device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device).mul_(deviation))


def build_random_engine(plan: Plan, backend: Backend, kind: type[Engine] = Engine) -> Engine:
    """Return an engine of class `kind` for `plan` with random weights of seed 0, drawn on the device."""
    engine = kind(plan, backend, init_weights=False)
    fill_random_weights(unwrap_encoder(engine), plan.settings.shape.init_method_std)
    engine.optimizer.reload_model_params()
    return engine
