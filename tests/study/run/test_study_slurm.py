"""A study on a cluster: jobs that wait for each other. submitit's own executors and a stand-in for sbatch take Slurm's place."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import manifests
import pytest
import runs
import submitit
from fake_stages import SUCCEED, FakeStage, calls

from megaenc.errors import InputError
from megaenc.finetune.grid.slurm import ClusterConfig
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.dag import build_graph
from megaenc.study.run import slurm, stage_log
from megaenc.study.run.slurm import StageTask, count_machines, job_name, read_queue, submit_stages

HERE = Path(__file__).parents[1]


@pytest.fixture
def sbatch(monkeypatch):
    """Job files that sbatch would get; jobs are numbered from 11. The queue is empty."""
    scripts: list[list[str]] = []

    def take(self) -> str:
        scripts.append(Path(self.command[1]).read_text().splitlines())
        return f"Submitted batch job {10 + len(scripts)}\n"

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("submitit.core.utils.CommandFunction.__call__", take)
    monkeypatch.setattr(submitit.SlurmExecutor, "_throttle", lambda self: None)
    monkeypatch.setattr(slurm, "read_queue", lambda study: {})
    return scripts


def a_study(folder: Path) -> list:
    nodes = build_graph(read_manifest(manifests.write(folder)), folder / "study", processes=4, grid_jobs=0).stages
    ids = ["corpus", "pretrain/toy-clm-400", "export/toy-clm-400", "finetune/toy-clm-400"]
    return [nodes[id] for id in ids]


def test_each_job_waits_for_those_that_it_needs(tmp_path, sbatch):
    cluster = ClusterConfig(slurm_partition="gpu", slurm_gpus=2, slurm_cpus=7, slurm_minutes=90, slurm_extra=("account=abc",))
    jobs = submit_stages(a_study(tmp_path), tmp_path / "study", cluster)
    corpus, pretrain, export, grid = sbatch
    assert [job.job_id for several in jobs.values() for job in several] == ["11", "12", "13", "14_0", "14_1"]
    assert not any("dependency" in line for line in corpus)
    for script, before in ((pretrain, 11), (export, 12), (grid, 13)):
        assert f"#SBATCH --dependency=afterok:{before}" in script and "#SBATCH --kill-on-invalid-dep=yes" in script
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--time=90", "--account=abc", "--partition=gpu"):
        assert f"#SBATCH {line}" in pretrain
    assert "#SBATCH --nodes=1" in export and "#SBATCH --cpus-per-task=7" in export
    assert "#SBATCH --array=0-1%2" in grid
    [name] = [line for line in pretrain if "--job-name" in line]
    assert job_name(tmp_path / "study", "pretrain/toy-clm-400") in name


def test_a_grid_is_an_array_of_its_data_sets(tmp_path, sbatch):
    *_, grid = a_study(tmp_path)
    words = [part.next_command() for part in grid.split_by_training_set()]
    assert [part.id for part in grid.split_by_training_set()] == [f"{grid.id}@demo_sc", f"{grid.id}@demo_ir"]
    assert [line[line.index("--datasets") + 1 :][:2] for line in words] == [
        ["demo_sc", "--learning-rates"],
        ["demo_ir", "--learning-rates"],
    ]
    assert sum(part.progress()[1] for part in grid.split_by_training_set()) == grid.progress()[1] == 12


def test_what_is_done_or_queued_is_not_submitted_again(tmp_path, sbatch, monkeypatch, capsys):
    a, b, c = (
        FakeStage("pretrain/a", tmp_path),
        FakeStage("pretrain/b", tmp_path, ("pretrain/a",)),
        FakeStage("export/b", tmp_path, ("pretrain/b",)),
    )
    a.made.touch()
    monkeypatch.setattr(slurm, "read_queue", lambda study: {"pretrain/b": "7"})
    assert list(submit_stages([a, b, c], tmp_path, ClusterConfig())) == ["export/b"]
    assert "#SBATCH --dependency=afterok:7" in sbatch[0] and len(sbatch) == 1
    assert "1 done, 1 already queued, 1 submitted" in capsys.readouterr().out


def test_the_queue_is_read_by_the_names_of_jobs(tmp_path, monkeypatch):
    names = [job_name(tmp_path, "pretrain/a"), job_name(tmp_path, "finetune/a"), job_name(tmp_path / "x", "export/a")]
    queue_output = "".join(f"{number} {name}\n" for number, name in enumerate(names, 17))
    monkeypatch.setattr("subprocess.run", lambda *a, **k: subprocess.CompletedProcess(a, 0, queue_output, ""))
    assert read_queue(tmp_path) == {"pretrain/a": "17", "finetune/a": "18"}


def test_without_a_cluster_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="--slurm: squeue failed"):
        submit_stages([FakeStage("pretrain/a", tmp_path)], tmp_path, ClusterConfig())
    with pytest.raises(InputError, match="has 6 processes \\(--processes\\), expected a divisor"):
        count_machines(ClusterConfig(slurm_gpus=4), FakeStage("pretrain/a", tmp_path, processes=6))
    assert (
        count_machines(ClusterConfig(slurm_gpus=0), FakeStage("pretrain/a", tmp_path, processes=6)) == 1
    )  # all on the cores of one
    with pytest.raises(InputError, match="--slurm-cpus: found 0, expected at least 1"):
        ClusterConfig(slurm_cpus=0).check()


@pytest.mark.parametrize("kind", ["debug", "local"])
def test_submitits_own_executors_do_a_study(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setenv("PYTHONPATH", f"{runs.ROOT}:{HERE}")
    nodes = [
        FakeStage("corpus", tmp_path),
        FakeStage("pretrain/a", tmp_path, ("corpus",)),
        FakeStage("pretrain/b", tmp_path, ("corpus",), script="echo no room; exit 3"),
        FakeStage("export/b", tmp_path, ("pretrain/b",)),
        FakeStage("export/a", tmp_path, ("pretrain/a",)),
    ]
    jobs = submit_stages(nodes, tmp_path, ClusterConfig(slurm_cluster=kind))
    for job in jobs["export/a"]:
        job.result()
    assert [node.is_done() for node in nodes] == [True, True, False, False, True]
    assert "export/b: not submitted, because a stage that it needs has failed" in capsys.readouterr().out
    assert list(submit_stages(nodes[:2], tmp_path, ClusterConfig(slurm_cluster=kind))) == []


SAVES = "trap 'touch $MADE.saved; exit 75' TERM; kill -USR2 $$; touch $MADE.on; "
SAVES += "n=0; while [ $n -lt 600 ]; do n=$((n+1)); sleep 0.1; done"


def test_when_its_time_is_over_a_job_saves_and_is_queued_as_it_is(tmp_path):
    """As submitit does it: a signal, upon which it calls `checkpoint` and leaves."""
    code = f"""
