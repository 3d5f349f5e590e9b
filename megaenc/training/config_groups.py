"""The flags of a run in groups, by what they are about; each field is a flag, and its docstring the help."""

from dataclasses import dataclass
from typing import Literal

from megaenc.errors import InputError


@dataclass(frozen=True)
class DataConfig:
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
    """packs to leave out, by their place in the order of the data: 1200-1215 1300, or none; those after them move up. Without the
    flag a run keeps the list that it has"""


@dataclass(frozen=True)
class OptimizerConfig:
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
class StartConfig:
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
class FaultConfig:
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
class OutputConfig:
    """What a run writes, and when."""

    save: str = ""
    """run folder for config, metrics and checkpoints; a run that is there goes on. Without it nothing is written"""
    save_interval: int | None = None
    """steps between checkpoints; the last step is always saved"""
    save_steps: tuple[int, ...] = ()
    """further steps whose checkpoints are written, and kept for good: those at which other runs are to branch"""
    async_save: bool = False
    """go on training while a checkpoint is written, from a copy of it in host memory"""
    keep_last: int | None = None
    """newest checkpoints that are kept, besides --save-steps; all unless this or --keep-every is given"""
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
class MonitoringConfig:
    """Where rows go, and what is measured."""

    tensorboard_dir: str = ""
    """folder for TensorBoard's event files, with every number of metrics.jsonl and validation.jsonl"""
    wandb_project: str = ""
    """project of Weights & Biases to log every number to; offline, to be sent later, where there is no key or no network"""
    wandb_exp_name: str = ""
    """name of the run there; that of the --save folder unless given"""
    wandb_entity: str = ""
    """user or team that the project belongs to; your own unless given"""
    wandb_save_dir: str = ""
    """folder in which Weights & Biases keeps its files, in a folder wandb; that of --save unless given"""
    timing_log_level: Literal[0, 1, 2] = 0
    """megatron-core's timers, as `timers` in each row. 1: each part of a step, 2: each micro-batch too; both wait for the
    device and for other ranks, so the run is slower"""
    log_straggler: bool = False
    """compare the ranks' own time, without waiting for others: stragglers.jsonl, and a line when one is slow repeatedly"""
    straggler_interval: int = 100
    """steps between two such reports"""
    profile: bool = False
    """write a trace of some steps by torch's profiler, and a table of the costliest operations, to SAVE/profile"""
    profile_step_start: int = 10
    """first step of the trace"""
    profile_step_end: int = 12
    """last step of the trace"""
    profile_ranks: tuple[int, ...] = (0,)
    """ranks that write one"""

    def check(self, save: str, steps: int, world_size: int) -> None:
        """InputError, naming the flag, for what says nothing or cannot be; `save`: the run folder, `steps`: those of the run."""
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if getattr(self, name) and not self.wandb_project:
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: found no --wandb-project, expected the project to log to"
                )
        if self.wandb_project and not (save or self.wandb_save_dir):
            raise InputError(
                f"--wandb-project {self.wandb_project}: found neither --save nor --wandb-save-dir, "
                "expected a folder for its files"
            )
        if not self.profile:
            return
        if not save:
            raise InputError("--profile: found no --save, expected the run folder that the trace goes to")
        if not 1 <= self.profile_step_start <= self.profile_step_end <= steps:
            raise InputError(
                f"--profile-step-start {self.profile_step_start} --profile-step-end {self.profile_step_end}: expected first and "
                f"last step of a trace, within the run's 1 to {steps}"
            )
        if not self.profile_ranks or not 0 <= min(self.profile_ranks) <= max(self.profile_ranks) < world_size:
            found = " ".join(map(str, self.profile_ranks))
            raise InputError(f"--profile-ranks {found}: expected ranks of this run, from 0 to {world_size - 1}")
