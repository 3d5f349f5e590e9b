"""Two runs that are started on one folder at the same time: one has it, the other ends with one line and changes nothing."""

import json
import subprocess
import sys
import time

import pytest
import runs

from megaenc.training.checkpoint.loader import CheckpointLoader

PROCESSES, RACES = 4, 20
IN_USE = "another process is training in this directory; wait for it or choose another"


def test_one_of_those_that_come_at_once_has_the_folder(small_corpus, tmp_path):
    """Twenty races of four processes: into new folders and into those of a run."""
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(tmp_path / "run")]
    output = runs.script(runs.WORKERS / "race_for_folder.py", [str(PROCESSES), str(RACES), *flags]).stdout
    races = [json.loads(line) for line in output.splitlines()]
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
    assert CheckpointLoader(folder / "checkpoints").steps() == list(range(1, 21))


def start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=runs.surroundings())


@pytest.mark.slow
def test_a_run_that_has_lost_its_lock_stops_before_it_writes(small_corpus, tmp_path):
    """Somebody removes `.lock` while it trains, and gives the command again."""
    folder = tmp_path / "run"
    command = [sys.executable, str(runs.PRETRAIN), *small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder)]
    steps = ["--train-iters", "100000", "--log-interval", "1", "--eval-interval", "0", "--save-interval", "20"]
    first = start([*command, *steps])
    try:
        while not (folder / "checkpoints" / "iter_0000020" / "state.json").exists():
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)
        (folder / ".lock").unlink()
        second = start([*command, *steps, "--exit-duration-in-mins", "0.02"])
        _, err = second.communicate(timeout=240)
        assert second.returncode == 75, err
        _, err = first.communicate(timeout=60)
    finally:
        first.kill()
    assert first.returncode == 2
    assert [".lock: found it removed or replaced, expected the lock of this run" in line for line in err.splitlines()] == [True]
    last = CheckpointLoader(folder / "checkpoints").tracked_step()
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, last + 1))
