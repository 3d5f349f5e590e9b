"""Runs that a signal or a time limit ends: they save and exit with code 75."""

import os
import signal
import sys

import pytest
import runs

from megaenc.training.checkpoint.loader import CheckpointLoader
from megaenc.training.distributed.signals import EXIT_STOPPED, SignalHandler

# A run that ends only when it is told to.
LONG = [
    "--no-bf16",
    "--train-iters",
    "100000",
    "--log-interval",
    "1",
    "--eval-interval",
    "0",
]
FAULT = runs.WORKERS / "fault_at_step.py"


def assert_saved_where_it_stopped(directory) -> int:
    checkpoints = CheckpointLoader(directory / "checkpoints")
    steps = [row["step"] for row in runs.metrics(directory)]
    assert checkpoints.steps() == [checkpoints.tracked_step()] == [steps[-1]]
    assert steps == list(range(1, steps[-1] + 1))
    return steps[-1]


def test_a_signal_saves_and_ends_with_75(small_corpus, tmp_path):
    flags = [
        f"interrupt:0:5:{tmp_path / 'told'}",
        *small_corpus.flags,
        *runs.SHORT_RUN,
        *LONG,
        "--save",
        str(tmp_path / "run"),
    ]
    output = runs.script(FAULT, flags, expect=EXIT_STOPPED).stdout
    assert assert_saved_where_it_stopped(tmp_path / "run") == 5
    assert EXIT_STOPPED == 75
    assert output.splitlines()[-1].startswith("step 5 of 100000: ")
    assert output.splitlines()[-1].endswith("; stopped by SIGINT, the same command resumes it")


@pytest.mark.multiprocess
def test_a_signal_to_one_rank_stops_all_at_one_step_and_the_same_command_goes_on(
    small_corpus, tmp_path
):
    flags = [*small_corpus.flags, *runs.SHORT_RUN, *LONG, "--save", str(tmp_path / "run")]
    ended = runs.script(
        FAULT, [f"terminate:1:5:{tmp_path / 'told'}", *flags], processes=2, expect=1
    )
    assert assert_saved_where_it_stopped(tmp_path / "run") == 5
    assert ended.stdout.count("stopped by SIGTERM") == 1
    assert "failed (exitcode: 75)" in ended.stderr
    again = runs.script(runs.PRETRAIN, [*flags, "--exit-interval", "7"])
    assert "resuming after step 5" in again.stdout


def test_a_time_ends_a_run_as_a_signal_does(small_corpus, tmp_path):
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        *LONG,
        "--save",
        str(tmp_path / "run"),
        "--exit-duration-in-mins",
        "0.01",
    ]
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


@pytest.fixture
def default_interrupt():
    """Restore Python's handler of SIGINT, which commands of other tests replace."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_a_process_that_goes_on_gets_its_handlers_back(default_interrupt):
    """The second Ctrl-C in a notebook raises KeyboardInterrupt; the kernel lives."""
    with pytest.raises(KeyboardInterrupt), SignalHandler(None, ends_process=False) as requests:
        os.kill(os.getpid(), signal.SIGINT)
        assert sum(requests.votes()) == 1
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), SignalHandler(None, ends_process=False):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is default_interrupt
