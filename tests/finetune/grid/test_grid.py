"""A grid does every run once, whatever happens to it or to them."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import runs
from fake_runs import FakeGrid, make_model

from megaenc.errors import InputError
from megaenc.finetune.grid import worker
from megaenc.finetune.grid.executor import LocalExecution, execute_jobs
from megaenc.finetune.model.fingerprint import FINGERPRINT_FILE
from megaenc.finetune.results import files as result_files


def tree(output) -> dict[str, bytes]:
    """Every file of results but those with times, and that of what the models are."""
    files = [path for path in Path(output).rglob("*") if path.is_file()]
    timeless = [path for path in files if path.name not in (result_files.TIMING, FINGERPRINT_FILE)]
    return {str(path.relative_to(output)): path.read_bytes() for path in timeless}


def test_every_rate_and_seed_is_done_and_then_skipped(tmp_path, capsys):
    grid = FakeGrid(tmp_path)
    grid.run("sc1", "qa1")
    before = tree(grid.output)
    assert sorted(before) == sorted(
        f"toy/{directory}/lr{rate}_sd{seed}/results.json"
        for directory in ("SC/sc1", "QA/qa1")
        for rate in ("1e-05", "5e-04")
        for seed in (0, 1)
    )
    grid.run("sc1", "qa1")
    assert len(grid.calls()) == 8 and tree(grid.output) == before
    assert "8 finished, 0 to do" in capsys.readouterr().out


def test_retrieval_trains_once_for_all_its_sets_and_evaluates_a_new_one_alone(tmp_path, capsys):
    grid = FakeGrid(tmp_path)
    grid.run("ir1", "ir2", "sc1")
    assert "12 results from 8 trainings" in capsys.readouterr().out
    assert len(grid.calls()) == len(set(grid.calls())) == 8 and "pairs_lr5e-04_sd1" in grid.calls()
    before = tree(grid.output)
    assert [
        [dataset.name for dataset in job.evaluate_on] for job in grid.plan("ir1", "ir3").pending
    ] == [["ir3"]] * 4
    grid.run("ir1", "ir3")
    after = tree(grid.output)
    assert len(after) == 16 and before.items() <= after.items()
    assert (grid.output / "toy/IR/ir3/pairs_lr5e-04_sd1/results.json").is_file()


def test_a_run_has_one_thread_for_each_library(tmp_path, monkeypatch):
    """No thread pool survives a fork."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    grid = FakeGrid(tmp_path)
    grid.run("sc1", "--jobs", 1)
    environment = json.loads((grid.model / "environment").read_text())
    assert [
        environment.get(f"{library}_NUM_THREADS") for library in ("OMP", "OPENBLAS", "MKL")
    ] == ["1"] * 3
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_killed_fork_server_ends_the_grid_with_one_line(tmp_path, monkeypatch):
    def refuse(process):
        raise ConnectionRefusedError

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", refuse)
    with pytest.raises(
        InputError, match="the fork server of the grid was killed; run the same command again"
    ):
        FakeGrid(tmp_path).run("sc1")


@pytest.mark.parametrize("what", ["crash", "kill", "nothing"])
def test_a_crashed_run_is_tried_once_more(tmp_path, what, capsys):
    grid = FakeGrid(tmp_path, **{"lr1e-05_sd0": {"do": what, "times": 1}})
    grid.run("sc1", "--jobs", 1)
    assert grid.calls().count("sc1_lr1e-05_sd0") == 2 and len(grid.calls()) == 5
    assert grid.calls()[-1] == "sc1_lr1e-05_sd0"  # after the others
    assert "is retried once" in capsys.readouterr().out and len(grid.files()) == 4


def test_a_run_that_crashes_twice_is_reported_and_stops_no_other(tmp_path, capsys):
    grid = FakeGrid(tmp_path, **{"lr5e-04_sd1": {"do": "crash"}})
    grid.run("sc1", code=1)
    said = capsys.readouterr().out
    assert "without result: toy sc1 5e-04 sd1: crashed twice, ended with exit code 1" in said
    assert "ZeroDivisionError: this is what went wrong" in said
    log = grid.output / "toy/SC/sc1/lr5e-04_sd1/log.txt"
    assert str(log) in said and log.read_text().count("ZeroDivisionError: this is") == 2
    assert len(grid.files()) == 3 and grid.calls().count("sc1_lr5e-04_sd1") == 2
    make_model(grid.model)  # cured
    grid.run("sc1")
    assert grid.calls()[-1] == "sc1_lr5e-04_sd1" and len(grid.calls()) == 6


