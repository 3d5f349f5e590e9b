"""A recorder of a process's collectives and messages, below torch's functions."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of torch's operations: the argument whose bytes count, the whole of what a collective is about.
KINDS = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "broadcast_": ("broadcast", 0),
    "barrier": ("barrier", 0),
    "alltoall_base_": ("all-to-all", 0),
    "send": ("send", 0),
}
RECEIVED = "recv_"  # the other end of a message that counts where it is sent


class Recorder(TorchDispatchMode):
    """Calls `record` with kind, process group and bytes of each collective or message."""

    def __init__(self, record: Callable[[str, dist.ProcessGroup, int], None]):
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name != RECEIVED:
            kind, number = KINDS[name]
            tensors = [leaf for leaf in tree_leaves(args[number]) if isinstance(leaf, torch.Tensor)]
            objects = [each for each in args if isinstance(each, torch.ScriptObject)]
            [group] = [
                dist.ProcessGroup.unbox(each)
                for each in objects
                if "ProcessGroup" in str(each._type())
            ]
            self.record(kind, group, sum(tensor.nbytes for tensor in tensors))
        return func(*args, **(kwargs or {}))
