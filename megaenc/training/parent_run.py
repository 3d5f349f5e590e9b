"""Resolution of the parent run that a run branches from or takes weights from.

Nothing is loaded yet.
"""

import dataclasses
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.model.config import ModelConfig
from megaenc.objectives import Schedule
from megaenc.training.checkpoint_dir import STATE_FILE, CheckpointDir, DamagedCheckpointError
from megaenc.training.config import PretrainConfig, read_config_file
from megaenc.training.lr_schedule import (
    LEARNING_RATE_IDENTITY,
    LearningRate,
    LearningRateSchedule,
    learning_rate_from_identity,
)
from megaenc.training.phases import parse_phase
from megaenc.training.plan import Plan, phase_identity
from megaenc.training.run_dir import CONFIG_FILE, RUN_FILE, describe_difference
from megaenc.training.run_init import (
    NEW_WEIGHTS,
    PROGRESS_FIELDS,
    Ancestor,
    RunInit,
    identity_digest,
    read_run_metadata,
)
from megaenc.training.skip_ranges import SkippedPacks

# A branch may change these; schedules and phases are compared separately, step by step up to its
# first step.
_FREE_IN_BRANCH = {
    "train_iters",
    "objective_schedule",
    "objective_packages",
    *LEARNING_RATE_IDENTITY,
    "eval_iters",
    "start",
    "skip_samples",
    "phases",
}
WEIGHT_FIELDS = (
    *(
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.metadata.get("weights") != "any"
    ),
    "tokenizer",
)
"""Entries of a run's identity that its weights depend on."""
_POSITION_FIELDS = [
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.metadata.get("weights") == "given"
]
# Entries that the numbering of samples depends on.
_SAMPLE_FIELDS = ("data", "split", "packing", "data_order", "seq_length", "seed", "phases")


def resolve_run_init(plan: Plan, given: Collection[str] | None = None) -> RunInit:
    """Return the starting point of a run: new weights, a branch, or weights of a run.

    It is the one recorded in --save if the flags name the same run, kind and step (or no step) and
    there are checkpoints, else that of --branch-from or --init-from. No weights are loaded; each
    rank calls it for itself.

    Args:
        given: Names of the fields whose values were given (None: all). Fields of rotary positions,
            such as rotary_base, may differ from those of --init-from only if they are among them.

    Raises:
        InputError: The parent run of `--branch-from` or `--init-from` does not match `plan`.
    """
    config = plan.settings.start
    save = plan.settings.output.save
    recorded = _read_recorded_init(plan.settings)
    if recorded and _checkpoint_dir(save).steps():
        start = recorded
    elif config.branch_from:
        start = _init_branch(plan, ParentRun("--branch-from", config.branch_from, save))
    elif config.init_from:
        start = _init_from_weights(
            plan, ParentRun("--init-from", config.init_from, save), recorded, given
        )
    else:
        start = NEW_WEIGHTS
    return (
        dataclasses.replace(start, skip_samples=config.skip_samples)
        if isinstance(config.skip_samples, int)
        else start
    )


def record_run_init(settings: PretrainConfig, start: RunInit) -> PretrainConfig:
    """Return a copy of `settings` with step and skipped samples of `start` as flags.

    These are --branch-at or --init-at, which the user may have left out, and --skip-samples, as a
    number instead of `parent` or None, if any are skipped. For new weights only --skip-samples may
    change.
    """
    field_name = {"branch": "branch_at", "weights": "init_at"}.get(start.kind)
    values = ({field_name: start.at} if field_name else {}) | {
        "skip_samples": start.skip_samples or settings.start.skip_samples
    }
    return dataclasses.replace(settings, start=dataclasses.replace(settings.start, **values))


