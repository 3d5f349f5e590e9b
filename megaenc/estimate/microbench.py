"""Rates of this machine for this model, measured in a process of its own for each rank at once, and what follows from it.

Whole steps of two shallow models of the run's width by the training engine itself, matrix products and attention of a layer, and
an all-reduce. Times are medians, in seconds.
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
from megaenc.estimate.hardware import Link, Rates, messages
from megaenc.estimate.layout_case import LayoutCase
from megaenc.estimate.length_model import LengthModel
from megaenc.estimate.memory import kept_bytes, stage_memory
from megaenc.estimate.step_time import ends_bytes_moved, layer_bytes_moved, update_bytes_moved
from megaenc.estimate.total import Workload
from megaenc.objectives import Attention, Schedule
from megaenc.processes import ProcessPool, peak_resident_bytes, usable_core_count
from megaenc.training.config import PretrainConfig
from megaenc.training.lr_schedule import WSDSchedule

_LEAST = 0.05  # of what was measured beside it, where times that vary leave nothing for a part of a step
DEPTHS = (1, 4)
MICRO_BATCHES = 2  # of a measured step
_TOKENS = 1 << 18  # of the documents that are read


@dataclass(frozen=True)
class MicrobenchJob:
    """What one process is to measure."""

    rank: int
    ranks: int
    folder: str
    """where the processes meet"""
    settings: PretrainConfig
    """one rank's share of each layer and of the vocabulary, with one layer and a step of `MICRO_BATCHES` micro-batches"""
    objectives: tuple[str, ...]
    """the first is trained, the attention of all is measured"""
    lengths: tuple[int, ...]
    """of documents; none: packs as --packing cuts them"""
    seconds: float
    """for each measurement, about"""


def calibrate(
    settings: PretrainConfig, case: LayoutCase, demand: Workload, docs: LengthModel, known: Rates | None, seconds: float = 4.0
) -> Rates:
    """Measure, `seconds` for each thing, a minute in all, in processes that have one rank's share each and compute at once.

    `known`: the machine of --gpu, whose links between nodes count where the run has more than one.
    """
    host = detect_backend().is_cpu
    devices = min(case.gpus, usable_core_count() if host else torch.cuda.device_count())
    if devices == 1 < case.gpus and known is None:
        raise InputError(
            f"--calibrate: found one device here, which cannot say how {case.gpus} are connected; "
            "give --gpu too, for the table's links"
        )
    share, objectives = share_of(settings, case), tuple(dict.fromkeys(work.objective for work in demand.works))
    print_rank_0(f"measuring this machine, {devices} process{'es' if devices > 1 else ''} at once (about a minute)")
    with tempfile.TemporaryDirectory() as folder, ProcessPool(measure, devices) as workers:
        jobs = [MicrobenchJob(rank, devices, folder, share, objectives, docs.lengths, seconds) for rank in range(devices)]
        each = list(workers.map(jobs))
    found = {name: mean(one[name] for one in each) for name in each[0]}
    memory = psutil.virtual_memory().total / devices if host else torch.cuda.get_device_properties(0).total_memory
    source = f"{'cpu' if host else torch.cuda.get_device_name()}, {devices} at once, measured here"
    return rates_from(found, share, demand, host, devices, memory, known, source)


def share_of(settings: PretrainConfig, case: LayoutCase) -> PretrainConfig:
    """Return one rank's share of every layer and of the vocabulary, as a run of one process."""
    shape, tensor = settings.shape, case.tensor
    part = dataclasses.replace(
        shape,
        num_attention_heads=shape.num_attention_heads // tensor,
        num_query_groups=shape.num_query_groups // tensor,
        ffn_hidden_size=shape.ffn_hidden_size // tensor,
        kv_channels=shape.head_dim,
        vocab_size=case.rows,
    )
    return dataclasses.replace(
        settings,
        shape=part,
        layout=ParallelConfig(),
        global_batch_size=MICRO_BATCHES * settings.micro_batch_size,
        rampup_batch_size=None,
        train_iters=10_000,
        train_tokens=None,
    )


