"""The checkpoints that a run writes: complete or invisible, at once or while training goes on, no more than are to stay."""

import contextlib
import json
import os
import queue
import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async

from megaenc.atomic_io import atomic_write, remove_path, fsync_path
from megaenc.dist_env import get_rank
from megaenc.errors import InputError, LocalInputError, first_error_line
from megaenc.training.checkpoint.loader import CheckpointLoader, sharded_state_dict
from megaenc.training.checkpoint.safe_pickle import check_loadable
from megaenc.training.checkpoint_dir import (
    DIGEST_FIELD,
    STATE_FILE,
    TRACKER_FILE,
    DamagedCheckpointError,
    UnreadableCheckpointError,
    file_digest,
    file_digests,
    json_digest,
)
from megaenc.training.dist.collectives import all_gather_call, broadcast_call
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan
from megaenc.training.skip_policy import saw_same_data

Digests = dict[str, dict[str, Any]]
Bucket = tuple[str, str, tuple[list, list]]  # megatron-core's: path, name in the metadata, (items and bytes, items and tensors)


class ShardedStateWriter:
    """A sharded state dict on its way to the disk; all ranks construct and complete it together, on the main thread."""

    def __init__(self, state: dict[str, Any], folder: Path, copy: bool) -> None:
        """Plan how `read_state` goes into the empty `folder`, and take this rank's shards off the accelerator.

        With `copy` those in host memory are copied too, and `read_state` may change before they are written. LocalInputError, for
        `together.shared_fate` to spread, where rank 0 cannot write to the folder.
        """
        self.folder = folder
        in_use = {_address(each.data) for each in nested_values(state) if isinstance(getattr(each, "data", None), torch.Tensor)}
        # Where megatron-core's writers leave their results. Its own is a server process, which a signal to the process group
        # ends and the death of this process does not.
        self._results = filesystem_async._results_queue = queue.Queue()
        with _convert_disk_errors(folder, LocalInputError):
            self._request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
        self._buckets: list[Bucket] = self._request.preload_fn() if self._request.async_fn else []  # none: nothing to write here
        if copy:  # but for what is a copy already, as megatron-core makes of parts of tensors
            self._buckets = [
                (path, name, (plain, [(item, each.clone() if _address(each) in in_use else each) for item, each in tensors]))
                for path, name, (plain, tensors) in self._buckets
            ]

    def write_shards(self) -> Digests:
        """Write this rank's shards to the disk, each by a thread of its own; return `file_digest` of each file.

        megatron-core would fork a process for each: beside threads of gloo or a GPU that may hang, and one that is killed is
        waited for without end. InputError where one cannot be written.
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
            return file.name, file_digest(file) if file.exists() else {}

        with _convert_disk_errors(self.folder, InputError):
            with ThreadPoolExecutor(len(buckets)) as pool:
                digests_of_shards = dict(pool.map(write, range(len(buckets))))
            written = dict(results.get() for _ in buckets)
            for result in written.values():
                if isinstance(result, Exception):
                    raise result
        self._results.put(written)
        return digests_of_shards

    def write_metadata(self) -> None:
        """Write what says which shard holds what, once all ranks have written theirs. LocalInputError as above."""
        with _convert_disk_errors(self.folder, LocalInputError):
            for finalize in self._request.finalize_fns:
                finalize()


def format_write_error(folder: Path, error: Exception) -> str:
    """Return the line for an `error` of the disk."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):  # torch's writer stumbles over what the failed write left
        cause = cause.__cause__ or cause.__context__
    reason = cause.strerror if cause is not None and cause.strerror else first_error_line(error)
    return f"{folder}: cannot be written to: {reason}"