class ParentRun:
    """Run directory that another run starts from, as read by the constructor.

    The constructor takes the flag that names the run, such as --branch-from, for errors, the path
    of its directory, and the --save of the new run. It raises InputError if the path is no valid
    run directory, or equals --save. Attributes are `settings` (its flags), `identity` (what its
    weights depend on, by name), `start` (its own starting point), `skipped` (its skipped packs),
    `checkpoints` (CheckpointDir), `is_converted` (weights of a Hugging Face model without optimizer
    state) and `flag` (flag and path, the beginning of errors).
    """

    def __init__(self, flag: str, run: str, save: str):
        """Read the run directory `run`.

        Args:
            flag: Flag that names it, such as --branch-from, for errors.
            run: Path of the directory, as given in the command.
            save: Run directory of the new run; empty without one.

        Raises:
            InputError: The directory is invalid or equal to `save`.
        """
        self.run = run
        self.flag = f"{flag} {run}"
        self.path = Path(run)
        self.checkpoints = _checkpoint_dir(run)
        if save and self.path.resolve() == Path(save).resolve():
            raise InputError(
                f"{self.flag}: is also --save, expected another directory for the new run"
            )
        run_file = self.path / RUN_FILE
        try:
            run_file.stat()
        except OSError as error:
            reason = f"{RUN_FILE}: {error.strerror}"
            raise InputError(
                f"{self.flag}: not a run directory ({reason}), expected the --save of a run"
            ) from None
        metadata, self.start = read_run_metadata(run_file)
        self.identity = metadata["identity"]
        try:
            if not isinstance(self.identity.get("objective_packages", {}), dict):
                raise TypeError("objective_packages is not an object")
            if any(type(row["last_step"]) is not int for row in self.identity.get("phases", ())):
                raise TypeError("phases have no last_step")
            self.is_converted = "source" in metadata
            self.skipped = SkippedPacks.from_record(metadata)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{run_file}: {error!r}; expected a file written by a run") from None
        self.settings = read_config_file(str(self.path / CONFIG_FILE))

    def read_progress(self, step: int) -> dict[str, Any]:
        """Return the counters of the checkpoint of `step`, and the packs skipped by then.

        Returns:
            PROGRESS_FIELDS (tokens, flops, ...) by name, and a SkippedPacks as `skip_packs`.

        Raises:
            InputError: The checkpoint is missing or damaged, or lacks one of them.
        """
        try:
            values = self.checkpoints.read_state(step)
            return {name: values[name] for name in PROGRESS_FIELDS} | {
                "skip_packs": SkippedPacks.parse(values["skip_packs"])
            }
        except DamagedCheckpointError as damage:
            raise InputError(f"{damage}; choose another checkpoint") from None
        except KeyError as error:
            path = self.checkpoints.path(step) / STATE_FILE
            raise InputError(
                f"{path}: {error!r}; not written by a save, choose another checkpoint"
            ) from None

    def check_has_checkpoint(self, flag: str, step: int | None) -> int:
        """Return `step` if it has a checkpoint, complete or not.

        Args:
            flag: Flag that gives the step, such as --branch-at, for errors.

        Raises:
            InputError: `step` is None or has no checkpoint; the error names the steps that have
                one.
        """
        steps = self.checkpoints.steps()
        if step not in steps:
            problem = (
                f"{flag}: missing"
                if step is None
                else f"{flag} {step}: {self.run} has no checkpoint of this step"
            )
            raise InputError(f"{problem}, expected one of {_format_steps(steps)}")
        return step

    def check_same_fields(
        self, plan: Plan, names: Iterable[str], reason: str, step: int | None = None
    ) -> None:
        """Raise InputError if the identities of this run and of `plan` differ in `names`.

        Args:
            names: Entries to compare, such as data and seed; a missing one equals None.
            reason: End of the error, after the difference.
            step: Step of this run whose values are compared with those of step 1 of `plan`, if they
                change by phase; None to compare those of the last phases.
        """
        parents = self.identity
        current = plan.identity
        if step is not None:
            parents = identity_at(parents, step)
            current = identity_at(current, 1)
        if mismatch := describe_difference(parents, current, fields=names):
            raise InputError(f"{self.flag}: {mismatch}; {reason}")


