"""Stages run in order, some at a time; failures and kills leave the rest whole."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import manifests
import pytest
import runs
import small_data
from fake_stages import SUCCEED, FakeStage, calls, start_python, wait_until
from manifests import TOY

from megaenc.dist_env import EXIT_CODE_FILE
from megaenc.errors import InputError
from megaenc.study.report import command as report
from megaenc.study.run import stage_log
from megaenc.study.run.command import main
from megaenc.study.run.executor import execute_stages, stage_environment
from megaenc.study.run.stage import finished_stages


def test_each_begins_when_what_it_needs_is_done(tmp_path):
    late = "sleep 0.5; " + SUCCEED
    nodes = [
        FakeStage("corpus", tmp_path),
        FakeStage("pretrain/a", tmp_path, ("corpus",), late),
        FakeStage("pretrain/b", tmp_path, ("pretrain/a",)),
        FakeStage("pretrain/c", tmp_path, ("corpus",)),
    ]
    assert execute_stages(nodes, tmp_path, ["", ""]) == {}
    output = calls(tmp_path)
    assert output[:2] == ["begin corpus", "end corpus"]
    assert (
        output.index("begin pretrain/b")
        > output.index("end pretrain/a")
        > output.index("end pretrain/c")
    )
    assert len(output) == 8
    assert execute_stages(nodes, tmp_path, ["", ""]) == {} and calls(tmp_path) == output


@dataclass(frozen=True)
class Twofold(FakeStage):
    """A stage of two commands."""

    def remaining_commands(self) -> list[list[str]]:
        half = self.study / "half"
        first = [] if half.exists() else [["touch", str(half)]]
        return [*first, *super().remaining_commands()]


def test_a_stage_of_two_commands_is_one_attempt_after_the_other(tmp_path):
    assert execute_stages([Twofold("embed/a", tmp_path)], tmp_path, [""]) == {}
    attempts = stage_log.read_attempts(stage_log.log_path(tmp_path, "embed/a"))
    assert [attempt.outcome for attempt in attempts] == [stage_log.FINISHED] * 2
    assert calls(tmp_path) == ["begin embed/a", "end embed/a"]


def test_the_one_with_most_behind_it_goes_first(tmp_path):
    nodes = [
        FakeStage("export/short", tmp_path),
        FakeStage("pretrain/long", tmp_path, planned_seconds=50.0),
        FakeStage("pretrain/root", tmp_path, planned_seconds=1.0),
        FakeStage("pretrain/child", tmp_path, ("pretrain/root",), planned_seconds=100.0),
    ]
    execute_stages(nodes, tmp_path, [""])
    order = [line.split("/")[1] for line in calls(tmp_path) if line.startswith("begin")]
    assert order == ["root", "child", "long", "short"]


def test_a_failure_is_tried_once_more_and_stops_what_needs_it_and_nothing_else(tmp_path, capsys):
    crash_first = "[ -e $MADE.once ] || { touch $MADE.once; echo KeyError: why >&2; kill -9 $$; }; "
    broken = FakeStage("pretrain/a", tmp_path, script="echo no room; exit 7")
    nodes = [
        broken,
        FakeStage("export/a", tmp_path, ("pretrain/a",)),
        FakeStage("finetune/a", tmp_path, ("export/a",)),
        FakeStage("pretrain/b", tmp_path, script=crash_first + SUCCEED),
        FakeStage("export/b", tmp_path, ("pretrain/b",)),
    ]
    failed = execute_stages(nodes, tmp_path, ["", ""])
    assert failed == {
        "pretrain/a": f"exit code 7: no room ({tmp_path / 'logs' / 'pretrain' / 'a.log'})"
    }
    assert [line for line in calls(tmp_path) if "/a" in line] == ["begin pretrain/a"] * 2
    assert nodes[-1].is_done()
    output = capsys.readouterr().out
    assert "pretrain/b: killed by SIGKILL" in output and "KeyError: why; trying once more" in output
    first, second = stage_log.read_attempts(stage_log.log_path(tmp_path, "pretrain/b"))
    assert first.is_failed and first.message == "KeyError: why" and not second.is_failed
    assert execute_stages([replace(broken, script=SUCCEED), *nodes[1:]], tmp_path, ["", ""]) == {}
    assert all(node.is_done() for node in nodes)


@pytest.mark.multiprocess
def test_a_run_of_several_processes_waits_for_as_many_places(tmp_path):
    show = "echo $CUDA_VISIBLE_DEVICES > $MADE"
    wide = FakeStage("pretrain/a", tmp_path, script=show, processes=2, planned_seconds=1.0)
    narrow = FakeStage("export/b", tmp_path, script="sleep 0.4; " + show, planned_seconds=5.0)
    assert execute_stages([narrow, wide], tmp_path, ["0", "1"]) == {}
    assert wide.made.read_text() in ("1,0\n", "0,1\n") and narrow.made.read_text() == "0\n"
    two_a_device = replace(wide, study=tmp_path / "shared")
    assert execute_stages([two_a_device], two_a_device.study, ["0", "0", "1", "1"]) == {}
    assert two_a_device.made.read_text() == "0,1\n"
    with pytest.raises(
        InputError,
        match="found 1 devices and 2, expected at least 2, one per process of a pretraining run",
    ):
        execute_stages([replace(wide, study=tmp_path / "new")], tmp_path, ["0", "0"])


WORKER = """
from megaenc.processes import exit_on_sigterm
from megaenc.study.run.executor import execute_stages
study = Path({study!r})
with exit_on_sigterm():
    first = FakeStage("pretrain/a", study)
    second = FakeStage("pretrain/b", study, ("pretrain/a",), SAVE_WHEN_TOLD + SUCCEED)
    execute_stages([first, second], study, [""])
