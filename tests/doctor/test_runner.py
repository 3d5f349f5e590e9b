"""Checks that hang, die or raise become findings; later checks still run."""

import os
from pathlib import Path

import pytest
from waiting import is_running

from megaenc.doctor import command
from megaenc.doctor.checks import CHECKS, SUBJECTS, Check
from megaenc.doctor.result import CheckContext
from megaenc.doctor.runner import CheckRunner

PLANTED = Path(__file__).parent / "planted"


@pytest.fixture
def runner():
    path = os.pathsep.join([str(PLANTED), os.environ.get("PYTHONPATH", "")])
    with CheckRunner(os.environ | {"PYTHONPATH": path}) as runner:
        yield runner


def run(runner: CheckRunner, *functions: str, scope="rank", timeout=20.0) -> list:
    """Run these functions as the checks of a subject; return their findings."""
    checks = [Check("machine", f"the {name}", f"faults:{name}", scope) for name in functions]
    findings = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "CHECKS", checks)
        command.run_checks(runner, ["machine"], CheckContext(timeout=timeout), findings)
    return findings


@pytest.mark.parametrize(
    ("function", "timeout", "result"),
    [
        ("hangs", 4, "no answer in 4 s (see --timeout); its last output: waiting for the device"),
        ("crashes", 20, "its process was killed by SIGSEGV; its last output: about to go"),
        (
            "ends",
            20,
            "its process ended with exit code 3",
        ),  # without the last words of the check before
        ("raises", 20, "ImportError: no such symbol; reinstall flash_attn"),
        ("finds_a_problem", 20, "wrong"),  # in a process that may be damaged
    ],
)
def test_a_check_that_fails_is_named_and_the_next_has_a_process_of_its_own(
    runner, function, timeout, result, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    [before] = run(runner, "process")
    finding, after = run(runner, function, "process", timeout=timeout)
    name = "something" if function == "finds_a_problem" else f"the {function}"
    assert (finding.subject, finding.name, finding.level, finding.result) == (
        "machine",
        name,
        "problem",
        result,
    )
    assert finding.advice
    assert after.name == before.name == "process" and after.result != before.result
    with pytest.raises(ProcessLookupError):
        os.kill(int(before.result), 0)
    for file in tmp_path.iterdir():  # the program that the check had started
        assert not is_running(int(file.read_text()))


def test_a_problem_across_ranks_leaves_the_process_that_the_other_ranks_count_on(runner):
    before, _, after = run(runner, "process", "finds_a_problem", "process", scope="ranks")
    assert after == before


def test_nothing_of_it_outlives_the_runner():
    with CheckRunner(dict(os.environ)) as runner:
        number, _ = runner.call("os:getpid", seconds=20)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.parametrize(
    ("failing", "left_out"),
    [
        ("meeting", {"shared by ranks", "collectives"}),
        ("shared by ranks", {"collectives"}),
        (
            "fused kernels",
            {each.name for each in CHECKS if each.function.endswith("check_fused_kernel")},
        ),
        ("driver", set()),
    ],
)
def test_checks_that_need_one_that_failed_are_left_out(failing, left_out):
    done = []

    class Runner:
        def call(self, function, context, *arguments, seconds):
            [check] = [
                each for each in CHECKS if (each.function, each.arguments) == (function, arguments)
            ]
            done.append(check.name)
            return [], "no answer" if check.name == failing else ""

    command.run_checks(Runner(), SUBJECTS, CheckContext(), [])
    assert done == [each.name for each in CHECKS if each.name not in left_out]
