"""Status of each stage by its directory and log, with the reason of a failure."""

import os
from dataclasses import replace

import manifests
import pytest
import stage_artifacts
from fake_stages import SUCCEED, FakeStage

from megaenc.study.plan.dag import build_graph
from megaenc.study.run import stage_log, status
from megaenc.study.run.eta import EtaEstimator
from megaenc.study.run.executor import execute_stages
from megaenc.study.run.status import build_table, find_mismatches, format_headline, main


def test_a_table_of_every_state(tmp_path):
    states = {
        # stage: state and reason
        "pretrain/done": ("done", ""),
        "pretrain/failed": (
            "failed",
            f"exit code 1: ValueError: too small ({tmp_path / 'logs' / 'pretrain' / 'failed.log'})",
        ),
        "pretrain/stale": ("failed", "runs/stale: made from another manifest"),
        "pretrain/killed": ("waiting", ""),
        "pretrain/stopped": ("waiting", ""),
        "export/locked": ("running", ""),
        "export/needing": ("waiting", "needs pretrain/failed, which failed"),
        "export/compared": ("waiting", "needs pretrain/killed"),
        "finetune/last": ("waiting", "needs export/locked"),
    }
    needs = {
        "export/locked": ("pretrain/done",),
        "export/needing": ("pretrain/failed",),
        "export/compared": ("pretrain/killed",),
        "finetune/last": ("export/locked",),
    }
    stages = {id: FakeStage(id, tmp_path, needs.get(id, ())) for id in states}
    stages["pretrain/done"] = replace(stages["pretrain/done"], script="sleep 1.2; " + SUCCEED)
    stages["pretrain/failed"] = replace(
        stages["pretrain/failed"], script="echo loading; echo 'ValueError: too small'; exit 1"
    )
    stages["pretrain/stale"] = replace(
        stages["pretrain/stale"], wrong="runs/stale: made from another manifest"
    )
    execute_stages([stages["pretrain/done"], stages["pretrain/failed"]], tmp_path, ["", ""])
    for id in ("pretrain/killed", "pretrain/stopped", "export/locked"):
        stage_log.log_start(stage_log.log_path(tmp_path, id), ["command"])
    stage_log.log_end(stage_log.log_path(tmp_path, "pretrain/stopped"), stage_log.STOPPED)
    for id in ("pretrain/stale", "export/compared"):
        stages[id].made.touch()
    with stage_log.lock_stage(tmp_path, "export/locked"):
        rows = build_table(stages.values(), tmp_path, find_mismatches(stages.values()))
    assert {row.stage: (row.state, row.reason) for row in rows} == states
    assert rows[0].seconds >= 1 and rows[0].progress == "1 of 1 parts"
    assert (
        format_headline(rows, 75.0)
        == "9 stages: 1 done, 1 running, 5 waiting, 2 failed; 33 %, about 1:15 left"
    )


def test_to_look_at_a_lock_changes_nothing(tmp_path):
    lock = tmp_path / ".locks" / "pretrain" / "a"
    assert not stage_log.is_stage_locked(tmp_path, "pretrain/a") and not lock.parent.exists()
    lock.parent.mkdir(parents=True)
    lock.touch()  # of a process that was killed
    assert not stage_log.is_stage_locked(tmp_path, "pretrain/a") and lock.exists()
    with stage_log.lock_stage(tmp_path, "pretrain/a") as mine:
        assert mine and stage_log.is_stage_locked(tmp_path, "pretrain/a")


def test_the_line_that_says_why():
    ours = [
        "step 1",
        "error: --lr: found 0, expected a number above 0",
        "E1122 torch: exitcode: 1",
        "=====",
        "Root Cause",
    ]
    assert stage_log.find_error_line(ours) == "error: --lr: found 0, expected a number above 0"
    trace = [
        "Traceback (most recent call last):",
        '  File "x.py", line 3',
        "    f()",
        "torch.OutOfMemoryError: no room",
        "",
    ]
    assert stage_log.find_error_line([*trace, "bye"]) == "torch.OutOfMemoryError: no room"
    grid = [
        "without result: toy sst2 1e-03 sd0: killed by SIGKILL",
        "done in 0:01",
        "without result: 1 training; the same command",
    ]
    assert stage_log.find_error_line(grid) == grid[0]
    assert (
        stage_log.find_error_line(["one", "two", ""]) == "two"
        and stage_log.find_error_line([]) == ""
    )


def test_tries_of_a_log_cut_in_a_line(tmp_path):
    log = tmp_path / "x.log"
    stage_log.log_start(log, ["a"])
    with open(log, "a") as stream:
        stream.write("half a li")
    stage_log.log_start(log, ["a"])
    stage_log.log_end(log, "exit code 3")
    first, second = stage_log.read_attempts(log)
    assert (first.end_time, first.outcome, first.message) == (
        None,
        "",
        "half a li",
    ) and second.outcome == "exit code 3"


