"""The figures show the numbers of the tables, and say so where there are none."""

import dataclasses

import numpy as np
import pytest
from manifests import STUDY
from study_folders import DATASETS, RATES, settings, write_results, write_runs

from megaenc.finetune.results.files import read_result_tree
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.report.figures import objectives
from megaenc.study.report.figures.base import BACKGROUND_COLOUR, FigureSpec, embed_svg, figure_to_svg
from megaenc.study.report.figures.registry import build_figures, build_loss_figure, build_rate_figure, published_flops_by_model
from megaenc.study.results.evidence import Evidence, Score, build_evidence
from megaenc.study.results.pretrain_runs import flops_by_model, read_runs
from megaenc.study.results.published import published


def points(picture: FigureSpec, family: int, name: str) -> dict[float, float]:
    """By place on the axis, means of the line of that name in a panel, rounded as they are printed."""
    [line] = [line for line in picture.panels[family].lines if line.name == name and line.labelled]
    return {round(point.x, 1): round(point.mean, 2) for point in line.points}


@pytest.fixture(scope="module")
def ours(tmp_path_factory) -> Evidence:
    root = write_results(tmp_path_factory.mktemp("results"), settings())
    return build_evidence(read_result_tree(root), settings().get)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return read_runs(write_runs(tmp_path_factory.mktemp("runs"), settings()))


def test_objectives_by_size():
    picture = objectives.build_objectives_figure(published())
    assert [panel.title for panel in picture.panels][::3] == ["Sequence classification", "Retrieval"]
    assert list(points(picture, 0, "CLM").values()) == [82.80, 83.58, 82.68]
    assert list(points(picture, 3, "MLM").values()) == [75.78, 79.55, 79.95]
    assert picture.panels[0].ticks == {0: "210M", 1: "610M", 2: "1B"}


def test_objectives_of_one_size_by_data_set(ours):
    picture = objectives.build_objectives_figure(ours)
    assert [panel.ticks for panel in picture.panels] == [{0: "demo_sc"}, {0: "demo_qa"}]
    mlm = ours.find(ModelKey("mini", 0, 300, mask_ratio=0.4), "demo_sc")
    [line] = [line for line in picture.panels[0].lines if line.name == "MLM"]
    assert (line.points[0].mean, line.points[0].half_width) == pytest.approx((100 * mlm.mean, 100 * mlm.half_width))


def test_mask_ratios():
    picture = objectives.build_mask_ratio_figure(published())
    assert list(points(picture, 0, "1B").values()) == [87.97, 87.00, 88.23, 88.21]
    assert picture.panels[0].ticks == {20: "20 %", 30: "30 %", 40: "40 %", 50: "50 %"}


def test_mask_ratios_with_and_without_clm(ours):
    assert not objectives.build_two_stage_mask_ratio_figure(published()).panels
    picture = objectives.build_two_stage_mask_ratio_figure(ours)
    assert [line.name for line in picture.panels[0].lines] == ["MLM only", "CLM 75, then MLM"]
    two_stage = ours.find(ModelKey("mini", 75, 225, mask_ratio=0.2), "demo_sc")
    assert picture.panels[0].lines[1].points[0].mean == pytest.approx(100 * two_stage.mean)


def test_the_papers_mask_ratios_stand_beside_those_after_clm():
    """Names of the published raw results, and a further share of CLM at the same budget in another colour."""
    ratios = (20, 30, 40, 50)
    names = [f"610m-{first}mlm{ratio}-42k" for first in ("", "clm-40k-") for ratio in ratios] + ["610m-clm-10k-mlm40-42k"]
    assert set(names) < set(read_manifest(STUDY / "paper.yaml").model_keys())

    def draw(*more):
        keys = {name: parse_model_name(name) for name in (*names, *more)}
        scores = [Score(name, key, "SC", "average", key.mask_ratio + key.clm_steps / 1e6, 0.01) for name, key in keys.items()]
        return objectives.build_two_stage_mask_ratio_figure(Evidence(scores))

    picture = draw()
    assert [line.name for line in picture.panels[0].lines] == ["MLM only", "CLM 40k, then MLM"]
    assert list(points(picture, 0, "MLM only").values()) == [20, 30, 40, 50]
    assert list(points(picture, 0, "CLM 40k, then MLM").values()) == [24, 34, 44, 54]
    lines = draw("610m-clm-10k-mlm20-42k").panels[0].lines
    assert {line.name for line in lines} == {"MLM only", "CLM 10k, then MLM", "CLM 40k, then MLM"}
    assert len({line.colour for line in lines}) == 3


