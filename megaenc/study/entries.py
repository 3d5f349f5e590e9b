"""The models of a manifest: an entry's lists in every combination, each worked out to a schedule, a learning rate and a name."""

import difflib
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaenc.data.packs import SHORTEST_CHUNK, mean_squares_of_chunks
from megaenc.errors import InputError
from megaenc.estimate.case import PhaseWork, phases
from megaenc.estimate.documents import Documents
from megaenc.finetune.jobs import rate_name
from megaenc.study.entry import Entry, check_entry, check_name, count_models
from megaenc.study.pretrain_flags import check_plan_flags, located_errors, rate_steps, run_flags
from megaenc.study.setting import Setting, name_of
from megaenc.training.settings import PretrainSettings

_MOST_MODELS, _MOST_CHECKPOINTS = 1_000, 10_000
_ANY_IDS = 1024  # schedules are read before there is a tokenizer: any vocabulary will do
_PLAIN = re.compile(r"(clm|mlm)(\(mask=[^,>]*\))?")  # objectives that the columns can say


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
    phases: tuple[PhaseWork, ...]
    """What these train, as counted before the corpus is known: packs cut at random have two documents, others are one."""
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
        return self.phases[-1].last

    @property
    def undecayed(self) -> int:
        """The last step before the rate falls: up to there a run can be shared."""
        return self.steps - self.decay

    def checkpoint_setting(self, step: int) -> Setting:
        """What its checkpoint of `step` is."""
        if self.setting.cpt_mlm_steps:
            return replace(self.setting, cpt_mlm_steps=step, decayed=False, budget=self.steps)
        clm = sum(share * _clm_steps(phase) for phase, share in self.trained(0, step))
        mask = self.setting.mask_ratio if round(clm) < step else None
        return replace(
            self.setting, clm_steps=round(clm), mlm_steps=step - round(clm), mask_ratio=mask, decayed=False, budget=self.steps
        )

    def trained(self, after: int, last: int) -> list[tuple[PhaseWork, float]]:
        """Return each phase with the share of it that the steps after + 1..last train."""
        lengths = [max(0, min(last, phase.last) - max(after, phase.first - 1)) for phase in self.phases]
        return [(phase, made / (phase.last - phase.first + 1)) for phase, made in zip(self.phases, lengths, strict=True)]

    def checkpoint_name(self, step: int) -> str:
        """The name of its checkpoint of `step`: the model's, then the step."""
        stem, mark, seed = self.name.rpartition("-seed")
        return f"{stem}-{step}-seed{seed}" if mark else f"{self.name}-{step}"


def models_of(entries: Sequence[Entry], sizes: Mapping[str, Any], pretrain: Mapping[str, Any]) -> tuple[Model, ...]:
    """Every model of a manifest, parents before those that continue them. Raises InputError in one line."""
    for size in sizes:
        check_name("field `sizes`", size)
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
        made = _expand(entry, models, sizes, pretrain)
        if entry.name and len(made) > 1:
            raise InputError(f"{entry.place}: field `name`: found {entry.name} for {len(made)} models, expected an entry of one")
        for model in made:
            for name in (model.name, *map(model.checkpoint_name, model.checkpoints)):
                if name in place_of:
                    raise InputError(f"{entry.place}: model {name} is there already ({place_of[name]}), expected each name once")
                place_of[name] = entry.place
            models[model.name] = model
    return set_apart(models.values())


def set_apart(models: Iterable[Model]) -> tuple[Model, ...]:
    """Return the models, in their order, no setting of which, or of checkpoints on their way, stands for two ways of training.

    Of those with the same columns the one without flags of its own keeps them. For the others these become part of the
    `schedule`, by which they are shown in a table of their own, beside those of the study and its claims.
    """
    settings = [
        (model, [model.setting] * model.evaluate + [model.checkpoint_setting(step) for step in model.checkpoints])
        for model in models
    ]
    flags: dict[Setting, set[str]] = defaultdict(set)
    for model, of_model in settings:
        for setting in of_model:
            flags[setting].add(model.own)
    found = []
    for model, of_model in settings:
        if model.own and any(len(flags[setting]) > 1 for setting in of_model):
            schedule = f"{model.setting.schedule or model.schedule} with {model.own}"
            model = replace(model, setting=replace(model.setting, schedule=schedule))
        found.append(model)
    return tuple(found)