def test_to_a_pipe_it_is_written_once(tmp_path, capsys):
    main(
        [
            str(manifests.write(tmp_path)),
            "--output",
            str(tmp_path / "study"),
            "--only",
            "toy-mlm40-400",
        ]
    )
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "5 stages: 5 waiting; 0 %"
    kinds = [line.split()[0].partition("/")[0] for line in lines]
    assert kinds == ["corpus", "pretrain", "export", "finetune", "finetune"]
    assert (
        lines[1].split()[2:] == ["0", "of", "400", "steps", "needs", "corpus"]
        and "0 of 6 results" in lines[3]
    )
    assert not (tmp_path / "study").exists()


def test_on_a_terminal_it_is_shown_until_all_is_done(tmp_path, monkeypatch, capsys):
    """Two stages, of which the last is done while it is looked at."""
    nodes = [FakeStage("pretrain/a", tmp_path), FakeStage("export/a", tmp_path, ("pretrain/a",))]
    nodes[0].made.touch()
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        nodes[1].made.touch()

    monkeypatch.setattr(status, "select_stages", lambda *given: nodes)
    monkeypatch.setattr(status.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(status.time, "sleep", sleep)
    monkeypatch.setenv("COLUMNS", "120")
    main([str(manifests.write(tmp_path)), "--output", str(tmp_path)])
    assert "2 stages: 2 done; 100 %" in capsys.readouterr().out
    assert looks


RESULT = "results/base/SC/demo_sc/lr1e-03_sd0/results.json"
DAMAGED = [
    # file of the study, its content, words of the row that shows it
    ("runs/base/run.json", "[" * 100_000, "run.json: not JSON (nested too deeply)"),
    ("runs/base/run.json", '{"format": 1, "identity": 3}', "field `identity`"),
    (
        "runs/base/run.json",
        '{"format": 1, "identity": {"seed": 1}, "start": {"at": "x"}}',
        "start: field `at`",
    ),
    ("runs/base/run.json", None, "run.json: not a regular file"),
    ("runs/base/metrics.jsonl", "[" * 5000 + "\n", "done"),
    ("corpus/asked.json", '{"text": [["a", "b"]]}', "asked.json: field `text.0.1`"),
    ("hf/base/conversion.json", '{"step": []}', "step is [] there"),
    ("hf/base/conversion.json", "\ud800", "conversion.json: not JSON"),
    ("logs/pretrain/base.log", None, "done"),
    ("logs/pretrain/base.log", "==> 0000-99-99T00:00:00Z $ x\n<== never failed\n", "done"),
    (RESULT, '"protocol": [],\n"fingerprints": 3,\n', "done"),
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


def test_time_left_follows_what_was_measured(tmp_path):
    nodes = [
        FakeStage(f"pretrain/{number}", tmp_path, work=number, planned_seconds=1.0 * number)
        for number in (1, 2, 4)
    ]
    remaining = EtaEstimator(nodes, tmp_path)
    assert remaining.remaining_seconds(1) == 7 and remaining.remaining_seconds(7) == 4
    remaining.record_duration(nodes[0], 10.0)
    assert remaining.remaining_seconds(1) == 60 and remaining.remaining_seconds(2) == 40
    remaining.record_progress(nodes[2], 0.75)
    assert remaining.remaining_seconds(1) == 30
    remaining = EtaEstimator(nodes[:2], tmp_path)
    remaining.record_duration(nodes[0], 360.0, 0.01)  # a part of it
    assert remaining.remaining_seconds(1) == 72_000
    unknown = [*nodes, FakeStage("export/x", tmp_path, planned_seconds=None)]
    assert EtaEstimator(unknown, tmp_path).remaining_seconds(1) is None


def test_what_was_killed_on_the_way_says_nothing_of_the_whole(tmp_path):
    """Ten hours and a kill of unknown end: the last six minutes are no estimate."""
    nodes = [
        FakeStage("pretrain/a", tmp_path),
        FakeStage("pretrain/b", tmp_path, planned_seconds=36_000.0),
    ]
    log = stage_log.log_path(tmp_path, "pretrain/a")
    log.parent.mkdir(parents=True)
    begin = "==> 2026-01-01T10:00:00Z $ x\n"
    end = "<== 2026-01-01T10:06:00Z finished\n"
    log.write_text("==> 2026-01-01T00:00:00Z $ x\n" + begin + end)
    nodes[0].made.touch()
    assert EtaEstimator(nodes, tmp_path).remaining_seconds(1) == 36_000
    log.write_text("==> 2026-01-01T00:00:00Z $ x\n<== 2026-01-01T09:54:00Z stopped\n" + begin + end)
    assert EtaEstimator(nodes, tmp_path).remaining_seconds(1) == 36_000
    assert (
        EtaEstimator([nodes[0], replace(nodes[1], work=0.5)], tmp_path).remaining_seconds(1)
        == 18_000
    )


def test_the_plans_time_is_that_of_the_processes_that_train(tmp_path):
    hardware = {"devices": 4, "tokens_per_second": 1000}
    manifest = manifests.read(tmp_path, hardware=hardware)
    planned = [
        build_graph(manifest, processes=count).runs["toy-clm-400"].planned_seconds
        for count in (0, 4, 1)
    ]
    assert planned[0] == planned[1] == planned[2] / 4 > 0
