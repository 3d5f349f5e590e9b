"""Reads the text of a schedule into its pieces, each of which knows its place; the grammar stands in `schedule`."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from megaenc.errors import InputError

FLAG = "--objective-schedule"
MIXTURE = "mix"
_MAX_WORD_LENGTH = 64  # characters of a name or a number
MAX_REPEAT_DEPTH = 20
_MAX_PHASES = 100_000  # each is kept in memory
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORD = re.compile(r"(?:(?!->)[^,():=\s])+")
_TOKEN = re.compile(rf"{_WORD.pattern}|->|.|")
_REPEAT = re.compile(r"([0-9]+)\s*x\s*\(")
_SHARE = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+")
_WHOLE = re.compile(r"[0-9]+")
_AMOUNT = "a share with a point (0.25) or a whole number of steps (10000)"


class SourceText(str):
    """A piece of the schedule's text, which begins at its character `start`, counted from 0."""

    start: int

    def __new__(cls, text: str, start: int) -> "SourceText":
        piece = super().__new__(cls, text)
        piece.start = start
        return piece


class ParsedOption(NamedTuple):
    """An option as written; `end` is what it changes to over its phase, None where it stays."""

    name: SourceText
    value: SourceText
    end: SourceText | None


class ParsedObjective(NamedTuple):
    """An objective as written."""

    name: SourceText
    options: tuple[ParsedOption, ...]


class ParsedPhase(NamedTuple):
    """A phase as written. components: objectives with their weights, one of weight 1 where there is no mixture.

    Components are equal if they read the same, wherever they stand. amount: a Fraction for a share, an int for steps.
    """

    components: tuple[tuple[Fraction, ParsedObjective], ...]
    amount: Fraction | int
    amount_text: SourceText


def parse_schedule(text: str, train_iters: int | None = None) -> tuple[ParsedPhase, ...]:
    """Read the phases of a schedule, repetitions written out. Raises InputError.

    Of a run of `train_iters` steps, more phases than that are refused; whether names, options and sums are right is seen by
    `Schedule.build`.
    """
    return _ScheduleParser(text, train_iters).schedule()


def build_error(text: str, piece: SourceText, complaint: object) -> InputError:
    """Build the error that `piece` of `text` is what `complaint` says, with its place shown."""
    marked = f"{text[: piece.start]}[{piece}]{text[piece.start + len(piece) :]}"
    return InputError(f"{FLAG}: at character {piece.start + 1} of '{text}': {complaint} (here: {marked})")


