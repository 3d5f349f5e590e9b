"""One rank of many, alone: `RANK=R WORLD_SIZE=N many_ranks.py DIR NAME FLAGS...`.

It runs the pretraining command as rank R of N. torch's fake process group stands in for the others,
who answer as this rank would; a rank other than 0 receives what rank 0 broadcast in an earlier call
with the same DIR and NAME. On rank 0 all ranks' chunks are written, with zeros in the place of
others' state, in the ranges that the optimizer would give each.

DIR/NAME_R.json has, by phase (`start`, `load`, `step 1`, `save 3`, ...), collectives, groups,
accesses to the store and to files of the run, and bytes of files written.
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
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from collectives import Recorder
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  registers it

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank, get_world_size

FILE_EVENTS = {
    "open",
    "os.listdir",
    "os.scandir",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
}


class Ledger:
    """Counts of what this rank does in each phase, also with files in `shared`."""

    def __init__(self, shared: Path):
        self.shared = str(shared.resolve())
        self.phase = "start"
        self.counts = collections.defaultdict(collections.Counter)
        self.own_thread = threading.get_ident()

    def add(self, name: str, number: int = 1) -> None:
        """Count what this thread does."""
        if threading.get_ident() == self.own_thread:
            self.counts[self.phase][name] += number

    def record(self, kind: str, group: dist.ProcessGroup, size: int) -> None:
        ranks = group.size()
        if ranks > 1:
            self.add(f"{kind} calls")
            self.add(f"{kind} bytes", size)
            if kind in ("all-reduce", "broadcast", "barrier"):
                self.add("log messages", math.ceil(math.log2(ranks)))

    def audit(self, event: str, args) -> None:
        if event in FILE_EVENTS and self.is_shared(args[0]):
            self.counts[self.phase][f"file {event.removeprefix('os.')}"] += 1  # in any thread

    def is_shared(self, path) -> bool:
        return isinstance(path, (str, Path)) and str(path).startswith(self.shared)

    @contextlib.contextmanager
    def pause(self):
        """Count nothing in the block."""
        phase = self.phase
        self.phase = "others"
        yield
        self.phase = phase


class LedgerStore(dist.HashStore):
    """A store in this process whose accesses are counted."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self.ledger = ledger

    def clone(self):
        return self

    def set(self, *arguments):
        self.ledger.add("store set")
        super().set(*arguments)

    def get(self, *arguments):
        self.ledger.add("store get")
        return super().get(*arguments)

    def add(self, *arguments):
        self.ledger.add("store add")
        return super().add(*arguments)

    def check(self, *arguments):
        self.ledger.add("store check")
        return super().check(*arguments)

    def wait(self, *arguments):
        """The others have answered already."""
        self.ledger.add("store wait")


def chunks_of(engine, rank: int) -> list:
    """Return the chunks that data-parallel rank `rank` saves."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from megaenc.training.checkpoint.state_tensors import list_engine_state

    ranges = {}
    for chunk in engine.chunks:
        for buffer in chunk.buffers:
            group = buffer.data_parallel_group
            buffer.data_parallel_group = SimpleNamespace(rank=lambda: rank, size=group.size)
            for buckets in DistributedOptimizer._build_gbuf_range_map(buffer).values():
                for bucket in buckets:
                    ranges |= {
                        id(weight): places["param"]
                        for weight, places in bucket["param_map"].items()
                    }
            buffer.data_parallel_group = group
    weights = [weight for chunk in engine.chunks for weight in chunk.parameters()]
    tensors = list_engine_state(engine)
    dtypes = {tensor.prefix: tensor.values.dtype for tensor in tensors}
    found = []
    for tensor in tensors:
        at = ranges.get(id(weights[tensor.weight_index]))
        if tensor.prefix or not at:
            continue
        held = range(at.start, at.end)
        for prefix, dtype in dtypes.items():
            zeros = torch.zeros(len(held), dtype=dtype)
            found += dataclasses.replace(
                tensor, prefix=prefix, values=zeros, start=at.start, local_range=held
            ).chunks()
    return found


def pretend_to_save(ledger: Ledger) -> None:
    """Let rank 0 write all ranks' chunks, and others into a published directory."""
    from megaenc.training.checkpoint import manager

    write = manager.write_chunks
    publish = manager.publish_chunks
    list_state = manager.list_engine_state
    engines = []

    def remember(engine):
        engines[:] = [engine]
        return list_state(engine)

    def write_and_count(directory, rank, chunks):
        directory.mkdir(exist_ok=True)
        write(directory, rank, chunks)
        ledger.add(
            "chunk bytes", sum(file.stat().st_size for file in directory.glob(f"__{rank}_0.*"))
        )
        if get_rank():
            shutil.rmtree(directory)

    def publish_all(directory, ranks, updates):
        fsync = os.fsync
        os.fsync = lambda file: None
        with ledger.pause():
            for rank in range(1, ranks):
                write(directory, rank, chunks_of(engines[0], rank))
        os.fsync = fsync
        digests = publish(directory, ranks, updates)
        index = directory / "index.json"
        counts = ledger.counts[ledger.phase]
        counts["index bytes"] = index.stat().st_size
        counts["chunks"] = len(json.loads(index.read_text())["chunks"])
        return digests

    manager.write_chunks = write_and_count
    manager.publish_chunks = publish_all
    manager.list_engine_state = remember


