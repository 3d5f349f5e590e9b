"""The flags of a pretraining run in groups.

Each field is a flag, and its docstring the help text.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from megaenc.data.packing.packed_dataset import LONGEST_PACK
from megaenc.errors import InputError
from megaenc.flags import (
    BY_PHASE,
    IN_IDENTITY,
    NOT_IN_IDENTITY,
    Bounds,
    Fraction,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    YamlMapping,
    setting,
)


@dataclass(frozen=True)
class DataConfig:
    """Flags of the training data: corpora, tokenizer, split, packs, order, skips.

    `PretrainConfig.data` is one; all fields have defaults. `data_path` is a tuple of corpora,
    perhaps each after its weight, such as ("0.3", "a", "0.7", "b"), which `blend_temperature`
    (exponent of corpus sizes in a group) and `blend_max_epochs` (passes after which a corpus
    leaves) adjust; `seq_length` is the number of tokens of a pack, and `packing` says how documents
    are cut into packs. Only these five may differ between phases. `tokenizer` is a directory or
    name, `split` a text such as "99,1,0", the shares of training, validation and test documents;
    `data_order` says how documents are shuffled, `skip_packs` which packs are left out, by position
    in the data order, such as ("1200-1215", "1300").
    """

    data_path: tuple[str, ...] = setting((), NOT_IN_IDENTITY, BY_PHASE)
    """prefix of a tokenized corpus (PREFIX.bin, .idx, .json), or a blend: 0.3 A 0.7 B by weights, A
    B by size. A pattern such as 'data/*_text_document' names a group of corpora, which share its
    weight by size. Without the flag the demo corpus is used, and built if missing, as its parts
    demo/python_text_document and demo/packages_text_document are without --tokenizer"""
    blend_temperature: Fraction = setting(1.0, NOT_IN_IDENTITY, BY_PHASE)
    """exponent of corpus sizes in a group (a pattern, or all corpora without weights), from 1, by
    size, to 0, equal shares: shares are proportional to tokens ** T"""
    blend_max_epochs: Annotated[int, Bounds(low=1, high=10_000)] | None = setting(
        None, NOT_IN_IDENTITY, BY_PHASE
    )
    """passes over a corpus after which it leaves the blend, and the others take its share in
    proportion"""
    tokenizer: str = setting("", NOT_IN_IDENTITY)
    """Hugging Face tokenizer that the corpus was built with: a directory or a name"""
    split: str = "99,1,0"
    """shares of the documents for training, validation and test"""
    seq_length: Annotated[int, Bounds(low=1, high=LONGEST_PACK)] = setting(128, BY_PHASE)
    """tokens of a pack; a pack holds several documents, and attention never crosses their
    boundaries"""
    packing: Literal["concat", "random-length", "sentences"] = setting("concat", BY_PHASE)
    """how documents are cut into packs. concat: end to end, without loss; random-length: as in the
    study, two chunks of random length a pack, which may span documents; sentences: every pack
    starts at a sentence (needs data preprocessed with --split-sentences)"""
    data_order: Literal["blocks", "documents"] = setting("blocks", NOT_IN_IDENTITY)
    """how each epoch shuffles a corpus of more than 1,048,576 documents. blocks: at random in
    blocks of consecutive documents, and in groups of blocks by document, so that start-up and
    memory do not grow with the corpus; documents: all documents at once"""
    skip_packs: tuple[str, ...] = setting((), NOT_IN_IDENTITY)
    """packs to skip, by their position in the data order: 1200-1215 1300, or none; the packs after
    them move up. A resumed run keeps its list without the flag"""


@dataclass(frozen=True)
class OptimizerConfig:
    """Flags of optimizer, weight decay and gradient clipping.

    `PretrainConfig.optimizer` is one; all fields have defaults. `optimizer` is adamw, stable_adamw
    or muon; `muon_momentum` and `muon_num_ns_steps` are only for the last, `adam_beta1`,
    `adam_beta2` and `adam_eps` for all. `weight_decay` is multiplied by the learning rate;
    `no_weight_decay_norm_bias` leaves norms and biases out of it. `clip_grad` is the largest
    gradient norm, 0 for no clipping; `freeze`, a tuple, names parts of the model that are not
    trained: embedding, head, or layers such as layers.0-3. Only `weight_decay` and `freeze` may
    differ between phases.
    """

    optimizer: Literal["adamw", "stable_adamw", "muon"] = "adamw"
    """adamw; stable_adamw: AdamW that limits the size of each weight's update, usually with
    --clip-grad 0 (as in ModernBERT); muon: Muon for the matrices of the layers, AdamW for all other
    weights"""
    weight_decay: NonNegativeFloat = setting(0.1, BY_PHASE)
    """decoupled weight decay, multiplied by the learning rate, on all parameters"""
    no_weight_decay_norm_bias: bool = False
    """leave norms and biases, all parameters of one dimension, out of the weight decay"""
    adam_beta1: FractionBelowOne = 0.9
    """decay rate of Adam's first moment"""
    adam_beta2: FractionBelowOne = 0.95
    """decay rate of Adam's second moment"""
    adam_eps: PositiveFloat = 1e-5
    """term added to the denominator of Adam for numerical stability"""
    clip_grad: NonNegativeFloat = 1.0
    """gradient norm above which the gradient is scaled down; 0 never clips"""
    muon_momentum: FractionBelowOne = 0.95
    """decay rate of Muon's momentum"""
    muon_num_ns_steps: PositiveInt = 5
    """Newton-Schulz iterations of Muon's orthogonalization"""
    freeze: tuple[str, ...] | None = setting(None, BY_PHASE)
    """parts of the model that are not trained: embedding (with its norm, and the output layer if
    tied), layers.A-B (from 0, both included; the last with the final norm), head (prediction head,
    output layer of its own and its bias). Norm and clipping of the gradient leave them out, Adam's
    bias correction their frozen steps, as planned: updates that were skipped count too"""

    def check(self) -> None:
        """Raise InputError for flags of Muon with another optimizer.

        Flags with their default values pass.
        """
        for name in ("muon_momentum", "muon_num_ns_steps") if self.optimizer != "muon" else ():
            if (value := getattr(self, name)) != getattr(OptimizerConfig, name):
                raise InputError(
                    f"--{name.replace('_', '-')}: found {value} with --optimizer "
                    f"{self.optimizer}, expected --optimizer muon"
                )


