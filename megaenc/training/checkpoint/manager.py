"""Atomic synchronous and asynchronous checkpoint writing, with retention."""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megaenc.atomic_io import atomic_write, convert_write_errors, fsync_path, remove_path
from megaenc.backend.reductions import reduce_over_ranks
from megaenc.dist_env import get_rank
from megaenc.errors import InputError, LocalInputError
from megaenc.training.checkpoint.chunk_files import PUBLISHED_FILES, publish_chunks, write_chunks
from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.checkpoint.state_tensors import list_engine_state, list_module_state
from megaenc.training.checkpoint_dir import (
    DIGEST_FIELD,
    STATE_FILE,
    TRACKER_FILE,
    DamagedCheckpointError,
    UnreadableCheckpointError,
    checkpoints_to_delete,
    file_digests,
    json_digest,
)
from megaenc.training.distributed.collectives import broadcast_call, call_on_all
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan
from megaenc.training.skip_policy import saw_same_data


def _write_chunks(directory: Path, rank: int, chunks: Sequence[ShardedTensor]) -> None:
    """Write the chunks of `rank`.

    Raises:
        InputError: They cannot be written.
    """
    if not directory.is_dir():
        raise InputError(
            f"{directory}: not found on {socket.gethostname()}, expected a directory that all "
            "nodes share"
        )
    with convert_write_errors(directory, name_host=True):
        write_chunks(directory, rank, chunks)


def _is_done_on_all_ranks(future: Future) -> bool:
    """Return whether `future` is done on all ranks, which call this together."""
    return all(reduce_over_ranks([future.done()], dist.ReduceOp.MIN))


