"""One rank of many, alone: `RANK=R WORLD_SIZE=N many_ranks.py FOLDER NAME FLAGS...` runs the pretraining command as rank R of N.

torch's fake process group stands in for the others, who answer as this rank would; a rank other than 0 receives what rank 0
broadcast in an earlier call with the same FOLDER and NAME. On rank 0 all ranks' chunks are written, zeros in the place of others'
state: the ranges are those that the optimizer would give each. FOLDER/NAME_R.json has, by phase (`start`, `load`, `step 1`,
`save 3`, ...), collectives, groups, accesses to the store and to files of the run, bytes of files written, and seconds of
processor time.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pickle
import shutil
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  registers the backend
from torch.utils._python_dispatch import TorchDispatchMode

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank, get_world_size

# Of torch's operations: the argument with the tensors that a rank holds afterwards, and how the messages of a rank grow.
LOG, LINEAR = "log", "linear"
KINDS = {
    "allreduce_": ("all-reduce", 0, LOG),
    "allreduce_coalesced_": ("all-reduce", 0, LOG),
    "barrier": ("barrier", None, LOG),
    "broadcast_": ("broadcast", 0, LOG),
    "_allgather_base_": ("all-gather", 0, LINEAR),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, LINEAR),
    "allgather_": ("all-gather", 0, LINEAR),
    "gather_": ("gather", 0, LINEAR),
    "scatter_": ("scatter", 1, LINEAR),
    "_reduce_scatter_base_": ("reduce-scatter", 1, LINEAR),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, LINEAR),
}
FILE_EVENTS = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink"}


class Ledger(TorchDispatchMode):
    """What this rank does in each phase."""

    def __init__(self, shared: Path):
        super().__init__()
        self.phase, self.shared, self.own = "start", str(shared.resolve()), threading.get_ident()
        self.counts = collections.defaultdict(collections.Counter)
        self.seconds, self.begin = collections.Counter(), time.process_time()

    def enter(self, phase: str) -> None:
        now = time.process_time()
        self.seconds[self.phase] += now - self.begin
        self.phase, self.begin = phase, now

    def add(self, name: str, number: int = 1) -> None:
        if threading.get_ident() == self.own:
            self.counts[self.phase][name] += number

    @contextlib.contextmanager
    def pause(self):
        """Count nothing in the block, and no time."""
        phase = self.phase
        self.enter("others")
        yield
        self.enter(phase)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.record(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def record(self, name: str, args) -> None:
        kind, number, growth = KINDS[name]
        [group] = [
            dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        ]
        tensors = [] if number is None else torch.utils._pytree.tree_leaves(args[number])
        size = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))
        ranks = group.size()
        if ranks > 1:
            self.add(f"{kind} calls")
            self.add(f"{kind} bytes", size)
            self.add(f"{growth} messages", math.ceil(math.log2(ranks)) if growth == LOG else ranks - 1)

    def audit(self, event: str, args) -> None:
        if event in FILE_EVENTS and isinstance(args[0], (str, Path)) and str(args[0]).startswith(self.shared):
            self.counts[self.phase][f"file {event.removeprefix('os.')}"] += 1  # in any thread

    def write(self, file: Path) -> None:
        self.enter("end")
        self.counts.pop("others", None)
        phases = {name: dict(sorted(counts.items())) | {"seconds": self.seconds[name]} for name, counts in self.counts.items()}
        file.write_text(json.dumps(phases, indent=1))


class LedgerStore(dist.Store):
    """A store in this process whose accesses are counted."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger, self.values = ledger, {}

    def clone(self):
        return self

    def set(self, key, value):
        self.ledger.add("store set")
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        self.ledger.add("store get")
        return self.values[key]

    def add(self, key, number):
        self.ledger.add("store add")
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def check(self, keys):
        self.ledger.add("store check")
        return all(key in self.values for key in keys)

    def wait(self, keys, timeout=None):
        self.ledger.add("store wait")


