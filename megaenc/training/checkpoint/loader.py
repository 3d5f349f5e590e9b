"""Verified loading of checkpoints into any parallel layout."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megaenc.backend.reductions import gather_lowest
from megaenc.console import print_rank_0
from megaenc.dist_env import get_rank
from megaenc.errors import InputError
from megaenc.training.checkpoint.chunk_files import ChunkReader, parse_index, read_index
from megaenc.training.checkpoint.state_tensors import (
    MASTER_PREFIX,
    StateTensor,
    equal_shares,
    list_engine_state,
    list_module_state,
)
from megaenc.training.checkpoint_dir import (
    CheckpointDir,
    DamagedCheckpointError,
    find_content_damage,
    name_machine,
)
from megaenc.training.distributed.collectives import broadcast_call, call_on_all
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan
from megaenc.training.run_dir import describe_difference
from megaenc.training.skip_policy import saw_same_data

# Size of parts of tensors that are copied into one buffer to be sent, which has at most one part
# more.
_SEND_BYTES = 32 << 20


class CheckpointLoader(CheckpointDir):
    """Checkpoint directory of a run, whose checkpoints all ranks verify and load.

    It is a CheckpointDir, constructed with the path of the directory `checkpoints`, on any ranks;
    methods that load or verify need a process group.
    """

    _verified: tuple[int, int, ChunkReader] | None = None
    """The step verified last, its optimizer's updates, and a reader of its tensors."""

    def verify(self, step: int, identity: dict[str, Any] | None = None) -> dict[str, Any]:
        """Verify the checkpoint of `step` on all ranks together; return its state.json.

        Each rank compares the SHA-256 of some files; result and errors are the same on all.

        Args:
            identity: Identity that its run must have (`Plan.identity`); None for any run.

        Raises:
            DamagedCheckpointError: A file is missing or has changed, or state.json is unreadable.
            CheckpointReadError: A rank cannot read a file other than state.json.
            InputError: The checkpoint belongs to another run, or its index was not written by a
                save.
        """
        state = broadcast_call(lambda: self.read_state(step))
        path = self.path(step)
        local_names = sorted(state["files"])[get_rank() :: dist.get_world_size()]

        def find_local_damage() -> str | None:
            with name_machine():
                return find_content_damage(
                    path, {name: state["files"][name] for name in local_names}
                )

        damages, _ = gather_lowest(call_on_all(find_local_damage))
        for damage in damages.values():
            raise DamagedCheckpointError(f"{damage}; the checkpoint is damaged")
        if identity is not None and (mismatch := describe_difference(state["identity"], identity)):
            raise InputError(
                f"{path} is a checkpoint of a different run: {mismatch}; remove it or give the "
                "same value"
            )
        index = broadcast_call(lambda: read_index(path, state["files"]))
        updates, chunks = parse_index(index, state["files"])
        self._verified = step, updates, ChunkReader(path.absolute(), chunks)
        return state

    def open_verified(self, step: int) -> tuple[int, ChunkReader]:
        """Return the optimizer's number of updates and a reader of a checkpoint's tensors.

        All ranks call this together. The checkpoint of `step`, of any run, is verified, with the
        errors of `verify`, unless it is the one verified last.
        """
        if self._verified is None or self._verified[0] != step:
            self.verify(step)
        _, updates, reader = self._verified
        return updates, reader

    def verify_newest(self, plan: Plan) -> dict[str, Any] | None:
        """Verify the newest intact checkpoint that `plan` can resume.

        All ranks call this together. Checkpoints after the tracked step, and those that skipped
        other packs than `plan`, do not count. Damaged ones are passed over; rank 0 prints them.

        Returns:
            Its state.json; None if no checkpoint counts.

        Raises:
            CheckpointReadError: A rank cannot read a file.
            InputError: All are damaged, the newest intact one is of another run, or the tracker
                file cannot be read.
        """
        damage = None
        for step in broadcast_call(lambda: self.steps_up_to_tracker()[::-1]):
            if not broadcast_call(lambda step=step: self.is_compatible(step, plan)):
                continue
            if damage:
                print_rank_0(f"{damage}: trying the checkpoint of step {step}")
            try:
                return self.verify(step, plan.identity)
            except DamagedCheckpointError as error:
                damage = error
        if damage:
            raise InputError(f"{damage}; no other is left; delete {self.directory} to start over")
        return None

    def is_compatible(self, step: int, plan: Plan, if_damaged: bool = True) -> bool:
        """Return whether the checkpoint of `step` skipped the same packs as `plan`.

        Packs up to `step` are compared, by state.json on this rank only; the identity of its run is
        not compared, and files of tensors are not read.

        Args:
            if_damaged: Result for a checkpoint that is missing, damaged or cannot be read.
        """
        try:
            return saw_same_data(plan, self.read_state(step))
        except DamagedCheckpointError:
            return if_damaged

    def compatible_steps(self, plan: Plan) -> list[int]:
        """Return the sorted steps of checkpoints that skipped the same packs as `plan`.

        Packs up to each step are compared, on this rank only. Checkpoints that are incomplete or
        cannot be read are left out; those after the step in the tracker file are not.
        """
        return [step for step in self.steps() if self.is_compatible(step, plan, if_damaged=False)]

    def load(self, engine: Engine, step: int) -> None:
        """Verify and load weights and optimizer state of a checkpoint into `engine`.

        The state includes the number of updates. All ranks call this together; the checkpoint may
        be of any run with this model and of any parallel layout. It is not verified again if it was
        the last one verified. Each byte of the tensors is read once, but for a tied embedding that
        the last pipeline stage has too, and sent to the ranks that hold the same. Errors are those
        of `verify` and of `ChunkReader.read`, on all ranks; an imported checkpoint, without
        optimizer state, is an InputError.
        """
        updates, reader = self.open_verified(step)
        tensors = [tensor for tensor in list_engine_state(engine) if not tensor.is_zero]
        _load_tensors(engine, reader, tensors)
        for group in engine.optimizer.param_groups:
            group["step"] = updates

    def load_weights(self, engine: Engine, step: int) -> None:
        """Verify and load only the weights of a checkpoint, not the optimizer's state.

        All ranks call this together, with the errors of `verify` and `ChunkReader.read`. The
        float32 master weights of bf16 are set from the loaded weights; moments and number of
        updates stay as they are.
        """
        _, reader = self.open_verified(step)
        _load_tensors(
            engine, reader, [tensor for tensor in list_engine_state(engine) if not tensor.prefix]
        )
        engine.optimizer.reload_model_params()  # the float32 master weights of bf16


