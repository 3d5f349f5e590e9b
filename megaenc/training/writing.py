"""A sharded checkpoint put on the disk by megatron-core's writer, in threads of this process, with the checksums of its files."""

import contextlib
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megaenc.errors import InputError, LocalInputError
from megaenc.files import sync
from megaenc.training.checkpoint_folder import digest, digests

Digests = dict[str, dict[str, Any]]
Bucket = tuple[str, str, tuple[list, list]]  # megatron-core's: path, name in the metadata, (items and bytes, items and tensors)


class ShardedWrite:
    """A sharded state dict on its way to the disk; all ranks construct and complete it together, on the main thread."""

    def __init__(self, state: dict[str, Any], folder: Path, copy: bool) -> None:
        """Plan how `state` goes into the empty `folder`, and take this rank's shards off the accelerator.

        With `copy` those in host memory are copied too, and `state` may change before they are written. LocalInputError, for
        `together.shared_fate` to spread, where rank 0 cannot write to the folder.
        """
        self.folder = folder
        in_use = {_address(each.data) for each in nested_values(state) if isinstance(getattr(each, "data", None), torch.Tensor)}
        # Where megatron-core's writers leave their results. Its own is a server process, which a signal to the process group
        # ends and the death of this process does not.
        self._results = filesystem_async._results_queue = queue.Queue()
        with _one_line(folder, LocalInputError):
            self._request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        self._buckets: list[Bucket] = self._request.preload_fn() if self._request.async_fn else []  # none: nothing to write here
        if copy:  # but for what is a copy already, as megatron-core makes of parts of tensors
            self._buckets = [
                (path, name, (plain, [(item, each.clone() if _address(each) in in_use else each) for item, each in tensors]))
                for path, name, (plain, tensors) in self._buckets
            ]

    def write(self) -> Digests:
        """Write this rank's shards, each by a thread that then reads it again, from memory still, for its checksum.

        megatron-core would fork a process for each: beside threads of gloo or a GPU that may hang, and one that is killed is
        waited for without end. A thread ends with its process, however that ends. When it returns, all of it is on the disk; it
        returns `digest` of each file. InputError where one cannot be written.
        """
        if not self._buckets:
            return {}
        [transforms, _] = self._request.async_fn.args
        buckets, self._buckets = self._buckets, []
        results, running = queue.Queue(), queue.Queue()

        def write(number: int) -> tuple[str, dict[str, Any]]:
            running.put(number)
            file = Path(buckets[number][0])
            write_bucket = filesystem_async.FileSystemWriterAsync.write_preloaded_data
            write_bucket(transforms, number, buckets[number], results, running, True)
            return file.name, digest(file) if file.exists() else {}

        with _one_line(self.folder, InputError):
            with ThreadPoolExecutor(len(buckets)) as pool:
                digests_of_shards = dict(pool.map(write, range(len(buckets))))
            written = dict(results.get() for _ in buckets)
            for result in written.values():
                if isinstance(result, Exception):
                    raise result
        self._results.put(written)
        return digests_of_shards

    def complete(self) -> None:
        """Write what says which shard holds what, once all ranks have written theirs. LocalInputError as above."""
        with _one_line(self.folder, LocalInputError):
            for finalize in self._request.finalize_fns:
                finalize()


def sync_all(folder: Path, shards: Digests) -> Digests:
    """Put the files of `folder` besides the `shards`, and all names, on the disk; returns `digest` of all. InputError if not."""
    with _one_line(folder, InputError):
        files = [file for file in sorted(folder.iterdir()) if file.name not in shards]
        for path in (*files, folder):
            sync(path)
        return dict(sorted((shards | digests(files)).items()))


def cannot_be_written(folder: Path, error: Exception) -> str:
    """The line for an `error` of the disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch's writer stumbles over what the failed write left
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if cause is not None and cause.strerror else str(error).splitlines()[0]
    return f"{folder}: cannot be written to: {reason}"


@contextlib.contextmanager
def _one_line(folder: Path, kind: type[InputError]) -> Iterator[None]:
    """An error of the disk becomes one of `kind`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = "PytorchStreamWriter" in str(error) or "inline_container" in str(error)  # as torch's writer in C++ says it
        if isinstance(error, RuntimeError) and not full:
            raise
        raise kind(cannot_be_written(folder, error)) from None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
