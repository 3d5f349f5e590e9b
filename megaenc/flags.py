"""Command-line and YAML parsing into dataclasses.

Each field is a flag and a YAML key; the docstring below a field is its help text.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NewType,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
import yaml

from megaenc.console import truncate_text
from megaenc.dist_env import get_rank
from megaenc.errors import InputError, closest_match, suggest_closest
from megaenc.json_files import read_regular_file

Settings = TypeVar("Settings")

REMOVED = {
    "calibrate": "train 20 steps on the machine and give their model_flops_utilization to --mfu",
    "explain": "--output writes all terms as JSON",
    "intra_node_bandwidth": "give --mfu, the share of the peak that a run has reached",
    "inter_node_bandwidth": "give --mfu, the share of the peak that a run has reached",
    "reported": (
        "docs/study-plan.md has the models, steps and hours that the paper reports; "
        "leave the section out"
    ),
    "timing_log_level": (
        "--profile times each operation, and each row of metrics.jsonl the parts of a step"
    ),
}
"""Former flags, and what to use instead."""

YamlMapping = NewType("YamlMapping", str)
"""Text of a YAML mapping; in a YAML file it may be a mapping itself."""


@dataclass(frozen=True)
class Bounds:
    """Range of a number, for the type of a flag: Annotated[int, Bounds(low=1)].

    It is `low` <= value <= `high` and `above` < value < `below`; NaN and infinite numbers are
    outside. A limit that is not given is infinite. In a type with several numbers it holds for each
    of them, and not for None and texts. `value in bounds` tells whether a number is inside.
    """

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and self.above < value < self.below

    def __str__(self) -> str:
        """Return the range as text, such as `1 or more`; empty if it is unlimited."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{self.low:,} to {self.high:,}"
        texts = {
            "more than {:,}": self.above,
            "{:,} or more": self.low,
            "at most {:,}": self.high,
            "less than {:,}": self.below,
        }
        return " and ".join(
            text.format(bound) for text, bound in texts.items() if math.isfinite(bound)
        )


PositiveInt = Annotated[int, Bounds(low=1)]
NonNegativeInt = Annotated[int, Bounds(low=0)]
Size = Annotated[int, Bounds(low=1, high=10**15)]
"""Number whose products with other sizes are int64."""
Seed = Annotated[int, Bounds(low=0, below=2**63)]
PositiveFloat = Annotated[float, Bounds(above=0)]
NonNegativeFloat = Annotated[float, Bounds(low=0)]
Fraction = Annotated[float, Bounds(low=0, high=1)]
PositiveFraction = Annotated[float, Bounds(above=0, high=1)]
FractionBelowOne = Annotated[float, Bounds(low=0, below=1)]
FractionBelowHalf = Annotated[float, Bounds(low=0, below=0.5)]


