"""Report of a study with zero-shot retrieval: tables, figure and claims."""

import re

import pytest
from study_directories import write_results
from zero_shot_directories import write_evaluation, write_study

from megaenc.study.manifest.model_key import parse_model_name
from megaenc.study.report.command import ReportConfig, build_report
from megaenc.study.report.zero_shot import build_zero_shot_figure
from megaenc.study.results.zero_shot import METRIC, read_zero_shot

MANIFEST = """
title: Retrieval
sizes:
  mini: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4,
         num_query_groups: 2}
pretrain: {seq_length: 128, global_batch_size: 16, lr_warmup_iters: 10, lr_wsd_decay_iters: 10}
corpus: {demo: true, vocab_size: 4096}
models:
  - {size: mini, steps: [150, 300], clm_share: [0, 1], mask: 0.4}
"""
FINETUNE = "finetune: {datasets: [demo_sc, demo_qa], learning_rates: [2e-4, 1e-3], seeds: 3}\n"
EMBED = "embed: {datasets: [sci=ir/sci, demo_ir], train: qa, seeds: 3}\n"
ABILITY = {"mini-mlm40-150": 0.3, "mini-mlm40-300": 0.4, "mini-clm-150": 0.25, "mini-clm-300": 0.3}
KEYS = {name: parse_model_name(name) for name in ABILITY}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study with fine-tuning and zero-shot retrieval."""
    root = write_study(tmp_path_factory.mktemp("zero-shot"), ABILITY)
    write_results(root / "results", KEYS)
    (root / "study.yaml").write_text(MANIFEST + FINETUNE + EMBED)
    (root / "without.yaml").write_text(MANIFEST + FINETUNE)
    return root


def build(root, manifest="study.yaml", results="results"):
    """Return the ReportPage of the study in `root`."""
    return build_report(
        ReportConfig(manifest=f"{root}/{manifest}" if manifest else "", results=f"{root}/{results}")
    )


def test_the_table_has_each_model_before_and_after_training(study):
    tables = {table.key: table for table in build(study).tables}
    table = tables["zero-shot"]
    scores = read_zero_shot(study / "embed")
    states = ("as pretrained", "after contrastive training")
    columns = [(dataset, state) for dataset in ("sci", "demo_ir") for state in states]
    assert [(column.group, column.name) for column in table.columns[5:]] == columns
    names = [
        "mini-clm-150",
        "mini-clm-300",
        "mini-mlm40-150",
        "mini-mlm40-300",
        "BM25",
        "random ranking",
    ]
    assert [row.name for row in table.rows] == names
    *head, before, after, _, _ = table.rows[3].cells
    assert head == ["mini-mlm40-300", "mini", "MLM", "40 %", 300]
    query_scores = scores.pretrained["mini-mlm40-300", "sci", METRIC]
    low, high = query_scores.interval
    assert before == f"{100 * query_scores.mean:.2f} [{100 * low:.1f}, {100 * high:.1f}]"
    means = [
        100 * of_seed.mean for of_seed in scores.trained["mini-mlm40-300", "sci", METRIC].values()
    ]
    assert re.fullmatch(rf"{sum(means) / 3:.2f} \(\d\.\d\d\)", after)
    assert table.rows[4].cells[5].startswith("55.00") and table.rows[4].cells[6] is None
    assert table.rows[5].cells[5].startswith("2.00")
    recall = tables["zero-shot-recall"]
    assert recall.folded and recall.rows[4].cells[5].startswith("100.00")


def test_the_figure_has_a_line_for_each_objective_and_bm25(study):
    figure = build_zero_shot_figure(read_zero_shot(study / "embed"), "normal")
    assert [panel.title for panel in figure.panels] == [
        "As pretrained",
        "After contrastive training",
    ]
    for panel, base in zip(figure.panels, (0, 10), strict=True):
        assert [line.name for line in panel.lines] == ["CLM", "MLM", "BM25"]
        clm, mlm, bm25 = panel.lines
        assert [point.x for point in mlm.points] == [150, 300]
        assert [point.mean for point in clm.points] == pytest.approx([25 + base, 30 + base], abs=3)
        assert [point.mean for point in bm25.points] == pytest.approx([55, 55])
        assert bm25.points[0].x < 150 < 300 < bm25.points[1].x


def test_other_schedules_and_sizes_get_lines_of_their_own(tmp_path):
    names = [
        "tiny-clm-75-mlm40-300",
        "tiny-clm-dec150-mlm40-300",
        "tiny-mlm20-300",
        "tiny-mlm40-300",
        "tiny-mlm40-300-100",
    ]
    write_study(tmp_path, dict.fromkeys([*names, "small-mlm40-300", "unknown"], 0.3), seeds=1)
    results = read_zero_shot(tmp_path / "embed")
    before, after = build_zero_shot_figure(results, "normal").panels
    expected = ["MLM, small", "MLM, tiny", "MLM on CLM, tiny", "25 % CLM, then MLM, tiny", "BM25"]
    assert (
        sorted(line.name for line in before.lines)
        == sorted(line.name for line in after.lines)
        == sorted(expected)
    )
    assert len({(line.colour, line.marker) for line in before.lines}) == len(expected)


def test_fine_tuning_is_reported_as_without_it(study):
    both = build(study)
    alone = build(study, "without.yaml")
    assert not [table.key for table in alone.tables if "zero-shot" in table.key]
    assert not [
        report_figure.figure.key
        for report_figure in alone.figures
        if report_figure.figure.key == "zero-shot"
    ]
    assert "Zero-shot retrieval" not in dict(alone.facts) and "Zero-shot retrieval" in dict(
        both.facts
    )
    mine = [table for table in both.tables if "zero-shot" not in table.key]
    assert mine == list(alone.tables) and both.scores == alone.scores
    comparisons = {
        f"{verdict.claim}{verdict.part}": verdict.comparisons for verdict in both.verdicts
    }
    for verdict in alone.verdicts:
        assert comparisons.pop(f"{verdict.claim}{verdict.part}") == verdict.comparisons
    assert set(comparisons) == {"1f", "4c", "5c"}


def test_what_is_missing_is_named(tmp_path):
    write_study(
        tmp_path, {name: mean for name, mean in ABILITY.items() if name != "mini-clm-150"}, seeds=2
    )
    (tmp_path / "study.yaml").write_text(MANIFEST + EMBED)
    write_evaluation(tmp_path / "embed" / "mini-clm-150" / "pretrained.json", {"pretrained": {}})
    page = build(tmp_path)
    [missing] = [text for text in page.notices if "Zero-shot" in text]
    assert "mini-clm-150 (0 of 8)" in missing and "mini-mlm40-300 (6 of 8)" in missing
    assert [table.key for table in page.tables] == [
        "zero-shot",
        "zero-shot-recall",
    ] and page.missing_scores == ""
    assert [
        report_figure.figure.key for report_figure in page.figures if report_figure.figure.panels
    ] == ["zero-shot"]
    first = page.tables[0].rows[0]
    assert first.name == "mini-clm-300" and first.cells[6].endswith(" [2/3]")
