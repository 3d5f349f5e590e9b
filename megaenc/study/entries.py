"""The models of a manifest: an entry's lists in every combination, each worked out to a schedule, a learning rate and a name."""

import difflib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megaenc.data.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.finetune.jobs import rate_name
from megaenc.objectives import Attention, Objective, Phase, Schedule
from megaenc.study.entry import Entry, check_entry, check_name, count_models
from megaenc.study.pretrain_flags import check_plan_flags, rate_steps, run_flags
from megaenc.study.setting import Setting, name_of
from megaenc.training.settings import PretrainSettings

# Schedules are read before there is a tokenizer: any with a mask token will do.
_ANY_VOCABULARY = Vocabulary(size=1024, eos_id=0, mask_id=1, special_ids=(0, 1), fingerprint="")
_MOST_MODELS, _MOST_CHECKPOINTS = 1_000, 10_000


class Part(NamedTuple):
    """What one objective has of a phase."""

    name: str
    steps: float
    """its expected share of the phase's steps"""
    predicted: float
    """share of the tokens that it predicts"""
    seen: float
    """0 under causal attention, 1 under bidirectional; between them the mean square of the share that is a prefix"""


class Trained(NamedTuple):
    """A phase of a run."""

    text: str
    last_step: int
    changes: bool
    """Whether an option changes within it, so that another length would make other steps of it."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Model:
    """A model of the study: the end of one pretraining run, which may have begun as another's."""

    name: str
    setting: Setting
    flags: Mapping[str, Any] = field(repr=False)
    """Of `megaenc pretrain`, of every run of this model: without schedule, steps, seed, warm-up, decay, start and folder."""
    run: PretrainSettings = field(repr=False)
    """Those over the defaults."""
    schedule: str
    """As --objective-schedule takes it."""
    phases: tuple[Trained, ...]
    warmup: int
    decay: int
    after: str
    """The model whose decayed weights it begins with; "" for new weights."""
    checkpoints: tuple[int, ...]
    group: str
    evaluate: bool
    inferred: bool
    own: str
    """What its columns do not say: `lr=0.002, weight_decay=0` by `peak_rate` or its entry's `pretrain`, and its parent's."""

    @property
    def steps(self) -> int:
        """Of its own run; the parent's are not counted."""
        return self.phases[-1].last_step

    @property
    def undecayed(self) -> int:
        """The last step before the rate falls: up to there a run can be shared."""
        return self.steps - self.decay

    def checkpoint_setting(self, step: int) -> Setting:
        """What its checkpoint of `step` is."""
        if self.setting.cpt_mlm_steps:
            return replace(self.setting, cpt_mlm_steps=step, decayed=False, budget=self.steps)
        clm, first = 0.0, 0
        for phase in self.phases:
            made = max(0, min(step, phase.last_step) - first) / (phase.last_step - first)
            clm += made * sum(part.steps for part in phase.parts if part.name == "clm")
            first = phase.last_step
        mask = self.setting.mask_ratio if round(clm) < step else None
        return replace(
            self.setting, clm_steps=round(clm), mlm_steps=step - round(clm), mask_ratio=mask, decayed=False, budget=self.steps
        )

    def checkpoint_name(self, step: int) -> str:
        """The name of its checkpoint of `step`: the model's, then the step."""
        stem, mark, seed = self.name.rpartition("-seed")
        return f"{stem}-{step}-seed{seed}" if mark else f"{self.name}-{step}"


def models_of(file: str, entries: Sequence[Entry], sizes: Mapping[str, Any], pretrain: Mapping[str, Any]) -> tuple[Model, ...]:
    """Every model of a manifest, parents before those that continue them. Raises InputError in one line."""
    sizes = {str(name): given for name, given in sizes.items()}
    for size in sizes:
        check_name(f"{file}: field `sizes`", size)
    models: dict[str, Model] = {}
    place_of: dict[str, str] = {}
    count = checkpoints = 0
    for entry in sorted(entries, key=lambda entry: bool(entry.after)):  # stable: otherwise in the order of the file
        check_entry(entry)
        count += count_models(entry)
        checkpoints += count_models(entry) * len(entry.checkpoints)
        for number, most, what in ((count, _MOST_MODELS, "models"), (checkpoints, _MOST_CHECKPOINTS, "checkpoints")):
            if number > most:
                raise InputError(f"{entry.place}: makes more than {most:,} {what} with those before it, expected fewer")
        made = _continued(entry, models, pretrain, sizes) if entry.after else _from_scratch(entry, sizes, pretrain)
        if entry.name and len(made) > 1:
            raise InputError(f"{entry.place}: field `name`: found {entry.name} for {len(made)} models, expected an entry of one")
        for model in made:
            for name in (model.name, *map(model.checkpoint_name, model.checkpoints)):
                if name in place_of:
                    raise InputError(f"{entry.place}: model {name} is there already ({place_of[name]}), expected each name once")
                place_of[name] = entry.place
            models[model.name] = model
    return tuple(models.values())


