"""The training engine on made work, in a process that has one accelerator to itself."""

import dataclasses
import gc

import numpy as np
import torch

from megaenc import backend as processes
from megaenc.backend import Backend, ParallelConfig, prepare_megatron
from megaenc.bench.synthetic_docs import BenchSetup
from megaenc.data.packing.packed_dataset import ConcatPackedDataset
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan

CORPUS_TOKENS = 1 << 21  # tokens of the made documents, about


def build_plan(setup: BenchSetup, *objectives: str, tokens: int = CORPUS_TOKENS) -> Plan:
    """Return the plan of a run that trains `objectives` on packs of varying documents, cut by the run's own packing."""
    count = max(8, 2 * tokens // (setup.shortest + setup.seq_length))
    packs = ConcatPackedDataset(setup.build_documents(count), np.arange(count), setup.seq_length, 0)
    return setup.build_plan(packs, *objectives)


def init_process() -> Backend:
    """Make this process a run's only one."""
    prepare_megatron()
    return processes.init_distributed(ParallelConfig(), 0)


def free_memory() -> None:
    """Give back the memory that nothing uses any more."""
    gc.collect()
    torch.cuda.empty_cache()


def reset_peak_memory() -> None:
    """Let the accelerator's highest use of memory count from here."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def destroy_process() -> None:
    """Leave no trace for what is begun next in this process."""
    processes.destroy_distributed()
    free_memory()


def configure_batches(engine: Engine, setup: BenchSetup, objective: str, packs: int, micro_batches: int) -> None:
    """Let the updates of `engine` train `objective` in `micro_batches` rows of `packs` packs."""
    sizes = {"micro_batch_size": packs, "global_batch_size": packs * micro_batches}
    settings = dataclasses.replace(engine.plan.settings, **sizes)
    engine.plan = dataclasses.replace(engine.plan, settings=settings, schedule=setup.build_schedule(objective))
    engine.sampler = dataclasses.replace(engine.sampler, **sizes)


def unwrap_encoder(engine: Engine) -> torch.nn.Module:
    """Return the model inside the wrappers of megatron-core."""
    [model] = engine.chunks
    while hasattr(model, "module"):
        model = model.module
    return model


@torch.no_grad()
def fill_random_weights(encoder: torch.nn.Module, deviation: float) -> None:
    """Put in random weights made on the device, the same each time: drawing a billion by counters on the host takes a minute."""
    device = processes.detect_backend().device
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator, device=device).mul_(deviation))


def build_random_engine(plan: Plan, backend: Backend, kind: type[Engine] = Engine) -> Engine:
    """Return an engine for `plan` with the weights of `fill_random_weights`."""
    engine = kind(plan, backend, init_weights=False)
    fill_random_weights(unwrap_encoder(engine), plan.settings.shape.init_method_std)
    engine.optimizer.reload_model_params()
    return engine
