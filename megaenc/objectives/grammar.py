"""Reads the text of a schedule into its pieces, each of which knows its place; the grammar stands in `schedule`."""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction

from megaenc.errors import InputError

FLAG = "--objective-schedule"
MIXTURE = "mix"
_LONGEST = 64  # characters of a name or a number
DEEPEST = 20
_MOST_PHASES = 100_000  # each is kept in memory
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORD = re.compile(r"(?:(?!->)[^,():=\s])+")
_PIECE = re.compile(rf"{_WORD.pattern}|->|.")
_REPEAT = re.compile(r"([0-9]+)\s*x\s*\(")
_SHARE = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+")
_WHOLE = re.compile(r"[0-9]+")
_AMOUNT = "a share with a point (0.25) or a whole number of steps (10000)"


@dataclass(frozen=True)
class Piece:
    """A piece of the schedule's text and the character, counted from 0, at which it starts."""

    text: str
    start: int


@dataclass(frozen=True)
class ParsedOption:
    """An option as written; `end` is what it changes to over its phase, None where it stays."""

    name: Piece
    value: Piece
    end: Piece | None


@dataclass(frozen=True)
class ParsedObjective:
    """An objective as written."""

    name: Piece
    options: tuple[ParsedOption, ...]


@dataclass(frozen=True)
class ParsedPhase:
    """A phase as written. components: objectives with their weights, one of weight 1 where there is no mixture.

    amount: a Fraction for a share, an int for steps.
    """

    components: tuple[tuple[Fraction, ParsedObjective], ...]
    amount: Fraction | int
    amount_text: Piece

    @property
    def what(self) -> Hashable:
        """What is trained, whatever its place and amount: equal for phases that read the same."""
        return tuple(
            (weight, objective.name.text, *((o.name.text, o.value.text, o.end and o.end.text) for o in objective.options))
            for weight, objective in self.components
        )


def parse_schedule(text: str, train_iters: int | None = None) -> tuple[ParsedPhase, ...]:
    """Read the phases of a schedule, repetitions written out. Raises InputError.

    Of a run of `train_iters` steps, more phases than that are refused; whether names, options and sums are right is seen by
    `Schedule.build`.
    """
    return _Parser(text, train_iters).schedule()


def error_at(text: str, piece: Piece, complaint: str) -> InputError:
    """The error that `piece` of `text` is what `complaint` says, with its place shown."""
    end = piece.start + len(piece.text)
    marked = f"{text[: piece.start]}[{piece.text}]{text[end:]}"
    return InputError(f"{FLAG}: at character {piece.start + 1} of '{text}': {complaint} (here: {marked})")


