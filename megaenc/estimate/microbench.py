"""Rates of this machine for a model, measured in one process per rank at the same time.

Measures training steps of two shallow models of the run's width, matrix products and attention of a layer, and an all-reduce.
Times are medians, in seconds.
"""

import dataclasses
import functools
import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import barrier
from torch.utils.benchmark import Timer

from megaenc.backend import Backend, ParallelConfig, destroy_distributed, init_distributed, prepare_megatron
from megaenc.backend.device import detect_backend
from megaenc.console import print_rank_0, silence_libraries
from megaenc.data.packing.packed_dataset import ConcatPackedDataset, RandomLengthPackedDataset
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.estimate.hardware import Link, Rates, count_messages
from megaenc.estimate.layout_case import LayoutCase
from megaenc.estimate.length_model import LengthModel
from megaenc.estimate.memory import compute_stage_memory, saved_keys_per_token, stage_activation_bytes
from megaenc.estimate.step_time import (
    embedding_loss_bytes_moved,
    layer_bytes_moved,
    optimizer_bytes_moved,
    unneeded_bytes_moved,
)
from megaenc.estimate.total import Workload
from megaenc.objectives import Attention, Schedule
from megaenc.processes import ProcessPool, peak_resident_bytes, usable_core_count
from megaenc.training.config import PretrainConfig
from megaenc.training.lr_schedule import WSDSchedule

_MIN_FRACTION = 0.05  # lower bound of a difference of noisy times, relative to another part of the step
DEPTHS = (1, 4)
MICRO_BATCHES = 2  # per measured step
_DATASET_TOKENS = 1 << 18  # total length of the synthetic documents


@dataclass(frozen=True)
class MicrobenchJob:
    """Arguments of one measuring process: rank, config of a rank's shard, objectives, document lengths, seconds."""

    rank: int
    ranks: int
    folder: str
    """directory for rendezvous files"""
    config: PretrainConfig
    """config of one rank's shard of each layer and of the vocabulary, with steps of `MICRO_BATCHES` micro-batches"""
    objectives: tuple[str, ...]
    """objectives whose attention is measured; the first is trained"""
    lengths: tuple[int, ...]
    """document lengths; empty for one document per pack"""
    seconds: float
    """approximate duration of each measurement"""


def calibrate(
    config: PretrainConfig, case: LayoutCase, workload: Workload, docs: LengthModel, known: Rates | None, seconds: float = 4.0
) -> Rates:
    """Return this machine's Rates, measured in a process per device, `seconds` an item; unmeasured links from `known`.

    `known`: rates of --gpu, which supply the links that one machine cannot measure.
    """
    host = detect_backend().is_cpu
    devices = min(case.gpus, usable_core_count() if host else torch.cuda.device_count())
    if devices == 1 < case.gpus and known is None:
        raise InputError(
            f"--calibrate: found one device, expected several to measure the links between {case.gpus}; "
            "add --gpu to use the table's links"
        )
    share_config, objectives = build_share_config(config, case), tuple(dict.fromkeys(work.objective for work in workload.works))
    print_rank_0(f"measuring this machine with {devices} process{'es' if devices > 1 else ''} (about a minute)")
    with tempfile.TemporaryDirectory() as folder, ProcessPool(measure_rank, devices) as workers:
        jobs = [MicrobenchJob(rank, devices, folder, share_config, objectives, docs.lengths, seconds) for rank in range(devices)]
        by_rank = list(workers.map(jobs))
    measurements = {name: mean(one[name] for one in by_rank) for name in by_rank[0]}
    memory = psutil.virtual_memory().total / devices if host else torch.cuda.get_device_properties(0).total_memory
    source = f"{'cpu' if host else torch.cuda.get_device_name()}, {devices} at once, measured here"
    return fit_rates(measurements, share_config, workload, host, devices, memory, known, source)


def build_share_config(config: PretrainConfig, case: LayoutCase) -> PretrainConfig:
    """Return a single-process config with one tensor-parallel rank's shard of the layers and the vocabulary."""
    shape, tensor = config.shape, case.tensor_parallel_size
    shard = dataclasses.replace(
        shape,
        num_attention_heads=shape.num_attention_heads // tensor,
        num_query_groups=shape.num_query_groups // tensor,
        ffn_hidden_size=shape.ffn_hidden_size // tensor,
        kv_channels=shape.head_dim,
        vocab_size=case.vocab_rows,
    )
    return dataclasses.replace(
        config,
        shape=shard,
        layout=ParallelConfig(),
        global_batch_size=MICRO_BATCHES * config.micro_batch_size,
        rampup_batch_size=None,
        train_iters=10_000,
        train_tokens=None,
    )


