"""A grid does every run once, whatever happens to it or to them."""

import contextlib
import json
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
from fake_runs import calls, find, make_model

from megaenc import flags
from megaenc.errors import InputError
from megaenc.finetune.grid import command as grid
from megaenc.finetune.grid import worker
from megaenc.finetune.grid.command import GridConfig, run_grid
from megaenc.finetune.grid.executor import LocalExecution, execute_jobs
from megaenc.finetune.model.fingerprint import FINGERPRINT_FILE
from megaenc.finetune.results import files as result_files

PROGRAM = Path(__file__).parents[2] / "workers" / "grid_of_fakes.py"
SMALL = ["--learning-rates", "1e-5", "5e-4", "--seeds", "2", "--jobs", "2"]


def settings(model, output, *more) -> GridConfig:
    argv = ["--model", str(model), "--output", str(output), *map(str, more)]
    return flags.parse(GridConfig, argv, prog="grid", description="a grid")


def go(model, output, *more, code=0) -> None:
    if not code:
        return run_grid(settings(model, output, *more), find, "fake_runs:run")
    with pytest.raises(SystemExit) as stop:
        run_grid(settings(model, output, *more), find, "fake_runs:run")
    assert stop.value.code == code
    return None


def tree(output) -> dict[str, bytes]:
    """Every file of results but those with times, and that of what the models are."""
    files = [
        path for path in Path(output).rglob("*") if path.is_file() and path.name not in (result_files.TIMING, FINGERPRINT_FILE)
    ]
    return {str(path.relative_to(output)): path.read_bytes() for path in files}


def test_every_rate_and_seed_is_done_and_then_skipped(tmp_path, capsys):
    model = make_model(tmp_path / "toy")
    go(model, tmp_path / "out", "--datasets", "sc1", "qa1", *SMALL)
    assert sorted(tree(tmp_path / "out")) == sorted(
        f"toy/{family}/{name}/lr{rate}_sd{seed}/results.json"
        for family, name in (("SC", "sc1"), ("QA", "qa1"))
        for rate in ("1e-05", "5e-04")
        for seed in (0, 1)
    )
    before = tree(tmp_path / "out")
    go(model, tmp_path / "out", "--datasets", "sc1", "qa1", *SMALL)
    assert len(calls(model)) == 8 and tree(tmp_path / "out") == before
    assert "8 finished, 0 to do" in capsys.readouterr().out


def test_retrieval_trains_once_for_all_its_sets(tmp_path, capsys):
    model = make_model(tmp_path / "toy")
    go(model, tmp_path / "out", "--datasets", "ir1", "ir2", "ir3", "sc1", *SMALL)
    assert "16 results from 8 trainings" in capsys.readouterr().out
    assert sorted(set(calls(model))) == sorted(
        f"{name}_lr{rate}_sd{seed}" for name in ("pairs", "sc1") for rate in ("1e-05", "5e-04") for seed in (0, 1)
    )
    assert (tmp_path / "out/toy/IR/ir2/pairs_lr5e-04_sd1/results.json").is_file()


def test_the_studys_grid_is_counted_both_ways(tmp_path):
    models = [make_model(tmp_path / f"toy{number}") for number in range(5)]
    names = [f"{family}{number}" for family in ("sc", "tc", "qa", "ir") for number in range(3)]
    planned = grid.plan_grid(settings(models[0], tmp_path / "out", "--model", *models, "--datasets", *names), find)
    results = sum(len(job.evaluate_on) for job in planned.jobs)
    assert (results, len(planned.jobs)) == (5 * 12 * 30, 5 * 10 * 30)  # of 50 models: 18,000 and 15,000


def test_a_new_retrieval_set_is_evaluated_alone(tmp_path):
    model = make_model(tmp_path / "toy")
    go(model, tmp_path / "out", "--datasets", "ir1", *SMALL)
    before = tree(tmp_path / "out")
    planned = grid.plan_grid(settings(model, tmp_path / "out", "--datasets", "ir1", "ir2", *SMALL), find)
    assert [[dataset.name for dataset in job.evaluate_on] for job in planned.pending] == [["ir2"]] * 4
    go(model, tmp_path / "out", "--datasets", "ir1", "ir2", *SMALL)
    after = tree(tmp_path / "out")
    assert len(after) == 8 and before.items() <= after.items()