@dataclass(frozen=True)
class StartConfig:
    """Flags to start from a checkpoint of another run, and to skip first samples.

    The run is a branch of the run directory --branch-from (weights, optimizer and data position),
    or takes only weights, those of --init-from. --branch-at and --init-at are steps after which a
    checkpoint was saved; a branch needs the first, the second is the newest by default.
    --skip-samples is the number of packs to skip before the first step, or `parent`: as many as the
    run of --init-from has read. All fields are None by default.
    """

    branch_from: str | None = None
    """run directory to branch from: continue with weights, optimizer and data position of its step
    --branch-at, with another number of steps, decay or objective schedule, which must agree with
    that run's up to that step"""
    branch_at: NonNegativeInt | None = None
    """step of --branch-from whose checkpoint is loaded; step numbers continue from there"""
    init_from: str | None = None
    """run directory to load only the weights from, for a new run with a new optimizer and steps
    from 1; the shape must be the run's, while rotary positions may be others if they are given
    (--rotary-base)"""
    init_at: NonNegativeInt | None = None
    """step of --init-from whose weights are loaded; default: its newest checkpoint"""
    skip_samples: NonNegativeInt | Literal["parent"] | None = None
    """samples (packs) of the data to skip before the first step; `parent`: as many as the run of
    --init-from has read"""

    def check(self) -> None:
        """Raise InputError for flags that need or exclude others.

        --branch-from and --init-from exclude each other; --branch-at needs the first, --init-at the
        second, and `--skip-samples parent` one of both. No file is read; a branch without
        --branch-at passes.
        """
        for kind, run in (("branch", self.branch_from), ("init", self.init_from)):
            step = self.branch_at if kind == "branch" else self.init_at
            if step is not None and not run:
                raise InputError(
                    f"--{kind}-at {step}: found no --{kind}-from, expected the run directory of "
                    "this step"
                )
        if self.branch_from and self.init_from:
            raise InputError(
                f"--branch-from {self.branch_from}: found --init-from {self.init_from} too, "
                "expected one of them (--branch-from "
                "continues a run, --init-from loads only its weights)"
            )
        if self.skip_samples == "parent" and not (self.init_from or self.branch_from):
            raise InputError(
                "--skip-samples parent: found no --init-from, expected the run whose data to skip"
            )


