"""Parser of an objective schedule's text, which keeps the position of each part.

See `schedule` for the grammar.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from megaenc.errors import InputError

FLAG = "--objective-schedule"
MIXTURE = "mix"
SUM = "sum"
COMBINATIONS = {MIXTURE: "mixture", SUM: "sum"}
"""Keywords that combine objectives, with their names in messages."""
_MAX_WORD_LENGTH = 64  # characters of a name or a number
_MAX_PATH_LENGTH = 1024
MAX_REPEAT_DEPTH = 20
_MAX_PHASES = 100_000  # kept in memory
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_WORD = re.compile(r"(?:(?!->)[^,():=\s])+")
_TOKEN = re.compile(rf"{_WORD.pattern}|->|.|")
_REPEAT = re.compile(r"([0-9]+)\s*x\s*\(")
_FRACTION = re.compile(r"[0-9]+\.[0-9]*|\.[0-9]+")
_INTEGER = re.compile(r"[0-9]+")
_AMOUNT = "a share with a point (0.25) or a whole number of steps (10000)"


class SourceText(str):
    """String that is a part of a schedule's text, SourceText(text, start).

    `start` is the index of its first character there, from 0, for errors.
    """

    start: int

    def __new__(cls, text: str, start: int) -> "SourceText":
        part = super().__new__(cls, text)
        part.start = start
        return part


class ParsedOption(NamedTuple):
    """Option of an objective as written, not yet checked; see ParsedObjective.

    `value` is the value of the option `name`, or that at the start of the phase if it changes;
    `end` that at the end, None if it does not change. All are SourceText.
    """

    name: SourceText
    value: SourceText
    end: SourceText | None


class ParsedObjective(NamedTuple):
    """Objective as written in a schedule, not yet checked.

    It has its `name`, a SourceText, and `options`, a ParsedOption each.
    """

    name: SourceText
    options: tuple[ParsedOption, ...]


class ParsedPhase(NamedTuple):
    """Phase of a schedule as written: its objectives with weights, and its amount.

    components: (weight, objective) of each; one of weight 1 without a combination. amount: a
    Fraction for a share of the run, an int for steps; share 1 if none is written. amount_text: its
    text, for errors, or the objective's name. is_sum: whether each step trains all components, of
    which there are several, not one of them.
    """

    components: tuple[tuple[Fraction, ParsedObjective], ...]
    amount: Fraction | int
    amount_text: SourceText
    is_sum: bool = False


def parse_schedule(text: str, train_iters: int | None = None) -> tuple[ParsedPhase, ...]:
    """Return the phases of a schedule's text in order, repetitions spelled out.

    Names, options and sums of amounts are not checked: `Schedule.build` does that.

    Args:
        text: Schedule, such as `clm:0.25,mlm(mask=0.3):0.75`.
        train_iters: Steps of the run, the most phases that each repetition may make; None: only the
            limit of 100,000 for each counts.

    Raises:
        InputError: The syntax is wrong, or a repetition makes too many phases.
    """
    return _ScheduleParser(text, train_iters).parse_schedule()


def build_error(text: str, part: SourceText, complaint: object) -> InputError:
    """Return, without raising, an InputError about a part of a schedule's text.

    The message has the flag --objective-schedule, the place of `part`, counted from 1, `complaint`
    as text, and `text`, the whole schedule, with `part` in brackets.
    """
    marked = f"{text[: part.start]}[{part}]{text[part.start + len(part) :]}"
    return InputError(
        f"{FLAG}: at character {part.start + 1} of '{text}': {complaint} (here: {marked})"
    )


class _ScheduleParser:
    """Recursive-descent parser of a schedule.

    Each grammar rule has a method that advances `position` in `text`.
    """

    def __init__(self, text: str, train_iters: int | None):
        self.text = text
        self.train_iters = train_iters
        self.position = 0

    def parse_schedule(self) -> tuple[ParsedPhase, ...]:
        """Return the phases of the whole text, repetitions spelled out.

        Raises:
            InputError: The text is empty or has wrong syntax.
        """
        if not self.text.strip():
            raise self.error(
                SourceText("", 0),
                "empty, expected an objective such as mlm, or phases such as clm:0.25,mlm:0.75",
            )
        items = self.parse_items(depth=0)
        if not self.is_at_end():
            raise self.unexpected("`,` and another phase, or the end")
        return items

    def parse_items(self, depth: int) -> tuple[ParsedPhase, ...]:
        """Parse phases and repetitions separated by commas; return all phases in order.

        They stand inside `depth` repetitions. It stops before a `)`, which the caller takes.

        Raises:
            InputError: The syntax is wrong.
        """
        phases = [*self.parse_item(depth, is_first=depth == 0)]
        while comma := self.take(","):
            if self.is_at_end():
                raise self.error(comma, "nothing follows the comma, expected another phase")
            phases += self.parse_item(depth, is_first=False)
        return tuple(phases)

    def parse_item(self, depth: int, is_first: bool) -> tuple[ParsedPhase, ...]:
        """Parse a phase, or a repetition into its repeated phases.

        `depth` is the number of repetitions around it; `is_first` allows a sole phase without
        amount.

        Raises:
            InputError: The syntax is wrong, or a repetition makes too many phases.
        """
        self.skip_spaces()
        repeat = _REPEAT.match(self.text, self.position)
        if not repeat:
            return (self.parse_phase(is_first),)
        count = SourceText(repeat[1], repeat.start())
        opening = SourceText("(", repeat.end() - 1)
        if len(count) > _MAX_WORD_LENGTH:
            raise self.error(count, f"{len(count)} digits, expected at most {_MAX_WORD_LENGTH}")
        if not int(count):
            raise self.error(count, "zero repetitions, expected more than zero; leave them out")
        if depth == MAX_REPEAT_DEPTH:
            raise self.error(
                count, f"a repetition in more than {MAX_REPEAT_DEPTH} others, expected fewer"
            )
        self.position = repeat.end()
        phases = self.parse_items(depth + 1)
        self.close(opening, "`,` and another phase, or `)`", unclosed_before="")
        total = int(count) * len(phases)
        if self.train_iters is not None and total > self.train_iters:
            raise self.error(
                count,
                f"makes {total} phases of {self.train_iters} steps, "
                "expected at least a step for each",
            )
        if total > _MAX_PHASES:
            raise self.error(count, f"makes {total:,} phases, expected at most {_MAX_PHASES:,}")
        return phases * int(count)

    def parse_phase(self, is_first: bool) -> ParsedPhase:
        """Parse an objective, mixture or sum, and its amount.

        If `is_first`, and nothing follows, the amount may be missing; it is then share 1.

        Raises:
            InputError: The syntax is wrong.
        """
        start = self.position
        name = self.expect(
            _NAME, f"the name of an objective, `{MIXTURE}(`, `{SUM}(` or a repetition such as `5x(`"
        )
        if kind := COMBINATIONS.get(name):
            if not (opening := self.take("(")):
                raise self.unexpected(
                    f"`(` and the objectives of the {kind}, such as {name}(clm:0.3,mlm:0.7)"
                )
            components = self.parse_parts(
                opening, self.parse_component, "`,` and another objective with its weight, or `)`"
            )
        else:
            components = ((Fraction(1), ParsedObjective(name, self.parse_options())),)
        phase_text = self.text[start : self.position].strip() if kind else name
        is_sum = name == SUM and len(components) > 1
        if is_first and self.is_at_end():
            return ParsedPhase(components, Fraction(1), name, is_sum)
        if not self.take(":"):
            raise self.unexpected(f"`:` and the share or the steps of `{phase_text}`")
        amount_text = self.expect(_WORD, _AMOUNT)
        return ParsedPhase(components, self.parse_amount(amount_text), amount_text, is_sum)

    def parse_component(self) -> tuple[Fraction, ParsedObjective]:
        """Parse `objective:weight` in a mixture or sum.

        Returns:
            (weight above zero, objective).

        Raises:
            InputError: The syntax is wrong, or it is a mixture or sum itself.
        """
        name = self.expect(_NAME, "the name of an objective")
        if kind := COMBINATIONS.get(name):
            raise self.error(
                name, f"a {kind} in a mixture or sum, expected the name of an objective"
            )
        objective = ParsedObjective(name, self.parse_options())
        if not self.take(":"):
            raise self.unexpected(f"`:` and the weight of `{name}`")
        weight = self.expect(_WORD, "a weight such as 0.7")
        if not (_FRACTION.fullmatch(weight) or _INTEGER.fullmatch(weight)) or not Fraction(weight):
            raise self.error(
                weight, f"found `{weight}`, expected a weight above zero such as 0.7 or 2"
            )
        return Fraction(weight), objective

    def parse_options(self) -> tuple[ParsedOption, ...]:
        """Parse an objective's options in parentheses, () if none follow.

        Raises:
            InputError: The syntax is wrong, the parentheses are empty, or an option is repeated.
        """
        if not (opening := self.take("(")):
            return ()
        options = self.parse_parts(opening, self.parse_option, "`,` and another option, or `)`")
        for index, option in enumerate(options):
            if option.name in [earlier.name for earlier in options[:index]]:
                raise self.error(option.name, f"option `{option.name}` is given twice")
        return options

    def parse_option(self) -> ParsedOption:
        """Parse `name=value` or `name=value->end` into an option.

        Raises:
            InputError: The syntax is wrong.
        """
        name = self.expect(_NAME, "an option such as mask=0.3")
        if not self.take("="):
            raise self.unexpected(f"`=` and the value of `{name}`")
        value = self.expect(_WORD, f"the value of `{name}`", _MAX_PATH_LENGTH)
        end = (
            self.expect(_WORD, f"the value of `{name}` at the end of the phase")
            if self.take("->")
            else None
        )
        return ParsedOption(name, value, end)

    def parse_amount(self, written: SourceText) -> Fraction | int:
        """Convert an amount: a Fraction for a share with a point, an int for steps.

        Both have only digits, without an exponent. A share may be above 1 here.

        Raises:
            InputError: It is neither, or not above zero.
        """
        digits = written.lstrip("-")
        if _FRACTION.fullmatch(digits):
            kind = Fraction
            noun = "share"
        elif _INTEGER.fullmatch(digits):
            kind = int
            noun = "step count"
        else:
            raise self.error(written, f"found `{written}`, expected {_AMOUNT}")
        if written.startswith("-"):
            raise self.error(written, f"negative {noun} {written}, expected more than zero")
        if kind(written) == 0:
            raise self.error(
                written, f"zero {noun} {written}, expected more than zero; leave the phase out"
            )
        return kind(written)

    def parse_parts(
        self, opening: SourceText, parse_part: Callable[[], Any], expected: str
    ) -> tuple[Any, ...]:
        """Parse one or more parts separated by commas, and the `)` that closes `opening`.

        Args:
            opening: The `(`, which is already taken.
            parse_part: Function that takes one part and returns it.
            expected: Words for all that may follow a part, the `)` included, for the error.

        Raises:
            InputError: Another text follows a part.
        """
        parts = [parse_part()]
        while self.take(","):
            parts.append(parse_part())
        self.close(opening, expected)
        return tuple(parts)

    def close(self, opening: SourceText, expected: str, unclosed_before: str = ":") -> None:
        """Take the `)` that closes `opening`.

        Args:
            expected: Everything that may come here, the `)` included, for the error.
            unclosed_before: Characters before which the error is that `opening` is never closed, as
                at the end.

        Raises:
            InputError: Another text, or the end, follows.
        """
        if not self.take(")"):
            if self.is_at_end() or self.text[self.position] in unclosed_before:
                raise self.error(opening, "this parenthesis is never closed")
            raise self.unexpected(expected)

    def expect(
        self, pattern: re.Pattern[str], expected: str, longest: int = _MAX_WORD_LENGTH
    ) -> SourceText:
        """Skip spaces, take the part that matches a pattern, and return it.

        Args:
            expected: Words for what is expected here, for the error.
            longest: Maximum number of characters of the part.

        Raises:
            InputError: Nothing matches here, or the part is longer than `longest`.
        """
        self.skip_spaces()
        if not (match := pattern.match(self.text, self.position)):
            raise self.unexpected(expected)
        self.position = match.end()
        part = SourceText(match[0], match.start())
        if len(part) > longest:
            raise self.error(part, f"{len(part)} characters, expected at most {longest}")
        return part

    def take(self, sign: str) -> SourceText | None:
        """Skip spaces, and take a sign and return it if it comes next, else return None."""
        self.skip_spaces()
        if not self.text.startswith(sign, self.position):
            return None
        self.position += len(sign)
        return SourceText(sign, self.position - len(sign))

    def is_at_end(self) -> bool:
        """Skip spaces and return whether the end of the text is reached."""
        self.skip_spaces()
        return self.position == len(self.text)

    def skip_spaces(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def unexpected(self, expected: str) -> InputError:
        """Return, without raising, an InputError about the next word or sign, or the end."""
        self.skip_spaces()
        token = _TOKEN.match(self.text, self.position)[0]
        return self.error(
            SourceText(token, self.position),
            f"found {f'`{token}`' if token else 'the end'}, expected {expected}",
        )

    def error(self, part: SourceText, complaint: str) -> InputError:
        """Return, without raising, an InputError that shows `part` within the text."""
        return build_error(self.text, part, complaint)