class _ScheduleParser:
    """Recursive descent: a method for each rule of the grammar, all moving `at` along `text`."""

    def __init__(self, text: str, train_iters: int | None):
        self.text, self.train_iters = text, train_iters
        self.at = 0

    def schedule(self) -> tuple[ParsedPhase, ...]:
        if not self.text.strip():
            raise self.error(SourceText("", 0), "empty, expected an objective such as mlm, or phases such as clm:0.25,mlm:0.75")
        items = self.items(depth=0)
        if not self.ended():
            raise self.wrong("`,` and another phase, or the end")
        return items

    def items(self, depth: int) -> tuple[ParsedPhase, ...]:
        phases = [*self.item(depth, alone=depth == 0)]
        while comma := self.take(","):
            if self.ended():
                raise self.error(comma, "nothing follows the comma, expected another phase")
            phases += self.item(depth, alone=False)
        return tuple(phases)

    def item(self, depth: int, alone: bool) -> tuple[ParsedPhase, ...]:
        """`alone`: nothing stands before it, so that its amount may be missing if nothing follows either."""
        self.skip_spaces()
        repeat = _REPEAT.match(self.text, self.at)
        if not repeat:
            return (self.phase(alone),)
        count, opening = SourceText(repeat[1], repeat.start()), SourceText("(", repeat.end() - 1)
        if len(count) > _MAX_WORD_LENGTH:
            raise self.error(count, f"{len(count)} digits, expected at most {_MAX_WORD_LENGTH}")
        if not int(count):
            raise self.error(count, "zero repetitions, expected more than zero; leave them out")
        if depth == MAX_REPEAT_DEPTH:
            raise self.error(count, f"a repetition in more than {MAX_REPEAT_DEPTH} others, expected fewer")
        self.at = repeat.end()
        phases = self.items(depth + 1)
        self.close(opening, "`,` and another phase, or `)`", unclosed_before="")
        total = int(count) * len(phases)
        if self.train_iters is not None and total > self.train_iters:
            raise self.error(count, f"makes {total} phases of {self.train_iters} steps, expected at least a step for each")
        if total > _MAX_PHASES:
            raise self.error(count, f"makes {total:,} phases, expected at most {_MAX_PHASES:,}")
        return phases * int(count)

    def phase(self, alone: bool) -> ParsedPhase:
        start = self.at
        what = self.expect(_NAME, f"the name of an objective, `{MIXTURE}(` or a repetition such as `5x(`")
        if what == MIXTURE:
            if not (opening := self.take("(")):
                raise self.wrong(f"`(` and the objectives of the mixture, such as {MIXTURE}(clm:0.3,mlm:0.7)")
            components = self.parts(opening, self.component, "`,` and another objective with its weight, or `)`")
        else:
            components = ((Fraction(1), ParsedObjective(what, self.options())),)
        written = self.text[start : self.at].strip() if what == MIXTURE else what
        if alone and self.ended():
            return ParsedPhase(components, Fraction(1), what)
        if not self.take(":"):
            raise self.wrong(f"`:` and the share or the steps of `{written}`")
        amount_text = self.expect(_WORD, _AMOUNT)
        return ParsedPhase(components, self.amount(amount_text), amount_text)

    def component(self) -> tuple[Fraction, ParsedObjective]:
        name = self.expect(_NAME, "the name of an objective")
        if name == MIXTURE:
            raise self.error(name, "a mixture in a mixture, expected the name of an objective")
        objective = ParsedObjective(name, self.options())
        if not self.take(":"):
            raise self.wrong(f"`:` and the weight of `{name}`")
        weight = self.expect(_WORD, "a weight such as 0.7")
        if not (_SHARE.fullmatch(weight) or _WHOLE.fullmatch(weight)) or not Fraction(weight):
            raise self.error(weight, f"found `{weight}`, expected a weight above zero such as 0.7 or 2")
        return Fraction(weight), objective

    def options(self) -> tuple[ParsedOption, ...]:
        if not (opening := self.take("(")):
            return ()
        options = self.parts(opening, self.option, "`,` and another option, or `)`")
        for index, option in enumerate(options):
            if option.name in [earlier.name for earlier in options[:index]]:
                raise self.error(option.name, f"option `{option.name}` is given twice")
        return options

    def option(self) -> ParsedOption:
        name = self.expect(_NAME, "an option such as mask=0.3")
        if not self.take("="):
            raise self.wrong(f"`=` and the value of `{name}`")
        value = self.expect(_WORD, f"the value of `{name}`")
        end = self.expect(_WORD, f"the value of `{name}` at the end of the phase") if self.take("->") else None
        return ParsedOption(name, value, end)

    def amount(self, written: SourceText) -> Fraction | int:
        digits = written.lstrip("-")
        kind = Fraction if _SHARE.fullmatch(digits) else int if _WHOLE.fullmatch(digits) else None
        if kind is None:
            raise self.error(written, f"found `{written}`, expected {_AMOUNT}")
        noun = "share" if kind is Fraction else "step count"
        if written.startswith("-"):
            raise self.error(written, f"negative {noun} {written}, expected more than zero")
        if kind(written) == 0:
            raise self.error(written, f"zero {noun} {written}, expected more than zero; leave the phase out")
        return kind(written)

    def parts(self, opening: SourceText, part: Callable[[], Any], otherwise: str) -> tuple[Any, ...]:
        """Read parts with commas between them, and the `)` that belongs to `opening`."""
        parts = [part()]
        while self.take(","):
            parts.append(part())
        self.close(opening, otherwise)
        return tuple(parts)

    def close(self, opening: SourceText, otherwise: str, unclosed_before: str = ":") -> None:
        """Take the `)` that belongs to `opening`; one of the signs `unclosed_before` in its place says that it was forgotten."""
        if not self.take(")"):
            if self.ended() or self.text[self.at] in unclosed_before:
                raise self.error(opening, "this parenthesis is never closed")
            raise self.wrong(otherwise)

    def expect(self, pattern: re.Pattern[str], what: str) -> SourceText:
        """Take the next piece, which must match `pattern`."""
        self.skip_spaces()
        if not (found := pattern.match(self.text, self.at)):
            raise self.wrong(what)
        self.at = found.end()
        piece = SourceText(found[0], found.start())
        if len(piece) > _MAX_WORD_LENGTH:
            raise self.error(piece, f"{len(piece)} characters, expected at most {_MAX_WORD_LENGTH}")
        return piece

    def take(self, sign: str) -> SourceText | None:
        """Take the next piece if it is this sign."""
        self.skip_spaces()
        if not self.text.startswith(sign, self.at):
            return None
        self.at += len(sign)
        return SourceText(sign, self.at - len(sign))

    def ended(self) -> bool:
        self.skip_spaces()
        return self.at == len(self.text)

    def skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def wrong(self, expected: str) -> InputError:
        """Build the error that the next piece, a word or else a sign, is not what is expected here."""
        self.skip_spaces()
        found = _TOKEN.match(self.text, self.at)[0]
        return self.error(SourceText(found, self.at), f"found {f'`{found}`' if found else 'the end'}, expected {expected}")

    def error(self, piece: SourceText, complaint: str) -> InputError:
        return build_error(self.text, piece, complaint)
