"""Programs that fail or hang are told in one line."""

import time

from megaenc.doctor.accelerators import run_program


def test_what_a_program_says_is_returned():
    assert run_program(["sh", "-c", "echo two; echo lines"], 10) == ("two\nlines\n", "")


def test_a_program_that_fails_is_told_with_its_last_line():
    output = run_program(["sh", "-c", "echo looking; echo no driver >&2; exit 9"], 10)
    assert output == ("looking\nno driver\n", "exit code 9: no driver")


def test_a_program_that_hangs_is_left_with_all_that_it_started():
    begin = time.monotonic()
    assert run_program(["sh", "-c", "sleep 60 | sleep 60"], 0.3) == ("", "no answer in 0.3 s")
    assert time.monotonic() - begin < 10
