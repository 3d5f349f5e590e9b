"""Everything a run can be told, as dataclasses: each field is a flag of the command and a key of the YAML file."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megaenc import flags
from megaenc.backend.device import detect
from megaenc.backend.layout import Layout
from megaenc.errors import InputError
from megaenc.model.config import ModelConfig, preset
from megaenc.training.batch_sizes import BatchSizes, batch_sizes
from megaenc.training.monitoring_settings import MonitoringSettings


@dataclass(frozen=True)
class DataSettings:
    """Where the text is and how it is cut."""

    data_path: tuple[str, ...] = ()
    """prefix of a tokenised corpus (PREFIX.bin, .idx, .json), or a blend: 0.3 A 0.7 B by weights, A B by size; without it the
    demo corpus is used, and built when missing"""
    tokenizer: str = ""
    """Hugging Face tokenizer the corpus was made with: a folder or a name"""
    split: str = "99,1,0"
    """shares of the documents for training, validation and test"""
    seq_length: int = 128
    """tokens of a pack: documents laid end to end, attention never crosses their edges"""
    packing: Literal["concat", "random-length", "sentences"] = "concat"
    """how packs are cut. concat: documents end to end, nothing wasted; random-length: the study's, two chunks of random length a
    pack, which may span documents; sentences: every pack starts at a sentence (data made with --split-sentences)"""
    skip_packs: tuple[str, ...] = ()
    """packs to leave out, by their place in the order of the data: 1200-1215 1300; those after them move up"""


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and its learning rate: warm-up, constant, linear decay to zero."""

    lr: float = 2e-3
    """peak learning rate"""
    lr_warmup_iters: int | None = None
    """steps of linear warm-up (or give the fraction)"""
    lr_warmup_fraction: float | None = None
    """warm-up as a fraction of the run; 0.05 if neither is given"""
    lr_wsd_decay_iters: int | None = None
    """last steps, over which the rate falls to zero (or give the fraction)"""
    lr_wsd_decay_fraction: float | None = None
    """decay as a fraction of the run; 0.05 if neither is given"""
    weight_decay: float = 0.1
    """decoupled weight decay, on all parameters"""
    adam_beta1: float = 0.9
    """decay rate of the first moment"""
    adam_beta2: float = 0.95
    """decay rate of the second moment"""
    adam_eps: float = 1e-5
    """added to the root of the second moment"""
    clip_grad: float = 1.0
    """largest norm of the gradient; 0 leaves it alone"""


@dataclass(frozen=True)
class StartSettings:
    """From which other run this one starts, if from any."""

    branch_from: str | None = None
    """run folder to branch off: weights, optimizer and data position of its step --branch-at, then an end, a decay and a schedule
    of this run's own, which agree with that run's in every step up to there"""
    branch_at: int | None = None
    """step of --branch-from whose checkpoint to go on from; steps keep their numbers"""
    init_from: str | None = None
    """run folder whose weights to begin with, and nothing else of it: a new run with a new optimizer and steps from 1"""
    init_at: int | None = None
    """step of --init-from whose weights to take; its newest checkpoint unless given"""
    skip_samples: int | Literal["parent"] | None = None
    """samples (packs) of the data to leave out before the first step; `parent`: as many as --init-from had read"""

    def check(self) -> None:
        """InputError, naming the flag, for a combination that says nothing or two things."""
        for at, run in (("branch", self.branch_from), ("init", self.init_from)):
            step = self.branch_at if at == "branch" else self.init_at
            if step is not None and not run:
                raise InputError(f"--{at}-at {step}: found no --{at}-from, expected the run folder whose step this is")
        if self.branch_from and self.init_from:
            raise InputError(
                f"--branch-from {self.branch_from}: found --init-from {self.init_from} too, expected one of them (a branch goes "
                "on with everything, --init-from takes the weights alone)"
            )
        if self.skip_samples == "parent" and not (self.init_from or self.branch_from):
            raise InputError("--skip-samples parent: found no --init-from, expected the run after whose data this one goes on")