def fit_rates(
    measurements: dict[str, float],
    share_config: PretrainConfig,
    workload: Workload,
    host: bool,
    devices: int,
    memory: float,
    known: Rates | None,
    source: str,
) -> Rates:
    """Return the Rates with which the estimate's formulas give the measured times and memory of models of 1 and 4 layers.

    The difference between the depths is a layer, which minus matrix products and attention gives the elementwise time. The rest
    of the shallow model is embedding, head and loss; the rest of a step is the optimizer. Memory beyond the formulas is
    fragmentation.
    """
    shallow_depth, deep_depth = DEPTHS
    one, deep = (
        LayoutCase.from_config(
            dataclasses.replace(share_config, shape=dataclasses.replace(share_config.shape, num_layers=depth)),
            share_config.shape.vocab_size,
            1,
        )
        for depth in DEPTHS
    )
    work = dataclasses.replace(workload.works[0], predicted=measurements["predicted"] / share_config.micro_batch_size)
    packs, stage = one.micro_batch_size, one.build_stage(0)
    gemm = packs * work.body_flops(one.shape) / measurements["products"]
    attention = measurements.get("attention") or measurements["causal attention"]
    causal = measurements.get("causal attention") or measurements["attention"]
    # Layers differ in their windows.
    layer_flops = (work.attention_flops(deep.shape) - work.attention_flops(one.shape)) / (deep_depth - shallow_depth)
    core = packs * layer_flops / (causal if work.is_causal else attention)
    shallow_seconds, deep_seconds = (measurements[f"forward and backward {depth}"] for depth in DEPTHS)
    rest = max(
        (deep_seconds - shallow_seconds) / (deep_depth - shallow_depth) - measurements["products"] - core,
        _MIN_FRACTION * measurements["products"],
    )
    head = packs * work.head_flops(one.shape, one.vocab_rows) / gemm
    saved = packs * work.unneeded_flops(one.shape) / gemm + rest * unneeded_bytes_moved(one, work, host) / layer_bytes_moved(
        one, host
    )
    ends = max(shallow_seconds - measurements["products"] + saved - core - rest - head, _MIN_FRACTION * head)
    update = max(measurements[f"whole {deep_depth}"] - MICRO_BATCHES * (deep_seconds + measurements[f"data {deep_depth}"]), 1e-6)
    if devices > 1:
        passed = 2 * (devices - 1) / devices * measurements["bytes activations"]
        bandwidth = passed / max(measurements["reduce activations"] - measurements["reduce small"], 1e-6)
        inside = Link(bandwidth, measurements["reduce small"] / (2 * count_messages(devices)))
    else:
        inside = known.inside if known else Link(float("inf"), 0.0)
    plain = Rates(
        peak=measurements["peak"],
        gemm=gemm,
        attention=attention,
        causal_attention=causal,
        elementwise=layer_bytes_moved(one, host) / rest,
        loss=embedding_loss_bytes_moved(one, work, stage, host) / ends,
        optimizer=optimizer_bytes_moved(deep, deep.build_stage(0)) / update,
        layer_floor=0.0,
        start=measurements[f"data {shallow_depth}"],
        inside=inside,
        between=known.between if known else inside,
        devices=devices if known is None or host else known.devices,
        memory=memory,
        base=measurements["base"],
        host=host,
        source=source,
        saves_probabilities=bool(measurements.get("onednn")),
    )
    context = 0.0 if host else measurements["base"]  # not counted by the device's allocator
    fragments = [
        max(0.0, measurements[f"taken {depth}"] + context - compute_stage_memory(each, work, each.build_stage(0), plain).total)
        for depth, each in ((shallow_depth, one), (deep_depth, deep))
    ]
    keys = saved_keys_per_token(one, work) if plain.saves_probabilities else None
    kept = [stage_activation_bytes(each, each.build_stage(0), host, work, keys)[0] for each in (one, deep)]
    proportional = min(max(0.0, (fragments[1] - fragments[0]) / (kept[1] - kept[0])), 1.0)
    return dataclasses.replace(plain, pieces=max(0.0, fragments[1] - proportional * kept[1]), pieces_of_kept=proportional)