"""


def begun(tmp_path: Path) -> tuple[subprocess.Popen, Path]:
    """Start a process; return it in its second of two stages, with the id's file."""
    pid = tmp_path / "pretrain_b.made.pid"
    return start_python(WORKER.format(study=str(tmp_path)), pid), pid


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_told_to_stop_it_lets_them_save(tmp_path, number):
    """Also where whoever reads what it says has left, as `| head -1` does."""
    process, pid = begun(tmp_path)
    if number == signal.SIGINT:
        process.stdout.close()
    process.send_signal(number)
    if number == signal.SIGHUP:  # it comes twice, from the shell and from the kernel
        process.send_signal(number)
    if number != signal.SIGINT:
        assert "stopping: pretrain/b" in process.stdout.read()
    assert process.wait(60) != 0
    assert (tmp_path / "pretrain_b.made.saved").exists() and not is_alive(int(pid.read_text()))
    assert (
        stage_log.read_attempts(stage_log.log_path(tmp_path, "pretrain/b"))[-1].outcome
        == stage_log.STOPPED
    )


def test_what_is_there_is_compared_when_what_it_needs_was_made_again(tmp_path, capsys):
    stale = FakeStage("export/a", tmp_path, ("pretrain/a",), wrong="hf/a: made of another a")
    right = FakeStage("export/b", tmp_path, ("pretrain/a",))
    nodes = [
        FakeStage("pretrain/a", tmp_path),
        stale,
        right,
        FakeStage("finetune/a", tmp_path, ("export/a",)),
    ]
    for output in (stale.made, right.made, nodes[-1].made):
        output.touch()
    assert finished_stages(nodes) == set()
    assert execute_stages(nodes, tmp_path, [""]) == {"export/a": "hf/a: made of another a"}
    assert calls(tmp_path) == ["begin pretrain/a", "end pretrain/a"]
    conclude = "export/a: failed: hf/a: made of another a"
    assert conclude in capsys.readouterr().out