def test_a_fork_server_that_died_is_started_again_as_it_was(tmp_path, monkeypatch):
    """With one thread for each library: what a run computes must not depend on which server it was forked from."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    model = make_model(tmp_path / "toy", **{"lr1e-05_sd0": {"do": "kill server", "times": 1}})
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL, "--jobs", "1")
    assert calls(model).count("sc1_lr1e-05_sd0") == 2
    environment = json.loads((model / "environment").read_text())
    assert {name: environment.get(name) for name in worker._SERVER_ENVIRONMENT} == worker._SERVER_ENVIRONMENT
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize("what", ["crash", "kill", "nothing"])
def test_a_crashed_run_is_tried_once_more(tmp_path, what, capsys):
    model = make_model(tmp_path / "toy", **{"lr1e-05_sd0": {"do": what, "times": 1}})
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL, "--jobs", "1")
    assert calls(model).count("sc1_lr1e-05_sd0") == 2 and len(calls(model)) == 5
    assert calls(model)[-1] == "sc1_lr1e-05_sd0"  # after the others
    assert "is retried once" in capsys.readouterr().out
    assert len(list((tmp_path / "out").rglob("results.json"))) == 4


def test_a_run_that_crashes_twice_is_reported_and_stops_no_other(tmp_path, capsys):
    model = make_model(tmp_path / "toy", **{"lr5e-04_sd1": {"do": "crash"}})
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL, code=1)
    said = capsys.readouterr().out
    assert "without result: toy sc1 5e-04 sd1: crashed twice, ended with exit code 1" in said
    assert "ZeroDivisionError: this is what went wrong" in said
    log = tmp_path / "out/toy/SC/sc1/lr5e-04_sd1/log.txt"
    assert str(log) in said and log.read_text().count("ZeroDivisionError: this is") == 2
    assert len(list((tmp_path / "out").rglob("results.json"))) == 3 and calls(model).count("sc1_lr5e-04_sd1") == 2
    make_model(model)  # cured
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    assert calls(model)[-1] == "sc1_lr5e-04_sd1" and len(calls(model)) == 6


def test_what_runs_say_is_said_once(tmp_path, capsys):
    model = make_model(tmp_path / "toy", all={"says": "sc1, train: 3 texts are cut"}, **{"lr5e-04_sd1": {"says": "also"}})
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    said = capsys.readouterr().out.splitlines()
    assert said.count("sc1, train: 3 texts are cut") == 1 and said.count("also") == 1
    assert "3 texts are cut" in (tmp_path / "out/toy/SC/sc1/lr1e-05_sd0/log.txt").read_text()


def test_what_was_said_of_the_plan_is_not_said_again(tmp_path, capsys):
    model = make_model(tmp_path / "toy", all={"says": "sc1_said: 5 % of train validate"})
    go(model, tmp_path / "out", "--datasets", "sc1_said", *SMALL)
    assert capsys.readouterr().out.count("5 % of train validate") == 1


def test_a_run_that_says_nothing_for_too_long_is_ended(tmp_path, capsys):
    model = make_model(tmp_path / "toy", **{"lr5e-04_sd1": {"do": "hang", "times": 1}})
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL, "--hang-minutes", "0.1")
    assert calls(model).count("sc1_lr5e-04_sd1") == 2
    assert "no progress for 0.1 minutes" in capsys.readouterr().out


def test_wrong_input_of_a_run_is_said_once_and_not_tried_again(tmp_path, capsys):
    model = make_model(tmp_path / "toy", all={"do": "refused"})
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL, code=2)
    assert len(calls(model)) == 4
    assert "without result: toy sc1 1e-05 sd0 and 3 more: sc1: no column `text`" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_a_rate_that_makes_the_loss_nan_is_a_failed_run(tmp_path, capsys):
    model = make_model(tmp_path / "toy", **{"lr5e-04_sd0": {"do": "nan"}})
    go(model, tmp_path / "out", "--datasets", "ir1", "ir2", *SMALL, code=1)
    assert calls(model).count("pairs_lr5e-04_sd0") == 1
    assert len(list((tmp_path / "out").rglob("failed.json"))) == 2  # one for each set
    go(model, tmp_path / "out", "--datasets", "ir1", "ir2", *SMALL, code=1)
    assert len(calls(model)) == 4 and "--retry-failed" in capsys.readouterr().out
    (model / "cured").touch()
    go(model, tmp_path / "out", "--datasets", "ir1", "ir2", *SMALL, "--retry-failed")
    assert len(calls(model)) == 5
    assert not list((tmp_path / "out").rglob("failed.json")) and len(list((tmp_path / "out").rglob("results.json"))) == 8


def test_a_training_that_failed_has_failed_for_a_new_set_too(tmp_path, capsys):
    model = make_model(tmp_path / "toy", **{"lr5e-04_sd0": {"do": "nan"}})
    go(model, tmp_path / "out", "--datasets", "ir1", *SMALL, code=1)
    capsys.readouterr()
    planned = grid.plan_grid(settings(model, tmp_path / "out", "--datasets", "ir2", "ir1", *SMALL), find)
    assert (len(planned.jobs), len(planned.pending), len(planned.failed)) == (4, 3, 1)
    go(model, tmp_path / "out", "--datasets", "ir2", "ir1", *SMALL, code=1)
    said = capsys.readouterr().out
    assert "0 finished, 1 failed before, 3 to do" in said and "IR/ir1/pairs_lr5e-04_sd0/failed.json says why" in said
    assert "without result: 1 training;" in said and calls(model).count("pairs_lr5e-04_sd0") == 1
    (model / "cured").touch()
    go(model, tmp_path / "out", "--datasets", "ir2", "ir1", *SMALL, "--retry-failed")
    assert "3 finished, 1 to do" in capsys.readouterr().out and not list((tmp_path / "out").rglob("failed.json"))
    assert len(list((tmp_path / "out").rglob("results.json"))) == 8


@pytest.mark.parametrize("change", [["--batch-size", "16"], ["--add-bos"], ["--threads", "2"]])
def test_another_protocol_does_not_go_on(tmp_path, change):
    model = make_model(tmp_path / "toy")
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    with pytest.raises(InputError, match=rf"field `protocol.{change[0][2:].replace('-', '_')}`"):
        go(model, tmp_path / "out", "--datasets", "sc1", *SMALL, *change)


def test_another_model_of_the_same_name_does_not_go_on(tmp_path):
    model = make_model(tmp_path / "toy")
    go(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    (model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(InputError, match=r"field `fingerprints.model`"):
        go(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    go(f"other={model}", tmp_path / "out", "--datasets", "sc1", *SMALL)
    assert (tmp_path / "out/other/SC/sc1/lr5e-04_sd0/results.json").is_file()


def test_a_model_that_changes_under_way_is_refused(tmp_path, capsys):
    model = make_model(tmp_path / "toy")
    planned = grid.plan_grid(settings(model, tmp_path / "out", "--datasets", "sc1", *SMALL), find)
    (model / "model.safetensors").write_bytes(b"others")
    failed = execute_jobs(planned.pending[:1], "fake_runs:run", LocalExecution(jobs=1))
    assert "has changed since the grid began" in failed[0].reason and failed[0].is_input_error and not calls(model)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "--model nowhere: no such folder"),
        (["--datasets", "scc", "xx"], "unknown data set `xx`"),
        (["--datasets", "sc1", "sc1"], "--datasets: found sc1 twice"),
        (["--learning-rates", "0"], "--learning-rates: found 0.0, expected more than 0"),
        (["--learning-rates", "1e-5", "1e-5"], "--learning-rates: found 1e-05 twice"),
        (["--seeds", "0"], "--seeds: found 0, expected at least 1"),
        (["--jobs-per-gpu", "0"], "--jobs-per-gpu: found 0"),
        (["--jobs-per-gpu", "100000"], "--jobs-per-gpu: found 100,000, expected at most "),
        (["--jobs", "100000"], "--jobs: found 100,000, expected at most "),
        (["--threads", "100000"], "--threads: found 100,000, expected at most "),
        (["--hang-minutes", "nan"], "--hang-minutes: found nan, expected at least 0"),
        (["--jobs-per-task", "0"], "--jobs-per-task: found 0"),
        (["--slurm-minutes", "0"], "--slurm-minutes: found 0, expected at least 1"),
        (["--slurm-gpus", "-1"], "--slurm-gpus: found -1, expected at least 0"),
        (["--slurm-cpus", "0"], "--slurm-cpus: found 0, expected at least 1"),
        (["--slurm-parallel", "0"], "--slurm-parallel: found 0, expected at least 1"),
        (["--batch-size", "0"], "--batch-size: found 0"),
    ],
)
def test_what_cannot_be_run_is_known_before_anything_begins(tmp_path, argv, message):
    model = make_model(tmp_path / "toy")
    with pytest.raises(InputError) as error:
        grid.plan_grid(settings(model, tmp_path / "out", "--datasets", "sc1", *argv), find)
    assert message in str(error.value)


@pytest.mark.parametrize(("missing", "message"), [("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no *.safe")])
def test_a_folder_that_is_no_model_is_refused(tmp_path, missing, message):
    model = make_model(tmp_path / "toy")
    (model / missing).unlink()
    with pytest.raises(InputError, match=re.escape(message)):
        grid.plan_grid(settings(model, tmp_path / "out", "--datasets", "sc1"), find)


@pytest.mark.parametrize(
    ("chosen", "jobs", "expected"),
    [
        ({}, 0, ["CUDA 0", "CUDA 1", "CUDA 0", "CUDA 1"]),
        ({}, 3, ["CUDA 0", "CUDA 1", "CUDA 0"]),
        ({"CUDA_VISIBLE_DEVICES": "3,GPU-5f"}, 2, ["CUDA 3", "CUDA GPU-5f"]),
        ({"HIP_VISIBLE_DEVICES": "4,6"}, 2, ["HIP 4", "HIP 6"]),
    ],
)
def test_gpus_are_shared_the_first_runs_on_different_ones(monkeypatch, chosen, jobs, expected):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "accelerator_names", lambda: ["a", "b"])
    found = [f"{name.split('_')[0]} {device}" for place in worker.build_slots(jobs, 2, 1) for name, device in place.items()]
    assert found == expected


def test_runs_are_as_many_as_cores_allow_without_a_gpu(monkeypatch):
    monkeypatch.setattr(worker, "accelerator_names", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    assert [len(worker.build_slots(jobs, 1, threads)) for jobs, threads in ((0, 1), (0, 3), (0, 16), (5, 1))] == [8, 2, 1, 5]


def start(model, output, *more) -> subprocess.Popen:
    path = os.pathsep.join([str(Path(__file__).parents[3]), str(Path(__file__).parents[1])])
    command = [sys.executable, str(PROGRAM), str(model), str(output), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

    def heed_interrupts() -> None:  # a background job inherits that they are ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    environment = {**os.environ, "PYTHONPATH": path, "GRID_OF_FAKES": str(output)}
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=heed_interrupts, **pipes)


def processes_of(output) -> list[str]:
    """The processes that the programs started on `output` have left, whatever their sessions, but for those that have ended."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"GRID_OF_FAKES={output}\0".encode() in environ.read_bytes():
                found.append(environ.parent.name)
    return found


