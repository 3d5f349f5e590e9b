"""The schedule of a run, `clm:0.25,mlm(mask=0.3):0.75`: which objective each update trains.

    schedule  = phase { "," phase }
    phase     = objective [ ":" amount ]          the amount may be left out where there is one phase: it takes the whole run
    objective = name [ "(" option { "," option } ")" ]
    option    = name "=" value
    amount    = a number with a point, a share of the run, or a whole number of steps; one schedule holds one kind

Spaces may stand between any two of these. Every error names the character and shows the text with the wrong piece in brackets.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate

from megaenc.data.vocabulary import Vocabulary
from megaenc.errors import InputError
from megaenc.objectives.base import Objective, OptionError
from megaenc.objectives.registry import find

FLAG = "--objective-schedule"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORD = re.compile(r"[^,():=\s]+")
_AMOUNT = "a share with a point (0.25) or a whole number of steps (10000)"
_SHARE = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+")
_STEPS = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Piece:
    """A piece of the schedule's text and the character, counted from 0, at which it starts."""

    text: str
    start: int


@dataclass(frozen=True)
class ParsedPhase:
    """One phase as written. amount: a Fraction for a share, an int for steps."""

    name: Piece
    options: tuple[tuple[Piece, Piece], ...]
    amount: Fraction | int
    amount_text: Piece


def parse_schedule(text: str) -> list[ParsedPhase]:
    """Read the grammar above; whether names, options and sums are right needs the run (`Schedule.build`). Raises InputError."""
    return _Parser(text).schedule()


@dataclass(frozen=True)
class Phase:
    """Updates first_step..last_step, both included and counted from 1, train `objective`; `text` spells it for people."""

    index: int
    objective: Objective
    text: str
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Schedule:
    """The phases of a run in order; together they hold every update 1..train_iters once."""

    phases: tuple[Phase, ...]

    @classmethod
    def build(cls, text: str, train_iters: int, vocabulary: Vocabulary) -> "Schedule":
        """Parse `text` and lay its phases over updates 1..train_iters.

        A phase that is given in shares ends at its cumulative share times train_iters, half rounded up. Raises InputError.
        """
        if train_iters < 1:
            raise InputError(f"--train-iters: found {train_iters}, expected at least 1")
        parsed = parse_schedule(text)
        ends = _ends(text, parsed, train_iters)
        starts = [1, *(end + 1 for end in ends)]
        phases = []
        for index, (written, first, last) in enumerate(zip(parsed, starts, ends, strict=False)):
            objective = _objective(text, written, vocabulary)
            phases.append(Phase(index, objective, objective.describe(), first, last))
        return cls(tuple(phases))

    def at(self, step: int) -> Phase:
        """The phase of update `step`, counted from 1."""
        if not 1 <= step <= self.phases[-1].last_step:
            raise ValueError(f"step {step} is not one of 1..{self.phases[-1].last_step}")
        return self.phases[bisect_left(self.phases, step, key=lambda phase: phase.last_step)]

    @property
    def canonical(self) -> str:
        """The schedule in steps with every option written out: equal for two runs exactly when their phases are."""
        return ",".join(
            f"{phase.objective.describe(every=True)}:{phase.last_step - phase.first_step + 1}" for phase in self.phases
        )


def _ends(text: str, parsed: list[ParsedPhase], train_iters: int) -> list[int]:
    """The last update of each phase."""
    amounts = [phase.amount for phase in parsed]
    for phase in parsed:
        if type(phase.amount) is not type(amounts[0]):
            kinds = "a share after steps" if isinstance(phase.amount, Fraction) else "steps after a share"
            raise _error(text, phase.amount_text, f"found {kinds}, expected one kind (shares have a point: 0.25, 1.0)")
    totals = list(accumulate(amounts))
    if isinstance(amounts[0], Fraction):
        kind, expected, wanted = "shares", Fraction(1), "1"
    else:
        kind, expected, wanted = "steps", train_iters, f"{train_iters} (--train-iters)"
    if totals[-1] != expected:
        # Where the sum first goes too far; where it never does, the last phase is the one to look at.
        culprit = next((phase for phase, total in zip(parsed, totals, strict=True) if total > expected), parsed[-1])
        hint = "; `1` is one step, write 1.0 for the whole run" if kind == "steps" and amounts == [1] else ""
        raise _error(text, culprit.amount_text, f"{kind} add up to {_decimal(totals[-1])}, expected {wanted}{hint}")
    ends = [int(total * train_iters + Fraction(1, 2)) for total in totals] if kind == "shares" else totals
    for phase, start, end in zip(parsed, [0, *ends], ends, strict=False):
        if start == end:
            raise _error(
                text, phase.amount_text, f"{phase.amount_text.text} of {train_iters} steps is no step, expected at least one"
            )
    return ends