@dataclass(frozen=True)
class HealthSettings:
    """What a run does about numbers that go wrong."""

    max_skipped_updates: int = 10
    """updates of the whole run that may be left out because loss or gradient are no finite numbers; one more ends it, naming
    step, pack and rank"""
    loss_spike_sigmas: float = 6.0
    """a loss that is more than so many deviations above the recent ones of its objective is a spike; 0 looks for none"""
    max_rewinds: int = 0
    """how often in all a run may, at a spike, go back to a checkpoint and leave out the packs that led to it; 0 only says so"""
    rewind_skip_iters: int = 10
    """steps, up to that of the spike, whose packs a rewind leaves out"""

    def is_spike(self, deviations: float | None) -> bool:
        """Whether a loss so far above the recent ones, None where that is not known, is a spike."""
        return bool(self.loss_spike_sigmas) and deviations is not None and deviations > self.loss_spike_sigmas


@dataclass(frozen=True)
class OutputSettings:
    """What a run writes, and when."""

    save: str = ""
    """run folder for config, metrics and checkpoints; a run that is there goes on. Without it nothing is written"""
    save_interval: int | None = None
    """steps between checkpoints; the last step is always saved"""
    async_save: bool = False
    """go on training while a checkpoint is written, from a copy of it in host memory"""
    keep_last: int | None = None
    """newest checkpoints that are kept; all unless this or --keep-every is given"""
    keep_every: int | None = None
    """steps whose multiples keep their checkpoints for good, besides --keep-last (which is then 1 unless given)"""
    exit_interval: int | None = None
    """save and stop after the next step that is a multiple of this"""
    exit_duration_in_mins: float | None = None
    """save and stop after the step in which this many minutes of training are over; exit code 75"""
    distributed_timeout_minutes: float = 10.0
    """minutes without progress after which every process writes its stacks and ends, exit code 70; the first step, validation,
    save and load have three times as long, 10 minutes at least"""
    eval_interval: int | None = None
    """steps between validations, 0 for none; a tenth of the run unless given"""
    eval_iters: int = 4
    """global batches of a validation, always the same packs and masks"""
    log_interval: int | None = None
    """steps between rows of metrics; 1 for up to 1,000 steps or where phases are shorter than 10 steps, else 10"""
    dry_run: bool = False
    """say what the run would be (data, phases with their steps and tokens, learning rate) and stop"""


