"""Sharded checkpoints in a run folder: complete or invisible, checked before they are read, readable in any layout."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megaenc.console import say
from megaenc.errors import InputError, LocalInputError
from megaenc.files import remove, write_whole
from megaenc.ranks import rank
from megaenc.training.checksums import content_damage, size_damage
from megaenc.training.engine import Engine
from megaenc.training.pickles import check_pickles
from megaenc.training.plan import Plan
from megaenc.training.retention import superfluous
from megaenc.training.run_folder import difference
from megaenc.training.sharded_state import fill, fill_module, sharded_state
from megaenc.training.skipped import read_alike
from megaenc.training.together import on_all, on_rank_0
from megaenc.training.writing import Digests, HostMemory, ShardedWrite, cannot_be_written, sync, sync_all

TRACKER = "latest_checkpointed_iteration.txt"
STATE = "state.json"


class Damaged(InputError):
    """A checkpoint that is not as it was saved; another may be."""


class Checkpoints:
    """The folder `checkpoints` of a run: one `iter_0000100` a save, and a tracker file that names the newest."""

    def __init__(self, folder: Path, keep_last: int | None = None, keep_every: int | None = None):
        """`keep_last` and `keep_every` say what `retain` leaves."""
        self.folder = folder
        self._keep = (keep_last, keep_every)
        self._thread = ThreadPoolExecutor(1)  # the end of the process waits for it, or ends it
        self._memory = HostMemory()
        self._work: Future | None = None  # of a save that is under way: what the thread is at
        self._attempt: Path | None = None

    def latest(self) -> int | None:
        """The step that the tracker names, None where there is no tracker. InputError if that is no number."""
        tracker = self.folder / TRACKER
        if not tracker.exists():
            return None
        text = tracker.read_text(encoding="utf-8").strip()
        if not text.isdecimal():
            raise InputError(f"{tracker}: found {text!r}, expected the number of a step; remove it to go on from the newest")
        return int(text)

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is."""
        return self.folder / f"iter_{step:07d}"

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are there, whole or not, in order."""
        return sorted(int(path.name[5:]) for path in self.folder.glob("iter_*") if path.name[5:].isdecimal())

    def state(self, step: int) -> dict[str, Any]:
        """The JSON saved with the checkpoint of `step`, if every file is there in its size; Damaged names what is not."""
        path = self.path(step)
        if not path.is_dir():
            raise Damaged(f"{path}: missing, expected the checkpoint of step {step}")
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            damage = size_damage(path, state["files"])
            complete = isinstance(state["identity"], dict) and state["step"] == step and bool(state["files"])
            complete = complete and all(isinstance(entry["sha256"], str) for entry in state["files"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what = error.strerror if isinstance(error, OSError) else f"not what a save wrote ({error!r})"
            raise Damaged(f"{path / STATE}: {what}; the checkpoint is incomplete") from None
        if damage or not complete:
            raise Damaged(f"{damage or f'{path / STATE}: not what a save of step {step} wrote'}; the checkpoint is incomplete")
        return state

    def check(self, step: int, identity: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON of the checkpoint of `step`, once every byte is known to be what was saved; all ranks call this together.

        Damaged names the file that is not. InputError where the run that saved it was not that of `identity`, or where one of
        its pickles would do more than hold tensors and plain values.
        """
        state = on_rank_0(lambda: self.state(step))
        path, names = self.path(step), sorted(state["files"])
        mine = names[rank() :: dist.get_world_size()]
        for damage in on_all(lambda: content_damage(path, {name: state["files"][name] for name in mine})):
            if damage:
                raise Damaged(f"{damage}; the checkpoint is damaged")
        if identity is not None and (other := difference(state["identity"], identity)):
            raise InputError(f"{path} is a checkpoint of a different run: {other}; remove it or give the same value")
        on_rank_0(lambda: check_pickles(path))
        return state

    def newest_good(self, plan: Plan) -> dict[str, Any] | None:
        """The JSON of the newest checkpoint that `check` finds whole, None where there is no checkpoint; all ranks together.

        Those up to the step that the tracker names are looked at, but for those that have read packs which `plan` leaves out. A
        damaged one is named in a line; InputError if all are.
        """
        identity, steps = plan.identity, on_rank_0(lambda: self._candidates(plan))
        for step, before in zip(steps, [*steps[1:], None], strict=False):
            try:
                return self.check(step, identity)
            except Damaged as damage:
                if before is None:
                    raise InputError(f"{damage}; no other is there; delete {self.folder} to start anew") from None
                say(f"{damage}: trying that of step {before}")
        return None

    def _candidates(self, plan: Plan) -> list[int]:
        """Newest first. A save that was cut off before its tracker was written left a whole checkpoint and no tracker."""
        named = self.latest()
        steps = self.steps()
        if named is not None:
            steps = sorted({step for step in steps if step < named} | {named})
        return [step for step in steps[::-1] if self._fits(step, plan)]

    def _fits(self, step: int, plan: Plan, damaged: bool = True) -> bool:
        try:
            return read_alike(plan, self.state(step))
        except Damaged:
            return damaged  # to be named

    def fitting(self, plan: Plan) -> list[int]:
        """The steps whose checkpoints look whole and have read no pack that `plan` leaves out."""
        return [step for step in self.steps() if self._fits(step, plan, damaged=False)]

    def leave_behind(self, plan: Plan) -> None:
        """On rank 0: let the tracker name no checkpoint that has read packs which `plan` leaves out; exports go by it.

        Those checkpoints stay until their steps are made again.
        """
        named = self.latest()
        if named is None or self._fits(named, plan):
            return
        before = [step for step in self.fitting(plan) if step < named]
        if before:
            write_whole(self.folder / TRACKER, f"{before[-1]}\n")
        else:
            (self.folder / TRACKER).unlink()

    def save(self, engine: Engine, step: int, progress: dict[str, Any], block: bool = True) -> None:
        """Write the checkpoint of `step` with `progress` in its JSON; all ranks call this together, on the main thread.

        It is written under a name of this attempt and renamed when all of it is on the disk; the tracker follows, and what the
        save made superfluous goes. Without `block` a thread does most of that from a copy while training goes on; `finish_save`
        is to be called until it is done. A save that is not done yet is waited for first. InputError where that cannot be: then
        nothing of the attempt is left, and the checkpoints that were there are as they were.
        """
        self.finish_save()
        self._parts = self._save(engine, step, progress, None if block else self._memory)
        self._work = next(self._parts)
        self._device = engine.device
        if block:
            self.finish_save()

    @property
    def saving(self) -> bool:
        """Whether a save was begun that is not done yet; the same on all ranks."""
        return self._work is not None

    def finish_save(self, block: bool = True) -> None:
        """Take a save that was begun as far as it has come, or to its end; all ranks call this together, on the main thread.

        Errors are those of `save`.
        """
        while self.saving and (block or self._done_on_all()):
            futures.wait([self._work])
            self._work = None  # an error ends the save
            self._work = next(self._parts, None)

    def _done_on_all(self) -> bool:
        done = torch.tensor([self._work.done()], dtype=torch.int, device=self._device)
        dist.all_reduce(done, dist.ReduceOp.MIN)
        return bool(done)

    def _save(self, engine: Engine, step: int, progress: dict[str, Any], memory: HostMemory | None) -> Iterator[Future]:
        """A save in its parts: yields what a thread is to do before the next, which follows once that is done on all ranks."""
        self._attempt = attempt = on_rank_0(lambda: self._begin(step))
        state = {"step": step, **progress, "skip_packs": list(engine.plan.skipped.texts), "identity": engine.plan.identity}
        try:
            sharded = ShardedWrite(sharded_state(engine, is_loading=False), attempt, memory)
            yield (writing := self._thread.submit(sharded.write))
            shards = {name: entry for each in on_all(writing.result) for name, entry in each.items()}
            sharded.complete()
            self._attempt = None  # rank 0 alone goes on with it
            publish = partial(self._publish, attempt, state, shards) if rank() == 0 else lambda: None
            yield (publishing := self._thread.submit(publish))
            on_rank_0(publishing.result)
        except InputError as error:
            if rank() == 0 and not isinstance(error, LocalInputError):
                shutil.rmtree(attempt, ignore_errors=True)
            raise type(error)(f"{error}; step {step} is not saved, {self._kept(step)}") from None

    def save_weights(self, module: torch.nn.Module, identity: dict[str, Any]) -> None:
        """Write `module`, all of a model in this process, as the checkpoint of step 0, with no optimizer. InputError if not."""
        attempt = self._begin(0)
        weights = ShardedWrite({"model": {"0": module.sharded_state_dict(prefix="model.")}}, attempt, None)
        shards = weights.write()
        weights.complete()
        self._publish(attempt, {"step": 0, "identity": identity}, shards)

    @contextlib.contextmanager
    def finished(self) -> Iterator[None]:
        """However the block ends, no save is under way after it: it is finished, where all ranks leave the block together."""
        try:
            yield
        except BaseException as error:
            together = isinstance(error, InputError) and not isinstance(error, LocalInputError)
            if together or dist.get_world_size() == 1:
                self.finish_save()
            elif self.saving:
                futures.wait([self._work])
            raise
        self.finish_save()

    def abandon(self) -> None:
        """Remove what a save has written that an error of one rank cut off: once no other can write any more."""
        if self._attempt:
            shutil.rmtree(self._attempt, ignore_errors=True)

    def _kept(self, step: int) -> str:
        before = [other for other in self.steps() if other < step]
        if not before:
            return "and no step before it"
        return f"step {before[-1]} is: make room and give the same command again"

    def _begin(self, step: int) -> Path:
        attempt = self.folder / f".{self.path(step).name}.{uuid.uuid4().hex}"
        try:
            attempt.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"{cannot_be_written(self.folder, error)}; step {step} is not saved, {self._kept(step)}") from None
        return attempt

    def _publish(self, attempt: Path, state: dict[str, Any], shards: Digests) -> None:
        target = self.path(state["step"])
        state["files"] = sync_all(attempt, shards)
        try:
            write_whole(attempt / STATE, json.dumps(state, indent=1))
            sync(attempt)
            if target.exists():  # damaged, or of a save that was cut off before its tracker was written
                self._remove(target)
            os.rename(attempt, target)
            sync(self.folder)
            write_whole(self.folder / TRACKER, f"{state['step']}\n")
        except OSError as error:
            raise InputError(cannot_be_written(self.folder, error)) from None
        self.retain(state["step"])

    def _remove(self, path: Path) -> None:
        """Under another name first: a removal that is cut off leaves nothing that looks like a checkpoint."""
        hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def retain(self, newest: int) -> None:
        """After a save of step `newest`, on rank 0: remove what `superfluous` names, and what is damaged and older.

        A damaged checkpoint is not one of the last that stay; nothing goes unless `newest` is whole. Steps beyond it, left by a
        run that has gone back, stay until they are made again. What cannot be removed now is tried after the next save.
        """
        if not any(self._keep) or not self._is_whole(newest):
            return
        older = [step for step in self.steps() if step < newest]
        whole = [step for step in older if self._is_whole(step)]
        for step in {*older} - {*whole} | {*superfluous(whole, *self._keep)}:
            with contextlib.suppress(OSError):
                self._remove(self.path(step))

    def _is_whole(self, step: int) -> bool:
        try:
            self.state(step)
        except Damaged:
            return False
        return True

    def clean(self) -> None:
        """Remove what attempts and removals that were killed have left. For rank 0, under the lock of the run folder."""
        for stale in (*self.folder.glob(".iter_*"), *self.folder.glob(".*.tmp")):
            remove(stale)

    def load(self, engine: Engine, step: int) -> None:
        """Put the checkpoint of `step`, which `check` found whole, into `engine`, in whatever layout it was saved."""
        fill(engine, dist_checkpointing.load(sharded_state(engine, is_loading=True), str(self.path(step))))

    def load_weights(self, engine: Engine, step: int) -> None:
        """Put the weights alone of the checkpoint of `step`, which `check` found whole, into `engine`, with a new optimizer."""
        _load_model(self.path(step), [chunk.module for chunk in engine.chunks])
        engine.optimizer.reload_model_params()  # its float32 copies, under bf16