def chunks_of(engine, rank: int) -> list:
    """The chunks that data-parallel rank `rank` saves."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megaenc.training.checkpoint.state_tensors import list_engine_state

    ranges = {}
    for chunk in engine.chunks:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            buffer.data_parallel_group = SimpleNamespace(rank=lambda: rank, size=group.size)
            for buckets in DistributedOptimizer._build_gbuf_range_map(buffer).values():
                for bucket in buckets:
                    ranges |= {id(weight): places["param"] for weight, places in bucket["param_map"].items()}
            buffer.data_parallel_group = group
    weights = [weight for chunk in engine.chunks for weight in chunk.parameters()]
    prefixes = {tensor.prefix: tensor.values.dtype for tensor in list_engine_state(engine)}
    found = []
    for tensor in (tensor for tensor in list_engine_state(engine) if not tensor.prefix):
        if at := ranges.get(id(weights[tensor.number])):
            own = range(at.start, at.end)
            for prefix, dtype in prefixes.items():
                part = {"prefix": prefix, "values": torch.zeros(len(own), dtype=dtype), "start": at.start, "own": own}
                found += dataclasses.replace(tensor, **part).chunks()
    return found


def pretend_to_save(ledger: Ledger) -> None:
    """Let rank 0 write the chunks of all ranks, and others theirs into a folder that rank 0 has published already."""
    from megaenc.training.checkpoint import manager

    write, publish, list_state = manager.write_chunks, manager.publish_chunks, manager.list_engine_state
    engines = []

    def remember(engine):
        engines[:] = [engine]
        return list_state(engine)

    def write_and_count(folder, rank, chunks):
        folder.mkdir(exist_ok=True)
        write(folder, rank, chunks)
        written = [file.stat().st_size for file in folder.glob(f"__{rank}_0.*")]
        ledger.counts[ledger.phase]["chunk files"] += len(written)
        ledger.counts[ledger.phase]["chunk bytes"] += sum(written)
        if get_rank():
            shutil.rmtree(folder)

    def publish_all(folder, ranks, updates):
        with ledger.pause():
            fsync, os.fsync = os.fsync, lambda file: None
            for rank in range(1, ranks):
                write(folder, rank, chunks_of(engines[0], rank))
            os.fsync = fsync
        before, begin = set(folder.iterdir()), time.perf_counter()
        digests = publish(folder, ranks, updates)
        counts = ledger.counts[ledger.phase]
        counts["publishing seconds"] = time.perf_counter() - begin
        counts["index bytes"] = sum(file.stat().st_size for file in {*folder.iterdir()} - before)
        counts["chunks"] = len(json.loads((folder / "index.json").read_text())["chunks"])
        return digests

    manager.write_chunks, manager.publish_chunks, manager.list_engine_state = write_and_count, publish_all, remember


def pretend(ledger: Ledger, sent: Path) -> None:
    """Replace process groups and store by fakes, and let `ledger` follow the phases by the watchdog."""
    prepare_megatron()
    from megaenc.backend import initialize
    from megaenc.training.distributed import collectives, watchdog
    from megaenc.training.engine import Engine

    store = LedgerStore(ledger)

    def init_process_group(backend, timeout=timedelta(minutes=10)):
        dist.init_process_group("fake", store=store, rank=get_rank(), world_size=get_world_size(), timeout=timeout)

    initialize.init_process_group = init_process_group
    collectives._get_default_store = watchdog._get_default_store = lambda: store
    new_group = dist.new_group

    def new_fake_group(ranks=None, backend=None, **options):
        is_member = ranks is None or get_rank() in ranks
        ledger.add("groups called")
        ledger.add("groups joined", is_member)
        if backend == "gloo" and is_member:  # which connects each pair of ranks when it is made
            ledger.add("gloo connections", len(ranks) - 1)
        return new_group(ranks, **options)

    dist.new_group = new_fake_group
    broadcast = dist.broadcast_object_list
    sent.mkdir(parents=True, exist_ok=True)
    numbers = collections.Counter()

    def next_file(kind):
        numbers[kind] += 1
        return sent / f"{kind}_{numbers[kind]}"

    def broadcast_as_rank_0(object_list, src=None, group=None, device=None, **options):
        file = next_file("broadcast")
        if group is not None and group.size() == 1:
            return
        if get_rank() == 0:
            file.write_bytes(pickle.dumps(object_list))
        elif src != get_rank():
            object_list[:] = pickle.loads(file.read_bytes())
        broadcast(list(object_list), src=get_rank(), group=group)  # counts; a fake one changes nothing

    dist.broadcast_object_list = broadcast_as_rank_0
    pretend_to_save(ledger)
    build, beat, stat = Engine.__init__, watchdog.Watchdog.beat, os.stat

    def build_with_weights(self, plan, backend, init_weights):  # no other rank sends any
        build(self, plan, backend)

    Engine.__init__ = build_with_weights

    def beat_and_mark(self, kind, step):
        if kind != "start":
            ledger.enter(f"{kind} {step}" if kind in ("step", "save") else kind)
        return beat(self, kind, step)

    def counted_stat(path, *args, **options):
        if isinstance(path, (str, Path)) and str(path).startswith(ledger.shared):
            ledger.add("file stat")
        return stat(path, *args, **options)

    watchdog.Watchdog.beat, os.stat = beat_and_mark, counted_stat


def main(folder: Path, name: str, flags: list[str]) -> None:
    ledger = Ledger(folder / "run")
    pretend(ledger, folder / name)
    from megaenc.training import command

    sys.addaudithook(ledger.audit)
    with ledger, contextlib.suppress(SystemExit):
        command.main([*flags, "--save", str(folder / "run")], prog="many_ranks.py")
    ledger.write(folder / f"{name}_{get_rank()}.json")


if __name__ == "__main__":
    silence_libraries()
    main(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:])