def until_gone(output) -> bool:
    wait_until(lambda: not processes_of(output))
    return not processes_of(output)


def wait_until(done: Callable[[], bool]) -> None:
    """Return when `done` says so, after a minute in any case."""
    deadline = time.monotonic() + 60
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_a_killed_grid_goes_on_where_it_was(tmp_path):
    """Killed four times at random moments, it ends with the bytes of one that was left alone, and leaves no process."""
    flags = ["--datasets", "sc1", "ir1", "ir2", "--learning-rates", "1e-5", "5e-4", "--seeds", "5", "--jobs", "3"]
    model = make_model(tmp_path / "toy", all={"seconds": 0.3})
    moments = random.Random(6)
    for begun in (0, 1, 3, 2):
        before, grid_of_fakes = len(calls(model)), start(model, tmp_path / "killed", *flags)
        wait_until(lambda at=before + begun: len(calls(model)) >= at)
        time.sleep(moments.uniform(0, 0.5))
        assert processes_of(tmp_path / "killed")
        grid_of_fakes.kill()
        grid_of_fakes.communicate()
        assert until_gone(tmp_path / "killed")
    last = start(model, tmp_path / "killed", *flags)
    said = last.communicate(timeout=120)[0]
    assert last.returncode == 0, said
    assert 20 < len(calls(model)) <= 20 + 3 * 4  # at most those that were under way were begun again
    alone = start(model, tmp_path / "alone", *flags)
    assert (alone.communicate(timeout=120)[0], alone.returncode)[1] == 0
    killed, whole = tree(tmp_path / "killed"), tree(tmp_path / "alone")
    assert len(whole) == 30 and whole.items() <= killed.items()
    left = [
        Path(name) for name in set(killed) - set(whole)
    ]  # of a kill between the last result and the end: empty, and no result
    assert all(path.name == "log.txt" or path.parent.name == ".locks" for path in left)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_grid_keeps_what_is_finished(tmp_path, number, code):
    model = make_model(tmp_path / "toy", **{"lr5e-04_sd1": {"do": "hang"}})
    grid_of_fakes = start(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    wait_until(lambda: len(list((tmp_path / "out").rglob("results.json"))) == 3)
    os.killpg(grid_of_fakes.pid, number) if number == signal.SIGINT else grid_of_fakes.send_signal(number)
    said = grid_of_fakes.communicate(timeout=60)[0]
    assert grid_of_fakes.returncode == code, said
    assert "finished runs are kept" in said and "Traceback" not in said
    assert until_gone(tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("results.json"))) == 3