def schedule_of(model: Model) -> Schedule:
    """What its run trains at each step."""
    return Schedule.build(model.schedule, model.steps, _ANY_VOCABULARY, model.setting.seed)


def _from_scratch(entry: Entry, sizes: Mapping[str, Any], pretrain: Mapping[str, Any]) -> list[Model]:
    made = []
    runs: dict[tuple, PretrainSettings] = {}  # reading flags takes most of a model's time
    for size, steps, rate, seed in itertools.product(entry.size, entry.steps, entry.peak_rate or (None,), entry.seed):
        if size not in sizes:
            raise InputError(f"{entry.place}: field `size`: found {size}{_nearest(size, sizes)}")
        given = {**pretrain, **sizes[size], **entry.pretrain, **({} if rate is None else {"lr": rate})}
        if (size, rate) not in runs:
            runs[size, rate] = _run_of(entry, given)
        base, run = Setting(size, seed=seed), runs[size, rate]
        made += [_model(entry, base, schedule, steps, given, run, rate) for schedule in _schedules(entry, steps)]
    return made


def _continued(entry: Entry, models: Mapping[str, Model], pretrain: Mapping[str, Any], sizes: Mapping[str, Any]) -> list[Model]:
    made = []
    schedules = [entry.schedule] if entry.schedule else [f"mlm(mask={mask:g})" for mask in entry.mask]
    if not schedules:
        raise InputError(f"{entry.place}: field `mask`: missing, expected the share that MLM hides, or a `schedule`")
    runs: dict[tuple, PretrainSettings] = {}
    for name, steps, rate in itertools.product(entry.after, entry.steps, entry.peak_rate or (None,)):
        parent = models.get(name)
        if parent is None:
            raise InputError(f"{entry.place}: field `after`: found {name}{_nearest(name, models)}")
        if parent.after:
            raise InputError(f"{entry.place}: field `after`: found {name}, which is continued itself; give one longer `schedule`")
        own = {"lr_warmup_iters": 0, "lr_warmup_fraction": None, **entry.pretrain}
        given = {**pretrain, **sizes[parent.setting.size], **own, **({} if rate is None else {"lr": rate})}
        if (parent.setting.size, rate) not in runs:
            runs[parent.setting.size, rate] = _run_of(entry, given)
        run = runs[parent.setting.size, rate]
        made += [_model(entry, parent.setting, schedule, steps, given, run, rate, parent) for schedule in schedules]
    return made


def _schedules(entry: Entry, steps: int) -> list[str]:
    """As --objective-schedule has them, in steps where there are two objectives."""
    if entry.schedule:
        return [entry.schedule]
    if entry.clm_steps and max(entry.clm_steps) > steps:
        found = max(entry.clm_steps)
        raise InputError(f"{entry.place}: field `clm_steps`: found {found}, expected at most the {steps} steps of the run")
    clm = entry.clm_steps or [math.floor(share * steps + 0.5) for share in entry.clm_share or (0.0,)]
    if min(clm) < steps and not entry.mask:
        raise InputError(f"{entry.place}: field `mask`: missing, expected the share of the tokens that MLM hides")
    found = []
    for count, mask in itertools.product(clm, entry.mask or (None,)):
        mlm = f"mlm(mask={mask:g})" if count < steps else ""
        found.append(f"clm:{count},{mlm}:{steps - count}" if mlm and count else mlm or "clm")
    return list(dict.fromkeys(found))  # CLM alone is the same for every mask ratio


def _run_of(entry: Entry, given: Mapping[str, Any]) -> PretrainSettings:
    """Return the settings of a run by its flags. Raises InputError, with the entry's place."""
    try:
        run = run_flags(given)
        check_plan_flags(run)
    except InputError as error:
        raise InputError(f"{entry.place}: {error}") from None
    return run