@pytest.mark.multiprocess
def test_a_stop_under_torchrun_is_no_crash(tmp_path):
    """torchrun exits with 1 whatever its workers do; they record their own exit code."""
    script = (
        f"echo 75 > ${EXIT_CODE_FILE}; echo 'SignalException: Process 7 got signal: 15'; exit 1"
    )
    stage = FakeStage("pretrain/a", tmp_path, script=script, processes=2)
    [reason] = execute_stages([stage], tmp_path, ["", ""]).values()
    assert reason.startswith("stopped by a signal, after saving (") and calls(tmp_path) == [
        "begin pretrain/a"
    ]
    assert [file.name for file in (tmp_path / "logs" / "pretrain").iterdir()] == ["a.log"]
    assert (
        stage_log.read_attempts(stage_log.log_path(tmp_path, "pretrain/a"))[-1].outcome
        == stage_log.STOPPED
    )
    # Seconds, where its own are 30
    assert float(stage_environment(["", ""], 2)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 60


@pytest.mark.multiprocess
def test_what_ends_for_good_is_tried_once(tmp_path):
    """Wrong input, of a command or of torchrun's workers, but no earlier attempt's."""
    said = "echo 'error: --lr: found 0' >&2; echo 'exitcode: 2' >&2; "
    command = FakeStage("pretrain/a", tmp_path, script=said + "exit 2")
    workers = FakeStage(
        "pretrain/b", tmp_path, script=f"{said} echo 2 > ${EXIT_CODE_FILE}; exit 1", processes=2
    )
    nothing = FakeStage("pretrain/c", tmp_path, script="true")
    crash = FakeStage("pretrain/d", tmp_path, script="exit 7")
    log = stage_log.log_path(tmp_path, "pretrain/d")
    log.parent.mkdir(parents=True)
    stage_log.exit_code_file(log).write_text("75")
    failed = execute_stages([command, workers, nothing, crash], tmp_path, ["", ""])
    for stage in (command, workers):
        assert failed[stage.id].startswith("error: --lr: found 0 (")
        assert calls(tmp_path).count(f"begin {stage.id}") == 1
    assert "its output is missing" in failed[nothing.id]
    assert (
        failed[crash.id].startswith("exit code 7: ")
        and calls(tmp_path).count(f"begin {crash.id}") == 2
    )


def test_killed_it_takes_them_along_and_goes_on(tmp_path):
    process, pid = begun(tmp_path)
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(int(pid.read_text())))
    assert not (tmp_path / "pretrain_b.made.saved").exists() and not stage_log.is_stage_locked(
        tmp_path, "pretrain/b"
    )
    assert stage_log.read_attempts(stage_log.log_path(tmp_path, "pretrain/b"))[-1].outcome == ""
    again = [FakeStage("pretrain/a", tmp_path), FakeStage("pretrain/b", tmp_path, ("pretrain/a",))]
    assert execute_stages(again, tmp_path, [""]) == {}
    assert calls(tmp_path).count("begin pretrain/a") == 1


def test_what_another_process_is_at_is_waited_for(tmp_path, capsys):
    node = FakeStage("pretrain/a", tmp_path)
    child = FakeStage("export/a", tmp_path, ("pretrain/a",))
    hold = (
        "import time; from pathlib import Path; from megaenc.study.run import stage_log; study = "
        f"Path({str(tmp_path)!r})\n"
    )
    hold += (
        "with stage_log.lock_stage(study, 'pretrain/a'):\n    (study / 'held').touch(); "
        "time.sleep(2); "
    )
    hold += f"Path({str(node.made)!r}).touch()"
    other = subprocess.Popen([sys.executable, "-c", hold], env=runs.surroundings())
    wait_until((tmp_path / "held").exists, other)
    assert execute_stages([node, child], tmp_path, [""]) == {}
    assert (
        other.wait() == 0 and "waiting for another process that runs it" in capsys.readouterr().out
    )
    assert calls(tmp_path) == ["begin export/a", "end export/a"]


