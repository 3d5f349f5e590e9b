"""The models of a manifest: an entry's lists in every combination, each worked out to a schedule, a learning rate and a name."""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megaenc.data.packing.packed_dataset import SHORTEST_CHUNK, mean_squared_chunk_lengths
from megaenc.errors import InputError, closest_match
from megaenc.estimate.layout_case import PhaseWork, phases
from megaenc.estimate.length_model import LengthModel
from megaenc.finetune.config import format_learning_rate
from megaenc.study.manifest.model_key import ModelKey, format_model_name
from megaenc.study.manifest.pretrain_args import build_run_config, check_run_config, prefix_errors, warmup_and_decay_steps
from megaenc.training.config import PretrainConfig

_MAX_MODELS, _MAX_CHECKPOINTS = 1_000, 10_000
_PLACEHOLDER_VOCAB_SIZE = 1024  # schedules are read before there is a tokenizer: any vocabulary will do
_STANDARD_OBJECTIVE = re.compile(r"(clm|mlm)(\(mask=[^,>]*\))?")  # objectives that the columns can say
_MAX_NAME_BYTES = 180  # bytes, of the 255 that a file's name may have
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of a folder, and of a part of the names of stages and results


@dataclass(frozen=True)
class ManifestEntry:
    """One item of `models`: every combination of its lists is a model; one value stands for a list of one."""

    size: tuple[str, ...] = ()
    """sizes, as `sizes` names them; a continued model has its parent's"""
    steps: tuple[int, ...] = ()
    """optimizer steps of the run (its budget); of a continued model those after its parent's end"""
    clm_share: tuple[float, ...] = ()
    """share of the steps that CLM has before MLM, 0 to 1 (half a step is rounded up)"""
    clm_steps: tuple[int, ...] = ()
    """or the steps themselves"""
    mask: tuple[float, ...] = ()
    """share of the tokens that MLM hides"""
    schedule: str = ""
    """instead of these three, what --objective-schedule takes: alternations, mixtures, mntp, ratios that change"""
    after: tuple[str, ...] = ()
    """names of models that are continued from their decayed end: MLM, or `schedule`, with a new optimizer and without warm-up"""
    peak_rate: tuple[float, ...] = ()
    """peak learning rates to compare; the name ends in it"""
    seed: tuple[int, ...] = (1,)
    """of the pretraining: initial weights, order of the data and masks"""
    checkpoints: tuple[int, ...] = ()
    """steps on the way, not decayed yet, that are evaluated too"""
    name: str = ""
    """name of the one model, where it should have another than its setting's"""
    group: str = ""
    """what it is counted under"""
    evaluate: bool = True
    """false for a model that is only continued"""
    inferred: bool = False
    """true where a reproduction had to guess that this model was there"""
    pretrain: dict = field(default_factory=dict)
    """flags of `megaenc pretrain` for these models alone"""
    place: str = ""
    """where in the manifest it stands; not a key"""


@dataclass(frozen=True)
class PlannedModel:
    """A model of the study: the end of one pretraining run, which may have begun as another's."""

    name: str
    key: ModelKey
    flags: Mapping[str, Any] = field(repr=False)
    """Of `megaenc pretrain`, of every run of this model: without schedule, steps, seed, warm-up, decay, start and folder."""
    run: PretrainConfig = field(repr=False)
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
    distinguishing_flags: str
    """What its columns do not say: `lr=0.002, weight_decay=0` by `peak_rate` or its entry's `pretrain`, and its parent's."""

    @property
    def steps(self) -> int:
        """Of its own run; the parent's are not counted."""
        return self.phases[-1].last

    @property
    def last_undecayed_step(self) -> int:
        """Return the last step before the rate falls: up to there a run can be shared."""
        return self.steps - self.decay

    def checkpoint_key(self, step: int) -> ModelKey:
        on_the_way = replace(self.key, decayed=False, budget=self.steps)
        if self.key.cpt_mlm_steps:
            return replace(on_the_way, cpt_mlm_steps=step)
        clm = round(sum(share * _count_clm_steps(phase) for phase, share in self.phase_shares(0, step)))
        mask = self.key.mask_ratio if clm < step else None
        return replace(on_the_way, clm_steps=clm, mlm_steps=step - clm, mask_ratio=mask)

    def phase_shares(self, after: int, last: int) -> list[tuple[PhaseWork, float]]:
        """Return each phase with the share of it that the steps after + 1..last train."""
        lengths = [max(0, min(last, phase.last) - max(after, phase.first - 1)) for phase in self.phases]
        return [(phase, made / (phase.last - phase.first + 1)) for phase, made in zip(self.phases, lengths, strict=True)]

    def checkpoint_name(self, step: int) -> str:
        stem, mark, seed = self.name.rpartition("-seed")
        return f"{stem}-{step}-seed{seed}" if mark else f"{self.name}-{step}"


