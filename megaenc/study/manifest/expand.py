"""Expansion of manifest entries into models, one per combination of their lists."""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaenc.console import truncate_text
from megaenc.data.packing.packed_dataset import SHORTEST_CHUNK, mean_squared_chunk_lengths
from megaenc.errors import InputError, closest_match
from megaenc.estimate.length_model import LengthModel, mean_chunk_pairs
from megaenc.estimate.work import PhaseWork, build_phases
from megaenc.finetune.config import format_learning_rate
from megaenc.flags import Fraction, NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt
from megaenc.model.config import visible_pairs
from megaenc.study.manifest.model_key import ModelKey, format_model_name
from megaenc.study.manifest.pretrain_args import (
    STEP_FLAGS,
    build_run_config,
    check_run_config,
    prefix_errors,
    warmup_and_decay_steps,
)
from megaenc.training.config import PretrainConfig

# Of all models together; all are kept in memory.
_LIMITS = {"models": 1_000, "checkpoints": 10_000, "phases": 200_000}
# Schedules are parsed before the tokenizer exists; the size does not matter.
_PLACEHOLDER_VOCAB_SIZE = 1024
# Objectives that the columns can express.
_STANDARD_OBJECTIVE = re.compile(r"(clm|mlm)(\(mask=[^,>]*\))?")
_MAX_NAME_BYTES = 180  # file names may have 255 bytes
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of directories, stages and results


@dataclass(frozen=True)
class ManifestEntry:
    """Item of a manifest's `models`: one model for each combination of its lists.

    Fields are the item's keys, except `place`, its location for error messages. Lists are `size`
    (names), `steps`, `clm_share` (fractions) or `clm_steps`, `mask` (fractions), `after` (names of
    models to continue), `peak_rate` and `seed`. `steps` and `seed` must not be empty, nor `mask`
    if there is MLM; either `size` or `after` is set. With `after`, the lists of CLM are empty and
    `seed` is the default. Otherwise an empty list stands for no CLM, or for the flag's value.
    `schedule` is an --objective-schedule in place of `mask` and of CLM, or "". `checkpoints` are
    steps before the decay that are evaluated too, `pretrain` has flags for these models only.
    `name` replaces the derived one, `group` is that of the costs, `evaluate` is False for a model
    that is only continued, and `inferred` marks a recipe that is a guess.
    """

    size: tuple[str, ...] = ()
    """sizes, as named in `sizes`; a continued model has its parent's"""
    steps: tuple[PositiveInt, ...] = ()
    """optimizer steps of the run; for a continued model, the steps after its parent's end"""
    clm_share: tuple[Fraction, ...] = ()
    """share of the steps trained with CLM before MLM, 0 to 1 (half a step is rounded up)"""
    clm_steps: tuple[NonNegativeInt, ...] = ()
    """number of CLM steps before MLM, instead of `clm_share`"""
    mask: tuple[PositiveFraction, ...] = ()
    """share of the tokens that MLM masks"""
    schedule: str = ""
    """value of --objective-schedule instead of these three: alternations, mixtures, mntp, ratios
    that change
    """
    after: tuple[str, ...] = ()
    """names of models to continue from their decayed end with MLM or `schedule`, a new optimizer
    and no warm-up
    """
    peak_rate: tuple[PositiveFloat, ...] = ()
    """peak learning rates to compare; each becomes a suffix of the name"""
    seed: tuple[NonNegativeInt, ...] = (1,)
    """pretraining seeds: initial weights, data order and masks"""
    checkpoints: tuple[PositiveInt, ...] = ()
    """intermediate steps, before the decay, that are evaluated as well"""
    name: str = ""
    """name of the model, if it should differ from the derived one; only for an entry of one model
    """
    group: str = ""
    """group under which the plan counts its cost"""
    evaluate: bool = True
    """false for a model that is only continued, never evaluated"""
    inferred: bool = False
    """true if a reproduction had to infer the model or its recipe; the plan marks it"""
    pretrain: dict = field(default_factory=dict)
    """flags of `megaenc pretrain` for these models only"""
    place: str = ""
    """location in the manifest for error messages; not a key"""