def write_smallest(directory: Path) -> Path:
    """Write a study on local data with each kind of stage, of two steps each.

    They are a parent, a branch, an export, two fine-tuning runs and a contrastive training.
    """
    runs.write_text(directory / "text.jsonl", documents=60)
    for split, count in (("train", 64), ("validation", 6), ("test", 6)):
        rows = [
            {"id": str(n), "text": f"stan plerk {'mon' if n % 2 else 'thath'}", "label": n % 2}
            for n in range(count)
        ]
        small_data.write_file(directory / "sc" / f"{split}.jsonl", rows)
        rated = [row | {"label": n / 2} for n, row in enumerate(rows)]
        small_data.write_file(directory / "rated" / f"{split}.jsonl", rated)
    texts = [(f"{n}", f"plerk {n}") for n in range(6)]
    judged = [(name, name, 1) for name, _ in texts]
    small_data.write_files(
        directory / "ir",
        small_data.beir_files([(name, "", text) for name, text in texts], texts, test=judged),
    )
    small_data.write_file(
        directory / "pairs.jsonl",
        [{"query": f"mon {n}", "document": f"plerk {n}"} for n in range(8)],
    )
    short = {
        "lr_warmup_iters": 1,
        "lr_wsd_decay_iters": 2,
        "micro_batch_size": 8,
        "eval_interval": 0,
        "log_interval": 1,
    }
    steps = {"max_steps": 2, "max_length": 32}
    return manifests.write(
        directory,
        pretrain=manifests.BASE["pretrain"] | short,
        corpus={"text": ["text.jsonl"], "vocab_size": 300},
        models=[
            {"size": "toy", "steps": 6, "clm_share": 1},
            TOY | {"steps": 6, "clm_share": 0.5, "evaluate": False},
        ],
        finetune={
            "datasets": ["toy_sc=sc", "./rated"],
            "learning_rates": [1e-3],
            "seeds": 1,
            **steps,
        },
        embed={
            "datasets": ["toy_ir=ir"],
            "train": "pairs.jsonl",
            "seeds": 1,
            "batch_size": 4,
            "warmup": 0,
            **steps,
        },
    )


@pytest.mark.slow
def test_a_real_study_killed_on_the_way_is_finished_and_reported(tmp_path, capfd, refusal):
    manifest = write_smallest(tmp_path)
    study = tmp_path / "study"
    flags = [str(manifest), "--output", str(study)]
    command = [sys.executable, "-m", "megaenc", "study", "run", *flags, "--jobs", "2"]
    killed = subprocess.Popen(command, env=runs.surroundings(), stdout=subprocess.PIPE, text=True)
    wait_until((study / "runs" / "toy-clm-6" / "metrics.jsonl").exists, killed, 300)
    assert "another `megaenc study run` uses this directory" in refusal(main, flags)
    killed.kill()
    killed.communicate()
    main([*flags, "--jobs", "2"])
    out = capfd.readouterr().out
    assert "7 stages, " in out and ", 2 in parallel" in out and "7 of 7 stages are done" in out
    assert [row["step"] for row in runs.metrics(study / "runs" / "toy-clm-6")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in runs.metrics(study / "runs" / "toy-clm-3-mlm40-6")] == [4, 5, 6]
    details = json.loads((study / "embed" / "toy-clm-6" / "seed-0" / "training.json").read_text())
    assert (details["config"]["seed"], details["config"]["batch_size"], details["steps"]) == (
        0,
        4,
        2,
    )
    written = {path: path.stat().st_mtime_ns for path in study.rglob("*.json*")}
    main(flags)
    assert "7 stages, 7 done, 0 to do" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in study.rglob("*.json*")} == written
    results = ["--results", str(study / "results"), "--runs", str(study / "runs")]
    report.main([str(manifest), *results, "--output", str(study / "report")])
    head, line, *_ = (study / "report" / "tables" / "zero-shot.csv").read_text().splitlines()
    assert head.endswith(
        "toy_ir as pretrained,toy_ir after contrastive training"
    ) and line.startswith("toy-clm-6,")
    scores = (study / "report" / "tables" / "scores.csv").read_text()
    assert ",SC,toy_sc," in scores and ",regression,rated," in scores