def expand_models(
    entries: Sequence[ManifestEntry], sizes: Mapping[str, Any], pretrain: Mapping[str, Any]
) -> tuple[PlannedModel, ...]:
    """Every model of a manifest, parents before those that continue them. Raises InputError in one line."""
    for size in sizes:
        _check_name("sizes", size)
    models: dict[str, PlannedModel] = {}
    place_of: dict[str, str] = {}
    count = checkpoints = 0
    for entry in sorted(entries, key=lambda entry: bool(entry.after)):  # stable: otherwise in the order of the file
        with prefix_errors(entry.place):
            _check_entry(entry)
            count += _count_models(entry)
            checkpoints += _count_models(entry) * len(entry.checkpoints)
            for number, most, what in ((count, _MAX_MODELS, "models"), (checkpoints, _MAX_CHECKPOINTS, "checkpoints")):
                if number > most:
                    raise InputError(f"makes more than {most:,} {what} with those before it, expected fewer")
            made = list(_expand_entry(entry, models, sizes, pretrain))
            if entry.name and len(made) > 1:
                raise InputError(f"field `name`: found {entry.name} for {len(made)} models, expected an entry of one")
            for model in made:
                for name in (model.name, *map(model.checkpoint_name, model.checkpoints)):
                    if name in place_of:
                        raise InputError(f"model {name} is there already ({place_of[name]}), expected each name once")
                    place_of[name] = entry.place
                models[model.name] = model
    return _disambiguate_keys(models.values())


def _check_entry(entry: ManifestEntry) -> None:
    """Raise InputError for what says nothing, two things, or a number that cannot be."""
    for name, right, expected in (
        ("steps", lambda value: value >= 1, "1 or more"),
        ("checkpoints", lambda value: value >= 1, "1 or more"),
        ("clm_share", lambda value: 0 <= value <= 1, "a share from 0 to 1"),
        ("clm_steps", lambda value: value >= 0, "0 or more"),
        ("mask", lambda value: 0 < value <= 1, "a share above 0, at most 1"),
        ("peak_rate", lambda value: 0 < value < math.inf, "a rate above 0"),
        ("seed", lambda value: value >= 0, "0 or more"),
    ):
        for value, times in Counter(getattr(entry, name)).items():
            if not right(value):
                raise InputError(f"field `{name}`: found {value:g}, expected {expected}")
            if times > 1:
                raise InputError(f"field `{name}`: found {value:g} twice, expected each once")
    if not entry.steps:
        raise InputError("field `steps`: missing, expected the optimizer steps of the run")
    if not entry.seed:
        raise InputError("field `seed`: found none, expected at least one")
    for name, others, expected in (
        ("schedule", ("clm_share", "clm_steps", "mask"), "one of them"),
        ("clm_share", ("clm_steps",), "one of them"),
        ("after", ("size", "clm_share", "clm_steps"), "`mask` or a `schedule`: the rest is the parent's"),
    ):
        given = [other for other in others if getattr(entry, other)]
        if getattr(entry, name) and given:
            raise InputError(f"found `{given[0]}` beside `{name}`, expected {expected}")
    if entry.after and entry.seed != ManifestEntry.seed:
        raise InputError("found `seed` beside `after`: a continued model has its parent's")
    if not entry.after and not entry.size:
        raise InputError("field `size`: missing, expected a name of `sizes`, or `after` with a model that is continued")