def parse(
    settings: type[Settings],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    default: Settings | None = None,
) -> Settings:
    """Return the dataclass `settings` with the values of command-line flags.

    Each field, nested too, is a flag: `a_b` is --a-b, if bool also --no-a-b. --help exits with 0.

    Args:
        argv: The flags; None: those of this process.
        prog: Command that help and errors name, such as `megaenc plot`.
        description: Text above the flags in the help.
        default: Values of flags that are not given; None: those of the fields.

    Raises:
        InputError: A flag is unknown or missing, or a value is wrong or out of its type's bounds.
    """
    arguments = _expand_optional_switches(settings, sys.argv[1:] if argv is None else argv)
    if get_rank() and {"-h", "--help"} & set(arguments):
        sys.exit(0)
    message = io.StringIO()
    try:
        with contextlib.redirect_stderr(message):
            parsed = tyro.cli(
                settings,
                prog=prog,
                # An example to a line.
                description=re.sub(r"(?m)^(?=(torchrun .*)?megaenc )", "  ", description),
                args=arguments,
                default=tyro.MISSING_NONPROP if default is None else default,
                config=(tyro.conf.OmitArgPrefixes,),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(f"{_simplify_error(message.getvalue())} (see {prog} --help)") from None
    check_bounds(parsed)
    return parsed


def _expand_optional_switches(settings: type, argv: Sequence[str]) -> list[str]:
    """Return `argv` with --flag and --no-flag as --flag True and --flag False.

    Only of fields of type `bool | None`, which may be unset.
    """
    names = _find_optional_switches(settings)
    arguments = []
    for word in argv:
        name = word.removeprefix("--").replace("-", "_")
        field = name.removeprefix("no_")
        if word.startswith("--") and field in names:
            arguments += [f"--{field.replace('_', '-')}", str(name == field)]
        else:
            arguments.append(word)
    return arguments


def _find_optional_switches(settings: type) -> set[str]:
    """Return the names of fields of type `bool | None`, also of nested dataclasses."""
    names = set()
    for name, kind in get_type_hints(settings).items():
        if dataclasses.is_dataclass(kind):
            names |= _find_optional_switches(kind)
        elif kind == bool | None:
            names.add(name)
    return names


# Facts about a field, for `setting`. Without one, a field is part of the identity of a run
# (`Plan.identity`) if its group is.
IN_IDENTITY = {"identity": True}
"""Is part of a run's identity, unlike the others of its group."""
NOT_IN_IDENTITY = {"identity": False}
"""May differ within a run, or is replaced by a value that follows from it."""
BY_PHASE = {"phase": True}
"""May differ between the phases of a run."""
ANY_WEIGHTS = {"weights": "any"}
"""Decides how weights begin, are trained or are stored: those of another run or model fit any
value."""
ADAPTABLE_WEIGHTS = {"weights": "given"}
"""Training can adapt another run's weights to another value, as for a longer context, which must be
given to be meant."""


def setting(default: Any, *facts: Mapping[str, Any], feature: str = "") -> Any:
    """Return a dataclass field of a flag, with `facts` such as BY_PHASE as metadata.

    Args:
        default: Default value of the field.
        facts: Constants of this module, from IN_IDENTITY to ADAPTABLE_WEIGHTS.
        feature: Noun phrase for what a model with another value than the default has, such as
            "attention windows", in messages about families that lack it.
    """
    metadata: dict[str, Any] = {"feature": feature}
    for fact in facts:
        metadata.update(fact)
    return dataclasses.field(default=default, metadata=metadata)


PACKAGED_DIR = (Path(__file__).parent / "configs").resolve()
"""Directory of the packaged YAML files; in a clone it is a link to `configs`."""
MAX_YAML = 1 << 20
"""Size limit of a YAML file in bytes."""
MAX_YAML_VALUES = 100_000
"""Limit of the number of values in a YAML file with aliases expanded."""
_MAX_LEVELS = 100  # Python cannot print or write much deeper values
_MAX_NUMBER = 1000  # characters; Python cannot print an integer of more than 4,300 digits
# The other surrogates stand for bytes of file names.
_UNUSABLE = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")


class YamlLoader(yaml.SafeLoader):
    """SafeLoader of PyYAML for files that users write.

    `read_yaml` converts its errors. YAMLError refuses equal keys, long numbers, zero bytes, values
    that do not fit their tag, and aliases that contain themselves or expand to more than 100,000
    values. Values nested more than 100 levels deep raise RecursionError, impossible dates and
    numbers ValueError. As in PyYAML 5e-4, without a point, is text.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of `node`.

        Args:
            deep: Whether lists and mappings are filled at once, as in PyYAML.

        Raises:
            YAMLError: A text does not fit its tag, as in `!!int ""`.
            ValueError: A date or number is impossible, as in `!!int x`.
        """
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError):
            problem = f"found {truncate_text(repr(node.value))}, expected a value of {node.tag}"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark) from None

    def get_single_node(self) -> yaml.Node | None:
        """Return the document's root node, None if it is empty.

        Raises:
            YAMLError: Keys are equal, texts are unusable, aliases expand too far, or there are
                several documents.
            RecursionError: Values are nested too deeply.
        """
        if node := super().get_single_node():
            _measure(node, {})
        return node