def test_efficiency_by_step_and_by_operations(ours, runs):
    picture = objectives.build_step_efficiency_figure(published())
    assert points(picture, 0, "CLM") == {1000: 68.32, 2000: 73.61, 5000: 78.56, 10000: 80.58, 20000: 82.7, 40000: 83.48}
    by_flops = objectives.build_flop_efficiency_figure(ours, flops_by_model(runs, settings()))
    assert [point.x for point in by_flops.panels[0].lines[0].points] == [50e12, 150e12]
    assert "directory of the pretraining runs with --runs" in objectives.build_flop_efficiency_figure(ours, {}).caption


def test_shares_of_each_budget():
    picture = objectives.build_clm_share_figure(published())
    assert [line.name for line in picture.panels[0].lines] == ["12k steps", "22k steps", "42k steps"]
    line = picture.panels[0].lines[2]
    assert [round(point.mean, 2) for point in line.points] == [87.0, 87.85, 87.58, 87.06, 83.58]
    np.testing.assert_allclose([point.x for point in line.points], [0, 23.8, 50, 76.2, 100], atol=1.3)


def test_continued_pretraining_begins_with_the_finished_model():
    picture = objectives.build_continued_pretraining_figure(published())
    assert list(points(picture, 0, "from CLM").values()) == [83.58, 85.39, 87.84, 88.40]
    assert list(points(picture, 0, "from MLM").values()) == [87.00, 87.08, 87.61, 87.47]
    assert list(picture.panels[0].ticks.values()) == ["0", "2k", "12k", "22k"]


def test_rates_are_drawn_below_each_models_best(ours):
    picture = build_rate_figure(ours)
    assert len(picture.panels) == len(DATASETS)
    for line in picture.panels[0].lines:
        assert max(point.mean for point in line.points) == 0 and tuple(point.x for point in line.points) == RATES
    strong = {line.name: line.points[1].mean for line in picture.panels[0].lines if line.labelled}
    assert strong["MLM"] < strong["CLM"] < 0  # as the folders were made
    assert not build_rate_figure(published()).panels


def test_losses_of_the_runs(runs):
    picture = build_loss_figure(runs)
    assert [panel.title for panel in picture.panels] == ["under clm", "under mlm"]
    names = [line.name for line in picture.panels[0].lines]
    assert list(dict.fromkeys(names)) == ["MLM", "CLM", "CLM, then MLM", "on a finished model"] and len(names) == len(runs)
    [curve] = [line for line in picture.panels[0].lines if line.name == "CLM" and line.points[-1].x == 300]
    rows = runs["mini-clm-300"].validations
    assert [(point.x, point.mean) for point in curve.points] == [(row["step"], row["objectives"]["clm"]["loss"]) for row in rows]
    few = build_loss_figure({name: runs[name] for name in list(runs)[:2]})
    assert [line.name for line in few.panels[0].lines] == list(runs)[:2]
    assert build_loss_figure({}).caption == "No runs were given; pass their directory with --runs."


def test_published_values_lie_behind_the_same_models_and_beside_others(ours, runs):
    setting = ModelKey("610M", 0, 42_000, mask_ratio=0.4)
    same = Evidence([Score("m", one, "IR", "average", 0.7, 0.01) for one in (setting, ModelKey("610M", 42_000))])
    first = build_figures(same, {}, {}, published())[0]
    light = [line for line in first.figure.panels[0].lines if line.light]
    assert [line.name for line in light] == ["MLM, published", "CLM, published"] and first.published is None
    others = build_figures(ours, runs, flops_by_model(runs, settings()), published())
    assert [one.figure.key for one in others if not one.figure.panels] == []
    beside = [one.figure.key for one in others if one.published is not None]
    assert beside == ["objectives", "mask-ratios", "efficiency-steps", "efficiency-flops", "clm-shares", "continued-pretraining"]


def test_all_that_tables_alone_allow():
    shown = build_figures(published(), {}, published_flops_by_model(published()))
    assert [one.figure.key for one in shown if not one.figure.panels] == [
        "mask-ratios-with-clm",
        "learning-rates",
        "losses",
    ]
    assert all(one.figure.caption.endswith(".") for one in shown if not one.figure.panels)


