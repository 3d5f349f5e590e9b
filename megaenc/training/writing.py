"""A sharded checkpoint put on the disk by megatron-core's writer, in threads of this process, with the checksums of its files."""

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megaenc.errors import InputError, LocalInputError
from megaenc.ranks import rank
from megaenc.training.checksums import digest, digests
from megaenc.training.together import on_all

Digests = dict[str, dict[str, Any]]


def write_sharded(state: dict[str, Any], folder: Path) -> Digests:
    """Write `state` (megatron-core's sharded state dict) to the empty `folder`; all ranks call this together.

    When it returns, all of it is on the disk; it returns `digest` of every file, on every rank. InputError, on all ranks, where
    a shard cannot be written; LocalInputError, for `together.shared_fate` to spread, where rank 0 cannot write the rest.
    """
    # Where megatron-core's writers leave their results. Its own is a server process, which a signal to the process group ends
    # and the death of this process does not.
    filesystem_async._results_queue = queue.Queue()
    try:
        request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        shards = {name: entry for each in on_all(lambda: _write_shards(request)) for name, entry in each.items()}
        for finalize in request.finalize_fns:
            finalize()
        rest = on_all(lambda: _sync_rest(folder, set(shards)) if rank() == 0 else {})[0]
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_writers(error):
            raise
        raise LocalInputError(cannot_be_written(folder, error)) from None
    return shards | rest


def cannot_be_written(folder: Path, error: Exception) -> str:
    """The line for an `error` of the disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch's writer stumbles over what the failed write left
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if cause is not None and cause.strerror else str(error).splitlines()[0]
    return f"{folder}: cannot be written to: {reason}"


def _is_writers(error: RuntimeError) -> bool:
    """Whether it is how torch's writer in C++ reports a full disk."""
    return "PytorchStreamWriter" in str(error) or "inline_container" in str(error)


def _write_shards(request: AsyncRequest) -> Digests:
    """Write this rank's shards, each by a thread that then reads it again, from memory still, for its checksum.

    megatron-core would fork a process for each: beside threads of gloo or a GPU that may hang, and one that is killed is waited
    for without end.
    """
    if request.async_fn is None:  # nothing to write on this rank
        return {}
    [transforms, _] = request.async_fn.args
    buckets = request.preload_fn()
    results: queue.Queue = queue.Queue()
    running: queue.Queue = queue.Queue()

    def write(number: int) -> tuple[str, dict[str, Any]]:
        running.put(number)
        file = Path(buckets[number][0])
        write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data
        write_bucket(transforms, number, buckets[number], results, running, True)
        return file.name, digest(file) if file.exists() else {}

    with ThreadPoolExecutor(len(buckets)) as pool:
        digests_of_shards = dict(pool.map(write, range(len(buckets))))
    written = dict(results.get() for _ in buckets)
    for result in written.values():
        if isinstance(result, (OSError, RuntimeError)):
            raise InputError(cannot_be_written(Path(buckets[0][0]).parent, result))
        if isinstance(result, Exception):
            raise result
    filesystem_async._results_queue.put(written)
    return digests_of_shards


def _sync_rest(folder: Path, shards: set[str]) -> Digests:
    files = [file for file in sorted(folder.iterdir()) if file.name not in shards]
    for path in (*files, folder):
        sync(path)
    return digests(files)


def sync(path: Path) -> None:
    """Put a file or the names in a folder on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
