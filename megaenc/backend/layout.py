"""How a model is spread over processes: what changes time and memory and, but for rounding, nothing else."""

from dataclasses import dataclass
from typing import Literal

from megaenc.errors import InputError


@dataclass(frozen=True)
class Layout:
    """How a model is spread over processes (what remains is data parallel), and what each keeps in memory."""

    tensor_model_parallel_size: int = 1
    """processes that share each layer's matrices"""
    pipeline_model_parallel_size: int = 1
    """stages that the layers are cut into"""
    sequence_parallel: bool = False
    """shard norms and residuals along the sequence too (needs tensor parallelism)"""
    recompute_granularity: Literal["full", "selective"] | None = None
    """compute activations again on the way back and keep fewer. full: those of whole layers; selective: of parts of each layer"""
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ()
    """the parts that selective computes again: core_attn, mlp; core_attn unless given"""
    recompute_method: Literal["uniform", "block"] | None = None
    """which layers full computes again. uniform: all, in units of --recompute-num-layers; block: the first --recompute-num-layers
    of each stage; uniform unless given"""
    recompute_num_layers: int | None = None
    """layers of a unit (uniform), or that each stage computes again (block); 1 unless given"""

    def check(self, world_size: int) -> None:
        """InputError unless `world_size` processes can be laid out so."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for flag, size in (("--tensor-model-parallel-size", tensor), ("--pipeline-model-parallel-size", pipeline)):
            if size < 1:
                raise InputError(f"{flag}: found {size}, expected 1 or more")
        if world_size % (tensor * pipeline):
            raise InputError(
                f"{world_size} processes cannot be laid out as tensor parallel {tensor} x pipeline parallel {pipeline}: "
                f"expected a multiple of {tensor * pipeline} (torchrun --nproc-per-node)"
            )
        if self.sequence_parallel and tensor == 1:
            raise InputError("--sequence-parallel: found --tensor-model-parallel-size 1, expected 2 or more")

    def check_recompute(self, layers: int) -> None:
        """InputError unless stages of `layers` layers can compute activations again as asked for."""
        full, selective = (self.recompute_granularity == name for name in ("full", "selective"))
        for flag, given, needs, right in (
            ("--recompute-modules", self.recompute_modules, "selective", selective),
            ("--recompute-method", self.recompute_method, "full", full),
            ("--recompute-num-layers", self.recompute_num_layers, "full", full),
        ):
            if given and not right:
                raise InputError(f"{flag}: needs --recompute-granularity {needs}, found {self.recompute_granularity or 'none'}")
        if not full:
            return
        method, number = self.recomputed
        if method == "uniform" and layers % number:
            raise InputError(f"--recompute-num-layers: found {number}, expected a divisor of the {layers} layers of a stage")
        if number > layers:
            raise InputError(f"--recompute-num-layers: found {number}, expected at most the {layers} layers of a stage")

    @property
    def recomputed(self) -> tuple[str | None, int | None]:
        """Method and number of layers of full recomputation, with their defaults; None twice where it is not asked for."""
        if self.recompute_granularity != "full":
            return None, None
        return self.recompute_method or "uniform", self.recompute_num_layers or 1