@dataclass(frozen=True)
class PretrainSettings:
    """One pretraining run."""

    config: str = ""
    """YAML file of flags; the command line wins over it"""
    objective_schedule: str = "clm:0.25,mlm:0.75"
    """objectives and their shares or steps: clm:0.25,mlm:0.75 or clm:10000,mlm(mask=0.3):32000 or 5x(clm:0.05,mlm:0.15)"""
    train_iters: int | None = None
    """steps (updates of the weights); 200 unless these or the tokens are given"""
    train_tokens: int | None = None
    """tokens to read, instead of steps: as many steps as it takes to read them"""
    micro_batch_size: int = 8
    """packs that one process reads at once, in one row"""
    global_batch_size: int = 16
    """packs of a step, over all processes"""
    rampup_batch_size: tuple[int, ...] | None = None
    """START INCREMENT SAMPLES: begin with steps of START packs that grow by INCREMENT, evenly over the first SAMPLES packs, up to
    --global-batch-size"""
    seed: int = 1
    """initial weights, order of the data and masks follow from it"""
    bf16: bool = field(default_factory=lambda: detect().has_bf16)
    """compute in bfloat16 with float32 master weights; on where the processor has the instructions"""
    model: str = "tiny"
    """preset of the model's shape: 210m, 610m, 1b (the study's), small or tiny; the model options below change parts of it"""
    shape: ModelConfig = field(default_factory=lambda: preset("tiny"))
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    start: StartSettings = field(default_factory=StartSettings)
    layout: Layout = field(default_factory=Layout)
    health: HealthSettings = field(default_factory=HealthSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    monitoring: MonitoringSettings = field(default_factory=MonitoringSettings)

    def check(self, world_size: int) -> None:
        """InputError, naming the flag, for what cannot be run on `world_size` processes."""
        self.layout.check(world_size)
        self.start.check()
        self.shape.check(self.layout.tensor_model_parallel_size)
        self._check_rewinds()
        values = flags.flatten(self)
        for names, right, expected in _LIMITS:
            for name in names:
                if isinstance(values[name], (int, float)) and not right(values[name]):
                    raise InputError(f"--{name.replace('_', '-')}: found {values[name]}, expected {expected}")
        chunks = self.layout.chunks(self.shape.num_layers)
        self.layout.check_recompute(self.shape.num_layers)
        if self.train_iters is not None and self.train_tokens is not None:
            raise InputError(
                f"--train-tokens: found {self.train_tokens} beside --train-iters {self.train_iters}, expected one of them"
            )
        row = self.micro_batch_size * self.data.seq_length
        tensor = self.layout.tensor_model_parallel_size
        if self.layout.sequence_parallel and row % tensor:
            raise InputError(
                f"--sequence-parallel: a row of {row} tokens (--micro-batch-size x --seq-length) is no multiple of "
                f"--tensor-model-parallel-size {tensor}"
            )
        step = self.micro_batch_size * self.data_parallel_size(world_size)
        if self.global_batch_size % step:
            raise InputError(
                f"--global-batch-size: found {self.global_batch_size}, expected a multiple of {step} "
                f"(--micro-batch-size {self.micro_batch_size} x {self.data_parallel_size(world_size)} data-parallel ranks)"
            )
        stages, micro_batches = self.layout.pipeline_model_parallel_size, self.global_batch_size // step
        self._check_rampup(step * (stages if chunks > 1 else 1))
        if chunks > 1 and micro_batches % stages:
            raise InputError(
                f"--global-batch-size: found {self.global_batch_size}, which is {micro_batches} micro-batches for each "
                f"data-parallel rank; interleaved stages need a multiple of --pipeline-model-parallel-size {stages}"
            )
        self.monitoring.check(self.output.save, self.total_iters, world_size)

    def _check_rewinds(self) -> None:
        """InputError where a run that may go back could not."""
        if self.health.max_rewinds and not (self.output.save and self.health.loss_spike_sigmas):
            missing = "--save: a run goes back to its checkpoints" if not self.output.save else "--loss-spike-sigmas above 0"
            raise InputError(f"--max-rewinds {self.health.max_rewinds}: expected {missing}")

    def _check_rampup(self, divisor: int) -> None:
        """InputError unless the batch can grow as asked for, in sizes that are multiples of `divisor`."""
        if self.rampup_batch_size is None:
            return
        flag = f"--rampup-batch-size {' '.join(map(str, self.rampup_batch_size))}"
        if len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) < 1:
            raise InputError(f"{flag}: expected three numbers of 1 or more: START INCREMENT SAMPLES")
        start, increment, _ = self.rampup_batch_size
        if start >= self.global_batch_size or (self.global_batch_size - start) % increment:
            raise InputError(
                f"{flag}: steps of {increment} do not lead from {start} to --global-batch-size {self.global_batch_size}"
            )
        if start % divisor or increment % divisor:
            raise InputError(f"{flag}: expected START and INCREMENT to be multiples of {divisor}, like --global-batch-size")

    @property
    def batch_sizes(self) -> BatchSizes:
        """Packs of each step."""
        return batch_sizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def batch_text(self) -> str:
        """Packs of a step, for the console."""
        growing = f"{self.rampup_batch_size[0]} to " if self.rampup_batch_size else ""
        return f"{growing}{self.global_batch_size}"

    def tokens_after(self, step: int) -> int:
        """What the first `step` steps read."""
        return self.batch_sizes.first_sample(step + 1) * self.data.seq_length

    @property
    def model_name(self) -> str:
        """The preset for the console, unless its shape was changed."""
        shape = dataclasses.replace(self.shape, vocab_size=None)
        return self.model if shape == preset(self.model) else "model"

    def data_parallel_size(self, world_size: int) -> int:
        """Copies of the model."""
        return world_size // (self.layout.tensor_model_parallel_size * self.layout.pipeline_model_parallel_size)

    @property
    def total_iters(self) -> int:
        """Steps of the whole run."""
        if self.train_tokens is not None:
            return self.batch_sizes.steps_for(-(-self.train_tokens // self.data.seq_length))
        return 200 if self.train_iters is None else self.train_iters

    @property
    def eval_every(self) -> int:
        """Steps between validations; 0 for none."""
        return max(1, self.total_iters // 10) if self.output.eval_interval is None else self.output.eval_interval


_COUNTS = (
    *("train_iters", "train_tokens", "micro_batch_size", "global_batch_size"),
    *("seq_length", "eval_iters", "make_vocab_size_divisible_by"),
)
_INTERVALS = ("save_interval", "keep_last", "keep_every", "exit_interval", "log_interval", "straggler_interval")
_LAYERS = ("rewind_skip_iters", "recompute_num_layers", "num_layers_per_virtual_pipeline_stage")
_LIMITS = (
    ((*_COUNTS, *_INTERVALS, *_LAYERS), lambda value: value >= 1, "1 or more"),
    (("eval_interval", "branch_at", "init_at", "skip_samples"), lambda value: value >= 0, "0 or more"),
    (("max_skipped_updates", "max_rewinds"), lambda value: value >= 0, "0 or more"),
    (("lr", "adam_eps", "norm_epsilon", "rotary_base"), lambda value: 0 < value < math.inf, "a number above 0"),
    (("exit_duration_in_mins", "distributed_timeout_minutes"), lambda value: 0 < value < math.inf, "a number of minutes above 0"),
    (("weight_decay", "clip_grad", "seed", "init_method_std"), lambda value: 0 <= value < math.inf, "a number of 0 or more"),
    (("loss_spike_sigmas",), lambda value: 0 <= value < math.inf, "a number of 0 or more"),
    (("adam_beta1", "adam_beta2"), lambda value: 0 <= value < 1, "0 or more and below 1"),
)

# Two ways to say one thing: a command line that uses one overrules the other in the YAML file, with what belongs to it.
_PAIRS = (
    (("train_iters",), ("train_tokens",)),
    (("lr_warmup_iters",), ("lr_warmup_fraction",)),
    (("lr_wsd_decay_iters",), ("lr_wsd_decay_fraction",)),
    (("branch_from", "branch_at"), ("init_from", "init_at")),
)


DESCRIPTION = """Pretrain an encoder with CLM, MLM or any schedule of them, alone or under torchrun.

With nothing given it trains the tiny preset on the demo corpus. Each flag is also a key of --config's YAML file."""


def read_settings(argv: Sequence[str], prog: str) -> PretrainSettings:
    """The settings that `argv` gives over its `--config` over the preset of its `--model`. Raises InputError."""
    config, model = _value_of(argv, "--config"), _value_of(argv, "--model")
    default = settings_from(config) if config else PretrainSettings()
    if model:
        default = _with_preset(default, model)
    for pair in _PAIRS:
        if sum(_value_of(argv, "--" + names[0].replace("_", "-")) is not None for names in pair) == 1:
            default = flags.replace_fields(default, {name: None for names in pair for name in names}, source=prog)
    return flags.parse(PretrainSettings, argv, prog=prog, description=DESCRIPTION, default=default)


def settings_from(path: str) -> PretrainSettings:
    """The settings that the YAML file at `path` gives over the preset that it names. Raises InputError."""
    return flags.from_yaml(PretrainSettings(), path, first=("model", _with_preset))


def _with_preset(settings: PretrainSettings, name: str) -> PretrainSettings:
    return dataclasses.replace(settings, model=name, shape=preset(name))


def _value_of(argv: Sequence[str], flag: str) -> str | None:
    """The last value that `argv` gives `flag`, looked up before the rest is read: it decides the defaults of others."""
    found = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:  # either spelling is a flag
            found = value if equals else following
    return found