def _measure(node: yaml.Node, sizes: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return the number of values and levels in `node` with aliases expanded.

    Args:
        sizes: Cache of both numbers by node identity.
    """
    if isinstance(node, yaml.ScalarNode):
        if len(node.value) > _MAX_NUMBER and node.tag.endswith((":int", ":float")):
            problem = (
                f"found a number of {len(node.value):,} characters, "
                f"expected at most {_MAX_NUMBER:,}"
            )
        elif match := _UNUSABLE.search(node.value):
            problem = f"found the character {match[0]!r}, which neither texts nor file names have"
        else:
            return 1, 0
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
    if id(node) not in sizes:
        _check_unique_keys(node)
        # While it is being measured: a node that contains itself exceeds the limit.
        sizes[id(node)] = (
            MAX_YAML_VALUES,
            0,
        )
        parts = (
            itertools.chain.from_iterable(node.value)
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        counts, levels = zip((1, 0), *(_measure(part, sizes) for part in parts), strict=True)
        sizes[id(node)] = sum(counts), 1 + max(levels)
    count, level = sizes[id(node)]
    if count > MAX_YAML_VALUES:
        raise yaml.YAMLError(f"its aliases expand to more than {MAX_YAML_VALUES:,} values")
    if level > _MAX_LEVELS:
        raise RecursionError
    return count, level


def _check_unique_keys(node: yaml.Node) -> None:
    """Raise YAMLError if a mapping has two equal keys.

    YAML would keep the last.
    """
    keys = set()
    for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        key = (key_node.tag, key_node.value)
        if key in keys:
            raise yaml.MarkedYAMLError(
                None, None, f"key `{key_node.value}` is given twice", key_node.start_mark
            )
        keys.add(key)


@functools.cache
def list_packaged_files() -> dict[str, Path]:
    """Return the packaged YAML files by name, such as `recipes/modernbert`."""
    return {
        path.relative_to(PACKAGED_DIR).with_suffix("").as_posix(): path
        for path in sorted(PACKAGED_DIR.rglob("*.yaml"))
    }


def find_config_file(name: str | Path, directory: Path = Path()) -> Path:
    """Return the path of a file, or of the packaged file with this name.

    A file always wins. Otherwise packaged files have the names `study/mini` and
    `configs/study/mini.yaml`, as in a clone.

    Args:
        name: Absolute path, or path relative to `directory`.
    """
    path = directory / name
    key = str(name)
    if key.startswith("configs/"):
        key = key.removeprefix("configs/").removesuffix(".yaml")
    packaged = list_packaged_files().get(key)
    return path if packaged is None or path.is_file() else packaged


def find_base_file(file: Path, base: str) -> Path:
    """Return the path of the file or packaged file that `file` names as `base`.

    Args:
        file: Resolved path, whose directory `base` is relative to. That of a packaged file may also
            be relative to the current directory, as if `configs` was in there.
    """
    path = find_config_file(base, file.parent)
    if file.is_relative_to(PACKAGED_DIR) and not path.exists():
        return Path(os.path.relpath(path, PACKAGED_DIR.parent))
    return path


def suggest_config_names(name: str | Path) -> str:
    """Return the end of an error about a missing file: similar packaged files.

    Their last words are similar. Without any, it is the command that lists all.
    """
    stem = Path(name).stem
    near = [
        known
        for known in list_packaged_files()
        if closest_match(stem, [Path(known).name], cutoff=0.8)
    ]
    if not near:
        return "; `megaenc --help` lists the packaged files"
    return f"; did you mean {' or '.join(f'`{known}`' for known in near)}?"


def format_config_names() -> str:
    """Return the names of the packaged files, a line for each directory."""
    groups: dict[str, list[str]] = {}
    for name in list_packaged_files():
        directory, _, file = name.rpartition("/")
        groups.setdefault(directory, []).append(file)
    return "\n".join(f"  {directory}/: {', '.join(files)}" for directory, files in groups.items())


def read_yaml(path: str | Path, place: str, expected: str) -> Any:
    """Return the content of the YAML file `path`, None if it is empty.

    Args:
        path: Path, or name of a packaged file (`find_config_file`).
        place: Beginning of errors.
        expected: Kind of file that errors name.

    Raises:
        InputError: The file is unreadable, not a regular file, larger than MAX_YAML (1 MiB), not
            UTF-8 or not YAML (see `YamlLoader`).
    """
    try:
        content = read_regular_file(find_config_file(path), MAX_YAML)
        return yaml.load(content.decode("utf-8"), YamlLoader)
    except OSError as error:
        hint = suggest_config_names(path) if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"{place}: {error.strerror or error}; expected {expected}{hint}") from None
    except UnicodeDecodeError:
        raise InputError(f"{place}: not UTF-8 text; expected {expected}") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply; expected {expected}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise InputError(f"{place}: not YAML: {error}") from None


def read_config_file(
    default: Settings,
    path: str | Path,
    *,
    prepare: Callable[[Settings, Mapping[str, Any]], Settings] = lambda default, fields: default,
    including_files: tuple[Path, ...] = (),
) -> Settings:
    """Return `default` with the fields in a YAML file and the files that it builds on.

    The key `config`, which sets no field, names another file, relative to this one, whose values
    are read first. Nested fields are top-level keys. `default`, a dataclass, is not changed.

    Args:
        path: Path, or name of a packaged file (`find_config_file`).
        prepare: Given the present values and a file's fields, returns those to set the fields in.
        including_files: Resolved files that led to `path`; callers leave them out.

    Raises:
        InputError: A file is unreadable or no mapping, a field is unknown, wrong or twice in a
            file, `prepare` refuses the fields, or `config` leads back to a file.
    """
    fields = _read_fields(path)
    if base := fields.pop("config", None):
        file = find_config_file(path).resolve()
        if file in including_files:
            raise InputError(f"--config {path}: field `config` leads back to this file")
        files = (*including_files, file)
        default = read_config_file(default, base, prepare=prepare, including_files=files)
    try:
        default = prepare(default, fields)
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None
    return replace_fields(default, fields, source=str(path))


def _read_fields(path: str | Path) -> dict[str, Any]:
    """Return the values of the YAML file of flags at `path` by field name.

    That of `config` becomes a path.

    Raises:
        InputError: It is no such file.
    """
    values = read_yaml(path, f"--config {path}", "a YAML file of flags") or {}
    if not isinstance(values, dict):
        raise InputError(
            f"--config {path}: found a {type(values).__name__}, expected `flag: value` lines"
        )
    fields = normalize_names(values, f"--config {path}")
    if base := fields.get("config"):
        fields["config"] = find_base_file(find_config_file(path).resolve(), str(base))
    return fields


def normalize_names(values: Mapping[Any, Any], place: str) -> dict[str, Any]:
    """Return `values` by field name: hyphens of names become underscores.

    Args:
        values: Values by name; names that are no text become text.
        place: File or flag of the values, the beginning of errors.

    Raises:
        InputError: A name is given in two spellings.
    """
    fields: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name in fields:
            raise InputError(
                f"{place}: field `{name}` is given twice, in two spellings, expected once"
            )
        fields[name] = value
    return fields


def find_flag_names(argv: Sequence[str]) -> set[str]:
    """Return the names of the flags in `argv`, with underscores and not checked.

    `--no-x` gives `no_x` and `x`.
    """
    names = {
        word.partition("=")[0].removeprefix("--").replace("-", "_")
        for word in argv
        if word.startswith("--")
    }
    return names | {name.removeprefix("no_") for name in names}


def find_given_fields(
    names: Iterable[str], path: str | Path | None, preset: str, without: Path
) -> set[str]:
    """Return `names` and the fields that the YAML files of flags at `path` give.

    Names have underscores and are not checked. A file's key `config` names a further file, which
    must not lead back to an earlier one: they are read without end.

    Args:
        names: Fields that are given by flags.
        path: File of --config; None or empty without one.
        preset: Field that replaces values of earlier files: no file is read if a flag gives it, and
            not the `config` of a file that gives it.
        without: File whose own fields do not count; those of files that it names do.

    Raises:
        InputError: A file is unreadable or no mapping.
    """
    given = set(names)
    while path and preset not in given:
        fields = _read_fields(path)
        given |= fields.keys() if Path(path).resolve() != without.resolve() else set()
        path = fields.get("config")
    return given


def parse_with_config(
    settings: type[Settings], argv: Sequence[str] | None, *, prog: str, description: str
) -> Settings:
    """Return the dataclass `settings` from the flags over the YAML file of `--config`.

    All fields need a default, and one is `config`. Without --config it is `parse`, whose arguments
    it has. --help exits with 0.

    Args:
        argv: The flags; None: those of this process.

    Raises:
        InputError: As by `parse` and `read_config_file`.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    config = find_flag_value(arguments, "--config")
    default = read_config_file(settings(), config) if config else settings()
    return parse(settings, arguments, prog=prog, description=description, default=default)


def build_from_keywords(
    kind: type[Settings],
    settings: Settings | None,
    values: Mapping[str, Any],
    *,
    caller: str,
    required: Sequence[str] = (),
    merge: Callable[[Settings, Mapping[str, Any]], Settings] | None = None,
) -> Settings:
    """Return the dataclass `kind` from keyword arguments of a Python function.

    They override the YAML file of the keyword `config`, which overrides `settings`. Values are as
    in `convert_value`, or paths and tuples; all fields are checked, those of `settings` too.

    Args:
        settings: Values of other fields; None: their defaults.
        values: Keyword arguments, fields by name; those of nested dataclasses count.
        caller: Name of the function, the beginning of errors.
        required: Fields that must not stay empty, besides those without a default.
        merge: Given `settings` and the keywords, returns the values that the keywords override;
            None: `settings` with the file of `config`.

    Raises:
        InputError: A field is unknown, missing, wrong or out of its bounds, or the file is invalid.
    """
    place = f"{caller}()"
    values = {name: _convert_python_value(value) for name, value in values.items()}
    if settings is None:
        fields = dataclasses.fields(kind)
        required = (*(field.name for field in fields if not _has_default(field)), *required)
        default = kind(**{field.name: None for field in fields if not _has_default(field)})
        checked = values
    elif isinstance(settings, kind):
        default = settings
        checked = _convert_python_value(flatten(settings)) | values
    else:
        raise InputError(
            f"{place}: found a {type(settings).__name__}, expected a {kind.__name__} or its fields "
            "as keywords"
        )
    replace_fields(default, checked, source=place)  # before a file is read
    if merge is not None:
        default = merge(default, values)
    elif values.get("config"):
        default = read_config_file(default, values["config"])
    built = replace_fields(default, values, source=place)
    for name in required:
        if not getattr(built, name):
            raise InputError(f"{place}: field `{name}`: missing, expected a value")
    return built


def _has_default(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is not missing or field.default_factory is not missing


def _convert_python_value(value: Any) -> Any:
    """Return `value` as YAML would give it.

    Paths become text, tuples and arrays lists, and numbers of numpy those of Python.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _convert_python_value(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_python_value(part) for part in value]
    return value


def find_flag_value(argv: Sequence[str], flag: str) -> str | None:
    """Return the value of the last `flag` in `argv`, without parsing the rest.

    It is given as `--flag x` or `--flag=x`; x may be a flag itself. The result is None if there is
    no `flag` or nothing follows the last one.

    Args:
        flag: Flag with its hyphens, such as --config; underscores in `argv` are accepted.
    """
    result = None
    for word, next_word in zip(argv, [*argv[1:], None], strict=False):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:  # both spellings are accepted
            result = value if equals else next_word
    return result


_get_field_types = functools.cache(get_type_hints)


@functools.cache
def _get_field_bounds(settings: type) -> dict[str, Bounds | None]:
    """Return the bounds of each field of a dataclass by name, None without."""
    return {
        name: _find_bounds(kind)
        for name, kind in get_type_hints(settings, include_extras=True).items()
    }


def _find_bounds(kind: Any) -> Bounds | None:
    """Return the first Bounds in a type such as `tuple[PositiveInt, ...] | None`."""
    if isinstance(kind, Bounds):
        return kind
    return next(filter(None, map(_find_bounds, get_args(kind))), None)


def _check_number(place: str, bounds: Bounds | None, value: Any) -> None:
    """Raise InputError, beginning with `place`, if a number is out of `bounds`.

    Each number of a tuple is checked.
    """
    for number in value if isinstance(value, tuple) else (value,):
        if bounds and isinstance(number, (int, float)) and number not in bounds:
            expected = bounds if abs(number) < math.inf else "a finite number"
            raise InputError(
                f"{place}: found {truncate_text(str(number), 40)}, expected {expected}"
            )


def check_bounds(settings: Any) -> None:
    """Raise InputError, naming the flag, if a number is out of its field's Bounds.

    `settings` is a dataclass of flags; fields of nested dataclasses count.
    """
    bounds = _get_field_bounds(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            check_bounds(value)
        else:
            _check_number(f"--{field.name.replace('_', '-')}", bounds[field.name], value)


def replace_fields(settings: Settings, values: dict[str, Any], *, source: str) -> Settings:
    """Return `settings` with `values` by field name, cast to the types of the fields.

    Fields of nested dataclasses count. `settings` itself, a dataclass, is not changed.

    Args:
        values: Values as YAML has them, by field name with underscores; see `convert_value`.
        source: File of the values, the beginning of errors.

    Raises:
        InputError: A field is unknown, or a value is wrong or out of its field's Bounds.
    """
    known = flatten(settings)
    for name in values:
        if name not in known:
            if name in REMOVED:
                raise InputError(f"{source}: `{name}` was removed; {REMOVED[name]}")
            hint = suggest_closest(str(name), known)
            raise InputError(f"{source}: unknown field `{name}`{hint}")

    def replace(node):
        changes = {}
        types = _get_field_types(type(node))
        bounds = _get_field_bounds(type(node))
        for field in dataclasses.fields(node):
            current = getattr(node, field.name)
            if dataclasses.is_dataclass(current):
                changes[field.name] = replace(current)
            elif field.name in values:
                place = f"{source}: field `{field.name}`"
                changes[field.name] = convert_value(place, types[field.name], values[field.name])
                _check_number(place, bounds[field.name], changes[field.name])
        return dataclasses.replace(node, **changes)

    return replace(settings)


def parse_mapping(text: YamlMapping, source: str, example: str) -> dict[str, Any]:
    """Return the fields of a YAML mapping in `text`, with underscores in their names.

    Args:
        source: Flag or field of the text, the beginning of errors.
        example: Fields that the error shows.

    Raises:
        InputError: The text is not YAML, no mapping (as empty text), or gives a field in two
            spellings.
    """
    values = None
    problem = ""
    try:
        values = yaml.load(text, YamlLoader)
    except yaml.MarkedYAMLError as error:
        problem = f" ({error.problem})"
    except (yaml.YAMLError, ValueError, RecursionError):
        pass
    if not isinstance(values, dict):
        raise InputError(
            f"{source}: found {truncate_text(repr(text))}{problem}, "
            f"expected fields such as {example}"
        )
    return normalize_names(values, source)


def flatten(settings: Any) -> dict[str, Any]:
    """Return the values of a dataclass and its nested dataclasses by field name.

    Nested ones are replaced by their fields. The order is that of the declaration.
    """
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        flat.update(flatten(value) if dataclasses.is_dataclass(value) else {field.name: value})
    return flat


def convert_value(place: str, kind: Any, value: Any) -> Any:
    """Return `value` from YAML converted to the type `kind`.

    Types: bool, int, float, str, Literal, a tuple of one of them, one of them or None, `int |
    Literal["all"]`, and YamlMapping, which is the YAML text of any value. A float may be an int or
    text such as 5e-4, a single value gives a tuple of one, and numbers in a tuple of texts, or
    spelled like a choice, become text; other types must be those of the value, so that 1.0 and True
    are no int. Bounds are not checked.

    Raises:
        InputError: The value does not fit; the message begins with `place`.
    """
    choices = get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)
    if value is None and NoneType in choices:
        return None
    words = [
        word for choice in choices[1:] if get_origin(choice) is Literal for word in get_args(choice)
    ]
    if value in words:
        return value
    kind = choices[0]
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        if isinstance(value, (int, float)) and str(value) in get_args(kind):
            return str(value)
        expected = ", ".join(map(str, get_args(kind))).removeprefix(", ")
        raise InputError(f"{place}: found {truncate_text(repr(value))}, expected one of {expected}")
    if kind is YamlMapping:
        return (
            value
            if isinstance(value, str)
            else yaml.safe_dump(
                value, default_flow_style=True, width=math.inf, sort_keys=False
            ).strip()
        )
    # A single value is a list of one; in a list of words a number is a word.
    if get_origin(kind) is tuple:
        return tuple(
            str(part)
            if get_args(kind)[0] is str and isinstance(part, (int, float))
            else convert_value(place, get_args(kind)[0], part)
            for part in (value if isinstance(value, list) else [value])
        )
    if kind is float and not isinstance(value, bool):
        # YAML reads 5e-4 and 1e400, without a point, as text.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
            if isinstance(value, str) and not math.isfinite(number):
                raise InputError(
                    f"{place}: found {truncate_text(repr(value))}, expected a finite number"
                )
            return number
    if (
        isinstance(kind, type)
        and isinstance(value, kind)
        and isinstance(value, bool) == (kind is bool)
    ):
        return value
    expected = " or ".join([getattr(kind, "__name__", str(kind)), *words])
    raise InputError(f"{place}: found {truncate_text(repr(value))}, expected a {expected}")


def check_given(settings: Any, command: str, *names: str) -> None:
    """Raise InputError, naming the first such flag, if a required field is empty.

    Args:
        command: The words of the command after `megaenc`, for the error.
        names: Required fields; any false value counts as empty.
    """
    for name in names:
        if not getattr(settings, name):
            raise InputError(f"--{name}: missing; see `megaenc {command} --help`")


_TITLES = re.compile(
    "Missing argument|Value error|Unrecognized options|Parsing error|Invalid "
    "(input|choice)|Required options"
)


def _simplify_error(message: str) -> str:
    """Return a boxed error message of tyro as one sentence that begins with the flag."""
    lines = [line.strip("│╭╮╰╯─ \t") for line in message.splitlines()]
    # tyro's rules if standard output is not UTF-8.
    lines = [line for line in lines if line.strip("-")]
    lines = [
        line
        for line in lines
        if not line.startswith("For full helptext") and not line.endswith(" --help")
    ]
    lines = [line for line in lines if not _TITLES.fullmatch(line)]
    for heading in ("Argument helptext:", "Got errors:"):
        if heading in lines:
            lines = lines[: lines.index(heading)]
    if "Perhaps you meant:" in lines:
        index = lines.index("Perhaps you meant:")
        lines = [*lines[:index], "- did you mean " + lines[index + 1].split()[0].rstrip(",") + "?"]
    sentence = " ".join(lines) or "the command line could not be read"
    if match := re.search(
        r"parsing (--\S+): .*(?:int\(\) with base 10|string to float): ('.*')", sentence
    ):
        return f"{match[1]}: found {match[2]}, expected a number"
    if match := re.match(
        r"invalid choice ('.*') for argument '(.+)'\. Expected one of \((.*?),?\)", sentence
    ):
        return (
            f"{match[2]}: found {match[1]}, expected one of "
            f"{match[3].replace(chr(39), '').removeprefix(', ')}"
        )
    if match := re.match(r"Missing value for argument '(.+)'", sentence):
        return f"{match[1]}: no value given, expected one"
    if match := re.match(r"Missing from [^:]*: (.+)", sentence):
        words = [part.split()[0] for part in match[1].split("(required)") if part.strip()]
        return f"{', '.join(words)}: missing, expected a value" + " for each" * (len(words) > 1)
    if match := re.match(r"Unrecognized options: ([^ ,]+).*?(?: - (did you mean .*))?$", sentence):
        kind = (
            "no such flag"
            if match[1].startswith("-")
            else "found a word that belongs to no flag, expected none"
        )
        if successor := REMOVED.get(
            match[1].removeprefix("--").removeprefix("no-").replace("-", "_")
        ):
            return f"{match[1]}: was removed; {successor}"
        return f"{match[1]}: {kind}" + (f"; {match[2]}" if match[2] else "")
    if match := re.match(
        r"Error parsing (--\S+): no type matching (.*) could be instantiated from \[(.*)\]",
        sentence,
    ):
        kinds = (
            match[2]
            .replace("{None}|", "")
            .replace("INT", "a whole number")
            .replace("FLOAT", "a number")
        )
        kinds = re.sub(r"\{?\[(a whole number|a number) .*?\]\]\}?", r"\1 or more of them", kinds)
        return (
            f"{match[1]}: found {match[3]}, expected "
            f"{' or '.join(kinds.translate({123: None, 125: None}).split('|'))}"
        )
    return sentence