def _check_name(field: str, name: str) -> None:
    """Raise InputError for a name that cannot be one of folders in a study, and part of the names of files."""
    if not _NAME.fullmatch(name):
        found = f"field `{field}`: found {repr(name)[:60]}"
        raise InputError(f"{found}, expected letters, digits and . _ - (it is the name of folders)")
    if len(name.encode()) > _MAX_NAME_BYTES:
        found = f"field `{field}`: found {name[:40]}... of {len(name)} letters"
        raise InputError(f"{found}, expected at most {_MAX_NAME_BYTES} bytes; give it a `name`")


def _count_models(entry: ManifestEntry) -> int:
    """Return how many models an entry makes at most: every combination of its lists."""
    lists = (entry.size, entry.steps, entry.clm_share or entry.clm_steps, entry.mask, entry.peak_rate, entry.seed, entry.after)
    return math.prod(max(1, len(values)) for values in lists)


def _disambiguate_keys(models: Iterable[PlannedModel]) -> tuple[PlannedModel, ...]:
    """Return the models, in their order, no setting of which, or of checkpoints on their way, stands for two ways of training.

    Of those with the same columns the one without flags of its own keeps them. For the others these become part of the
    `schedule`, by which they are shown in a table of their own, beside those of the study and its claims.
    """
    settings = [
        (model, [model.key] * model.evaluate + [model.checkpoint_key(step) for step in model.checkpoints]) for model in models
    ]
    ways: dict[ModelKey, set[str]] = defaultdict(set)
    for model, of_model in settings:
        for setting in of_model:
            ways[setting].add(model.distinguishing_flags)
    found = []
    for model, of_model in settings:
        if model.distinguishing_flags and any(len(ways[setting]) > 1 for setting in of_model):
            schedule = f"{model.key.schedule or model.schedule} with {model.distinguishing_flags}"
            model = replace(model, key=replace(model.key, schedule=schedule))
        found.append(model)
    return tuple(found)


def _expand_entry(
    entry: ManifestEntry, models: Mapping[str, PlannedModel], sizes: Mapping[str, Any], pretrain: Mapping[str, Any]
) -> Iterator[PlannedModel]:
    """Return every model of an entry; `models` are those that it may continue."""
    runs: dict[tuple, PretrainConfig] = {}  # reading flags takes most of a model's time
    begins, rates = entry.after or entry.size, entry.peak_rate or (None,)
    for begin, steps, rate, seed in itertools.product(begins, entry.steps, rates, entry.seed):
        parent = models.get(begin) if entry.after else None
        if entry.after and not parent:
            raise InputError(f"field `after`: found {begin}{format_suggestion(begin, models)}")
        if parent and parent.after:
            raise InputError(f"field `after`: found {begin}, which is continued itself; give one longer `schedule`")
        base = parent.key if parent else ModelKey(begin, seed=seed)
        if base.size not in sizes:
            raise InputError(f"field `size`: found {base.size}{format_suggestion(base.size, sizes)}")
        own = {**entry.pretrain, **({} if rate is None else {"lr": rate})}
        cold = {"lr_warmup_iters": 0, "lr_warmup_fraction": None} if parent else {}
        given = {**pretrain, **sizes[base.size], **cold, **own}
        if (base.size, rate) not in runs:
            runs[base.size, rate] = build_run_config(given)
            check_run_config(runs[base.size, rate])
        run = runs[base.size, rate]
        warmup, decay = warmup_and_decay_steps(run.optimizer, steps)
        words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in own.items()]
        if parent:
            words += [parent.distinguishing_flags, f"after {parent.key.schedule}" if parent.key.schedule else ""]
        for text in _build_schedules(entry, steps):
            whole = replace(run, objective_schedule=text, train_iters=steps, seed=base.seed)
            trained = tuple(phases(whole, _PLACEHOLDER_VOCAB_SIZE, expected_length_model(run)))
            setting = _build_model_key(base, trained, text, parent)
            name = _build_model_name(entry, setting, rate)
            if late := [step for step in entry.checkpoints if step > steps - decay]:
                last = f"expected 1 to {steps - decay}: then {name} decays"
                raise InputError(f"field `checkpoints`: found {late[0]}, {last}")
            yield PlannedModel(
                name=name,
                key=setting,
                flags={key: value for key, value in given.items() if not key.startswith(("lr_warmup", "lr_wsd_decay"))},
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
                distinguishing_flags=", ".join(filter(None, words)),
            )


