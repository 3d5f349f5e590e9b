"""Command lines from dataclasses: every field is a flag and a YAML key, its docstring the help text."""

import contextlib
import dataclasses
import io
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
import yaml

from megaenc.console import truncate_text
from megaenc.dist_env import get_rank
from megaenc.errors import InputError, closest_match
from megaenc.json_files import read_regular_file

Settings = TypeVar("Settings")


def parse(
    settings: type[Settings], argv: Sequence[str] | None, *, prog: str, description: str, default: Settings | None = None
) -> Settings:
    """Read `argv` into the dataclass `settings`; nested dataclasses give flat flags (`--tensor-model-parallel-size`).

    `default` supplies what the command line leaves out (say, from a YAML file). Raises InputError for what cannot be read.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if get_rank() and {"-h", "--help"} & set(arguments):
        sys.exit(0)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                settings,
                prog=prog,
                description=re.sub(r"(?m)^(?=(torchrun .*)?megaenc )", "  ", description),  # an example to a line
                args=arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(f"{_plain(complaint.getvalue())} (see {prog} --help)") from None


MAX_YAML, MAX_YAML_VALUES = 1 << 20, 100_000
"""The most bytes of a YAML file, and the most values that it may stand for when its aliases are written out."""


class YamlLoader(yaml.SafeLoader):
    """PyYAML's SafeLoader, which refuses a few aliases that stand for a great many values."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of the document. Raises YAMLError if its aliases stand for too much, or for themselves."""
        if node := super().get_single_node():
            _count_values(node, {})
        return node


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Return the number of values below `node` with aliases written out; `counts` has it for the nodes before, by identity."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in counts:
        counts[id(node)] = MAX_YAML_VALUES  # of one that is still being counted: it holds itself
        parts = itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        counts[id(node)] = 1 + sum(_count_values(part, counts) for part in parts)
    if counts[id(node)] > MAX_YAML_VALUES:
        raise yaml.YAMLError(f"its aliases stand for more than {MAX_YAML_VALUES:,} values")
    return counts[id(node)]


def read_yaml(path: Path, place: str, expected: str, loader: type[yaml.SafeLoader] = YamlLoader) -> Any:
    """Return the value of a YAML file, None for an empty file.

    Raises InputError with one line that begins with `place` and names the `expected` kind of file.
    """
    try:
        return yaml.load(read_regular_file(path, MAX_YAML).decode("utf-8"), loader)
    except OSError as error:
        raise InputError(f"{place}: {error.strerror or error}; expected {expected}") from None
    except UnicodeDecodeError:
        raise InputError(f"{place}: not UTF-8 text; expected {expected}") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply; expected {expected}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError of a date or a number that there is not
        raise InputError(f"{place}: not YAML: {error}") from None


def read_config_file(
    default: Settings,
    path: str | Path,
    *,
    first: tuple[str, Callable[[Settings, Any], Settings]] | None = None,
    above: tuple[Path, ...] = (),
) -> Settings:
    """Return `default` with the fields that the YAML file at `path` names; keys are flag names with `-` or `_`.

    A file whose `config` names another one, seen from its own folder, goes over that. `first` names a key that, where the file
    has it, changes the defaults of others (a preset), and how. `above`: the files that have led here.
    """
    values = read_yaml(Path(path), f"--config {path}", "a YAML file of flags") or {}
    if not isinstance(values, dict):
        raise InputError(f"--config {path}: found a {type(values).__name__}, expected `flag: value` lines")
    fields = {str(key).replace("-", "_"): value for key, value in values.items()}
    if below := fields.pop("config", None):
        here = Path(path).resolve()
        if here in above:
            raise InputError(f"--config {path}: field `config` leads back to this file")
        default = read_config_file(default, here.parent / str(below), first=first, above=(*above, here))
    if first and first[0] in fields:
        default = first[1](default, fields[first[0]])
    return replace_fields(default, fields, source=str(path))


