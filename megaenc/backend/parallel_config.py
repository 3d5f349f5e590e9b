"""How a model is spread over processes: what changes time and memory and, but for rounding, nothing else."""

from dataclasses import dataclass
from typing import Literal

from megaenc.errors import InputError

FLOAT8_ALIGNMENT = 16
"""Of what the widths of matrices must be multiples for float8 products."""


@dataclass(frozen=True)
class KernelConfig:
    """By which kernels the layers are computed; every process of a run computes by the same."""

    attention_backend: Literal["auto", "flash", "varlen", "cudnn", "sdpa"] = "auto"
    """attention inside documents. flash: flash-attn, where it is installed; varlen: torch's kernel over all documents of a row;
    cudnn: cuDNN's, on documents padded to few lengths (these three on an accelerator, in bfloat16); sdpa: torch's scaled dot
    product, document by document, anywhere; auto: the first of them that a check at start finds right on every rank"""
    fused_kernels: bool = True
    """on an accelerator with triton: norms, rotary positions, SwiGLU and the loss each by a kernel of its own, if a check at the
    start finds it right; which are not is said, and torch's operations stand in. Without an accelerator these compute all"""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """linear layers and norms. local: megatron-core's own and this package's; transformer_engine: Transformer Engine's, where it
    is installed"""
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    """matrix products of the layers, not of embedding and head, in 8-bit floating point, where the machine has them (H100, L40S,
    MI300X or later; slowly on the host). hybrid: gradients with 5 bits of exponent and 2 of mantissa, all else with 4 and 3;
    e4m3: all with 4 and 3"""


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is spread over processes (what remains is data parallel), and what each keeps in memory."""

    tensor_model_parallel_size: int = 1
    """processes that share each layer's matrices"""
    pipeline_model_parallel_size: int = 1
    """stages that the layers are cut into; where they do not divide evenly, stages in the middle hold more"""
    pipeline_model_parallel_layout: str = ""
    """what each stage holds, where that is to be another split: Et*6|t*7|t*7|t*6L is the embedding (E) and 6 layers (t) on the
    first of 4 stages, the head (L) and 6 on the last; more parts than stages are dealt out in turns"""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """interleave: parts of so many layers, dealt out to the stages in turns, so that less time is lost at both ends of a step"""
    sequence_parallel: bool = False
    """shard norms and residuals along the sequence too (needs tensor parallelism)"""
    use_distributed_optimizer: bool = False
    """each data-parallel rank keeps and updates its share of the optimizer's state"""
    overlap_grad_reduce: bool = False
    """send gradients while others are computed (needs an accelerator)"""
    overlap_param_gather: bool = False
    """fetch updated weights while layers compute (needs an accelerator, --use-distributed-optimizer and --overlap-grad-reduce)"""
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
        self._check_overlap()

    def _check_overlap(self) -> None:
        from megaenc.backend.device import detect_backend  # imports torch

        for flag, given in (
            ("--overlap-grad-reduce", self.overlap_grad_reduce),
            ("--overlap-param-gather", self.overlap_param_gather),
        ):
            if given and detect_backend().is_cpu:
                raise InputError(f"{flag}: this machine has no accelerator, so nothing runs beside computation; leave it out")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise InputError("--overlap-param-gather: needs --use-distributed-optimizer and --overlap-grad-reduce")

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of each part of the model in the order of the data; part p is on stage p % stages.

        There are as many parts as stages, or a multiple of it (interleaved). InputError if `num_layers` cannot be cut so.
        """
        stages, each = self.pipeline_model_parallel_size, self.num_layers_per_virtual_pipeline_stage
        for flag, given in (
            ("--pipeline-model-parallel-layout", self.pipeline_model_parallel_layout),
            ("--num-layers-per-virtual-pipeline-stage", each),
        ):
            if given and stages == 1:
                raise InputError(f"{flag}: found --pipeline-model-parallel-size 1, expected 2 or more")
        if self.pipeline_model_parallel_layout:
            if each:
                raise InputError(
                    "--num-layers-per-virtual-pipeline-stage: found beside --pipeline-model-parallel-layout, expected one of them"
                )
            return _parse_pipeline_layout(self.pipeline_model_parallel_layout, num_layers, stages)
        if each:
            if num_layers % (each * stages) or num_layers == each * stages:
                raise InputError(
                    f"--num-layers-per-virtual-pipeline-stage: found {each}, but {num_layers} layers on {stages} stages are not "
                    f"two or more turns of {each} on each; uneven parts: --pipeline-model-parallel-layout"
                )
            return (each,) * (num_layers // each)
        if num_layers < stages:
            raise InputError(f"--pipeline-model-parallel-size: found {stages}, expected at most the {num_layers} layers")
        return _even_split(num_layers, stages)

    def chunks_per_stage(self, num_layers: int) -> int:
        """Parts of the model that each stage holds: 1 unless interleaved."""
        return len(self.layers_per_chunk(num_layers)) // self.pipeline_model_parallel_size

    def describe(self, num_layers: int, world_size: int) -> str:
        """One phrase for the console: the degrees of parallelism, and how the layers are cut."""
        tensor, stages = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        split = [str(layers) for layers in self.layers_per_chunk(num_layers)]
        turns = [" + ".join(split[stage::stages]) for stage in range(stages)]
        cut = f" (layers {' | '.join(turns)})" if stages > 1 else ""
        data = f"DP {world_size // (tensor * stages)}"
        return f"TP {tensor}, PP {stages}{cut}, {data}" + (", SP" if self.sequence_parallel else "")

    def check_recompute(self, num_layers: int) -> None:
        """InputError unless the parts of a model of `num_layers` layers can compute activations again as asked for."""
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
        method, number = self.full_recompute
        split = self.layers_per_chunk(num_layers)
        for layers in split:
            if method == "uniform" and layers % number:  # megatron-core would read past the last layer
                raise InputError(f"--recompute-num-layers: found {number}, expected a divisor of the {layers} layers of a stage")
        if number > max(split):
            raise InputError(f"--recompute-num-layers: found {number}, expected at most the {max(split)} layers of a stage")

    @property
    def full_recompute(self) -> tuple[str | None, int | None]:
        """Method and number of layers of full recomputation, with their defaults; None twice where it is not asked for."""
        if self.recompute_granularity != "full":
            return None, None
        return self.recompute_method or "uniform", self.recompute_num_layers or 1


def _even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """What is left over goes to the middle, then towards the embedding: the head weighs most."""
    each, rest = divmod(num_layers, stages)
    larger = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))[:rest]
    return tuple(each + (stage in larger) for stage in range(stages))


def _parse_pipeline_layout(text: str, num_layers: int, stages: int) -> tuple[int, ...]:
    """The split that Megatron's notation `text` says. InputError where it says none of `num_layers` layers on `stages` stages."""
    from megaenc.backend.megatron import prepare_megatron

    prepare_megatron()
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    flag = f"--pipeline-model-parallel-layout {text}"
    try:
        parts = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        parts = []
    kinds = [kind for part in parts for kind in part]
    if kinds != [LayerType.embedding, *[LayerType.decoder] * num_layers, LayerType.loss]:
        raise InputError(f"{flag}: expected E, t for each of the {num_layers} layers, then L, with | between parts")
    if len(parts) % stages or not all(parts):
        raise InputError(f"{flag}: found {len(parts)} parts, expected {stages} or a multiple of it, none of them empty")
    return tuple(part.count(LayerType.decoder) for part in parts)