def rates_from(
    found: dict[str, float],
    share: PretrainConfig,
    demand: Workload,
    host: bool,
    devices: int,
    memory: float,
    known: Rates | None,
    source: str,
) -> Rates:
    """Return rates such that the formulas give what was measured, for the model of one layer and for each layer more.

    The difference between the two depths is a layer; without its products and attention it is everything else. What one layer
    does not explain is embedding, head and loss; what is neither is the update. Memory beyond the formulas' is the allocator's.
    """
    few, many = DEPTHS
    one, deep = (
        LayoutCase.of(
            dataclasses.replace(share, shape=dataclasses.replace(share.shape, num_layers=depth)), share.shape.vocab_size, 1
        )
        for depth in DEPTHS
    )
    work = dataclasses.replace(demand.works[0], predicted=found["predicted"] / share.micro_batch_size)
    packs, stage = one.micro_batch_size, one.stage(0)
    gemm = packs * work.body_flops(one.shape) / found["products"]
    attention = found.get("attention") or found["causal attention"]
    causal = found.get("causal attention") or found["attention"]
    core = packs * work.attention_flops(one.shape) / (causal if work.causal else attention)
    shallow, whole = (found[f"forward and backward {depth}"] for depth in DEPTHS)
    rest = max((whole - shallow) / (many - few) - found["products"] - core, _LEAST * found["products"])
    head = packs * work.head_flops(one.shape, one.rows) / gemm
    ends = max(shallow - found["products"] - core - rest - head, _LEAST * head)
    update = max(found[f"whole {many}"] - MICRO_BATCHES * (whole + found[f"data {many}"]), 1e-6)
    if devices > 1:
        passed = 2 * (devices - 1) / devices * found["bytes activations"]
        bandwidth = passed / max(found["reduce activations"] - found["reduce small"], 1e-6)
        inside = Link(bandwidth, found["reduce small"] / (2 * messages(devices)))
    else:
        inside = known.inside if known else Link(float("inf"), 0.0)
    plain = Rates(
        peak=found["peak"],
        gemm=gemm,
        attention=attention,
        causal_attention=causal,
        elementwise=layer_bytes_moved(one) / rest,
        loss=ends_bytes_moved(one, work, stage) / ends,
        optimizer=update_bytes_moved(deep, deep.stage(0)) / update,
        layer_floor=0.0,
        start=found[f"data {few}"],
        inside=inside,
        between=known.between if known else inside,
        devices=devices if known is None or host else known.devices,
        memory=memory,
        base=found["base"],
        host=host,
        source=source,
    )
    context = 0.0 if host else found["base"]  # which the device's allocator does not count
    lost = [
        max(0.0, found[f"taken {depth}"] + context - stage_memory(each, work, each.stage(0), plain).total)
        for depth, each in ((few, one), (many, deep))
    ]
    kept = kept_bytes(one, stage, host)[0]
    growing = min(max(0.0, (lost[1] - lost[0]) / ((many - few) * kept)), 1.0)
    return dataclasses.replace(plain, pieces=max(0.0, lost[1] - growing * many * kept), pieces_of_kept=growing)


def measure(job: MicrobenchJob) -> dict[str, float]:
    """Measure all of it, in this process, at the same time as the others."""
    silence_libraries()
    os.environ |= {"LOCAL_RANK": str(job.rank), "LOCAL_WORLD_SIZE": str(job.ranks)}
    prepare_megatron()
    backend = init_distributed(ParallelConfig(), 1)
    import megaenc.training.planning
    import megaenc.training.trainer  # noqa: F401

    if job.settings.data.tokenizer:
        from megaenc.data.tokenizer.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(job.settings.data.tokenizer)  # noqa: F841 - kept, as a run keeps it
    store, meetings = dist.FileStore(f"{job.folder}/meeting", job.ranks), itertools.count()

    def meet() -> None:
        """Go on when all processes are here, which have no process group in common."""
        barrier(store, job.ranks, f"meeting {next(meetings)}")

    dtype = torch.bfloat16 if job.settings.bf16 else torch.float32
    case = LayoutCase.of(job.settings, job.settings.shape.vocab_size, 1)
    weights = list(case.shape.linear_shapes(1).values())
    _products(backend, dtype, 256, [(256, 256)], 0.1)  # libraries set themselves up
    found = {"base": _taken(backend)}
    meet()
    found["peak"] = backend.peak_flops(dtype)
    meet()
    found["products"] = _products(backend, dtype, case.row, weights, job.seconds)
    for depth in DEPTHS:  # the shallower first: the most that was taken grows alone
        meet()
        gc.collect()  # the model before
        found |= _steps(backend, job, depth, meet)
    meet()
    destroy_distributed()
    return found | (_links(backend, job, dtype, case.row * case.shape.hidden_size) if job.ranks > 1 else {})


