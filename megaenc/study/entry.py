"""An entry of a manifest's models, as it is written."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from megaenc.errors import InputError

_LONGEST_NAME = 180  # bytes, of the 255 that a file's name may have
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of a folder, and of a part of the names of stages and results


@dataclass(frozen=True)
class Entry:
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


def check_entry(entry: Entry) -> None:
    """InputError for what says nothing, two things, or a number that cannot be."""
    where = entry.place
    for name, values, right, expected in (
        ("steps", entry.steps, lambda value: value >= 1, "1 or more"),
        ("checkpoints", entry.checkpoints, lambda value: value >= 1, "1 or more"),
        ("clm_share", entry.clm_share, lambda value: 0 <= value <= 1, "a share from 0 to 1"),
        ("clm_steps", entry.clm_steps, lambda value: value >= 0, "0 or more"),
        ("mask", entry.mask, lambda value: 0 < value <= 1, "a share above 0, at most 1"),
        ("peak_rate", entry.peak_rate, lambda value: 0 < value < math.inf, "a rate above 0"),
        ("seed", entry.seed, lambda value: value >= 0, "0 or more"),
    ):
        counts = Counter(values)
        for value in values:
            if not right(value):
                raise InputError(f"{where}: field `{name}`: found {value:g}, expected {expected}")
            if counts[value] > 1:
                raise InputError(f"{where}: field `{name}`: found {value:g} twice, expected each once")
    if not entry.steps:
        raise InputError(f"{where}: field `steps`: missing, expected the optimizer steps of the run")
    if not entry.seed:
        raise InputError(f"{where}: field `seed`: found none, expected at least one")
    for name, others, expected in (
        ("schedule", ("clm_share", "clm_steps", "mask"), "one of them"),
        ("clm_share", ("clm_steps",), "one of them"),
        ("after", ("size", "clm_share", "clm_steps"), "`mask` or a `schedule`: the rest is the parent's"),
    ):
        given = [other for other in others if getattr(entry, other)]
        if getattr(entry, name) and given:
            raise InputError(f"{where}: found `{given[0]}` beside `{name}`, expected {expected}")
    if entry.after and entry.seed != Entry.seed:
        raise InputError(f"{where}: found `seed` beside `after`: a continued model has its parent's")
    if not entry.after and not entry.size:
        raise InputError(f"{where}: field `size`: missing, expected a name of `sizes`, or `after` with a model that is continued")


def check_name(place: str, name: str) -> None:
    """Raise InputError for a name that cannot be one of folders in a study, and part of the names of files."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{place}: found {repr(name)[:60]}, expected letters, digits and . _ - (it is the name of folders)")
    if len(name.encode()) > _LONGEST_NAME:
        raise InputError(
            f"{place}: found {name[:40]}... of {len(name)} letters, expected at most {_LONGEST_NAME} bytes; give it a `name`"
        )


def count_models(entry: Entry) -> int:
    """Return how many models an entry makes at most: every combination of its lists."""
    lists = (entry.size, entry.steps, entry.clm_share or entry.clm_steps, entry.mask, entry.peak_rate, entry.seed, entry.after)
    return math.prod(max(1, len(values)) for values in lists)
