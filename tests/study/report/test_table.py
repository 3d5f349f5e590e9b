"""One table, three written forms."""

import csv
import io

import pytest

from megaenc.study.report.table import Column, Table, TableRow, format_score, table_to_csv, table_to_latex, table_to_markdown

COLUMNS = (Column("Size", number=False), Column("Steps"), Column("SST-2", "SC"), Column("NQ", "IR"))


@pytest.fixture
def table():
    rows = (TableRow(("1B", 42_000, "91.65 (0.45)", None)), TableRow(("a_b|c <1 %", 10, None, "1.00"), rule=True, light=True))
    return Table("base", "Models & sizes", "Percent.", COLUMNS, rows)


def test_scores_have_the_digits_of_the_study():
    assert format_score(0.9165, 0.0045) == "91.65 (0.45)"
    assert format_score(0.5, None) == "50.00" == format_score(0.5, float("nan"))
    assert format_score(None) is None is format_score(float("nan"))


def test_csv_keeps_counts_plain_and_missing_cells_empty(table):
    assert list(csv.reader(io.StringIO(table_to_csv(table)))) == [
        ["Size", "Steps", "SC SST-2", "IR NQ"],
        ["1B", "42000", "91.65 (0.45)", ""],
        ["a_b|c <1 %", "10", "", "1.00"],
    ]


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
    columns = (Column("Size", number=False), *(Column(f"set {at}", group) for group in "ABC" for at in range(4)))
    text = table_to_latex(Table("wide", "Wide", "Note.", columns, (TableRow(("1B", *map(str, range(12)))),)))
    assert text.count(r"\begin{tabular}{lrrrr}") == 3 and text.count(r"\begin{table}") == 1
    assert "1B & 4 & 5 & 6 & 7" in text
