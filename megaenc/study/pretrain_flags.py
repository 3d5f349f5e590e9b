"""The flags of `megaenc pretrain` that a manifest may give, known without loading torch, and what the plan reads of them."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megaenc import flags
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig, preset
from megaenc.training.learning_rate import steps_of
from megaenc.training.options import DataSettings, HealthSettings, MonitoringSettings, OptimizerSettings, OutputSettings

OF_THE_STUDY = frozenset(
    (
        *("config", "objective_schedule", "train_iters", "train_tokens", "seed", "rampup_batch_size"),
        *("branch_from", "branch_at", "init_from", "init_at", "skip_samples", "skip_packs"),
        *("save", "save_steps", "keep_last", "keep_every", "exit_interval", "exit_duration_in_mins", "dry_run"),
    )
)
"""Flags that follow from the models and from where runs are put."""


@dataclass(frozen=True)
class Layout:
    """As `megaenc.backend.Layout`, which needs torch."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    pipeline_model_parallel_layout: str = ""
    num_layers_per_virtual_pipeline_stage: int | None = None
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ()
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: int | None = None


@dataclass(frozen=True)
class RunFlags:
    """As `megaenc.training.settings.PretrainSettings`, which needs torch, without what the study decides itself."""

    model: str = "tiny"
    micro_batch_size: int = 8
    global_batch_size: int = 16
    bf16: bool = True
    """in the plan alone: a run has it where the processor does"""
    shape: ModelConfig = field(default_factory=lambda: preset("tiny"))
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    layout: Layout = field(default_factory=Layout)
    health: HealthSettings = field(default_factory=HealthSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)


def check_pretrain_flags(source: str, given: Mapping[str, Any]) -> None:
    """InputError in one line for a flag that there is not, of another type, or that the study decides; `source` is the place."""
    for name in given:
        if name in OF_THE_STUDY:
            raise InputError(f"{source}: field `{name}`: found here, expected nowhere: it follows from `models` and the run")
    run_flags(given, source)


def run_flags(given: Mapping[str, Any], source: str = "pretrain") -> RunFlags:
    """`given` over the preset of its `model` over the defaults of `megaenc pretrain`. Raises InputError."""
    values = {str(name): value for name, value in given.items()}
    try:
        default = dataclasses.replace(RunFlags(), shape=preset(str(values.get("model", "tiny"))))
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    return flags.replace_fields(default, values, source=source)


def rate_steps(rate: OptimizerSettings, total: int) -> tuple[int, int]:
    """Steps of warm-up and of decay in a run of `total` steps. Raises InputError where a fraction or a number cannot be."""
    return (
        steps_of("lr-warmup", rate.lr_warmup_iters, rate.lr_warmup_fraction, total),
        steps_of("lr-wsd-decay", rate.lr_wsd_decay_iters, rate.lr_wsd_decay_fraction, total),
    )
