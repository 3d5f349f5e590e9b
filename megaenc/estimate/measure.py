"""What this machine does a second, measured in a process of its own for each rank at once; `calibrate` makes rates of it.

Matrix products at the model's own shapes, its attention, memory, whole steps of two shallow models of its width by the training
engine itself, and collectives. Times are medians, in seconds.
"""

import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megaenc.backend import Backend, Layout, prepare_megatron, start, stop
from megaenc.console import quiet
from megaenc.data.vocabulary import Vocabulary
from megaenc.estimate.case import Case
from megaenc.estimate.made_packs import MadePacks
from megaenc.objectives import Attention, Schedule
from megaenc.processes import highest_resident
from megaenc.training.learning_rate import LearningRate
from megaenc.training.settings import PretrainSettings

DEPTHS = (1, 4)
MICRO_BATCHES = 2  # of a measured step
_TOGETHER_MIB = 64


@dataclass(frozen=True)
class Job:
    """What one process is to measure."""

    rank: int
    ranks: int
    folder: str
    """where the processes meet"""
    settings: PretrainSettings
    """one rank's share of each layer and of the vocabulary, with one layer and a step of `MICRO_BATCHES` micro-batches"""
    objectives: tuple[str, ...]
    """the first is trained, the attention of all is measured"""
    lengths: tuple[int, ...]
    """of documents; none: packs as --packing cuts them"""
    seconds: float
    """for each measurement, about"""


def measure(job: Job) -> dict[str, float]:
    """All of it, in this process, at the same time as the others."""
    quiet()
    os.environ |= {"LOCAL_RANK": str(job.rank), "LOCAL_WORLD_SIZE": str(job.ranks)}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler says on the console when it starts and stops
    prepare_megatron()
    backend = start(Layout(), 1)
    import megaenc.training.loop
    import megaenc.training.planning  # noqa: F401

    if job.settings.data.tokenizer:
        from megaenc.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(job.settings.data.tokenizer)  # noqa: F841 - kept, as a run keeps it
    meeting = Meeting(dist.FileStore(f"{job.folder}/meeting", job.ranks), job.ranks)
    found: dict[str, float] = {}
    dtype = torch.bfloat16 if job.settings.bf16 else torch.float32
    _product(backend, dtype, 256, 256, 256, 0.1)  # libraries set themselves up
    found["base"] = _taken(backend)
    meeting.wait()
    found["peak"] = backend.peak_flops(dtype)
    shape = job.settings.shape
    case = Case.of(job.settings, shape.vocab_size, 1)
    packs = MadePacks(job.settings, job.lengths, shape.vocab_size)
    row = case.row
    queries, keys, hidden, inner = shape.query_size, case.keys, shape.hidden_size, shape.ffn_hidden_size
    for name, columns, rows in (
        ("qkv", hidden, queries + 2 * keys),
        ("proj", queries, hidden),
        ("fc1", hidden, 2 * inner),
        ("fc2", inner, hidden),
    ):
        meeting.wait()
        found[f"product {name}"] = _product(backend, dtype, row, columns, rows, job.seconds / 2)
    for objective in job.objectives:
        meeting.wait()
        found |= _attention(backend, dtype, case, packs, objective, job)
    meeting.wait()
    found["memory"] = _memory(backend, job.seconds / 2)
    for depth in DEPTHS:  # the shallower first: the most that was taken grows alone
        meeting.wait()
        gc.collect()  # the model before
        found |= {f"{name} {depth}": value for name, value in _steps(backend, job, depth, packs, meeting).items()}
    meeting.wait()
    found["head"] = _product(backend, dtype, max(1, int(found["predicted 1"])), hidden, case.rows, job.seconds / 2)
    stop()
    return found | (_links(backend, job, dtype, row * hidden) if job.ranks > 1 else {})