def parse_with_config(settings: type[Settings], argv: Sequence[str] | None, *, prog: str, description: str) -> Settings:
    """As `parse`, for a dataclass that can be made of nothing, over the YAML file that `--config` in `argv` names."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    config = find_flag_value(arguments, "--config")
    default = read_config_file(settings(), config) if config else settings()
    return parse(settings, arguments, prog=prog, description=description, default=default)


def find_flag_value(argv: Sequence[str], flag: str) -> str | None:
    """The last value that `argv` gives `flag`, looked up before the rest is read: it decides the defaults of others."""
    found = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:  # either spelling is a flag
            found = value if equals else following
    return found


def replace_fields(settings: Settings, values: dict[str, Any], *, source: str) -> Settings:
    """Return `settings` with the flat `values` put into whichever nested dataclass has a field of that name."""
    known = flatten(settings)
    for name in values:
        if name not in known:
            near = closest_match(str(name), known)
            raise InputError(f"{source}: unknown field `{name}`" + (f"; did you mean `{near}`?" if near else ""))

    def put(node):
        changes, types = {}, get_type_hints(type(node))
        for field in dataclasses.fields(node):
            current = getattr(node, field.name)
            if dataclasses.is_dataclass(current):
                changes[field.name] = put(current)
            elif field.name in values:
                changes[field.name] = _read(f"{source}: field `{field.name}`", types[field.name], values[field.name])
        return dataclasses.replace(node, **changes)

    return put(settings)


def flatten(settings: Any) -> dict[str, Any]:
    """The fields of a dataclass and of those nested in it, by name, in the order of declaration."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        flat.update(flatten(value) if dataclasses.is_dataclass(value) else {field.name: value})
    return flat


def _read(place: str, kind: Any, value: Any) -> Any:
    """`value` from YAML as the type `kind`: bool, int, float, str, a choice of words, a tuple of one of them, or one or None.

    Or a number or a word of a choice: `int | Literal["all"]`.
    """
    choices = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    if value is None and NoneType in choices:
        return None
    words = [word for choice in choices[1:] if get_origin(choice) is Literal for word in get_args(choice)]
    if value in words:
        return value
    kind = choices[0]
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise InputError(f"{place}: found {truncate_text(repr(value))}, expected one of {', '.join(map(str, get_args(kind)))}")
    if get_origin(kind) is tuple:  # one value stands for a list of one; in a list of words a number is a word
        return tuple(
            str(part) if get_args(kind)[0] is str and isinstance(part, (int, float)) else _read(place, get_args(kind)[0], part)
            for part in (value if isinstance(value, list) else [value])
        )
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # YAML reads 5e-4, which has no point, as text
            return float(value)
    if isinstance(kind, type) and isinstance(value, kind) and isinstance(value, bool) == (kind is bool):
        return value
    expected = " or ".join([getattr(kind, "__name__", str(kind)), *words])
    raise InputError(f"{place}: found {truncate_text(repr(value))}, expected a {expected}")


_TITLES = re.compile("Missing argument|Value error|Unrecognized options|Parsing error|Invalid (input|choice)|Required options")


def _plain(box: str) -> str:
    """Return one sentence, the flag first, for the frame that tyro draws around an error."""
    lines = [line.strip("│╭╮╰╯─ \t") for line in box.splitlines()]
    lines = [line for line in lines if line and not line.startswith("For full helptext") and not line.endswith(" --help")]
    lines = [line for line in lines if not _TITLES.fullmatch(line)]
    for heading in ("Argument helptext:", "Got errors:"):
        if heading in lines:
            lines = lines[: lines.index(heading)]
    if "Perhaps you meant:" in lines:
        at = lines.index("Perhaps you meant:")
        lines = [*lines[:at], "- did you mean " + lines[at + 1].split()[0].rstrip(",") + "?"]
    sentence = " ".join(lines) or "the command line could not be read"
    if match := re.search(r"parsing (--\S+): .*(?:int\(\) with base 10|string to float): ('.*')", sentence):
        return f"{match[1]}: found {match[2]}, expected a number"
    if match := re.match(r"invalid choice ('.*') for argument '(.+)'\. Expected one of \((.*?),?\)", sentence):
        return f"{match[2]}: found {match[1]}, expected one of {match[3].replace(chr(39), '')}"
    if match := re.match(r"Missing value for argument '(.+)'", sentence):
        return f"{match[1]}: no value given, expected one"
    if match := re.match(r"Missing from [^:]*: (.+)", sentence):
        words = [part.split()[0] for part in match[1].split("(required)") if part.strip()]
        return f"{', '.join(words)}: missing, expected a value" + " for each" * (len(words) > 1)
    if match := re.match(r"Unrecognized options: ([^ ,]+).*?(?: - (did you mean .*))?$", sentence):
        kind = "no such flag" if match[1].startswith("-") else "found a word that belongs to no flag, expected none"
        return f"{match[1]}: {kind}" + (f"; {match[2]}" if match[2] else "")
    if match := re.match(r"Error parsing (--\S+): no type matching (.*) could be instantiated from \[(.*)\]", sentence):
        kinds = match[2].replace("{None}|", "").replace("INT", "a whole number").replace("FLOAT", "a number")
        kinds = re.sub(r"\{?\[(a whole number|a number) .*?\]\]\}?", r"\1 or more of them", kinds)
        return f"{match[1]}: found {match[3]}, expected {' or '.join(kinds.translate({123: None, 125: None}).split('|'))}"
    return sentence
