"""Probes that hang, die or raise become findings, and those after them are carried out all the same."""

import os
import time
from pathlib import Path

import pytest

from megaenc.doctor.result import Probe, ProbeContext
from megaenc.doctor.runner import ProbeRunner

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture
def prober():
    path = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])
    with ProbeRunner(ProbeContext(seconds=20, environment=os.environ | {"PYTHONPATH": path})) as prober:
        yield prober


def probe(function: str, *arguments, where="rank", patience=1.0) -> Probe:
    return Probe("numbers", f"the {function}", f"probes:{function}", where, arguments, patience, advice="take another one")


def process(prober: ProbeRunner) -> str:
    """Which process the next probe is carried out by."""
    (found, _), ended = prober.findings(probe("process", "here"))
    assert ended and found.found.endswith(" here")
    return found.found


def test_a_probe_that_hangs_is_left_and_named(prober):
    before = process(prober)
    begin = time.monotonic()
    [found], ended = prober.findings(probe("hangs", patience=0.02))
    assert time.monotonic() - begin < 10
    assert not ended
    assert (found.what, found.level) == ("the hangs", "problem")
    assert found.found == "no answer in 0.4 s; it said last: waiting for the device"
    assert "--timeout" in found.advice
    assert process(prober) != before


def test_a_probe_that_takes_its_process_with_it_is_named_with_its_last_words(prober):
    [found], ended = prober.findings(probe("crashes"))
    assert not ended
    assert (found.what, found.level) == ("the crashes", "problem")
    assert found.found == "its process was killed by SIGSEGV; it said last: about to go"
    assert found.advice == "take another one"
    process(prober)


def test_last_words_are_those_of_the_probe_itself(prober):
    process(prober)
    [found], _ = prober.findings(probe("ends"))
    assert found.found == "its process ended with exit code 3"


def test_an_exception_is_a_finding_in_one_line_with_advice(prober):
    [found], ended = prober.findings(probe("raises"))
    assert not ended
    assert (found.what, found.level, found.found) == ("the raises", "problem", "ImportError: no such symbol")
    assert "flash_attn" in found.advice


def test_a_probe_may_break_off_with_a_finding_of_its_own(prober):
    [found], ended = prober.findings(probe("breaks_off"))
    assert not ended and (found.found, found.advice) == ("nobody came", "wait")


def test_a_process_goes_on_until_a_problem_puts_it_in_doubt(prober):
    before = process(prober)
    assert process(prober) == before
    prober.findings(probe("finds_a_problem", where="ranks"))  # there the other ranks count on this process
    assert process(prober) == before
    prober.findings(probe("finds_a_problem"))
    assert process(prober) != before


def test_a_probe_asks_for_others(prober):
    (_, more), ended = prober.findings(probe("process", "here"))
    assert ended and more == Probe("ranks", "more", "probes:raises")


def test_nothing_of_it_outlives_the_prober():
    with ProbeRunner(ProbeContext(environment=dict(os.environ))) as prober:
        prober.findings(Probe("machine", "memory", "megaenc.doctor.machine:memory"))
        number = prober._worker.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