def _checkpoint_dir(run: str) -> CheckpointDir:
    return CheckpointDir(Path(run) / "checkpoints")


def _read_recorded_init(settings: PretrainConfig) -> RunInit | None:
    """Return the starting point recorded in `--save`.

    None without a run there or if the flags name another start.
    """
    config = settings.start
    run_file = Path(settings.output.save) / RUN_FILE
    run = config.branch_from or config.init_from
    step = config.branch_at if config.branch_from else config.init_at
    if not run or not settings.output.save:
        return None
    try:
        _, start = read_run_metadata(run_file)
    except InputError:
        return None  # reported on opening the run directory
    is_same = (
        start.run == run
        and (start.kind == "branch") == bool(config.branch_from)
        and step in (None, start.at)
    )
    return start if is_same else None


def _init_branch(plan: Plan, parent: ParentRun) -> RunInit:
    """Return the starting point of a new branch of `parent`.

    Raises:
        InputError: `plan` does not match the parent up to its step.
    """
    if parent.is_converted:
        raise InputError(
            f"{parent.flag}: holds converted weights without optimizer state; expected "
            f"--init-from {parent.run}"
        )
    settings = plan.settings
    parent_step = parent.check_has_checkpoint("--branch-at", settings.start.branch_at)
    if parent_step >= settings.total_iters:
        raise InputError(
            f"--branch-at {parent_step}: the new run ends at step {settings.total_iters}, expected "
            f"--train-iters beyond {parent_step}"
        )
    free = {*_FREE_IN_BRANCH, *phase_identity(settings)}
    shared_fields = [
        name for name in dict.fromkeys((*plan.identity, *parent.identity)) if name not in free
    ]
    parent.check_same_fields(
        plan,
        shared_fields,
        "a branch must have the value of its parent; --init-from takes only weights",
    )
    skip = settings.start.skip_samples
    if isinstance(skip, int) and skip != parent.start.skip_samples:
        raise InputError(
            f"--skip-samples {skip}: {parent.run} began at sample {parent.start.skip_samples}, "
            "expected the same for a branch"
        )
    _check_phases(plan, parent, parent_step)
    _check_schedule(plan, parent, parent_step)
    _check_learning_rate(plan.learning_rate, parent, parent_step, settings.total_iters)
    progress = parent.read_progress(parent_step)
    if not progress["skip_packs"].reads_same(
        parent.skipped, parent.start.skip_samples, parent.settings.samples_after(parent_step)
    ):
        raise InputError(
            f"--branch-at {parent_step}: {parent.run} has since rewound and skipped packs that "
            "this step read; choose another step"
        )
    progress |= {
        "skip_samples": parent.start.skip_samples,
        "skip_packs": parent.skipped.texts,
        "before": parent.start.before,
    }
    return RunInit("branch", parent.run, parent_step, identity_digest(parent.identity), **progress)


def identity_at(identity: dict[str, Any], step: int) -> dict[str, Any]:
    """Return a copy of a run's identity with the values of the phase of `step`.

    They replace those of the last phase, which `identity` has outside `phases`. Steps count from 1
    (0 is in the first phase); those after the run have the values of the last phase. The copy keeps
    `phases`, and also has the phase's `last_step`, so compare single entries. Without `phases` it
    equals `identity`.
    """
    rows = identity.get("phases", [])  # converted models have no steps
    return identity | next(
        (row for row in rows if step <= row["last_step"]), rows[-1] if rows else {}
    )