class Meeting:
    """Where processes without a common process group wait for each other."""

    def __init__(self, store: dist.Store, ranks: int):
        self._store, self._ranks, self._number = store, ranks, 0

    def wait(self) -> None:
        """Go on when all are here."""
        self._number += 1
        name = f"meeting {self._number}"
        if self._store.add(name, 1) == self._ranks:
            self._store.set(f"{name} begun", "1")
        self._store.wait([f"{name} begun"], timedelta(minutes=5))


def _timed(backend: Backend, call: Callable[[], Any], seconds: float, least: int = 3) -> float:
    """Median seconds of `call`, tried once before, for about `seconds`."""
    call()
    _wait(backend)
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds and len(times) < 200):
        clock = time.perf_counter()
        call()
        _wait(backend)
        times.append(time.perf_counter() - clock)
    return median(times)


def _wait(backend: Backend) -> None:
    if not backend.is_host:
        torch.cuda.synchronize(backend.device)


def _product(backend: Backend, dtype: torch.dtype, rows: int, columns: int, outputs: int, seconds: float) -> float:
    """[rows, columns] by a weight [outputs, columns], forward and both ways back, as a parallel layer has them."""
    x, weight, gradient = (
        torch.randn(shape, dtype=dtype, device=backend.device) for shape in ((rows, columns), (outputs, columns), (rows, outputs))
    )

    def call() -> None:
        x.matmul(weight.t())
        gradient.matmul(weight)
        gradient.t().matmul(x)

    return _timed(backend, call, seconds)


def _attention(backend: Backend, dtype: torch.dtype, case: Case, packs: MadePacks, objective: str, job: Job) -> dict[str, float]:
    """The model's core attention, forward and backward, over a row of packs; its operations as training counts them."""
    from megaenc.model.attention import PackedAttention
    from megaenc.model.layers import transformer_config
    from megaenc.training.attention_choice import choose_attention
    from megaenc.training.batches import micro_batch

    shape = dataclasses.replace(case.shape, num_layers=1)
    config = transformer_config(shape, Layout(), dtype)
    made = _schedule(job, objective).objective(1)
    asked = job.settings.kernels.attention_backend
    chosen = choose_attention(asked, shape, Layout(), dtype, {made.attention}, backend)
    core = PackedAttention(config, 1, None, "self", backend=chosen)
    packing = micro_batch(packs, range(case.micro_batch_size), made, 1, backend.device).packing
    heads, groups, width = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
    q, k, v = (
        torch.randn(case.row, 1, number, width, dtype=dtype, device=backend.device, requires_grad=True)
        for number in (heads, groups, groups)
    )
    gradient = torch.randn(case.row, 1, heads * width, dtype=dtype, device=backend.device)

    def call() -> None:
        core(q, k, v, None, packed_seq_params=packing).backward(gradient)
        q.grad = k.grad = v.grad = None

    seconds = _timed(backend, call, job.seconds)
    flops = sum(shape.attention_flops(stop - begin, prefix=prefix - begin) for begin, prefix, stop in packing.spans())
    causal = made.attention is Attention.CAUSAL
    return {"causal attention" if causal else "attention": flops / seconds}


def _memory(backend: Backend, seconds: float) -> float:
    """Bytes a second of adding one float32 array to another: two are read, one is written."""
    a, b = (torch.ones(_TOGETHER_MIB << 18, device=backend.device) for _ in range(2))
    return 3 * a.nbytes / _timed(backend, lambda: a.add_(b), seconds)