@dataclass(frozen=True)
class PlannedModel:
    """Model of a study: the end of one pretraining run, as built by `expand_models`.

    `name` and `key` (ModelKey) identify it; `distinguishing_flags` is text on what the key cannot
    tell. `flags`, those of `megaenc pretrain`, and `config`, made of them, do not tell schedule,
    steps, seed, warm-up, decay, start and output. `schedule` is the --objective-schedule, `phases`
    are its PhaseWorks; `warmup` and `decay` are numbers of steps at the start and the end of the
    run. `checkpoints` are steps before the decay that are evaluated too. They count from 1 in the
    run, without the steps of the parent, the model named `after`, whose weights are continued ("":
    new weights). `evaluate` is whether the end is evaluated. `group` is that of its cost;
    `inferred` is whether its recipe is a guess.
    """

    name: str
    key: ModelKey
    flags: Mapping[str, Any] = field(repr=False)
    """Flags of `megaenc pretrain` without schedule, steps, seed, warm-up, decay, start and output.
    """
    config: PretrainConfig = field(repr=False)
    """`flags` applied to the defaults."""
    schedule: str
    """Value of --objective-schedule."""
    phases: tuple[PhaseWork, ...]
    """Phases of the schedule, counted without a corpus: randomly cut packs have two documents,
    others one.
    """
    warmup: int
    """Number of warm-up steps."""
    decay: int
    """Number of decay steps at the end of the run, at least 1."""
    after: str
    """Name of the model whose decayed weights are continued; "" for new weights."""
    checkpoints: tuple[int, ...]
    """Steps of the run, before its decay, whose checkpoints are evaluated too."""
    group: str
    evaluate: bool
    """True if the end of the run is evaluated."""
    inferred: bool
    distinguishing_flags: str
    """Differences that `key` cannot express, as `lr=0.002, weight_decay=0`, including those of the
    parent.
    """

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of the run, without those of a parent."""
        return self.phases[-1].last

    @property
    def last_undecayed_step(self) -> int:
        """Return the last step before the run's learning rate decays; 0 if there is none.

        Other runs can share the steps up to it.
        """
        return self.steps - self.decay

    def checkpoint_key(self, step: int) -> ModelKey:
        """Return the ModelKey of the run's checkpoint at `step`.

        `step` counts the run's own steps from 1, without a parent's; the key has the parent's too.
        `decayed` of the key is False. Steps of other objectives than CLM count as MLM; in mixtures,
        fractions of steps are rounded. Whether `step` is in the run, and before its decay, is not
        checked.
        """
        intermediate = replace(self.key, decayed=False, budget=self.steps)
        if self.key.cpt_mlm_steps:
            return replace(intermediate, cpt_mlm_steps=step)
        clm = round(
            sum(
                fraction * _count_clm_steps(phase)
                for phase, fraction in self.phase_fractions(0, step)
            )
        )
        mask = self.key.mask_ratio if clm < step else None
        return replace(intermediate, clm_steps=clm, mlm_steps=step - clm, mask_ratio=mask)

    def phase_fractions(self, after: int, last: int) -> list[tuple[PhaseWork, float]]:
        """Return each phase with the fraction of its steps that are in after + 1..last.

        Returns:
            (phase, fraction) for all phases in order, with fractions from 0 (outside) to 1.
        """
        fractions = []
        for phase in self.phases:
            count = max(0, min(last, phase.last) - max(after, phase.first - 1))
            fractions.append((phase, count / (phase.last - phase.first + 1)))
        return fractions

    def checkpoint_name(self, step: int) -> str:
        """Return the name of the checkpoint at `step`: the model's with `-STEP`.

        STEP is the plain number, such as 2000, at the end, but before `-seedN`. Whether it is one
        of `checkpoints` is not checked.
        """
        stem, mark, seed = self.name.rpartition("-seed")
        return f"{stem}-{step}-seed{seed}" if mark else f"{self.name}-{step}"


def expand_models(
    entries: Sequence[ManifestEntry], sizes: Mapping[str, Any], pretrain: Mapping[str, Any]
) -> tuple[PlannedModel, ...]:
    """Return the models of all entries; those that continue others come last.

    Otherwise they are in the order of `entries`. If models have the same ModelKey, the keys of
    those with flags of their own get a `schedule` that names these flags.

    Args:
        sizes: Dictionaries of flags of `megaenc pretrain` by size; they override `pretrain`.
        pretrain: Flags of all models, by field name. All paths, also in `sizes`, must be resolved.

    Raises:
        InputError: An entry or size is invalid, a name of a model or checkpoint repeated, or there
            are more than 1,000 models, 10,000 checkpoints or 200,000 phases.
    """
    for size in sizes:
        _check_name("sizes", size)
    models: dict[str, PlannedModel] = {}
    place_of: dict[str, str] = {}
    counts: Counter[str] = Counter()
    # The sort is stable: otherwise entries stay in the order of the file.
    for entry in sorted(entries, key=lambda entry: bool(entry.after)):
        with prefix_errors(entry.place):
            _check_entry(entry)
            count = _count_models(entry)
            _add_counts(counts, models=count, checkpoints=count * len(entry.checkpoints))
            entry_models = []
            for model in _expand_entry(entry, models, sizes, pretrain):
                _add_counts(counts, phases=len(model.phases))
                entry_models.append(model)
            if entry.name and len(entry_models) > 1:
                raise InputError(
                    f"field `name`: found {entry.name} for {len(entry_models)} models, expected "
                    "an entry of one"
                )
            for model in entry_models:
                for name in (model.name, *map(model.checkpoint_name, model.checkpoints)):
                    if name in place_of:
                        raise InputError(
                            f"model {name} exists already ({place_of[name]}), expected each name "
                            "once; set `name`"
                        )
                    place_of[name] = entry.place
                models[model.name] = model
    return _disambiguate_keys(models.values())


def _check_entry(entry: ManifestEntry) -> None:
    """Raise InputError for a missing, repeated or contradictory value of an entry."""
    for name in ("steps", "checkpoints", "clm_share", "clm_steps", "mask", "peak_rate", "seed"):
        for value, times in Counter(getattr(entry, name)).items():
            if times > 1:
                raise InputError(f"field `{name}`: found {value:g} twice, expected each once")
    if not entry.steps:
        raise InputError("field `steps`: missing, expected the optimizer steps of the run")
    if not entry.seed:
        raise InputError("field `seed`: found none, expected at least one")
    for name, conflicts, expected in (
        ("schedule", ("clm_share", "clm_steps", "mask"), "one of them"),
        ("clm_share", ("clm_steps",), "one of them"),
        (
            "after",
            ("size", "clm_share", "clm_steps"),
            "`mask` or a `schedule`: everything else is the parent's",
        ),
    ):
        conflicting = [conflict for conflict in conflicts if getattr(entry, conflict)]
        if getattr(entry, name) and conflicting:
            raise InputError(
                f"found `{conflicting[0]}` together with `{name}`, expected {expected}"
            )
    if entry.after and entry.seed != ManifestEntry.seed:
        raise InputError("found `seed` together with `after`: a continued model has its parent's")
    if not entry.after and not entry.size:
        raise InputError(
            "field `size`: missing, expected a name of `sizes`, or `after` with a model that is "
            "continued"
        )


def _check_name(field: str, name: str) -> None:
    """Raise InputError if `name`, the value of `field`, cannot be a directory name."""
    if not _NAME.fullmatch(name):
        message = f"field `{field}`: found {repr(name)[:60]}"
        raise InputError(f"{message}, expected letters, digits and . _ - (it names directories)")
    if len(name.encode()) > _MAX_NAME_BYTES:
        message = f"field `{field}`: found {name[:40]}... of {len(name)} letters"
        raise InputError(f"{message}, expected at most {_MAX_NAME_BYTES} bytes; give it a `name`")


def _count_models(entry: ManifestEntry) -> int:
    """Return the number of combinations of an entry's lists.

    It is the maximum number of its models.
    """
    lists = (
        entry.size,
        entry.steps,
        entry.clm_share or entry.clm_steps,
        entry.mask,
        entry.peak_rate,
        entry.seed,
        entry.after,
    )
    return math.prod(max(1, len(values)) for values in lists)


def _add_counts(counts: Counter[str], **numbers: int) -> None:
    """Add `numbers` of models, checkpoints or phases to `counts`.

    Raises:
        InputError: `_LIMITS` allow fewer.
    """
    counts.update(numbers)
    for noun in numbers:
        if counts[noun] > _LIMITS[noun]:
            raise InputError(
                f"makes more than {_LIMITS[noun]:,} {noun} together with the entries before it, "
                "expected fewer"
            )


def _disambiguate_keys(models: Iterable[PlannedModel]) -> tuple[PlannedModel, ...]:
    """Return the models, in order, with keys that tell their ways of training apart.

    Of models with the same key, the one without flags of its own keeps it. The flags of the others
    become part of `key.schedule`: reports list them in a separate table, apart from the study's
    models and its claims.
    """
    keys_by_model = []
    differences: dict[ModelKey, set[str]] = defaultdict(set)
    for model in models:
        keys = [model.checkpoint_key(step) for step in model.checkpoints]
        if model.evaluate:
            keys.append(model.key)
        for key in keys:
            differences[key].add(model.distinguishing_flags)
        keys_by_model.append((model, keys))
    result = []
    for model, keys in keys_by_model:
        if model.distinguishing_flags and any(len(differences[key]) > 1 for key in keys):
            schedule = f"{model.key.schedule or model.schedule} with {model.distinguishing_flags}"
            model = replace(model, key=replace(model.key, schedule=schedule))
        result.append(model)
    return tuple(result)


def _expand_entry(
    entry: ManifestEntry,
    models: Mapping[str, PlannedModel],
    sizes: Mapping[str, Any],
    pretrain: Mapping[str, Any],
) -> Iterator[PlannedModel]:
    """Yield every model of an entry.

    Args:
        models: Models by name that the entry may continue.
    """
    runs: dict[tuple, PretrainConfig] = {}  # reading flags takes most of a model's time
    origins = entry.after or entry.size
    rates = entry.peak_rate or (None,)
    for origin, steps, rate, seed in itertools.product(origins, entry.steps, rates, entry.seed):
        parent = models.get(origin) if entry.after else None
        if entry.after and not parent:
            raise InputError(
                f"field `after`: found {truncate_text(origin)}{format_suggestion(origin, models)}"
            )
        if parent and parent.after:
            raise InputError(
                f"field `after`: found {origin}, which continues another model itself; expected "
                "one longer `schedule` instead"
            )
        base = parent.key if parent else ModelKey(origin, seed=seed)
        if base.size not in sizes:
            suggestion = format_suggestion(base.size, sizes)
            raise InputError(f"field `size`: found {truncate_text(base.size)}{suggestion}")
        entry_flags = dict(entry.pretrain)
        if rate is not None:
            entry_flags["lr"] = rate
        no_warmup = {"lr_warmup_iters": 0, "lr_warmup_fraction": None} if parent else {}
        flags = {**pretrain, **sizes[base.size], **no_warmup, **entry_flags}
        if (base.size, rate) not in runs:
            runs[base.size, rate] = build_run_config(flags)
            check_run_config(runs[base.size, rate])
        run = runs[base.size, rate]
        warmup, decay = warmup_and_decay_steps(run.learning_rate, steps)
        differences = [
            f"{flag}={value:g}" if isinstance(value, float) else f"{flag}={value}"
            for flag, value in entry_flags.items()
        ]
        if parent:
            differences.append(parent.distinguishing_flags)
            if parent.key.schedule:
                differences.append(f"after {parent.key.schedule}")
        for text in build_schedules(entry, steps):
            config = replace(run, objective_schedule=text, train_iters=steps, seed=base.seed)
            model_phases = tuple(
                build_phases(config, _PLACEHOLDER_VOCAB_SIZE, expected_length_model(run))
            )
            key = _build_model_key(base, model_phases, text, parent)
            name = _build_model_name(entry, key, rate)
            late_steps = [step for step in entry.checkpoints if step > steps - decay]
            if late_steps:
                last = f"expected 1 to {steps - decay}: {name} decays afterwards"
                raise InputError(f"field `checkpoints`: found {late_steps[0]}, {last}")
            yield PlannedModel(
                name=name,
                key=key,
                flags={flag: value for flag, value in flags.items() if flag not in STEP_FLAGS},
                config=run,
                schedule=text,
                phases=model_phases,
                warmup=warmup,
                decay=decay,
                after=parent.name if parent else "",
                checkpoints=entry.checkpoints,
                group=entry.group,
                evaluate=entry.evaluate,
                inferred=entry.inferred,
                distinguishing_flags=", ".join(filter(None, differences)),
            )


def build_schedules(entry: ManifestEntry, steps: int) -> list[str]:
    """Return the objective schedules of an entry for runs of `steps` steps.

    The lengths of two phases are given in steps.
    """
    if entry.schedule:
        return [entry.schedule]
    if entry.clm_steps and max(entry.clm_steps) > steps:
        raise InputError(
            f"field `clm_steps`: found {max(entry.clm_steps)}, expected at most the {steps} steps "
            "of the run"
        )
    clm = entry.clm_steps or [
        math.floor(fraction * steps + 0.5) for fraction in entry.clm_share or (0.0,)
    ]
    if min(clm) < steps and not entry.mask:
        expected = (
            "the share that MLM masks, or a `schedule`"
            if entry.after
            else "the share of the tokens that MLM masks"
        )
        raise InputError(f"field `mask`: missing, expected {expected}")
    schedules = []
    for count, mask in itertools.product(clm, entry.mask or (None,)):
        mlm = f"mlm(mask={mask:g})" if count < steps else ""
        schedules.append(f"clm:{count},{mlm}:{steps - count}" if mlm and count else mlm or "clm")
    return list(dict.fromkeys(schedules))  # pure CLM is the same for every mask ratio


def _build_model_name(entry: ManifestEntry, key: ModelKey, rate: float | None) -> str:
    """Return the name of a model: the entry's `name`, otherwise that of its key.

    Args:
        rate: Peak learning rate that the name gets, before `-seedN`; None if the entry has none.
    """
    try:
        name = entry.name or format_model_name(key)
    except ValueError as error:
        raise InputError(f"{error}; give it a `name`") from None
    if rate is not None:
        stem, mark, seed = name.partition("-seed")
        name = f"{stem}-lr{format_learning_rate(rate)}{mark}{seed}"
    _check_name("name", name)
    return name


def expected_length_model(run: PretrainConfig) -> LengthModel:
    """Return the LengthModel that is assumed without a corpus.

    `squares` and `local_pairs` are those of two documents per pack with random-length packing,
    otherwise of one. `pieces` and special tokens are 0. This overestimates the attention FLOPs by
    some percent at most.
    """
    length = run.data.seq_length
    window = run.shape.window_size
    if run.data.packing == "random-length" and length >= 2 * SHORTEST_CHUNK:
        squares = mean_squared_chunk_lengths(length)
        pairs = mean_chunk_pairs(length, window)
    else:
        squares = float(length * length)
        pairs = 0.0 if window is None else float(visible_pairs(length, window))
    return LengthModel(squares, 0.0, 0.0, "", local_pairs=pairs)


def _build_model_key(
    base: ModelKey, model_phases: Sequence[PhaseWork], text: str, parent: PlannedModel | None
) -> ModelKey:
    """Return the key of a model, with its schedule if other columns cannot express it."""
    clm_steps = round(sum(map(_count_clm_steps, model_phases)))
    total = model_phases[-1].last
    masked_works = [
        (work, steps)
        for phase in model_phases
        for work, steps in phase.parts
        if work.visible_squares == work.squares
    ]
    masked_steps = sum(steps for _, steps in masked_works)
    mask = None
    if masked_steps:
        masked = sum(steps * work.predicted / work.tokens for work, steps in masked_works)
        mask = round(masked / masked_steps, 6)
    objectives = []
    for phase in model_phases:
        match = _STANDARD_OBJECTIVE.fullmatch(phase.text)
        objectives.append(match[1] if match else "")
    if parent is None:
        schedule = "" if objectives in (["clm"], ["mlm"], ["clm", "mlm"]) else text
        return replace(
            base,
            clm_steps=clm_steps,
            mlm_steps=total - clm_steps,
            mask_ratio=mask,
            schedule=schedule,
        )
    is_plain = objectives == ["mlm"] and base.mask_ratio in (None, mask) and not base.schedule
    return replace(base, cpt_mlm_steps=total, mask_ratio=mask, schedule="" if is_plain else text)


def _count_clm_steps(phase: PhaseWork) -> float:
    """Return the number of steps of a phase that train CLM; fractional for mixtures."""
    return sum(steps for work, steps in phase.parts if work.objective == "clm")


def format_suggestion(name: str, known: Collection[str]) -> str:
    """Return the end of an error message about an unknown name.

    It is `, did you mean X?` with the known name nearest to `name`, or `, expected one of ...` with
    all known names if none is near.
    """
    near = closest_match(name, known)
    return f", did you mean {near}?" if near else f", expected one of {', '.join(known)}"