@contextlib.contextmanager
def _convert_disk_errors(folder: Path, kind: type[InputError]) -> Iterator[None]:
    """Turn an error of the disk into one of `kind`."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = "PytorchStreamWriter" in str(error) or "inline_container" in str(error)  # as torch's writer in C++ says it
        if isinstance(error, RuntimeError) and not full:
            raise
        raise kind(format_write_error(folder, error)) from None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class CheckpointManager(CheckpointLoader):
    """Those of the run that is being made: it adds to them, and removes what is not to stay."""

    def __init__(
        self, folder: Path, keep_last: int | None = None, keep_every: int | None = None, keep_steps: Collection[int] = ()
    ):
        """`keep_last`, `keep_every` and `keep_steps` say what `delete_old` leaves."""
        super().__init__(folder)
        self._keep = (keep_last, keep_every)
        self._keep_steps = keep_steps
        self._thread = ThreadPoolExecutor(1)  # the end of the process waits for it, or ends it
        self._work: Future | None = None  # of a save that is under way: what the thread is at
        self._attempt: Path | None = None
        self.before_publish: Callable[[], None] = lambda: None
        """Called on rank 0 right before a checkpoint gets its name; if it raises InputError, it gets none."""

    def retarget_tracker(self, plan: Plan) -> None:
        """On rank 0: let the tracker, which exports go by, name no checkpoint that has read packs which `plan` leaves out."""
        named = self.tracked_step()
        if named is None or self.is_compatible(named, plan):
            return
        before = [step for step in self.compatible_steps(plan) if step < named]
        if before:
            atomic_write(self.folder / TRACKER_FILE, f"{before[-1]}\n")
        else:
            (self.folder / TRACKER_FILE).unlink()

    def save(self, engine: Engine, step: int, progress: dict[str, Any], block: bool = True) -> None:
        """Write the checkpoint of `step` with `progress` in its JSON; all ranks call this together, on the main thread.

        Once on the disk it gets its name, the tracker follows, and superfluous ones go. Without `block` a thread does most of
        that from a copy: call `finish_save` until it is done. A save under way is finished first. InputError if it fails: then
        nothing of the attempt is left, and the others are as they were.
        """
        self.finish_save()
        self._stages = self._save_stages(engine, step, progress, copy=not block)
        self._work = next(self._stages)
        self._device = engine.device
        if block:
            self.finish_save()

    @property
    def is_saving(self) -> bool:
        """Whether a save was begun that is not done yet; the same on all ranks."""
        return self._work is not None

    def finish_save(self, block: bool = True) -> None:
        """Take a save as far as it has come, or to its end, on all ranks and their main threads. Errors: as of `save`."""
        while self.is_saving and (block or self._is_done_on_all_ranks()):
            futures.wait([self._work])
            self._work = None  # an error ends the save
            self._work = next(self._stages, None)

    def _is_done_on_all_ranks(self) -> bool:
        done = torch.tensor([self._work.done()], dtype=torch.int, device=self._device)
        dist.all_reduce(done, dist.ReduceOp.MIN)  # one for each step: no objects
        return bool(done)

    def _save_stages(self, engine: Engine, step: int, progress: dict[str, Any], copy: bool) -> Iterator[Future]:
        """A save in its parts: yields what a thread is to do before the next, which follows once that is done on all ranks."""
        self._attempt = attempt = broadcast_call(lambda: self._create_attempt_dir(step))
        state = {"step": step, **progress, "skip_packs": list(engine.plan.skipped.texts), "identity": engine.plan.identity}
        try:
            sharded = ShardedStateWriter(sharded_state_dict(engine, is_loading=False), attempt, copy)
            yield (writing := self._thread.submit(sharded.write_shards))
            shards = {name: entry for each in all_gather_call(writing.result) for name, entry in each.items()}
            sharded.write_metadata()
            self._attempt = None  # rank 0 alone goes on with it
            publish = partial(self._publish, attempt, state, shards, engine.plan) if get_rank() == 0 else lambda: None
            yield (publishing := self._thread.submit(publish))
            broadcast_call(publishing.result)
        except InputError as error:
            if get_rank() == 0 and not isinstance(error, LocalInputError):
                shutil.rmtree(attempt, ignore_errors=True)
            raise type(error)(f"{error}; step {step} is not saved, {self._describe_previous(step)}") from None

    def save_weights(self, module: torch.nn.Module, identity: dict[str, Any]) -> None:
        """Write `module`, a whole model without optimizer, as the checkpoint of step 0, using it up matrix by matrix."""
        attempt = self._create_attempt_dir(0)
        state = module.sharded_state_dict(prefix="model.")
        for name, whole in state.items():
            if isinstance(whole, ShardedTensorFactory):
                state[name] = whole.build()
                for part in nested_values(state[name]):
                    part.data = part.data.clone()
                whole.data.untyped_storage().resize_(0)
        weights = ShardedStateWriter({"model": {"0": state}}, attempt, copy=False)
        shards = weights.write_shards()
        weights.write_metadata()
        self._publish(attempt, {"step": 0, "identity": identity}, shards)

    @contextlib.contextmanager
    def drain_saves(self) -> Iterator[None]:
        """However the block ends, no save is under way after it: it is finished, where all ranks leave the block together."""
        try:
            yield
        except BaseException as error:
            together = isinstance(error, InputError) and not isinstance(error, LocalInputError)
            if together or dist.get_world_size() == 1:
                self.finish_save()
            elif self.is_saving:
                futures.wait([self._work])
            raise
        self.finish_save()

    def remove_attempt(self) -> None:
        """Remove what a save has written that an error of one rank cut off: once no other can write any more."""
        if self._attempt:
            shutil.rmtree(self._attempt, ignore_errors=True)

    def _describe_previous(self, step: int) -> str:
        before = [other for other in self.steps() if other < step]
        if not before:
            return "and no step before it"
        return f"step {before[-1]} is: give the same command again when the cause is gone"

    def _create_attempt_dir(self, step: int) -> Path:
        attempt = self.folder / f".{self.path(step).name}.{uuid.uuid4().hex}"
        try:
            attempt.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{format_write_error(self.folder, error)}; step {step} is not saved, {self._describe_previous(step)}") from None
        return attempt

    def _publish(self, attempt: Path, state: dict[str, Any], shards: Digests, plan: Plan | None = None) -> None:
        target = self.path(state["step"])
        check_loadable(attempt)
        with _convert_disk_errors(attempt, InputError):
            files = [file for file in sorted(attempt.iterdir()) if file.name not in shards]
            for path in (*files, attempt):
                fsync_path(path)
            state["files"] = dict(sorted((shards | file_digests(files)).items()))
        with _convert_disk_errors(self.folder, InputError):
            atomic_write(attempt / STATE_FILE, json.dumps(state | {DIGEST_FIELD: json_digest(state)}, indent=1))
            fsync_path(attempt)
            self.before_publish()
            if target.exists():  # damaged, or of a save that was cut off before its tracker was written
                self._remove(target)
            os.rename(attempt, target)
            fsync_path(self.folder)
            atomic_write(self.folder / TRACKER_FILE, f"{state['step']}\n")
        self.delete_old(state["step"], plan)

    def _remove(self, path: Path) -> None:
        """Under another name first: a removal that is cut off leaves nothing that looks like a checkpoint."""
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def delete_old(self, newest: int, plan: Plan | None = None) -> None:
        """Remove on rank 0, after a save of step `newest`, what `checkpoints_to_delete` names, and what is older and of no use.

        Of no use, and none of the last that stay, is what is damaged or has read packs that `plan` leaves out. Nothing goes
        unless `newest` is whole; steps beyond it stay until they are made again, as does what cannot be read or removed now.
        """
        if not any(self._keep) or not self.is_complete(newest):
            return
        useful, useless = [], set()
        for step in (step for step in self.steps() if step < newest):
            try:
                state = self.read_state(step)
            except UnreadableCheckpointError:
                continue
            except DamagedCheckpointError:
                state = None
            if state and (plan is None or saw_same_data(plan, state)):
                useful.append(step)
            else:
                useless.add(step)
        for step in useless | {*checkpoints_to_delete(useful, *self._keep, self._keep_steps)}:
            with contextlib.suppress(OSError):
                self._remove(self.path(step))

    def remove_leftovers(self) -> None:
        """Remove what attempts and removals that were killed have left. For rank 0, under the lock of the run folder."""
        for stale in (*self.folder.glob(".iter_*"), *self.folder.glob(".*.tmp")):
            remove_path(stale)


def checkpoints_to_delete(
    older: Iterable[int], keep_last: int | None, keep_every: int | None, keep_steps: Collection[int] = ()
) -> list[int]:
    """Return the steps of `older` checkpoints that may go next to a newer one: none if neither rule is given.

    The `keep_last` newest stay, the newer one counted (1 unless given), the multiples of `keep_every`, and `keep_steps`.
    """
    if keep_last is None and keep_every is None:
        return []
    old = sorted(older, reverse=True)[(keep_last or 1) - 1 :]
    return [step for step in reversed(old) if step not in keep_steps and (not keep_every or step % keep_every)]