@dataclass(frozen=True)
class FaultConfig:
    """Flags for non-finite gradients and loss spikes: skipped steps and rewinds.

    `PretrainConfig.health` is one; all fields have defaults. `max_skipped_updates` is the number of
    steps of the whole run that may be skipped because loss or gradient are not finite.
    `loss_spike_sigmas` is the number of robust standard deviations above recent losses from which a
    loss is a spike (0: none is). A rewind loads the last checkpoint and skips the packs that led to
    a spike, those of up to `rewind_skip_iters` steps; a run has at most `max_rewinds` (0: spikes
    are only reported).
    """

    max_skipped_updates: NonNegativeInt = 10
    """steps of the whole run that may be skipped because loss or gradient are NaN or infinite; one
    more ends the run, naming step, pack and rank"""
    loss_spike_sigmas: NonNegativeFloat = 6.0
    """robust standard deviations above the median of the objective's recent losses from which a
    loss is a spike; 0 turns detection off"""
    max_rewinds: NonNegativeInt = 0
    """maximum number of rewinds: after a loss spike, load the last checkpoint and skip the packs
    that led to it; 0 only reports spikes"""
    rewind_skip_iters: PositiveInt = 10
    """steps, up to the step of the spike, whose packs a rewind skips"""

    def is_spike(self, deviations: float | None) -> bool:
        """Return whether a loss is a spike by --loss-spike-sigmas; never if that is 0.

        Args:
            deviations: Robust standard deviations of the loss above recent ones
                (`compute_deviations`), which must exceed the flag; None is no spike.
        """
        return (
            bool(self.loss_spike_sigmas)
            and deviations is not None
            and deviations > self.loss_spike_sigmas
        )


@dataclass(frozen=True)
class OutputConfig:
    """Flags of run directory, checkpoints, early exit, validation, logs and dry run.

    `PretrainConfig.output` is one; all fields have defaults. `save` is the run directory; if it is
    empty, nothing is written. `save_interval` (steps), `save_steps` (a tuple) and `save_phase_ends`
    decide when checkpoints are written, `async_save` whether training continues meanwhile,
    `keep_last` and `keep_every` which ones are kept. `exit_interval` (steps) and
    `exit_duration_in_mins` save and exit early; `distributed_timeout_minutes` limits the time
    without progress. Validations happen every `eval_interval` steps (0: never; None: ten in a run),
    of `eval_iters` global batches, on `valid_data_path` (a tuple of NAME=PREFIX) or held-out text,
    under `valid_objective` (a tuple) and pseudo-perplexities of `eval_pseudo_perplexity_passes`.
    Metrics have a row every `log_interval` steps. `dry_run` only prints the plan, also for the
    device type `gpu`.
    """

    save: str = ""
    """run directory for config, metrics and checkpoints; an existing run in it is resumed. Without
    it nothing is written"""
    save_interval: PositiveInt | None = None
    """steps between checkpoints; the last step is always saved"""
    save_steps: tuple[PositiveInt, ...] = ()
    """additional steps whose checkpoints are written and never deleted, such as those from which
    other runs branch"""
    save_phase_ends: bool = True
    """also write the checkpoint of the last step of each of `phases`, and never delete it"""
    async_save: bool = False
    """write checkpoints while training continues, from a copy in host memory"""
    keep_last: PositiveInt | None = None
    """number of newest checkpoints to keep, besides --save-steps and the ends of phases
    (--save-phase-ends); all are kept without this flag and --keep-every"""
    keep_every: PositiveInt | None = None
    """interval in steps at which checkpoints are never deleted, besides --keep-last (whose default
    is then 1), --save-steps and the ends of phases"""
    exit_interval: PositiveInt | None = None
    """save and exit after the next step that is a multiple of this"""
    exit_duration_in_mins: PositiveFloat | None = None
    """save and exit after the step in which the training time exceeds this many minutes; exit code
    75"""
    distributed_timeout_minutes: Annotated[float, Bounds(above=0, high=100_000)] = 10.0
    """minutes without progress after which every process writes its stack traces and exits with
    code 70; the first step, validation, save and load may take three times as long, at least 10
    minutes"""
    eval_interval: NonNegativeInt | None = None
    """steps between validations, 0 for none; default: a tenth of the run"""
    eval_iters: Size = setting(4, IN_IDENTITY)
    """global batches of a validation, which has the same packs and masks throughout a phase"""
    valid_data_path: tuple[str, ...] = ()
    """NAME=PREFIX: corpora to validate on in every phase, instead of each phase's own held-out
    text; a validation reads as much of each as --eval-iters batches of the first phase have. A
    corpus that the run trains on is used by its held-out documents (--split), any other whole"""
    valid_objective: tuple[str, ...] = ()
    """objective of every validation, such as 'mlm(mask=0.15,random=0.1,keep=0.1)', or several,
    instead of clm, mlm and those of the schedule"""
    eval_pseudo_perplexity_passes: NonNegativeInt = 0
    """passes N of a pseudo-perplexity in each validation, in which each token is hidden once, about
    1/N of them at a time; 0 for none. It compares models trained bidirectionally with any objective
    and mask ratio, and costs N forward passes over the validation packs, twice as many if
    objectives predict from the position before"""
    log_interval: PositiveInt | None = None
    """steps between rows of metrics; default: 10, or 1 for runs of up to 1,000 steps or with phases
    below 10 steps"""
    dry_run: bool = False
    """print the plan of the run (data, phases with their steps and tokens, learning rate) and
    exit"""
    gpu: str = ""
    """device type for `megaenc estimate`, or for --dry-run on a machine that has none: a100,
    a100-40gb, h100, h100-pcie, h200, gh200, b200, l40s, mi210, mi250, mi250x (one die each),
    mi300a, mi300x, mi325x, mi355x"""


