"""Files of a run directory that no run wrote end every command in one line."""

import json
import os

import pytest
from run_directories import write_rows, write_run
from validation_rows import rewrite

from megaenc.study.results.pretrain_runs import read_runs
from megaenc.viz import plot, run_summary
from megaenc.viz.run_metrics import read_steps

METRICS = "metrics.jsonl"
VALIDATION = "validation.jsonl"
FACTS = "run.json"

DAMAGED = [
    # file, text and its replacement; an empty text is the whole first row or object
    (METRICS, "", "[]"),
    (METRICS, "", "[" * 100_000),
    (METRICS, "", '{"step": ' + "1" * 5000 + "}"),
    (METRICS, '"step": 1,', '"step": 1, "x": "' + "x" * (1 << 20) + '",'),
    (METRICS, '"step": 1,', '"step": 7,'),
    (METRICS, '"step": 1,', '"step": 1.5,'),
    (METRICS, '"loss": 8.9', '"loss": "8"'),
    (METRICS, '"loss": 8.9', '"loss": 1e308'),
    (METRICS, '"tokens": 1000', '"tokens": -5'),
    (METRICS, '"learning_rate": 0.0005', '"learning_rate": Infinity'),
    (METRICS, '"step_seconds": 2.0', '"step_seconds": NaN'),
    (METRICS, '"objective": "clm"', '"objective": "a\\nb"'),
    (METRICS, '"phase": 0', '"phase": null'),
    (VALIDATION, "", "3"),
    (VALIDATION, '"loss": 9.0', '"loss": [8]'),
    (VALIDATION, '"accuracy": 0.0', '"accuracy": 2'),
    (VALIDATION, '"objectives": {', '"objectives": [], "x": {'),
    (VALIDATION, '"most_frequent": 0.08', '"most_frequent": 0.08, "by_position": {"0-127": "x"}'),
    (VALIDATION, '"clm": {', '"\\u001b[31m": {'),
    (VALIDATION, '"loss": 9.0, ', ""),
    (FACTS, "", "[]"),
    (FACTS, "", ""),
    (FACTS, '"at": 1', '"at": -1'),
    (FACTS, '"tokens": 5', '"tokens": NaN'),
    (FACTS, '"run": "a"', '"run": 5'),
    (FACTS, '"parameters": ', '"x": '),
    (FACTS, '"flops": 1.0', '"x": 1.0'),
]


@pytest.fixture
def run(tmp_path):
    """Return a run that is a branch."""
    directory = write_run(tmp_path / "runs" / "run")
    facts = json.loads((directory / FACTS).read_text())
    start = {
        "kind": "branch",
        "run": "a",
        "at": 1,
        "tokens": 5,
        "predicted_tokens": 5,
        "flops": 1.0,
    }
    (directory / FACTS).write_text(json.dumps(facts | {"start": start}))
    return directory


def show(run, capsys) -> str:
    """Return what the picture's and the summary's command print of a run."""
    plot.main([str(run), "--output", str(run.parent.parent / "loss.png")])
    run_summary.main([str(run)])
    return capsys.readouterr().out


@pytest.mark.parametrize(("file", "old", "new"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_one_line(file, old, new, run, refusal):
    path = run / file
    text = path.read_text()
    old = old or text.partition("\n")[0]
    assert old in text
    path.write_text(text.replace(old, new, 1))
    assert file in refusal(run_summary.main, [run])


@pytest.mark.parametrize("file", [METRICS, VALIDATION, FACTS])
def test_every_command_refuses_a_file_that_is_none(file, run, tmp_path, refusal):
    (run / file).unlink()
    os.mkfifo(run / file)
    assert file in refusal(run_summary.main, [run])
    assert file in refusal(plot.main, [run, "--output", tmp_path / "loss.png"])
    if file == VALIDATION:
        other = write_run(tmp_path / "other")
        assert file in refusal(plot.main, [run, other, "--output", tmp_path / "loss.png"])
    assert not (tmp_path / "loss.png").exists()


def test_a_line_that_is_being_written_is_left_out(run):
    with open(run / METRICS, "a") as file:
        file.write('{"step": 41, "obj')
    assert read_steps(run)[-1]["step"] == 40


@pytest.mark.parametrize("loss", [float("nan"), None])
def test_a_validation_that_diverged_has_no_point(loss, run, capsys):
    rewrite(run, lambda row: row["objectives"]["clm"].update(loss=loss))
    assert "clm: loss" not in show(run, capsys)


@pytest.mark.parametrize("value", [-1e99, 1e-320, 0])
def test_extreme_numbers_are_drawn(value, run, capsys):
    for file in (METRICS, VALIDATION):
        rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
        for row in rows:
            for fields in (row, *row.get("objectives", {}).values()):
                fields["loss"] = value
        write_rows(run / file, rows)
    assert "7.34M parameters" in show(run, capsys)


@pytest.mark.parametrize("name", ["[red]", "$x^{"])
def test_objectives_are_shown_as_they_are(name, run, capsys):
    for file in (METRICS, VALIDATION):
        path = run / file
        path.write_text(path.read_text().replace('"clm"', json.dumps(name)))
    assert f"{name}: loss" in show(run, capsys)


def test_runs_of_a_study_are_read_by_the_same_checks(run):
    assert read_runs(run.parent)["run"].start == "branch"
