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


@pytest.mark.parametrize(
    ("given", "hint"), [("preproces", "did you mean `megaenc preprocess`?"), ("xyz", "expected one of demo,")]
)
def test_an_unknown_command_is_one_line(capsys, given, hint):
    with pytest.raises(SystemExit) as stop:
        cli.main([given])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: megaenc {given}: no such command; ") and hint in captured.err
    assert captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("name", ["demo", "tokenizer", "preprocess"])
def test_each_command_explains_itself(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
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
    assert ended.stderr.startswith("error: none.jsonl: no such file or folder; expected JSONL, Parquet or text files, a folder")
    assert ended.stderr.count("\n") == 1
    assert importlib.util.find_spec("megaenc.data.preprocess") is not None