def pretend_to_have_groups(ledger: Ledger, sent: Path) -> None:
    """Replace process groups and store by fakes; files in `sent` hold broadcasts."""
    from megaenc.backend import initialize
    from megaenc.training.distributed import collectives, watchdog

    store = LedgerStore(ledger)

    def init_process_group(backend, timeout=timedelta(minutes=10)):
        dist.init_process_group(
            "fake", store=store, rank=get_rank(), world_size=get_world_size(), timeout=timeout
        )

    initialize.init_process_group = init_process_group
    collectives._get_default_store = watchdog._get_default_store = lambda: store
    new_group = dist.new_group

    def new_fake_group(ranks=None, backend=None, **options):
        is_member = ranks is None or get_rank() in ranks
        ledger.add("groups joined", is_member)
        if backend == "gloo" and is_member:  # which connects each pair of ranks when it is made
            ledger.add("gloo connections", len(ranks) - 1)
        return new_group(ranks, **options)

    dist.new_group = new_fake_group
    broadcast = dist.broadcast_object_list
    files = (sent / str(number) for number in range(10_000))

    def broadcast_as_rank_0(object_list, src=None, group=None, device=None, **options):
        file = next(files)
        if group is not None and group.size() == 1:
            return
        if get_rank() == 0:
            file.write_bytes(pickle.dumps(object_list))
        elif src != get_rank():
            object_list[:] = pickle.loads(file.read_bytes())
        # Calling it counts it; a fake broadcast changes nothing.
        broadcast(list(object_list), src=get_rank(), group=group)

    dist.broadcast_object_list = broadcast_as_rank_0


def follow(ledger: Ledger) -> None:
    """Let `ledger` follow the phases by the watchdog, and count looks at files."""
    from megaenc.training.distributed import watchdog
    from megaenc.training.engine import Engine

    build = Engine.__init__
    beat = watchdog.Watchdog.beat
    stat = os.stat

    def build_with_weights(self, plan, backend, init_weights):  # no other rank sends any
        build(self, plan, backend)

    def beat_and_mark(self, kind, step):
        if kind != "start":
            ledger.phase = f"{kind} {step}" if kind in ("step", "save") else kind
        return beat(self, kind, step)

    def counted_stat(path, *args, **options):
        if ledger.is_shared(path):
            ledger.add("file stat")
        return stat(path, *args, **options)

    Engine.__init__ = build_with_weights
    watchdog.Watchdog.beat = beat_and_mark
    os.stat = counted_stat


def main(directory: Path, name: str, flags: list[str]) -> None:
    ledger = Ledger(directory / "run")
    prepare_megatron()
    (directory / name).mkdir(parents=True, exist_ok=True)
    pretend_to_have_groups(ledger, directory / name)
    pretend_to_save(ledger)
    follow(ledger)
    from megaenc.training import command

    sys.addaudithook(ledger.audit)
    with Recorder(ledger.record), contextlib.suppress(SystemExit):
        command.main([*flags, "--save", str(directory / "run")], prog="many_ranks.py")
    ledger.counts.pop("others", None)
    (directory / f"{name}_{get_rank()}.json").write_text(json.dumps(ledger.counts))


if __name__ == "__main__":
    silence_libraries()
    main(Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3:])
