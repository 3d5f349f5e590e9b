"""The picture of a run shows its rows."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from validation_rows import rewrite

from megaenc.viz import plot
from megaenc.viz.run_metrics import read_steps, read_validations


def draw(run, **options):
    """Return the panels of a run's picture."""
    return plot.draw_run(read_steps(run), read_validations(run), "a run", **options).axes


def labelled(panel):
    return {line.get_label(): line for line in panel.get_lines()}


def spans(panel):
    return [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in panel.patches]


def test_phases_are_shaded_and_labelled_where_they_are(run):
    loss, rate = draw(run)
    assert spans(loss) == spans(rate) == [(0, 10), (10, 40)]
    assert {text.get_text(): text.get_position()[0] for text in loss.texts} == {
        "clm": 5,
        "mlm(mask=0.3)": 25,
    }
    assert loss.texts[0].get_color() == loss.get_lines()[0].get_color() != loss.texts[1].get_color()
    assert to_rgb(loss.patches[0].get_facecolor()) == to_rgb(loss.texts[0].get_color())


def test_lines_are_the_losses_and_validations(run):
    loss, rate = draw(run)
    raw_clm, smooth_clm, raw_mlm, smooth_mlm = loss.get_lines()[:4]
    np.testing.assert_allclose(raw_clm.get_ydata(), 9 - 0.1 * np.arange(1, 11))
    np.testing.assert_array_equal(raw_mlm.get_xdata(), np.arange(11, 41))
    for smooth, raw in ((smooth_clm, raw_clm), (smooth_mlm, raw_mlm)):
        np.testing.assert_allclose(
            smooth.get_ydata()[:-1], raw.get_ydata()[:-1]
        )  # a straight line stays where it is
        np.testing.assert_allclose(
            smooth.get_ydata()[-1], np.mean(raw.get_ydata()[-2:])
        )  # the last step looks back alone
    held_out = labelled(loss)["held out, mlm(mask=0.3)"]
    np.testing.assert_array_equal(held_out.get_xdata(), [0, 10, 20, 30, 40])
    np.testing.assert_allclose(held_out.get_ydata(), 9 - 0.09 * np.arange(0, 41, 10))
    np.testing.assert_allclose(rate.get_lines()[0].get_ydata(), 5e-4)


@pytest.mark.parametrize(
    ("against", "label", "ends"),
    [
        ("predicted_tokens", "predicted tokens", (10_000, 19_000)),
        ("flops", "FLOPs of the matrix products, forward and backward", (10**16, 4 * 10**16)),
    ],
)
def test_a_run_against_what_it_cost(run, against, label, ends):
    loss, rate = draw(run, against=against)
    assert spans(loss) == [(0, ends[0]), ends]
    np.testing.assert_allclose(
        loss.get_lines()[2].get_xdata(), np.linspace(ends[0], ends[1], 31)[1:]
    )
    held_out = labelled(loss)["held out, clm"].get_xdata()
    np.testing.assert_allclose(held_out, [0, ends[0], *np.linspace(ends[0], ends[1], 4)[1:]])
    assert rate.get_xlabel() == label and rate.get_xlim() == (0, ends[1])


def test_losses_by_position_have_a_panel_of_their_own(run):
    losses = {"0-127": 5.0, "128-255": 4.5, "256-511": None}
    rewrite(run, lambda row: row["objectives"]["clm"].update(by_position=losses))
    loss, _, positions = draw(run)
    [line] = positions.get_lines()
    np.testing.assert_array_equal(line.get_ydata(), [5.0, 4.5, np.nan])
    assert [label.get_text() for label in positions.get_xticklabels()] == [
        "0-127",
        "128-255",
        "256-511",
    ]
    assert (
        line.get_color() == loss.get_lines()[0].get_color() and "step 40" in positions.get_xlabel()
    )


def test_a_blend_has_a_panel_of_the_changes_by_corpus(run):
    """It is below the objective that is validated last."""

    def add(row):
        losses = {"data/own_text_document": 6 - row["step"] / 40, "data/b": 5.0}
        if row["step"] >= 20:
            losses["data/new"] = 8 - row["step"] / 40
        row["objectives"]["mlm(mask=0.3)"]["by_corpus"] = losses

    rewrite(run, add)
    _, _, corpora = draw(run)
    lines = labelled(corpora)
    np.testing.assert_allclose(lines["own_text"].get_ydata()[[0, -1]], [0, -1])
    np.testing.assert_allclose(lines["b"].get_ydata(), 0)
    np.testing.assert_allclose(lines["new"].get_ydata(), [np.nan, np.nan, 0, -0.25, -0.5])
    assert corpora.get_legend().get_title().get_text() == "held out, mlm(mask=0.3)"


def test_a_run_without_the_field_is_one_line(run, tmp_path, refusal):
    rewrite(run, lambda row: row.pop("flops"))
    line = refusal(plot.main, [run, "--against", "flops", "--output", tmp_path / "loss.png"])
    assert "validation.jsonl:1: no field `flops`" in line