def _build_schedules(entry: ManifestEntry, steps: int) -> list[str]:
    """As --objective-schedule has them, in steps where there are two objectives."""
    if entry.schedule:
        return [entry.schedule]
    if entry.clm_steps and max(entry.clm_steps) > steps:
        raise InputError(f"field `clm_steps`: found {max(entry.clm_steps)}, expected at most the {steps} steps of the run")
    clm = entry.clm_steps or [math.floor(share * steps + 0.5) for share in entry.clm_share or (0.0,)]
    if min(clm) < steps and not entry.mask:
        expected = "the share that MLM hides, or a `schedule`" if entry.after else "the share of the tokens that MLM hides"
        raise InputError(f"field `mask`: missing, expected {expected}")
    found = []
    for count, mask in itertools.product(clm, entry.mask or (None,)):
        mlm = f"mlm(mask={mask:g})" if count < steps else ""
        found.append(f"clm:{count},{mlm}:{steps - count}" if mlm and count else mlm or "clm")
    return list(dict.fromkeys(found))  # CLM alone is the same for every mask ratio


def _build_model_name(entry: ManifestEntry, setting: ModelKey, rate: float | None) -> str:
    try:
        name = entry.name or format_model_name(setting)
    except ValueError as error:
        raise InputError(f"{error}; give it a `name`") from None
    if rate is not None:
        stem, mark, seed = name.partition("-seed")
        name = f"{stem}-lr{format_learning_rate(rate)}{mark}{seed}"
    _check_name("name", name)
    return name


def expected_length_model(run: PretrainConfig) -> LengthModel:
    """Return how documents lie in packs as far as that is known without a corpus: cut at random into two, else one each.

    Attention of one document is at most some percent too much.
    """
    length = run.data.seq_length
    cut = run.data.packing == "random-length" and length >= 2 * SHORTEST_CHUNK
    return LengthModel(mean_squared_chunk_lengths(length) if cut else float(length * length), 0.0, 0.0, "")


def _build_model_key(base: ModelKey, trained: Sequence[PhaseWork], text: str, parent: PlannedModel | None) -> ModelKey:
    """Return the columns of the tables, and the schedule itself where they cannot say it."""
    clm_steps, total = round(sum(map(_count_clm_steps, trained))), trained[-1].last
    masking = [(work, steps) for phase in trained for work, steps in phase.parts if work.seen == work.squares]
    masked = sum(steps for _, steps in masking)
    mask = round(sum(steps * work.predicted / work.tokens for work, steps in masking) / masked, 6) if masked else None
    plain = [match[1] if (match := _STANDARD_OBJECTIVE.fullmatch(phase.text)) else "" for phase in trained]
    if parent is None:
        schedule = "" if plain in (["clm"], ["mlm"], ["clm", "mlm"]) else text
        return replace(base, clm_steps=clm_steps, mlm_steps=total - clm_steps, mask_ratio=mask, schedule=schedule)
    same = plain == ["mlm"] and base.mask_ratio in (None, mask) and not base.schedule
    return replace(base, cpt_mlm_steps=total, mask_ratio=mask, schedule="" if same else text)


def _count_clm_steps(phase: PhaseWork) -> float:
    return sum(steps for work, steps in phase.parts if work.objective == "clm")


def format_suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about a `name` that is not `known`: the nearest that is, or all of them."""
    near = closest_match(name, known)
    return f", did you mean {near}?" if near else f", expected one of {', '.join(known)}"