@dataclass(frozen=True)
class MonitoringConfig:
    """Flags of TensorBoard, Weights & Biases, stragglers, profiler and callbacks.

    `PretrainConfig.monitoring` is one; all fields have defaults, by which everything is off.
    `tensorboard_dir` is the directory of event files. `wandb_project`, `wandb_exp_name` (run) and
    `wandb_entity` (user or team) are names at Weights & Biases, `wandb_save_dir` is its local
    directory; the others need `wandb_project`, which needs that directory or --save.
    `log_straggler` compares the compute time of the ranks every `straggler_interval` steps.
    `profile`, which needs --save, traces the steps `profile_step_start` to `profile_step_end`, both
    included, on `profile_ranks`, a tuple. `callbacks` is a tuple of YAML mappings, as text, of name
    and options. `check`, which PretrainConfig calls, raises InputError for flags that do not fit.
    """

    tensorboard_dir: str = ""
    """directory for TensorBoard event files with every number of metrics.jsonl and
    validation.jsonl"""
    wandb_project: str = ""
    """Weights & Biases project to log every number to; without API key or network it logs offline,
    for `wandb sync`"""
    wandb_exp_name: str = ""
    """name of the run at Weights & Biases; default: the name of the --save directory"""
    wandb_entity: str = ""
    """Weights & Biases user or team of the project; default: that of the API key"""
    wandb_save_dir: str = ""
    """directory in which Weights & Biases creates its directory wandb; default: that of --save"""
    log_straggler: bool = False
    """compare the compute time of the ranks, without waiting times, in stragglers.jsonl, and report
    a repeatedly slow rank"""
    straggler_interval: PositiveInt = 100
    """steps between two straggler reports"""
    profile: bool = False
    """write a trace of some steps by torch's profiler and a table of the most expensive operations
    to SAVE/profile"""
    profile_step_start: PositiveInt = 10
    """first profiled step"""
    profile_step_end: PositiveInt = 12
    """last profiled step"""
    profile_ranks: tuple[NonNegativeInt, ...] = (0,)
    """ranks that are profiled"""
    callbacks: tuple[YamlMapping, ...] = ()
    """observers of the run that installed packages offer, each by name with its options: '{name:
    stop_at_loss, loss: 3.2}'"""

    def check(self, save: str, steps: int, world_size: int) -> None:
        """Raise InputError for flags of Weights & Biases and profiler that do not fit.

        Flags of Weights & Biases need --wandb-project, which needs `save` or --wandb-save-dir;
        --profile needs `save`, a range of steps within 1 to `steps`, and ranks below `world_size`;
        without it its steps and ranks are not checked. Callbacks are left to `parse_callbacks`.

        Args:
            save: Run directory; empty without one.
            steps: Number of steps of the run.
            world_size: Number of processes of the run.
        """
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if getattr(self, name) and not self.wandb_project:
                raise InputError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: found no --wandb-project, "
                    "expected the project to log to"
                )
        if self.wandb_project and not (save or self.wandb_save_dir):
            raise InputError(
                f"--wandb-project {self.wandb_project}: found neither --save nor --wandb-save-dir, "
                "expected a directory for its files"
            )
        if not self.profile:
            return
        if not save:
            raise InputError(
                "--profile: found no --save, expected the run directory to write the trace to"
            )
        if not 1 <= self.profile_step_start <= self.profile_step_end <= steps:
            raise InputError(
                f"--profile-step-start {self.profile_step_start} --profile-step-end "
                f"{self.profile_step_end}: expected first and "
                f"last step of a trace, within the run's 1 to {steps}"
            )
        if (
            not self.profile_ranks
            or not 0 <= min(self.profile_ranks) <= max(self.profile_ranks) < world_size
        ):
            ranks = " ".join(map(str, self.profile_ranks))
            raise InputError(
                f"--profile-ranks {ranks}: expected ranks of this run, from 0 to {world_size - 1}"
            )