def measure_rank(job: MicrobenchJob) -> dict[str, float]:
    """Return the step times, memory and rates measured in this process, by name, in step with the other processes."""
    silence_libraries()
    os.environ |= {"LOCAL_RANK": str(job.rank), "LOCAL_WORLD_SIZE": str(job.ranks)}
    prepare_megatron()
    backend = init_distributed(ParallelConfig(), 1)
    import megaenc.training.planning
    import megaenc.training.trainer  # noqa: F401

    if job.config.data.tokenizer:
        from megaenc.data.tokenizer.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(job.config.data.tokenizer)  # noqa: F841 - kept in memory as in a run
    store, meetings = dist.FileStore(f"{job.folder}/meeting", job.ranks), itertools.count()

    def synchronize() -> None:
        """Wait for all processes, which share no process group."""
        barrier(store, job.ranks, f"meeting {next(meetings)}")

    dtype = torch.bfloat16 if job.config.bf16 else torch.float32
    case = LayoutCase.from_config(job.config, job.config.shape.vocab_size, 1)
    weights = list(case.shape.linear_shapes(1).values())
    _time_matmuls(backend, dtype, 256, [(256, 256)], 0.1)  # warm-up of libraries
    measurements = {"base": _used_bytes(backend)}
    synchronize()
    measurements["peak"] = backend.peak_flops(dtype)
    synchronize()
    measurements["products"] = _time_matmuls(backend, dtype, case.micro_batch_tokens, weights, job.seconds)
    for depth in DEPTHS:  # the shallow model first: the peak memory only grows
        synchronize()
        gc.collect()  # frees the previous model
        measurements |= _measure_steps(backend, job, depth, synchronize)
    synchronize()
    destroy_distributed()
    return measurements | (
        _measure_all_reduce(backend, job, dtype, case.micro_batch_tokens * case.shape.hidden_size) if job.ranks > 1 else {}
    )


