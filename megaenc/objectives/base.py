"""Base class of objectives, with the targets and options that they have.

An objective chooses the predicted positions of a pack, their labels and the attention mask.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from megaenc.counter_rng import SampleRandomness
from megaenc.data.packing.packed_dataset import Pack
from megaenc.data.tokenizer.vocabulary import Vocabulary
from megaenc.errors import InputError, suggest_closest
from megaenc.flags import Bounds


class Attention(StrEnum):
    """Attention mask within each document: causal, bidirectional or prefix.

    It is a StrEnum, whose values are these words. Under prefix attention the first tokens of a
    document, as many as `Targets.prefixes` has, attend to each other, and later ones to all tokens
    before them.
    """

    CAUSAL = "causal"
    BIDIRECTIONAL = "bidirectional"
    PREFIX = "prefix"


class SoftLabels(NamedTuple):
    """Label distributions of N predictions over K token ids each.

    ids: numpy int64[N, K]; probabilities: numpy float32[N, K], 0 or more. The probabilities of a
    row add up to 1. An id that a row holds several times has the sum of its probabilities. All
    packs of an objective have the same K. Only `check_targets` checks this.
    """

    ids: np.ndarray
    probabilities: np.ndarray


class Targets(NamedTuple):
    """Inputs of the model for one pack, and the predictions that are scored.

    For a pack of T tokens in D documents with N >= 0 predictions: inputs: int64[T], token ids that
    the model reads; predict_at: int64[N], increasing positions whose output is scored; labels:
    int64[N], token ids to predict, or classes; prefixes: int64[D], only under Attention.PREFIX,
    number of tokens at the start of each document that see each other, from 0 to its length;
    soft_labels: SoftLabels, whose cross-entropies then are the loss (`labels` count for accuracy).

    The loss of a step is the sum of all cross-entropies times `weights` (float32[N], 0 or more;
    None: 1 each), divided by the sum of the packs' `count`, an int (None: N), which must be above 0
    if there are predictions. So a `count` other than N makes it a mean over other tokens than the
    predicted ones. Only `check_targets` checks the fields.
    """

    inputs: np.ndarray
    predict_at: np.ndarray
    labels: np.ndarray
    prefixes: np.ndarray | None = None
    weights: np.ndarray | None = None
    count: int | None = None
    soft_labels: SoftLabels | None = None

    @property
    def loss_count(self) -> int:
        """Return the number that the pack adds to the divisor of the loss.

        It is `count`, or without it the number of predictions.
        """
        return len(self.labels) if self.count is None else self.count

    @property
    def parts(self) -> tuple[np.ndarray | int | None, ...]:
        """Return all fields in order, `soft_labels` last as two (None, None without them)."""
        return *self[:-1], *(self.soft_labels or (None, None))


class OptionError(InputError):
    """InputError for an unknown option of an objective or an unusable value.

    `option` holds the option's name. The message is "objective: option `option`: complaint".

    Args:
        objective: Name of the objective.
        option: Name of the option.
        complaint: End of the message.
    """

    def __init__(self, objective: str, option: str, complaint: str):
        super().__init__(f"{objective}: option `{option}`: {complaint}")
        self.option = option


def option(
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> Any:
    """Return the dataclass field of an objective's option, typed by its default.

    Values, the default too, are checked when an objective is built.

    Args:
        default: Value without the option: a bool, int, float or str. Other values have its type; a
            float may be an int.
        help: Meaning of the option, which errors about it quote.
        low: Smallest number that is allowed.
        high: Largest number that is allowed.
        above: Number that all allowed ones exceed.
        below: Number that exceeds all allowed ones.
    """
    return dataclasses.field(
        default=default, metadata={"help": help, "bounds": Bounds(low, high, above, below)}
    )


@dataclass(frozen=True)
class Objective(ABC):
    """Base class of training objectives.

    A subclass is a frozen dataclass with the class attributes `name`, `attention`, `shift`
    (distance from a prediction to its token, by default 0) and `classes` (number of classes of the
    labels; 0, the default: they are tokens), the method `targets`, and `files` if that reads any.
    Its fields after `vocabulary` are the options, declared with `option`. The constructor checks
    them; a `__post_init__` with more checks calls that of this class. `megaenc.objectives.register`
    as its decorator makes a schedule find it by `name`.

    Raises:
        OptionError: An option has a wrong value.
        InputError: The vocabulary is unsuitable.
    """

    name: ClassVar[str]
    """Name in a schedule."""
    attention: ClassVar[Attention]
    shift: ClassVar[int] = 0
    """Distance from a prediction to its token: the labels are the pack's tokens at predict_at +
    shift."""
    classes: ClassVar[int] = 0
    """Number of classes that the labels are of, from 0; 0: they are tokens. The first rows of the
    output layer are theirs."""

    vocabulary: Vocabulary

    @abstractmethod
    def targets(self, pack: Pack, randomness: SampleRandomness) -> Targets:
        """Return the inputs, scored positions, labels and prefixes of one pack.

        They are a pure function of the arguments and the options: all draws come from `randomness`,
        which is that of the pack. `pack` is not changed.
        """

    def files(self) -> tuple[Path, ...]:
        """Return the files that `targets` reads, none by default.

        A run's identity holds hashes of their contents.
        """
        return ()

    def __post_init__(self) -> None:
        """Check all options, and that the output layer has rows for the classes.

        Raises:
            OptionError: An option has a wrong value.
            InputError: The vocabulary is too small.
        """
        for field in self.options():
            self._check_option(field, getattr(self, field.name))
        if self.classes > self.vocabulary.size:
            raise InputError(
                f"{self.name}: found {self.classes} classes, expected at most "
                f"{self.vocabulary.size}, the vocabulary"
            )

    @classmethod
    def options(cls) -> tuple[dataclasses.Field, ...]:
        """Return the dataclass fields of the options, in order of declaration.

        Their `metadata` holds `help`, a text, and `bounds`, a Bounds.
        """
        return dataclasses.fields(cls)[1:]

    @classmethod
    def from_texts(cls, vocabulary: Vocabulary, texts: dict[str, str]) -> "Objective":
        """Return the objective with options given as text by name, {"mask": "0.3"}.

        Options that are not in `texts` have their default. A bool is `true` or `false`.

        Raises:
            OptionError: A name or a value is wrong.
            InputError: The vocabulary is unsuitable.
        """
        known = {field.name: field for field in cls.options()}
        values = {}
        for name, text in texts.items():
            if name not in known:
                hint = suggest_closest(name, known)
                raise OptionError(
                    cls.name, name, f"unknown, expected {', '.join(known) or 'no options'}{hint}"
                )
            values[name] = cls._parse_option(known[name], text)
        return cls(vocabulary, **values)

    def interpolate(self, end: "Objective", share: float) -> "Objective":
        """Return the objective at one point of a linear change of its options.

        It is a new one, or this one if nothing changes. Integers are rounded, half up. Values stay
        between those of both ends.

        Args:
            end: Objective of the same class at the end of the change. Only numbers may differ,
                which is not checked.
            share: Fraction of the change, from 0 (this objective) to 1 (`end`).

        Raises:
            OptionError: A value cannot be used.
        """
        changed = {}
        for field in self.options():
            first = getattr(self, field.name)
            last = getattr(end, field.name)
            if first != last:
                value = first * (1 - share) + last * share
                value = math.floor(value + 0.5) if type(field.default) is int else value
                # Rounding may exceed the range.
                changed[field.name] = min(max(value, min(first, last)), max(first, last))
        return dataclasses.replace(self, **changed) if changed else self

    def describe(self, every: bool = False, end: "Objective | None" = None) -> str:
        """Return the objective as schedule text: `mlm`, or with options `mlm(mask=0.3)`.

        Numbers are written exactly.

        Args:
            every: Whether to include options at their default.
            end: Objective of the same class to which options change: `mask=0.4->0.15`; None: none
                changes.
        """
        assignments = []
        for field in self.options():
            first = getattr(self, field.name)
            last = getattr(end or self, field.name)
            if first != last or first != field.default or every:
                values = (first,) if first == last else (first, last)
                texts = [_format_value(type(field.default)(value)) for value in values]
                assignments.append(f"{field.name}={'->'.join(texts)}")
        return f"{self.name}({','.join(assignments)})" if assignments else self.name

    @classmethod
    def _parse_option(cls, field: dataclasses.Field, text: str) -> Any:
        """Return the value of an option's text, by the type of its default.

        Raises:
            OptionError: The text is no such value.
        """
        kind = type(field.default)
        try:
            if kind in (int, float) and "_" in text:  # Python reads 0_1 as 01
                raise ValueError
            value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
            # -0 becomes 0, so that equal options have equal texts.
            return value + 0 if kind is float else value
        except (KeyError, ValueError):
            raise OptionError(
                cls.name, field.name, f"found `{text}`, expected {_format_expected(field)}"
            ) from None

    @classmethod
    def _check_option(cls, field: dataclasses.Field, value: Any) -> None:
        """Check that a value has the type of an option and lies within its bounds.

        Raises:
            OptionError: It does not.
        """
        kind = type(field.default)
        is_valid = isinstance(value, (int, float) if kind is float else kind) and (
            kind is bool or not isinstance(value, bool)
        )
        if is_valid and kind in (int, float):
            is_valid = value in field.metadata["bounds"]
        if not is_valid:
            raise OptionError(
                cls.name,
                field.name,
                f"found {_format_value(value)}, expected {_format_expected(field)}",
            )


def _format_expected(field: dataclasses.Field) -> str:
    """Return the type, bounds and help of an option for an error message."""
    kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[
        type(field.default)
    ]
    bounds = str(field.metadata["bounds"])
    return f"{kind}{bounds and ', '}{bounds} ({field.metadata['help']})"


def _format_value(value: Any) -> str:
    """Return an option's value as in a schedule."""
    return str(value).lower() if isinstance(value, bool) else str(value)
