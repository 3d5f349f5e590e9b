"""Write docs/api.md and docs/flags.md from the docstrings of the package.

    python docs/scripts/reference.py

They hold only what is public: the names that objectives, tools and notebooks of others may import,
and every flag of every command.
"""

import ast
import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from unittest import mock

import tyro

from megaenc import cli, flags

DOCS = Path(__file__).resolve().parents[1]
NOTE = (
    "<!-- Written by docs/scripts/reference.py from the docstrings. Change those, then run it "
    "again: `make reference`. -->"
)

_SHARED_FLAGS = 10

# (heading, purpose, module, names)
PUBLIC = [
    (
        "Commands as functions",
        "What [commands](flags.md) do, for programs and notebooks ([how](python.md)). Import the "
        "classes of results only for type annotations.",
        "megaenc",
        [
            "train_tokenizer",
            "preprocess",
            "pretrain",
            "export",
            "finetune_model",
            "train_embedder",
            "evaluate_embeddings",
        ],
    ),
    ("", "", "megaenc.training.run_dir", ["PretrainResult"]),
    ("", "", "megaenc.convert.command", ["ExportedModel"]),
    ("", "", "megaenc.finetune.results.files", ["Result", "SplitScores"]),
    ("", "", "megaenc.embed.config", ["TrainedEmbedder"]),
    ("", "", "megaenc.embed.evaluation_file", ["EvaluationRow"]),
    (
        "Objectives",
        "Names for packages that add an objective "
        "([how](extending.md#an-objective-of-your-own-package)).",
        "megaenc.objectives",
        [
            "Objective",
            "Attention",
            "Targets",
            "option",
            "Masking",
            "OptionError",
            "register",
            "find",
            "known",
            "text_token_mask",
            "check_targets",
        ],
    ),
    ("Packs", "What an objective is given.", "megaenc.data.packing.packed_dataset", ["Pack"]),
    ("", "", "megaenc.data.tokenizer.vocabulary", ["Vocabulary"]),
    ("", "", "megaenc.counter_rng", ["SampleRandomness"]),
    (
        "Callbacks",
        "Names for packages that add a callback ([how](extending.md#a-callback)).",
        "megaenc.training.callbacks",
        ["Callback", "StepReport"],
    ),
    ("Errors", "Wrong input, as one line and exit code 2.", "megaenc.errors", ["InputError"]),
    (
        "Claims of a study",
        "What `megaenc study report` prints, for notebooks ([how they are "
        "judged](study-claims.md)).",
        "megaenc.study.claims.verdicts",
        ["judge", "Verdict"],
    ),
    ("", "", "megaenc.study.results.evidence", ["read_evidence", "Evidence"]),
    ("", "", "megaenc.study.results.published", ["published", "raw"]),
    (
        "",
        "",
        "megaenc.study.manifest.model_key",
        ["ModelKey", "format_model_name", "parse_model_name"],
    ),
]


def api() -> str:
    """Return the text of docs/api.md."""
    parts = [
        "# Python names",
        NOTE,
        "These names may be imported; what is not here may change from one version to the next. "
        "N is the predicted positions of a pack, T its tokens, D its documents.",
    ]
    for heading, purpose, module, names in PUBLIC:
        if heading:
            parts += [f"## {heading}", purpose]
        parts += [
            _describe(getattr(importlib.import_module(module), name), f"{module}.{name}")
            for name in names
        ]
    return "\n\n".join(parts) + "\n"


