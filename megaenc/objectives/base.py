"""An objective says which positions of a pack predict which tokens, under which attention; objectives differ in nothing else."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, closest_match


class Attention(StrEnum):
    """What a position sees of its own document: itself and what comes before, everything, or what comes before and a prefix.

    Under PREFIX the first tokens of a document (`Targets.prefixes` says how many) see each other, the rest is causal.
    """

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    PREFIX = "prefix"


class Targets(NamedTuple):
    """What a pack of T tokens in D documents asks of the model; N = 0 is legal.

    inputs: int64[T], what the model reads; predict_at: int64[N], increasing, the positions whose output is scored;
    labels: int64[N], the token each of them should predict; prefixes: int64[D], under Attention.PREFIX and no other, how many
    tokens at the start of each document see each other, from 0 to its length less one.
    """

    inputs: np.ndarray
    predict_at: np.ndarray
    labels: np.ndarray
    prefixes: np.ndarray | None = None


class OptionError(InputError):
    """An option of an objective cannot be used; `option` is its name."""

    def __init__(self, objective: str, option: str, complaint: str):
        super().__init__(f"{objective}: option `{option}`: {complaint}")
        self.option = option


def option(default: Any, help: str, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Any:
    """An option, declared as a field: a bool, int, float or str by its default; `above` < value, `low` <= value <= `high`."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "above": above})


@dataclass(frozen=True)
class Objective(ABC):
    """Base of all objectives: a frozen dataclass whose fields after `vocabulary` are its options, declared with `option`.

    Constructing one checks the options: OptionError for a wrong one, InputError where the vocabulary does not suit.
    """

    name: ClassVar[str]
    """As the schedule spells it."""
    attention: ClassVar[Attention]
    shift: ClassVar[int] = 0
    """How far before its token a prediction stands: the labels are the pack's tokens at predict_at + shift."""

    vocabulary: Vocabulary

    @abstractmethod
    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """The Targets of one pack: a pure function of its arguments."""

    def __post_init__(self) -> None:
        for field in self.options():
            self._check(field, getattr(self, field.name))

    @classmethod
    def options(cls) -> tuple[dataclasses.Field, ...]:
        """The options in the order of declaration; `metadata["help"]` says what each does."""
        return dataclasses.fields(cls)[1:]

    @classmethod
    def from_texts(cls, vocabulary: Vocabulary, texts: dict[str, str]) -> "Objective":
        """Construct from options as a schedule spells them, say {"mask": "0.3"}."""
        known = {field.name: field for field in cls.options()}
        values = {}
        for name, text in texts.items():
            if name not in known:
                near = closest_match(name, known)
                hint = f"; did you mean `{near}`?" if near else ""
                raise OptionError(cls.name, name, f"unknown, expected {', '.join(known) or 'no option at all'}{hint}")
            values[name] = cls._read(known[name], text)
        return cls(vocabulary, **values)

    def interpolate(self, end: "Objective", share: float) -> "Objective":
        """This objective with its options moved towards those of `end`, 0 <= share <= 1 of the way, in a straight line.

        Whole numbers are rounded, half up. OptionError where what lies between cannot be used.
        """
        changed = {}
        for field in self.options():
            here, there = getattr(self, field.name), getattr(end, field.name)
            if here != there:
                value = here * (1 - share) + there * share
                value = math.floor(value + 0.5) if type(field.default) is int else value
                changed[field.name] = min(max(value, min(here, there)), max(here, there))  # rounding may step over an end
        return dataclasses.replace(self, **changed) if changed else self

    def describe(self, every: bool = False, end: "Objective | None" = None) -> str:
        """As a schedule spells it, `mlm(mask=0.3)`: with the options that differ from their defaults, or with `every` option.

        With an `end` that differs, options that change on the way to it read `mask=0.4->0.15`.
        """
        inside = []
        for field in self.options():
            here, there = getattr(self, field.name), getattr(end or self, field.name)
            if every or here != there or here != field.default:
                values = (here,) if here == there else (here, there)
                inside.append(f"{field.name}={'->'.join(_format_value(type(field.default)(value)) for value in values)}")
        return f"{self.name}({','.join(inside)})" if inside else self.name

    @classmethod
    def _read(cls, field: dataclasses.Field, text: str) -> Any:
        kind = type(field.default)
        try:
            if kind in (int, float) and "_" in text:  # Python reads 0_1 as 01
                raise ValueError
            value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
            return value + 0 if kind is float else value  # -0 is 0, so that equal options are spelled alike
        except (KeyError, ValueError):
            raise OptionError(cls.name, field.name, f"found `{text}`, expected {_format_expected(field)}") from None

    @classmethod
    def _check(cls, field: dataclasses.Field, value: Any) -> None:
        kind = type(field.default)
        right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
        if right and kind in (int, float):
            limits = field.metadata
            right = math.isfinite(value) and limits["low"] <= value <= limits["high"] and value > limits["above"]
        if not right:
            raise OptionError(cls.name, field.name, f"found {_format_value(value)}, expected {_format_expected(field)}")


def _format_expected(field: dataclasses.Field) -> str:
    kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[type(field.default)]
    limits = field.metadata
    bounds = [(limits["above"], "above"), (limits["low"], "from"), (limits["high"], "up to")]
    words = [kind, *(f"{word} {_format_value(bound)}" for bound, word in bounds if math.isfinite(bound))]
    return f"{' '.join(words)} ({limits['help']})"


def _format_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
