"""Configuration of kernels and parallelism.

These change time, memory and, except for rounding, nothing else.
"""

import re
from dataclasses import dataclass
from typing import Literal

from megaenc.errors import InputError
from megaenc.flags import IN_IDENTITY, PositiveInt, setting

FLOAT8_ALIGNMENT = 16
"""The widths of matrices in float8 products must be multiples of this."""


@dataclass(frozen=True)
class KernelConfig:
    """Flags of the layers' kernels: attention, fused kernels, linear layers, float8.

    `attention_backend` is "flash", "varlen", "cudnn", "onednn", "sdpa" or, for the first of these
    that passes, "auto"; `fused_kernels` is whether Triton kernels are used, `transformer_impl`
    "local" or "transformer_engine" for linear layers and norms, and `fp8_format` "hybrid", "e4m3"
    or None for no float8. All are tested as an Engine is built: fused kernels that fail are
    replaced by torch's operations; a chosen attention, Transformer Engine or float8 that fails is
    an InputError.
    """

    attention_backend: Literal["auto", "flash", "varlen", "cudnn", "onednn", "sdpa"] = "auto"
    """attention within documents. flash: flash-attn 4, 3 or 2, if installed; varlen: torch's kernel
    over all documents of a pack; cudnn: cuDNN's, on documents padded to few lengths (these three on
    an accelerator, in bfloat16); onednn: matrix products on a CPU with AVX512-BF16 and without AMX,
    in bfloat16; sdpa: torch's scaled dot product, document by document, on every device; auto: the
    first of them that passes a self-test on every rank at the start"""
    fused_kernels: bool = True
    """on an accelerator with Triton, compute norms, rotary positions, SwiGLU or GeGLU, dropout and
    the loss by a kernel each, if it passes a self-test at the start; torch's operations replace
    those that fail, which are printed, and all of them on a CPU"""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """linear layers and norms. local: megatron-core's own and this package's; transformer_engine:
    Transformer Engine's, if installed"""
    # FP8 rounds too coarsely to be exchangeable within a run, as other kernels are.
    fp8_format: Literal["hybrid", "e4m3"] | None = setting(None, IN_IDENTITY)
    """compute the matrix products of the layers, not of embedding and head, in 8-bit floating point
    (needs H100, L40S, MI300X or later; slow on a CPU). hybrid: gradients with 5 bits of exponent
    and 2 of mantissa, all else with 4 and 3; e4m3: all with 4 and 3"""


