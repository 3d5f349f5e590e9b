"""The summary of a run is its first and its last validation."""

import json
import math

import pytest
from run_folders import write_rows, write_run

from megaenc.viz import run_summary
from megaenc.viz.run_metrics import read_validations


def test_before_and_after_beside_the_most_frequent_token(tmp_path):
    found = run_summary.summarise(write_run(tmp_path / "run"))
    assert (found.first_validation, found.last_validation, found.step, found.train_iters) == (0, 40, 40, 40)
    assert (found.parameters, found.tokens, found.seconds) == (7_340_000, 40_000, 80.0)
    clm, mlm = found.gains
    assert (clm.objective, mlm.objective) == ("clm", "mlm(mask=0.3)")
    assert mlm.loss == pytest.approx((9, 5.4)) and mlm.accuracy == pytest.approx((0, 0.32))
    assert mlm.times_most_frequent == pytest.approx(6.4)


def test_time_counts_steps_without_a_row(tmp_path):
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[9::10]))
    assert run_summary.summarise(run).seconds == 80.0


def test_a_branch_is_timed_without_its_parent(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    for name in ("metrics.jsonl", "validation.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["step"] >= 31))
    facts = json.loads((run / "run.json").read_text())
    start = {"kind": "branch", "at": 30, "tokens": 30_000, "predicted_tokens": 16_000, "flops": 3e16}
    (run / "run.json").write_text(json.dumps(facts | {"start": start}))
    run_summary.main([str(run)])
    assert "40 steps, 40,000 tokens, those after step 30, in 0:20 (500 tokens/s)" in capsys.readouterr().out


def test_the_command_prints_it(tmp_path, capsys):
    run_summary.main([str(write_run(tmp_path / "run", made=35))])
    captured = capsys.readouterr()
    assert "mlm(mask=0.3): accuracy" in captured.out and "24.0 %" in captured.out and "4.8 x" in captured.out
    assert "7.34M parameters, 35 of 40 steps, 35,000 tokens in 1:10 (500 tokens/s)" in captured.out
    assert not captured.err


def test_phases_with_other_packs_and_named_sets_are_told(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    line = "the two validations read different packs (text or length of their phases)"
    run_summary.main([str(run)])
    assert line not in capsys.readouterr().out
    rows = read_validations(run)
    for row in rows:
        row["held_out"] = "first" if row["step"] < 20 else "second"
        row["objectives"] = {"web/pseudo_perplexity(passes=2)": row["objectives"]["clm"]}
    write_rows(run / "validation.jsonl", rows)
    run_summary.main([str(run)])
    printed = capsys.readouterr().out
    assert line in printed
    assert "web/pseudo_perplexity(passes=2): perplexity" in printed


def test_losses_of_a_blends_corpora_are_printed(tmp_path, capsys):
    """Those that both validations have; a NaN is none."""
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    for row in rows:
        losses = {"data/own_text_document": row["step"] + 0.5, "data/general_text_document": math.nan}
        row["objectives"]["clm"]["by_corpus"] = losses
    write_rows(run / "validation.jsonl", rows)
    run_summary.main([str(run)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["of", "data/own_text_document", "0.500", "40.500"] in lines
    assert not any("data/general_text_document" in line for line in lines)


def test_pseudo_perplexity_is_also_printed_as_one(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    for row in rows:
        scores = row["objectives"].pop("mlm(mask=0.3)")
        row["objectives"]["pseudo_perplexity(passes=8)"] = scores | {"perplexity": math.exp(scores["loss"])}
    write_rows(run / "validation.jsonl", rows)
    run_summary.main([str(run)])
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if ": perplexity" in line]
    assert line == ["pseudo_perplexity(passes=8):", "perplexity", "8,103.1", "221.4"]  # of losses 9 and 5.4


def test_held_out_text_without_a_target_is_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    for row in rows:
        row["objectives"]["clm"] = {"loss": None, "accuracy": None, "most_frequent": None}
    write_rows(run / "validation.jsonl", rows)
    assert [one.objective for one in run_summary.summarise(run).gains] == ["mlm(mask=0.3)"]


@pytest.mark.parametrize("rows", [[], [{"step": 0, "tokens": 0, "objectives": {}}]])
def test_a_run_without_validation_is_one_line(tmp_path, refusal, rows):
    run = write_run(tmp_path / "run")
    write_rows(run / "validation.jsonl", rows)
    assert "contains no validation" in refusal(run_summary.main, [run])


def test_a_folder_without_facts_is_one_line(tmp_path, refusal):
    run = write_run(tmp_path / "run")
    (run / "run.json").write_text("{}")
    assert "run.json" in refusal(run_summary.main, [run])


def test_long_names_leave_the_numbers_whole(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    for row in rows:
        row["objectives"] = {"mlm(mask=0.15,random=0.1,keep=0.1,span=3)" * 3: row["objectives"]["mlm(mask=0.3)"]}
    write_rows(run / "validation.jsonl", rows)
    run_summary.main([str(run)])
    out = capsys.readouterr().out
    assert "32.0 %" in out and "9.000" in out and "5.400" in out and "6.4 x" in out and "…" not in out
