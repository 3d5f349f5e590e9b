"""The tables hold what was measured, to the printed digit."""

import csv
import io
from dataclasses import replace

import pytest
from study_folders import settings, write_results

from megaenc.finetune.results.files import read_result_tree
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.report.methods import normal_interval_coverage
from megaenc.study.report.score_tables import build_score_tables, build_standard_metric_tables, format_scores_csv
from megaenc.study.report.table import table_to_csv, table_to_latex, table_to_markdown
from megaenc.study.results.evidence import Evidence, Score, build_evidence
from megaenc.study.results.groups import SETUP_TITLES
from megaenc.study.results.published import parse_model_key, published, read_published_rows

LINES = {"base": 15, "efficiency": 12, "pfs": 15, "cpt": 8}


def test_every_published_cell_comes_back_in_its_table_in_every_form():
    tables = {table.key: table for table in build_score_tables(published())}
    assert {key: len(table.rows) for key, table in tables.items()} == LINES
    expected = {}
    for row in read_published_rows():
        expected.setdefault(row["setup"], {}).setdefault(parse_model_key(row), {})[f"{row['task']} {row['dataset']}"] = row
    found = 0
    for setup, of_setting in expected.items():
        lines = list(csv.DictReader(io.StringIO(table_to_csv(tables[setup]))))
        for line, cells in zip(lines, of_setting.values(), strict=True):
            first = next(iter(cells.values()))
            assert line["Size"] == first["size"]
            for name in ("clm", "mlm"):
                assert line.get(f"{name.upper()} steps", first[f"{name}_steps"]) == first[f"{name}_steps"]
            for name, row in cells.items():
                assert line[name] == f"{row['mean']} ({row['ci95']})"
                found += 1
    assert found == 800
    for table in tables.values():
        cells = [cell for row in table.rows for cell in row.cells if isinstance(cell, str) and "(" in cell]
        assert len(cells) == 16 * len(table.rows)
        for text in (table_to_markdown(table), table_to_latex(table)):
            assert all(cell in text for cell in cells)


def test_all_scores_in_one_file_are_the_published_file():
    made = [line[:10] for line in csv.reader(io.StringIO(format_scores_csv([published()])))]
    printed = [list(read_published_rows()[0]), *(list(row.values()) for row in read_published_rows())]
    assert made[0] == printed[0] and sorted(made) == sorted(printed)


def test_collapsed_and_unfinished_cells_are_marked_in_every_form():
    """Two models that said the same constant to everything would look like a result of 55.00 (0.00)."""
    one, other = ModelKey("mini", 100), ModelKey("mini", 0, 100, mask_ratio=0.4)
    seeds = {seed: 0.55 for seed in range(3)}
    collapsed = Score("a", one, "TC", "ner", 0.55, 0.0, seeds, collapsed_at_rate=3, ended_runs=6, planned_runs=6)
    begun = Score("b", other, "TC", "ner", 0.6, 0.01, seeds, collapsed_at_rate=1, ended_runs=4, planned_runs=6)
    average = replace(begun, dataset="average", members=(begun, begun))
    [table] = build_score_tables(Evidence([collapsed, begun, average]))
    assert [row.cells[3:] for row in table.rows] == [
        ("60.00 (1.00) †1/3 [4/6]", "60.00 (1.00) †1/6 [4/6]"),
        ("55.00 (0.00) †3/3", None),
    ]
    assert "runs of a cell have collapsed to worthless predictions" in table.note and "only k of n fine-tuning runs" in table.note
    assert r"55.00 (0.00) $\dagger$3/3" in table_to_latex(table)
    lines = list(csv.DictReader(io.StringIO(format_scores_csv([Evidence([collapsed, begun])]))))
    assert [(line["collapsed_runs"], line["ended_trainings"], line["planned_trainings"]) for line in lines] == [
        ("1", "4", "6"),
        ("3", "6", "6"),
    ]
    [clean] = build_score_tables(Evidence([replace(collapsed, collapsed_at_rate=0)]))
    assert "†" not in clean.note and "[k/n]" not in clean.note


def test_notes_say_what_an_interval_is_worth():
    setting = ModelKey("610M", 0, 42_000, mask_ratio=0.4)
    own = Score("a", setting, "IR", "msmarco", 0.5, 0.01, {0: 0.4, 1: 0.6})
    [table] = build_score_tables(Evidence([own]))
    assert "1.96 standard errors over 2 fine-tuning seeds, which hold the true mean 70 times in 100" in table.note
    [table] = build_score_tables(Evidence([own], kind="t"), published())
    expected = "95 % by Student's t over 2 fine-tuning seeds, given the chosen learning rate; published ones are 1.96"
    assert f"{expected} standard errors over 5" in table.note
    assert "88 times in 100" in table.note and "95" not in build_score_tables(published())[0].note
    assert [normal_interval_coverage(seeds) for seeds in (2, 3, 5, 1000)] == pytest.approx([0.70, 0.81, 0.88, 0.95], abs=0.01)


def test_published_values_stand_below_those_of_the_same_setting():
    setting = ModelKey("610M", 0, 42_000, mask_ratio=0.4)
    unknown = ModelKey("610M", 0, 42_000, mask_ratio=0.15)
    scores = [Score("a", setting, "IR", "msmarco", 0.5, 0.01), Score("b", unknown, "IR", "msmarco", 0.4, 0.01)]
    [table] = build_score_tables(Evidence(scores), published())
    assert [(row.cells[2:], row.light) for row in table.rows] == [
        (("15 %", "ours", "40.00 (1.00)"), False),
        (("40 %", "ours", "50.00 (1.00)"), False),
        (("40 %", "published", "91.65 (0.45)"), True),
    ]


def test_models_without_a_setting_and_several_seeds():
    scores = [Score("own-model", None, "SC", "own_set", 0.7, 0.02)]
    scores += [Score(f"s{seed}", ModelKey("1B", 9, seed=seed), "SC", "own_set", 0.6, 0.01) for seed in (1, 2)]
    base, other = build_score_tables(Evidence(scores), published())
    assert [row.cells for row in base.rows] == [("1B", "CLM", "", 1, "60.00 (1.00)"), ("1B", "CLM", "", 2, "60.00 (1.00)")]
    assert (
        other.title == SETUP_TITLES["other"]
        and other.rows[0].cells[0] == "own-model"
        and other.rows[0].cells[-1] == "70.00 (2.00)"
    )


def test_standard_metrics_have_tables_of_their_own(tmp_path):
    models = {name: one for name, one in settings().items() if one.steps == 300 and not one.mlm_steps}
    results = read_result_tree(write_results(tmp_path, models))
    evidence, *standard = (build_evidence(results, models.get, metric) for metric in ("score", "accuracy", "exact_match", "f1"))
    [table] = build_standard_metric_tables(evidence, standard)
    assert table.key == "base-standard"
    groups = [(column.group, column.name) for column in table.columns if column.group]
    assert groups == [("SC, accuracy", "demo_sc"), ("QA, token F1", "demo_qa"), ("QA, exact match", "demo_qa")]
    [ours] = build_score_tables(evidence)
    assert table.rows[0].cells[3] == ours.rows[0].cells[3] and build_standard_metric_tables(evidence, []) == []