def test_what_runs_and_the_plan_say_is_said_once(tmp_path, capsys):
    grid = FakeGrid(
        tmp_path,
        all={"says": "sc1_said: 5 % of train validate"},
        **{"lr5e-04_sd1": {"says": "also"}},
    )
    grid.run("sc1_said", "sc2")
    said = capsys.readouterr().out.splitlines()
    assert said.count("sc1_said: 5 % of train validate") == 1 and said.count("also") == 1
    assert "of train validate" in (grid.output / "toy/SC/sc2/lr1e-05_sd0/log.txt").read_text()


def test_a_run_that_says_nothing_for_too_long_is_ended(tmp_path, capsys):
    grid = FakeGrid(tmp_path, **{"lr5e-04_sd1": {"do": "hang", "times": 1}})
    grid.run("sc1", "--hang-minutes", 0.05)
    assert grid.calls().count("sc1_lr5e-04_sd1") == 2
    assert "no progress for 0.05 minutes" in capsys.readouterr().out


def test_wrong_input_of_a_run_is_said_once_and_not_tried_again(tmp_path, capsys):
    grid = FakeGrid(tmp_path, all={"do": "refused"})
    grid.run("sc1", code=2)
    assert len(grid.calls()) == 4
    assert (
        "without result: toy sc1 1e-05 sd0 and 3 more: sc1: no column `text`"
        in capsys.readouterr().out
    )
    assert not grid.output.exists()


def test_a_rate_that_makes_the_loss_nan_is_a_failed_run_for_a_new_set_too(tmp_path, capsys):
    grid = FakeGrid(tmp_path, **{"lr5e-04_sd0": {"do": "nan"}})
    grid.run("ir1", "ir2", code=1)
    assert len(grid.files("failed.json")) == 2  # one for each set
    grid.run("ir1", "ir2", code=1)
    assert len(grid.calls()) == 4 and "--retry-failed" in capsys.readouterr().out
    planned = grid.plan("ir3", "ir1")
    assert (len(planned.jobs), len(planned.pending), len(planned.failed)) == (4, 3, 1)
    grid.run("ir3", "ir1", code=1)
    said = capsys.readouterr().out
    assert (
        "0 finished, 1 failed before, 3 to do" in said
        and "IR/ir1/pairs_lr5e-04_sd0/failed.json says why" in said
    )
    assert "without result: 1 training;" in said and grid.calls().count("pairs_lr5e-04_sd0") == 1
    (grid.model / "cured").touch()
    grid.run("ir3", "ir1", "ir2", "--retry-failed")
    assert "3 finished, 1 to do" in capsys.readouterr().out
    assert not grid.files("failed.json") and len(grid.files()) == 12


def test_another_protocol_or_model_of_the_same_name_does_not_go_on(tmp_path):
    grid = FakeGrid(tmp_path)
    grid.run("sc1")
    with pytest.raises(InputError, match=r"field `protocol\.add_bos`"):
        grid.run("sc1", "--add-bos")
    (grid.model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(InputError, match=r"field `fingerprints\.model`"):
        grid.run("sc1")
    grid.run("sc1", "--model", f"other={grid.model}")
    assert (grid.output / "other/SC/sc1/lr5e-04_sd0/results.json").is_file()


def test_a_model_that_changes_under_way_is_refused(tmp_path):
    grid = FakeGrid(tmp_path)
    planned = grid.plan("sc1")
    (grid.model / "model.safetensors").write_bytes(b"others")
    failed = execute_jobs(planned.pending[:1], "fake_runs:run", LocalExecution(jobs=1))
    assert (
        "has changed since the grid began" in failed[0].reason
        and failed[0].is_input_error
        and not grid.calls()
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sc1"], "--datasets: found sc1 twice"),
        (["--learning-rates", "1e-5", "1e-5"], "--learning-rates: found 1e-05 twice"),
        (["--jobs-per-gpu", "0"], "--jobs-per-gpu: found 0"),
        (["--jobs", "100000"], "--jobs: found 100,000, expected at most "),
        (["--slurm-parallel", "0"], "--slurm-parallel: found 0, expected 1 or more"),
    ],
)
def test_what_cannot_be_run_is_known_before_anything_begins(tmp_path, argv, message):
    with pytest.raises(InputError, match=message):
        FakeGrid(tmp_path).plan("sc1", *argv)


