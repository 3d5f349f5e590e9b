"""The rules for names and docstrings in CONTRIBUTING.md, as far as a program can check them; ruff checks the mood."""

import ast
import re

import runs

FILES = sorted((runs.ROOT / "megaenc").rglob("*.py"))
OPENINGS = re.compile(r"(What|Whether|Which|Who|Whose|Whatever|That|Those|Of|Where|When|How|As|In|By|For|From|If|With)\b")
IDENTIFIERS = {"found", "asked", "made", "there", "wanted", "said", "here", "told", "seen", "shown", "beside", "begun", "looked"}


def docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, text) of the docstrings of modules, classes, functions, fields and constants."""
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return [(string.lineno, string.value) for string in strings if isinstance(string.value, str)]


def identifiers(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of variables, parameters, functions, classes and fields where they are defined."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append((node.lineno, node.name))
    return names


def test_docstrings_open_with_a_verb_or_a_noun():
    wrong = [
        f"{path.relative_to(runs.ROOT)}:{line}: {text.strip().splitlines()[0][:80]}"
        for path in FILES
        for line, text in docstrings(ast.parse(path.read_text()))
        if OPENINGS.match(text.strip())
    ]
    assert not wrong, "\n".join(wrong)


def test_names_are_no_participles_or_pronouns():
    wrong = [
        f"{path.relative_to(runs.ROOT)}:{line}: {name}"
        for path in FILES
        for line, name in identifiers(ast.parse(path.read_text()))
        if name.strip("_") in IDENTIFIERS
    ]
    assert not wrong, "\n".join(wrong)


def test_a_class_name_exists_once():
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(runs.ROOT)}")
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_folders_of_the_package_have_few_files():
    folders = [path for path in (runs.ROOT / "megaenc").rglob("*") if path.is_dir() and path.name != "__pycache__"]
    most = {runs.ROOT / "megaenc/training": 22}
    counts = {folder: sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > most.get(folder, 15)} == {}
