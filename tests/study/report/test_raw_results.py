"""The study's own files, whole or with some missing: printed cells that come back, and the runs that are not there."""

import json
import re
import shutil

import published_tree
import pytest

from megaenc.study.report import command as report_command
from megaenc.study.report.command import ReportConfig, build_report
from megaenc.study.report.table import table_to_csv, table_to_latex, table_to_markdown
from megaenc.study.results.published import raw

MODEL = "610m-mlm40-42k"
BEST, BETTER_ON_TEST = {"sst2": "2e-05", "squad": "5e-05", "qqp": "1e-04"}, {"squad": "2e-05"}


@pytest.fixture
def tree(tmp_path):
    """The study's tree of one model: 12 data sets, three rates, five seeds."""
    published_tree.write(tmp_path / "results", models=[MODEL])
    return tmp_path / "results"


def tables(report) -> dict:
    return {table.key: table for table in report.tables}


def remove(tree, *runs: str) -> None:
    for name in runs:
        shutil.rmtree(tree / MODEL / name)


def test_a_whole_tree_reproduces_all_its_cells_and_lacks_none(tree):
    report = build_report(ReportConfig(results=str(tree), interval="t"))  # printed intervals are never Student's
    assert list(report.notices) == ["Reproduces 16 of 16 printed cells."]
    table = tables(report)["reproduction"]
    assert [row.cells[1:3] for row in table.rows[:4]] == [("SC", "SST-2"), ("SC", "QQP"), ("SC", "MNLI"), ("SC", "Average")]
    assert table.rows[0].cells == (MODEL, "SC", "SST-2", "91.42 (0.62)", "91.42 (0.62)", BEST["sst2"], "3/6", "equal")
    assert table.rows[3].cells[5:] == (None, None, "equal")  # each set of an average has its own rate
    assert len(table.rows) == 16 and table.folded and "missing-results" not in tables(report)


def test_missing_runs_are_named_and_what_depends_on_them_differs(tree, capsys, monkeypatch):
    """A rate that lacks a seed is not chosen, even if it is the best one; all else stays as it is."""
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [])
    shutil.copytree(tree / MODEL / "IR/nq", tree / "mine/IR/nq")  # rates that any model has on a set are expected of all
    best = f"QA/squad/lr{BEST['squad']}"
    remove(tree, "SC/mnli_m/lr5e-05_sd1", "SC/mnli_m/lr5e-05_sd2", f"{best}_sd4")
    remove(tree, *(f"IR/nq/msmarco_pairs_lr1e-04_sd{seed}" for seed in range(5)), "TC/uner_en/lr5e-05_sd0")
    output = tree.parent / "report"
    report_command.main(["--results", str(tree), "--output", str(output)])
    *_, reproduced, missing, written = capsys.readouterr().out.splitlines()
    assert reproduced == (
        f"Reproduces 14 of 16 printed cells; differs: {MODEL} QA SQuAD 78.76 (0.29), printed 77.76 (0.29); "
        f"{MODEL} QA Average 63.10 (1.86), printed 62.77 (1.86) (table reproduction)."
    )
    assert missing == (
        f"Missing: 9 of 195 results: {MODEL} IR NQ at 1e-04: seeds 0, 1, 2, 3, 4; {MODEL} QA SQuAD at 5e-05: seed 4; "
        f"{MODEL} SC MNLI at 5e-05: seeds 1, 2; and 1 more. Rates that lack a seed cannot be chosen; 1 of 4 would validate "
        "better than the chosen one (table missing-results)."
    )
    assert written.startswith("7 tables")
    text = (output / "tables/missing-results.csv").read_text()
    assert text.splitlines() == [
        "Model,Family,Data set,Rate,Missing seeds,Validation",
        f'{MODEL},IR,NQ,1e-04,"0, 1, 2, 3, 4",',
        f"{MODEL},QA,SQuAD,5e-05,4,+5.00",
        f'{MODEL},SC,MNLI,5e-05,"1, 2",-5.00',
        f"{MODEL},TC,UNER,5e-05,0,-10.00",
    ]
    assert f"{MODEL},QA,SQuAD,77.76 (0.29),78.76 (0.29),{BETTER_ON_TEST['squad']},2/6,+1.00 (+0.00)" in (
        (output / "tables/reproduction.csv").read_text()
    )
    page = (output / "index.html").read_text()
    for name in ("missing-results", "reproduction"):
        assert re.search(rf'<details class="card" id="table-{name}">', page)  # folded
        assert {f"{name}.{suffix}" for suffix in ("csv", "md", "tex")} <= {path.name for path in (output / "tables").iterdir()}
    assert "Missing: 9 of 195 results" in page and "Reproduces 14 of 16 printed cells" in page