def test_another_seed_of_the_pretraining_is_points_without_a_line():
    scores = [
        Score(
            f"{at}{seed}",
            ModelKey("1B", 0, at, mask_ratio=0.4, decayed=False, seed=seed),
            "SC",
            "sst2",
            at / 100 + seed / 50,
            0.01,
        )
        for at in (10, 20)
        for seed in (1, 2)
    ]
    [first, second] = objectives.build_step_efficiency_figure(Evidence(scores)).panels[0].lines
    assert (first.joined, first.labelled, second.joined, second.labelled) == (True, True, False, False)
    assert [point.mean for point in second.points] == pytest.approx([14, 24])


def test_published_values_have_bars_too_thin_ones():
    setting = ModelKey("610M", 0, 42_000, mask_ratio=0.4)
    same = Evidence([Score("m", one, "IR", "average", 0.7, 0.01) for one in (setting, ModelKey("610M", 42_000))], kind="t")
    picture = objectives.build_objectives_figure(same, published())
    widths = [float(bars.get_linewidth()[0]) for bars in picture.figure.axes[0].collections]
    assert len(widths) == 4 and sorted(widths) == [0.7, 0.7, 1.2, 1.2]
    assert "95 % by Student's t" in picture.caption and "published ones are 1.96 standard errors over 5" in picture.caption


def test_captions_say_what_a_bar_is_worth(ours):
    for make in (
        objectives.build_objectives_figure,
        objectives.build_mask_ratio_figure,
        objectives.build_two_stage_mask_ratio_figure,
        objectives.build_step_efficiency_figure,
        objectives.build_clm_share_figure,
        objectives.build_continued_pretraining_figure,
    ):
        assert "1.96 standard errors over 3 fine-tuning seeds, which hold the true mean 81 times in 100" in make(ours).caption
    assert "88 times in 100" in objectives.build_clm_share_figure(published()).caption


