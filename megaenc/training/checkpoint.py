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

from megaenc.console import say
from megaenc.errors import InputError
from megaenc.ranks import rank
from megaenc.training.checkpoint_folder import CheckpointFolder, Damaged
from megaenc.training.checksums import content_damage
from megaenc.training.engine import Engine
from megaenc.training.leaving_out import read_alike
from megaenc.training.pickles import SHARD, rewrite_pickles
from megaenc.training.plan import Plan
from megaenc.training.run_folder import difference
from megaenc.training.sharded_state import fill, fill_model, model_state, sharded_state
from megaenc.training.together import on_all, on_rank_0


class Checkpoints(CheckpointFolder):
    """Those of a run, checked byte by byte and loaded."""

    _checked: tuple[int, dict[str, bytes]] | None = None
    """The step that `check` came to last, and what loading it unpickles, written anew."""

    def check(self, step: int, identity: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON of the checkpoint of `step` once every byte is known to be as saved; all ranks call this together.

        Damaged names a file that is not; InputError for a run of another `identity`, or a pickle of more than plain values.
        """
        state = on_rank_0(lambda: self.state(step))
        path, names = self.path(step), sorted(state["files"])
        mine = names[rank() :: dist.get_world_size()]
        for damage in on_all(lambda: content_damage(path, {name: state["files"][name] for name in mine})):
            if damage:
                raise Damaged(f"{damage}; the checkpoint is damaged")
        if identity is not None and (other := difference(state["identity"], identity)):
            raise InputError(f"{path} is a checkpoint of a different run: {other}; remove it or give the same value")
        self._checked = step, on_rank_0(lambda: rewrite_pickles(path, state["files"]))
        return state

    @contextlib.contextmanager
    def readable(self, step: int) -> Iterator[str]:
        """Yield a folder of this process from which the checkpoint of `step` can be loaded; all ranks call this together.

        It holds links to the shards, of which only tensors are read, and what `check` has let through, written anew: nothing
        that is unpickled freely comes from the checkpoint itself, which may have changed since. InputError if there is no room.
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

            yield on_all(lay_out)[rank()]

    def newest_good(self, plan: Plan) -> dict[str, Any] | None:
        """Return the JSON of the newest whole checkpoint up to the tracker's that `plan` agrees with, if any; all ranks together.

        A damaged one is named in a line; InputError if all are.
        """
        identity = plan.identity
        steps = on_rank_0(lambda: [step for step in reversed(self.up_to_tracker()) if self.fits(step, plan)])
        for step, before in zip(steps, [*steps[1:], None], strict=False):
            try:
                return self.check(step, identity)
            except Damaged as damage:
                if before is None:
                    raise InputError(f"{damage}; no other is there; delete {self.folder} to start anew") from None
                say(f"{damage}: trying that of step {before}")
        return None

    def fits(self, step: int, plan: Plan, damaged: bool = True) -> bool:
        """Whether the checkpoint of `step` has read no pack that `plan` leaves out; `damaged` where that cannot be told."""
        try:
            return read_alike(plan, self.state(step))
        except Damaged:
            return damaged  # to be named

    def fitting(self, plan: Plan) -> list[int]:
        """The steps whose checkpoints look whole and have read no pack that `plan` leaves out."""
        return [step for step in self.steps() if self.fits(step, plan, damaged=False)]

    def load(self, engine: Engine, step: int) -> None:
        """Put the checkpoint of `step`, which `check` found whole, into `engine`, in whatever layout it was saved."""
        with self.readable(step) as folder:
            fill(engine, dist_checkpointing.load(sharded_state(engine, is_loading=True), folder))

    def load_weights(self, engine: Engine, step: int) -> None:
        """Put the weights alone of the checkpoint of `step`, which `check` found whole, into `engine`, with a new optimizer."""
        with self.readable(step) as folder:
            fill_model(engine, dist_checkpointing.load({"model": model_state(engine)}, folder)["model"])
        engine.optimizer.reload_model_params()  # its float32 copies, under bf16


def load_model(checkpoints: Checkpoints, step: int, module: torch.nn.Module, identity: dict[str, Any] | None = None) -> None:
    """Put the weights of the checkpoint of `step`, once `check` finds it whole, into `module`, a whole model, without a copy."""
    try:
        checkpoints.check(step, identity)
    except Damaged as damage:
        whole = [other for other in checkpoints.steps() if other != step]
        others = f"checkpoints are there of steps {', '.join(map(str, whole))} (--ckpt-step)" if whole else "no other is there"
        raise InputError(f"{damage}; {others}") from None
    with checkpoints.readable(step) as folder:
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
