"""The run that another starts from, and what has to fit: decided before anything is loaded."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megaenc.errors import InputError
from megaenc.json_files import parse_json, read_json_object, read_regular_file
from megaenc.objectives import Schedule
from megaenc.training.checkpoint_dir import STATE_FILE, CheckpointDir, DamagedCheckpointError
from megaenc.training.config import PretrainConfig, read_config_file
from megaenc.training.lr_schedule import WSDSchedule
from megaenc.training.plan import Plan
from megaenc.training.run_dir import CONFIG_FILE, RUN_FILE, describe_difference
from megaenc.training.run_init import NEW_WEIGHTS, PROGRESS_FIELDS, Ancestor, RunInit, identity_digest
from megaenc.training.skip_ranges import SkippedPacks

# A branch may change these; what they do up to its first step is compared step by step. Validations train nothing.
_FREE_IN_BRANCH = {"train_iters", "objective_schedule", "objective_packages", "lr", "lr_warmup_iters", "lr_wsd_decay_iters"}
_FREE_IN_BRANCH |= {"eval_iters", "start", "skip_samples"}
# What weights mean nothing without, and what says which pack a sample number stands for.
_WEIGHT_FIELDS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "rotary_base")
_WEIGHT_FIELDS += ("norm_epsilon", "kv_channels", "add_qkv_bias", "qk_layernorm", "use_rope_scaling", "rope_scaling_factor")
_WEIGHT_FIELDS += ("untie_embeddings_and_output_weights", "tokenizer", "vocab_size")
_SAMPLE_FIELDS = ("data", "split", "packing", "seq_length", "seed")


def resolve_run_init(plan: Plan) -> RunInit:
    """Return what `plan` starts from: what its folder says if that has a checkpoint. InputError for what does not fit."""
    given = plan.settings.start
    recorded = _read_recorded_init(plan.settings)
    found = recorded if recorded and _checkpoint_dir(plan.settings.output.save).steps() else None
    if not found and given.branch_from:
        found = _init_branch(plan, ParentRun("--branch-from", given.branch_from, plan.settings.output.save))
    if not found and given.init_from:
        found = _init_from_weights(plan, ParentRun("--init-from", given.init_from, plan.settings.output.save), recorded)
    found = found or NEW_WEIGHTS
    return dataclasses.replace(found, skip_samples=given.skip_samples) if isinstance(given.skip_samples, int) else found


def record_run_init(settings: PretrainConfig, start: RunInit) -> PretrainConfig:
    """`settings` with what `start` found in place of `--init-at` and `--skip-samples parent`: what config.yaml should say."""
    at = {"branch": "branch_at", "weights": "init_at"}.get(start.kind)
    values = ({at: start.at} if at else {}) | {"skip_samples": start.skip_samples or settings.start.skip_samples}
    return dataclasses.replace(settings, start=dataclasses.replace(settings.start, **values))


class ParentRun:
    """The run that another starts from, as its folder tells."""

    def __init__(self, flag: str, run: str, save: str):
        """Read the folder `run` that `flag` names; InputError if it is none of a run or the `save` of the new one."""
        self.run, self.flag, self.path = run, f"{flag} {run}", Path(run)
        self.checkpoints = _checkpoint_dir(run)
        if save and self.path.resolve() == Path(save).resolve():
            raise InputError(f"{self.flag}: is --save as well, expected a folder of its own for the new run")
        try:
            facts = parse_json(read_regular_file(self.path / RUN_FILE))
            self.identity, self.start = facts["identity"], RunInit.read(facts)
            if not isinstance(self.identity.get("objective_packages", {}), dict):
                raise TypeError("objective_packages is no object")
            self.converted = "source" in facts
            self.skipped = SkippedPacks.read(facts.get("skip_packs", ()))
            self.start.check(f"{self.path / RUN_FILE}: start")
        except OSError as error:
            raise InputError(
                f"{self.flag}: no run there ({RUN_FILE}: {error.strerror}), expected what a run got as --save"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self.path / RUN_FILE}: {error!r}; expected what a run wrote there") from None
        self.settings = read_config_file(str(self.path / CONFIG_FILE))

    def samples_read(self, step: int) -> int:
        """Return how many packs its steps up to `step` have read."""
        return self.settings.batch_sizes.first_sample(step + 1)

    def read_progress(self, step: int) -> dict[str, Any]:
        """Return the PROGRESS of its checkpoint of `step`, and as `skip_packs` what that was told to leave out."""
        try:
            values = self.checkpoints.read_state(step)
            return {name: values[name] for name in PROGRESS_FIELDS} | {"skip_packs": SkippedPacks.read(values["skip_packs"])}
        except DamagedCheckpointError as damage:
            raise InputError(f"{damage}; choose another") from None
        except KeyError as error:
            path = self.checkpoints.path(step) / STATE_FILE
            raise InputError(f"{path}: {error!r}; expected what a save wrote, choose another checkpoint") from None

    def check_has_checkpoint(self, flag: str, step: int | None) -> int:
        """Return `step`, if there is a checkpoint of it; InputError names those that there are."""
        kept = self.checkpoints.steps()
        if step not in kept:
            found = f"{flag}: missing" if step is None else f"{flag} {step}: {self.run} keeps no checkpoint of this step"
            raise InputError(f"{found}, expected one of {_format_steps(kept)}")
        return step

    def check_same_fields(self, plan: Plan, names: Iterable[str], why: str) -> None:
        """Raise InputError with the first field of `names` in which the identity differs, and `why` it must not."""
        there, here = ({name: values.get(name) for name in names} for values in (self.identity, plan.identity))
        if other := describe_difference(there, here):
            raise InputError(f"{self.flag}: {other}; {why}")


def _checkpoint_dir(run: str) -> CheckpointDir:
    return CheckpointDir(Path(run) / "checkpoints")


def _read_recorded_init(settings: PretrainConfig) -> RunInit | None:
    """Return what the folder `--save` says, if it is that of a run and the flags name the same start."""
    given, facts = settings.start, Path(settings.output.save) / RUN_FILE
    run, at = (given.branch_from, given.branch_at) if given.branch_from else (given.init_from, given.init_at)
    if not run or not settings.output.save:
        return None
    try:
        start = RunInit.read(read_json_object(facts))
        start.check(f"{facts}: start")
    except (InputError, TypeError):
        return None  # the run folder says what is wrong with it
    same = start.run == run and (start.kind == "branch") == bool(given.branch_from) and at in (None, start.at)
    return start if same else None


def _init_branch(plan: Plan, parent: ParentRun) -> RunInit:
    if parent.converted:
        raise InputError(
            f"{parent.flag}: holds converted weights and no optimizer to go on with; expected --init-from {parent.run}"
        )
    settings, at = plan.settings, parent.check_has_checkpoint("--branch-at", plan.settings.start.branch_at)
    if at >= settings.total_iters:
        raise InputError(f"--branch-at {at}: the new run ends at step {settings.total_iters}, expected --train-iters beyond {at}")
    same = [name for name in dict.fromkeys((*plan.identity, *parent.identity)) if name not in _FREE_IN_BRANCH]
    parent.check_same_fields(plan, same, "a branch shares it with its parent, or --init-from takes the weights alone")
    skip = settings.start.skip_samples
    if isinstance(skip, int) and skip != parent.start.skip_samples:
        raise InputError(
            f"--skip-samples {skip}: {parent.run} began at sample {parent.start.skip_samples}, and a branch reads on where it was"
        )
    _check_schedule(plan, parent, at)
    _check_learning_rate(plan.learning_rate, parent, at)
    saved = parent.read_progress(at)
    if not saved["skip_packs"].reads_same(parent.skipped, parent.start.skip_samples, parent.samples_read(at)):
        raise InputError(
            f"--branch-at {at}: {parent.run} has gone back since and left packs out that this step read; choose another"
        )
    saved |= {"skip_samples": parent.start.skip_samples, "skip_packs": parent.skipped.texts, "before": parent.start.before}
    return RunInit("branch", parent.run, at, identity_digest(parent.identity), **saved)


def _check_schedule(plan: Plan, parent: ParentRun, at: int) -> None:
    settings = parent.settings
    try:
        there = Schedule.build(settings.objective_schedule, settings.total_iters, plan.vocabulary, settings.seed)
    except InputError as error:
        raise InputError(f"{parent.flag}: its schedule cannot be read here ({error})") from None
    step = first_differing_step(plan.schedule, there, at)
    if step:
        raise InputError(
            f"--branch-at {at}: step {step} trains {plan.schedule.objective(step).describe()} here and "
            f"{there.objective(step).describe()} in {parent.run}; expected a schedule that agrees with it up to step {at}"
        )
    ours, theirs = plan.schedule.packages(), parent.identity.get("objective_packages", {})
    for name in {choice.start.name for phase in there.phases if phase.first_step <= at for choice in phase.choices}:
        if ours.get(name) != theirs.get(name):
            raise InputError(
                f"{parent.flag}: objective `{name}` is {theirs.get(name) or 'of megaenc'} there, "
                f"{ours.get(name) or 'of megaenc'} here; install the version that the parent was trained with"
            )


def _check_learning_rate(here: WSDSchedule, parent: ParentRun, at: int) -> None:
    values = [parent.identity.get(name) for name in ("lr", "lr_warmup_iters", "lr_wsd_decay_iters", "train_iters")]
    if type(values[0]) not in (int, float) or not all(type(value) is int for value in values[1:]):
        raise InputError(f"{parent.path / RUN_FILE}: found no learning rate in `identity`; expected what a run wrote there")
    there = WSDSchedule(*values)
    step = next((step for step in range(1, at + 1) if here(step) != there(step)), None)
    if step is None:
        return
    whole = there.total - max(there.decay, 1) + 1  # the first step of a decay still has the peak
    if step > whole:
        kept = [step for step in parent.checkpoints.steps() if step <= whole]
        raise InputError(
            f"--branch-at {at}: {parent.run} has decayed there (its rate falls after step {whole}), and a branch goes on at the "
            f"peak; expected one of {_format_steps(kept)}, or --init-from for its weights alone"
        )
    raise InputError(
        f"--branch-at {at}: the learning rate of step {step} is {there(step):g} in {parent.run}, {here(step):g} here; expected "
        f"its own up to step {at}: --lr {there.peak:g} --lr-warmup-iters {there.warmup} and a decay of at most "
        f"{here.total - at + 1} steps"
    )


def first_differing_step(one: Schedule, other: Schedule, last: int) -> int | None:
    """The first of the updates 1..last, which both hold, that the two train differently; None if there is none."""
    step = 1
    while step <= last:
        here, there = one.at(step), other.at(step)
        end = min(here.last_step, there.last_step, last)
        # Phases of the same choices train the same if nothing changes over them, or if they are as long.
        steady = all(choice.start == choice.end for choice in here.choices)
        steady |= (here.first_step, here.last_step) == (there.first_step, there.last_step)
        if not steady or here.choices != there.choices or one.seed != other.seed:
            for number in range(step, end + 1):
                if one.objective(number) != other.objective(number):
                    return number
        step = end + 1
    return None


def _init_from_weights(plan: Plan, parent: ParentRun, recorded: RunInit | None) -> RunInit:
    """`recorded`: what was found when the run was begun; the newest checkpoint of then need not be that of now."""
    given = plan.settings.start
    kept = parent.checkpoints.steps_up_to_tracker()
    if not kept:
        raise InputError(f"{parent.flag}: holds no checkpoint yet, expected a run that has saved one")
    newest = recorded.at if recorded else kept[-1]
    at = parent.check_has_checkpoint("--init-at", newest if given.init_at is None else given.init_at)
    parent.check_same_fields(plan, _WEIGHT_FIELDS, "its weights fit no other")
    skip = 0
    if given.skip_samples == "parent":
        parent.check_same_fields(plan, _SAMPLE_FIELDS, "so its samples are others; give --skip-samples a number")
        skip = parent.read_progress(at)["skip_packs"].end(parent.start.skip_samples, parent.samples_read(at))
    tokens, schedule = parent.samples_read(at) * parent.settings.data.seq_length, parent.settings.objective_schedule
    stages = () if parent.converted else (Ancestor(parent.run, at, schedule, tokens, total=parent.settings.total_iters),)
    return RunInit("weights", parent.run, at, identity_digest(parent.identity), skip, before=(*parent.start.before, *stages))


def _format_steps(steps: list[int]) -> str:
    """The steps as a sentence has them, the middle of many left out."""
    if not steps:
        return "the steps with a checkpoint, and there is none"
    texts = [str(step) for step in steps]
    return "the steps " + ", ".join(texts if len(texts) <= 12 else [*texts[:6], "...", *texts[-5:]])
