"""The checkpoints of a run, checked before they are read, and loaded into any layout; `saving` writes them."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding

from megaenc.console import print_rank_0
from megaenc.dist_env import get_rank
from megaenc.errors import InputError
from megaenc.training.checkpoint.safe_pickle import SHARD, rewrite_pickles
from megaenc.training.checkpoint_dir import CheckpointDir, DamagedCheckpointError, find_content_damage
from megaenc.training.dist.collectives import all_gather_call, broadcast_call
from megaenc.training.engine import Engine
from megaenc.training.plan import Plan
from megaenc.training.run_dir import describe_difference
from megaenc.training.skip_policy import saw_same_data


class CheckpointLoader(CheckpointDir):
    """Those of a run, checked byte by byte and loaded."""

    _checked: tuple[int, dict[str, bytes]] | None = None
    """The step that `check` came to last, and what loading it unpickles, written anew."""

    def check(self, step: int, identity: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON of the checkpoint of `step` once every byte is known to be as saved (Damaged); all ranks together.

        InputError for a run of another `identity`, or a pickle of more than plain values.
        """
        state = broadcast_call(lambda: self.read_state(step))
        path, names = self.path(step), sorted(state["files"])
        mine = names[get_rank() :: dist.get_world_size()]
        for damage in all_gather_call(lambda: find_content_damage(path, {name: state["files"][name] for name in mine})):
            if damage:
                raise DamagedCheckpointError(f"{damage}; the checkpoint is damaged")
        if identity is not None and (other := describe_difference(state["identity"], identity)):
            raise InputError(f"{path} is a checkpoint of a different run: {other}; remove it or give the same value")
        self._checked = step, broadcast_call(lambda: rewrite_pickles(path, state["files"]))
        return state

    @contextlib.contextmanager
    def open_verified(self, step: int) -> Iterator[str]:
        """Yield a folder of this process from which the checkpoint of `step` can be loaded; all ranks call this together.

        It holds links to the shards, of which only tensors are read, and what `check` has let through, written anew: the
        checkpoint itself may have changed since. InputError if there is no room.
        """
        if self._checked is None or self._checked[0] != step:
            self.check(step)
        with contextlib.ExitStack() as stack:

            def lay_out() -> str:
                try:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megaenc-")))
                    for name, content in self._checked[1].items():
                        (folder / name).write_bytes(content)
                    for shard in filter(lambda file: SHARD.fullmatch(file.name), self.path(step).absolute().iterdir()):
                        (folder / shard.name).symlink_to(shard)
                except OSError as error:
                    raise InputError(f"{error.filename}: {error.strerror}; expected room for a few MB in TMPDIR") from None
                return str(folder)

            yield all_gather_call(lay_out)[get_rank()]

    def verify_newest(self, plan: Plan) -> dict[str, Any] | None:
        """Return the JSON of the newest whole checkpoint up to the tracker's that `plan` agrees with, if any; all ranks together.

        A damaged one is named in a line; InputError if all are.
        """
        identity = plan.identity
        steps = broadcast_call(lambda: [step for step in reversed(self.steps_up_to_tracker()) if self.is_compatible(step, plan)])
        for step, before in zip(steps, [*steps[1:], None], strict=False):
            try:
                return self.check(step, identity)
            except DamagedCheckpointError as damage:
                if before is None:
                    raise InputError(f"{damage}; no other is there; delete {self.folder} to start anew") from None
                print_rank_0(f"{damage}: trying that of step {before}")
        return None

    def is_compatible(self, step: int, plan: Plan, damaged: bool = True) -> bool:
        """Whether the checkpoint of `step` has read no pack that `plan` leaves out; `damaged` where that cannot be told."""
        try:
            return saw_same_data(plan, self.read_state(step))
        except DamagedCheckpointError:
            return damaged  # to be named

    def compatible_steps(self, plan: Plan) -> list[int]:
        """The steps whose checkpoints look whole and have read no pack that `plan` leaves out."""
        return [step for step in self.steps() if self.is_compatible(step, plan, damaged=False)]

    def load(self, engine: Engine, step: int) -> None:
        """Put the checkpoint of `step`, which `check` found whole, into `engine`, in whatever layout it was saved."""
        with self.open_verified(step) as folder:
            load_into_engine(engine, dist_checkpointing.load(sharded_state_dict(engine, is_loading=True), folder))

    def load_weights(self, engine: Engine, step: int) -> None:
        """Put the weights alone of the checkpoint of `step`, which `check` found whole, into `engine`, with a new optimizer."""
        with self.open_verified(step) as folder:
            load_into_model(engine, dist_checkpointing.load({"model": model_sharded_state_dict(engine)}, folder)["model"])
        engine.optimizer.reload_model_params()  # its float32 copies, under bf16


