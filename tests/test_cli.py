import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import runs

from megaenc import __version__, cli


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        cli.main(arguments)
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in cli.COMMANDS)
        assert "megaenc tokenizer --input corpus.jsonl" in shown


def test_version_is_of_the_package_and_of_what_it_runs_on(capsys):
    import megatron.core
    import torch
    import transformers

    cli.main(["--version"])
    versions = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert versions.pop("commit") == cli.read_commit(runs.ROOT / "megaenc")
    assert versions == {
        "megaenc": __version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "transformers": transformers.__version__,
    }


def test_the_changelog_begins_with_the_version():
    [first, *_] = re.findall(
        r"^## (\S+)", (runs.ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE
    )
    assert first == __version__


@pytest.fixture
def clone(tmp_path) -> Path:
    """Make a clone of one commit, with what builds the package and its top level."""
    directory = tmp_path / "clone"
    (directory / "megaenc").mkdir(parents=True)
    names = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
    for file in [*(runs.ROOT / name for name in names), *(runs.ROOT / "megaenc").glob("*.py")]:
        shutil.copy(file, directory / file.relative_to(runs.ROOT))
    (directory / ".gitignore").write_text("*.egg-info/\n__pycache__/\n")
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "First"]):
        subprocess.run(["git", *words], cwd=directory, check=True)
    return directory


def last_commit(clone: Path) -> str:
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(
        command, cwd=clone, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_clone_or_of_the_build(clone):
    assert cli.read_commit(clone / "megaenc") == last_commit(clone)
    (clone / "README.md").write_text("changed")
    assert cli.read_commit(clone / "megaenc") == f"{last_commit(clone)}-dirty"
    (clone / "megaenc/COMMIT").write_text("abc\n")
    assert cli.read_commit(clone / "megaenc") == "abc"
    assert cli.read_commit(clone.parent / "megaenc") == "unknown"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_wheel_of_a_source_distribution_has_the_commit(clone, tmp_path):
    setup = [sys.executable, "setup.py", "-q"]
    runs.run([*setup, "sdist", "-d", str(tmp_path)], cwd=clone)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    runs.run([*setup, "bdist_wheel", "-d", str(tmp_path)], cwd=tmp_path / archive.name[:-7])
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert files.read("megaenc/COMMIT").decode() == f"{last_commit(clone)}\n"


@pytest.mark.parametrize("arguments", ["data", "data --help"])
def test_the_first_of_two_words_lists_its_commands(capsys, arguments):
    cli.main(arguments.split())
    shown = capsys.readouterr().out
    assert shown.startswith("usage: megaenc data COMMAND")
    assert [name for name in cli.COMMANDS if f"  {name} " in shown] == [
        "data inspect",
        "data verify",
    ]


def test_a_command_of_two_words_gets_what_follows_them(monkeypatch):
    given = []
    monkeypatch.setattr("megaenc.data.indexed.verify.main", given.append)
    cli.main(["data", "verify", "out/corpus", "--tokenizer", "tokenizer"])
    assert given == [["out/corpus", "--tokenizer", "tokenizer"]]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("preproces --input a", "preproces: no such command; did you mean `megaenc preprocess`?"),
        ("xyz", "xyz: no such command; expected one of demo,"),
        ("dta", "dta: no such command; did you mean `megaenc data`?"),
        ("data verfy a", "data verfy: no such command; did you mean `megaenc data verify`?"),
        ("data xyz", "data xyz: no such command; expected one of data inspect, data verify"),
        ("dat verify", "dat verify: no such command; did you mean `megaenc data verify`?"),
        ("inspect a", "inspect: no such command; did you mean `megaenc data inspect`?"),
    ],
)
def test_an_unknown_command_is_one_line(refusal, given, hint):
    assert refusal(cli.main, given.split()).startswith(f"error: megaenc {hint}")


@pytest.mark.parametrize("name", ["tokenizer", "data inspect"])
def test_each_command_explains_itself(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert f"megaenc {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "doctor --only nothing --json",
        "estimate --gpu none --output",
        "tokenizer --input TEXT --vocab-size 3 --output",
        "finetune grid --model TEXT --datasets demo_sc --output",
        "finetune run --model TEXT --dataset demo_sc --output",
    ],
)
def test_a_refused_command_leaves_no_directory(tmp_path, refusal, words):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a"}\n')
    refusal(
        cli.main,
        [*words.replace("TEXT", str(text)).split(), tmp_path / "new" / "directory" / "file"],
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("from megaenc.cli import main; main([])", set()),
        (
            "import megaenc.doctor.command",
            set(),
        ),  # what is broken is broken in the process of the checks alone
        (
            (
                "from megaenc.cli import main; main(['estimate', '--model', '610m', '--gpu', "
                "'mi250x'])"
            ),
            {"numpy"},
        ),
    ],
)
def test_what_needs_no_model_imports_nothing_heavy(code, needed):
    heavy = {"torch", "numpy", "transformers", "megatron"} - needed
    subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; assert not {heavy} & set(sys.modules)"],
        check=True,
    )