def _check_phases(plan: Plan, parent: ParentRun, parent_step: int) -> None:
    """Raise InputError if a phase differs from the parent's up to `parent_step`.

    Data, lengths, batches and rotary base are compared.
    """
    ends = {
        row["last_step"]
        for identity in (plan.identity, parent.identity)
        for row in identity.get("phases", ())
    }
    names = phase_identity(plan.settings)
    steps = {1, parent_step}
    for end in ends:
        if end < parent_step:
            steps |= {end, end + 1}
    for step in sorted(steps):
        parents = identity_at(parent.identity, step)
        current = identity_at(plan.identity, step)
        if mismatch := describe_difference(parents, current, fields=names):
            raise InputError(
                f"{parent.flag}: {mismatch} at step {step}; a branch must have the value of its "
                f"parent up to --branch-at {parent_step}: "
                "give the parent's steps as the first of `phases`, and the new value in the next"
            )


def _check_schedule(plan: Plan, parent: ParentRun, parent_step: int) -> None:
    """Raise InputError if objectives differ from the parent's up to `parent_step`."""
    settings = parent.settings
    try:
        parent_schedule = Schedule.build(
            settings.schedule_text, settings.total_iters, plan.vocabulary, settings.seed
        )
    except InputError as error:
        raise InputError(
            f"{parent.flag}: its --objective-schedule cannot be parsed here ({error})"
        ) from None
    step = first_differing_step(plan.schedule, parent_schedule, parent_step)
    if step:
        raise InputError(
            f"--branch-at {parent_step}: step {step} trains "
            f"{plan.schedule.describe_step(step)} here and "
            f"{parent_schedule.describe_step(step)} in {parent.run}; expected an "
            "--objective-schedule equal to it up to "
            f"step {parent_step}"
        )
    packages = plan.schedule.packages()
    parent_packages = parent.identity.get("objective_packages", {})
    for name in {
        choice.start.name
        for phase in parent_schedule.phases
        if phase.first_step <= parent_step
        for choice in phase.choices
    }:
        if packages.get(name) != parent_packages.get(name):
            raise InputError(
                f"{parent.flag}: objective `{name}` is "
                f"{parent_packages.get(name) or 'of megaenc'} there, "
                f"{packages.get(name) or 'of megaenc'} here; expected the package or files that "
                "the parent was trained with"
            )


def _check_learning_rate(
    schedule: LearningRate, parent: ParentRun, parent_step: int, plan_end: int
) -> None:
    """Raise InputError if learning rates differ from the parent's up to `parent_step`.

    Args:
        schedule: Learning rate of the new run, which ends at step `plan_end`.
    """
    try:
        parents = learning_rate_from_identity(parent.identity)
    except ValueError as error:
        reason = f"found {error} in `identity`; expected a file written by a run"
        raise InputError(f"{parent.path / RUN_FILE}: {reason}") from None
    except InputError as error:
        raise InputError(
            f"{parent.flag}: its learning rate cannot be computed here ({error})"
        ) from None
    installed = parents.identity
    if mismatch := describe_difference(parent.identity, installed, fields=installed):
        raise InputError(
            f"{parent.flag}: {mismatch}; expected the package of the decay style that the parent "
            "was trained with"
        )
    step = next(
        (step for step in range(1, parent_step + 1) if schedule(step) != parents(step)), None
    )
    if step is None:
        return
    if isinstance(parents, LearningRateSchedule) and step > parents.last_peak:
        steps = [step for step in parent.checkpoints.steps() if step <= parents.last_peak]
        raise InputError(
            f"--branch-at {parent_step}: {parent.run} has decayed there (its rate falls after step "
            f"{parents.last_peak}), and a branch "
            f"continues at the peak; expected one of {_format_steps(steps)}, or --init-from to "
            "take only its weights"
        )
    expected = parents.describe()
    if isinstance(parents, LearningRateSchedule):
        end = plan_end - parent_step + 1
        expected = (
            f"--lr {parents.peak:g} --lr-warmup-iters {parents.warmup} and a decay of at most "
            f"{end} steps"
        )
    raise InputError(
        f"--branch-at {parent_step}: the learning rate of step {step} is {parents(step):g} in "
        f"{parent.run}, {schedule(step):g} here; "
        f"expected its own up to step {parent_step}: {expected}"
    )