def test_a_seed_that_no_rate_has_changes_the_interval(tree):
    remove(tree, *(path.relative_to(tree / MODEL) for path in (tree / MODEL / "SC/sst2").glob("*_sd4")))
    report = build_report(ReportConfig(results=str(tree)))
    [different] = [row for row in tables(report)["reproduction"].rows if row.cells[-1] != "equal"]
    assert different.cells[2] == "SST-2" and different.cells[5:7] == (BEST["sst2"], "3/6")
    printed, recomputed = (re.fullmatch(r"(.*) \((.*)\)", text).groups() for text in different.cells[3:5])
    differences = [float(own) - float(other) for own, other in zip(recomputed, printed, strict=True)]
    assert different.cells[-1] == "{:+.2f} ({:+.2f})".format(*differences)
    assert not [row for row in tables(report)["reproduction"].rows if row.cells[1:3] == ("SC", "Average")]  # no common seeds


OWN = {
    "a result of megaenc": lambda fields: {"model": MODEL, "protocol": {"batch_size": 32}} | fields,
    "a result with standard metrics": lambda fields: {
        name: split | {"metrics": {"accuracy": 0.5}} for name, split in fields.items()
    },
}


@pytest.mark.parametrize("kind", OWN)
def test_a_rerun_is_compared_in_the_tables_of_scores_only(kind, tree):
    for path in tree.rglob("results.json"):
        path.write_text(json.dumps(OWN[kind](json.loads(path.read_text()))))
    report = build_report(ReportConfig(results=str(tree)))
    assert not report.notices and "reproduction" not in tables(report)
    assert [row.light for row in tables(report)["base"].rows] == [False, True]


def test_one_file_of_a_rerun_makes_the_cell_a_reruns(tree):
    path = tree / MODEL / "SC/sst2" / f"lr{BEST['sst2']}_sd0/results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": MODEL}))
    report = build_report(ReportConfig(results=str(tree)))
    assert list(report.notices) == ["Reproduces 14 of 14 printed cells."]  # without SST-2 and the average over it


def test_models_of_other_names_and_sizes_are_none_of_the_studys(tree):
    for name in ("mini-mlm40-42k", "610m-mlm15-42k", "mine"):
        shutil.copytree(tree / MODEL, tree / name)
    report = build_report(ReportConfig(results=str(tree)))
    assert list(report.notices) == ["Reproduces 16 of 16 printed cells."]


def test_an_average_over_other_sets_is_no_printed_average(tree):
    shutil.rmtree(tree / MODEL / "QA/squad")
    report = build_report(ReportConfig(results=str(tree)))
    assert list(report.notices) == ["Reproduces 14 of 14 printed cells."]
    assert [row.cells[2] for row in tables(report)["reproduction"].rows if row.cells[1] == "QA"] == ["SQuAD-v2", "ReCoRD"]


def test_sets_that_the_tables_do_not_have_count_neither_in_tables_nor_in_claims(tree):
    shutil.copytree(tree / MODEL / "QA/squad", tree / MODEL / "QA/qed")
    report = build_report(ReportConfig(results=str(tree)))
    assert list(report.notices) == ["Reproduces 16 of 16 printed cells."]
    assert not [column for table in report.tables for column in table.columns if column.name == "qed"]
    assert dict(report.facts)["Left out"] == "15 results on data sets that the study's tables do not have"
    assert ("QA", "qed") not in raw(tree).datasets()
    shutil.copytree(tree / MODEL / "QA/qed", tree / "mine/QA/qed")  # a model of one's own may have any set
    base = tables(build_report(ReportConfig(results=str(tree))))["other"]
    assert "qed" in [column.name for column in base.columns]


def test_all_forms_hold_the_same_cells(tree):
    remove(tree, "SC/mnli_m/lr5e-05_sd1", "SC/mnli_m/lr5e-05_sd2")
    for name, table in tables(build_report(ReportConfig(results=str(tree)))).items():
        if name in ("missing-results", "reproduction"):
            for form in (table_to_csv, table_to_markdown, table_to_latex):
                assert form(table).count("MNLI") == 1
