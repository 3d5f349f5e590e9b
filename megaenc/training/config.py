"""The configuration of a pretraining run.

Each field is a flag of the command and a key of the YAML file.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megaenc import flags
from megaenc.backend.parallel_config import FLOAT8_ALIGNMENT, KernelConfig, ParallelConfig
from megaenc.data.indexed.corpus import parse_split
from megaenc.data.packing.data_path import may_share_weights, parse_data_path
from megaenc.data.packing.validation_sets import parse_valid_data_path
from megaenc.errors import InputError
from megaenc.flags import BY_PHASE, NOT_IN_IDENTITY, Bounds, NonNegativeInt, PositiveInt, setting
from megaenc.model.config import ModelConfig, get_preset
from megaenc.model.freezing import parse_freeze
from megaenc.training.config_groups import (
    DataConfig,
    FaultConfig,
    MonitoringConfig,
    OptimizerConfig,
    OutputConfig,
    StartConfig,
)
from megaenc.training.lr_schedule import LearningRateConfig
from megaenc.training.phases import (
    REPLACES,
    BatchSizeSchedule,
    PhaseConfig,
    build_batch_sizes,
    build_learning_rate,
    drop_replaced,
    parse_phase,
    resolve_phases,
)

# Packs: hundreds of times the largest in use.
_BatchSize = Annotated[int, Bounds(low=1, high=10_000_000)]


def has_bf16() -> bool:
    """Return whether the detected device, GPU or CPU, has bfloat16 instructions.

    On a GPU it initializes CUDA; emulated instructions do not count.

    Raises:
        InputError: There are more processes than accelerators on this machine.
    """
    from megaenc.backend.device import detect_backend  # imports torch

    return detect_backend().has_bf16


@dataclass(frozen=True)
class PretrainConfig:
    """Flags of a pretraining run, which are also keys of --config.

    The schedule (`objective_schedule`, or `phases`, a tuple of YAML mappings as text), the length
    (`train_iters` or `train_tokens`), `micro_batch_size`, `global_batch_size` and
    `rampup_batch_size` (start, increment, samples) in packs, `seed`, `bf16` and the preset `model`
    are here; `shape`, `data`, `learning_rate`, `optimizer`, `start`, `layout`, `kernels`, `health`,
    `output` and `monitoring` are groups, whose fields are flags and keys without a prefix. All
    fields are read-only and have defaults; that of `bf16` is `has_bf16()`, with its errors. The
    constructor checks nothing; `parse_config` makes one of a command line, and `check` tests
    whether the values fit each other. An instance may also be one phase of a run (`phase_configs`).
    """

    config: str = setting("", NOT_IN_IDENTITY)
    """YAML file of flags, or name of a packaged one; flags on the command line override it"""
    objective_schedule: str = setting("clm:0.25,mlm:0.75", NOT_IN_IDENTITY)
    """objectives with their shares of the run or their steps: clm:0.25,mlm:0.75 or
    clm:10000,mlm(mask=0.3):32000 or 5x(clm:0.05,mlm:0.15)"""
    phases: tuple[flags.YamlMapping, ...] = setting((), NOT_IN_IDENTITY)
    """instead of --objective-schedule and --train-iters: a list, usually in a YAML file, with the
    objective, train_iters or train_tokens, and any of data_path, the flags of its blend, packing,
    seq_length, batch sizes, rotary_base, weight_decay, freeze and learning-rate flags of each
    phase, such as "{objective: mlm, train_iters: 100, seq_length: 512}"; other flags are those of
    the run"""
    train_iters: PositiveInt | None = setting(None, NOT_IN_IDENTITY, BY_PHASE)
    """number of training steps; 200 without this flag and --train-tokens"""
    train_tokens: PositiveInt | None = setting(None, NOT_IN_IDENTITY, BY_PHASE)
    """number of training tokens, instead of --train-iters; rounded up to whole steps"""
    micro_batch_size: _BatchSize | Literal["auto"] = setting(8, NOT_IN_IDENTITY, BY_PHASE)
    """packs that one process trains on at once; auto: the most that fit an accelerator's memory,
    measured as a run starts"""
    global_batch_size: _BatchSize = setting(16, BY_PHASE)
    """packs of a step, summed over all processes"""
    rampup_batch_size: tuple[PositiveInt, ...] | None = setting(None, BY_PHASE)
    """START INCREMENT SAMPLES: begin with START packs a step and grow by INCREMENT, evenly over the
    first SAMPLES packs, to --global-batch-size"""
    seed: NonNegativeInt = 1
    """random seed of initial weights, data order and masks"""
    bf16: bool = field(default_factory=has_bf16)
    """compute in bfloat16 with float32 master weights; on by default if the device has bfloat16
    instructions"""
    model: str = setting("tiny", NOT_IN_IDENTITY)
    """preset of the model's shape: tiny, small, 210m, 610m, 1b of the study, modernbert-base,
    modernbert-large, neobert-base, gemma3-270m, gemma3-1b, embeddinggemma-300m; the model flags
    below override parts of it"""
    shape: ModelConfig = field(default_factory=lambda: get_preset("tiny"))
    """shape of the model, and what its layers do"""
    data: DataConfig = field(default_factory=DataConfig)
    """training data: corpora, tokenizer, split, packs, order, skips"""
    learning_rate: LearningRateConfig = field(
        default_factory=LearningRateConfig, metadata=NOT_IN_IDENTITY
    )
    """peak, warm-up and decay, which may differ by phase"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """optimizer, weight decay and gradient clipping"""
    start: StartConfig = field(default_factory=StartConfig, metadata=NOT_IN_IDENTITY)
    """start from a checkpoint of another run, and skip its samples"""
    layout: ParallelConfig = field(default_factory=ParallelConfig, metadata=NOT_IN_IDENTITY)
    """parallel layout, communication overlap and recomputation"""
    kernels: KernelConfig = field(default_factory=KernelConfig, metadata=NOT_IN_IDENTITY)
    """kernels of the layers: attention, fused kernels, linear layers, float8"""
    health: FaultConfig = field(default_factory=FaultConfig, metadata=NOT_IN_IDENTITY)
    """non-finite gradients and loss spikes: skipped steps and rewinds"""
    output: OutputConfig = field(default_factory=OutputConfig, metadata=NOT_IN_IDENTITY)
    """run directory, checkpoints, early exit, validation, logs and dry run"""
    monitoring: MonitoringConfig = field(default_factory=MonitoringConfig, metadata=NOT_IN_IDENTITY)
    """TensorBoard, Weights & Biases, stragglers, profiler and callbacks"""

    def check(self, world_size: int) -> None:
        """Raise InputError for values that do not fit each other or the processes.

        The error names the flag, and the phase if it is of one. No file is read.

        Args:
            world_size: Number of processes of the run.
        """
        if not self.phases:
            self._check_settings(world_size)
        for index, phase in enumerate(self.phase_configs if self.phases else (), 1):
            try:
                phase.settings._check_settings(world_size)
            except InputError as error:
                raise InputError(f"phase {index}: {error}") from None
        self._check_length()
        self.monitoring.check(self.output.save, self.total_iters, world_size)
        build_learning_rate(self)
        self._check_pseudo_perplexity()
        parse_split(self.data.split)
        parse_valid_data_path(self.output.valid_data_path)
        for phase in self.phase_configs:
            parse_data_path(phase.settings.data.data_path)
        self._check_blend_temperature()

    def _check_settings(self, world_size: int) -> None:
        """Raise InputError for settings that a run or a phase cannot have.

        Schedules are left to `check`.
        """
        self.layout.check(world_size)
        self.start.check()
        self.optimizer.check()
        self.shape.check(self.layout.tensor_model_parallel_size)
        parse_freeze(self.optimizer.freeze or (), self.shape)
        self.check_rampup()
        if self.health.max_rewinds and not (self.output.save and self.health.loss_spike_sigmas):
            missing = (
                "--save: a rewind loads a checkpoint"
                if not self.output.save
                else "--loss-spike-sigmas above 0"
            )
            raise InputError(f"--max-rewinds {self.health.max_rewinds}: expected {missing}")
        self._check_float8()
        try:
            (self.output.save or "").encode()
        except UnicodeEncodeError:
            raise InputError(
                f"--save {self.output.save!r}: not UTF-8; expected another name"
            ) from None
        self.layout.chunks_per_stage(self.shape.num_layers)  # raises for stages that cannot be
        self.layout.check_recompute(self.shape.num_layers)
        if self.train_iters is not None and self.train_tokens is not None:
            raise InputError(
                f"--train-tokens: found {self.train_tokens} together with --train-iters "
                f"{self.train_iters}, expected one of them"
            )
        window = self.shape.window_size
        length = self.data.seq_length
        if window is not None and window >= length:
            raise InputError(
                f"--window-size: found {window}, expected less than --seq-length {length}; local "
                "layers would attend globally"
            )
        if (
            self.micro_batch_size == "auto"
            and self.layout.tensor_model_parallel_size * self.layout.pipeline_model_parallel_size
            > 1
        ):
            # One rank that runs out of memory would leave the others of its replica waiting.
            problem = "measures a model on one device, found tensor or pipeline parallelism"
            raise InputError(f"--micro-batch-size auto: {problem}; expected a number of packs")

    def _check_length(self) -> None:
        """Raise InputError if the run has too many steps or tokens."""
        name = "train_iters" if self.train_tokens is None else "train_tokens"
        flag = (
            "phases: found"
            if self.phases
            else f"--{name.replace('_', '-')}: found {vars(self)[name]}"
        )
        tokens = self.tokens_after(self.total_iters)
        if self.total_iters > _MOST_STEPS:
            raise InputError(f"{flag}, expected at most {_MOST_STEPS:,} steps")
        if tokens > _MOST_TOKENS:
            raise InputError(
                f"{flag}, which reads {tokens:,} tokens (--global-batch-size x --seq-length a "
                "step); "
                f"expected at most {_MOST_TOKENS:,}"
            )

    def _check_pseudo_perplexity(self) -> None:
        """Raise InputError for an impossible pseudo-perplexity.

        It needs a validation, and at most as many passes as a pack has tokens.
        """
        passes = self.output.eval_pseudo_perplexity_passes
        longest = max(phase.settings.data.seq_length for phase in self.phase_configs)
        flag = f"--eval-pseudo-perplexity-passes {passes}"
        if passes and not self.eval_every:
            raise InputError(
                f"{flag}: found with --eval-interval 0, expected an interval of validations"
            )
        if passes > longest:
            raise InputError(
                f"{flag}: expected at most --seq-length {longest}, with which one token of a "
                "document is hidden at a time"
            )

    def _check_blend_temperature(self) -> None:
        """Raise InputError for a --blend-temperature without a group of corpora."""
        phases = [
            phase.settings.data
            for phase in self.phase_configs
            if phase.settings.data.blend_temperature != 1
        ]
        if phases and not any(may_share_weights(data.data_path) for data in phases):
            raise InputError(
                f"--blend-temperature {phases[0].blend_temperature:g}: found no group of corpora "
                "in --data-path, expected a "
                "pattern such as 'data/*_text_document', or corpora without weights"
            )

    def _check_float8(self) -> None:
        """Raise InputError for flags and matrices that `--fp8-format` does not support.

        These are matrices whose size FP8 products do not support, and flags that it deprives of
        effect.
        """
        if not self.kernels.fp8_format:
            return
        flag = f"--fp8-format {self.kernels.fp8_format}"
        tensor = self.layout.tensor_model_parallel_size
        if "activation" in self.layout.recompute_modules:
            raise InputError(
                f"--recompute-modules activation: has no effect with {flag}, which saves the "
                "activation's output in 8 bits; "
                "leave one of them out"
            )
        shared = f" on each of {tensor} tensor-parallel ranks" if tensor > 1 else ""
        for name, (rows, columns) in self.shape.linear_shapes(tensor).items():
            if rows % FLOAT8_ALIGNMENT or columns % FLOAT8_ALIGNMENT:
                raise InputError(
                    f"{flag}: {name} is {rows} x {columns}{shared}, expected multiples of "
                    f"{FLOAT8_ALIGNMENT}: change the "
                    "widths or drop --fp8-format"
                )

    def check_rampup(self) -> None:
        """Raise InputError if `--rampup-batch-size` is malformed.

        If given, it must have three numbers of packs: START INCREMENT SAMPLES. Increments must lead
        from START up to --global-batch-size, and SAMPLES be at most a million times START. Flags of
        `phases` are ignored.
        """
        if self.rampup_batch_size is None:
            return
        flag = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if len(self.rampup_batch_size) != 3:
            raise InputError(f"{flag}: expected three numbers: START INCREMENT SAMPLES")
        start, increment, samples = self.rampup_batch_size
        if samples > start * _MOST_GROWING_STEPS:
            raise InputError(f"{flag}: expected SAMPLES of at most {_MOST_GROWING_STEPS:,} x START")
        if start >= self.global_batch_size or (self.global_batch_size - start) % increment:
            raise InputError(
                f"{flag}: steps of {increment} do not lead from {start} to --global-batch-size "
                f"{self.global_batch_size}"
            )

    @property
    def packs_at_once(self) -> int:
        """Return --micro-batch-size in packs; 1 for `auto`, until a run has measured it.

        It is that of this object; those of `phases` are ignored.
        """
        return 1 if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def has_auto_micro_batches(self) -> bool:
        """Return whether a phase has `--micro-batch-size auto`, to be measured by the run.

        An `auto` of the run that all `phases` override does not count.
        """
        return any(phase.settings.micro_batch_size == "auto" for phase in self.phase_configs)

    def with_micro_batch_sizes(self, sizes: Sequence[int]) -> "PretrainConfig":
        """Return a copy with --micro-batch-size sizes[i] for phase i, counted from 0.

        Args:
            sizes: Packs that a rank trains on at once: one number for each phase of `phases`, or a
                single one without `phases`.

        Raises:
            ValueError: There are `phases`, and `sizes` has not one number for each.
        """
        if not self.phases:
            return dataclasses.replace(self, micro_batch_size=sizes[0])
        phases = [
            json.dumps(parse_phase(text, "phases") | {"micro_batch_size": size})
            for text, size in zip(self.phases, sizes, strict=True)
        ]
        return dataclasses.replace(self, phases=tuple(map(flags.YamlMapping, phases)))

    @property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Return the global batch size of each step, in packs.

        It follows --global-batch-size and --rampup-batch-size (see `check_rampup`) of this object;
        those of `phases` are ignored.
        """
        return build_batch_sizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def batch_size_text(self) -> str:
        """Return the global batch size in packs as text, such as `16`.

        If it changes during the run, the text has the smallest and largest value, such as `4 to
        16`, also if the run ends before the largest.
        """
        sizes = []
        for phase in self.phase_configs:
            sizes.append(phase.settings.global_batch_size)
            if phase.settings.rampup_batch_size:
                sizes.append(phase.settings.rampup_batch_size[0])
        return _format_range(sizes)

    @property
    def seq_length_text(self) -> str:
        """Return the number of tokens of a pack as text, such as `128`.

        If it changes by phase, the text has the smallest and largest value, such as `128 to 512`.
        """
        return _format_range([phase.settings.data.seq_length for phase in self.phase_configs])

    @functools.cached_property
    def phase_configs(self) -> tuple[PhaseConfig, ...]:
        """Return the phases of the run with their first and last steps and settings.

        Without `phases`, the whole run is one, with these settings.

        Raises:
            InputError: A phase is wrong.
        """
        return resolve_phases(self)

    @property
    def kept_steps(self) -> frozenset[int]:
        """Return the steps whose checkpoints are saved and never deleted.

        They are those of --save-steps and, unless --no-save-phase-ends is given, the last one of
        each phase but the last.
        """
        earlier = self.phase_configs[:-1] if self.output.save_phase_ends else ()
        return frozenset((*self.output.save_steps, *(phase.last_step for phase in earlier)))

    def phase_at(self, step: int) -> PhaseConfig:
        """Return the phase that trains `step` (1, 2, ...), with its settings.

        It is the first one for step 0, and the last one for steps after the run.
        """
        return next(
            (phase for phase in self.phase_configs if step <= phase.last_step),
            self.phase_configs[-1],
        )

    @property
    def schedule_text(self) -> str:
        """Return the objective schedule as text, such as clm:0.25,mlm:0.75.

        It is --objective-schedule as given, or the objectives of `phases` with the number of steps
        of each, such as clm:100,mlm:300.
        """
        if not self.phases:
            return self.objective_schedule
        return ",".join(
            f"{phase.settings.objective_schedule}:{phase.settings.phase_iters}"
            for phase in self.phase_configs
        )

    def samples_after(self, step: int) -> int:
        """Return the number of samples (packs) that steps 1 to `step` read, on all ranks.

        It is 0 for step 0. Each step after the run counts like one more step of the last phase.
        """
        return sum(
            phase.settings.batch_sizes.first_sample(phase_steps + 1)
            for phase, phase_steps in self._steps_by_phase(step)
        )

    def tokens_after(self, step: int) -> int:
        """Return the number of tokens that steps 1 to `step` read, on all ranks.

        Each sample (pack) counts with the --seq-length of its phase. Steps are as in
        `samples_after`.
        """
        tokens = 0
        for phase, phase_steps in self._steps_by_phase(step):
            samples = phase.settings.batch_sizes.first_sample(phase_steps + 1)
            tokens += samples * phase.settings.data.seq_length
        return tokens

    def _steps_by_phase(self, step: int) -> list[tuple[PhaseConfig, int]]:
        """Return each phase that begins before or at `step`, with its steps so far.

        The number counts the phase's steps up to `step`. The last phase is endless.
        """
        phases = self.phase_configs
        ends = [*(phase.last_step for phase in phases[:-1]), max(step, phases[-1].last_step)]
        return [
            (phase, min(step, end) - phase.first_step + 1)
            for phase, end in zip(phases, ends, strict=True)
            if phase.first_step <= step
        ]

    @property
    def model_name(self) -> str:
        """Return the preset's name (--model), or "model" if flags changed its shape.

        The vocabulary size may differ from the preset's.
        """
        shape = dataclasses.replace(self.shape, vocab_size=None)
        return self.model if shape == get_preset(self.model) else "model"

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas on `world_size` ranks.

        `world_size` must be a multiple of tensor x pipeline parallel size.
        """
        return world_size // (
            self.layout.tensor_model_parallel_size * self.layout.pipeline_model_parallel_size
        )

    @property
    def total_iters(self) -> int:
        """Return the number of training steps of the run, over all phases.

        Steps of a branch continue those of its parent, so that this number and --train-iters
        include the parent's up to the branch.
        """
        return self.phase_configs[-1].last_step

    @property
    def phase_iters(self) -> int:
        """Return the number of steps of this configuration without its `phases`.

        It is enough for --train-tokens if they are given, else --train-iters, or 200 without both.
        For the settings of a phase these are the phase's steps.
        """
        if self.train_tokens is not None:
            return self.batch_sizes.steps_for(-(-self.train_tokens // self.data.seq_length))
        return 200 if self.train_iters is None else self.train_iters

    @property
    def eval_every(self) -> int:
        """Return the number of steps between validations; 0 for none.

        It is --eval-interval, or without it a tenth of the run's steps, rounded down, at least 1.
        """
        return (
            max(1, self.total_iters // 10)
            if self.output.eval_interval is None
            else self.output.eval_interval
        )


def _format_range(values: Sequence[int]) -> str:
    """Return text such as `16`, or `4 to 16` for different `values`.

    The smallest and the largest are named.
    """
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else f"{max(values)}"


_MOST_STEPS = 10**9  # a thousand times the steps of the longest known runs
_MOST_TOKENS = 2**62  # positions in the data are int64
_MOST_GROWING_STEPS = 10**6  # the first sample of each is held in memory

DESCRIPTION = (
    "Pretrain an encoder with CLM, MLM or any schedule of them, in one process or under torchrun."
    "\n\n"
    "Without flags it trains the tiny preset on the demo corpus. Each flag is also a key of the "
    "YAML file given as --config."
)


def parse_config(argv: Sequence[str], prog: str) -> PretrainConfig:
    """Return the configuration that the flags `argv` give.

    Flags override the preset of a --model flag, which overrides the file of --config, which
    overrides the preset of its `model`, which overrides defaults. Whether the values fit each other
    is left to `PretrainConfig.check`. --help prints and exits.

    Args:
        argv: Words of the command line after the command.
        prog: Name of the command for --help and errors.

    Raises:
        InputError: A flag, the file of --config or the preset is invalid.
    """
    default = merge_defaults(argv, prog, PretrainConfig())
    return flags.parse(PretrainConfig, argv, prog=prog, description=DESCRIPTION, default=default)


def merge_defaults(argv: Sequence[str], prog: str, default: PretrainConfig) -> PretrainConfig:
    """Return `default` with the file of --config and the preset of --model.

    Both flags are read from `argv`. Others only reset fields that they replace: train_iters for
    --train-tokens (REPLACES) to its default, micro_batch_size of `phases` to that of the run.

    Args:
        argv: Words of the command line after the command.
        prog: Name of the command for errors.
        default: Configuration to start from, which is not changed.

    Raises:
        InputError: File or preset is invalid, or --objective-schedule is given with any `phases`.
    """
    names = (
        "config",
        "model",
        "objective_schedule",
        "lr_decay_style",
        "micro_batch_size",
        *REPLACES,
    )
    values = {name: flags.find_flag_value(argv, f"--{name.replace('_', '-')}") for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return merge_given(default, given, prog)


def merge_given(default: PretrainConfig, given: Mapping[str, Any], source: str) -> PretrainConfig:
    """Return `default` with the file and the preset that `given` values name.

    Other values only reset fields that they replace, as in `merge_defaults`.

    Args:
        default: Configuration to start from, which is not changed.
        given: Values of flags by field name, with `config` and `model`.
        source: Command or function of the values, for errors.

    Raises:
        InputError: File or preset is invalid, or an objective schedule is given with phases.
    """
    config = given.get("config")
    if config:
        default = read_config_file(config, default)
    _check_schedule(given.get("phases") or default.phases, given.get("objective_schedule"))
    default = _prepare_defaults(default, given)
    if "micro_batch_size" in given:
        phases = [parse_phase(text, config or source) for text in default.phases]
        for phase in phases:
            phase.pop("micro_batch_size", None)  # as it only depends on the machine
        default = dataclasses.replace(
            default, phases=tuple(flags.YamlMapping(json.dumps(phase)) for phase in phases)
        )
    return default


def read_config_file(path: str, default: PretrainConfig | None = None) -> PretrainConfig:
    """Return a configuration with the YAML file at `path` applied to `default`.

    The preset of the file's `model` is applied before its other keys. A file that it names as
    `config`, relative to its directory, is read before. Whether values fit each other is not
    checked.

    Args:
        default: Configuration to start from; None for all defaults.

    Raises:
        InputError: A file cannot be read or is invalid, or `config` leads back to one.
    """
    return flags.read_config_file(default or PretrainConfig(), path, prepare=_prepare_defaults)


def _prepare_defaults(settings: PretrainConfig, fields: Mapping[str, Any]) -> PretrainConfig:
    """Return `settings` with the preset that `fields` name, without what they replace.

    Raises:
        InputError: The fields conflict.
    """
    _check_schedule(fields.get("phases"), fields.get("objective_schedule"))
    if "model" in fields:
        settings = apply_preset(settings, fields["model"])
    return drop_replaced(settings, fields)


def _check_schedule(phases: Any, schedule: Any) -> None:
    """Raise InputError for both `phases` and an objective schedule.

    Its value does not matter.
    """
    if phases and schedule is not None:
        raise InputError(
            f"--objective-schedule: found {schedule} together with phases, expected `objective` "
            "of each phase"
        )


def apply_preset(settings: PretrainConfig, name: str) -> PretrainConfig:
    """Return a copy of `settings` with the preset `name` as `model` and its `shape`.

    Flags that changed the earlier shape are lost, --vocab-size too.

    Raises:
        InputError: There is no preset `name`.
    """
    return dataclasses.replace(settings, model=name, shape=get_preset(name))
