"""Two runs that are started on one folder at the same time: one has it, the other ends with one line and changes nothing."""

import json
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


@pytest.mark.slow
def test_another_command_is_refused_until_the_lock_is_lost_and_then_the_first_stops_before_it_writes(small_corpus, tmp_path):
    """Somebody removes `.lock` while it trains, and gives the command again."""
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--train-iters", "100000", "--log-interval", "1"]
    command = [runs.PRETRAIN, *flags, "--eval-interval", "0", "--save-interval", "20"]
    with runs.Running(command, folder, step=1) as first:
        refused = runs.script(command[0], [*command[1:], "--save", str(folder)], expect=2)
        assert IN_USE in refused.stderr
        assert refused.stderr.count("\n") == 1
        while not (folder / "checkpoints" / "iter_0000020" / "state.json").exists():
            time.sleep(0.05)
        (folder / ".lock").unlink()
        runs.script(command[0], [*command[1:], "--save", str(folder), "--exit-duration-in-mins", "0.02"], expect=75)
        code, _, err = first.end()
    assert code == 2
    assert ".lock: found it removed or replaced, expected the lock of this run" in err
    assert err.count("\n") == 1
    last = CheckpointLoader(folder / "checkpoints").tracked_step()
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, last + 1))
