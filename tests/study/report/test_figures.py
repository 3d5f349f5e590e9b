"""The figures show the numbers of the tables, and say so where there are none."""

import dataclasses

import numpy as np
import pytest
from study_directories import DATASETS, RATES, settings

from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.report.figures import objectives
from megaenc.study.report.figures.base import (
    BACKGROUND_COLOUR,
    FigureSpec,
    embed_svg,
    figure_to_svg,
)
from megaenc.study.report.figures.registry import (
    build_figures,
    build_loss_figure,
    build_rate_figure,
    published_flops_by_model,
)
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.pretrain_runs import flops_by_model
from megaenc.study.results.published import published
from megaenc.viz.style import STYLES

MLM = parse_model_name("610m-mlm40-42k")
CLM = ModelKey("610M", 42_000)


def lines(picture: FigureSpec, panel: int = 0) -> dict:
    """The labelled lines of a panel by their names."""
    return {line.name: line for line in picture.panels[panel].lines if line.labelled}


def points(picture: FigureSpec, name: str, panel: int = 0) -> dict[float, float]:
    """Return the rounded means of a line by place on the axis."""
    return {round(point.x, 1): round(point.mean, 2) for point in lines(picture, panel)[name].points}


def made_of(*keys, family="SC", dataset="sst2", **more) -> Evidence:
    """Evidence of models that score the higher the more CLM they had."""
    scores = []
    for key in keys:
        scores.append(
            Score(f"{key}", key, family, dataset, 0.5 + key.clm_steps / 1e6, 0.01, **more)
        )
    return Evidence(scores)


def test_objectives_by_size_and_of_one_size_by_data_set(ours):
    picture = objectives.build_objectives_figure(published())
    assert [panel.title for panel in picture.panels][::3] == [
        "Sequence classification",
        "Retrieval",
    ]
    assert list(points(picture, "CLM").values()) == [82.80, 83.58, 82.68]
    assert list(points(picture, "MLM", 3).values()) == [75.78, 79.55, 79.95]
    assert picture.panels[0].ticks == {0: "210M", 1: "610M", 2: "1B"}
    picture = objectives.build_objectives_figure(ours)
    assert [panel.ticks for panel in picture.panels] == [{0: "demo_sc"}, {0: "demo_qa"}]
    mlm = ours.find(parse_model_name("mini-mlm40-300"), "demo_sc")
    [point] = lines(picture)["MLM"].points
    assert (point.mean, point.half_width) == pytest.approx((100 * mlm.mean, 100 * mlm.half_width))
    axis = picture.figure.axes[0]
    assert [line.get_ydata()[0] for line in axis.get_lines() if line.get_marker() == "s"] == [
        point.mean
    ]


def test_mask_ratios_with_and_without_clm(ours):
    picture = objectives.build_mask_ratio_figure(published())
    assert list(points(picture, "1B").values()) == [87.97, 87.00, 88.23, 88.21]
    assert picture.panels[0].ticks == {20: "20 %", 30: "30 %", 40: "40 %", 50: "50 %"}
    assert not objectives.build_two_stage_mask_ratio_figure(published()).panels
    picture = objectives.build_two_stage_mask_ratio_figure(ours)
    assert list(lines(picture)) == ["MLM only", "CLM 75, then MLM"]
    two_stage = ours.find(parse_model_name("mini-clm-75-mlm20-300"), "demo_sc")
    assert picture.panels[0].lines[1].points[0].mean == pytest.approx(100 * two_stage.mean)


def test_every_length_of_clm_first_has_the_next_colour():
    keys = [
        ModelKey("1B", clm_steps, 42_000 - clm_steps, mask_ratio=ratio)
        for clm_steps in (0, 2000, 10_000)
        for ratio in (0.2, 0.4)
    ]
    picture = objectives.build_two_stage_mask_ratio_figure(made_of(*keys))
    assert list(lines(picture)) == ["MLM only", "CLM 2k, then MLM", "CLM 10k, then MLM"]
    looks = [(line.colour, line.marker) for line in lines(picture).values()]
    assert looks == STYLES[:3]


def test_efficiency_by_step_and_by_operations(ours, runs):
    picture = objectives.build_step_efficiency_figure(published())
    assert points(picture, "CLM") == {
        1000: 68.32,
        2000: 73.61,
        5000: 78.56,
        10000: 80.58,
        20000: 82.7,
        40000: 83.48,
    }
    by_flops = objectives.build_flop_efficiency_figure(ours, flops_by_model(runs, settings()))
    assert [point.x for point in by_flops.panels[0].lines[0].points] == [50e15, 150e15]
    assert (
        "directory of the pretraining runs with --runs"
        in objectives.build_flop_efficiency_figure(ours, {}).caption
    )


