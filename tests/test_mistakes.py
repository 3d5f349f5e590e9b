"""Plausible mistakes on the command line: each is one line that names the flag, file or field, exit code 2, and nothing on disk.

The tables are in tests/mistakes. All run in forks of one process (workers/commands_in_turn.py).
"""

import functools
import json
import shlex
import sys
from dataclasses import dataclass

import pytest
import runs
from mistakes import data, folder, models, pretrain, studies

from megaenc import cli

pytestmark = pytest.mark.slow

TABLES = {"data": data.ROWS, "pretrain": pretrain.ROWS, "models": models.ROWS, "studies": studies.ROWS}
ROWS = {line: message for table in TABLES.values() for line, message in table.items()}
CASES = [(name, line) for name, table in TABLES.items() for line in table]
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


def complete(line: str) -> str:
    """Return a command line of the tables with its abbreviations written out."""
    for name, value in folder.WORDS.items():
        line = line.replace(name, value)
    return line


@pytest.fixture(scope="module")
def run_table(tmp_path_factory):
    """Return a function that runs all commands of a table once, in one working folder: the end of each by its line."""

    @functools.cache
    def run(name: str) -> dict[str, Ended]:
        place = tmp_path_factory.mktemp(name)
        work = place / "work"
        work.mkdir()
        folder.write_texts(work)
        commands = [shlex.split(complete(line)) for line in (*folder.SETUP, *TABLES[name])]
        jobs = {"folder": str(work), "seconds": SECONDS, "keep": len(folder.SETUP), "commands": commands}
        (place / "jobs.json").write_text(json.dumps(jobs))
        environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache"), "SLURM_JOB_ID": ""}
        script = [
            sys.executable,
            str(runs.WORKERS / "commands_in_turn.py"),
            str(place / "jobs.json"),
            str(place / "results.jsonl"),
        ]
        runs.run(script, timeout=900, environment=environment, packages=runs.ROOT / "tests")
        results = [Ended(**json.loads(line)) for line in (place / "results.jsonl").read_text().splitlines()]
        for line, setup in zip(folder.SETUP, results, strict=False):
            assert setup.code == 0, (line, setup)
        return dict(zip(TABLES[name], results[len(folder.SETUP) :], strict=True))

    return run


@pytest.mark.parametrize(("table", "line"), CASES)
def test_a_mistake_is_one_line(run_table, table, line):
    end = run_table(table)[line]
    assert end.code == 2, end
    assert end.changes == [], end
    lines = end.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), end.stderr
    assert ROWS[line] in lines[0]


def test_every_command_has_three_mistakes():
    lines = [complete(line) for _, line in CASES]
    assert len(set(lines)) == len(lines)
    counts = {name: sum(f"{line} ".startswith(f"megaenc {name} ") for line in lines) for name in cli.COMMANDS}
    assert {name: count for name, count in counts.items() if count < 3} == {}
