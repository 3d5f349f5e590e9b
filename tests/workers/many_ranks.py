"""One rank of many, alone: `RANK=R WORLD_SIZE=N many_ranks.py FOLDER NAME FLAGS...` runs the pretraining command as rank R of N.

torch's fake process group stands in for the others, who answer as this rank would; a rank other than 0 receives what rank 0
broadcast in an earlier call with the same FOLDER and NAME. FOLDER/NAME_R.json has, by phase (`start`, `load`, `step 1`, `save 3`,
...), collectives, groups, accesses to the store and to files of the run, and seconds of processor time.
"""

import collections
import contextlib
import dataclasses
import json
import math
import os
import pickle
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
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
            self.add(f"file {event.removeprefix('os.')}")

    def write(self, file: Path) -> None:
        self.enter("end")
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


def as_replica(value):
    """What a rank that holds the same weights, but does not save them, sends in the place of `value`."""
    if isinstance(value, SavePlan):
        return dataclasses.replace(value, items=[])
    if isinstance(value, list) and value and hasattr(value[0], "replica_id"):
        for each in value:
            each.replica_id = (*each.replica_id[:-1], 1) if isinstance(each.replica_id, tuple) else 1
    if isinstance(value, dict) and all(isinstance(key, int) for key in value):  # results of writing
        return {}
    return value


def pretend(ledger: Ledger, sent: Path) -> None:
    """Replace process groups and store by fakes, and let `ledger` follow the phases by the watchdog."""
    prepare_megatron()
    from megaenc.backend import initialize
    from megaenc.training.distributed import collectives, watchdog

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

    all_gather = dist.all_gather_object

    def all_gather_replicas(object_list, obj, group=None):
        all_gather(object_list, obj, group=group)
        for number in range(1, len(object_list)):
            object_list[number] = as_replica(object_list[number])

    def gather_replicas(obj=None, object_gather_list=None, dst=None, group=None, **options):
        ranks, file = dist.get_world_size(group), next_file("gather")
        if get_rank() == 0:
            file.write_bytes(pickle.dumps(len(pickle.dumps(obj))))
        size = pickle.loads(file.read_bytes())  # of the largest object, up to which all are padded
        dist.all_gather_into_tensor(torch.zeros(ranks, dtype=torch.long), torch.zeros(1, dtype=torch.long), group=group)
        parts = torch.zeros(ranks, size, dtype=torch.uint8) if object_gather_list else None
        dist.gather(torch.zeros(size, dtype=torch.uint8), None if parts is None else list(parts), group=group, dst=dst)
        if object_gather_list:
            other = pickle.dumps(as_replica(obj))
            object_gather_list[:] = [obj, *(pickle.loads(other) for _ in range(ranks - 1))]

    dist.all_gather_object, dist.gather_object = all_gather_replicas, gather_replicas
    dist.broadcast_object_list = broadcast_as_rank_0
    beat, stat = watchdog.Watchdog.beat, os.stat

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
