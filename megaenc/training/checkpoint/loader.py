"""Verified loading of checkpoints into any parallel layout."""

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megaenc.backend.reductions import gather_lowest
from megaenc.console import print_rank_0
from megaenc.dist_env import get_rank
from megaenc.errors import InputError
from megaenc.training.checkpoint.safe_pickle import SHARD, rewrite_pickles
from megaenc.training.checkpoint.strategies import is_in_first_replica, load
from megaenc.training.checkpoint_dir import CheckpointDir, DamagedCheckpointError, find_content_damage
from megaenc.training.distributed.collectives import broadcast_call, call_on_all
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan
from megaenc.training.run_dir import describe_difference
from megaenc.training.skip_policy import saw_same_data


class CheckpointLoader(CheckpointDir):
    """Checkpoint directory of a run, whose checkpoints it verifies (checksums, pickles) and loads into models or engines."""

    _verified: tuple[int, list[str], dict[str, bytes]] | None = None
    """The step that was verified last, the names of its shards, and its rewritten pickles by file name."""

    def verify(self, step: int, identity: dict[str, Any] | None = None) -> dict[str, Any]:
        """Verify checksums, pickles, any run `identity` of a checkpoint on all ranks; return state.json, or InputError.

        All ranks call this together. DamagedCheckpointError if a file has changed; InputError if the checkpoint belongs to a run
        with another `identity` or its pickles hold more than plain values.
        """
        state = broadcast_call(lambda: self.read_state(step))
        path, names = self.path(step), sorted(state["files"])
        mine = names[get_rank() :: dist.get_world_size()]
        damages, _ = gather_lowest(find_content_damage(path, {name: state["files"][name] for name in mine}))
        for damage in damages.values():
            raise DamagedCheckpointError(f"{damage}; the checkpoint is damaged")
        if identity is not None and (mismatch := describe_difference(state["identity"], identity)):
            raise InputError(f"{path} is a checkpoint of a different run: {mismatch}; remove it or give the same value")
        pickles = broadcast_call(lambda: rewrite_pickles(path, state["files"]))
        self._verified = step, list(filter(SHARD.fullmatch, names)), pickles
        return state

    @contextlib.contextmanager
    def open_verified(self, step: int) -> Iterator[str]:
        """Yield a temporary directory to load the checkpoint of `step` from: links to shards, and verified, new pickles.

        All ranks call this together. Only tensors are read from the shards; the pickles of the checkpoint may have changed since
        `verify`. InputError if there is no room, or if a rank that reads shards does not see them.
        """
        if self._verified is None or self._verified[0] != step:
            self.verify(step)
        _, shards, pickles = self._verified
        with contextlib.ExitStack() as stack:

            def create_dir() -> str:
                checkpoint = self.path(step).absolute()
                missing = [name for name in shards if not (checkpoint / name).exists()] if is_in_first_replica() else []
                if missing:
                    where = f"on {socket.gethostname()}, expected a directory that all nodes share"
                    raise InputError(f"{checkpoint / missing[0]}: not found {where}")
                try:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megaenc-")))
                    for name, content in pickles.items():
                        (folder / name).write_bytes(content)
                    for name in shards:  # not listed, as the directory is shared by all ranks
                        (folder / name).symlink_to(checkpoint / name)
                except OSError as error:
                    raise InputError(f"{error.filename}: {error.strerror}; expected room for a few MB in TMPDIR") from None
                return str(folder)

            yield call_on_all(create_dir)

    def verify_newest(self, plan: Plan) -> dict[str, Any] | None:
        """Return state.json of the newest intact checkpoint that `plan` can resume; None without any, InputError if all bad.

        All ranks call this together. Damaged checkpoints are reported on the console.
        """
        identity = plan.identity
        steps = broadcast_call(lambda: [step for step in reversed(self.steps_up_to_tracker()) if self.is_compatible(step, plan)])
        for step, before in zip(steps, [*steps[1:], None], strict=False):
            try:
                return self.verify(step, identity)
            except DamagedCheckpointError as damage:
                if before is None:
                    raise InputError(f"{damage}; no other is left; delete {self.folder} to start over") from None
                print_rank_0(f"{damage}: trying the checkpoint of step {before}")
        return None

    def is_compatible(self, step: int, plan: Plan, if_damaged: bool = True) -> bool:
        """Return whether checkpoint `step` skipped the same packs up to there as `plan`; `if_damaged` if damaged."""
        try:
            return saw_same_data(plan, self.read_state(step))
        except DamagedCheckpointError:
            return if_damaged

    def compatible_steps(self, plan: Plan) -> list[int]:
        """Return the sorted steps of complete checkpoints that skipped the same packs, up to their step, as `plan`."""
        return [step for step in self.steps() if self.is_compatible(step, plan, if_damaged=False)]

    def load(self, engine: Engine, step: int) -> None:
        """Load model and optimizer state of the checkpoint of `step`, which it verifies, from any layout into `engine`."""
        with self.open_verified(step) as folder:
            load_into_engine(engine, load(sharded_state_dict(engine, is_loading=True), folder))

    def load_weights(self, engine: Engine, step: int) -> None:
        """Load only weights of the checkpoint of `step`, which it verifies, into `engine`; optimizer state stays new."""
        with self.open_verified(step) as folder:
            load_into_model(engine, load({"model": model_sharded_state_dict(engine)}, folder)["model"])
        engine.optimizer.reload_model_params()  # the float32 master weights of bf16


