"""Comparison of runs: a line for a run's held-out losses, a panel an objective."""

import numpy as np
import pytest
from run_directories import write_rows, write_run
from validation_rows import rewrite

from megaenc.viz import plot, run_metrics
from megaenc.viz.run_metrics import read_validations
from megaenc.viz.style import assign_styles


@pytest.fixture
def runs(tmp_path):
    """Write run `long` of 40 steps and run `short` of 20."""
    return [write_run(tmp_path / "long"), write_run(tmp_path / "short", train_iters=20)]


def curves(runs, against="step"):
    return {run.name: run_metrics.held_out_curves(read_validations(run), against) for run in runs}


def legend(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("against", "long", "short"),
    [
        ("step", [0, 10, 20, 30, 40], [0, 10, 20]),
        ("predicted_tokens", [0, 10_000, 13_000, 16_000, 19_000], [0, 6_500, 9_500]),
    ],
)
def test_a_panel_an_objective_and_a_line_a_run(runs, against, long, short):
    picture, shown = plot.draw_comparison(curves(runs, against), against)
    assert shown == "the held-out losses of 2 runs under clm, mlm(mask=0.3)"
    assert [panel.get_title(loc="left") for panel in picture.axes] == ["clm", "mlm(mask=0.3)"]
    for panel, slope in zip(picture.axes, (0.05, 0.09), strict=True):
        lines = panel.get_lines()
        assert [line.get_xdata().tolist() for line in lines] == [long, short]
        np.testing.assert_allclose(lines[0].get_ydata(), 9 - slope * np.arange(0, 41, 10))
        np.testing.assert_allclose(lines[1].get_ydata(), 9 - slope * np.arange(0, 21, 10))
        assert legend(panel) == [f"long  ({9 - 40 * slope:.3f})", f"short  ({9 - 20 * slope:.3f})"]
        assert panel.get_xlabel() == against.replace("_", " ")
        assert panel.get_xlim() == (0, long[-1])
    colours = {line.get_color() for panel in picture.axes for line in panel.get_lines()}
    assert len(colours) == 2  # a run keeps its colour


def test_an_objective_that_a_run_lacks_is_named(runs, refusal, tmp_path):
    rewrite(runs[1], lambda row: row["objectives"].update(mntp=row["objectives"].pop("clm")))
    picture, shown = plot.draw_comparison(curves(runs), "step")
    assert len(picture.axes) == 1
    assert shown.endswith(
        "under mlm(mask=0.3); left out, as some runs lack it: clm (short), mntp (long)"
    )
    rewrite(runs[1], lambda row: row["objectives"].pop("mlm(mask=0.3)"))
    line = refusal(plot.main, [*runs, "--output", tmp_path / "runs.png"])
    assert (
        "no objective that all runs were validated under: long has clm, mlm(mask=0.3); short "
        "has mntp"
    ) in line
    (runs[1] / "validation.jsonl").unlink()
    line = refusal(plot.main, [*runs, "--output", tmp_path / "runs.png"])
    assert f"{runs[1]}: contains no validation" in line
    assert not (tmp_path / "runs.png").exists()


def test_a_validation_without_a_target_has_no_point(runs):
    rows = read_validations(runs[0])
    rows[1]["objectives"]["clm"]["loss"] = None
    assert run_metrics.held_out_curves(rows)["clm"][0] == [0, 20, 30, 40]


def test_five_objectives_are_two_rows_without_an_empty_frame(runs):
    each = run_metrics.held_out_curves(read_validations(runs[0]))
    many = {f"mlm(mask=0.{digit})": each["clm"] for digit in range(1, 6)}
    picture, _ = plot.draw_comparison({"a": many, "b": many}, "step")
    assert [panel.get_visible() for panel in picture.axes] == [True] * 5 + [False]


def test_names_are_those_of_the_directories_and_as_much_before_as_it_takes(tmp_path, refusal):
    assert list(plot.name_runs(["runs/a", "runs/b/"])) == ["a", "b"]
    assert list(plot.name_runs(["x/run", "y/run", "y/other"])) == ["x/run", "y/run", "y/other"]
    assert "b/../a: given twice" in refusal(
        plot.main, ["a", "b/../a", "--output", tmp_path / "runs.png"]
    )


def test_the_command_writes_names_with_dollar_signs_as_they_are(tmp_path, capsys):
    """They are not formulas; `$_$` would not even be a valid one."""
    runs = [write_run(tmp_path / name) for name in ("$a_1$", "$_$")]
    plot.main([*map(str, runs), "--output", str(tmp_path / "runs.svg"), "--against", "flops"])
    assert (
        capsys.readouterr().out
        == f"{tmp_path / 'runs.svg'}: the held-out losses of 2 runs under clm, mlm(mask=0.3)\n"
    )
    picture, _ = plot.draw_comparison(curves(runs), "step")
    texts = picture.axes[0].get_legend().get_texts()
    assert [text.get_text().split()[0] for text in texts] == ["$a_1$", "$_$"]
    assert not any(text.get_parse_math() for text in texts)


def test_runs_on_different_held_out_text_are_told_apart(runs, tmp_path):
    """Each run has two texts; the line appears if one differs from the other run's."""

    def said(rows):
        write_rows(runs[1] / "validation.jsonl", rows)
        return "NOT on the same held-out text" in plot.write_plot(runs, tmp_path / "x.png")

    for run in runs:
        rewrite(run, lambda row: row.update(held_out="second" if row["step"] else "first"))
    whole = read_validations(runs[1])
    assert not said(whole)
    assert not said(whole[:1])  # still in its first phase
    assert said([{**row, "held_out": "first"} for row in whole])


def test_pseudo_perplexities_of_any_shift_share_a_panel(runs):
    def add(run, name, loss):
        rewrite(
            run,
            lambda row: row["objectives"].update({name: row["objectives"]["clm"] | {"loss": loss}}),
        )

    add(runs[0], "web/pseudo_perplexity(passes=8)", 4.0)
    add(runs[1], "web/pseudo_perplexity(passes=8)", 7.0)
    add(runs[1], "web/pseudo_perplexity(passes=8,shift=1)", 3.0)
    picture, shown = plot.draw_comparison(curves(runs), "step")
    assert shown.endswith("clm, mlm(mask=0.3), web/pseudo_perplexity(passes=8)")
    panel = picture.axes[2]
    assert [line.get_ydata()[-1] for line in panel.get_lines()] == [4.0, 3.0]
    assert legend(panel) == ["long  (4.000, 54.6)", "short  (3.000, 20.1, shift 1)"]
    assert panel.get_legend().get_title().get_text() == "run (last loss, perplexity)"
    add(runs[1], "web/pseudo_perplexity(passes=8,shift=1)", 9.0)
    picture, _ = plot.draw_comparison(curves(runs), "step")
    assert legend(picture.axes[2])[1] == "short  (7.000, 1,096.6)"
    add(runs[0], "mlm/pseudo_perplexity(passes=2,shift=1)", 5.0)
    add(runs[0], "mlm/pseudo_perplexity(passes=2)", 4.0)
    add(runs[1], "mlm/pseudo_perplexity(passes=2)", 4.0)
    picture, _ = plot.draw_comparison(curves(runs), "step")
    assert legend(picture.axes[3]) == ["long  (4.000, 54.6)", "short  (4.000, 54.6)"]


def test_42_lines_look_different():
    names = [str(number) for number in range(43)]
    assert len(set(assign_styles(names).values())) == 42
