import io
import re
import subprocess
import sys
import types

import pytest

from megaenc import console
from megaenc.console import (
    ProgressLine,
    build_rich_console,
    escape_unprintable,
    format_duration,
    print_rank_0,
)
from megaenc.errors import InputError, handle_command_errors


def test_durations():
    seconds = (42, 3_723.4, 172_799, 172_800, 216_000)
    assert [format_duration(count) for count in seconds] == [
        "0:42",
        "1:02:03",
        "47:59:59",
        "2.0 days",
        "2.5 days",
    ]


def test_a_pipe_gets_a_line_now_and_then_and_one_at_the_end(capsys, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(
        console.time, "monotonic", lambda: next(clock)
    )  # every look at the clock is a second later
    with ProgressLine("tokenising", total=200, interval=10) as progress:
        for done in range(0, 100, 5):
            progress.update(done, **{"MB/s": 12.345}, documents=1204, tokens=3_100_000)
        progress.update(200, description="done")
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 4
    assert re.fullmatch(
        r"tokenising  \d+ %  MB/s 12\.35  documents 1,204  tokens 3\.10M  0:\d\d left", lines[0]
    )
    assert lines[-1] == "done  100 %  MB/s 12.35  documents 1,204  tokens 3.10M"


def test_time_left_counts_from_where_a_resumed_run_starts(capsys, monkeypatch):
    clock = iter([0, 0, 10, 10, 10])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    with ProgressLine("training", total=1000, interval=5) as progress:
        progress.update(500)
        progress.update(600)  # 100 steps in 10 seconds, 400 to go
    assert capsys.readouterr().out.splitlines() == ["training  60 %  0:40 left"]


def test_the_closing_line(capsys):
    """It shows a percentage only if the total is known, and none after an exception."""
    with ProgressLine("reading", total=None, interval=0) as progress:
        progress.update(3, loss=3.21, phase="mlm")
    assert capsys.readouterr().out == "reading  loss 3.21  phase mlm\n"
    with pytest.raises(ZeroDivisionError), ProgressLine("reading", total=9) as progress:
        progress.update(1)
        raise ZeroDivisionError
    with ProgressLine("reading", total=9, closing=False) as progress:
        progress.update(9)
    assert capsys.readouterr().out == ""


def test_a_notebook_has_one_line_that_changes(capsys, monkeypatch):
    """It is an output area of its own, so that what a cell prints stands below it."""
    areas = []

    class OutStream(io.StringIO):
        pass

    def display(data: dict[str, str], raw: bool, display_id: bool) -> types.SimpleNamespace:
        areas.append([data["text/plain"]])
        return types.SimpleNamespace(update=lambda data, raw: areas[-1].append(data["text/plain"]))

    OutStream.__module__ = "ipykernel.iostream"
    monkeypatch.setattr(sys, "stdout", OutStream())
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    module = types.SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr(console, "_NOTEBOOK_INTERVAL", 0)
    with ProgressLine("training", total=4) as progress:
        progress.update(1)
        progress.update(4, loss=2.5)
        progress.print_line("below")
    with ProgressLine("loading", total=None, closing=False) as progress:
        progress.update(1)
    assert areas == [
        ["", "training  25 %", "training  100 %  loss 2.5"],
        ["", "loading", ""],
    ]
    assert sys.stdout.getvalue() == "below\n"


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    print_rank_0("hello")
    with ProgressLine("reading", total=2, interval=0) as progress:
        progress.update(1)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    print_rank_0("hello")
    assert capsys.readouterr().out == "hello\n"


def plug_terminal(monkeypatch):
    """Replace standard output by a terminal; return what it gets."""
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    return stream


@pytest.mark.parametrize(("total", "closing"), [(8, True), (None, True), (8, False)])
def test_a_terminal_gets_one_live_line(monkeypatch, total, closing):
    """Without a closing line it is erased."""
    terminal = plug_terminal(monkeypatch)
    with ProgressLine("[training]", total=total, closing=closing) as progress:
        progress.update(4, loss=2.5)
        progress.update(8, loss=2.25)
    shown = terminal.getvalue()
    last = next(line for line in reversed(shown.split("\n")) if "training" in line)
    assert "[training]" in last and "loss 2.25" in last and ("100 %" in last) == (total is not None)
    erase_line = "\x1b[2K"
    assert shown.endswith(erase_line) == (not closing)


@pytest.mark.slow
def test_quiet_is_cheap_and_silences_others_but_not_us():
    code = """
import sys
from megaenc.console import silence_libraries
silence_libraries()
assert not {"torch", "transformers", "rich"} & set(sys.modules)
import logging, warnings
warnings.warn_explicit("from a package", UserWarning, "x.py", 1, module="megatron.core")
logging.getLogger("megatron.core.utils").warning("from a logger")
warnings.warn_explicit("from ourselves", UserWarning, "y.py", 1, module="megaenc.data")
from megatron.core.datasets.indexed_dataset import IndexedDataset
from transformers import AutoTokenizer
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr == "y.py:1: UserWarning: from ourselves\n"


# Clears the screen, returns to the start of the line, is a control sequence in one character,
# reverses the direction of writing.
HOSTILE = "a\x1b[2J\rb\x9b31mc\u202ed\u2066e\x07\u2028f\udcffg"
SHOWN = r"a\x1b[2J\rb\x9b31mc\u202ed\u2066e\x07\u2028f\udcffg"


@pytest.mark.parametrize("text", ["naïve 文 ✓ █▉ 👩‍👩‍👧 μ ß", r"a\x1b", "עברית and العربية"])
def test_text_that_a_terminal_only_shows_stays_as_it_is(text, capsys):
    assert escape_unprintable(text) is text or escape_unprintable(text) == text
    print_rank_0(f"{text}\n\tmore")
    build_rich_console(width=200, highlight=False).print(text)
    assert capsys.readouterr().out == f"{text}\n\tmore\n{text}\n"


def test_text_that_a_terminal_acts_on_is_spelled(capsys):
    print_rank_0(HOSTILE)
    with ProgressLine(HOSTILE, total=None, interval=0) as progress:
        progress.update(1, **{"model\x1b": "x\ny\x1b"})
    build_rich_console(width=200, markup=False, highlight=False).print(HOSTILE)
    out = capsys.readouterr().out.split("\n")
    by_rich = SHOWN.replace(r"\r", "").replace(r"\x07", "")  # which rich leaves out itself
    assert out == [SHOWN, rf"{SHOWN}  model\x1b x\ny\x1b", by_rich, ""]

    @handle_command_errors
    def main():
        raise InputError(f"--model {HOSTILE}\n: no such directory")

    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert (
        escape_unprintable(said, keep="\n") == said
        and said.count("\n") == 1
        and r"a\x1b[2J b\x9b31mc\u202ed" in said
    )


def test_a_live_line_spells_what_a_terminal_acts_on(monkeypatch):
    terminal = plug_terminal(monkeypatch)
    with ProgressLine("evil\x1b]0;title\x07", total=2) as progress:
        progress.update(1, **{"data set": "\x1b[2Jx"})
    shown = terminal.getvalue()
    assert r"evil\x1b]0;title\x07" in shown and r"\x1b[2Jx" in shown
    assert "\x1b]0" not in shown and "\x1b[2J" not in shown and "\x07" not in shown
