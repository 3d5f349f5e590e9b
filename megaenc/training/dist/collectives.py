"""What one rank finds out or runs into, all ranks know: none goes on alone, none waits for one that has left."""

import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megaenc import flags
from megaenc.errors import InputError, LocalInputError
from megaenc.torchelastic import exit_without_restart
from megaenc.dist_env import get_rank
from megaenc.training.plan import Plan
from megaenc.training.run_dir import describe_difference

Result = TypeVar("Result")
_OF_A_NODE = ("config", "data_path", "tokenizer")  # what they lead to is compared instead
_WRONG, _FAILED, _TOLD = "megaenc/wrong", "megaenc/failed", "megaenc/told"


def all_gather_call(work: Callable[[], Result]) -> list[Result]:
    """Call `work` on each rank and return the results in the order of the ranks; the first InputError is raised on all."""
    answers: list = [None] * dist.get_world_size()
    dist.all_gather_object(answers, _call_catching_input_error(work))
    for _, error in answers:
        if error is not None:
            raise error
    return [result for result, _ in answers]


def broadcast_call(work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0 and return its result on all; an InputError of it is raised on all."""
    answer = [*_call_catching_input_error(work)] if get_rank() == 0 else [None, None]
    dist.broadcast_object_list(answer)  # gathered, a large result would take its size on each rank as often as there are ranks
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def _call_catching_input_error(work: Callable[[], Result]) -> tuple[Result | None, InputError | None]:
    try:
        return work(), None
    except InputError as error:
        return None, error


def check_same_plan(plan: Plan) -> None:
    """Raise InputError on all ranks if their plans differ, naming what and where: a run would diverge or hang."""
    values = {name: value for name, value in flags.flatten(plan.settings).items() if name not in _OF_A_NODE}
    values |= plan.identity | {"rewinds": plan.rewinds, "start": dataclasses.asdict(plan.start)}
    (_, first), *others = all_gather_call(lambda: (socket.gethostname(), values))
    for number, (host, theirs) in enumerate(others, start=1):
        if other := describe_difference(first, theirs, names=("on rank 0", f"on rank {number} ({host})")):
            raise InputError(f"{other}; expected the same command and the same files on every node")


@contextlib.contextmanager
def abort_all_on_error(clean_up: Callable[[], None], poll_seconds: float = 0.5) -> Iterator[None]:
    """Let an error inside on one rank end the others too, whatever collective they wait in.

    The rank that failed first calls `clean_up` when the others have had time to come to rest, and raises its error; the others
    leave without a word, with exit code 2. An InputError that all ranks raise together is left to itself.
    """
    if dist.get_world_size() == 1:
        try:
            yield
        except LocalInputError:
            clean_up()
            raise
        return
    store, left = _get_default_store(), threading.Event()

    def watch() -> None:
        with contextlib.suppress(RuntimeError):  # without the store's process, which is rank 0 or torchrun, collectives fail too
            while not left.wait(poll_seconds):
                if store.check([_FAILED]):
                    try:
                        if store.check([_WRONG]):
                            exit_without_restart(2)
                        deadline = time.monotonic() + 20  # a launcher ends all when the first has gone
                        while time.monotonic() < deadline and not store.check([_TOLD]):
                            time.sleep(poll_seconds)
                    finally:
                        os._exit(2)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) and not isinstance(error, LocalInputError):
            raise
        if isinstance(error, InputError):
            store.set(_WRONG, "")
        if store.add(_FAILED, 1) > 1:  # another was first, and this is likely how it is noticed here
            watcher.join()
        left.set()
        time.sleep(2 * poll_seconds)
        clean_up()
        store.add(_TOLD, 1)
        raise
    finally:
        left.set()
        watcher.join()
