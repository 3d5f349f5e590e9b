"""That all processes of a run were told the same: each has read its command line, and the files that it names, for itself."""

import dataclasses
import socket

from megaenc import flags
from megaenc.errors import InputError
from megaenc.training.plan import Plan
from megaenc.training.run_folder import difference
from megaenc.training.together import on_all

_OF_A_NODE = ("config", "data_path", "tokenizer")  # what they lead to is compared instead


def check_alike(plan: Plan) -> None:
    """InputError where the processes have different plans, naming what differs and where; all ranks call this together.

    Another learning rate or list of left-out packs on one node would train on without a sign, another interval would hang.
    """
    values = {name: value for name, value in flags.flatten(plan.settings).items() if name not in _OF_A_NODE}
    values |= plan.identity | {"rewinds": plan.rewinds, "start": dataclasses.asdict(plan.start)}
    (_, first), *others = on_all(lambda: (socket.gethostname(), values))
    for rank, (host, theirs) in enumerate(others, start=1):
        if other := difference(first, theirs, names=("on rank 0", f"on rank {rank} ({host})")):
            raise InputError(f"{other}; expected the same command and the same files on every node")
