"""The tables hold what was measured, to the printed digit."""

import csv
import io
from dataclasses import replace

import pytest
from study_directories import settings, write_results

from megaenc.finetune.results.files import read_result_tree
from megaenc.study.manifest.model_key import ModelKey, parse_model_name
from megaenc.study.report.methods import normal_interval_coverage
from megaenc.study.report.score_tables import (
    build_score_tables,
    build_standard_metric_tables,
    format_scores_csv,
)
from megaenc.study.report.table import (
    Column,
    Table,
    TableRow,
    format_score,
    table_to_csv,
    table_to_latex,
    table_to_markdown,
)
from megaenc.study.results.evidence import Evidence, Score, build_evidence
from megaenc.study.results.groups import SETUP_TITLES
from megaenc.study.results.published import parse_model_key, published, read_published_rows

OURS = Score("a", parse_model_name("610m-mlm40-42k"), "IR", "msmarco", 0.5, 0.01, {0: 0.4, 1: 0.6})


def cells_of(table, first=0) -> list[tuple]:
    return [row.cells[first:] for row in table.rows]


def test_every_published_cell_comes_back_in_its_table_in_every_form():
    tables = {table.key: table for table in build_score_tables(published())}
    assert {key: len(table.rows) for key, table in tables.items()} == {
        "base": 15,
        "efficiency": 12,
        "pfs": 15,
        "cpt": 8,
    }
    expected = {}
    for row in read_published_rows():
        expected.setdefault((row["setup"], parse_model_key(row)), []).append(row)
    lines = []
    for key, table in tables.items():
        lines += [(key, line) for line in csv.DictReader(io.StringIO(table_to_csv(table)))]
        texts = (table_to_markdown(table), table_to_latex(table))
        for row in table.rows:
            for cell in row.cells[-16:]:
                assert "(" in cell and all(cell in text for text in texts)
    for (key, line), ((setup, _), rows) in zip(lines, expected.items(), strict=True):
        assert (key, line["Size"], len(rows)) == (setup, rows[0]["size"], 16)
        for name in ("clm", "mlm"):
            assert (
                line.get(f"{name.upper()} steps", rows[0][f"{name}_steps"])
                == rows[0][f"{name}_steps"]
            )
        for row in rows:
            assert line[f"{row['task']} {row['dataset']}"] == f"{row['mean']} ({row['ci95']})"


def test_all_scores_in_one_file_are_the_published_file():
    lines = [line[:10] for line in csv.reader(io.StringIO(format_scores_csv([published()])))]
    rows = read_published_rows()
    assert lines[0] == list(rows[0])
    assert sorted(lines[1:]) == sorted(list(row.values()) for row in rows)


def test_collapsed_and_unfinished_cells_are_marked_in_every_form():
    """Two models that predict a constant would look like a result of 55.00 (0.00)."""
    runs = {"collapsed_at_rate": 3, "ended_runs": 6, "planned_runs": 6}
    collapsed = Score(
        "a", ModelKey("mini", 100), "TC", "ner", 0.55, 0.0, dict.fromkeys(range(3), 0.55), **runs
    )
    key = parse_model_name("mini-mlm40-100")
    begun = replace(
        collapsed,
        model="b",
        model_key=key,
        mean=0.6,
        half_width=0.01,
        collapsed_at_rate=1,
        ended_runs=4,
    )
    average = replace(begun, dataset="average", members=(begun, begun))
    [table] = build_score_tables(Evidence([collapsed, begun, average]))
    assert cells_of(table, 3) == [
        ("60.00 (1.00) †1/3 [4/6]", "60.00 (1.00) †1/6 [4/6]"),
        ("55.00 (0.00) †3/3", None),
    ]
    assert (
        "runs of a cell have collapsed to worthless predictions" in table.note
        and "only k of n fine-tuning runs" in table.note
    )
    assert r"55.00 (0.00) $\dagger$3/3" in table_to_latex(table)
    lines = list(csv.DictReader(io.StringIO(format_scores_csv([Evidence([collapsed, begun])]))))
    counts = [
        (line["collapsed_runs"], line["ended_trainings"], line["planned_trainings"])
        for line in lines
    ]
    assert counts == [("1", "4", "6"), ("3", "6", "6")]
    [clean] = build_score_tables(Evidence([replace(collapsed, collapsed_at_rate=0)]))
    assert "†" not in clean.note and "[k/n]" not in clean.note


def test_notes_say_what_an_interval_is_worth():
    [table] = build_score_tables(Evidence([OURS]))
    assert (
        "1.96 standard errors over 2 fine-tuning seeds, which hold the true mean 70 times in 100"
        in table.note
    )
    [table] = build_score_tables(Evidence([OURS], kind="t"), published())
    expected = (
        "95 % by Student's t over 2 fine-tuning seeds, given the chosen learning rate; published "
        "ones are 1.96"
    )
    assert f"{expected} standard errors over 5" in table.note and "88 times in 100" in table.note
    assert [normal_interval_coverage(seeds) for seeds in (2, 3, 5, 1000)] == pytest.approx(
        [0.70, 0.81, 0.88, 0.95], abs=0.01
    )


