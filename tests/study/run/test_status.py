"""The table says of each stage what its folder and its log say, and of a failure why."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import manifests
import pytest
import runs
import stage_artifacts
from fake_stages import SUCCEED, FakeStage

from megaenc.study.run import stage_log
from megaenc.study.run.executor import execute_stages
from megaenc.study.run.status import build_table, find_mismatches, format_headline, main


def test_a_table_of_every_state(tmp_path):
    done = FakeStage("pretrain/a", tmp_path, script="sleep 1.2; " + SUCCEED)
    nodes = [
        done,
        FakeStage("pretrain/b", tmp_path, script="echo loading; echo 'ValueError: too small'; exit 1"),
        FakeStage("export/a", tmp_path, ("pretrain/a",)),
        FakeStage("export/b", tmp_path, ("pretrain/b",)),
        FakeStage("finetune/a", tmp_path, ("export/a",)),
    ]
    execute_stages(nodes[:2], tmp_path, ["", ""])
    stage_log.log_start(stage_log.log_path(tmp_path, "export/a"), ["convert"])
    with stage_log.lock_stage(tmp_path, "export/a"):
        table = {row.stage: row for row in build_table(nodes, tmp_path)}
    assert {name: row.state for name, row in table.items()} == {
        "pretrain/a": "done",
        "pretrain/b": "failed",
        "export/a": "running",
        "export/b": "waiting",
        "finetune/a": "waiting",
    }
    log = tmp_path / "logs" / "pretrain" / "b.log"
    assert table["pretrain/b"].reason == f"exit code 1: ValueError: too small ({log})"
    assert table["export/b"].reason == "needs pretrain/b, which failed" and table["finetune/a"].reason == "needs export/a"
    assert table["pretrain/a"].seconds >= 1 and table["pretrain/a"].progress == "1 of 1 parts"
    assert (
        format_headline(list(table.values()), 75.0) == "5 stages: 1 done, 1 running, 2 waiting, 1 failed; 20 %, about 1:15 left"
    )


def test_to_look_at_a_lock_changes_nothing(tmp_path):
    lock = tmp_path / ".locks" / "pretrain" / "a"
    assert not stage_log.is_locked(tmp_path, "pretrain/a") and not lock.parent.exists()
    lock.parent.mkdir(parents=True)
    lock.touch()  # of a process that was killed
    lock.parent.chmod(0o500)
    assert not stage_log.is_locked(tmp_path, "pretrain/a") and lock.exists()
    with stage_log.lock_stage(tmp_path, "pretrain/a") as mine:
        assert mine and stage_log.is_locked(tmp_path, "pretrain/a")
    lock.parent.chmod(0o700)


def test_what_does_not_fit_has_failed_and_what_is_to_be_compared_waits(tmp_path):
    nodes = [
        FakeStage("pretrain/a", tmp_path),
        FakeStage("export/a", tmp_path, ("pretrain/a",)),
        FakeStage("pretrain/b", tmp_path, wrong="runs/b: made from another manifest"),
    ]
    for node in nodes[1:]:
        node.made.touch()
    table = {row.stage: (row.state, row.reason) for row in build_table(nodes, tmp_path, find_mismatches(nodes))}
    assert table["export/a"] == ("waiting", "needs pretrain/a")
    assert table["pretrain/b"] == ("failed", "runs/b: made from another manifest")


def test_what_was_killed_or_stopped_waits(tmp_path):
    node = FakeStage("pretrain/a", tmp_path)
    log = stage_log.log_path(tmp_path, node.id)
    stage_log.log_start(log, node.next_command())
    assert build_table([node], tmp_path)[0].state == "waiting"
    stage_log.log_start(log, node.next_command())
    stage_log.log_end(log, stage_log.STOPPED)
    assert build_table([node], tmp_path)[0].state == "waiting"


def test_the_line_that_says_why():
    ours = ["step 1", "error: --lr: found 0, expected a number above 0", "E1122 torch: exitcode: 1", "=====", "Root Cause"]
    assert stage_log.find_error_line(ours) == "error: --lr: found 0, expected a number above 0"
    trace = ["Traceback (most recent call last):", '  File "x.py", line 3', "    f()", "torch.OutOfMemoryError: no room", ""]
    assert stage_log.find_error_line([*trace, "bye"]) == "torch.OutOfMemoryError: no room"
    grid = [
        "without result: toy sst2 1e-03 sd0: killed by SIGKILL",
        "done in 0:01",
        "without result: 1 training; the same command",
    ]
    assert stage_log.find_error_line(grid) == grid[0]
    assert stage_log.find_error_line(["one", "two", ""]) == "two" and stage_log.find_error_line([]) == ""


def test_tries_of_a_log_cut_in_a_line(tmp_path):
    log = tmp_path / "x.log"
    stage_log.log_start(log, ["a"])
    with open(log, "a") as stream:
        stream.write("half a li")
    stage_log.log_start(log, ["a"])
    stage_log.log_end(log, "exit code 3")
    first, second = stage_log.read_attempts(log)
    assert (first.end_time, first.outcome, first.message) == (None, "", "half a li") and second.outcome == "exit code 3"


def test_to_a_pipe_it_is_written_once(tmp_path, capsys):
    main([str(manifests.write(tmp_path)), "--output", str(tmp_path / "study"), "--only", "toy-mlm40-400"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "4 stages: 4 waiting; 0 %"
    assert [line.split()[0] for line in lines] == [
        "corpus",
        "pretrain/toy-mlm40-400",
        "export/toy-mlm40-400",
        "finetune/toy-mlm40-400",
    ]
    assert lines[1].split()[2:] == ["0", "of", "400", "steps", "needs", "corpus"] and "0 of 12 results" in lines[3]
    assert not (tmp_path / "study").exists()


def test_on_a_terminal_it_is_live_until_all_is_done(tmp_path):
    """Two stages, of which the last is done while it is looked at."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pathlib import Path
