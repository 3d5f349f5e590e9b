"""Print the tests that reach changes since a revision: `changed.py [REVISION]`.

A definition reaches what it names: definitions of its own module and of those that it imports,
modules and scripts that it names as text, and the statements of a module that run at import. So a
changed function is reached by the tests that name something that names it. A call by a name that is
assembled at run time is not seen.
"""

import argparse
import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT = ""
"""Name for what a module does when it is imported."""
Definition = tuple[str, str]
"""Path of a module, and name of one of its functions, classes or values."""


def run_git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


class Reach:
    """What each definition of the repository's Python files reaches."""

    def __init__(self, files: list[str]) -> None:
        """Read the Python files of `files`, which are relative to the repository."""
        paths = [path for path in files if path.endswith(".py")]
        self.trees = {path: ast.parse((ROOT / path).read_bytes()) for path in paths}
        self.modules = {}
        self.scripts = {}
        for path in paths:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.modules[name] = path
            if path.startswith(("tests/", "benchmarks/")):
                self.modules[Path(path).stem] = (
                    path  # their directories are on the path for imports
                )
                self.modules[name.removeprefix("tests.")] = path
            self.scripts[Path(path).name] = path
        self.names = {path: _list_definitions(tree) for path, tree in self.trees.items()}
        self.files = defaultdict(set)
        for path in set(files) - set(paths):
            for part in Path(path).parts:
                self.files[part].add((path, IMPORT))

    @functools.cached_property
    def edges(self) -> dict[Definition, set[Definition]]:
        """Return what each definition names."""
        edges = {}
        for path, tree in self.trees.items():
            imported = self._list_imports(tree)
            when_imported = edges.setdefault((path, IMPORT), set(self._list_packages(path)))
            for statement in tree.body:
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    when_imported.update(
                        (module, IMPORT) for module in self._list_modules(statement)
                    )
                for name in _name_statement(statement):
                    named = edges.setdefault((path, name), {(path, IMPORT)})
                    named.update(self._list_named(path, statement, imported))
        return edges

    def _list_imports(self, tree: ast.Module) -> dict[str, list[Definition]]:
        """Return what each imported name of a module stands for."""
        imported = defaultdict(list)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.modules:
                        imported[(alias.asname or alias.name).split(".")[0]].append(
                            (self.modules[alias.name], "*")
                        )
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in self.modules:
                        imported[alias.asname or alias.name].append((self.modules[whole], "*"))
                    elif node.module in self.modules:
                        imported[alias.asname or alias.name].append(
                            (self.modules[node.module], alias.name)
                        )
        return imported

    def _list_modules(self, node: ast.Import | ast.ImportFrom) -> set[str]:
        """Return the paths of the modules that a statement imports."""
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        return {self.modules[name] for name in names if name in self.modules}

    def _list_named(
        self, path: str, statement: ast.stmt, imported: dict[str, list[Definition]]
    ) -> Iterator[Definition]:
        """Yield the definitions that a statement of a module names."""
        attributes = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Name | ast.arg):
                name = node.id if isinstance(node, ast.Name) else node.arg
                if name in self.names[path]:
                    yield path, name
                for module, what in imported.get(name, ()):
                    yield module, IMPORT
                    if what == "*":
                        yield from (
                            (module, attribute) for attribute in attributes & self.names[module]
                        )
                    else:
                        yield module, what
                for fixtures in self._list_fixtures(path):
                    if name in self.names[fixtures]:
                        yield fixtures, name
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._list_named_in_text(node.value)

    def _list_named_in_text(self, text: str) -> Iterator[Definition]:
        """Yield the whole modules, scripts and other files that a text names."""
        for word in text.split():
            file_name = word.rpartition("/")[2]
            yield from self.files.get(file_name, ())
            module = self.modules.get(word.partition(":")[0]) if "." in word else None
            for path in {module, self.scripts.get(file_name)} - {None}:
                yield path, IMPORT
                yield from ((path, name) for name in self.names[path])

    def _list_fixtures(self, path: str) -> Iterator[str]:
        """Yield the conftest.py of each directory above a file of tests."""
        for directory in Path(path).parents:
            if f"{directory}/conftest.py" in self.trees and path != f"{directory}/conftest.py":
                yield f"{directory}/conftest.py"

    def _list_packages(self, path: str) -> Iterator[Definition]:
        """Yield the packages that are imported before a module is."""
        for directory in Path(path).parents:
            if f"{directory}/__init__.py" in self.trees:
                yield f"{directory}/__init__.py", IMPORT

    def find_definitions(self, path: str, first: int, last: int) -> set[Definition]:
        """Return the definitions that the lines `first` to `last` of a module are part of."""
        found = set()
        for statement in self.trees[path].body:
            top = min(
                [
                    statement.lineno,
                    *(node.lineno for node in getattr(statement, "decorator_list", ())),
                ]
            )
            if top <= last and first <= statement.end_lineno:
                found |= {(path, name) for name in _name_statement(statement)}
        return found

    def find_tests(self, changed: set[Definition]) -> list[str]:
        """Return the pytest ids of tests that reach definitions `changed`, nearest first."""
        found = dict.fromkeys(changed)
        for definition in (queue := list(found)):
            new = [other for other in self.naming[definition] if other not in found]
            found.update(dict.fromkeys(new))
            queue += new
        return [
            f"{path}::{name}"
            for path, name in found
            if Path(path).name.startswith("test_") and name.startswith("test_")
        ]

    @functools.cached_property
    def naming(self) -> dict[Definition, list[Definition]]:
        """Return the definitions that name each one."""
        naming = defaultdict(list)
        for definition, named in self.edges.items():
            for other in sorted(named):
                naming[other].append(definition)
        return naming


def _name_statement(statement: ast.stmt) -> list[str]:
    """Return the names that a statement defines, IMPORT if none."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return []
    names = [
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return names or [IMPORT]


def _list_definitions(tree: ast.Module) -> set[str]:
    return {name for statement in tree.body for name in _name_statement(statement)} - {IMPORT}


def list_changed(revision: str, reach: Reach) -> set[Definition]:
    """Return the definitions with lines that differ from `revision`.

    All definitions of new files count as changed. A file that is not Python has only IMPORT.
    """
    changed = set()
    for path in run_git("ls-files", "--others", "--exclude-standard").split():
        changed |= {(path, name) for name in reach.names.get(path, ())} | {(path, IMPORT)}
    for part in re.split(
        r"^diff --git ", run_git("diff", "--unified=0", revision), flags=re.MULTILINE
    )[1:]:
        path = part.split("\n")[0].rpartition(" b/")[2]
        if path not in reach.trees:
            changed.add((path, IMPORT))
            continue
        for start, count in re.findall(r"^@@ \S+ \+(\d+)(?:,(\d+))? @@", part, flags=re.MULTILINE):
            first = int(start)
            last = first + max(1, int(count or 1)) - 1
            changed |= reach.find_definitions(path, first, last)
    return changed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "revision",
        nargs="?",
        default="HEAD",
        help="revision of git to compare the working tree with",
    )
    revision = parser.parse_args().revision
    reach = Reach(run_git("ls-files", "--cached", "--others", "--exclude-standard").split())
    print("\n".join(reach.find_tests(list_changed(revision, reach))))


if __name__ == "__main__":
    main()
