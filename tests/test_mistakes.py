"""Plausible mistakes on the command line: one line, exit code 2 and no files.

The line names the flag, file or field. The tables are in tests/mistakes. All commands run in forks
of one process (workers/commands_in_turn.py).
"""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import runs
from mistakes import data, directory, models, pretrain, studies

from megaenc import cli

pytestmark = pytest.mark.slow

ROWS = data.ROWS | pretrain.ROWS | models.ROWS | studies.ROWS
SECONDS = 30  # for one command; what is wrong is seen at once


@dataclass(frozen=True)
class Ended:
    code: int | None
    """None: it was still running after SECONDS."""
    stderr: str
    changes: list[str]
    """paths that it created, changed or removed in the working directory"""
    seconds: float


def complete(line: str) -> str:
    """Return a command line of the tables with its abbreviations written out."""
    for name, value in directory.WORDS.items():
        line = line.replace(name, value)
    return line


@pytest.fixture(scope="module")
def ends(shared_directory, request) -> dict[str, Ended]:
    """Run all requested commands once in one place; return the end of each by line."""
    asked = [
        item.callspec.params["line"]
        for item in request.session.items
        if item.path == request.path and "ends" in item.fixturenames
    ]

    def make(place: Path) -> None:
        work = place / "work"
        work.mkdir()
        directory.write_texts(work)
        commands = [shlex.split(complete(line)) for line in (*directory.SETUP, *asked)]
        jobs = {
            "directory": str(work),
            "seconds": SECONDS,
            "keep": len(directory.SETUP),
            "commands": commands,
        }
        (place / "jobs.json").write_text(json.dumps(jobs))
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache"), "SLURM_JOB_ID": ""}
        script = runs.WORKERS / "commands_in_turn.py"
        command = [
            sys.executable,
            str(script),
            str(place / "jobs.json"),
            str(place / "results.jsonl"),
        ]
        runs.run(command, timeout=900, environment=environment, packages=runs.ROOT / "tests")

    results = shared_directory("mistakes", make) / "results.jsonl"
    ended = [Ended(**json.loads(line)) for line in results.read_text().splitlines()]
    for line, setup in zip(directory.SETUP, ended, strict=False):
        assert setup.code == 0, (line, setup)
    return dict(zip(asked, ended[len(directory.SETUP) :], strict=True))


@pytest.mark.parametrize("line", ROWS)
def test_a_mistake_is_one_line(ends, line):
    end = ends[line]
    assert end.code == 2, end
    assert end.changes == [], end
    lines = end.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), end.stderr
    assert ROWS[line] in lines[0]


def test_every_command_has_three_mistakes():
    lines = [complete(line) for line in ROWS]
    assert len(set(lines)) == len(lines)
    counts = {
        name: sum(f"{line} ".startswith(f"megaenc {name} ") for line in lines)
        for name in cli.COMMANDS
    }
    assert {name: count for name, count in counts.items() if count < 3} == {}