def _median(call: Callable[[], Any], seconds: float) -> float:
    """Return the median seconds of `call`, tried for about `seconds`."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=seconds).median


def _timed(backend: Backend, call: Callable[[], Any]) -> float:
    """Return the seconds of one `call`, until the device is done with it."""
    clock = time.perf_counter()
    call()
    if not backend.is_cpu:
        torch.cuda.synchronize(backend.device)
    return time.perf_counter() - clock


def _products(backend: Backend, dtype: torch.dtype, rows: int, weights: list[tuple[int, int]], seconds: float) -> float:
    """Return the seconds of `rows` by each weight [outputs, columns], forward and both ways back, as in a layer."""
    random = functools.partial(torch.randn, dtype=dtype, device=backend.device)
    tensors = [(random(rows, columns), random(outputs, columns), random(rows, outputs)) for outputs, columns in weights]

    def call() -> None:
        for x, weight, gradient in tensors:
            x.matmul(weight.t())
            gradient.matmul(weight)
            gradient.t().matmul(x)

    return _median(call, seconds)


def _steps(backend: Backend, job: MicrobenchJob, depth: int, meet: Callable[[], None]) -> dict[str, float]:
    """Return the times of whole updates of a model of `depth` layers by the training engine, their memory, and its attention."""
    from megaenc.training.engine import Engine
    from megaenc.training.plan import Plan
    from megaenc.training.timers import DATA, FORWARD_BACKWARD

    settings = dataclasses.replace(job.settings, shape=dataclasses.replace(job.settings.shape, num_layers=depth))
    size, length, total = settings.shape.vocab_size, settings.data.seq_length, settings.total_iters
    vocabulary = Vocabulary(size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
    cut = RandomLengthPackedDataset if settings.data.packing == "random-length" else ConcatPackedDataset
    drawn, lengths = np.random.default_rng(0), job.lengths or (length,)
    documents = SimpleNamespace(  # of random tokens; see megaenc.data.packing.token_stream.DocumentSource
        document_lengths=drawn.choice(lengths, max(8, _TOKENS // max(1, int(np.mean(lengths))))),
        read_spans=lambda _, starts, stops: drawn.integers(2, size, int((stops - starts).sum())),
    )
    packs = cut(documents, np.arange(len(documents.document_lengths)), length, settings.seed)
    schedules = [Schedule.build(f"{text}:1.0", total, vocabulary, settings.seed) for text in job.objectives]
    rate, data = WSDSchedule(1e-6, 0, 1, total), SimpleNamespace(train=packs, held_out=None)
    engine = Engine(Plan(settings, vocabulary, None, data, schedules[0], rate), backend)
    predicted = engine.train_step(1).result.predicted
    parts, whole = [], []
    meet()
    while len(whole) < 3 or (sum(whole) < 2 * job.seconds and len(whole) < 50):
        whole.append(_timed(backend, lambda: engine.train_step(len(whole) + 2)))
        parts.append(engine.step_timers.seconds())
    found = {
        f"data {depth}": median(part[DATA] for part in parts) / MICRO_BATCHES,
        f"forward and backward {depth}": median(part[FORWARD_BACKWARD] for part in parts) / MICRO_BATCHES,
        f"whole {depth}": median(whole),
        f"taken {depth}": peak_resident_bytes() if backend.is_cpu else torch.cuda.max_memory_reserved(backend.device),
        "predicted": predicted / MICRO_BATCHES,
    }
    for schedule in schedules if depth == DEPTHS[-1] else ():
        meet()
        found |= _attention(backend, engine, schedule, packs, job.seconds)
    return found


def _attention(backend: Backend, engine: Any, schedule: Schedule, packs: ConcatPackedDataset, seconds: float) -> dict[str, float]:
    """Return the FLOP/s, as training counts them, of attention over a row of packs, forward and backward."""
    from megaenc.model.layer_spec import PackedAttention, build_transformer_config
    from megaenc.training.attention_select import select_attention
    from megaenc.training.micro_batches import build_micro_batch

    settings, dtype, objective, device = engine.plan.settings, engine.plan.dtype, schedule.objective(1), backend.device
    shape, layout, rows = settings.shape, ParallelConfig(), settings.micro_batch_size * settings.data.seq_length
    chosen = select_attention(settings.kernels.attention_backend, shape, layout, dtype, {objective.attention}, backend)
    core = PackedAttention(build_transformer_config(shape, layout, dtype), 1, None, "self", backend=chosen)
    packing = build_micro_batch(packs, range(settings.micro_batch_size), objective, 1, device).packing
    heads, groups, width = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    q, k, v = (torch.randn(rows, 1, n, width, dtype=dtype, device=device, requires_grad=True) for n in (heads, groups, groups))
    gradient = torch.randn(rows, 1, heads * width, dtype=dtype, device=device)

    def call() -> None:
        core(q, k, v, None, packed_seq_params=packing).backward(gradient)
        q.grad = k.grad = v.grad = None  # adding to them would be timed too

    taken = _median(call, seconds)
    layer = dataclasses.replace(shape, num_layers=1)
    flops = sum(layer.attention_flops(stop - begin, prefix=prefix - begin) for begin, prefix, stop in packing.spans())
    return {("causal " if objective.attention is Attention.CAUSAL else "") + "attention": flops / taken}


def _taken(backend: Backend) -> float:
    """Return the bytes of this process before it has a model: resident, or of the device's memory."""
    if backend.is_cpu:
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(backend.device)
    return total - free - torch.cuda.memory_reserved(backend.device) + torch.cuda.memory_allocated(backend.device)


def _links(backend: Backend, job: MicrobenchJob, dtype: torch.dtype, row: int) -> dict[str, float]:
    """Return the times of an all-reduce between all processes, of a few numbers and of a row of activations."""
    dist.init_process_group(backend.process_group, init_method=f"file://{job.folder}/links", rank=job.rank, world_size=job.ranks)
    activations = torch.ones(row, dtype=dtype, device=backend.device)
    found: dict[str, float] = {"bytes activations": activations.nbytes}
    for name, tensor in (("small", torch.ones(8, device=backend.device)), ("activations", activations)):
        times = []
        for _ in range(8):
            dist.barrier()
            times.append(_timed(backend, functools.partial(dist.all_reduce, tensor)))
        found[f"reduce {name}"] = median(times[1:])
    dist.destroy_process_group()
    return found