def _describe(thing: type | Callable, path: str) -> str:
    module, _, name = path.rpartition(".")
    imported = f"```python\nfrom {module} import {name}\n```"
    if not isinstance(thing, type):
        return f"### {name}\n\n{imported}\n\n**`{name}{_signature(thing)}`**: {_text(thing)}"
    lines = [f"### {name}{_bases(thing)}", imported, _text(thing)]
    if issubclass(thing, enum.Enum):
        lines.append("\n".join(f"- `{name}.{member.name}`: `{member.value!r}`" for member in thing))
    elif fields := list(_fields(thing)):
        lines.append("\n".join(fields))
    for method, function in vars(thing).items():
        plain = getattr(function, "__func__", getattr(function, "fget", function))
        plain = getattr(plain, "func", plain)  # of a cached property
        if (
            not method.startswith("_")
            and callable(plain)
            and plain.__doc__
            and inspect.isfunction(plain)
        ):
            called = (
                ""
                if isinstance(function, (property, functools.cached_property))
                else _signature(plain, of_class=True)
            )
            lines.append(f"**`{method}{called}`**: {_text(plain)}")
    return "\n\n".join(lines)


def _bases(thing: type) -> str:
    bases = [base.__name__ for base in thing.__bases__ if base.__module__.startswith("megaenc")]
    return f": a kind of {' and '.join(bases)}" if bases else ""


def _signature(function: Callable, of_class: bool = False) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if of_class and parameters and parameters[0].name in ("self", "cls"):
        signature = signature.replace(parameters=parameters[1:])
    text = re.sub(r"(?:megaenc|numpy|collections|pathlib|typing)\.(?:\w+\.)*", "", str(signature))
    return text.replace("'", "") if '"' not in text else text


def _text(thing: object) -> str:
    """Return a docstring as Markdown: entries of Args and Raises become list items."""
    text = inspect.cleandoc(thing.__doc__ or "")
    text = re.sub(r"^    ([*\w]+):", r"- `\1`:", text, flags=re.MULTILINE)
    text = re.sub(r"^(\w+:\n)(?=- )", r"\1\n", text, flags=re.MULTILINE)
    return re.sub(r"^ {4,}", "  ", text, flags=re.MULTILINE)


def _fields(thing: type) -> Iterator[str]:
    """Yield a line for each field that the class itself declares."""
    said = {
        name: text
        for owner in reversed(thing.__mro__)
        for name, text in field_docstrings(owner).items()
    }
    for name, kind in vars(thing).get("__annotations__", {}).items():
        field = getattr(thing, "__dataclass_fields__", {}).get(name)
        help = said.get(name) or (field.metadata.get("help") if field is not None else None)
        shown = kind if isinstance(kind, str) else _kind(kind)
        default = (
            "" if field is None or field.default is dataclasses.MISSING else f" = {field.default!r}"
        )
        yield f"- `{name}: {shown}{default}`" + (f": {help}" if help else "")


@functools.cache
def field_docstrings(thing: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0].body
    except (OSError, TypeError):
        return {}
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def flag_pages() -> str:
    """Return the text of docs/flags.md."""
    parts = [
        "# Every flag of every command",
        NOTE,
        "Each flag may be spelled with `-` or `_`; where a command takes `--config`, each is also "
        "a key of that YAML file, and "
        "the command line wins. A flag of yes and no has a `--no-` form. Without a default a flag "
        "has to be given, does "
        "nothing unless given, or takes what suits the machine.",
    ]
    printed: dict[str, set[str]] = {}  # rows of each command
    for name, (place, purpose) in cli.COMMANDS.items():
        for words, settings, default in _asked(name, place):
            parts += [f"## megaenc {words}", purpose[0].upper() + purpose[1:] + "."]
            groups = list(_grouped(settings, default))
            own_rows = {row for _, rows in groups for row in rows}
            # A flag is printed once: a command that takes many flags of an earlier one links to it.
            base, shared = max(
                ((other, rows & own_rows) for other, rows in printed.items()),
                key=lambda pair: len(pair[1]),
                default=("", ()),
            )
            if len(shared) >= _SHARED_FLAGS:
                left_out = sorted(row.split("`")[1] for row in printed[base] - own_rows)
                exceptions = (
                    f", except {', '.join(f'`{flag}`' for flag in left_out)}" if left_out else ""
                )
                link = base.replace(" ", "-")
                parts.append(
                    f"Takes the flags of [megaenc {base}](#megaenc-{link}) with the same "
                    f"defaults{exceptions}, and:"
                )
                groups = [
                    (title, [row for row in rows if row not in shared]) for title, rows in groups
                ]
            parts += [_table(title, rows) for title, rows in groups if rows]
            printed[words] = own_rows
    return "\n\n".join(parts) + "\n"


