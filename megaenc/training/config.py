"""The configuration of a pretraining run: each field is a flag of the command and a key of the YAML file."""

import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from megaenc import flags
from megaenc.backend.parallel_config import FLOAT8_ALIGNMENT, KernelConfig, ParallelConfig
from megaenc.data.packing.packed_dataset import LONGEST_PACK
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig, get_preset
from megaenc.training.config_groups import (
    DataConfig,
    FaultConfig,
    MonitoringConfig,
    OptimizerConfig,
    OutputConfig,
    StartConfig,
)
from megaenc.training.lr_schedule import WSD_DECAY_STYLE


def has_bf16() -> bool:
    """Return whether the detected device of this machine, GPU or CPU, has bfloat16 instructions."""
    from megaenc.backend.device import detect_backend  # imports torch

    return detect_backend().has_bf16


@dataclass(frozen=True)
class BatchSizeSchedule:
    """Batch size of each step in packs; `starts`: first sample of each step of the ramp-up and the first `full` one."""

    full: int
    starts: tuple[int, ...] = (0,)

    def first_sample(self, step: int) -> int:
        """Return the number of samples (packs) read before `step` (1, 2, ...), which is the number of its first sample."""
        ramp_steps = len(self.starts)
        return self.starts[step - 1] if step <= ramp_steps else self.starts[-1] + (step - ramp_steps) * self.full

    def size(self, step: int) -> int:
        """Return the global batch size of `step` (1, 2, ...) in packs."""
        return self.first_sample(step + 1) - self.first_sample(step)

    def steps_for(self, samples: int) -> int:
        """Return the smallest number of steps that together read at least `samples` samples (packs)."""
        if samples <= self.starts[-1]:
            return bisect_left(self.starts, samples)
        return len(self.starts) - 1 + -(-(samples - self.starts[-1]) // self.full)


@functools.cache
def build_batch_sizes(full: int, rampup: tuple[int, ...] | None) -> BatchSizeSchedule:
    """Return a BatchSizeSchedule up to `full` packs a step, constant without a `rampup` (first size, increment, samples)."""
    if not rampup:
        return BatchSizeSchedule(full)
    from megaenc.backend.megatron import prepare_megatron

    prepare_megatron()
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    start, increment, samples = rampup
    rule = RampupBatchsizeNumMicroBatchesCalculator(full, 1, 1, False, 1, start, increment, samples)
    starts = [0]
    while rule.get_current_global_batch_size() < full:
        starts.append(starts[-1] + rule.get_current_global_batch_size())
        rule.update(starts[-1], consistency_check=False)
    return BatchSizeSchedule(full, tuple(starts))


@dataclass(frozen=True)
class PretrainConfig:
    """Flags of a pretraining run (also keys of --config): schedule, length, batch sizes, groups such as data, optimizer."""

    config: str = ""
    """YAML file of flags; flags on the command line override it"""
    objective_schedule: str = "clm:0.25,mlm:0.75"
    """objectives with their shares of the run or their steps: clm:0.25,mlm:0.75 or clm:10000,mlm(mask=0.3):32000 or
    5x(clm:0.05,mlm:0.15)"""
    train_iters: int | None = None
    """number of training steps; 200 without this flag and --train-tokens"""
    train_tokens: int | None = None
    """number of training tokens, instead of --train-iters; rounded up to whole steps"""
    micro_batch_size: int = 8
    """packs that one process trains on at once"""
    global_batch_size: int = 16
    """packs of a step, summed over all processes"""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: begin with START packs a step and grow by INCREMENT, evenly over the first SAMPLES packs, to
    --global-batch-size"""
    seed: int = 1
    """random seed of initial weights, data order and masks"""
    bf16: bool = field(default_factory=has_bf16)
    """compute in bfloat16 with float32 master weights; on by default if the device has bfloat16 instructions"""
    model: str = "tiny"
    """preset of the model's shape: tiny, small, 210m, 610m, 1b of the study, modernbert-base, modernbert-large, gemma3-270m,
    gemma3-1b, embeddinggemma-300m; the model flags below override parts of it"""
    shape: ModelConfig = field(default_factory=lambda: get_preset("tiny"))
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    start: StartConfig = field(default_factory=StartConfig)
    layout: ParallelConfig = field(default_factory=ParallelConfig)
    kernels: KernelConfig = field(default_factory=KernelConfig)
    health: FaultConfig = field(default_factory=FaultConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig)

    def check(self, world_size: int) -> None:
        """Raise InputError, naming the flag, for values out of range or impossible on `world_size` processes."""
        self.layout.check(world_size)
        self.start.check()
        self.optimizer.check()
        self.shape.check(self.layout.tensor_model_parallel_size)
        values = flags.flatten(self)
        for names, is_valid, expected in _LIMITS:
            for name in names:
                if isinstance(values[name], (int, float)) and not is_valid(values[name]):
                    raise InputError(f"--{name.replace('_', '-')}: found {values[name]}, expected {expected}")
        if self.health.max_rewinds and not (self.output.save and self.health.loss_spike_sigmas):
            missing = "--save: a rewind loads a checkpoint" if not self.output.save else "--loss-spike-sigmas above 0"
            raise InputError(f"--max-rewinds {self.health.max_rewinds}: expected {missing}")
        self._check_float8()
        if min(self.output.save_steps, default=1) < 1:
            raise InputError(f"--save-steps: found {min(self.output.save_steps)}, expected steps, 1 or more")
        chunks = self.layout.chunks_per_stage(self.shape.num_layers)
        self.layout.check_recompute(self.shape.num_layers)
        if self.train_iters is not None and self.train_tokens is not None:
            raise InputError(
                f"--train-tokens: found {self.train_tokens} together with --train-iters {self.train_iters}, expected one of them"
            )
        row, tensor = self.micro_batch_size * self.data.seq_length, self.layout.tensor_model_parallel_size
        if self.layout.sequence_parallel and row % tensor:
            raise InputError(
                f"--sequence-parallel: a row of {row} tokens (--micro-batch-size x --seq-length) is no multiple of "
                f"--tensor-model-parallel-size {tensor}"
            )
        copies = self.data_parallel_size(world_size)
        step = self.micro_batch_size * copies
        if self.global_batch_size % step:
            raise InputError(
                f"--global-batch-size: found {self.global_batch_size}, expected a multiple of {step} "
                f"(--micro-batch-size {self.micro_batch_size} x {copies} data-parallel ranks)"
            )
        stages, micro_batches = self.layout.pipeline_model_parallel_size, self.global_batch_size // step
        self._check_rampup(step * (stages if chunks > 1 else 1))
        self._check_length()
        if chunks > 1 and micro_batches % stages:
            raise InputError(
                f"--global-batch-size: found {self.global_batch_size}, which is {micro_batches} micro-batches for each "
                f"data-parallel rank; interleaved stages need a multiple of --pipeline-model-parallel-size {stages}"
            )
        self.monitoring.check(self.output.save, self.total_iters, world_size)

    def _check_length(self) -> None:
        """Raise InputError if the run has more than _MOST_STEPS steps or _MOST_TOKENS tokens."""
        name = "train_iters" if self.train_tokens is None else "train_tokens"
        flag, tokens = f"--{name.replace('_', '-')}: found {vars(self)[name]}", self.tokens_after(self.total_iters)
        if self.total_iters > _MOST_STEPS:
            raise InputError(f"{flag}, expected at most {_MOST_STEPS:,} steps")
        if tokens > _MOST_TOKENS:
            raise InputError(
                f"{flag}, which reads {tokens:,} tokens (--global-batch-size x --seq-length a step); "
                f"expected at most {_MOST_TOKENS:,}"
            )

    def _check_float8(self) -> None:
        """Raise InputError if `--fp8-format` is given and a matrix has a size that FP8 products do not support."""
        if not self.kernels.fp8_format:
            return
        flag, tensor = f"--fp8-format {self.kernels.fp8_format}", self.layout.tensor_model_parallel_size
        row = self.micro_batch_size * self.data.seq_length // (tensor if self.layout.sequence_parallel else 1)
        if self.kernels.transformer_impl == "transformer_engine" and row % FLOAT8_ALIGNMENT:
            raise InputError(
                f"{flag}: a row of {row} tokens (--micro-batch-size x --seq-length, divided by --sequence-parallel), "
                f"expected a multiple of {FLOAT8_ALIGNMENT} under Transformer Engine"
            )
        shared = f" on each of {tensor} tensor-parallel ranks" if tensor > 1 else ""
        for name, (rows, columns) in self.shape.linear_shapes(tensor).items():
            if rows % FLOAT8_ALIGNMENT or columns % FLOAT8_ALIGNMENT:
                raise InputError(
                    f"{flag}: {name} is {rows} x {columns}{shared}, expected multiples of {FLOAT8_ALIGNMENT}: change the "
                    "widths or drop --fp8-format"
                )

    def _check_rampup(self, divisor: int) -> None:
        """Raise InputError if `--rampup-batch-size` is malformed or a batch size in it is not a multiple of `divisor`."""
        if self.rampup_batch_size is None:
            return
        flag = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1:
            raise InputError(f"{flag}: expected three numbers of 1 or more: START INCREMENT SAMPLES")
        start, increment, samples = self.rampup_batch_size
        if samples > start * _MOST_GROWING_STEPS:
            raise InputError(f"{flag}: expected SAMPLES of at most {_MOST_GROWING_STEPS:,} x START")
        if start >= self.global_batch_size or (self.global_batch_size - start) % increment:
            raise InputError(
                f"{flag}: steps of {increment} do not lead from {start} to --global-batch-size {self.global_batch_size}"
            )
        if start % divisor or increment % divisor:
            raise InputError(f"{flag}: expected START and INCREMENT to be multiples of {divisor}, like --global-batch-size")

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Return the BatchSizeSchedule, the packs of each step, of --global-batch-size and --rampup-batch-size."""
        return build_batch_sizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def batch_size_text(self) -> str:
        """Return the number of packs a step as text: `16` or, with --rampup-batch-size, `4 to 16`."""
        ramp_text = f"{self.rampup_batch_size[0]} to " if self.rampup_batch_size else ""
        return f"{ramp_text}{self.global_batch_size}"

    def tokens_after(self, step: int) -> int:
        """Return the total number of tokens (packs times --seq-length) that steps 1 to `step` read."""
        return self.batch_sizes.first_sample(step + 1) * self.data.seq_length

    @property
    def model_name(self) -> str:
        """Return the preset's name (--model), or "model" if flags changed its shape in more than the vocabulary size."""
        shape = dataclasses.replace(self.shape, vocab_size=None)
        return self.model if shape == get_preset(self.model) else "model"

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas: `world_size` // (tensor-parallel size * pipeline-parallel size)."""
        return world_size // (self.layout.tensor_model_parallel_size * self.layout.pipeline_model_parallel_size)

    @property
    def total_iters(self) -> int:
        """Return the number of steps of the whole run: --train-iters, or enough for --train-tokens, or 200 without both."""
        if self.train_tokens is not None:
            return self.batch_sizes.steps_for(-(-self.train_tokens // self.data.seq_length))
        return 200 if self.train_iters is None else self.train_iters

    @property
    def eval_every(self) -> int:
        """Return the steps between validations: --eval-interval (0: none), or without it a tenth of the run, at least 1."""
        return max(1, self.total_iters // 10) if self.output.eval_interval is None else self.output.eval_interval


_MOST_STEPS = 10**9  # a thousand times the steps of the longest known runs
_MOST_TOKENS = 2**62  # positions in the data are int64
_MOST_GROWING_STEPS = 10**6  # the first sample of each is held in memory

_COUNTS = (
    *("train_iters", "train_tokens", "micro_batch_size", "global_batch_size"),
    *("seq_length", "eval_iters", "make_vocab_size_divisible_by"),
)
_INTERVALS = ("save_interval", "keep_last", "keep_every", "exit_interval", "log_interval", "straggler_interval")
_LAYERS = ("rewind_skip_iters", "muon_num_ns_steps", "recompute_num_layers", "num_layers_per_virtual_pipeline_stage")
_LIMITS = (
    ((*_COUNTS, *_INTERVALS, *_LAYERS), lambda value: value >= 1, "1 or more"),
    (_COUNTS[2:], lambda value: value <= 10**15, f"{10**15:,} at most"),  # their products are int64
    (("seq_length",), lambda value: value <= LONGEST_PACK, f"{LONGEST_PACK:,} at most"),
    (("eval_interval", "branch_at", "init_at", "skip_samples"), lambda value: value >= 0, "0 or more"),
    (("max_skipped_updates", "max_rewinds"), lambda value: value >= 0, "0 or more"),
    (("lr", "adam_eps", "norm_epsilon", "rotary_base"), lambda value: 0 < value < math.inf, "a number above 0"),
    (("exit_duration_in_mins",), lambda value: 0 < value < math.inf, "a number of minutes above 0"),
    (("distributed_timeout_minutes",), lambda value: 0 < value <= 1e5, "a number of minutes above 0, 100000 at most"),
    (
        ("weight_decay", "clip_grad", "seed", "init_method_std", "min_lr"),
        lambda value: 0 <= value < math.inf,
        "a number of 0 or more",
    ),
    (("loss_spike_sigmas",), lambda value: 0 <= value < math.inf, "a number of 0 or more"),
    (("adam_beta1", "adam_beta2", "muon_momentum"), lambda value: 0 <= value < 1, "0 or more and below 1"),
)

# Alternative flags: one on the command line also overrides the other, and its companions, in the YAML file.
_PAIRS = (
    (("train_iters",), ("train_tokens",)),
    (("lr_warmup_iters",), ("lr_warmup_fraction",)),
    (("lr_wsd_decay_iters",), ("lr_wsd_decay_fraction",)),
    (("branch_from", "branch_at"), ("init_from", "init_at")),
)


DESCRIPTION = """Pretrain an encoder with CLM, MLM or any schedule of them, in one process or under torchrun.

Without flags it trains the tiny preset on the demo corpus. Each flag is also a key of the YAML file given as --config."""


def parse_config(argv: Sequence[str], prog: str) -> PretrainConfig:
    """Return the PretrainConfig of, by precedence, the flags `argv`, the preset of their --model, --config, defaults."""
    default = merge_defaults(argv, prog, PretrainConfig())
    return flags.parse(PretrainConfig, argv, prog=prog, description=DESCRIPTION, default=default)


def merge_defaults(argv: Sequence[str], prog: str, default: PretrainConfig) -> PretrainConfig:
    """Return `default` with --config and --model of `argv`; if `argv` has one of two alternative flags, both become None.

    InputError for an invalid file or preset. If `argv` has one flag of an alternative (_PAIRS), both become None. Another
    --lr-decay-style than WSD removes the flags of WSD.
    """
    config, model = flags.find_flag_value(argv, "--config"), flags.find_flag_value(argv, "--model")
    if config:
        default = read_config_file(config, default)
    if model:
        default = apply_preset(default, model)
    for pair in _PAIRS:
        if sum(flags.find_flag_value(argv, "--" + names[0].replace("_", "-")) is not None for names in pair) == 1:
            default = flags.replace_fields(default, {name: None for names in pair for name in names}, source=prog)
    if flags.find_flag_value(argv, "--lr-decay-style") not in (None, "WSD"):  # without the file's flags of WSD
        wsd = {"lr_wsd_decay_iters": None, "lr_wsd_decay_fraction": None, "lr_wsd_decay_style": WSD_DECAY_STYLE}
        default = flags.replace_fields(default, wsd, source=prog)
    return default


def read_config_file(path: str, default: PretrainConfig | None = None) -> PretrainConfig:
    """Return `default` (None: all defaults) with the YAML file at `path` applied, its preset first. InputError if bad."""
    return flags.read_config_file(default or PretrainConfig(), path, preset=("model", apply_preset))


def apply_preset(settings: PretrainConfig, name: str) -> PretrainConfig:
    """Return a copy of `settings` with the name and model shape of preset `name`; InputError if there is no such preset."""
    return dataclasses.replace(settings, model=name, shape=get_preset(name))
