"""Rules for names and docstrings in CONTRIBUTING.md that a program can check."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
import runs
from changed import Reach, run_git

FILES = sorted((runs.ROOT / "megaenc").rglob("*.py"))
OPENINGS = re.compile(
    r"(What|Whether|Which|Who|Whose|Whatever|That|Those|Of|Where|When|How|As|In|By|For|From|If|With)\b"
)
IDENTIFIERS = {
    "found",
    "asked",
    "made",
    "there",
    "wanted",
    "said",
    "here",
    "told",
    "seen",
    "shown",
    "beside",
    "begun",
    "looked",
}


def walk(files: list[Path]) -> list[tuple[str, ast.AST]]:
    """Return (file, node) of every node in Python files."""
    return [
        (f"{path.relative_to(runs.ROOT)}", node)
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
    ]


NODES = walk(FILES)


def test_docstrings_open_with_a_verb_or_a_noun():
    """Modules, classes, functions, fields and constants are checked."""
    wrong = []
    for file, node in NODES:
        text = (
            node.value.value
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            else None
        )
        if isinstance(text, str) and OPENINGS.match(text.strip()):
            wrong.append(f"{file}:{node.lineno}: {text[:80]}")
    assert not wrong, "\n".join(wrong)


def test_first_lines_of_docstrings_are_short():
    """Of modules, classes and functions, those of tests too: at most 80 characters."""
    described = ast.Module | ast.ClassDef | ast.FunctionDef
    long = []
    for file, node in [*NODES, *walk(sorted((runs.ROOT / "tests").rglob("*.py")))]:
        text = ast.get_docstring(node) if isinstance(node, described) else None
        if text and len(text.splitlines()[0]) > 80:
            long.append(f"{file}: {text.splitlines()[0]}")
    assert not long, "\n".join(long)


def test_a_statement_assigns_one_value():
    """Except swaps, and calls and other values that are taken apart."""
    packed = []
    several = ast.Tuple | ast.List
    for file, node in NODES:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], several):
            names = {ast.unparse(target) for target in node.targets[0].elts}
            is_packed = isinstance(node.value, ast.GeneratorExp | ast.ListComp)
            if isinstance(node.value, several):
                is_packed = names != {ast.unparse(value) for value in node.value.elts}
            if is_packed:
                packed.append(f"{file}:{node.lineno}: {ast.unparse(node)[:80]}")
    assert not packed, "\n".join(packed)


def test_names_are_no_participles_or_pronouns():
    """Definitions of variables, parameters, functions, classes and fields are checked."""
    wrong = []
    for file, node in NODES:
        name = getattr(node, "arg", None) or getattr(node, "name", None)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        if (
            isinstance(node, ast.Name | ast.arg | ast.FunctionDef | ast.ClassDef)
            and name
            and name.strip("_") in IDENTIFIERS
        ):
            wrong.append(f"{file}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def test_a_class_name_exists_once():
    classes = [
        node.name
        for path in FILES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted(classes) == sorted(set(classes))


def test_directories_of_the_package_have_few_files():
    counts = Counter(
        path.parent for path in FILES if path.name not in ("__init__.py", "__main__.py")
    )
    most = {runs.ROOT / "megaenc/training": 22}
    assert {
        directory: count for directory, count in counts.items() if count > most.get(directory, 15)
    } == {}


def test_no_two_files_of_tests_are_one_module():
    """pytest would refuse the second one, but not if directories run separately."""
    files = (runs.ROOT / "tests").rglob("test_*.py")
    names = Counter(file.name for file in files if not (file.parent / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.slow
def test_what_reaches_a_change_is_run():
    """An import, a script that is named as text and a fixture reach it."""
    reach = Reach(run_git("ls-files").split())
    pairs = reach.find_tests({("megaenc/embed/pairs.py", "load_pairs")})
    assert any(test.startswith("tests/embed/test_pairs.py::") for test in pairs)
    assert not any(test.startswith("tests/model/") for test in pairs)
    assert any(
        test.startswith("tests/training/test_resume.py::")
        for test in reach.find_tests({("megaenc/training/engine.py", "Engine")})
    )
    assert any(
        test.startswith("tests/convert/")
        for test in reach.find_tests({("tests/conftest.py", "small_corpus")})
    )
    assert "tests/docker/test_install.py" in {
        test.split("::")[0] for test in reach.find_tests({("install.sh", "")})
    }
