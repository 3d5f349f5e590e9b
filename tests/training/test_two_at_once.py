"""Two runs that are started on one folder at the same time: one has it, the other ends with one line and changes nothing."""

import json
import subprocess
import sys

import runs

from megaenc.training.checkpoint import Checkpoints

PROCESSES, RACES = 4, 20
IN_USE = "another process is training in this folder; wait for it or choose another"


def test_one_of_those_that_come_at_once_has_the_folder(small_corpus, tmp_path):
    """Twenty races of four processes: into new folders and into those of a run."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run")]
    said = runs.script(runs.WORKERS / "race_for_folder.py", [str(PROCESSES), str(RACES), *flags]).stdout
    races = [json.loads(line) for line in said.splitlines()]
    assert len(races) == RACES
    for answers in races:
        assert answers.count(None) == 1, answers
        assert sum(bool(answer) and IN_USE in answer for answer in answers) == PROCESSES - 1, answers


def test_two_commands_at_once_make_one_run(small_corpus, tmp_path):
    """Twice: on a new folder, then on one with a checkpoint."""
    folder, codes = tmp_path / "run", []
    command = [sys.executable, str(runs.PRETRAIN), *small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save-interval", "1"]
    for stop in ("10", "20"):
        both = [start([*command, "--save", str(folder), "--exit-interval", stop]) for _ in range(2)]
        ends = [(process.communicate(timeout=240), process.returncode) for process in both]
        codes.append(sorted(code for _, code in ends))
        for (out, err), code in ends:
            assert err == "" if code == 0 else [IN_USE in line for line in err.splitlines()] == [True], (out, err)
    # Where one was done before the other came to the folder, that one went on from there.
    assert [0, 2] in codes and all(pair in ([0, 2], [0, 0]) for pair in codes)
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, 21))
    assert Checkpoints(folder / "checkpoints").steps() == list(range(1, 21))


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=runs.surroundings())
