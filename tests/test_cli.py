import subprocess
import sys

import pytest

from megaenc import __version__, cli


def test_help_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        cli.main(arguments)
        shown = capsys.readouterr().out
        assert all(f"  {name} " in shown for name in cli.COMMANDS)
        assert "megaenc tokenizer --input corpus.jsonl" in shown
    cli.main(["--version"])
    assert capsys.readouterr().out == f"megaenc {__version__}\n"


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