class CheckpointManager(CheckpointLoader):
    """Checkpoint directory of a run in progress, on every rank.

    `save` writes a checkpoint, with `finish_save` also in the background, and deletes old ones; as
    a CheckpointLoader it verifies and loads them. It is made from the directory of the checkpoints,
    which need not exist yet, and the rules of `checkpoints_to_delete`: `keep_last`, `keep_every`
    and `keep_steps`; without the first two none is deleted. `before_publish` may be a function,
    called on rank 0 in a thread of the save before a checkpoint gets its final name; its InputError
    prevents that.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_steps: Collection[int] = (),
        before_publish: Callable[[], None] | None = None,
    ):
        """Manage the checkpoints in `directory`; nothing is written yet.

        Args:
            directory: Directory of the checkpoints, which need not exist.
            keep_last: Number of newest checkpoints to keep; as in `checkpoints_to_delete`.
            keep_every: Steps that are multiples of it are kept; None for no such rule.
            keep_steps: Further steps to keep.
            before_publish: Called on rank 0, in a thread of the save, before a checkpoint gets its
                final name, which an InputError prevents.
        """
        super().__init__(directory)
        self._keep = (keep_last, keep_every)
        self._keep_steps = keep_steps
        self._before_publish = before_publish
        self._thread = ThreadPoolExecutor(1)  # joined at the end of the process
        self._writing: Future | None = None
        """First half of a running save: this rank's chunks."""
        self._publishing: Future | None = None
        """Second half: the checkpoint gets its name, on rank 0."""
        self._attempt: Path | None = None
        """Directory of a running save, which this rank removes after an error."""
        self._saved_step = 0
        """Step of a running save."""
        # Fields of state.json of checkpoints found to be whole.
        self._complete_states: dict[int, dict[str, Any]] = {}

    def retarget_tracker(self, plan: Plan) -> None:
        """Set the tracker file to the newest checkpoint that skipped the packs of `plan`.

        For rank 0, before a run resumes. Only checkpoints before the tracked one are chosen;
        without any, the file is deleted. Nothing changes if the tracked checkpoint skipped the same
        packs up to its step, is missing, damaged or unreadable, or if there is no tracker file.
        Resumes and exports read that file. No checkpoint is deleted.

        Raises:
            InputError: The tracker file cannot be read or has no number.
        """
        tracked = self.tracked_step()
        if tracked is None or self.is_compatible(tracked, plan):
            return
        earlier = [step for step in self.compatible_steps(plan) if step < tracked]
        if earlier:
            atomic_write(self.directory / TRACKER_FILE, f"{earlier[-1]}\n")
        else:
            (self.directory / TRACKER_FILE).unlink()

    def save(self, engine: Engine, step: int, progress: dict[str, Any], block: bool = True) -> None:
        """Save the checkpoint of `step`, set the tracker and delete old checkpoints.

        All ranks call this together, on the main thread. A running save is finished first. An
        existing checkpoint of `step` is replaced, when the new one is complete.

        Args:
            progress: Further entries of state.json, JSON-ready.
            block: True to finish the save. False returns while a thread writes from a copy in
                host memory: call `finish_save`, which may raise errors, until `is_saving` is False.

        Raises:
            InputError: This checkpoint, or that of the running save, is not saved.
        """
        self.finish_save()
        state = {
            "step": step,
            **progress,
            "skip_packs": list(engine.plan.skipped.texts),
            "identity": engine.plan.identity,
        }
        updates = max(group.get("step", 0) for group in engine.optimizer.param_groups)
        self._saved_step = step
        with self._report_unsaved():
            attempt = broadcast_call(lambda: self._create_attempt_dir(step))
            self._attempt = attempt
            chunks = [
                chunk
                for tensor in list_engine_state(engine)
                if tensor.is_first_copy
                for chunk in tensor.chunks()
            ]
        if not block:
            chunks = [
                dataclasses.replace(chunk, data=chunk.data.to("cpu", copy=True)) for chunk in chunks
            ]
        self._publish_saved = partial(
            self._publish, attempt, state, dist.get_world_size(), updates, engine.plan
        )
        self._writing = self._thread.submit(_write_chunks, attempt, get_rank(), chunks)
        if block:
            self.finish_save()

    @property
    def is_saving(self) -> bool:
        """Return whether a save has begun and `finish_save` has not finished it.

        The answer is the same on all ranks.
        """
        return self._writing is not None or self._publishing is not None

    def finish_save(self, block: bool = True) -> None:
        """Finish a running save; do nothing without one.

        All ranks call this together, on the main thread, and communicate while a save is running.

        Args:
            block: True to wait for it. False finishes only the halves, first the writing and then
                the publishing, that are done on all ranks.

        Raises:
            InputError: The checkpoint is not saved, on all ranks; no save is running then.
        """
        if self._writing is not None and (block or _is_done_on_all_ranks(self._writing)):
            futures.wait([self._writing])
            writing = self._writing
            self._writing = None  # in case of an error
            with self._report_unsaved():
                call_on_all(writing.result)
            if get_rank() > 0:  # only rank 0 needs it now
                self._attempt = None
            self._publishing = self._thread.submit(self._publish_saved)
        if self._publishing is not None and (block or _is_done_on_all_ranks(self._publishing)):
            futures.wait([self._publishing])
            publishing = self._publishing
            self._publishing = None  # in case of an error
            with self._report_unsaved():
                broadcast_call(publishing.result)
            self._attempt = None

    @contextlib.contextmanager
    def _report_unsaved(self) -> Iterator[None]:
        """Add to an InputError in the context that the step is not saved.

        Rank 0, which prints the error, also removes the files of the step.
        """
        try:
            yield
        except InputError as error:
            if get_rank() == 0:
                self.remove_attempt()
                last = "and no step before it"
                earlier = [step for step in self.steps() if step < self._saved_step]
                if earlier:
                    remedy = "give the same command again when the cause is gone"
                    last = f"step {earlier[-1]} is: {remedy}"
                error = type(error)(f"{error}; step {self._saved_step} is not saved, {last}")
            raise error from None

    def save_weights(self, module: torch.nn.Module, identity: dict[str, Any]) -> None:
        """Write the weights of a whole module as the checkpoint of step 0, for imports.

        The module is not divided over ranks; weights keep its data type. One process calls it. An
        existing checkpoint of step 0 is replaced, and the tracker file is set to 0.

        Args:
            module: Megatron module such as an Encoder, with a sharded_state_dict.
            identity: Identity of the run, JSON-ready.

        Raises:
            InputError: The checkpoint cannot be written.
        """
        attempt = self._create_attempt_dir(0)
        _write_chunks(
            attempt,
            0,
            [chunk for tensor in list_module_state(module).values() for chunk in tensor.chunks()],
        )
        self._publish(attempt, {"step": 0, "identity": identity}, ranks=1, updates=0)

    @contextlib.contextmanager
    def drain_saves(self) -> Iterator[None]:
        """Finish a running save at the end of the context, which all ranks enter.

        It raises the errors of `finish_save`. After an error in the context that not all ranks
        share (a LocalInputError, or any other than an InputError), it only waits for this rank's
        threads, so that the checkpoint may not be saved.
        """
        try:
            yield
        except BaseException as error:
            on_all_ranks = isinstance(error, InputError) and not isinstance(error, LocalInputError)
            if on_all_ranks or dist.get_world_size() == 1:
                self.finish_save()
            else:
                futures.wait(
                    [future for future in (self._writing, self._publishing) if future is not None]
                )
            raise
        self.finish_save()

    def remove_attempt(self) -> None:
        """Delete the directory of a save that this process has begun and not finished.

        The directory, if there is one, is shared by all ranks: any may call it, once no other still
        writes there. Errors of the deletion are ignored.
        """
        if self._attempt:
            shutil.rmtree(self._attempt, ignore_errors=True)

    def _create_attempt_dir(self, step: int) -> Path:
        """Create a hidden directory for the files of a checkpoint; return its path."""
        attempt = self.directory / f".{self.path(step).name}.{uuid.uuid4().hex}"
        with convert_write_errors(self.directory, name_host=True):
            attempt.mkdir(parents=True)
        return attempt

    def _publish(
        self,
        attempt: Path,
        state: dict[str, Any],
        ranks: int,
        updates: int,
        plan: Plan | None = None,
    ) -> None:
        """Make a checkpoint that all `ranks` have written permanent, on rank 0.

        Add indexes and state.json, rename the directory, update the tracker and delete old
        checkpoints. Other ranks do nothing.
        """
        if get_rank() > 0:
            return
        target = self.path(state["step"])
        with convert_write_errors(attempt, name_host=True):
            shards = publish_chunks(attempt, ranks, updates)
            files = [attempt / name for name in PUBLISHED_FILES]
            for path in (*files, attempt):
                fsync_path(path)
            state["files"] = dict(sorted((shards | file_digests(files)).items()))
        with convert_write_errors(self.directory, name_host=True):
            atomic_write(
                attempt / STATE_FILE,
                json.dumps(state | {DIGEST_FIELD: json_digest(state)}, indent=1),
            )
            fsync_path(attempt)
            if self._before_publish is not None:
                self._before_publish()
            if target.exists():  # damaged, or interrupted before the tracker was written
                self._remove(target)
            os.rename(attempt, target)
            fsync_path(self.directory)
            atomic_write(self.directory / TRACKER_FILE, f"{state['step']}\n")
        self._remember_complete(state)
        self.delete_old(state["step"], plan)

    def _remember_complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """Keep and return the fields of a whole checkpoint's state.json but its files.

        Later saves then need not look at each of its files again.
        """
        fields = {name: value for name, value in state.items() if name != "files"}
        self._complete_states[state["step"]] = fields
        return fields

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint.

        It is hidden first, so that an interrupted deletion leaves nothing that looks like one.
        """
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def delete_old(self, newest: int, plan: Plan | None = None) -> None:
        """Delete checkpoints before step `newest` by the rules of `checkpoints_to_delete`.

        For rank 0. The rules are those of the constructor. Checkpoints that are damaged, or skipped
        other packs than `plan` (if it is not None), are deleted too, even those of `keep_steps`,
        and do not count as kept. Nothing is deleted without `keep_last` and `keep_every`, or if
        `newest` is incomplete. Later steps stay, and so do checkpoints that currently cannot be
        read or deleted.
        """
        if not any(self._keep) or not self.is_complete(newest):
            return
        useful = []
        useless = set()
        for step in self.steps():
            if step >= newest:
                break
            state = self._complete_states.get(step)
            try:
                state = state or self._remember_complete(self.read_state(step))
            except UnreadableCheckpointError:
                continue
            except DamagedCheckpointError:
                pass
            if state and (plan is None or saw_same_data(plan, state)):
                useful.append(step)
            else:
                useless.add(step)
        for step in useless | {*checkpoints_to_delete(useful, *self._keep, self._keep_steps)}:
            with contextlib.suppress(OSError):
                self._remove(self.path(step))

    def remove_leftovers(self) -> None:
        """Delete what interrupted saves and deletions have left in the directory.

        These are hidden directories and temporary files; those that cannot be deleted stay. For
        rank 0, while no save is running.
        """
        for stale in (*self.directory.glob(".iter_*"), *self.directory.glob(".*.tmp")):
            remove_path(stale)