def test_shares_of_each_budget_and_continued_pretraining():
    picture = objectives.build_clm_share_figure(published())
    assert list(lines(picture)) == ["12k steps", "22k steps", "42k steps"]
    shares = points(picture, "42k steps")
    assert list(shares.values()) == [87.0, 87.85, 87.58, 87.06, 83.58]
    np.testing.assert_allclose(list(shares), [0, 23.8, 50, 76.2, 100], atol=1.3)
    picture = objectives.build_continued_pretraining_figure(published())
    assert list(points(picture, "from CLM").values()) == [83.58, 85.39, 87.84, 88.40]
    assert list(points(picture, "from MLM").values()) == [87.00, 87.08, 87.61, 87.47]
    # It begins with the finished model
    assert list(picture.panels[0].ticks.values()) == [
        "0",
        "2k",
        "12k",
        "22k",
    ]


def test_rates_are_drawn_below_each_models_best(ours):
    picture = build_rate_figure(ours)
    assert len(picture.panels) == len(DATASETS)
    for line in picture.panels[0].lines:
        assert (
            max(point.mean for point in line.points) == 0
            and tuple(point.x for point in line.points) == RATES
        )
    strong = {name: line.points[1].mean for name, line in lines(picture).items()}
    assert strong["MLM"] < strong["CLM"] < 0  # as the directories were made
    assert not build_rate_figure(published()).panels


def test_losses_of_the_runs(runs):
    picture = build_loss_figure(runs)
    assert [panel.title for panel in picture.panels] == ["under clm", "under mlm(mask=0.3)"]
    names = [line.name for line in picture.panels[0].lines]
    assert list(dict.fromkeys(names)) == [
        "MLM",
        "CLM",
        "CLM, then MLM",
        "on a finished model",
    ] and len(names) == len(runs)
    [curve] = [
        line for line in picture.panels[0].lines if line.name == "CLM" and line.points[-1].x == 300
    ]
    rows = runs["mini-clm-300"].validations
    assert [(point.x, point.mean) for point in curve.points] == [
        (row["step"], row["objectives"]["clm"]["loss"]) for row in rows
    ]
    few = dict(list(runs.items())[:2])
    assert [line.name for line in build_loss_figure(few).panels[0].lines] == list(few)
    assert build_loss_figure({}).caption == "No runs were given; pass their directory with --runs."


def test_published_values_lie_behind_the_same_models_with_thin_bars_and_beside_others(ours, runs):
    same = dataclasses.replace(made_of(MLM, CLM, family="IR", dataset="average"), kind="t")
    first = build_figures(same, {}, {}, published())[0]
    light = [line.name for line in first.figure.panels[0].lines if line.light]
    assert light == ["MLM, published", "CLM, published"] and first.published is None
    widths = [float(bars.get_linewidth()[0]) for bars in first.figure.figure.axes[0].collections]
    assert len(widths) == 4 and sorted(widths) == [0.7, 0.7, 1.2, 1.2]
    caption = first.figure.caption
    assert (
        "95 % by Student's t" in caption
        and "published ones are 1.96 standard errors over 5" in caption
    )
    others = build_figures(ours, runs, flops_by_model(runs, settings()), published())
    assert [
        report_figure.figure.key for report_figure in others if not report_figure.figure.panels
    ] == []
    beside = [
        report_figure.figure.key for report_figure in others if report_figure.published is not None
    ]
    assert beside == [
        "objectives",
        "mask-ratios",
        "efficiency-steps",
        "efficiency-flops",
        "clm-shares",
        "continued-pretraining",
    ]
    for report_figure in others:
        if report_figure.published is not None:
            said = (
                "1.96 standard errors over 3 fine-tuning seeds, which hold the true mean 81 times "
                "in 100"
            )
            assert (
                said in report_figure.figure.caption
                and "88 times in 100" in report_figure.published.caption
            )


def test_all_that_tables_alone_allow():
    shown = build_figures(published(), {}, published_flops_by_model(published()))
    without = [figure.figure for figure in shown if not figure.figure.panels]
    assert [figure.key for figure in without] == [
        "mask-ratios-with-clm",
        "learning-rates",
        "losses",
    ]
    assert all(figure.caption.endswith(".") for figure in without)


def test_another_seed_of_the_pretraining_is_points_without_a_line():
    keys = [
        ModelKey("1B", 0, step, mask_ratio=0.4, decayed=False, seed=seed)
        for step in (10, 20)
        for seed in (1, 2)
    ]
    [first, second] = objectives.build_step_efficiency_figure(made_of(*keys)).panels[0].lines
    assert (first.joined, first.labelled, second.joined, second.labelled) == (
        True,
        True,
        False,
        False,
    )
    assert [point.x for point in second.points] == [10, 20]


