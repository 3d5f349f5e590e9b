"""A study on a cluster: jobs that wait for each other.

Stand-ins for Slurm's programs or submitit's own executors run them.
"""

import os
import signal
import subprocess
from pathlib import Path

import manifests
import pytest
import runs
from fake_stages import SUCCEED, FakeStage, calls, start_python

from megaenc.errors import InputError
from megaenc.finetune.grid.cluster import ClusterConfig
from megaenc.study.plan.dag import build_graph
from megaenc.study.run import slurm, stage_log
from megaenc.study.run.slurm import StageTask, count_machines, job_name, submit_stages

HERE = Path(__file__).parents[1]


class Slurm:
    """Programs `sbatch` and `squeue`.

    `sbatch` keeps the scripts and numbers jobs from 11 on, `squeue` prints the file `queue`.
    """

    def __init__(self, directory: Path):
        self.jobs = directory / "jobs"
        self.queue = directory / "queue"
        self.programs = directory / "programs"
        self.jobs.mkdir(parents=True)
        self.programs.mkdir()
        self.queue.touch()
        number = f"number=$(($(ls {self.jobs} | wc -l) + 11))"
        texts = {
            "sbatch": f"{number}; cp $1 {self.jobs}/$number; echo Submitted batch job $number",
            "squeue": f"cat {self.queue}",
            "srun": "",
        }
        for name, text in texts.items():
            (self.programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (self.programs / name).chmod(0o755)

    def scripts(self) -> list[list[str]]:
        return [file.read_text().splitlines() for file in sorted(self.jobs.iterdir())]


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Slurm:
    stand_in = Slurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{stand_in.programs}:{os.environ['PATH']}")
    return stand_in


def a_study(directory: Path) -> list:
    nodes = build_graph(
        manifests.read(directory), directory / "study", processes=4, grid_jobs=0
    ).stages
    ids = [
        "corpus",
        "pretrain/toy-clm-400",
        "export/toy-clm-400",
        "finetune/toy-clm-400@demo_sc",
        "finetune/toy-clm-400@demo_ir",
    ]
    return [nodes[id] for id in ids]


def test_each_job_waits_for_those_that_it_needs(tmp_path, cluster):
    config = ClusterConfig(
        slurm_partition="gpu",
        slurm_gpus=2,
        slurm_cpus=7,
        slurm_minutes=90,
        slurm_extra=("account=abc",),
    )
    jobs = submit_stages(a_study(tmp_path), tmp_path / "study", config)
    corpus, pretrain, export, grid = cluster.scripts()
    assert [job.job_id for several in jobs.values() for job in several] == [
        "11",
        "12",
        "13",
        "14_0",
        "14_1",
    ]
    assert not any("dependency" in line for line in corpus)
    for script, before in ((pretrain, 11), (export, 12), (grid, 13)):
        assert (
            f"#SBATCH --dependency=afterok:{before}" in script
            and "#SBATCH --kill-on-invalid-dep=yes" in script
        )
    for line in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=2",
        "--time=90",
        "--account=abc",
        "--partition=gpu",
    ):
        assert f"#SBATCH {line}" in pretrain
    assert "#SBATCH --nodes=1" in export and "#SBATCH --cpus-per-task=7" in export
    assert "#SBATCH --array=0-1%2" in grid  # a task for each data set
    [name] = [line for line in pretrain if "--job-name" in line]
    assert job_name(tmp_path / "study", "pretrain/toy-clm-400") in name


def test_a_grid_is_an_array_of_its_data_sets_also_of_those_that_wait_to_be_compared(
    tmp_path, cluster, monkeypatch, capsys
):
    *nodes, one, other = a_study(tmp_path)
    monkeypatch.setattr(type(one), "is_done", lambda stage: True)
    jobs = submit_stages([*nodes, one, other], tmp_path / "study", ClusterConfig())
    assert [job.job_id for job in jobs["finetune/toy-clm-400"]] == ["14_0", "14_1"]
    assert "5 stages: 0 done, 5 submitted" in capsys.readouterr().out
    cluster.queue.write_text(f"14 {job_name(tmp_path / 'study', 'finetune/toy-clm-400')}\n")
    assert submit_stages([one, other], tmp_path / "study", ClusterConfig()) == {}


def test_what_is_done_or_queued_is_not_submitted_again(tmp_path, cluster, capsys):
    a = FakeStage("pretrain/a", tmp_path)
    b = FakeStage("pretrain/b", tmp_path, ("pretrain/a",))
    c = FakeStage("export/b", tmp_path, ("pretrain/b",))
    a.made.touch()
    names = [job_name(tmp_path, "pretrain/b"), job_name(tmp_path / "another", "export/b")]
    cluster.queue.write_text("".join(f"{number} {name}\n" for number, name in enumerate(names, 7)))
    assert list(submit_stages([a, b, c], tmp_path, ClusterConfig())) == ["export/b"]
    [script] = cluster.scripts()
    assert "#SBATCH --dependency=afterok:7" in script
    assert "1 done, 1 already queued, 1 submitted" in capsys.readouterr().out