import signal, sys, pickle
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from fake_stages import FakeStage
from megaenc.study.run.slurm import StageTask
task = StageTask(FakeStage("pretrain/a", Path({str(tmp_path)!r}), script={SAVES!r}), Path({str(tmp_path)!r}))
def over(number, frame):
    again = task.checkpoint().function
    print("again", again == task == pickle.loads(pickle.dumps(task)), flush=True)
    sys.exit(255)
signal.signal(signal.SIGUSR2, over)
task()
"""
    process = subprocess.Popen([sys.executable, "-c", code], env=runs.surroundings(), stdout=subprocess.PIPE, text=True)
    on, deadline = tmp_path / "pretrain_a.made.on", time.monotonic() + 90
    while not on.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGUSR2)
    out, _ = process.communicate(timeout=90)
    assert "again True" in out and process.returncode == 255
    assert (tmp_path / "pretrain_a.made.saved").exists()
    assert stage_log.read_attempts(stage_log.log_path(tmp_path, "pretrain/a"))[-1].outcome == stage_log.STOPPED
    StageTask(FakeStage("pretrain/a", tmp_path, script=SUCCEED), tmp_path)()
    assert calls(tmp_path) == ["begin pretrain/a"] * 2 + ["end pretrain/a"]


def test_a_job_that_fails_says_so_to_the_queue(tmp_path):
    task = StageTask(FakeStage("export/a", tmp_path, script="echo 'error: --load: nothing there'; exit 2"), tmp_path)
    with pytest.raises(RuntimeError, match="error: --load: nothing there"):
        pickle.loads(pickle.dumps(task))()


def test_a_job_compares_what_is_there_with_what_was_made_again(tmp_path):
    stale = FakeStage("export/a", tmp_path, wrong="hf/a: made of another a")
    stale.made.touch()
    with pytest.raises(InputError, match="hf/a: made of another a"):
        StageTask(stale, tmp_path)()


def test_what_waits_to_be_compared_is_submitted(tmp_path, sbatch):
    parent, child = FakeStage("pretrain/a", tmp_path), FakeStage("export/a", tmp_path, ("pretrain/a",))
    child.made.touch()
    assert list(submit_stages([parent, child], tmp_path, ClusterConfig())) == ["pretrain/a", "export/a"]


def test_a_grid_that_waits_to_be_compared_is_one_job(tmp_path, sbatch, monkeypatch):
    nodes = a_study(tmp_path)
    monkeypatch.setattr(type(nodes[-1]), "is_done", lambda self: True)
    assert [job.job_id for job in submit_stages(nodes, tmp_path / "study", ClusterConfig())["finetune/toy-clm-400"]] == ["14"]


@pytest.mark.parametrize("how", [stage_log.STOPPED, "exit code 1"])
def test_another_machine_waits_where_the_first_was_told_to_stop(tmp_path, monkeypatch, how):
    """It is about to be requeued, and an end before that would be a failure."""
    *_, pretrain = a_study(tmp_path)[:2]
    for name, value in {"JOB_ID": "77", "NODEID": "1", "JOB_NODELIST": "n[3-4]", "NTASKS": "2", "PROCID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    log, waited = stage_log.log_path(tmp_path / "study", pretrain.id), []
    stage_log.log_start(log, ["torchrun"])
    monkeypatch.setattr("megaenc.study.run.slurm.subprocess.run", lambda words, env: subprocess.CompletedProcess(words, 1))

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 1:  # it looks again until the first has said how it ended
            stage_log.log_end(log, how)

    monkeypatch.setattr("megaenc.study.run.slurm.time.sleep", sleep)
    with pytest.raises(RuntimeError, match="exit code 1 on"):
        StageTask(pretrain, tmp_path / "study", machines=2)()
    assert [seconds > 60 for seconds in waited] == ([False, True] if how == stage_log.STOPPED else [False])


def test_on_several_machines_each_has_a_torchrun(tmp_path, monkeypatch):
    """The second machine: it joins the first's and writes neither log nor lock."""
    *_, pretrain = a_study(tmp_path)[:2]
    for name, value in {"JOB_ID": "77", "NODEID": "1", "JOB_NODELIST": "n[3-4]", "NTASKS": "2", "PROCID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    started: list[list[str]] = []
    monkeypatch.setattr(
        "megaenc.study.run.slurm.subprocess.run",
        lambda words, env: started.append(words) or subprocess.CompletedProcess(words, 0),
    )
    StageTask(pretrain, tmp_path / "study", machines=2)()
    [words] = started
    where = "--nnodes 2 --node-rank 1 --master-addr n3 --master-port 20077 --nproc-per-node 2"
    assert f"-m torch.distributed.run {where} -m megaenc pretrain --" in " ".join(words)
    assert not (tmp_path / "study").exists()