def test_two_grids_at_once_share_the_work(tmp_path):
    model = make_model(tmp_path / "toy", all={"seconds": 0.3})
    both = [start(model, tmp_path / "out", "--datasets", "sc1", "ir1", "ir2", *SMALL) for _ in range(2)]
    for one in both:
        said = one.communicate(timeout=120)[0]
        assert one.returncode == 0, said
    assert sorted(calls(model)) == sorted(set(calls(model))) and len(calls(model)) == 8
    assert len([name for name in tree(tmp_path / "out") if name.endswith("results.json")]) == 12


def test_progress_goes_to_a_pipe_as_plain_lines(tmp_path):
    model = make_model(tmp_path / "toy", all={"seconds": 0.2})
    one = start(model, tmp_path / "out", "--datasets", "sc1", *SMALL)
    said = one.communicate(timeout=60)[0]
    assert "\x1b" not in said and "grid  100 %  finished 4  running 0" in said


@pytest.mark.slow
def test_a_fork_computes_what_a_fresh_process_does(tmp_path):
    """Bit by bit, from a server with torch imported and one thread, by two runs at once and by more after them."""
    model, here = make_model(tmp_path / "toy"), Path(__file__).parents[1]
    program = f"""
import torch_runs, fake_runs
from megaenc.finetune.grid.command import run_grid
from test_grid import settings
for threads in ("1", "2"):
    argv = ["--datasets", "sc" + threads, "--learning-rates", "1e-5", "2e-5", "--seeds", "2", "--threads", threads, "--jobs", "2"]
    run_grid(settings({str(model)!r}, {str(tmp_path / "out")!r} + threads, *argv), fake_runs.find, "torch_runs:run")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (here.parents[1], here, here / "grid")))}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=600)
    for seed, threads in ((0, "1"), (1, "2")):
        command = [sys.executable, str(here / "torch_runs.py"), str(seed), threads]
        alone = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        for rate in ("1e-05", "2e-05"):
            assert (model / f"sc{threads}_{seed}_{rate}").read_text() == f"{alone} 1"
