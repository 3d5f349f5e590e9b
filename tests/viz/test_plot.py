"""The picture of a run shows what the run's rows say."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from run_folders import write_rows, write_run

from megaenc.viz import plot
from megaenc.viz.run_metrics import read_steps, read_validations


@pytest.fixture
def picture(tmp_path):
    run = write_run(tmp_path / "run")
    return plot.draw_run(read_steps(run), read_validations(run), "a run")


def test_phases_are_shaded_and_labelled_where_they_are(picture):
    loss, rate = picture.axes
    for panel in (loss, rate):
        spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in panel.patches]
        assert spans == [(0, 10), (10, 40)]
    assert {text.get_text(): text.get_position()[0] for text in loss.texts} == {"clm": 5, "mlm(mask=0.3)": 25}
    assert loss.texts[0].get_color() == loss.get_lines()[0].get_color() != loss.texts[1].get_color()
    assert to_rgb(loss.patches[0].get_facecolor()) == to_rgb(loss.texts[0].get_color())


def test_lines_are_the_losses_and_validations(picture):
    raw_clm, smooth_clm, raw_mlm, smooth_mlm = picture.axes[0].get_lines()[:4]
    np.testing.assert_allclose(raw_clm.get_ydata(), 9 - 0.1 * np.arange(1, 11))
    np.testing.assert_array_equal(raw_mlm.get_xdata(), np.arange(11, 41))
    for smooth, raw in ((smooth_clm, raw_clm), (smooth_mlm, raw_mlm)):
        np.testing.assert_allclose(smooth.get_ydata()[:-1], raw.get_ydata()[:-1])  # a straight line stays where it is
        np.testing.assert_allclose(smooth.get_ydata()[-1], np.mean(raw.get_ydata()[-2:]))  # the last step looks back alone
    held_out = {line.get_label(): line for line in picture.axes[0].get_lines()}["held out, mlm(mask=0.3)"]
    np.testing.assert_array_equal(held_out.get_xdata(), [0, 10, 20, 30, 40])
    np.testing.assert_allclose(held_out.get_ydata(), 9 - 0.09 * np.arange(0, 41, 10))
    np.testing.assert_allclose(picture.axes[1].get_lines()[0].get_ydata(), 5e-4)


@pytest.mark.parametrize(
    ("against", "label", "ends"),
    [
        ("tokens", "tokens", (10_000, 40_000)),
        ("predicted_tokens", "predicted tokens", (10_000, 19_000)),
        ("flops", "FLOPs of the matrix products, forward and backward", (10**16, 4 * 10**16)),
    ],
)
def test_a_run_against_what_it_cost(tmp_path, against, label, ends):
    run = write_run(tmp_path / "run")
    loss, rate = plot.draw_run(read_steps(run), read_validations(run), "a run", against).axes
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in loss.patches]
    assert spans == [(0, ends[0]), ends]
    raw_mlm = loss.get_lines()[2]
    np.testing.assert_allclose(raw_mlm.get_xdata(), np.linspace(ends[0], ends[1], 31)[1:])
    np.testing.assert_allclose(raw_mlm.get_ydata(), 9 - 0.1 * np.arange(11, 41))
    held_out = {line.get_label(): line for line in loss.get_lines()}["held out, clm"]
    np.testing.assert_allclose(held_out.get_xdata(), [0, ends[0], *np.linspace(ends[0], ends[1], 4)[1:]])
    assert rate.get_xlabel() == label and rate.get_xlim() == (0, ends[1])
    np.testing.assert_allclose(rate.get_lines()[0].get_xdata()[[0, -1]], [ends[0] / 10, ends[1]])


def test_losses_by_position_have_a_panel_of_their_own(tmp_path):
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    rows[-1]["objectives"]["clm"]["by_position"] = {"0-127": 5.0, "128-255": 4.5, "256-511": None}
    write_rows(run / "validation.jsonl", rows)
    loss, rate, positions = plot.draw_run(read_steps(run), read_validations(run), "a run").axes
    assert loss.get_xlim() == rate.get_xlim() == (0, 40)
    [line] = positions.get_lines()
    np.testing.assert_array_equal(line.get_ydata(), [5.0, 4.5, np.nan])
    assert [label.get_text() for label in positions.get_xticklabels()] == ["0-127", "128-255", "256-511"]
    assert line.get_color() == loss.get_lines()[0].get_color() and "step 40" in positions.get_xlabel()


def test_a_blend_has_a_panel_of_the_changes_by_corpus(tmp_path):
    """Under the objective that is validated last, since the first validation."""
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    for row in rows:
        row["objectives"]["mlm(mask=0.3)"]["by_corpus"] = {"data/own_text_document": 6 - row["step"] / 40, "data/b": 5.0}
    write_rows(run / "validation.jsonl", rows)
    _, _, corpora = plot.draw_run(read_steps(run), read_validations(run), "a run").axes
    lines = {line.get_label(): line for line in corpora.get_lines()}
    np.testing.assert_allclose(lines["own_text"].get_ydata()[[0, -1]], [0, -1])
    np.testing.assert_allclose(lines["b"].get_ydata(), 0)
    assert corpora.get_legend().get_title().get_text() == "held out, mlm(mask=0.3)"


def test_a_corpus_of_a_later_phase_changes_from_its_first_validation_on(tmp_path):
    run = write_run(tmp_path / "run")
    rows = read_validations(run)
    for row in rows:
        new = {"data/new": 8 - row["step"] / 40} if row["step"] >= 20 else {}
        row["objectives"]["clm"]["by_corpus"] = {"data/own": 6.0, "data/other": 6.0, **new}
    write_rows(run / "validation.jsonl", rows)
    _, _, corpora = plot.draw_run(read_steps(run), read_validations(run), "a run").axes
    lines = {line.get_label(): line for line in corpora.get_lines()}
    np.testing.assert_allclose(lines["new"].get_ydata(), [np.nan, np.nan, 0, -0.25, -0.5])


def test_a_run_without_the_field_is_one_line(tmp_path, refusal):
    run = write_run(tmp_path / "run")
    rows = [{name: value for name, value in row.items() if name != "flops"} for row in read_validations(run)]
    write_rows(run / "validation.jsonl", rows)
    line = refusal(plot.main, [run, "--against", "flops", "--output", tmp_path / "loss.png"])
    assert "validation.jsonl:1: no field `flops`" in line
    line = refusal(plot.main, [run, "--against", "weeks", "--output", tmp_path / "loss.png"])
    assert "--against" in line and "predicted_tokens" in line


def test_no_run_is_one_line(refusal):
    assert "RUN: missing" in refusal(plot.main, [])


def test_smoothing_damps_noise_and_does_not_look_across_phases():
    steps = np.arange(1, 201)
    noisy = plot.PlottedPhase("mlm", 0, 200, steps, 5 + 0.5 * (-1.0) ** steps)
    assert np.abs(noisy.smoothed[5:] - 5).max() < 0.09
    rows = [
        {"step": step, "objective": "clm" if step <= 50 else "mlm", "phase": int(step > 50), "loss": 1.0 if step <= 50 else 3.0}
        for step in range(1, 101)
    ]
    assert [set(phase.smoothed) for phase in plot.split_phases(rows)] == [{1.0}, {3.0}]


def test_a_step_without_a_target_leaves_no_point():
    rows = [{"step": step, "objective": "mlm", "phase": 0, "loss": loss} for step, loss in enumerate([3.0, None, 2.0], start=1)]
    [phase] = plot.split_phases(rows)
    assert phase.x.tolist() == [1, 3] and (phase.start, phase.end) == (0, 3)


def rows_of(objectives, steps_a_phase):
    """A row a step; the phase changes every so many steps."""
    return [
        {"step": step, "objective": objective, "phase": (step - 1) // steps_a_phase, "loss": 2.0 + (objective == "mlm"),
         "learning_rate": 1e-3, "tokens": step}
        for step, objective in enumerate(objectives, 1)
    ]  # fmt: skip


def test_thousands_of_phases_are_one_stretch_with_a_curve_for_each_objective():
    rows = rows_of(["mntp"] * 1000 + ["clm", "mlm", "mlm", "mlm"] * 1000, 1)
    for row in rows[:1000]:
        row["phase"] = -1
    alone, clm, mlm = plot.split_phases(rows)
    assert (alone.objective, alone.start, alone.end, alone.share) == ("mntp", 0, 1000, 1)
    assert [(one.objective, one.start, one.end, one.share) for one in (clm, mlm)] == [
        ("clm", 1000, 5000, 0.25),
        ("mlm", 1000, 5000, 0.75),
    ]
    assert set(clm.smoothed) == {2.0} and set(mlm.smoothed) == {3.0}
    shades = plot.draw_run(rows, [], "many phases").axes[0].patches
    assert [(shade.get_x(), shade.get_y(), shade.get_height()) for shade in shades] == [
        (0, 0, 1), (1000, 0.75, 0.25), (1000, 0, 0.75)
    ]  # fmt: skip


def test_a_mixture_has_a_curve_for_each_objective():
    clm, mlm = plot.split_phases(rows_of(["clm", "mlm"] * 50, 100))
    assert clm.x.tolist() == list(range(1, 101, 2)) and mlm.x.tolist() == list(range(2, 101, 2))
    assert (clm.start, clm.end, clm.share) == (mlm.start, mlm.end, mlm.share) == (0, 100, 0.5)


def test_the_picture_of_a_branch_begins_where_it_left_its_parent():
    rows = [row | {"step": row["step"] + 60} for row in rows_of(["clm"] * 20 + ["mlm"] * 20, 20)]
    begun = {"step": 60}
    assert [(phase.start, phase.end) for phase in plot.split_phases(rows, start_progress=begun)] == [(60, 80), (80, 100)]
    assert plot.draw_run([row | {"tokens": row["step"]} for row in rows], [], "run", start_progress=begun).axes[0].get_xlim() == (
        60,
        100,
    )


def test_long_phases_beside_short_ones_stay_by_themselves():
    rows = rows_of(["clm"] * 50 + ["mlm"] * 50, 50) + [
        row | {"step": row["step"] + 100, "phase": row["phase"] + 2} for row in rows_of(["clm", "mlm"] * 50, 1)
    ]
    found = [(phase.objective, phase.start, phase.end) for phase in plot.split_phases(rows)]
    assert found == [("clm", 0, 50), ("mlm", 50, 100), ("clm", 100, 200), ("mlm", 100, 200)]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_the_command_writes_a_picture(tmp_path, capsys, suffix, magic):
    output = tmp_path / f"pictures/loss{suffix}"
    plot.main([str(write_run(tmp_path / "run")), "--output", str(output)])
    assert output.read_bytes().startswith(magic)
    assert [file.name for file in output.parent.iterdir()] == [output.name]
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and not captured.err


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    run = write_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "obj')
    assert read_steps(run)[-1]["step"] == 40


def test_a_run_without_validation_has_a_picture(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "validation.jsonl").unlink()
    plot.main([str(run), "--output", str(tmp_path / "loss.png")])
    assert (tmp_path / "loss.png").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "metrics.jsonl: no such file"),
        ("", "contains no step yet"),
        ("nonsense\n", "metrics.jsonl:1: not JSON"),
        ("[]\n", "metrics.jsonl:1: no field `step`"),
        ('{"step": 1, "loss": 1}\n', "metrics.jsonl:1: no field `objective`"),
    ],
)
def test_what_no_run_wrote_is_one_line(tmp_path, refusal, text, words):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert words in refusal(plot.main, [tmp_path, "--output", tmp_path / "loss.png"])
    assert not (tmp_path / "loss.png").exists()


def test_a_format_that_is_none_is_one_line(tmp_path, refusal):
    line = refusal(plot.main, [write_run(tmp_path / "run"), "--output", tmp_path / "loss.gif"])
    assert "expected .png, .pdf, .svg" in line


def test_a_label_that_does_not_fit_is_in_the_legend():
    rows = [
        {"step": step, "tokens": step, "objective": text, "phase": phase, "loss": 5.0, "learning_rate": 1e-3}
        for step, text, phase in [
            (step, "clm" if step <= 90 else "mlm(mask=0.4->0.15)", int(step > 90)) for step in range(1, 101)
        ]
    ]
    loss = plot.draw_run(rows, [], "run").axes[0]
    assert [text.get_text() for text in loss.texts] == ["clm"]
    assert "mlm(mask=0.4->0.15)" in [text.get_text() for text in loss.get_legend().get_texts()]


def test_a_phase_of_one_row_is_a_point():
    rows = [
        {"step": step, "tokens": step, "objective": text, "phase": phase, "loss": 5.0, "learning_rate": 1e-3}
        for step, text, phase in [(1, "clm", 0), (2, "mlm", 1), (3, "mlm", 1)]
    ]
    first = next(
        line for line in plot.draw_run(rows, [], "run").axes[0].lines if len(line.get_xdata()) == 1 and line.get_alpha() is None
    )
    assert first.get_marker() == "."