def _schedule(job: Job, objective: str) -> Schedule:
    vocabulary = Vocabulary(job.settings.shape.vocab_size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
    return Schedule.build(f"{objective}:1.0", job.settings.total_iters, vocabulary, job.settings.seed)


def _steps(backend: Backend, job: Job, depth: int, packs: MadePacks, meeting: Meeting) -> dict[str, float]:
    """Whole updates of a model of `depth` layers by the training engine: their parts, and the memory of one."""
    from megaenc.training.engine import Engine
    from megaenc.training.plan import Plan
    from megaenc.training.timing import DATA, FORWARD_BACKWARD

    shape = dataclasses.replace(job.settings.shape, num_layers=depth)
    settings = dataclasses.replace(job.settings, shape=shape)
    schedule = _schedule(job, job.objectives[0])
    vocabulary = Vocabulary(shape.vocab_size, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
    total = settings.total_iters
    data = SimpleNamespace(train=packs, held_out=None)
    plan = Plan(settings, vocabulary, None, data, schedule, LearningRate(1e-6, 0, 1, total))
    engine = Engine(plan, backend)
    steps, parts, whole = itertools.count(1), [], []

    def update() -> int:
        return engine.update(next(steps)).result.predicted

    predicted = update()
    meeting.wait()
    while len(whole) < 3 or (sum(whole) < 2 * job.seconds and len(whole) < 50):
        clock = time.perf_counter()
        update()
        _wait(backend)
        whole.append(time.perf_counter() - clock)
        parts.append(engine.watch.seconds())
    taken = _most_taken(backend)
    peak = _peak_of(backend, update)
    return {
        "data": median(part[DATA] for part in parts) / MICRO_BATCHES,
        "forward and backward": median(part[FORWARD_BACKWARD] for part in parts) / MICRO_BATCHES,
        "whole": median(whole),
        "taken": taken,
        "predicted": predicted / MICRO_BATCHES,
        "peak": peak,
    }


def _peak_of(backend: Backend, update: Callable[[], Any]) -> float:
    """Bytes of tensors that an update needs at its worst moment beyond those that are there before."""
    if not backend.is_host:
        before = torch.cuda.memory_allocated(backend.device)
        torch.cuda.reset_peak_memory_stats(backend.device)
        update()
        return torch.cuda.max_memory_allocated(backend.device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        update()
    taken, highest = 0, 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            taken += event.nbytes()
            highest = max(highest, taken)
    return float(highest)


def _taken(backend: Backend) -> float:
    """Bytes of this process: resident, or of the device's memory."""
    if backend.is_host:
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(backend.device)
    return total - free - torch.cuda.memory_reserved(backend.device) + torch.cuda.memory_allocated(backend.device)


def _most_taken(backend: Backend) -> float:
    """The most that this process has taken so far: resident, or reserved of the device's memory."""
    if backend.is_host:
        return highest_resident()
    return torch.cuda.max_memory_reserved(backend.device)


def _links(backend: Backend, job: Job, dtype: torch.dtype, row: int) -> dict[str, float]:
    """Collectives between all processes: a row of activations, gradients in float32, a message to the next rank."""
    dist.init_process_group(backend.process_group, init_method=f"file://{job.folder}/links", rank=job.rank, world_size=job.ranks)
    small = torch.ones(8, device=backend.device)
    activations = torch.ones(row, dtype=dtype, device=backend.device)
    gradients = torch.ones(_TOGETHER_MIB << 18, device=backend.device)

    def exchange(tensor: torch.Tensor) -> None:
        """There and back between neighbours."""
        other = job.rank ^ 1
        if other < job.ranks:
            first, second = (dist.send, dist.recv) if job.rank < other else (dist.recv, dist.send)
            first(tensor, other)
            second(tensor, other)

    found = {}
    for name, call in (
        ("reduce small", lambda: dist.all_reduce(small)),
        ("reduce activations", lambda: dist.all_reduce(activations)),
        ("reduce gradients", lambda: dist.all_reduce(gradients)),
        ("send small", lambda: exchange(small)),
        ("send activations", lambda: exchange(activations)),
    ):
        times = []
        for _ in range(8):
            dist.barrier()
            clock = time.perf_counter()
            call()
            _wait(backend)
            times.append(time.perf_counter() - clock)
        found[name] = median(times[1:])
    found |= {"bytes activations": activations.nbytes, "bytes gradients": gradients.nbytes}
    dist.destroy_process_group()
    return found