def load_model(checkpoints: Checkpoints, step: int, module: torch.nn.Module, identity: dict[str, Any] | None = None) -> None:
    """Put the weights of the checkpoint of `step` into `module`, all of a model in this process, once `check` finds it whole.

    Memory holds them once.
    """
    try:
        checkpoints.check(step, identity)
    except Damaged as damage:
        whole = [other for other in checkpoints.steps() if other != step]
        others = f"checkpoints are there of steps {', '.join(map(str, whole))} (--ckpt-step)" if whole else "no other is there"
        raise InputError(f"{damage}; {others}") from None
    _load_in_place(checkpoints.path(step), module)


def _load_in_place(path: Path, module: torch.nn.Module) -> None:
    """What is read goes to the weights themselves; whole matrices made of two, the MLP's, are not put together a second time.

    Those of the vocabulary come first: a weight is read whole before it is put in its place, and the others take no memory yet.
    """
    layers, others = {}, {}
    for name, value in module.sharded_state_dict(prefix="model.").items():
        for number, part in enumerate(value.build() if isinstance(value, ShardedTensorFactory) else [value]):
            if isinstance(part, ShardedTensor):
                (layers if name.startswith("model.decoder.") else others)[f"{name} {number}"] = part
    for wanted in (others, layers):
        places = {name: part.data for name, part in wanted.items()}
        loaded = dist_checkpointing.load({"model": {"0": wanted}}, str(path))["model"]["0"]
        for name, place in places.items():
            if place.data_ptr() != loaded[name].data_ptr():
                place.copy_(loaded[name])


def _load_model(path: Path, chunks: list[torch.nn.Module]) -> None:
    """A model in one part or, where pipeline stages are interleaved, in several."""
    wanted = {str(number): chunk.sharded_state_dict(prefix="model.") for number, chunk in enumerate(chunks)}
    loaded = dist_checkpointing.load({"model": wanted}, str(path))
    for number, chunk in enumerate(chunks):
        fill_module(chunk, loaded["model"][str(number)])
