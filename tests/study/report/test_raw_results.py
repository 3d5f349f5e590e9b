"""The study's own files, whole or with some missing: printed cells that come back, and the runs that are not there."""

import json
import re
import shutil

import published_tree
import pytest

from megaenc.study.report import command as report_command
from megaenc.study.report.command import ReportConfig, build_report
from megaenc.study.results.published import raw

MODEL = "610m-mlm40-42k"


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [])


@pytest.fixture
def tree(tmp_path):
    """The study's tree of one model: 12 data sets, three rates, five seeds."""
    published_tree.write(tmp_path / "results", models=[MODEL])
    return tmp_path / "results"


def report_of(tree, **options):
    """The report of a tree, and its tables by key."""
    report = build_report(ReportConfig(results=str(tree), **options))
    return report, {table.key: table for table in report.tables}


def remove(tree, *runs: str) -> None:
    for name in runs:
        shutil.rmtree(tree / MODEL / name)


def test_a_whole_tree_reproduces_all_its_cells_and_lacks_none(tree):
    """Models of other names and sizes, and sets that the tables do not have, count neither in tables nor in claims."""
    for name in ("mini-mlm40-42k", "610m-mlm15-42k"):
        shutil.copytree(tree / MODEL, tree / name)
    shutil.copytree(tree / MODEL / "QA/squad", tree / MODEL / "QA/qed")
    report, tables = report_of(tree, interval="t")  # printed intervals are never Student's
    assert list(report.notices) == ["Reproduces 16 of 16 printed cells."]
    table = tables["reproduction"]
    assert [row.cells[1:3] for row in table.rows[:4]] == [("SC", "SST-2"), ("SC", "QQP"), ("SC", "MNLI"), ("SC", "Average")]
    assert table.rows[0].cells == (MODEL, "SC", "SST-2", "91.42 (0.62)", "91.42 (0.62)", "2e-05", "3/6", "equal")
    assert table.rows[3].cells[5:] == (None, None, "equal")  # each set of an average has its own rate
    assert len(table.rows) == 16 and table.folded and "missing-results" not in tables
    assert dict(report.facts)["Left out"] == "15 results on data sets that the study's tables do not have"
    assert ("QA", "qed") not in raw(tree).datasets()
    shutil.copytree(tree / MODEL / "QA/qed", tree / "mine/QA/qed")  # a model of one's own may have any set
    assert "qed" in [column.name for column in report_of(tree)[1]["other"].columns]


def test_missing_runs_are_named_and_what_depends_on_them_differs(tree, capsys):
    """A rate that lacks a seed is not chosen, even if it is the best one; all else stays as it is."""
    shutil.copytree(tree / MODEL / "IR/nq", tree / "mine/IR/nq")  # rates that any model has on a set are expected of all
    remove(tree, "SC/mnli_m/lr5e-05_sd1", "SC/mnli_m/lr5e-05_sd2", "QA/squad/lr5e-05_sd4", "TC/uner_en/lr5e-05_sd0")
    remove(tree, *(f"IR/nq/msmarco_pairs_lr1e-04_sd{seed}" for seed in range(5)))
    output = tree.parent / "report"
    report_command.main(["--results", str(tree), "--output", str(output)])
    *_, reproduced, missing, written = capsys.readouterr().out.splitlines()
    assert reproduced.startswith(
        f"Reproduces 14 of 16 printed cells; differs: {MODEL} QA SQuAD 78.76 (0.29), printed 77.76 (0.29); "
        f"{MODEL} QA Average 63.10 ("
    )
    assert missing == (
        f"Missing: 9 of 195 results: {MODEL} IR NQ at 1e-04: seeds 0, 1, 2, 3, 4; {MODEL} QA SQuAD at 5e-05: seed 4; "
        f"{MODEL} SC MNLI at 5e-05: seeds 1, 2; and 1 more. Rates that lack a seed cannot be chosen; 1 of 4 would validate "
        "better than the chosen one (table missing-results)."
    )
    assert written.startswith("7 tables")
    assert (output / "tables/missing-results.csv").read_text().splitlines() == [
        "Model,Family,Data set,Rate,Missing seeds,Validation",
        f'{MODEL},IR,NQ,1e-04,"0, 1, 2, 3, 4",',
        f"{MODEL},QA,SQuAD,5e-05,4,+5.00",
        f'{MODEL},SC,MNLI,5e-05,"1, 2",-5.00',
        f"{MODEL},TC,UNER,5e-05,0,-10.00",
    ]
    rows = (output / "tables/reproduction.csv").read_text()
    assert f"{MODEL},QA,SQuAD,77.76 (0.29),78.76 (0.29),2e-05,2/6,+1.00 (+0.00)" in rows
    page = (output / "index.html").read_text()
    for name in ("missing-results", "reproduction"):
        assert re.search(rf'<details class="card" id="table-{name}">', page)  # folded
        for suffix in ("md", "tex"):
            assert (output / "tables" / f"{name}.{suffix}").read_text().count("MNLI") == 1
    assert "Missing: 9 of 195 results" in page and "Reproduces 14 of 16 printed cells" in page


def test_a_rerun_is_compared_in_the_tables_of_scores_only(tree):
    """One file of it makes the cell a rerun's; nor is an average over other sets a printed average."""

    def claim(path, fields):
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    claim(tree / MODEL / "SC/sst2/lr2e-05_sd0/results.json", {"model": MODEL})
    report, _ = report_of(tree)
    assert list(report.notices) == ["Reproduces 14 of 14 printed cells."]  # without SST-2 and the average over it
    shutil.rmtree(tree / MODEL / "QA/squad")
    assert list(report_of(tree)[0].notices) == ["Reproduces 12 of 12 printed cells."]
    for path in tree.rglob("results.json"):
        splits = json.loads(path.read_text())
        claim(path, {name: splits[name] | {"metrics": {"accuracy": 0.5}} for name in ("validation", "test")})
    report, tables = report_of(tree)
    assert not report.notices and "reproduction" not in tables
    assert [row.light for row in tables["base"].rows] == [False, True]
