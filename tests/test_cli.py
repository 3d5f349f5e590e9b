import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaenc import __version__, cli

ROOT = Path(__file__).parents[1]


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        cli.main(arguments)
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in cli.COMMANDS)
        assert "megaenc tokenizer --input corpus.jsonl" in shown
    cli.main(["--version"])
    assert capsys.readouterr().out == f"megaenc {__version__}\n"


@pytest.mark.parametrize("arguments", [["data"], ["data", "--help"], ["data", "-h"]])
def test_the_first_of_two_words_lists_its_commands(capsys, arguments):
    cli.main(arguments)
    shown = capsys.readouterr().out
    assert shown.startswith("usage: megaenc data COMMAND")
    assert [name for name in cli.COMMANDS if f"  {name} " in shown] == ["data inspect", "data verify"]


def test_a_command_of_two_words_gets_what_follows_them(monkeypatch):
    given = []
    monkeypatch.setattr("megaenc.data.indexed.verify.main", given.append)
    cli.main(["data", "verify", "out/corpus", "--tokenizer", "tokenizer"])
    assert given == [["out/corpus", "--tokenizer", "tokenizer"]]


@pytest.mark.parametrize(
    ("given", "named", "hint"),
    [
        (["preproces"], "preproces", "did you mean `megaenc preprocess`?"),
        (["preproces", "--input", "a"], "preproces", "did you mean `megaenc preprocess`?"),
        (["xyz"], "xyz", "expected one of demo,"),
        (["dta"], "dta", "did you mean `megaenc data`?"),
        (["data", "verfy", "a"], "data verfy", "did you mean `megaenc data verify`?"),
        (["data", "xyz"], "data xyz", "expected one of data inspect, data verify"),
        (["dat", "verify"], "dat verify", "did you mean `megaenc data verify`?"),
        (["inspect", "a"], "inspect", "did you mean `megaenc data inspect`?"),
    ],
)
def test_an_unknown_command_is_one_line(capsys, given, named, hint):
    with pytest.raises(SystemExit) as stop:
        cli.main(given)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: megaenc {named}: no such command; {hint}")
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("name", ["demo", "tokenizer", "preprocess", "data inspect", "data verify"])
def test_each_command_explains_itself(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert f"megaenc {name}" in capsys.readouterr().out


def test_the_command_line_imports_nothing_heavy():
    code = "import sys; from megaenc.cli import main; main([]); assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_the_tool_is_the_command(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", "none.jsonl"]
    command += ["--output-prefix", "out", "--tokenizer", "none"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: none.jsonl: no such file or folder; expected JSONL, CSV, TSV, Parquet or text")
    assert ended.stderr.count("\n") == 1
    assert importlib.util.find_spec("megaenc.data.preprocess.command") is not None


@pytest.mark.parametrize(
    ("command", "flag", "name"),
    [
        ("bench data", "--output", "folder"),
        ("bench loader", "--output", "folder"),
        ("bench pretrain", "--output", "folder"),
        ("doctor", "--json", "folder"),
        ("estimate --gpu h100", "--output", "folder"),
        ("finetune summary results", "--output", "folder.md"),
        ("plot run", "--output", "folder.png"),
        ("study plan manifest.yaml", "--picture", "folder.png"),
    ],
)
def test_a_folder_in_the_place_of_an_output_file_is_refused_before_any_work(tmp_path, refusal, command, flag, name):
    folder = tmp_path / name
    folder.mkdir()
    assert (
        refusal(cli.main, [*command.split(), flag, folder])
        == f"error: {flag} {folder}: found a folder, expected the name of a file"
    )
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        "doctor --only nothing --json",
        "bench loader --rounds 0 --output",
        "bench pretrain --rounds 0 --output",
        "bench data --input ./none --output",
        "estimate --gpu none --output",
        "tokenizer --input TEXT --vocab-size 3 --output",
        "finetune grid --model TEXT --datasets demo_sc --output",
        "finetune run --model TEXT --dataset demo_sc --output",
    ],
)
def test_a_refused_command_leaves_no_folder(tmp_path, refusal, words):
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a"}\n')
    refusal(cli.main, [*words.replace("TEXT", str(text)).split(), tmp_path / "new" / "folder" / "file"])
    assert [path.name for path in tmp_path.iterdir()] == ["text.jsonl"]
