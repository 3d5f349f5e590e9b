"""The study's own files, whole or with missing runs and sets."""

import shutil

import published_tree
import pytest

from megaenc.study.report import command as report_command
from megaenc.study.report.command import ReportConfig, build_report

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


def test_a_whole_tree_lacks_nothing_and_has_the_sets_of_the_tables(tree):
    """Other models, sizes and sets count neither in tables nor in claims."""
    for name in ("mini-mlm40-42k", "610m-mlm15-42k"):
        shutil.copytree(tree / MODEL, tree / name)
    shutil.copytree(tree / MODEL / "QA/squad", tree / MODEL / "QA/qed")
    report, tables = report_of(tree)
    assert not report.notices and "missing-results" not in tables
    [position] = [index for index, row in enumerate(tables["base"].rows) if row.name == "published"]
    scores = tables["base"].rows[position - 1].cells[-4:]
    printed = tables["base"].rows[position].cells[-4:]
    assert (
        scores[:3] == printed[:3]
        and scores[3].split()[0] == printed[3].split()[0]
        and None not in printed
    )
    assert (
        dict(report.facts)["Left out"]
        == "15 results on data sets that the study's tables do not have"
    )
    # A model of one's own may have any set
    shutil.copytree(tree / MODEL / "QA/qed", tree / "mine/QA/qed")
    assert "qed" in [column.name for column in report_of(tree)[1]["other"].columns]


def test_missing_runs_are_named(tree, capsys):
    """A rate that lacks a seed is not chosen, even if it is the best one."""
    # Rates that any model has on a set are expected of all
    shutil.copytree(tree / MODEL / "IR/nq", tree / "mine/IR/nq")
    remove(
        tree,
        "SC/mnli_m/lr5e-05_sd1",
        "SC/mnli_m/lr5e-05_sd2",
        "QA/squad/lr5e-05_sd4",
        "TC/uner_en/lr5e-05_sd0",
    )
    remove(tree, *(f"IR/nq/msmarco_pairs_lr1e-04_sd{seed}" for seed in range(5)))
    output = tree.parent / "report"
    report_command.main(["--results", str(tree), "--output", str(output)])
    *_, missing, written = capsys.readouterr().out.splitlines()
    assert missing == (
        "Missing: 9 of 195 results. Rates that lack a seed cannot be chosen; 1 of 4 would validate "
        "better than the chosen one "
        "(table missing-results)."
    )
    assert written.startswith("6 tables")
    assert (output / "tables/missing-results.csv").read_text().splitlines() == [
        "Model,Family,Data set,Rate,Missing seeds,Validation",
        f'{MODEL},IR,NQ,1e-04,"0, 1, 2, 3, 4",',
        f"{MODEL},QA,SQuAD,5e-05,4,+5.00",
        f'{MODEL},SC,MNLI,5e-05,"1, 2",-5.00',
        f"{MODEL},TC,UNER,5e-05,0,-10.00",
    ]
    page = (output / "index.html").read_text()
    # Folded
    assert (
        '<details class="card" id="table-missing-results">' in page
        and "Missing: 9 of 195 results" in page
    )
    for suffix in ("md", "tex"):
        assert (output / "tables" / f"missing-results.{suffix}").read_text().count("MNLI") == 1
