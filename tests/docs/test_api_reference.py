"""Generated pages agree with the code."""

import ast
import dataclasses
import importlib.util
import re
import sys
import typing

import pytest
from docs.documents import ROOT, read

from megaenc import cli
from megaenc.flags import Bounds

_PLACEHOLDER = "\0"


def load(name: str):
    """Import a script of docs/scripts as a module."""
    spec = importlib.util.spec_from_file_location(
        f"docs_scripts_{name}", ROOT / "docs/scripts" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages():
    return {path.name: text for path, text in load("reference").pages().items()}


@pytest.mark.parametrize("name", ["api.md", "flags.md"])
def test_the_reference_is_up_to_date(pages, name):
    assert (ROOT / "docs" / name).read_text() == pages[name], "run `make reference`"


def test_the_picture_is_up_to_date():
    picture = load("picture")
    assert picture.FILE.read_text() == picture.picture(), "run `make reference`"


def test_every_command_has_its_flags(pages):
    headings = re.findall(r"^## megaenc (.*)$", pages["flags.md"], re.MULTILINE)
    assert {re.sub(r" (to-hf|from-hf|merge)$", "", name) for name in headings} == set(cli.COMMANDS)
    assert "| `--tensor-model-parallel-size` | whole number | 1 |" in pages["flags.md"]


def test_every_flag_and_public_name_is_explained(pages):
    silent = [
        line
        for line in pages["flags.md"].splitlines()
        if line.startswith("| `") and line.endswith("|  |")
    ]
    assert not silent
    for part in pages["api.md"].split("\n### ")[1:]:
        assert re.search(r"```\n\n\S", part), part.partition("\n")[0]


def messages() -> set[str]:
    """Return every text of the package, with a mark for each inserted value."""
    found = set()
    for path in (ROOT / "megaenc").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else _PLACEHOLDER
                    for part in node.values
                )
                found.add("".join(parts).replace("`", ""))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.replace("`", ""))
    return found


def test_the_errors_that_are_explained_are_those_of_the_code():
    """`…` stands for any value; errors of other programs are left out."""
    own = "\n".join(read("docs/troubleshooting.md")).partition("## From torch")[0]
    shown = [line.split("|")[1].strip() for line in own.splitlines() if line.startswith("| `")]
    assert len(shown) > 40
    texts = messages()
    for message in shown:
        parts = [part.strip() for part in message.strip("`").split("…") if part.strip()]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(pattern.search(text) for text in texts), message


def settings_of_commands() -> set[type]:
    """Return the dataclasses of flags of all commands, nested ones too."""
    reference = load("reference")
    todo = [
        settings
        for name, (place, _) in cli.COMMANDS.items()
        for _, settings, _ in reference._asked(name, place)
    ]
    seen = set()
    while todo:
        seen.add(settings := todo.pop())
        todo += [
            kind
            for kind in typing.get_type_hints(settings).values()
            if dataclasses.is_dataclass(kind)
        ]
    return seen


def parts(kind) -> list:
    """Return a type and all types in it, with their annotations."""
    return [kind, *(part for inside in typing.get_args(kind) for part in parts(inside))]


@pytest.mark.parametrize(
    "settings", sorted(settings_of_commands(), key=lambda settings: settings.__name__)
)
def test_every_number_has_bounds(settings):
    for name, kind in typing.get_type_hints(settings, include_extras=True).items():
        inside = parts(kind)
        assert not any(part in (int, float) for part in inside) or any(
            isinstance(part, Bounds) for part in inside
        ), name