def first_differing_step(schedule: Schedule, reference: Schedule, last: int) -> int | None:
    """Return the first step in which two schedules train different objectives.

    Objectives differ if their options or weights do. Steps 1 to `last`, inclusive, are compared;
    None if they are all equal.

    Raises:
        ValueError: A schedule ends before `last` and before the first difference.
    """
    step = 1
    while step <= last:
        phase = schedule.phase_at(step)
        reference_phase = reference.phase_at(step)
        end = min(phase.last_step, reference_phase.last_step, last)
        # Phases with equal choices are equal if their options are constant or their ranges of steps
        # are equal.
        is_comparable = all(choice.start == choice.end for choice in phase.choices)
        is_comparable |= (phase.first_step, phase.last_step) == (
            reference_phase.first_step,
            reference_phase.last_step,
        )
        if (
            not is_comparable
            or schedule.seed != reference.seed
            or phase.is_sum != reference_phase.is_sum
            or phase.choices != reference_phase.choices
        ):
            for compared_step in range(step, end + 1):
                if schedule.objectives(compared_step) != reference.objectives(compared_step):
                    return compared_step
        step = end + 1
    return None


def _init_from_weights(
    plan: Plan, parent: ParentRun, recorded: RunInit | None, given: Collection[str] | None
) -> RunInit:
    """Return the starting point of a new run from the weights of `parent`.

    Args:
        recorded: Starting point of an earlier start of the same command, whose step is used again:
            the parent may have saved newer checkpoints since.
        given: Fields whose values were given (None: all).

    Raises:
        InputError: The weights or the data do not fit `plan`.
    """
    config = plan.settings.start
    steps = parent.checkpoints.steps_up_to_tracker()
    if not steps:
        raise InputError(f"{parent.flag}: has no checkpoint yet, expected a run with a checkpoint")
    newest = recorded.at if recorded else steps[-1]
    parent_step = parent.check_has_checkpoint(
        "--init-at", newest if config.init_at is None else config.init_at
    )
    fixed_fields = [name for name in WEIGHT_FIELDS if name not in _POSITION_FIELDS]
    parent.check_same_fields(plan, fixed_fields, "its weights fit no other value", parent_step)
    if given is not None and "phases" in given and plan.settings.phases:
        given = {*given, *parse_phase(plan.settings.phases[0], "phases")}
    for name in _POSITION_FIELDS if given is not None else ():
        if name not in given:  # a default must not replace the parent's value silently
            flag = name.replace("_", "-")
            value = identity_at(parent.identity, parent_step).get(name)
            text = (
                f"--{'' if value else 'no-'}{flag}"
                if isinstance(value, bool)
                else f"--{flag} {value}"
            )
            parent.check_same_fields(
                plan, [name], f"expected {text}, or the new value given with --{flag}", parent_step
            )
    skip = 0
    if config.skip_samples == "parent":
        parent.check_same_fields(
            plan,
            _SAMPLE_FIELDS,
            "its samples are numbered differently; give --skip-samples a number",
        )
        skipped = parent.read_progress(parent_step)["skip_packs"]
        skip = skipped.end_sample(
            parent.start.skip_samples, parent.settings.samples_after(parent_step)
        )
    tokens = parent.settings.tokens_after(parent_step)
    schedule = parent.settings.schedule_text
    stages = (
        ()
        if parent.is_converted
        else (
            Ancestor(parent.run, parent_step, schedule, tokens, total=parent.settings.total_iters),
        )
    )
    return RunInit(
        "weights",
        parent.run,
        parent_step,
        identity_digest(parent.identity),
        skip,
        before=(*parent.start.before, *stages),
    )


def _format_steps(steps: list[int]) -> str:
    """Return text such as `the steps 4, 8`, shortened in the middle if long.

    More than 12 steps are shortened.
    """
    if not steps:
        return "the steps with a checkpoint, and there is none"
    texts = [str(step) for step in steps]
    return "the steps " + ", ".join(texts if len(texts) <= 12 else [*texts[:6], "...", *texts[-5:]])
