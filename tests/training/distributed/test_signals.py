"""On a signal, or after a time, a run finishes its step, saves, and ends with exit code 75 on every rank; it can go on."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import runs

from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.distributed.signals import EXIT_STOPPED

LONG = ["--no-bf16", "--train-iters", "100000", "--log-interval", "1", "--eval-interval", "0"]  # ends only when it is told to


class Running:
    """A run in the background; its process group is killed at the end, whatever happens."""

    def __init__(self, folder, flags, launcher=()):
        self.folder = folder
        command = [sys.executable, *launcher, str(runs.PRETRAIN), *flags, "--save", str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(runs.ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def __enter__(self):
        deadline = time.monotonic() + 120
        log = self.folder / "metrics.jsonl"
        while not (log.exists() and log.read_text().count("\n") >= 3):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.1)
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # workers of torchrun die with it
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        """Exit code and standard output."""
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


def assert_saved_where_it_stopped(folder) -> int:
    checkpoints = CheckpointLoader(folder / "checkpoints")
    step = runs.metrics(folder)[-1]["step"]
    assert checkpoints.steps() == [checkpoints.tracked_step()] == [step]
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, step + 1))
    return step


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGINT"])
def test_a_signal_saves_and_ends_with_75(name, small_corpus, tmp_path):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *LONG]
    with Running(tmp_path / "run", flags) as running:
        running.process.send_signal(signal.Signals[name])
        code, out = running.end()
    step = assert_saved_where_it_stopped(tmp_path / "run")
    assert code == EXIT_STOPPED == 75
    assert out.splitlines()[-1].startswith(f"step {step} of 100000: ")
    assert out.splitlines()[-1].endswith(f"; stopped by {name}, the same command resumes it")


@pytest.mark.multiprocess
def test_signals_that_follow_change_nothing(small_corpus, tmp_path):
    """However many come until the process has ended."""
    with Running(tmp_path / "run", [*small_corpus.flags, *runs.SHORT_RUN, *LONG]) as running:
        running.process.terminate()
        while running.process.poll() is None:
            time.sleep(0.002)
            running.process.send_signal(signal.SIGTERM)
            running.process.send_signal(signal.SIGUSR1)
        code, _ = running.end()
    assert_saved_where_it_stopped(tmp_path / "run")
    assert code == EXIT_STOPPED


@pytest.mark.multiprocess
def test_under_torchrun_sigterm_saves_once_and_the_same_command_goes_on(small_corpus, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *LONG, "--tensor-model-parallel-size", "2"]
    with Running(tmp_path / "run", flags, launcher) as running:
        running.process.terminate()
        code, out = running.end()
    step = assert_saved_where_it_stopped(tmp_path / "run")
    assert code != 0
    assert "stopped by SIGTERM" in out
    again = runs.script(
        runs.PRETRAIN, [*flags[:-2], "--save", str(tmp_path / "run"), "--exit-duration-in-mins", "0.01"], expect=75
    )
    assert f"resuming after step {step}" in again.stdout
    assert "stopped by --exit-duration-in-mins 0.01" in again.stdout


@pytest.mark.multiprocess
def test_a_signal_to_one_rank_stops_both_at_one_step(small_corpus, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *LONG]
    with Running(tmp_path / "run", flags, launcher) as running:
        workers = psutil.Process(running.process.pid).children()
        [last] = [worker for worker in workers if worker.environ()["RANK"] == "1"]
        last.send_signal(signal.SIGUSR1)
        _, out = running.end()
    assert_saved_where_it_stopped(tmp_path / "run")
    assert "stopped by SIGUSR1" in out


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