def load_model_weights(checkpoints: CheckpointLoader, step: int, module: torch.nn.Module, identity: dict[str, Any] | None = None) -> None:
    """Put the weights of the checkpoint of `step`, once `check` finds it whole, into `module`, a whole model, without a copy."""
    try:
        checkpoints.check(step, identity)
    except DamagedCheckpointError as damage:
        whole = [other for other in checkpoints.steps() if other != step]
        others = f"checkpoints are there of steps {', '.join(map(str, whole))} (--ckpt-step)" if whole else "no other is there"
        raise InputError(f"{damage}; {others}") from None
    with checkpoints.open_verified(step) as folder:
        layers, others = {}, {}
        for name, value in module.sharded_state_dict(prefix="model.").items():
            # A matrix made of two, the MLP's, is not put together a second time: its parts are read into their places.
            for number, part in enumerate(value.build() if isinstance(value, ShardedTensorFactory) else [value]):
                if isinstance(part, ShardedTensor):
                    (layers if name.startswith("model.decoder.") else others)[f"{name} {number}"] = part
        for wanted in (others, layers):  # the vocabulary's first: one is read whole, and the layers take no memory yet
            places = {name: part.data for name, part in wanted.items()}
            loaded = dist_checkpointing.load({"model": {"0": wanted}}, folder)["model"]["0"]
            for name, place in places.items():
                if place.data_ptr() != loaded[name].data_ptr():
                    place.copy_(loaded[name])


# The one form of a distributed optimizer's state that every other layout can load.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def sharded_state_dict(engine: Engine, is_loading: bool) -> dict[str, Any]:
    """What `dist_checkpointing` saves of `engine`, or (`is_loading`) what it is to load into it. All ranks call this together."""
    if not is_loading:
        engine.gather_parameters()
        for optimizer in engine.optimizer.chained_optimizers:  # zeros for each weight that no update has reached yet
            optimizer.init_state_fn(optimizer.optimizer, optimizer.config)
    model = model_sharded_state_dict(engine)
    optimizer = engine.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=_METADATA)
    if "param_groups" in optimizer:  # float32 without the distributed optimizer: one level less than the others
        optimizer = {"optimizer": optimizer}
    for tensors in optimizer.get("param_state", {}).values():
        master = tensors.pop("param")
        if engine.plan.settings.bf16:
            replace_prefix_for_sharding(master, "optimizer.state.param.", "optimizer.state.fp32_param.")
            tensors["fp32_param"] = master
    return {"model": model, "optimizer": optimizer}


def load_into_engine(engine: Engine, loaded: dict[str, Any]) -> None:
    """Put what was loaded for `sharded_state_dict` into `engine`."""
    load_into_model(engine, loaded["model"])
    optimizer = loaded["optimizer"]
    if engine.layout.use_distributed_optimizer:
        optimizer["param_state_sharding_type"] = _METADATA["distrib_optim_sharding_type"]
        if not engine.plan.settings.bf16:  # what was put into the model is what the optimizer updates
            [of_rank] = engine.optimizer.chained_optimizers
            in_buffers = (parameter for buffer in of_rank.buffers for parameter in buffer.param_index_map)
            for number, parameter in enumerate(in_buffers):  # as the distributed optimizer numbers them
                optimizer["param_state"][number]["param"] = parameter.detach()
    elif not engine.plan.settings.bf16:
        optimizer = optimizer["optimizer"]
    engine.optimizer.load_state_dict(optimizer)


def model_sharded_state_dict(engine: Engine) -> dict[str, Any]:
    """Return the sharded weights of the parts of the model, by their numbers."""
    return {str(number): chunk.module.sharded_state_dict(prefix="model.") for number, chunk in enumerate(engine.chunks)}


def load_into_model(engine: Engine, loaded: dict[str, Any]) -> None:
    """Put what was loaded for `model_sharded_state_dict` into the model of `engine`."""
    for number, chunk in enumerate(engine.chunks):
        load_into_module(chunk.module, loaded[str(number)])


def load_into_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Put weights under their checkpoint names into `module` (Float16Module passes state dicts on by itself)."""
    module.load_state_dict({name.removeprefix("model."): value for name, value in state.items()})