@pytest.mark.parametrize(
    ("chosen", "jobs", "expected"),
    [
        ({}, 0, ["CUDA 0", "CUDA 1", "CUDA 0", "CUDA 1"]),
        ({"CUDA_VISIBLE_DEVICES": "3,GPU-5f"}, 3, ["CUDA 3", "CUDA GPU-5f", "CUDA 3"]),
        ({"HIP_VISIBLE_DEVICES": "4,6"}, 2, ["HIP 4", "HIP 6"]),
    ],
)
def test_gpus_are_shared_the_first_runs_on_different_ones(monkeypatch, chosen, jobs, expected):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "accelerator_names", lambda: ["a", "b"])
    found = [
        f"{name.split('_')[0]} {device}"
        for place in worker.build_slots(jobs, 2, 1)
        for name, device in place.items()
    ]
    assert found == expected


def test_runs_are_as_many_as_cores_allow_without_a_gpu(monkeypatch):
    monkeypatch.setattr(worker, "accelerator_names", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    assert [
        len(worker.build_slots(jobs, 1, threads)) for jobs, threads in ((0, 3), (0, 16), (5, 1))
    ] == [2, 1, 5]


def start(grid, *sets) -> subprocess.Popen:
    """The grid of data sets as a program of its own."""
    path = os.pathsep.join([str(runs.ROOT), str(runs.ROOT / "tests" / "finetune")])
    command = [
        sys.executable,
        runs.WORKERS / "grid_of_fakes.py",
        grid.model,
        grid.output,
        *grid.FLAGS,
        "--datasets",
        *sets,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def heed_interrupts() -> None:  # a background job inherits that they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    environment = {**os.environ, "PYTHONPATH": path, "GRID_OF_FAKES": str(grid.output)}
    return subprocess.Popen(
        command, env=environment, start_new_session=True, preexec_fn=heed_interrupts, **pipes
    )


def processes_of(grid) -> list[str]:
    """Return the live processes of a grid's programs, in any session."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"GRID_OF_FAKES={grid.output}\0".encode() in environ.read_bytes():
                found.append(environ.parent.name)
    return found


def wait_until(done: Callable[[], bool]) -> None:
    """Return when `done` says so, after a minute in any case."""
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


def check_that_nothing_runs(grid) -> None:
    wait_until(lambda: not processes_of(grid))
    assert not processes_of(grid)


def finish(process) -> str:
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
def test_a_killed_grid_goes_on_where_it_was(tmp_path):
    """Killed at random moments, it ends with the same bytes and leaves no process."""
    sets = ["sc1", "ir1", "ir2"]
    grid = FakeGrid(tmp_path, all={"seconds": 0.3})
    moments = random.Random(6)
    for begun in (0, 1, 3):
        before = len(grid.calls())
        killed = start(grid, *sets)
        wait_until(lambda at=before + begun: len(grid.calls()) >= at)
        time.sleep(moments.uniform(0, 0.5))
        assert processes_of(grid)
        killed.kill()
        killed.communicate()
        check_that_nothing_runs(grid)
    finish(start(grid, *sets))
    assert 8 <= len(grid.calls()) <= 8 + 2 * 3  # at most those that were under way were begun again
    alone = FakeGrid(tmp_path / "alone")
    alone.run(*sets)
    found = tree(grid.output)
    whole = tree(alone.output)
    assert len(whole) == 12 and whole.items() <= found.items()
    # Of a kill between the last result and the end: empty, and no result.
    left = [Path(name) for name in set(found) - set(whole)]
    assert all(path.name == "log.txt" or path.parent.name == ".locks" for path in left)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_grid_keeps_what_is_finished(tmp_path, number, code):
    grid = FakeGrid(tmp_path, **{"lr5e-04_sd1": {"do": "hang"}})
    stopped = start(grid, "sc1")
    wait_until(lambda: len(grid.files()) == 3)
    os.killpg(stopped.pid, number) if number == signal.SIGINT else stopped.send_signal(number)
    said = stopped.communicate(timeout=60)[0]
    assert stopped.returncode == code, said
    assert "finished runs are kept" in said and "Traceback" not in said
    check_that_nothing_runs(grid)
    assert len(grid.files()) == 3


@pytest.mark.slow
def test_two_grids_at_once_share_the_work_and_tell_a_pipe_their_progress_in_plain_lines(tmp_path):
    grid = FakeGrid(tmp_path, all={"seconds": 0.3})
    for one in [start(grid, "sc1", "ir1", "ir2") for _ in range(2)]:
        said = finish(one)
        assert "\x1b" not in said and re.search(r"grid  100 %  finished \d+  running 0", said)
    assert len(grid.calls()) == len(set(grid.calls())) == 8 and len(grid.files()) == 12
