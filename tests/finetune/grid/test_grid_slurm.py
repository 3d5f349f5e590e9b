"""A cluster gets the same runs in parts, by submitit's executors."""

import pickle

import pytest
import runs
from fake_runs import FakeGrid, find, make_model

from megaenc.errors import InputError
from megaenc.finetune.grid import slurm
from megaenc.finetune.grid.command import plan_grid
from megaenc.finetune.grid.executor import LocalExecution

SETS = ["sc1", "ir1", "ir2"]


def submit(grid, *more) -> list:
    asked = grid.settings(*SETS, "--slurm", *more)
    return slurm.submit_jobs(
        plan_grid(asked, find).pending, "fake_runs:run", asked.slurm, asked.local, asked.output
    )


def test_tasks_of_a_cluster_do_the_grid(tmp_path, monkeypatch, capsys):
    """In processes of submitit's local executor, which unpickle what they are to do."""
    monkeypatch.setenv("PYTHONPATH", f"{runs.ROOT}:{runs.ROOT / 'tests' / 'finetune'}")
    grid = FakeGrid(tmp_path, **{"lr5e-04_sd1": {"do": "crash"}})
    flags = ["--slurm-cluster", "local", "--jobs-per-task", 3]
    submitted = submit(grid, *flags)
    assert "submitted 8 runs as 3 tasks of up to 3" in capsys.readouterr().out
    # Without result: the last of each data set
    assert [job.result() for job in submitted] == [
        0,
        1,
        1,
    ]
    assert len(grid.files()) == 9
    make_model(grid.model)  # cured
    assert [job.result() for job in submit(grid, *flags)] == [0]
    assert len(grid.files()) == 12 and len(grid.calls()) == 8 + 2 + 2
    assert submit(grid, *flags) == [] and "nothing to submit" in capsys.readouterr().out


def test_the_command_says_how_to_go_on_and_what_was_finished_after_it_is_skipped(tmp_path, capsys):
    grid = FakeGrid(tmp_path)
    grid.run(*SETS, "--slurm", "--slurm-cluster", "debug")
    said = capsys.readouterr().out
    assert (
        "12 results from 8 trainings" in said and f"megaenc finetune summary {grid.output}" in said
    )
    assert not grid.calls()  # debug begins when it is asked for a result
    [first] = submit(grid, "--slurm-cluster", "debug", "--jobs-per-task", 100)
    [second] = submit(grid, "--slurm-cluster", "debug", "--jobs-per-task", 100)
    assert (first.result(), second.result()) == (0, 0) and len(grid.calls()) == 8


def test_a_task_that_runs_out_of_time_is_queued_again_as_it_is(tmp_path):
    part = slurm.SlurmTask(
        tuple(FakeGrid(tmp_path).plan("sc1").pending), "fake_runs:run", LocalExecution(jobs=1)
    )
    again = part.checkpoint()
    assert again.function == part == pickle.loads(pickle.dumps(part))


def test_what_sbatch_gets(tmp_path, monkeypatch):
    """Slurm's executor makes an array of the tasks with the given flags."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(
        "submitit.core.utils.CommandFunction.__call__", lambda self: "Submitted batch job 17\n"
    )
    wanted = ["--slurm-partition", "mi250", "--slurm-minutes", 90, "--slurm-gpus", 8,
              "--slurm-parallel", 5,
              "--slurm-cpus", 56, "--slurm-extra", "account=abc", "--jobs-per-task", 3]  # fmt: skip
    grid = FakeGrid(tmp_path)
    submitted = submit(grid, *wanted)
    assert [job.job_id for job in submitted] == ["17_0", "17_1", "17_2"]
    lines = next(grid.output.rglob("*submission*.sh")).read_text().splitlines()
    for line in (
        "--partition=mi250",
        "--time=90",
        "--gpus-per-node=8",
        "--array=0-2%3",
        "--account=abc",
        "--cpus-per-task=56",
    ):
        assert f"#SBATCH {line}" in lines


def test_what_cannot_be_submitted_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="--slurm: megaenc-finetune could not be submitted"):
        submit(FakeGrid(tmp_path))
    with pytest.raises(InputError, match="--slurm-extra: found 'account', expected key=value"):
        submit(FakeGrid(tmp_path), "--slurm-extra", "account")