def _median_seconds(call: Callable[[], Any], seconds: float) -> float:
    """Return the median duration of `call` over about `seconds` of repeats."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


def _time_call(backend: Backend, call: Callable[[], Any]) -> float:
    """Return the seconds of one `call`, with device synchronization."""
    clock = time.perf_counter()
    call()
    if not backend.is_cpu:
        torch.cuda.synchronize(backend.device)
    return time.perf_counter() - clock


def _time_matmuls(backend: Backend, dtype: torch.dtype, rows: int, weights: list[tuple[int, int]], seconds: float) -> float:
    """Return the seconds of matrix products of `rows` tokens with each weight [outputs, inputs], forward and backward."""
    random = functools.partial(torch.randn, dtype=dtype, device=backend.device)
    tensors = [(random(rows, columns), random(outputs, columns), random(rows, outputs)) for outputs, columns in weights]

    def call() -> None:
        for x, weight, gradient in tensors:
            x.matmul(weight.t())
            gradient.matmul(weight)
            gradient.t().matmul(x)

    return _median_seconds(call, seconds)


def _measure_steps(backend: Backend, job: MicrobenchJob, depth: int, synchronize: Callable[[], None]) -> dict[str, float]:
    """Return step times, peak memory and attention throughput of a model of `depth` layers in the training engine."""
    from megaenc.training.engine import Engine
    from megaenc.training.plan import Plan
    from megaenc.training.timers import DATA, FORWARD_BACKWARD

    config = dataclasses.replace(job.config, shape=dataclasses.replace(job.config.shape, num_layers=depth))
    size, length, total = config.shape.vocab_size, config.data.seq_length, config.total_iters
    vocabulary = Vocabulary(size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
    cut = RandomLengthPackedDataset if config.data.packing == "random-length" else ConcatPackedDataset
    generator, lengths = np.random.default_rng(0), job.lengths or (length,)
    documents = SimpleNamespace(  # of random tokens; see megaenc.data.packing.token_stream.DocumentSource
        document_lengths=generator.choice(lengths, max(8, _DATASET_TOKENS // max(1, int(np.mean(lengths))))),
        read_spans=lambda _, starts, stops: generator.integers(2, size, int((stops - starts).sum())),
    )
    packs = cut(documents, np.arange(len(documents.document_lengths)), length, config.seed)
    schedules = [Schedule.build(f"{text}:1.0", total, vocabulary, config.seed) for text in job.objectives]
    rate, data = WSDSchedule(1e-6, 0, 1, total), SimpleNamespace(train=packs, held_out=None)
    engine = Engine(Plan(config, vocabulary, None, data, schedules[0], rate), backend)
    predicted = engine.train_step(1).metrics.predicted
    timer_seconds, step_seconds = [], []
    synchronize()
    while len(step_seconds) < 3 or (sum(step_seconds) < 2 * job.seconds and len(step_seconds) < 50):
        step_seconds.append(_time_call(backend, lambda: engine.train_step(len(step_seconds) + 2)))
        timer_seconds.append(engine.step_timers.seconds())
    measurements = {
        f"data {depth}": median(part[DATA] for part in timer_seconds) / MICRO_BATCHES,
        f"forward and backward {depth}": median(part[FORWARD_BACKWARD] for part in timer_seconds) / MICRO_BATCHES,
        f"whole {depth}": median(step_seconds),
        f"taken {depth}": peak_resident_bytes() if backend.is_cpu else torch.cuda.max_memory_reserved(backend.device),
        "predicted": predicted / MICRO_BATCHES,
    }
    for schedule in schedules if depth == DEPTHS[-1] else ():
        synchronize()
        measurements |= _measure_attention(backend, engine, schedule, packs, job.seconds)
    return measurements


def _measure_attention(
    backend: Backend, engine: Any, schedule: Schedule, packs: ConcatPackedDataset, seconds: float
) -> dict[str, float]:
    """Return the FLOP/s of attention over a micro-batch, forward and backward, keyed by "attention" or "causal attention".

    "onednn" is 1 if it is computed by that backend, else 0.
    """
    from megaenc.model.layer import PackedAttention
    from megaenc.model.layer_spec import build_transformer_config
    from megaenc.training.attention_select import select_attention
    from megaenc.training.micro_batches import build_micro_batch

    config, dtype, objective, device = engine.plan.settings, engine.plan.dtype, schedule.objective(1), backend.device
    shape, layout, rows = config.shape, ParallelConfig(), config.micro_batch_size * config.data.seq_length
    attention_backend = select_attention(config.kernels.attention_backend, shape, layout, dtype, {objective.attention}, backend)
    core = PackedAttention(build_transformer_config(shape, layout, dtype), 1, None, "self", backend=attention_backend)
    packing = build_micro_batch(packs, range(config.micro_batch_size), objective, 1, device).packing
    heads, groups, width = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    q, k, v = (torch.randn(rows, 1, n, width, dtype=dtype, device=device, requires_grad=True) for n in (heads, groups, groups))
    gradient = torch.randn(rows, 1, heads * width, dtype=dtype, device=device)

    def call() -> None:
        core(q, k, v, None, packed_seq_params=packing).backward(gradient)
        q.grad = k.grad = v.grad = None  # accumulation would be timed too

    elapsed = _median_seconds(call, seconds)
    layer = dataclasses.replace(shape, num_layers=1, window_size=None)  # `core` has no window
    flops = sum(layer.attention_flops(stop - begin, prefix=prefix - begin) for begin, prefix, stop in packing.spans())
    name = ("causal " if objective.attention is Attention.CAUSAL else "") + "attention"
    return {name: flops / elapsed, "onednn": float(attention_backend == "onednn")}


def _used_bytes(backend: Backend) -> float:
    """Return this process's resident bytes, or on an accelerator its device memory, without a model."""
    if backend.is_cpu:
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(backend.device)
    return total - free - torch.cuda.memory_reserved(backend.device) + torch.cuda.memory_allocated(backend.device)


def _measure_all_reduce(backend: Backend, job: MicrobenchJob, dtype: torch.dtype, row: int) -> dict[str, float]:
    """Return the seconds of all-reduces over all processes, of a small tensor and of a micro-batch's activations."""
    dist.init_process_group(backend.process_group, init_method=f"file://{job.folder}/links", rank=job.rank, world_size=job.ranks)
    activations = torch.ones(row, dtype=dtype, device=backend.device)
    measurements: dict[str, float] = {"bytes activations": activations.nbytes}
    for name, tensor in (("small", torch.ones(8, device=backend.device)), ("activations", activations)):
        times = []
        for _ in range(8):
            dist.barrier()
            times.append(_time_call(backend, functools.partial(dist.all_reduce, tensor)))
        measurements[f"reduce {name}"] = median(times[1:])
    dist.destroy_process_group()
    return measurements
