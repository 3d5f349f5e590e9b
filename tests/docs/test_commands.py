"""Documents have one form for commands, every exception is a real one, and a command that fails is named with file and line."""

import ast
import subprocess
import sys

import pytest
from docs.commands import Exceptions, left_out, script, table
from docs.documents import LANGUAGES, ROOT, blocks, documents, indented_code, read

from docs import commands


@pytest.mark.parametrize("name", documents())
def test_a_block_says_what_it_holds(name):
    lines = read(name)
    assert not [f"{name}:{number}" for number in indented_code(lines)], "code by indentation: expected a fence with a language"
    for block in blocks(lines):
        assert block.language in LANGUAGES, f"{name}:{block.line}: {block.language!r}, expected one of {', '.join(LANGUAGES)}"
        if block.language == "python":
            ast.parse("\n".join(block.lines))


@pytest.mark.parametrize("name", documents())
def test_a_document_is_a_script(name):
    """That bash can read, as long as the document, so that line numbers are its own."""
    exceptions = table().get(name, Exceptions())
    text = script(name, exceptions)
    assert text.count("\n") == len(read(name))
    read_by_bash = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert not read_by_bash.stderr, f"{name}: {read_by_bash.stderr}"


def test_every_exception_is_of_something():
    """None has outlived what it was for, or is for more than one block."""
    for name, exceptions in table().items():
        assert name in documents(), name
        shown = commands.commands(name)
        assert shown, f"{name}: no commands"
        assert exceptions.after in ("", *documents())
        for entry in exceptions.not_run:
            matching = [block for block in shown if left_out(block, Exceptions(not_run=(entry,)))]
            assert len(matching) == 1, f"{name}: not run: {entry[0]!r} is in {len(matching)} blocks"
        text = script(name, Exceptions(not_run=exceptions.not_run))
        for words, _, _ in exceptions.instead:
            assert words in text, f"{name}: instead: {words!r} is in no block that is run"


def test_the_list_names_every_exception():
    said = subprocess.run(
        [sys.executable, "-m", "docs.commands", "--list"], cwd=ROOT / "tests", check=True, capture_output=True, text=True
    ).stdout
    for exceptions in table().values():
        assert all(why in said for _, _, why in (*exceptions.not_run, *exceptions.instead))


@pytest.fixture
def document(tmp_path, monkeypatch):
    """Write documents into a repository of their own and run one: whether it passed, and what was printed."""

    def run(capsys, name: str, exceptions: dict[str, Exceptions] | None = None, **texts: str) -> tuple[bool, str]:
        root, work = tmp_path / "root", tmp_path / "work"
        root.mkdir()
        for file, text in texts.items():
            (root / f"{file}.md").write_text(text)
        (root / "commands.yaml").touch()
        subprocess.run(["git", "init", "--quiet", str(root)], check=True)
        monkeypatch.setattr(commands, "ROOT", root)
        monkeypatch.setattr(commands, "TABLE", root / "commands.yaml")
        monkeypatch.setattr("docs.documents.ROOT", root)
        passed = commands.Runner(work, exceptions or {}).run(name)
        return passed, capsys.readouterr().out

    return run


def test_blocks_are_one_shell(document, capsys):
    first, second = "word=hello\ncat a.md > copy\n", "test $word = hello\ntest -s copy\n"
    text = f"Say\n```bash\n{first}```\nand\n```text\nnot a command\n```\n```bash\n{second}```\n"
    assert document(capsys, "a.md", a=text) == (True, "a.md: 2 of 2 blocks, 0:00\n")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("one\n\n```bash\ntrue\nfalse\n```\n", "a.md: line 5: exit code 1"),
        ("```bash\ntrue | false | true\n```\n", "a.md: line 2: exit code 1"),
        ("```bash\nif true; then\n```\n", "a.md: "),
        ("- a list\n\n  ```bash\n  no-such-program\n  ```\n", "a.md: line 4: exit code 127"),
        ("```bash\nf() {\n  exit 3\n}\nf\n```\n", "a.md: line 3: exit code 3"),
    ],
)
def test_a_command_that_fails_is_named(document, capsys, text, where):
    passed, said = document(capsys, "a.md", a=text)
    assert not passed and where in said


def test_a_document_goes_on_after_another(document, capsys):
    said = {"b.md": Exceptions(after="a.md", before="echo two > second\n", instead=((" three", "", "why"),))}
    second = "```bash\ntest \"$(cat first second | xargs)\" = 'one two three'\n```\n"
    passed, printed = document(capsys, "b.md", said, a="```bash\necho one > first\n```\n", b=second)
    assert passed and printed.startswith("a.md: 1 of 1 blocks") and "b.md: 1 of 1 blocks" in printed


def test_nothing_comes_after_what_failed(document, capsys):
    passed, said = document(
        capsys, "b.md", {"b.md": Exceptions(after="a.md")}, a="```bash\nfalse\n```\n", b="```bash\ntrue\n```\n"
    )
    assert not passed and "b.md: not run, as it comes after a.md" in said


def test_what_is_not_run_is_not_run(document, capsys):
    said = {"a.md": Exceptions(not_run=(("false", "cluster", "no"),))}
    assert document(capsys, "a.md", said, a="```bash\ntrue\n```\n```bash\nfalse\n```\n") == (True, "a.md: 1 of 2 blocks, 0:00\n")


def test_code_by_indentation_is_found():
    lines = [
        "prose",
        "",
        "    code",
        "    more",
        "",
        "- item",
        "",
        "    of the item",
        "",
        "prose",
        "    goes on",
        "",
        "```text",
        "    in a fence",
        "```",
    ]
    assert indented_code(lines) == [3, 4]