def test_machines_have_equally_many_processes(tmp_path):
    stage = FakeStage("pretrain/a", tmp_path, processes=6)
    with pytest.raises(InputError, match="has 6 processes \\(--processes\\), expected a divisor"):
        count_machines(ClusterConfig(slurm_gpus=4), stage)
    assert count_machines(ClusterConfig(slurm_gpus=0), stage) == 1  # all on the cores of one


def test_submitits_own_executors_do_a_study(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", f"{runs.ROOT}:{HERE}")
    nodes = [
        FakeStage("corpus", tmp_path),
        FakeStage("pretrain/a", tmp_path, ("corpus",)),
        FakeStage("pretrain/b", tmp_path, ("corpus",), script="echo no room; exit 3"),
        FakeStage("export/b", tmp_path, ("pretrain/b",)),
        FakeStage("finetune/b@demo_sc", tmp_path, ("export/b",)),
    ]
    submit_stages(nodes, tmp_path, ClusterConfig(slurm_cluster="debug"))
    assert [node.is_done() for node in nodes] == [True, True, False, False, False]
    printed = capsys.readouterr().out
    for name in ("export/b", "finetune/b"):
        assert f"{name}: not submitted, because a stage that it needs has failed" in printed
    export = FakeStage("export/a", tmp_path, ("pretrain/a",))
    jobs = submit_stages([nodes[1], export], tmp_path, ClusterConfig(slurm_cluster="local"))
    assert list(jobs) == ["export/a"]
    jobs["export/a"][0].result()
    assert export.is_done()


def test_when_its_time_is_over_a_job_saves_and_is_queued_as_it_is(tmp_path):
    """As submitit does it: a signal, upon which it calls `checkpoint` and leaves."""
    code = f"""
import signal, pickle
from megaenc.study.run.slurm import StageTask
study = Path({str(tmp_path)!r})
task = StageTask(FakeStage("pretrain/a", study, script="kill -USR2 $$; " + SAVE_WHEN_TOLD), study)
def over(number, frame):
    again = task.checkpoint().function
    print("again", again == task == pickle.loads(pickle.dumps(task)), flush=True)
    sys.exit(255)
signal.signal(signal.SIGUSR2, over)
task()
"""
    process = start_python(code, tmp_path / "pretrain_a.made.pid")
    os.kill(process.pid, signal.SIGUSR2)
    out, _ = process.communicate(timeout=90)
    assert "again True" in out and process.returncode == 255
    assert (tmp_path / "pretrain_a.made.saved").exists()
    assert (
        stage_log.read_attempts(stage_log.log_path(tmp_path, "pretrain/a"))[-1].outcome
        == stage_log.STOPPED
    )
    StageTask(FakeStage("pretrain/a", tmp_path, script=SUCCEED), tmp_path)()
    assert calls(tmp_path) == ["begin pretrain/a"] * 2 + ["end pretrain/a"]


def test_a_job_that_fails_or_is_stale_says_so_to_the_queue(tmp_path):
    task = StageTask(
        FakeStage("export/a", tmp_path, script="echo 'error: --load: nothing there'; exit 2"),
        tmp_path,
    )
    with pytest.raises(RuntimeError, match="error: --load: nothing there"):
        task()
    stale = FakeStage("export/b", tmp_path, wrong="hf/b: made of another b")
    with pytest.raises(InputError, match="hf/b: made of another b"):
        StageTask(stale, tmp_path)()


@pytest.fixture
def second_machine(tmp_path, monkeypatch):
    """Return the second machine's task and its commands, which end with `code`."""
    for name, value in {
        "JOB_ID": "77",
        "NODEID": "1",
        "JOB_NODELIST": "n[3-4]",
        "NTASKS": "2",
        "PROCID": "1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    started = []

    def begin(code: int) -> StageTask:
        def run(words, env):
            started.append(words)
            return subprocess.CompletedProcess(words, code)

        monkeypatch.setattr(slurm.subprocess, "run", run)
        return StageTask(a_study(tmp_path)[1], tmp_path / "study", machines=2)

    return begin, started


@pytest.mark.parametrize("how", [stage_log.STOPPED, "exit code 1"])
def test_another_machine_waits_where_the_first_was_told_to_stop(
    tmp_path, monkeypatch, second_machine, how
):
    """It is about to be requeued, and an end before that would be a failure."""
    begin, _ = second_machine
    task = begin(1)
    waited = []
    log = stage_log.log_path(tmp_path / "study", task.stage.id)
    stage_log.log_start(log, ["torchrun"])

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 1:  # it looks again until the first has said how it ended
            stage_log.log_end(log, how)

    monkeypatch.setattr(slurm.time, "sleep", sleep)
    with pytest.raises(RuntimeError, match="exit code 1 on"):
        task()
    assert [seconds > 60 for seconds in waited] == (
        [False, True] if how == stage_log.STOPPED else [False]
    )


def test_on_several_machines_each_has_a_torchrun(tmp_path, second_machine):
    """The second machine: it joins the first's and writes neither log nor lock."""
    begin, started = second_machine
    begin(0)()
    [words] = started
    where = "--nnodes 2 --node-rank 1 --master-addr n3 --master-port 20077 --nproc-per-node 2"
    assert f"-m torch.distributed.run {where} -m megaenc pretrain --" in " ".join(words)
    assert not (tmp_path / "study").exists()