class _Parser:
    """Recursive descent: a method for each rule of the grammar, all moving `at` along `text`."""

    def __init__(self, text: str, train_iters: int | None):
        self.text, self.train_iters = text, train_iters
        self.at = 0

    def schedule(self) -> tuple[ParsedPhase, ...]:
        if not self.text.strip():
            raise self.error(Piece("", 0), "empty, expected an objective such as mlm, or phases such as clm:0.25,mlm:0.75")
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
        count, opening = Piece(repeat[1], repeat.start()), Piece("(", repeat.end() - 1)
        if len(count.text) > _LONGEST:
            raise self.error(count, f"{len(count.text)} digits, expected at most {_LONGEST}")
        if not int(count.text):
            raise self.error(count, "zero repetitions, expected more than zero; leave them out")
        if depth == DEEPEST:
            raise self.error(count, f"a repetition in more than {DEEPEST} others, expected fewer")
        self.at = repeat.end()
        phases = self.items(depth + 1)
        self.close(opening, "`,` and another phase, or `)`", unclosed_before="")
        total = int(count.text) * len(phases)
        if self.train_iters is not None and total > self.train_iters:
            raise self.error(count, f"makes {total} phases of {self.train_iters} steps, expected at least a step for each")
        if total > _MOST_PHASES:
            raise self.error(count, f"makes {total:,} phases, expected at most {_MOST_PHASES:,}")
        return phases * int(count.text)

    def phase(self, alone: bool) -> ParsedPhase:
        start = self.at
        what = self.expect(_NAME, f"the name of an objective, `{MIXTURE}(` or a repetition such as `5x(`")
        components = self.mixture() if what.text == MIXTURE else ((Fraction(1), ParsedObjective(what, self.options())),)
        written = Piece(self.text[start : self.at].strip(), start)
        if alone and self.ended():
            return ParsedPhase(components, Fraction(1), what)
        if not self.take(":"):
            raise self.wrong(f"`:` and the share or the steps of `{written.text if what.text == MIXTURE else what.text}`")
        amount_text = self.expect(_WORD, _AMOUNT)
        return ParsedPhase(components, self.amount(amount_text), amount_text)

    def mixture(self) -> tuple[tuple[Fraction, ParsedObjective], ...]:
        opening = self.take("(")
        if not opening:
            raise self.wrong(f"`(` and the objectives of the mixture, such as {MIXTURE}(clm:0.3,mlm:0.7)")
        components = [self.component()]
        while self.take(","):
            components.append(self.component())
        self.close(opening, "`,` and another objective with its weight, or `)`")
        return tuple(components)

    def component(self) -> tuple[Fraction, ParsedObjective]:
        name = self.expect(_NAME, "the name of an objective")
        if name.text == MIXTURE:
            raise self.error(name, "a mixture in a mixture, expected the name of an objective")
        objective = ParsedObjective(name, self.options())
        if not self.take(":"):
            raise self.wrong(f"`:` and the weight of `{name.text}`")
        weight = self.expect(_WORD, "a weight such as 0.7")
        if not (_SHARE.fullmatch(weight.text) or _WHOLE.fullmatch(weight.text)) or not Fraction(weight.text):
            raise self.error(weight, f"found `{weight.text}`, expected a weight above zero such as 0.7 or 2")
        return Fraction(weight.text), objective

    def options(self) -> tuple[ParsedOption, ...]:
        opening = self.take("(")
        if not opening:
            return ()
        options = [self.option()]
        while self.take(","):
            options.append(self.option())
        self.close(opening, "`,` and another option, or `)`")
        for index, option in enumerate(options):
            if option.name.text in [earlier.name.text for earlier in options[:index]]:
                raise self.error(option.name, f"option `{option.name.text}` is given twice")
        return tuple(options)

    def option(self) -> ParsedOption:
        name = self.expect(_NAME, "an option such as mask=0.3")
        if not self.take("="):
            raise self.wrong(f"`=` and the value of `{name.text}`")
        value = self.expect(_WORD, f"the value of `{name.text}`")
        end = self.expect(_WORD, f"the value of `{name.text}` at the end of the phase") if self.take("->") else None
        return ParsedOption(name, value, end)

    def amount(self, written: Piece) -> Fraction | int:
        digits = written.text.lstrip("-")
        kind = Fraction if _SHARE.fullmatch(digits) else int if _WHOLE.fullmatch(digits) else None
        if kind is None:
            raise self.error(written, f"found `{written.text}`, expected {_AMOUNT}")
        noun = "share" if kind is Fraction else "step count"
        if written.text.startswith("-"):
            raise self.error(written, f"negative {noun} {written.text}, expected more than zero")
        if kind(written.text) == 0:
            raise self.error(written, f"zero {noun} {written.text}, expected more than zero; leave the phase out")
        return kind(written.text)

    def close(self, opening: Piece, otherwise: str, unclosed_before: str = ":") -> None:
        """Take the `)` that belongs to `opening`; one of the signs `unclosed_before` in its place says that it was forgotten."""
        if not self.take(")"):
            if self.ended() or self.text[self.at] in unclosed_before:
                raise self.error(opening, "this parenthesis is never closed")
            raise self.wrong(otherwise)

    def expect(self, pattern: re.Pattern[str], what: str) -> Piece:
        """The next piece, which must match `pattern`."""
        self.skip_spaces()
        found = pattern.match(self.text, self.at)
        if not found:
            raise self.wrong(what)
        self.at = found.end()
        piece = Piece(found.group(), found.start())
        if len(piece.text) > _LONGEST:
            raise self.error(piece, f"{len(piece.text)} characters, expected at most {_LONGEST}")
        return piece

    def take(self, sign: str) -> Piece | None:
        """The next piece if it is this sign."""
        self.skip_spaces()
        if not self.text.startswith(sign, self.at):
            return None
        self.at += len(sign)
        return Piece(sign, self.at - len(sign))

    def ended(self) -> bool:
        self.skip_spaces()
        return self.at == len(self.text)

    def skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def wrong(self, expected: str) -> InputError:
        """The error that the next piece, a word or else a sign, is not what is expected here."""
        self.skip_spaces()
        word = _PIECE.match(self.text, self.at)
        found = word.group() if word else ""
        return self.error(Piece(found, self.at), f"found {f'`{found}`' if found else 'the end'}, expected {expected}")

    def error(self, piece: Piece, complaint: str) -> InputError:
        return error_at(self.text, piece, complaint)
