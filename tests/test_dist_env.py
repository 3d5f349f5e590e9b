"""The environment that a process leaves for those that torchrun starts after it."""

import pytest

from megaenc.dist_env import EXIT_CODE_FILE, exit_if_restart_forbidden, forbid_restart


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Make this process look like a worker of an attempt of a launch."""

    def be(launch: str, attempt: int) -> None:
        directory = tmp_path / launch / f"attempt_{attempt}" / "0"
        directory.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(directory / "error.json"))

    return be


def test_later_attempts_of_one_launch_leave_with_the_code_that_was_left(worker):
    worker("one", 0)
    exit_if_restart_forbidden()
    forbid_restart(75)
    worker("one", 1)
    with pytest.raises(SystemExit) as stop:
        exit_if_restart_forbidden()
    assert stop.value.code == 75
    worker("another", 0)
    exit_if_restart_forbidden()


def test_a_second_run_of_a_program_withdraws_what_the_first_has_left(worker):
    worker("one", 0)
    forbid_restart(0)
    exit_if_restart_forbidden()  # begins the second, which crashes
    worker("one", 1)
    exit_if_restart_forbidden()


@pytest.mark.parametrize("error_file", [None, "/dev/null", "error.json"])
def test_without_a_directory_of_torchrun_nothing_is_left_or_found(
    error_file, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if error_file:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
    forbid_restart(2)
    exit_if_restart_forbidden()
    assert not list(tmp_path.iterdir())


def test_the_code_is_recorded_where_the_caller_of_torchrun_asks_for_it(
    worker, monkeypatch, tmp_path
):
    worker("one", 0)
    monkeypatch.setenv(EXIT_CODE_FILE, str(tmp_path / "code"))
    forbid_restart(75)
    assert (tmp_path / "code").read_text() == "75\n"
