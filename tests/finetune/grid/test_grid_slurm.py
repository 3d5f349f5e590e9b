"""A cluster gets the same runs in parts; submitit's own executors stand in for Slurm."""

import pickle
from pathlib import Path

import pytest
import submitit
from fake_runs import calls, find, make_model

from megaenc import flags
from megaenc.errors import InputError
from megaenc.finetune.grid import slurm
from megaenc.finetune.grid.command import GridConfig, plan_grid, run_grid
from megaenc.finetune.grid.executor import LocalExecution

FLAGS = ["--learning-rates", "1e-5", "5e-4", "--seeds", "2", "--jobs", "2", "--datasets", "sc1", "ir1", "ir2"]


def settings(model, output, *more) -> GridConfig:
    argv = ["--model", str(model), "--output", str(output), *FLAGS, *more]
    return flags.parse(GridConfig, argv, prog="grid", description="a grid")


def submit(asked: GridConfig) -> list:
    planned = plan_grid(asked, find)
    return slurm.submit_jobs(planned.pending, "fake_runs:run", asked.slurm, asked.local, asked.output)


def test_tasks_of_a_cluster_do_the_grid(tmp_path, monkeypatch, capsys):
    """In processes of submitit's local executor, which unpickle what they are to do."""
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{Path(__file__).parents[1]}")
    model = make_model(tmp_path / "toy", **{"lr5e-04_sd1": {"do": "crash"}})
    asked = settings(model, tmp_path / "out", "--slurm", "--slurm-cluster", "local", "--jobs-per-task", "3")
    submitted = submit(asked)
    assert "submitted 8 runs as 3 tasks of up to 3" in capsys.readouterr().out
    assert [job.result() for job in submitted] == [0, 1, 1]  # without result: the last of each data set
    assert len(list((tmp_path / "out").rglob("results.json"))) == 9
    make_model(tmp_path / "toy")
    assert [job.result() for job in submit(asked)] == [0]
    assert len(list((tmp_path / "out").rglob("results.json"))) == 12
    assert submit(asked) == [] and "nothing to submit" in capsys.readouterr().out
    assert len(calls(model)) == 8 + 2 + 2


def test_what_was_finished_after_the_submission_is_skipped(tmp_path):
    model = make_model(tmp_path / "toy")
    asked = settings(model, tmp_path / "out", "--slurm", "--slurm-cluster", "debug", "--jobs-per-task", "100")
    [first], [second] = submit(asked), submit(asked)
    assert (first.result(), second.result()) == (0, 0) and len(calls(model)) == 8


def test_the_command_says_how_to_go_on(tmp_path, capsys):
    model = make_model(tmp_path / "toy")
    run_grid(settings(model, tmp_path / "out", "--slurm", "--slurm-cluster", "debug"), find, "fake_runs:run")
    said = capsys.readouterr().out
    assert "12 results from 8 trainings" in said and f"megaenc finetune summary {tmp_path / 'out'}" in said
    assert not calls(model)  # debug begins when it is asked for a result


def test_a_task_that_runs_out_of_time_is_queued_again_as_it_is(tmp_path):
    planned = plan_grid(settings(make_model(tmp_path / "toy"), tmp_path / "out"), find)
    part = slurm.SlurmTask(tuple(planned.pending), "fake_runs:run", LocalExecution(jobs=1))
    again = part.checkpoint()
    assert again.function == part == pickle.loads(pickle.dumps(part))


def test_what_sbatch_gets(tmp_path, monkeypatch):
    """Slurm's executor makes an array of the tasks with the flags that were given; sbatch is not called."""
    scripts, script = [], submitit.SlurmExecutor._make_submission_file_text
    keep = lambda *given: scripts.append(script(*given)) or scripts[-1]  # noqa: E731
    monkeypatch.setattr(submitit.SlurmExecutor, "_make_submission_file_text", keep)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("submitit.core.utils.CommandFunction.__call__", lambda self: "Submitted batch job 17\n")
    wanted = ["--slurm-partition", "mi250", "--slurm-minutes", "90", "--slurm-gpus", "8", "--slurm-parallel", "5",
              "--slurm-cpus", "56", "--slurm-extra", "account=abc", "--jobs-per-task", "3"]  # fmt: skip
    submitted = submit(settings(make_model(tmp_path / "toy"), tmp_path / "out", "--slurm", *wanted))
    assert [job.job_id for job in submitted] == ["17_0", "17_1", "17_2"]
    lines = scripts[-1].splitlines()
    for line in ("--partition=mi250", "--time=90", "--gpus-per-node=8", "--array=0-2%3", "--account=abc", "--cpus-per-task=56"):
        assert f"#SBATCH {line}" in lines


def test_what_cannot_be_submitted_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    model = make_model(tmp_path / "toy")
    with pytest.raises(InputError, match="--slurm: could not be submitted"):
        submit(settings(model, tmp_path / "out", "--slurm"))
    with pytest.raises(InputError, match="--slurm-extra: found 'account', expected key=value"):
        submit(settings(model, tmp_path / "out", "--slurm", "--slurm-extra", "account"))
