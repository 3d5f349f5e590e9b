"""Propagation of results and errors across ranks.

No rank waits for one that has ended.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megaenc import flags
from megaenc.backend.reductions import broadcast_object, gather_lowest, is_same_on_all_ranks
from megaenc.dist_env import forbid_restart, get_rank, store_poll_interval
from megaenc.errors import (
    InputError,
    LocalInputError,
    LostConnectionError,
    first_error_line,
    is_disk_full,
)
from megaenc.training.plan import Plan
from megaenc.training.run_dir import describe_difference

Result = TypeVar("Result")
# Paths, whose content is compared instead.
_NODE_LOCAL_FIELDS = (
    "config",
    "data_path",
    "valid_data_path",
    "tokenizer",
)
_INPUT_ERROR_KEY = "megaenc/wrong"
_FAILED_KEY = "megaenc/failed"
_REPORTED_KEY = "megaenc/told"


def call_on_all(function: Callable[[], Result]) -> Result:
    """Call `function` on all ranks, and return its result on this one.

    All ranks call this together, in a process group. It turns an InputError of any rank into one of
    all ranks. Another error is raised on its rank only, and the others wait, see
    `abort_all_on_error`.

    Raises:
        InputError: The error of the lowest rank that failed, on all ranks.
    """
    result, error = _call_catching_input_error(function)
    errors, _ = gather_lowest(error)
    for lowest in errors.values():
        raise lowest
    return result


def broadcast_call(function: Callable[[], Result]) -> Result:
    """Call `function` on rank 0 only, and return its result on every rank.

    All ranks call this together, in a process group. The result must be picklable. An error other
    than InputError is raised on rank 0 only, and the others wait, see `abort_all_on_error`.

    Raises:
        InputError: The error of `function`, on every rank.
    """
    result, error = broadcast_object(
        _call_catching_input_error(function) if get_rank() == 0 else None
    )
    if error is not None:
        raise error
    return result


def _call_catching_input_error(
    function: Callable[[], Result],
) -> tuple[Result | None, InputError | None]:
    """Return the result of `function` and None, or None and its InputError."""
    try:
        return function(), None
    except InputError as error:
        return None, error


def check_same_plan(plan: Plan) -> None:
    """Raise InputError on all ranks if their plans differ, naming field and rank.

    All ranks call this together. Identity, rewinds, starting point, corpora of --valid-data-path,
    and all flags except --config, --data-path, --valid-data-path and --tokenizer are compared with
    those of rank 0. The lowest rank that differs is named.
    """
    values = {
        name: value
        for name, value in flags.flatten(plan.settings).items()
        if name not in _NODE_LOCAL_FIELDS
    }
    values |= plan.identity | {"rewinds": plan.rewinds, "start": dataclasses.asdict(plan.start)}
    values["valid_data"] = {held_out.name: held_out.identity for held_out in plan.validation_sets}
    if is_same_on_all_ranks(json.dumps(values, sort_keys=True).encode()):
        return
    names = ("on rank 0", f"on rank {get_rank()} ({socket.gethostname()})")
    mismatches, _ = gather_lowest(describe_difference(broadcast_object(values), values, names))
    for mismatch in mismatches.values():
        raise InputError(f"{mismatch}; expected the same command and the same files on every node")


@contextlib.contextmanager
def abort_all_on_error(clean_up: Callable[[], None], poll_seconds: float = 0.5) -> Iterator[None]:
    """End all ranks if one raises an error in the context, which all of them enter.

    The rank that fails calls `clean_up` and raises. Once `clean_up` has returned, the others exit
    silently (os._exit), even from a collective and without calling theirs: with code 2 after a
    LocalInputError or on a full disk, else 1. An InputError that is no LocalInputError must be
    raised by all ranks: it passes on each, without `clean_up`. In a run of one rank, `clean_up` is
    called for a LocalInputError only.

    Args:
        clean_up: Removes what this rank would leave behind.
        poll_seconds: Interval in which ranks look for errors of others, lengthened for many ranks.
    """
    if dist.get_world_size() == 1:
        try:
            yield
        except LocalInputError:
            clean_up()
            raise
        return
    store = _get_default_store()
    has_ended = threading.Event()
    poll_seconds = store_poll_interval(poll_seconds)

    watcher = threading.Thread(
        target=_exit_after_error, args=(store, has_ended, poll_seconds), daemon=True
    )
    watcher.start()
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) and not isinstance(error, LocalInputError):
            raise
        if isinstance(error, InputError) or is_disk_full(error):
            store.set(_INPUT_ERROR_KEY, "")
        if store.add(_FAILED_KEY, 1) > 1:  # likely a consequence of another rank's error
            watcher.join()
        has_ended.set()
        time.sleep(2 * poll_seconds)
        clean_up()
        store.add(_REPORTED_KEY, 1)
        raise
    finally:
        has_ended.set()
        watcher.join()


@contextlib.contextmanager
def convert_connection_errors() -> Iterator[None]:
    """Convert errors of connections of gloo and torch's store to LostConnectionError.

    Other errors pass, also those of NCCL.
    """
    try:
        yield
    except RuntimeError as error:
        # If the node of the store is lost, the store cannot be told of the first error.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        text = first_error_line(cause, max_length=400)
        if not isinstance(cause, dist.DistNetworkError) and "gloo/transport/" not in text:
            raise
        reason = re.sub(r"^\[\S+\] |\. This is typically .*", "", text)
        raise LostConnectionError(
            f"rank {get_rank()} on {socket.gethostname()}: lost the connection to another rank: "
            f"{reason}; expected all processes of the run alive and reachable: see the logs of the "
            "other nodes, and give the same command again to resume"
        ) from error


def _exit_after_error(store: dist.Store, has_ended: threading.Event, poll_seconds: float) -> None:
    """Exit after an error of another rank is reported.

    The code is 2 if that is an InputError or a full disk, else 1. Return when `has_ended` is set,
    or if the store's process is gone, as collectives then fail too.
    """
    with contextlib.suppress(RuntimeError):
        while not has_ended.wait(poll_seconds):
            if not store.check([_FAILED_KEY]):
                continue
            code = 1
            try:
                if store.check([_INPUT_ERROR_KEY]):
                    code = 2
                    forbid_restart(code)
                deadline = time.monotonic() + 20  # a launcher kills all ranks when the first exits
                while time.monotonic() < deadline and not store.check([_REPORTED_KEY]):
                    time.sleep(poll_seconds)
            finally:
                os._exit(code)