def _objective(text: str, written: ParsedPhase, vocabulary: Vocabulary) -> Objective:
    texts = {name.text: value.text for name, value in written.options}
    known: set[str] = set()
    try:
        kind = find(written.name.text)
        known = {field.name for field in kind.options()}
        return kind.from_texts(vocabulary, texts)
    except OptionError as error:
        places = {name.text: value if name.text in known else name for name, value in written.options}
        raise _error(text, places.get(error.option, written.name), str(error)) from None
    except InputError as error:
        raise _error(text, written.name, str(error)) from error


def _decimal(number: Fraction | int) -> str:
    """As people write it; a sum of decimal fractions has an end."""
    return str(number) if isinstance(number, int) else format((Decimal(number.numerator) / number.denominator).normalize(), "f")


def _error(text: str, piece: Piece, complaint: str) -> InputError:
    end = piece.start + len(piece.text)
    marked = f"{text[: piece.start]}[{piece.text}]{text[end:]}"
    return InputError(f"{FLAG}: at character {piece.start + 1} of '{text}': {complaint} (here: {marked})")


class _Parser:
    """Recursive descent: a method for each rule of the grammar, all moving `at` along `text`."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0

    def schedule(self) -> list[ParsedPhase]:
        if not self.text.strip():
            raise _error(self.text, Piece("", 0), "empty, expected an objective such as mlm, or phases such as clm:0.25,mlm:0.75")
        phases = [self.phase(first=True)]
        while comma := self.take(","):
            if self.ended():
                raise _error(self.text, comma, "nothing follows the comma, expected another phase")
            phases.append(self.phase(first=False))
        if not self.ended():
            raise self.wrong("`,` and another phase, or the end")
        return phases

    def phase(self, first: bool) -> ParsedPhase:
        name, options = self.objective()
        if first and self.ended():
            return ParsedPhase(name, options, Fraction(1), name)
        if not self.take(":"):
            raise self.wrong(f"`:` and the share or the steps of `{name.text}`")
        amount_text = self.expect(_WORD, _AMOUNT)
        return ParsedPhase(name, options, self.amount(amount_text), amount_text)

    def objective(self) -> tuple[Piece, tuple[tuple[Piece, Piece], ...]]:
        name = self.expect(_NAME, "the name of an objective")
        opening = self.take("(")
        if not opening:
            return name, ()
        options = [self.option()]
        while self.take(","):
            options.append(self.option())
        if not self.take(")"):
            if self.ended() or self.text[self.at] == ":":
                raise _error(self.text, opening, "this parenthesis is never closed")
            raise self.wrong("`,` and another option, or `)`")
        for index, (option, _) in enumerate(options):
            if option.text in [earlier.text for earlier, _ in options[:index]]:
                raise _error(self.text, option, f"option `{option.text}` is given twice")
        return name, tuple(options)

    def option(self) -> tuple[Piece, Piece]:
        name = self.expect(_NAME, "an option such as mask=0.3")
        if not self.take("="):
            raise self.wrong(f"`=` and the value of `{name.text}`")
        return name, self.expect(_WORD, f"the value of `{name.text}`")

    def amount(self, written: Piece) -> Fraction | int:
        kind = (
            Fraction
            if _SHARE.fullmatch(written.text.lstrip("-"))
            else int
            if _STEPS.fullmatch(written.text.lstrip("-"))
            else None
        )
        if kind is None:
            raise _error(self.text, written, f"found `{written.text}`, expected {_AMOUNT}")
        noun = "share" if kind is Fraction else "step count"
        if written.text.startswith("-"):
            raise _error(self.text, written, f"negative {noun} {written.text}, expected more than zero")
        if kind(written.text) == 0:
            raise _error(self.text, written, f"zero {noun} {written.text}, expected more than zero; leave the phase out")
        return kind(written.text)

    def expect(self, pattern: re.Pattern[str], what: str) -> Piece:
        """The next piece, which must match `pattern`."""
        self.skip_spaces()
        found = pattern.match(self.text, self.at)
        if not found:
            raise self.wrong(what)
        self.at = found.end()
        return Piece(found.group(), found.start())

    def take(self, character: str) -> Piece | None:
        """The next character if it is this one."""
        self.skip_spaces()
        if not self.text.startswith(character, self.at):
            return None
        self.at += 1
        return Piece(character, self.at - 1)

    def ended(self) -> bool:
        self.skip_spaces()
        return self.at == len(self.text)

    def skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def wrong(self, expected: str) -> InputError:
        """The error that the next piece, a word or else one character, is not what is expected here."""
        self.skip_spaces()
        word = _WORD.match(self.text, self.at)
        found = word.group() if word else self.text[self.at : self.at + 1]
        return _error(self.text, Piece(found, self.at), f"found {f'`{found}`' if found else 'the end'}, expected {expected}")