def _model(
    entry: Entry,
    base: Setting,
    text: str,
    steps: int,
    given: dict[str, Any],
    run: PretrainSettings,
    rate: float | None,
    parent: Model | None = None,
) -> Model:
    """The model that trains `text` for `steps` steps from `parent`, or from new weights; `base`: what it is before."""
    try:
        warmup, decay = rate_steps(run.optimizer, steps)
        schedule = Schedule.build(text, steps, _ANY_VOCABULARY, base.seed)
    except InputError as error:
        raise InputError(f"{entry.place}: {error}") from None
    _check_rate(entry, warmup, decay, steps)
    setting = _setting(base, schedule, text, parent)
    try:
        name = entry.name or name_of(setting)
    except ValueError as error:
        raise InputError(f"{entry.place}: {error}; give it a `name`") from None
    if rate is not None:
        stem, mark, seed = name.partition("-seed")
        name = f"{stem}-lr{rate_name(rate)}{mark}{seed}"
    check_name(f"{entry.place}: field `name`", name)
    for step in entry.checkpoints:
        if not 0 < step <= steps - decay:
            raise InputError(
                f"{entry.place}: field `checkpoints`: found {step}, expected 1 to {steps - decay}: then {name} decays"
            )
    flags = {key: value for key, value in given.items() if not key.startswith(("lr_warmup", "lr_wsd_decay"))}
    return Model(
        name=name,
        setting=setting,
        flags=flags,
        run=run,
        schedule=text,
        phases=_phases(schedule),
        warmup=warmup,
        decay=decay,
        after=parent.name if parent else "",
        checkpoints=entry.checkpoints,
        group=entry.group,
        evaluate=entry.evaluate,
        inferred=entry.inferred,
        own=_own(entry, rate, parent),
    )


def _own(entry: Entry, rate: float | None, parent: Model | None) -> str:
    flags = {**entry.pretrain, **({} if rate is None else {"lr": rate})}
    words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in flags.items()]
    before = [parent.own, f"after {parent.setting.schedule}" if parent.setting.schedule else ""] if parent else []
    return ", ".join(filter(None, [*words, *before]))


def _check_rate(entry: Entry, warmup: int, decay: int, steps: int) -> None:
    if decay < 1:
        raise InputError(f"{entry.place}: a decay of {decay} steps, expected 1 or more (lr_wsd_decay_iters)")
    if warmup + decay > steps:
        what = f"a decay of {decay} steps" if decay > steps else f"a warm-up of {warmup} and a decay of {decay} steps"
        raise InputError(f"{entry.place}: {what} in a run of {steps}, expected to fit (lr_warmup_iters, lr_wsd_decay_iters)")


def _setting(base: Setting, schedule: Schedule, text: str, parent: Model | None) -> Setting:
    """The columns of the tables, and the schedule itself where they cannot say it."""
    phases, total = _phases(schedule), schedule.phases[-1].last_step
    clm_steps = round(sum(part.steps for phase in phases for part in phase.parts if part.name == "clm"))
    masking = [part for phase in phases for part in phase.parts if part.seen == 1]
    masked = sum(part.steps for part in masking)
    mask = round(sum(part.steps * part.predicted for part in masking) / masked, 6) if masked else None
    names = [_usual(phase) for phase in schedule.phases]
    if parent is None:
        schedule_text = "" if names in (["clm"], ["mlm"], ["clm", "mlm"]) else text
        return replace(base, clm_steps=clm_steps, mlm_steps=total - clm_steps, mask_ratio=mask, schedule=schedule_text)
    same = names == ["mlm"] and base.mask_ratio in (None, mask) and not base.schedule
    return replace(base, cpt_mlm_steps=total, mask_ratio=mask, schedule="" if same else text)


def _usual(phase: Phase) -> str:
    """The name of the one objective of a phase that the columns can say, MLM with any mask ratio; "" for what they cannot."""
    (first, *others) = phase.choices
    fixed = [field.name for field in first.start.options() if getattr(first.start, field.name) != field.default]
    return first.start.name if not others and first.start == first.end and set(fixed) <= {"mask"} else ""


def _phases(schedule: Schedule) -> tuple[Trained, ...]:
    found = []
    for phase in schedule.phases:
        pairs = zip(phase.choices, phase.shares, strict=True)
        parts = tuple(_part(choice.start, choice.end, len(phase) * share) for choice, share in pairs)
        found.append(Trained(phase.text, phase.last_step, any(choice.start != choice.end for choice in phase.choices), parts))
    return tuple(found)


def _part(start: Objective, end: Objective, steps: float) -> Part:
    """What `steps` steps train that go from the options of `start` to those of `end`."""
    predicted, seen = 1.0, {Attention.CAUSAL: 0.0, Attention.BIDIRECTIONAL: 1.0}.get(start.attention)
    if hasattr(start, "mask"):
        predicted = (start.mask + end.mask) / 2
    if start.attention is Attention.PREFIX:
        low, high = getattr(start, "low", 0.0), getattr(start, "high", 1.0)
        predicted, seen = 1 - (low + high) / 2, (low * low + low * high + high * high) / 3
    return Part(start.name, steps, predicted, seen)


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"
