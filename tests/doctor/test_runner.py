"""Probes that hang, die or raise become findings, and those after them are carried out all the same."""

import os
import time
from pathlib import Path

import pytest

from megaenc.doctor.result import Probe, ProbeContext
from megaenc.doctor.runner import ProbeRunner

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture
def runner():
    path = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])
    with ProbeRunner(ProbeContext(timeout=20, environment=os.environ | {"PYTHONPATH": path})) as runner:
        yield runner


def probe(function: str, *arguments, scope="rank", timeout_factor=1.0) -> Probe:
    return Probe("numbers", f"the {function}", f"probes:{function}", scope, arguments, timeout_factor, advice="take another one")


def process(runner: ProbeRunner) -> str:
    """Which process the next probe is carried out by."""
    (finding, _), ended = runner.run(probe("process", "here"))
    assert ended and finding.result.endswith(" here")
    return finding.result


def test_a_probe_that_hangs_is_left_and_named(runner):
    before = process(runner)
    begin = time.monotonic()
    [finding], ended = runner.run(probe("hangs", timeout_factor=0.02))
    assert time.monotonic() - begin < 10
    assert not ended
    assert (finding.name, finding.level) == ("the hangs", "problem")
    assert finding.result == "no answer in 0.4 s; its last output: waiting for the device"
    assert "--timeout" in finding.advice
    assert process(runner) != before


def test_a_probe_that_takes_its_process_with_it_is_named_with_its_last_words(runner):
    [finding], ended = runner.run(probe("crashes"))
    assert not ended
    assert (finding.name, finding.level) == ("the crashes", "problem")
    assert finding.result == "its process was killed by SIGSEGV; its last output: about to go"
    assert finding.advice == "take another one"
    process(runner)


def test_last_words_are_those_of_the_probe_itself(runner):
    process(runner)
    [finding], _ = runner.run(probe("ends"))
    assert finding.result == "its process ended with exit code 3"


def test_an_exception_is_a_finding_in_one_line_with_advice(runner):
    [finding], ended = runner.run(probe("raises"))
    assert not ended
    assert (finding.name, finding.level, finding.result) == ("the raises", "problem", "ImportError: no such symbol")
    assert "flash_attn" in finding.advice


def test_a_probe_may_break_off_with_a_finding_of_its_own(runner):
    [finding], ended = runner.run(probe("breaks_off"))
    assert not ended and (finding.result, finding.advice) == ("nobody came", "wait")


def test_a_process_goes_on_until_a_problem_puts_it_in_doubt(runner):
    before = process(runner)
    assert process(runner) == before
    runner.run(probe("finds_a_problem", scope="ranks"))  # there the other ranks count on this process
    assert process(runner) == before
    runner.run(probe("finds_a_problem"))
    assert process(runner) != before


def test_a_probe_asks_for_others(runner):
    (_, more), ended = runner.run(probe("process", "here"))
    assert ended and more == Probe("ranks", "more", "probes:raises")


def test_nothing_of_it_outlives_the_runner():
    with ProbeRunner(ProbeContext(environment=dict(os.environ))) as runner:
        runner.run(Probe("machine", "memory", "megaenc.doctor.machine:check_memory"))
        number = runner._worker.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