def _asked(name: str, place: str) -> Iterator[tuple[str, type, object]]:
    """Yield (command, flags' dataclass, defaults) of a command.

    `convert` has one for each of its subcommands.
    """
    module, function = place.split(":")
    for rest in (["to-hf"], ["from-hf"], ["merge"]) if name == "convert" else ([],):
        seen = []

        def parse(settings, argv, *, prog, description, default=None, seen=seen):
            seen.append((settings, default))
            raise SystemExit(0)

        with mock.patch.object(flags, "parse", parse), contextlib.suppress(SystemExit):
            getattr(importlib.import_module(module), function)(rest)
        yield " ".join([name, *rest]), *seen[0]


def _grouped(settings: type, default: object) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of a dataclass's flags and of those nested in it, by title."""
    own = []
    nested = []
    hints = typing.get_type_hints(settings, include_extras=True)
    said = {
        name: text
        for owner in reversed(settings.__mro__)
        for name, text in field_docstrings(owner).items()
    }
    for field in dataclasses.fields(settings):
        kind = hints[field.name]
        value = _default(field, default)
        if dataclasses.is_dataclass(kind):
            nested += _grouped(kind, None if value is dataclasses.MISSING else value)
            continue
        name = field.name
        aliases = []
        if typing.get_origin(kind) is typing.Annotated:
            kind, *notes = typing.get_args(kind)
            named = [getattr(note, "name", None) for note in notes]
            name = next(filter(None, named), name)
            aliases = [alias for note in notes for alias in getattr(note, "aliases", None) or ()]
            if tyro.conf.Positional in notes:
                name = f" {name.upper()}"
        flag = f"`--{name.replace('_', '-')}`" if not name.startswith(" ") else f"`{name[1:]}`"
        flag = ", ".join([flag, *(f"`{alias}`" for alias in aliases)])
        cells = [flag, _kind(kind), _shown(value), said.get(field.name, "")]
        own.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    if own:
        yield inspect.cleandoc(settings.__doc__ or "").splitlines()[0], own
    yield from nested


def _default(field: dataclasses.Field, default: object) -> object:
    """Return the default of a flag; MISSING if it has none or depends on the machine."""
    if inspect.isfunction(field.default_factory):
        return dataclasses.MISSING
    if default is not None:
        return getattr(default, field.name)
    if field.default is not dataclasses.MISSING:
        return field.default
    return (
        field.default_factory() if isinstance(field.default_factory, type) else dataclasses.MISSING
    )


def _table(title: str, rows: list[str]) -> str:
    return "\n".join([title, "", "| flag | takes | default | |", "|---|---|---|---|", *rows])


def _kind(kind: object) -> str:
    """Return a type in words."""
    if isinstance(kind, str):
        return kind
    origin = typing.get_origin(kind)
    inside = typing.get_args(kind)
    if origin in (UnionType, typing.Union):
        return " or ".join(_kind(part) for part in inside if part is not NoneType)
    if origin is typing.Literal:
        return ", ".join(map(str, inside))
    if origin is tuple:
        return f"{_kind(inside[0])} ..."
    if origin in (typing.ClassVar, typing.Annotated):
        return _kind(inside[0])
    words = {bool: "yes or no", int: "whole number", float: "number", str: "text", Path: "path"}
    return words.get(kind, getattr(kind, "__name__", str(kind)))


def _shown(value: object) -> str:
    if value is dataclasses.MISSING or value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def pages() -> dict[Path, str]:
    """Return the text of each generated file, by path."""
    return {DOCS / "api.md": api(), DOCS / "flags.md": flag_pages()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(DOCS.parent))