def test_points_of_collapsed_models_are_hollow(ours):
    picture = objectives.build_objectives_figure(ours)
    assert not any(point.collapsed for panel in picture.panels for line in panel.lines for point in line.points)
    scores = [dataclasses.replace(one, collapsed_at_rate=one.model_key.clm_steps // 300) for one in ours.scores]
    picture = objectives.build_objectives_figure(Evidence(scores))
    assert {line.name: line.points[0].collapsed for line in picture.panels[0].lines} == {"MLM": False, "CLM": True}
    [inside] = [line for line in picture.figure.axes[0].get_lines() if line.get_color() == BACKGROUND_COLOUR]
    assert inside.get_ydata()[0] == picture.panels[0].lines[1].points[0].mean and "Hollow points" in picture.caption


@pytest.mark.parametrize("name", ["cost_$a$b", "us$^$x"])
def test_names_with_dollar_signs_are_no_formulas(name):
    models = (ModelKey(name, 0, 10, mask_ratio=0.4), ModelKey(name, 10), ModelKey("y", 0, 10, mask_ratio=0.4), ModelKey("y", 10))
    ours = Evidence([Score(f"m{one}", one, "SC", name, 0.5, 0.01) for one in models])
    svg = objectives.build_objectives_figure(ours).svg
    assert svg.count(f">{name}</text>") == 1 and f">Sequence classification: {name}</text>" in svg
    ways = [ModelKey("x", mask_ratio=0.4, mlm_steps=at, decayed=False) for at in (10, 20)]
    ways += [ModelKey(name, mask_ratio=0.4, mlm_steps=at, decayed=False) for at in (10, 20)]
    found = objectives.build_step_efficiency_figure(Evidence([Score(f"{one}", one, "SC", "sst2", 0.5, 0.01) for one in ways]))
    assert f">MLM, {name}</text>" in found.svg  # in the legend


def test_other_schedules_stand_beside_plain_models_of_as_many_steps():
    plain = [ModelKey("610M", 0, 42_000, mask_ratio=0.4), ModelKey("610M", 42_000), ModelKey("610M", 0, 42_000, mask_ratio=0.2)]
    plain += [
        ModelKey("610M", 42_000, 0, 22_000, 0.4),
        ModelKey("610M", 0, 42_000, 22_000, 0.4),
        ModelKey("610M", 0, 12_000, mask_ratio=0.4),
    ]
    turns = ModelKey("610M", 21_000, 21_000, mask_ratio=0.4, schedule="21x(clm:1000,mlm(mask=0.4):1000)")
    detour = ModelKey("610M", 0, 42_000, 22_000, 0.4, schedule="clm:5000,mlm(mask=0.4):17000")
    names = {turns: "610m-turns-42k", detour: "610m-mlm40-dec42k-clm-47k-mlm40-64k"}
    scores = [Score(names.get(one, f"{one}"), one, "SC", "sst2", 0.5 + one.clm_steps / 1e6, 0.01) for one in (*plain, *names)]
    picture = objectives.build_schedule_figure(Evidence(scores))
    found = {line.name: [round(point.x) for point in line.points] for line in picture.panels[0].lines}
    assert found == {
        "MLM": [0],
        "CLM": [0],
        "MLM on CLM": [1],
        "MLM on MLM": [1],
        turns.schedule: [0],
        f"{detour.schedule} on MLM": [1],
    }
    looks = [(line.colour, line.marker) for line in picture.panels[0].lines]
    assert len(set(looks)) == len(looks) == 6
    assert picture.panels[0].ticks == {0: "42k", 1: "64k"}
    assert points(picture, 0, turns.schedule).popitem()[1] == 52.1
    assert objectives.build_schedule_figure(Evidence(scores[:-2])) is None
    seeds = [dataclasses.replace(one, model_key=dataclasses.replace(one.model_key, seed=2)) for one in scores]
    several = objectives.build_schedule_figure(Evidence([*scores, *seeds]))
    assert {line.name: (line.colour, line.marker) for line in several.panels[0].lines} == dict(zip(found, looks, strict=True))


def test_a_schedule_without_mlm_of_as_many_steps_is_drawn_next_to_every_budget():
    plain = [
        ModelKey("610M", 0, 42_000, mask_ratio=0.4),
        ModelKey("610M", 40_000),
        ModelKey("610M", 10_000, 30_000, mask_ratio=0.4),
    ]
    other = ModelKey("610M", 0, 50_000, mask_ratio=0.5, schedule="diffusion")
    elsewhere = ModelKey("1B", 0, 42_000, mask_ratio=0.4)
    scores = [Score(f"{one}", one, "SC", "sst2", 0.5, 0.01) for one in (*plain, other, elsewhere)]
    picture = objectives.build_schedule_figure(Evidence(scores))
    assert {line.name for line in picture.panels[0].lines} == {"MLM", "CLM", "25 % CLM, then MLM", "diffusion"}
    assert picture.panels[0].ticks == {0: "40k", 1: "42k", 2: "50k"}


def test_the_schedule_figure_is_drawn_only_if_there_are_other_schedules():
    plain = ModelKey("610M", 0, 42_000, mask_ratio=0.4)
    scores = [Score(f"{one}", one, "SC", "sst2", 0.5, 0.01) for one in (plain, dataclasses.replace(plain, schedule="mntp"))]
    assert [one.figure.key for one in build_figures(Evidence(scores), {}, {})][-2:] == ["other-schedules", "losses"]


def test_figures_contain_the_numbers(ours):
    picture = objectives.build_objectives_figure(ours)
    assert picture.figure.get_size_inches()[0] == 9
    axis = picture.figure.axes[0]
    assert [float(line.get_ydata()[0]) for line in axis.get_lines() if line.get_marker() == "s"] == [
        picture.panels[0].lines[0].points[0].mean
    ]
    box = axis.get_position()
    assert 0 < box.x0 < box.x1 < 0.5 and 0 < box.y0 < box.y1 < 1


def test_svg_is_text_the_same_each_time_and_takes_the_pages_colours(ours):
    picture = objectives.build_objectives_figure(ours)
    again = dataclasses.replace(picture)
    assert figure_to_svg(picture.figure, "a") == figure_to_svg(again.figure, "a") and "demo_sc" in picture.svg
    drawn = embed_svg(picture.svg, "objectives", 'CLM "and" <MLM>')
    assert 'aria-label="CLM &quot;and&quot; &lt;MLM&gt;"' in drawn and "var(--ink)" in drawn and "#ffffff" not in drawn
    assert 'id="objectives-figure_1"' in drawn and "width=" not in drawn[: drawn.index(">")]