def _expand(entry: Entry, models: Mapping[str, Model], sizes: Mapping[str, Any], pretrain: Mapping[str, Any]) -> list[Model]:
    """Return every model of an entry; `models` are those that it may continue."""
    made = []
    runs: dict[tuple, PretrainSettings] = {}  # reading flags takes most of a model's time
    begins, rates = entry.after or entry.size, entry.peak_rate or (None,)
    for begin, steps, rate, seed in itertools.product(begins, entry.steps, rates, entry.seed):
        parent = _parent(entry, begin, models) if entry.after else None
        base = parent.setting if parent else Setting(begin, seed=seed)
        if base.size not in sizes:
            raise InputError(f"{entry.place}: field `size`: found {base.size}{nearest(base.size, sizes)}")
        own = {"lr_warmup_iters": 0, "lr_warmup_fraction": None} if parent else {}
        own |= {**entry.pretrain, **({} if rate is None else {"lr": rate})}
        given = {**pretrain, **sizes[base.size], **own}
        if (base.size, rate) not in runs:
            with located_errors(entry.place):
                runs[base.size, rate] = run_flags(given)
                check_plan_flags(runs[base.size, rate])
        run = runs[base.size, rate]
        made += [_model(entry, base, schedule, steps, given, run, rate, parent) for schedule in _schedules(entry, steps)]
    return made


def _parent(entry: Entry, name: str, models: Mapping[str, Model]) -> Model:
    if name not in models:
        raise InputError(f"{entry.place}: field `after`: found {name}{nearest(name, models)}")
    if models[name].after:
        raise InputError(f"{entry.place}: field `after`: found {name}, which is continued itself; give one longer `schedule`")
    return models[name]


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


def _model(
    entry: Entry,
    base: Setting,
    text: str,
    steps: int,
    given: dict[str, Any],
    run: PretrainSettings,
    rate: float | None,
    parent: Model | None,
) -> Model:
    """Return the model that trains `text` for `steps` steps from `parent`, or from new weights; `base`: what it is before."""
    with located_errors(entry.place):
        warmup, decay = rate_steps(run.optimizer, steps)
        whole = replace(run, objective_schedule=text, train_iters=steps, seed=base.seed)
        trained = tuple(phases(whole, _ANY_IDS, expected_documents(run)))
    setting = _setting(base, trained, text, parent)
    try:
        name = entry.name or name_of(setting)
    except ValueError as error:
        raise InputError(f"{entry.place}: {error}; give it a `name`") from None
    if rate is not None:
        stem, mark, seed = name.partition("-seed")
        name = f"{stem}-lr{rate_name(rate)}{mark}{seed}"
    check_name(f"{entry.place}: field `name`", name)
    if late := [step for step in entry.checkpoints if step > steps - decay]:
        last = f"expected 1 to {steps - decay}: then {name} decays"
        raise InputError(f"{entry.place}: field `checkpoints`: found {late[0]}, {last}")
    flags = {key: value for key, value in given.items() if not key.startswith(("lr_warmup", "lr_wsd_decay"))}
    return Model(
        name=name,
        setting=setting,
        flags=flags,
        run=run,
        schedule=text,
        phases=trained,
        warmup=warmup,
        decay=decay,
        after=parent.name if parent else "",
        checkpoints=entry.checkpoints,
        group=entry.group,
        evaluate=entry.evaluate,
        inferred=entry.inferred,
        own=_own(entry, rate, parent),
    )


def expected_documents(run: PretrainSettings) -> Documents:
    """Return how documents lie in packs as far as that is known without a corpus: cut at random into two, else one each.

    Attention of one document is at most some percent too much.
    """
    length = run.data.seq_length
    cut = run.data.packing == "random-length" and length >= 2 * SHORTEST_CHUNK
    return Documents(mean_squares_of_chunks(length) if cut else float(length * length), 0.0, 0.0, "")


def _own(entry: Entry, rate: float | None, parent: Model | None) -> str:
    flags = {**entry.pretrain, **({} if rate is None else {"lr": rate})}
    words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in flags.items()]
    before = [parent.own, f"after {parent.setting.schedule}" if parent.setting.schedule else ""] if parent else []
    return ", ".join(filter(None, [*words, *before]))


def _setting(base: Setting, trained: Sequence[PhaseWork], text: str, parent: Model | None) -> Setting:
    """Return the columns of the tables, and the schedule itself where they cannot say it."""
    clm_steps, total = round(sum(map(_clm_steps, trained))), trained[-1].last
    masking = [(work, steps) for phase in trained for work, steps in phase.parts if work.seen == work.squares]
    masked = sum(steps for _, steps in masking)
    mask = round(sum(steps * work.predicted / work.tokens for work, steps in masking) / masked, 6) if masked else None
    plain = [match[1] if (match := _PLAIN.fullmatch(phase.text)) else "" for phase in trained]
    if parent is None:
        schedule = "" if plain in (["clm"], ["mlm"], ["clm", "mlm"]) else text
        return replace(base, clm_steps=clm_steps, mlm_steps=total - clm_steps, mask_ratio=mask, schedule=schedule)
    same = plain == ["mlm"] and base.mask_ratio in (None, mask) and not base.schedule
    return replace(base, cpt_mlm_steps=total, mask_ratio=mask, schedule="" if same else text)


def _clm_steps(phase: PhaseWork) -> float:
    return sum(steps for work, steps in phase.parts if work.objective == "clm")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a `name` that is not `known`: the nearest that is, or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"
