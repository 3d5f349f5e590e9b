"""The summary of a run is its first and its last validation."""

import json
import math
import shutil

import pytest
import runs
from run_directories import write_rows, write_run
from validation_rows import rewrite

from megaenc.viz import plot, run_summary


def printed(run, capsys, change=lambda row: None) -> str:
    """Return what the command prints of a run with changed validations."""
    rewrite(run, change)
    run_summary.main([str(run)])
    return capsys.readouterr().out


def test_before_and_after_beside_the_most_frequent_token(run):
    """Time counts steps without a row."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[9::10]))
    found = run_summary.summarise(run)
    assert (found.first_validation, found.last_validation, found.step, found.train_iters) == (
        0,
        40,
        40,
        40,
    )
    assert (found.parameters, found.tokens, found.seconds) == (7_340_000, 40_000, 80.0)
    clm, mlm = found.gains
    assert (clm.objective, mlm.objective) == ("clm", "mlm(mask=0.3)")
    assert mlm.loss == pytest.approx((9, 5.4)) and mlm.accuracy == pytest.approx((0, 0.32))
    assert mlm.times_most_frequent == pytest.approx(6.4)


def test_a_branch_is_timed_without_its_parent(run, capsys):
    for name in ("metrics.jsonl", "validation.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["step"] >= 31))
    facts = json.loads((run / "run.json").read_text())
    start = {
        "kind": "branch",
        "at": 30,
        "tokens": 30_000,
        "predicted_tokens": 16_000,
        "flops": 3e16,
    }
    (run / "run.json").write_text(json.dumps(facts | {"start": start}))
    assert "40 steps, 40,000 tokens, those after step 30, in 0:20 (500 tokens/s)" in printed(
        run, capsys
    )


def test_the_command_prints_it(tmp_path, capsys):
    out = printed(write_run(tmp_path / "run", made=35), capsys)
    assert "mlm(mask=0.3): accuracy" in out and "24.0 %" in out and "4.8 x" in out
    assert "7.34M parameters, 35 of 40 steps, 35,000 tokens in 1:10 (500 tokens/s)" in out
    assert "different packs" not in out


def test_phases_with_other_packs_are_told(run, capsys):
    out = printed(
        run, capsys, lambda row: row.update(held_out="first" if row["step"] < 20 else "second")
    )
    assert "the two validations read different packs (text or length of their phases)" in out


def test_losses_of_a_blends_corpora_are_printed(run, capsys):
    """Only losses that both validations have are printed; NaN does not count."""

    def add(row):
        losses = {
            "data/own_text_document": row["step"] + 0.5,
            "data/general_text_document": math.nan,
        }
        row["objectives"]["clm"]["by_corpus"] = losses

    out = printed(run, capsys, add)
    assert ["of", "data/own_text_document", "0.500", "40.500"] in [
        line.split() for line in out.splitlines()
    ]
    assert "data/general_text_document" not in out


def test_pseudo_perplexity_is_also_printed_as_one_and_held_out_text_without_a_target_is_left_out(
    run, capsys
):
    def change(row):
        scores = row["objectives"].pop("mlm(mask=0.3)")
        row["objectives"]["web/pseudo_perplexity(passes=8)"] = scores | {
            "perplexity": math.exp(scores["loss"])
        }
        row["objectives"]["clm"] = {"loss": None, "accuracy": None, "most_frequent": None}

    out = printed(run, capsys, change)
    [line] = [line.split() for line in out.splitlines() if ": perplexity" in line]
    assert line == [
        "web/pseudo_perplexity(passes=8):",
        "perplexity",
        "8,103.1",
        "221.4",
    ]  # of losses 9 and 5.4
    assert "clm" not in out


@pytest.mark.parametrize("rows", [[], [{"step": 0, "tokens": 0, "objectives": {}}]])
def test_a_run_without_validation_is_one_line(run, refusal, rows):
    write_rows(run / "validation.jsonl", rows)
    assert "contains no validation" in refusal(run_summary.main, [run])


def test_long_names_leave_the_numbers_whole(run, capsys):
    name = "mlm(mask=0.15,random=0.1,keep=0.1,span=3)" * 3
    out = printed(
        run, capsys, lambda row: row.update(objectives={name: row["objectives"]["mlm(mask=0.3)"]})
    )
    for number in ("32.0 %", "9.000", "5.400", "6.4 x"):
        assert number in out
    assert "…" not in out


def test_a_run_can_be_drawn_and_summed_up(small_corpus, tmp_path):
    """The picture and the summary read what a real run writes."""
    run = tmp_path / "run"
    flags = [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        "--train-iters",
        "4",
        "--lr-warmup-iters",
        "1",
        "--lr-wsd-decay-iters",
        "1",
    ]
    runs.script(
        runs.PRETRAIN, [*flags, "--eval-interval", "2", "--eval-iters", "1", "--save", str(run)]
    )

    plot.write_plot([run], tmp_path / "loss.png", "flops")
    phases = plot.split_phases(plot.read_steps(run))
    assert [(phase.objective, phase.start, phase.end) for phase in phases] == [
        ("clm", 0, 2),
        ("mlm", 2, 4),
    ]

    summary = run_summary.summarise(run)
    assert (
        summary.step,
        summary.train_iters,
        summary.first_validation,
        summary.last_validation,
    ) == (4, 4, 0, 4)
    assert [one.objective for one in summary.gains] == ["clm", "mlm"]
    first, *_, last = runs.validations(run)
    mlm = summary.gains[1]
    assert mlm.loss == (first["objectives"]["mlm"]["loss"], last["objectives"]["mlm"]["loss"])
    plot.write_plot(
        [run, shutil.copytree(run, tmp_path / "again")], tmp_path / "runs.png", "predicted_tokens"
    )
    assert summary.seconds == pytest.approx(sum(row["step_seconds"] for row in runs.metrics(run)))