def test_points_of_collapsed_models_are_hollow(ours):
    scores = [
        dataclasses.replace(score, collapsed_at_rate=score.model_key.clm_steps // 300)
        for score in ours.scores
    ]
    picture = objectives.build_objectives_figure(Evidence(scores))
    assert {name: line.points[0].collapsed for name, line in lines(picture).items()} == {
        "MLM": False,
        "CLM": True,
    }
    [inside] = [
        line for line in picture.figure.axes[0].get_lines() if line.get_color() == BACKGROUND_COLOUR
    ]
    assert (
        inside.get_ydata()[0] == picture.panels[0].lines[1].points[0].mean
        and "Hollow points" in picture.caption
    )


def test_names_with_dollar_signs_are_no_formulas():
    name = "us$^$x"
    keys = [ModelKey(size, *steps) for size in (name, "y") for steps in ((10,), (0, 10, 0, 0.4))]
    svg = objectives.build_objectives_figure(made_of(*keys, dataset=name)).svg
    assert svg.count(f">{name}</text>") == 1 and f">Sequence classification: {name}</text>" in svg


def test_other_schedules_stand_beside_plain_models_of_as_many_steps():
    plain = [MLM, CLM, parse_model_name("610m-mlm40-12k")]
    plain += [
        parse_model_name("610m-clm-dec42k-mlm40-64k"),
        parse_model_name("610m-mlm40-dec42k-mlm40-64k"),
    ]
    turns = ModelKey(
        "610M", 21_000, 21_000, mask_ratio=0.4, schedule="21x(clm:1000,mlm(mask=0.4):1000)"
    )
    detour = ModelKey("610M", 0, 42_000, 22_000, 0.4, schedule="clm:5000,mlm(mask=0.4):17000")
    evidence = made_of(*plain, turns, detour)
    picture = objectives.build_schedule_figure(evidence)
    found = {
        name: [round(point.x) for point in line.points] for name, line in lines(picture).items()
    }
    beside = {"MLM": [0], "CLM": [0], "MLM on CLM": [1], "MLM on MLM": [1]}
    assert found == {**beside, turns.schedule: [0], f"{detour.schedule} on MLM": [1]}
    looks = {name: (line.colour, line.marker) for name, line in lines(picture).items()}
    assert len(set(looks.values())) == 6
    assert picture.panels[0].ticks == {0: "42k", 1: "64k"}
    assert list(points(picture, turns.schedule).values()) == [52.1]
    assert objectives.build_schedule_figure(made_of(*plain)) is None
    seeds = [
        dataclasses.replace(score, model_key=dataclasses.replace(score.model_key, seed=2))
        for score in evidence.scores
    ]
    several = objectives.build_schedule_figure(Evidence([*evidence.scores, *seeds]))
    assert {name: (line.colour, line.marker) for name, line in lines(several).items()} == looks
    assert [report_figure.figure.key for report_figure in build_figures(evidence, {}, {})][-2:] == [
        "other-schedules",
        "losses",
    ]


def test_a_schedule_without_mlm_of_as_many_steps_is_drawn_next_to_every_budget():
    plain = [MLM, ModelKey("610M", 40_000), parse_model_name("610m-clm-10k-mlm40-40k")]
    key = ModelKey("610M", 0, 50_000, mask_ratio=0.5, schedule="diffusion")
    picture = objectives.build_schedule_figure(
        made_of(*plain, key, dataclasses.replace(MLM, size="1B"))
    )
    assert set(lines(picture)) == {"MLM", "CLM", "25 % CLM, then MLM", "diffusion"}
    assert picture.panels[0].ticks == {0: "40k", 1: "42k", 2: "50k"}


def test_svg_is_text_the_same_each_time_and_takes_the_pages_colours(ours):
    picture = objectives.build_objectives_figure(ours)
    again = dataclasses.replace(picture)
    assert (
        figure_to_svg(picture.figure, "a") == figure_to_svg(again.figure, "a")
        and "demo_sc" in picture.svg
    )
    drawn = embed_svg(picture.svg, "objectives", 'CLM "and" <MLM>')
    assert (
        'aria-label="CLM &quot;and&quot; &lt;MLM&gt;"' in drawn
        and "var(--ink)" in drawn
        and "#ffffff" not in drawn
    )
    assert 'id="objectives-figure_1"' in drawn and "width=" not in drawn[: drawn.index(">")]