from fake_stages import FakeStage
from megaenc.study.run import status
study = Path({str(tmp_path)!r})
nodes = [FakeStage("pretrain/a", study), FakeStage("export/a", study, ("pretrain/a",))]
nodes[0].made.touch()
status.time.sleep = lambda seconds: nodes[1].made.touch()
status._show_live(nodes, study)
"""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, env=runs.surroundings() | {"COLUMNS": "120", "TERM": "xterm"}
    )
    os.close(theirs)
    screen = b""
    try:
        while piece := os.read(ours, 65536):
            screen += piece
    except OSError:  # the terminal's end
        pass
    assert process.wait(60) == 0
    assert b"2 stages: 1 done, 1 waiting; 50 %" in screen and b"2 stages: 2 done; 100 %" in screen


DAMAGED = [
    # file of the study, its content, words of the row that shows it
    ("runs/base/run.json", "[]", "run.json: found list"),
    ("runs/base/run.json", "{", "run.json: not JSON"),
    ("runs/base/run.json", "", "run.json: not JSON"),
    ("runs/base/run.json", "[" * 100_000, "run.json: not JSON (nested too deeply)"),
    ("runs/base/run.json", "{}", "field `identity`"),
    ("runs/base/run.json", '{"identity": 3}', "field `identity`"),
    ("runs/base/run.json", '{"identity": {"seed": 1}, "start": []}', "field `start`"),
    ("runs/base/run.json", '{"identity": {"seed": 1}, "start": {"kind": "x"}}', "field `start`"),
    ("runs/base/run.json", '{"identity": {"seed": 1}, "start": {"at": "x"}}', "field `start`"),
    ("runs/base/run.json", '{"identity": {"seed": 1}, "start": {"run": 3}}', "field `start.run`"),
    ("runs/base/run.json", '{"identity": {"seed": 1}, "start": {"before": 3}}', "field `start`"),
    ("runs/base/run.json", '{"identity": {"seed": 1}, "start": {"unknown": 3}}', "field `start`"),
    ("runs/base/run.json", None, "run.json: not a regular file"),
    ("runs/base/metrics.jsonl", '{"step": "x"}\n', "done"),
    ("runs/base/metrics.jsonl", "[" * 5000 + "\n", "done"),
    ("runs/base/metrics.jsonl", None, "done"),
    ("corpus/asked.json", "[]", "asked.json: found list"),
    ("corpus/asked.json", '{"vocab_size": 1024}', "asked.json: field `text`"),
    ("corpus/asked.json", '{"text": 3}', "asked.json: field `text`"),
    ("corpus/asked.json", '{"text": [["a", "b"]]}', "asked.json: field `text`"),
    ("corpus/asked.json", None, "asked.json: not a regular file"),
    ("hf/base/conversion.json", "[]", "conversion.json: found list"),
    ("hf/base/conversion.json", '{"step": []}', "step is [] there"),
    ("hf/base/conversion.json", "\ud800", "conversion.json: not JSON"),
    ("logs/pretrain/base.log", None, "done"),
    ("logs/pretrain/base.log", "==> 0000-99-99T00:00:00Z $ x\n<== never failed\n", "done"),
    ("results/base/SC/demo_sc/lr1e-03_sd0/results.json", "[" * 5000 + "\n", "done"),
    ("results/base/SC/demo_sc/lr1e-03_sd0/results.json", '"protocol": [],\n"fingerprints": 3,\n', "done"),
]


@pytest.mark.parametrize(("file", "content", "words"), DAMAGED)
def test_damaged_files_are_told_in_the_row_of_their_stage(file, content, words, tmp_path, capsys):
    changes = {"models": stage_artifacts.TWO, "finetune": stage_artifacts.GRID}
    nodes = stage_artifacts.build_stages(tmp_path, **changes)
    stage_artifacts.make(*nodes.values())
    path = tmp_path / "study" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content, encoding="utf-8", errors="surrogatepass")
    main([str(tmp_path / "study.yaml"), "--output", str(tmp_path / "study")])
    headline, *table = capsys.readouterr().out.splitlines()
    if words == "done":
        assert " failed" not in headline
    else:
        assert [line for line in table if "failed" in line and words in line], table
