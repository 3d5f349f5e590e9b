"""Plausible mistakes on the command line: each is one line that names the flag, file or field, exit code 2, and nothing on disk.

The tables are in tests/mistakes: (command line, part of the line). All run in forks of one process (workers/commands_in_turn.py).
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs
from mistakes import data, folder, models, pretrain, studies

from megaenc import cli

pytestmark = pytest.mark.slow

TABLES = {"data": data.ROWS, "pretrain": pretrain.ROWS, "models": models.ROWS, "studies": studies.ROWS}
SECONDS = 30  # for one command; what is wrong is seen at once


@dataclass(frozen=True)
class Ended:
    """The end of one command."""

    code: int | None
    """None: it was still running after SECONDS."""
    stderr: str
    changes: list[str]
    """paths that it created, changed or removed in the working folder"""
    seconds: float


def words(line: str) -> list[str]:
    """Return the words of a command line of the tables."""
    for name, value in folder.WORDS.items():
        line = line.replace(name, value)
    return shlex.split(line)


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> dict[str, Ended]:
    """The end of every command of the tables, by its line."""
    return run_all(tmp_path_factory.mktemp("mistakes"), [line for rows in TABLES.values() for line, _ in rows])


def run_all(place: Path, lines: list[str]) -> dict[str, Ended]:
    """Run command lines one after the other, each in the same working folder below `place`."""
    work = place / "work"
    work.mkdir()
    folder.write_texts(work)
    commands = [words(line) for line in (*folder.SETUP, *lines)]
    (place / "jobs.json").write_text(
        json.dumps({"folder": str(work), "seconds": SECONDS, "keep": len(folder.SETUP), "commands": commands})
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache"), "SLURM_JOB_ID": ""}
    script = [sys.executable, str(runs.WORKERS / "commands_in_turn.py"), str(place / "jobs.json"), str(place / "results.jsonl")]
    runs.run(script, timeout=900, environment=environment, packages=runs.ROOT / "tests")
    results = [Ended(**json.loads(line)) for line in (place / "results.jsonl").read_text().splitlines()]
    for line, setup in zip(folder.SETUP, results, strict=False):
        assert setup.code == 0, (line, setup)
    return dict(zip(lines, results[len(folder.SETUP) :], strict=True))


def check(ended: Ended, expected: str) -> None:
    """A command ended as one must that was given wrong input."""
    assert ended.code == 2, ended
    assert ended.changes == [], ended
    lines = ended.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), ended.stderr
    assert expected in lines[0]


@pytest.mark.parametrize(("line", "expected"), data.ROWS, ids=[line for line, _ in data.ROWS])
def test_mistakes_with_data(ended, line, expected):
    check(ended[line], expected)


@pytest.mark.parametrize(("line", "expected"), pretrain.ROWS, ids=[line for line, _ in pretrain.ROWS])
def test_mistakes_in_pretraining(ended, line, expected):
    check(ended[line], expected)


@pytest.mark.parametrize(("line", "expected"), models.ROWS, ids=[line for line, _ in models.ROWS])
def test_mistakes_with_models(ended, line, expected):
    check(ended[line], expected)


@pytest.mark.parametrize(("line", "expected"), studies.ROWS, ids=[line for line, _ in studies.ROWS])
def test_mistakes_in_studies(ended, line, expected):
    check(ended[line], expected)


def test_every_command_has_eight_mistakes():
    lines = [line for rows in TABLES.values() for line, _ in rows]
    assert len(set(lines)) == len(lines)
    counts = {
        name: sum(line.startswith(f"megaenc {name} ") or line == f"megaenc {name}" for line in lines) for name in cli.COMMANDS
    }
    assert {name: count for name, count in counts.items() if count < 8} == {}