def _load_tensors(engine: Engine, reader: ChunkReader, tensors: Sequence[StateTensor]) -> None:
    """Fill `tensors` of `engine`.

    Each rank reads its share, and receives what others have read.
    """
    tensor_ranks = parallel_state.get_tensor_model_parallel_group()
    replicas = parallel_state.get_data_parallel_group()
    copied = [
        tensor for tensor in tensors if tensor_ranks.size() > 1 and tensor.is_on_all_tensor_ranks
    ]
    received = {id(tensor) for tensor in copied if tensor_ranks.rank() > 0}

    call_on_all(
        lambda: reader.read(
            chunk for tensor in tensors if id(tensor) not in received for chunk in tensor.chunks()
        )
    )
    _send(tensor_ranks, 0, [tensor.elements(tensor.local_range) for tensor in copied])
    engine.gather_parameters()
    if not engine.layout.use_distributed_optimizer and replicas.size() > 1:
        for rank in range(replicas.size()):
            shares = equal_shares(engine, rank)
            _send(
                replicas, rank, [tensor.elements(shares[tensor.weight_index]) for tensor in tensors]
            )


def _send(group: dist.ProcessGroup, source: int, tensors: Sequence[torch.Tensor]) -> None:
    """Send `tensors` in place from rank `source` of `group` to the others."""
    parts = [
        part
        for tensor in tensors
        for part in tensor.split(_SEND_BYTES // tensor.element_size())
        if part.numel()
    ]
    if parts:
        dist._broadcast_coalesced(group, parts, _SEND_BYTES, source)


def load_model_weights(
    checkpoints: CheckpointLoader,
    step: int,
    module: torch.nn.Module,
    identity: dict[str, Any] | None = None,
) -> None:
    """Verify a checkpoint and load its weights into a module on one rank, in place.

    Each rank has its own whole module. The checkpoint's model weights, not the float32 master
    weights, are converted to its data type. A process group must exist; with several ranks all call
    this together.

    Args:
        module: Megatron module such as an Encoder, with a sharded_state_dict.
        identity: Identity of the run that the checkpoint must belong to; None for any run.

    Raises:
        InputError: The checkpoint is damaged, cannot be read, or belongs to another run.
    """
    verify_weights(checkpoints, step, identity)
    _, reader = checkpoints.open_verified(step)
    reader.read(chunk for tensor in list_module_state(module).values() for chunk in tensor.chunks())


def verify_weights(
    checkpoints: CheckpointLoader,
    step: int,
    identity: dict[str, Any] | None = None,
    flag: str = "--ckpt-step",
) -> dict[str, Any]:
    """Verify the checkpoint of `step` for a command; return its state.json.

    All ranks call this together. It differs from `CheckpointLoader.verify` in the error about
    damage, which is no DamagedCheckpointError.

    Args:
        identity: Identity of the run that it must belong to; None for any run.
        flag: Flag that chooses a step, for the error.

    Raises:
        InputError: The checkpoint is damaged (the error names the other steps, unverified, for
            `flag`), cannot be read, or belongs to another run.
    """
    try:
        return checkpoints.verify(step, identity)
    except DamagedCheckpointError as damage:
        other_steps = [other_step for other_step in checkpoints.steps() if other_step != step]
        others = (
            f"choose one of steps {', '.join(map(str, other_steps))} ({flag})"
            if other_steps
            else "no other is left"
        )
        raise InputError(f"{damage}; {others}") from None


class WeightReader:
    """Reader of whole weights of a checkpoint in float32, one at a time.

    `read` returns a weight by name, from the float32 master weights if there are any, else from the
    model's. It is made from a ChunkReader (`CheckpointLoader.open_verified`) and a module that is
    not divided over ranks, which gives only names and shapes.
    """

    def __init__(self, reader: ChunkReader, module: torch.nn.Module):
        """Read by `reader`, with names and shapes of `module`, the model on one rank.

        The values of `module` are not changed.
        """
        self._reader = reader
        self._weights = list_module_state(module)
        self._prefix = MASTER_PREFIX if reader.has(MASTER_PREFIX) else ""

    def read(self, name: str) -> torch.Tensor:
        """Return the weight `name` as a new float32 tensor on the CPU.

        Rows that pad the vocabulary are as saved, or missing, so that it may have fewer rows than
        in the module, but no more. Errors are those of `ChunkReader.read`.

        Args:
            name: Name of the weight in the module, such as that of named_parameters; KeyError for
                any other.
        """
        parts = []
        for shard in self._weights[name].shards:
            key = self._prefix + shard.key
            shape = tuple(shard.local_shape)
            if shard.allow_shape_mismatch:  # the vocabulary's padding depends on the layout
                shape = tuple(map(min, shape, self._reader.shape(key)))
            values = torch.empty(shape, dtype=torch.float32)
            part = dataclasses.replace(
                shard,
                key=key,
                data=values,
                dtype=values.dtype,
                local_shape=shape,
                axis_fragmentations=None,
            )
            self._reader.read([part])
            parts.append(values)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
