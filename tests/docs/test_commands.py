"""Commands in documents: their form, exceptions, and failures with file and line."""

import ast
import subprocess
import sys

import pytest
from docs.commands import Exceptions, left_out, script, table
from docs.documents import LANGUAGES, ROOT, blocks, documents, read

from docs import commands


@pytest.mark.parametrize("name", documents())
def test_a_block_says_what_it_holds(name):
    for block in blocks(read(name)):
        assert block.language in LANGUAGES, (
            f"{name}:{block.line}: {block.language!r}, expected one of {', '.join(LANGUAGES)}"
        )
        if block.language == "python":
            ast.parse("\n".join(block.lines))


@pytest.mark.parametrize("name", documents())
def test_a_document_is_a_script(name):
    """Bash can parse it, and line numbers are those of the document."""
    exceptions = table().get(name, Exceptions())
    text = script(name, exceptions)
    assert text.count("\n") == len(read(name))
    read_by_bash = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert not read_by_bash.stderr, f"{name}: {read_by_bash.stderr}"


def test_every_exception_is_of_something():
    """An exception matches one block, and its replaced words exist."""
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
    words = [sys.executable, "-m", "docs.commands", "--list"]
    said = subprocess.run(
        words, cwd=ROOT / "tests", check=True, capture_output=True, text=True
    ).stdout
    for exceptions in table().values():
        for _, _, why in (*exceptions.not_run, *exceptions.instead):
            assert why in said


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that writes documents to a new repository and runs one.

    It returns whether the document passed, and the output.
    """

    def run(name: str, texts: dict[str, str], **exceptions: Exceptions) -> tuple[bool, str]:
        root = tmp_path / "root"
        root.mkdir()
        for file, text in texts.items():
            (root / f"{file}.md").write_text(text)
        subprocess.run(["git", "init", "--quiet", str(root)], check=True)
        monkeypatch.setattr(commands, "ROOT", root)
        monkeypatch.setattr("docs.documents.ROOT", root)
        said = {f"{file}.md": exception for file, exception in exceptions.items()}
        passed = commands.Runner(tmp_path / "work", said).run(f"{name}.md")
        return passed, capsys.readouterr().out

    return run


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
def test_a_command_that_fails_is_named_and_nothing_comes_after_it(run, text, where):
    passed, said = run("b", {"a": text, "b": "```bash\ntrue\n```\n"}, b=Exceptions(after="a.md"))
    assert not passed
    assert where in said
    assert "b.md: not run, as it comes after a.md" in said


def test_blocks_are_one_shell_and_go_on_after_another_document(run):
    exceptions = Exceptions(
        after="a.md",
        before="echo two > second\n",
        not_run=(("false", "", ""),),
        instead=((" three", "", ""),),
    )
    first = (
        "Say\n```bash\nword=one\n```\nand\n```text\nnot a command\n```\n"
        "```bash\necho $word > first\n```\n"
    )
    second = (
        "```bash\ntest \"$(cat first second | xargs)\" = 'one two three'\n```\n"
        "```bash\nfalse\n```\n"
    )
    passed, printed = run("b", {"a": first, "b": second}, b=exceptions)
    assert passed
    assert "a.md: 2 of 2 blocks" in printed
    assert "b.md: 1 of 2 blocks" in printed