@dataclass(frozen=True)
class ParallelConfig:
    """Flags of the parallel layout, communication overlap and recomputation.

    Ranks are divided into tensor-, pipeline- and data-parallel groups; the number of model replicas
    is world size / (`tensor_model_parallel_size` x `pipeline_model_parallel_size`). Stages may be
    interleaved (`num_layers_per_virtual_pipeline_stage`, None: not) or split by a text
    (`pipeline_model_parallel_layout`, "": evenly). `sequence_parallel` shards norms and residuals,
    `use_distributed_optimizer` the optimizer's state, `overlap_grad_reduce` and
    `overlap_param_gather` hide communication, and `recompute_granularity`, None for none, saves
    memory by the rules of the other recompute_ flags (`recompute_modules` is a tuple). `check` and
    the other check_ methods raise InputError; the constructor checks nothing.
    """

    tensor_model_parallel_size: PositiveInt = 1
    """processes that share each layer's matrices"""
    pipeline_model_parallel_size: PositiveInt = 1
    """pipeline stages, each with a share of the layers; if they do not divide evenly, stages in the
    middle have more"""
    pipeline_model_parallel_layout: str = ""
    """another split of the layers, in Megatron's notation: Et*6|t*7|t*7|t*6L is the embedding (E)
    and 6 layers (t) on the first of 4 stages, the head (L) and 6 layers on the last; with more
    parts than stages, the stages are interleaved"""
    num_layers_per_virtual_pipeline_stage: PositiveInt | None = None
    """interleave the stages in chunks of this many layers, which shortens the pipeline bubble"""
    sequence_parallel: bool = False
    """shard norms and residuals along the sequence too (needs tensor parallelism)"""
    use_distributed_optimizer: bool = False
    """shard the optimizer's state over the data-parallel ranks"""
    overlap_grad_reduce: bool = False
    """reduce gradients while others are computed (needs an accelerator)"""
    overlap_param_gather: bool = False
    """gather new weights while layers compute (needs an accelerator, --use-distributed-optimizer
    and --overlap-grad-reduce)"""
    recompute_granularity: Literal["full", "selective"] | None = None
    """recompute activations in backward to save memory. full: of whole layers; selective: of parts
    of each layer"""
    recompute_modules: tuple[Literal["core_attn", "mlp", "activation"], ...] = ()
    """parts of a layer that selective recomputes: core_attn, mlp, activation (only the output of
    the MLP's activation); core_attn unless given"""
    recompute_method: Literal["uniform", "block"] | None = None
    """layers that full recomputes. uniform: all, in units of --recompute-num-layers; block: the
    first --recompute-num-layers of each stage; uniform unless given"""
    recompute_num_layers: PositiveInt | None = None
    """layers per unit (uniform), or recomputed layers of each stage (block); 1 unless given"""

    def check(self, world_size: int) -> None:
        """Raise InputError unless `world_size` processes and the flags fit together.

        The world size must be a multiple of tensor x pipeline size. Sequence parallelism needs a
        tensor size of 2 or more, `overlap_param_gather` both `use_distributed_optimizer` and
        `overlap_grad_reduce`. Layers are left to `layers_per_chunk`, recomputation to
        `check_recompute`, the machine to `check_device`.
        """
        tensor = self.tensor_model_parallel_size
        pipeline = self.pipeline_model_parallel_size
        if world_size % (tensor * pipeline):
            raise InputError(
                f"{world_size} processes cannot be laid out as tensor parallel {tensor} x "
                f"pipeline parallel {pipeline}: "
                f"expected a multiple of {tensor * pipeline} (torchrun --nproc-per-node)"
            )
        if self.sequence_parallel and tensor == 1:
            raise InputError(
                "--sequence-parallel: found --tensor-model-parallel-size 1, expected 2 or more"
            )
        if self.overlap_param_gather and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            raise InputError(
                "--overlap-param-gather: needs --use-distributed-optimizer and "
                "--overlap-grad-reduce"
            )

    def check_device(self) -> None:
        """Raise InputError for a flag that needs an accelerator if this machine has none.

        These are --overlap-grad-reduce and --overlap-param-gather. Only if one is on,
        `detect_backend` is called.
        """
        from megaenc.backend.device import detect_backend  # imports torch

        for flag, enabled in (
            ("--overlap-grad-reduce", self.overlap_grad_reduce),
            ("--overlap-param-gather", self.overlap_param_gather),
        ):
            if enabled and detect_backend().is_cpu:
                raise InputError(
                    f"{flag}: needs an accelerator, and this machine has none; leave the flag out"
                )

    def layers_per_chunk(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers of each model chunk, in the order of the layers.

        Args:
            num_layers: Layers of the whole model, which are the sum of those returned.

        Returns:
            Chunk c is on pipeline stage c % stages. There are as many chunks as stages, or a
            multiple (interleaved stages).

        Raises:
            InputError: The flags cannot split that many layers.
        """
        stages = self.pipeline_model_parallel_size
        chunk_layers = self.num_layers_per_virtual_pipeline_stage
        for flag, value in (
            ("--pipeline-model-parallel-layout", self.pipeline_model_parallel_layout),
            ("--num-layers-per-virtual-pipeline-stage", chunk_layers),
        ):
            if value and stages == 1:
                raise InputError(
                    f"{flag}: found --pipeline-model-parallel-size 1, expected 2 or more"
                )
        if self.pipeline_model_parallel_layout:
            if chunk_layers:
                raise InputError(
                    "--num-layers-per-virtual-pipeline-stage: found with "
                    "--pipeline-model-parallel-layout, expected one of them"
                )
            return _parse_pipeline_layout(self.pipeline_model_parallel_layout, num_layers, stages)
        if chunk_layers:
            if num_layers % (chunk_layers * stages) or num_layers == chunk_layers * stages:
                raise InputError(
                    f"--num-layers-per-virtual-pipeline-stage: found {chunk_layers}, but "
                    f"{num_layers} layers on {stages} stages are not "
                    f"two or more chunks of {chunk_layers} on each; for uneven chunks give "
                    "--pipeline-model-parallel-layout"
                )
            return (chunk_layers,) * (num_layers // chunk_layers)
        if num_layers < stages:
            raise InputError(
                f"--pipeline-model-parallel-size: found {stages}, expected at most the "
                f"{num_layers} layers"
            )
        return _even_split(num_layers, stages)

    def chunks_per_stage(self, num_layers: int) -> int:
        """Return the number of model chunks on each pipeline stage.

        It is 1 unless the stages are interleaved.

        Args:
            num_layers: Layers of the whole model.

        Raises:
            InputError: The flags cannot split that many layers.
        """
        return len(self.layers_per_chunk(num_layers)) // self.pipeline_model_parallel_size

    def describe(self, num_layers: int, world_size: int) -> str:
        """Return the layout as text, such as `TP 2, PP 2 (layers 6 | 6), DP 4, SP`.

        These are sizes of tensor, pipeline and data parallelism, also of 1; SP is sequence
        parallelism, if on. With several stages the text has the layers of each, as `3 + 3 | 3 + 3`
        if they are interleaved.

        Args:
            num_layers: Layers of the whole model.
            world_size: Number of processes, a multiple of tensor x pipeline size.

        Raises:
            InputError: The flags cannot split that many layers.
        """
        tensor = self.tensor_model_parallel_size
        stages = self.pipeline_model_parallel_size
        split = [str(layers) for layers in self.layers_per_chunk(num_layers)]
        turns = [" + ".join(split[stage::stages]) for stage in range(stages)]
        cut = f" (layers {' | '.join(turns)})" if stages > 1 else ""
        data = f"DP {world_size // (tensor * stages)}"
        return f"TP {tensor}, PP {stages}{cut}, {data}" + (", SP" if self.sequence_parallel else "")

    def check_recompute(self, num_layers: int) -> None:
        """Raise InputError unless the recompute flags fit each other and the layers.

        The error names the flag. With full recomputation, layers that the flags cannot split among
        stages are an error too.

        Args:
            num_layers: Layers of the whole model.
        """
        for flag, value, granularity in (
            ("--recompute-modules", self.recompute_modules, "selective"),
            ("--recompute-method", self.recompute_method, "full"),
            ("--recompute-num-layers", self.recompute_num_layers, "full"),
        ):
            if value and self.recompute_granularity != granularity:
                raise InputError(
                    f"{flag}: needs --recompute-granularity {granularity}, found "
                    f"{self.recompute_granularity or 'none'}"
                )
        if self.recompute_granularity != "full":
            return
        method, unit_layers = self.full_recompute
        split = self.layers_per_chunk(num_layers)
        for layers in split:
            # megatron-core would read past the last layer.
            if method == "uniform" and layers % unit_layers:
                raise InputError(
                    f"--recompute-num-layers: found {unit_layers}, expected a divisor of the "
                    f"{layers} layers of a stage"
                )
        if unit_layers > max(split):
            raise InputError(
                f"--recompute-num-layers: found {unit_layers}, expected at most the {max(split)} "
                "layers of a stage"
            )

    @property
    def selected_recompute_modules(self) -> tuple[str, ...]:
        """Return the parts of a layer that selective recomputation recomputes.

        They are some of core_attn, mlp and activation; core_attn by default, and none if
        recomputation is not selective.
        """
        return (
            (self.recompute_modules or ("core_attn",))
            if self.recompute_granularity == "selective"
            else ()
        )

    @property
    def selects_rows(self) -> bool:
        """Return whether the last layer computes only the predicted positions.

        It does so without sequence parallelism, if it is on the pipeline stage of the output layer,
        which only --pipeline-model-parallel-layout can change. The answer is that of all ranks.
        """
        last_stage = self.pipeline_model_parallel_layout.rsplit("|", 1)[-1] or "t"
        return not self.sequence_parallel and "t" in last_stage

    @property
    def full_recompute(self) -> tuple[str | None, int | None]:
        """Return method and number of layers of full recomputation.

        The method is uniform, whose number is the layers of a unit, or block, whose number is the
        recomputed layers of each stage. The default is (uniform, 1); (None, None) without full
        recomputation.
        """
        if self.recompute_granularity != "full":
            return None, None
        return self.recompute_method or "uniform", self.recompute_num_layers or 1


def _even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    A remainder goes to the middle first, then towards the embedding.
    """
    smallest, remainder = divmod(num_layers, stages)
    larger = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))[
        :remainder
    ]
    return tuple(smallest + (stage in larger) for stage in range(stages))


def _parse_pipeline_layout(text: str, num_layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each model chunk of a layout in Megatron's notation.

    Args:
        text: Layout such as Et*6|t*7|t*7|t*6L.

    Raises:
        InputError: `text` is not a layout of `num_layers` layers on `stages` stages.
    """
    flag = f"--pipeline-model-parallel-layout {text}"
    expanded = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        expanded = re.sub(pattern, lambda match: match[1] * int(match[2]), expanded)
    parts = expanded.split("|")
    if "".join(parts) != f"E{'t' * num_layers}L":
        raise InputError(
            f"{flag}: expected E, t for each of the {num_layers} layers, then L, with | between "
            "parts"
        )
    if len(parts) % stages or not all(parts):
        raise InputError(
            f"{flag}: found {len(parts)} parts, expected {stages} or a multiple of it, none of "
            "them empty"
        )
    return tuple(part.count("t") for part in parts)