def test_published_values_stand_below_those_of_the_same_setting():
    unknown = replace(OURS, model="b", model_key=replace(OURS.model_key, mask_ratio=0.15), mean=0.4)
    [table] = build_score_tables(Evidence([OURS, unknown]), published())
    assert cells_of(table, 2) == [
        ("15 %", "ours", "40.00 (1.00)"),
        ("40 %", "ours", "50.00 (1.00)"),
        ("40 %", "published", "91.65 (0.45)"),
    ]
    assert [row.light for row in table.rows] == [False, False, True]


def test_models_without_a_setting_and_several_seeds():
    own_score = replace(OURS, model="own-model", model_key=None, family="SC", dataset="own_set")
    seeds = [
        replace(own_score, model=f"s{seed}", model_key=ModelKey("1B", 9, seed=seed))
        for seed in (1, 2)
    ]
    base, other_table = build_score_tables(Evidence([own_score, *seeds]), published())
    assert cells_of(base) == [
        ("1B", "CLM", "", 1, "50.00 (1.00)"),
        ("1B", "CLM", "", 2, "50.00 (1.00)"),
    ]
    [row] = other_table.rows
    assert other_table.title == SETUP_TITLES["other"] and (row.cells[0], row.cells[-1]) == (
        "own-model",
        "50.00 (1.00)",
    )


def test_standard_metrics_have_tables_of_their_own(tmp_path):
    models = {
        name: key for name, key in settings().items() if key.steps == 300 and not key.mlm_steps
    }
    results = read_result_tree(write_results(tmp_path, models))
    evidence = build_evidence(results, models.get, "score")
    standard = [
        build_evidence(results, models.get, metric) for metric in ("accuracy", "exact_match", "f1")
    ]
    [table] = build_standard_metric_tables(evidence, standard)
    assert table.key == "base-standard"
    groups = [(column.group, column.name) for column in table.columns if column.group]
    assert groups == [
        ("SC, accuracy", "demo_sc"),
        ("QA, token F1", "demo_qa"),
        ("QA, exact match", "demo_qa"),
    ]
    [ours] = build_score_tables(evidence)
    assert (
        table.rows[0].cells[3] == ours.rows[0].cells[3]
        and build_standard_metric_tables(evidence, []) == []
    )


COLUMNS = (
    Column("Size", numeric=False),
    Column("Steps"),
    Column("SST-2", "SC"),
    Column("NQ", "IR"),
)


@pytest.fixture
def table():
    rows = (
        TableRow(("1B", 42_000, "91.65 (0.45)", None)),
        TableRow(("a_b|c <1 %", 10, None, "1.00"), rule=True, light=True),
    )
    return Table("base", "Models & sizes", "Percent.", COLUMNS, rows)


def test_scores_have_the_digits_of_the_study():
    assert format_score(0.9165, 0.0045) == "91.65 (0.45)"
    assert format_score(0.5, None) == "50.00" == format_score(0.5, float("nan"))
    assert format_score(None) is None is format_score(float("nan"))


def test_markdown_is_aligned_and_escaped(table):
    assert table_to_markdown(table).splitlines() == [
        "### Models & sizes",
        "",
        "Percent.",
        "",
        "| Size           |  Steps |     SC SST-2 | IR NQ |",
        "| -------------- | -----: | -----------: | ----: |",
        "| 1B             | 42,000 | 91.65 (0.45) |       |",
        r"| a_b\|c &lt;1 % |     10 |              |  1.00 |",
    ]


def test_latex_has_booktabs_rules_and_escapes(table):
    text = table_to_latex(table)
    assert r"\caption{Models \& sizes. Percent.}" in text and r"\label{tab:base}" in text
    assert r" &  & \multicolumn{1}{c}{SC} & \multicolumn{1}{c}{IR} \\" in text
    assert r"\cmidrule(lr){3-3} \cmidrule(lr){4-4}" in text
    assert r"1B & 42,000 & 91.65 (0.45) &  \\" in text
    assert r"\textit{a\_b|c $<$1\,\%} & \textit{10} &  & \textit{1.00} \\" in text
    assert text.index(r"\addlinespace") > text.index("91.65") and text.count("{") == text.count("}")


def test_a_wide_table_has_its_groups_below_each_other():
    columns = (
        Column("Size", numeric=False),
        *(Column(f"set {index}", group) for group in "ABC" for index in range(4)),
    )
    text = table_to_latex(
        Table("wide", "Wide", "Note.", columns, (TableRow(("1B", *map(str, range(12)))),))
    )
    assert text.count(r"\begin{tabular}{lrrrr}") == 3 and text.count(r"\begin{table}") == 1
    assert "1B & 4 & 5 & 6 & 7" in text
