"""Probes that hang, die or raise become findings, and those after them are carried out all the same."""

import os
from pathlib import Path

import pytest

from megaenc.doctor.result import Probe, ProbeContext
from megaenc.doctor.runner import ProbeRunner

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture(scope="module")
def runner():
    path = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])
    with ProbeRunner(ProbeContext(timeout=20, environment=os.environ | {"PYTHONPATH": path})) as runner:
        yield runner


def probe(function: str, *arguments, scope="rank", timeout_factor=1.0) -> Probe:
    return Probe("numbers", f"the {function}", f"probes:{function}", scope, arguments, timeout_factor, advice="take another one")


def process(runner: ProbeRunner) -> int:
    """The process that carries out the next probe, which asks for another one."""
    (finding, more), ended = runner.run(probe("process", "here"))
    assert ended
    assert more == Probe("ranks", "more", "probes:raises")
    number, word = finding.result.split()
    assert word == "here"
    return int(number)


@pytest.mark.parametrize(
    ("function", "patience", "result", "advice"),
    [
        ("hangs", 0.02, "no answer in 0.4 s; its last output: waiting for the device", "--timeout"),
        ("crashes", 1, "its process was killed by SIGSEGV; its last output: about to go", "take another one"),
        ("ends", 1, "its process ended with exit code 3", "take another one"),  # without the last words of the probe before
        ("raises", 1, "ImportError: no such symbol", "flash_attn"),
        ("breaks_off", 1, "nobody came", "wait"),
    ],
)
def test_a_probe_that_fails_is_named_and_the_next_has_a_process_of_its_own(runner, function, patience, result, advice):
    before = process(runner)
    [finding], ended = runner.run(probe(function, timeout_factor=patience))
    assert not ended
    assert (finding.name, finding.level, finding.result) == (f"the {function}", "problem", result)
    assert advice in finding.advice
    assert process(runner) != before
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


def test_a_process_goes_on_until_a_problem_puts_it_in_doubt(runner):
    before = process(runner)
    runner.run(probe("finds_a_problem", scope="ranks"))  # there the other ranks count on this process
    assert process(runner) == before
    runner.run(probe("finds_a_problem"))
    assert process(runner) != before


def test_nothing_of_it_outlives_the_runner():
    with ProbeRunner(ProbeContext(environment=dict(os.environ))) as runner:
        runner.run(Probe("machine", "memory", "megaenc.doctor.machine:check_memory"))
        number = runner._worker.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