def rows_of(objectives, steps_a_phase):
    """Return a row a step, with a new phase every so many steps."""
    return [
        {
            "step": step,
            "objective": objective,
            "phase": (step - 1) // steps_a_phase,
            "loss": 2.0 + (objective == "mlm"),
            "learning_rate": 1e-3,
            "tokens": step,
        }
        for step, objective in enumerate(objectives, 1)
    ]


def test_smoothing_damps_noise():
    steps = np.arange(1, 201)
    noisy = plot.PlottedPhase("mlm", 0, 200, steps, 5 + 0.5 * (-1.0) ** steps)
    assert np.abs(noisy.smoothed[5:] - 5).max() < 0.09


def test_a_step_without_a_target_leaves_no_point():
    rows = rows_of(["mlm"] * 3, 3)
    rows[1]["loss"] = None
    [phase] = plot.split_phases(rows)
    assert phase.x.tolist() == [1, 3] and (phase.start, phase.end) == (0, 3)


def stretches(rows, **options):
    return [
        (phase.objective, phase.start, phase.end, phase.fraction)
        for phase in plot.split_phases(rows, **options)
    ]


def test_thousands_of_phases_are_one_stretch_with_a_curve_for_each_objective():
    rows = rows_of(["mntp"] * 1000 + ["clm", "mlm", "mlm", "mlm"] * 1000, 1)
    for row in rows[:1000]:
        row["phase"] = -1
    assert stretches(rows) == [
        ("mntp", 0, 1000, 1),
        ("clm", 1000, 5000, 0.25),
        ("mlm", 1000, 5000, 0.75),
    ]
    assert [set(phase.smoothed) for phase in plot.split_phases(rows)[1:]] == [{2.0}, {3.0}]
    shades = plot.draw_run(rows, [], "many phases").axes[0].patches
    assert [(shade.get_x(), shade.get_y(), shade.get_height()) for shade in shades] == [
        (0, 0, 1),
        (1000, 0.75, 0.25),
        (1000, 0, 0.75),
    ]


def test_a_mixture_and_long_phases_before_short_ones_have_a_curve_for_each_objective():
    assert stretches(rows_of(["clm", "mlm"] * 50, 100)) == [
        ("clm", 0, 100, 0.5),
        ("mlm", 0, 100, 0.5),
    ]
    rows = rows_of(["clm"] * 50 + ["mlm"] * 50 + ["clm", "mlm"] * 50, 1)
    for row in rows[:100]:
        row["phase"] = (row["step"] - 1) // 50
    assert stretches(rows) == [
        ("clm", 0, 50, 1),
        ("mlm", 50, 100, 1),
        ("clm", 100, 200, 0.5),
        ("mlm", 100, 200, 0.5),
    ]


def test_the_picture_of_a_branch_begins_where_it_left_its_parent():
    rows = rows_of(["clm"] * 20 + ["mlm"] * 20, 20)
    for row in rows:
        row["step"] += 60
    begun = {"step": 60}
    assert stretches(rows, start_progress=begun) == [("clm", 60, 80, 1), ("mlm", 80, 100, 1)]
    assert plot.draw_run(rows, [], "run", start_progress=begun).axes[0].get_xlim() == (60, 100)


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")]
)
def test_the_command_writes_a_picture(run, tmp_path, capsys, suffix, magic):
    (run / "validation.jsonl").unlink()
    output = tmp_path / f"pictures/loss{suffix}"
    plot.main([str(run), "--output", str(output)])
    assert output.read_bytes().startswith(magic)
    assert [file.name for file in output.parent.iterdir()] == [output.name]
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and not captured.err


@pytest.mark.parametrize(
    ("text", "words"), [(None, "metrics.jsonl: no such file"), ("", "contains no step yet")]
)
def test_what_no_run_wrote_is_one_line(tmp_path, refusal, text, words):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert words in refusal(plot.main, [tmp_path, "--output", tmp_path / "loss.png"])
    assert not (tmp_path / "loss.png").exists()


def test_a_label_that_does_not_fit_is_in_the_legend():
    rows = rows_of(["clm"] * 90 + ["mlm(mask=0.4->0.15)"] * 10, 90)
    loss = plot.draw_run(rows, [], "run").axes[0]
    assert [text.get_text() for text in loss.texts] == ["clm"]
    assert "mlm(mask=0.4->0.15)" in [text.get_text() for text in loss.get_legend().get_texts()]


def test_a_phase_of_one_row_is_a_point():
    lines = plot.draw_run(rows_of(["clm", "mlm"], 1), [], "run").axes[0].lines
    [first, *_] = [
        line for line in lines if len(line.get_xdata()) == 1 and line.get_alpha() is None
    ]
    assert first.get_marker() == "."