def load_model_weights(
    checkpoints: CheckpointLoader, step: int, module: torch.nn.Module, identity: dict[str, Any] | None = None
) -> None:
    """Verify a checkpoint, load its weights into unsharded `module`; InputError if damaged or of other run `identity`."""
    verify_weights(checkpoints, step, identity)
    with checkpoints.open_verified(step) as folder:
        layers, others = [], []
        for name, parts in _shards_by_weight(module).items():
            (layers if name.startswith("decoder.") else others).extend(parts)
        for parts in (others, layers):  # the embedding, which is read at once, before the layers take memory
            _load_in_place(parts, folder)


def verify_weights(
    checkpoints: CheckpointLoader, step: int, identity: dict[str, Any] | None = None, flag: str = "--ckpt-step"
) -> dict[str, Any]:
    """Verify a checkpoint and return its state.json; InputError, with the other steps for `flag`, if it is damaged."""
    try:
        return checkpoints.verify(step, identity)
    except DamagedCheckpointError as damage:
        other_steps = [other for other in checkpoints.steps() if other != step]
        others = f"choose one of steps {', '.join(map(str, other_steps))} ({flag})" if other_steps else "no other is left"
        raise InputError(f"{damage}; {others}") from None


class WeightReader:
    """Reader of one weight at a time from a checkpoint: the float32 master weights if there are any, else the model's."""

    def __init__(self, folder: str, module: torch.nn.Module):
        """Read the directory `folder` of `open_verified`, with the names and shapes of the unsharded `module`."""
        self._reader, self._shards = FileSystemReader(folder), _shards_by_weight(module)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._tensors = metadata.state_dict_metadata
        self._prefix = _MASTER_PREFIX if any(key.startswith(_MASTER_PREFIX) for key in self._tensors) else ""

    def read(self, name: str) -> torch.Tensor:
        """Return the weight `name` as a float32 tensor on the CPU; rows that pad the vocabulary are as saved, or missing."""
        parts = [self._read_part(part) for part in self._shards[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_part(self, part: ShardedTensor) -> torch.Tensor:
        """Return a part of a weight, which megatron-core could load only together with that of all layers."""
        key = self._prefix + part.key
        stored = self._tensors[key]
        shape = (*[1] * part.prepend_axis_num, *part.local_shape)
        if part.allow_shape_mismatch:  # the vocabulary's padding depends on the layout
            shape = tuple(map(min, shape, stored.size))
        buffer = torch.empty(shape, dtype=torch.float32)
        chunk = ChunkStorageMetadata(torch.Size(part.global_offset), buffer.shape)
        items = create_read_items_for_chunk_list(key, stored, [chunk])
        if sum(item.lengths.numel() for item in items) != buffer.numel():
            raise ValueError(f"{key}: found a tensor of {tuple(stored.size)} without {shape} at {part.global_offset}")
        self._reader.read_data(LoadPlan(items), _BufferPlanner(buffer)).wait()
        return buffer.flatten(0, part.prepend_axis_num) if part.prepend_axis_num else buffer


class _BufferPlanner(DefaultLoadPlanner):
    """Planner of torch's checkpoint reader that reads into one tensor."""

    def __init__(self, buffer: torch.Tensor):
        super().__init__()
        self._buffer = buffer

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the buffer for every part that is read."""
        return self._buffer


def _shards_by_weight(module: torch.nn.Module) -> dict[str, list[ShardedTensor]]:
    """Return the sharded tensors of each weight of `module` by parameter name; fused matrices of the MLP have two."""
    shards = {}
    for name, value in module.sharded_state_dict(prefix="model.").items():
        # The parts of a fused matrix are read in place, without building it a second time.
        parts = value.build() if isinstance(value, ShardedTensorFactory) else [value]
        if parts := [part for part in parts if isinstance(part, ShardedTensor)]:
            shards[name.removeprefix("model.")] = parts
    return shards


def _load_in_place(parts: list[ShardedTensor], folder: str) -> None:
    """Load `parts`, of all layers of each weight, from the checkpoint in `folder` into their own tensors."""
    targets = [part.data for part in parts]
    state = {"model": {"0": {str(number): part for number, part in enumerate(parts)}}}
    loaded = load(state, folder)["model"]["0"]
    for number, target in enumerate(targets):
        if target.data_ptr() != loaded[str(number)].data_ptr():
            target.copy_(loaded[str(number)])


_MASTER_PREFIX = "optimizer.state.fp32_param."
"""Prefix of the float32 master weights' names in checkpoints of bf16 runs."""
# The only format of distributed optimizer state that every other layout can load.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def sharded_state_dict(engine: Engine, is_loading: bool) -> dict[str, Any]:
    """Return the sharded state of model and optimizer, as "model" and "optimizer", to save or (`is_loading`) to load it.

    All ranks call this together.
    """
    if not is_loading:
        engine.gather_parameters()
        for optimizer in engine.optimizer.chained_optimizers:  # zeros for weights without a step so far
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    model = model_sharded_state_dict(engine)
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA)
    if "param_groups" in optimizer:  # float32 without the distributed optimizer lacks a level
        optimizer = {"optimizer": optimizer}
    for tensors in optimizer.get("param_state", {}).values():
        master = tensors.pop("param")
        if engine.plan.settings.bf16:
            replace_prefix_for_sharding(master, "optimizer.state.param.", _MASTER_PREFIX)
            tensors["fp32_param"] = master
    return {"model": model, "optimizer": optimizer}


def load_into_engine(engine: Engine, loaded: dict[str, Any]) -> None:
    """Copy `loaded`, a `sharded_state_dict` filled from a checkpoint, into model and optimizer of `engine`."""
    load_into_model(engine, loaded["model"])
    optimizer = loaded["optimizer"]
    if engine.layout.use_distributed_optimizer:
        optimizer["param_state_sharding_type"] = _METADATA["distrib_optim_sharding_type"]
        if not engine.plan.settings.bf16:  # the optimizer updates the parameters of the model themselves
            [optimizer_of_rank] = engine.optimizer.chained_optimizers
            in_buffers = (parameter for buffer in optimizer_of_rank.buffers for parameter in buffer.param_index_map)
            for number, parameter in enumerate(in_buffers):  # as the distributed optimizer numbers them
                optimizer["param_state"][number]["param"] = parameter.detach()
    elif not engine.plan.settings.bf16:
        optimizer = optimizer["optimizer"]
    engine.optimizer.load_state_dict(optimizer)


def model_sharded_state_dict(engine: Engine) -> dict[str, Any]:
    """Return the sharded weights of each model chunk of `engine` (megatron-core's state dict), by chunk number as text."""
    return {str(number): chunk.module.sharded_state_dict(prefix="model.") for number, chunk in enumerate(engine.chunks)}


def load_into_model(engine: Engine, loaded: dict[str, Any]) -> None:
    """Copy `loaded`, state dicts of each model chunk by number as text, into the model chunks of `engine`."""
    for number, chunk in enumerate(engine.chunks):
        load_into_module(chunk.module, loaded[str(number)])


def load_into_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Load the weights `state`, by parameter name with the checkpoint's prefix `model.`, into `module`."""
    module.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
