"""On a signal, or after a time, a run finishes its step, saves, and ends with exit code 75 on every rank; it can go on."""

import signal
import sys

import psutil
import pytest
import runs

from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.distributed.signals import EXIT_STOPPED

LONG = ["--no-bf16", "--train-iters", "100000", "--log-interval", "1", "--eval-interval", "0"]  # ends only when it is told to
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def assert_saved_where_it_stopped(folder) -> int:
    checkpoints = CheckpointLoader(folder / "checkpoints")
    steps = [row["step"] for row in runs.metrics(folder)]
    assert checkpoints.steps() == [checkpoints.tracked_step()] == [steps[-1]]
    assert steps == list(range(1, steps[-1] + 1))
    return steps[-1]


def test_a_signal_saves_and_ends_with_75(small_corpus, tmp_path):
    with runs.Running([runs.PRETRAIN, *small_corpus.flags, *runs.SHORT_RUN, *LONG], tmp_path / "run") as running:
        running.process.send_signal(signal.SIGINT)
        code, out, _ = running.end()
    step = assert_saved_where_it_stopped(tmp_path / "run")
    assert code == EXIT_STOPPED == 75
    assert out.splitlines()[-1].startswith(f"step {step} of 100000: ")
    assert out.splitlines()[-1].endswith("; stopped by SIGINT, the same command resumes it")


@pytest.mark.multiprocess
def test_under_torchrun_a_signal_to_one_rank_or_all_saves_once_and_the_same_command_goes_on(small_corpus, tmp_path):
    folder = tmp_path / "run"
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *LONG]
    with runs.Running([*TORCHRUN, runs.PRETRAIN, *flags], folder) as running:
        running.process.terminate()
        code, out, _ = running.end()
    step = assert_saved_where_it_stopped(folder)
    assert code != 0
    assert "stopped by SIGTERM" in out
    with runs.Running([*TORCHRUN, runs.PRETRAIN, *flags], folder, step + 1) as running:
        workers = psutil.Process(running.process.pid).children()
        [last] = [worker for worker in workers if worker.environ()["RANK"] == "1"]
        last.send_signal(signal.SIGUSR1)
        _, out, _ = running.end()
    assert f"resuming after step {step}" in out
    assert "stopped by SIGUSR1" in out
    assert CheckpointLoader(folder / "checkpoints").steps() == [step, runs.metrics(folder)[-1]["step"]]


def test_a_time_ends_a_run_as_a_signal_does(small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *LONG, "--save", str(tmp_path / "run"), "--exit-duration-in-mins", "0.01"]
    output = runs.script(runs.PRETRAIN, flags, expect=EXIT_STOPPED).stdout
    assert "stopped by --exit-duration-in-mins 0.01" in output
    assert_saved_where_it_stopped(tmp_path / "run")


SECOND = """
import os, signal
from megaenc.training.distributed.signals import SignalHandler
with SignalHandler(None):
    os.kill(os.getpid(), signal.SIGINT)
    print("once", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("twice", flush=True)
"""
AFTERWARDS = """
import atexit, os, signal, sys
from megaenc.training.distributed.signals import SignalHandler
def repeat():
    for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        os.kill(os.getpid(), name)
with SignalHandler(None):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
repeat()
atexit.register(repeat)
class AtTheVeryEnd:
    def __del__(self, repeat=repeat):
        repeat()
sys.modules["at_the_very_end"] = AtTheVeryEnd()
sys.exit(75)
"""


def test_no_signal_after_the_first_ends_the_process_before_it_is_done():
    runs.run([sys.executable, "-c", AFTERWARDS], expect=EXIT_STOPPED)


def test_the_second_ctrl_c_ends_at_once():
    result = runs.run([sys.executable, "-c", SECOND], expect=-signal.SIGINT)
    assert result.stdout == "once\n"
