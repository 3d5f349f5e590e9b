"""The tables of a grid, from trees whose numbers are known."""

import csv
import json
import re

import pytest
import trees
from fake_runs import FakeGrid
from small_data import read_json, write_file

from megaenc.finetune.results.summary import summary_main

PRINTED = [0.9102, 0.9154, 0.9137, 0.9200, 0.9233]


@pytest.fixture
def study(tmp_path):
    """Write two models: retrieval as printed, a rate collapsed on SQuAD v2, a gap."""
    root = tmp_path / "results"
    worse = [score - 0.1 for score in PRINTED]
    retrieval = {1e-5: worse, 5e-5: PRINTED, 5e-4: [*worse[:4], None]}
    trees.cell(root, "610m-mlm40-42k", "IR/msmarco", retrieval, "msmarco_pairs_")
    trees.cell(
        root, "610m-mlm40-42k", "IR/nq", {1e-5: PRINTED[::-1], 5e-5: worse}, "msmarco_pairs_"
    )
    trees.cell(
        root, "610m-clm-42k", "QA/squad_v2", {1e-5: [0.60, 0.62], 5e-4: [5945 / 11873, 0.55]}
    )
    return root


def printed(capsys, *argv) -> str:
    summary_main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert not captured.err and all(
        len(line) <= 80 for line in captured.out.splitlines() if "─" in line
    )
    return captured.out


def test_the_chosen_rate_has_an_interval_rates_are_compared_and_collapsed_runs_listed(
    study, capsys
):
    assert "91.65 (0.64)" in printed(capsys, study, "--interval", "t")
    said = printed(capsys, study)
    assert "baseline" not in said  # published results hold none
    rows = [line.split() for line in said.splitlines()]
    assert ["msmarco", "paper's", "91.65", "(0.45)", "5e-05", "14/15"] in [row[-6:] for row in rows]
    # Spread 10 points; a rate without every seed is marked and counts for nothing.
    assert ["610m-mlm40-42k", "msmarco", "81.7", "91.7*", "x", "10.0", "1"] in rows
    assert ["610m-clm-42k", "squad_v2", "61.0*", "52.5", "8.5", "1"] in rows
    assert "collapsed: 610m-clm-42k squad_v2: never answers: 5e-04 sd0" in said
    assert "!" not in said  # it is not of the chosen rate


def test_trainings_are_kept_apart(tmp_path, capsys):
    """Of two trainings on two sets, each set has a row and each training an average."""
    for train_on, scores in (("pairs", [0.2, 0.4]), ("mined", [0.8, 0.6])):
        for name, more in (("msmarco", 0.0), ("nq", 0.1)):
            trees.cell(
                tmp_path / "tree",
                "toy",
                f"IR/{name}",
                {1e-5: [score + more for score in scores]},
                f"{train_on}_",
            )
    said = printed(capsys, tmp_path / "tree", "--output", tmp_path / "out.csv")
    folded = " ".join(said.split())
    for words in (
        "msmarco after mined paper's 70.00",
        "msmarco after pairs paper's 30.00",
        "nq after pairs paper's 40.00",
    ):
        assert words in folded
    assert (
        "average of 2 after mined paper's 75.00" in folded
        and "average of 2 after pairs paper's 35.00" in folded
    )
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["train_on"] for row in rows if row["dataset"] == "average of 2"] == [
        "mined",
        "pairs",
    ]


def test_a_chosen_rate_with_a_collapsed_run_is_marked(tmp_path, capsys):
    trees.cell(tmp_path / "results", "toy", "QA/squad_v2", {1e-5: [5945 / 11873, 0.9]})
    said = printed(capsys, tmp_path / "results", "--output", tmp_path / "out.json")
    assert "70.04 (39.13) !" in said and "! marks" in said
    assert read_json(tmp_path / "out.json")["rows"][0]["collapsed"] == "1 of 2: never answers"


def test_a_grid_that_is_not_done_is_shown_as_far_as_it_is(tmp_path, capsys):
    trees.cell(tmp_path, "toy", "SC/sst2", {1e-5: [0.5, None], 2e-5: [None, 0.5]})
    rows = [line.split() for line in printed(capsys, tmp_path).splitlines()]
    assert ["toy", "sst2", "paper's", "-", "2/4"] in rows and ["toy", "sst2", "x", "x"] in rows


def test_the_results_of_a_grid_with_a_failed_run(tmp_path, capsys):
    """Standard metrics and baselines; a rate with a failed run is not chosen."""
    grid = FakeGrid(tmp_path, **{"lr5e-04_sd0": {"do": "nan"}})
    grid.run("ir1", "ir2", code=1)
    capsys.readouterr()
    for which, shown in (("paper", ["paper's"]), ("standard", ["accuracy"])):
        said = printed(capsys, grid.output, "--metrics", which).partition("mean score")[0]
        assert [name for name in ("paper's", "accuracy") if name in said] == shown
    said = printed(capsys, grid.output, "--output", tmp_path / "out.csv")
    assert (
        "failed: toy ir1: the loss is nan in step 3: 5e-04 sd0" in said
        and "6 results, 2 failed runs" in said
    )
    assert "!" not in said
    rows = [line.split() for line in said.partition("mean score")[0].splitlines()]
    assert [row[-3:] for row in rows if row[-1:] == ["3/4"]] == [["50.00", "1e-05", "3/4"]] * 2
    assert [row[-1] for row in rows if row[:1] == ["accuracy"]] == [
        "25.00"
    ] * 3  # two sets and their average
    written = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert {(row["metric"], row["baseline"]) for row in written} == {
        ("paper's", "50.0"),
        ("accuracy", "25.0"),
    }


@pytest.mark.parametrize("ending", ["json", "csv", "md"])
def test_all_numbers_go_to_a_file(study, tmp_path, capsys, ending):
    output = tmp_path / "new" / f"summary.{ending}"
    assert f"written: {output}" in printed(capsys, study, "--output", output)
    text = output.read_text()
    if ending == "md":
        assert (
            "| 610m-mlm40-42k | IR | msmarco | msmarco_pairs | paper's | 91.65 (0.45) | - | 5e-05 "
            "| 14/15 |" in text
        )
        return
    rows = json.loads(text)["rows"] if ending == "json" else list(csv.DictReader(text.splitlines()))
    [row] = [row for row in rows if row["dataset"] == "msmarco"]
    assert (
        float(row["mean"]) == pytest.approx(100 * sum(PRINTED) / 5)
        and float(row["learning_rate"]) == 5e-5
    )
    assert round(float(row["half"]), 2) == 0.45 and int(row["seeds"]) == 5


def test_names_are_one_cell_of_the_markdown_and_no_html(tmp_path, capsys):
    evil = "m|x\n| a | <script>alert(1)</script> `c` ![i](http://x)\x1b[2J\u202e"
    trees.cell(
        tmp_path / "tree", evil.replace("/", ""), "SC/[b](u)", {1e-5: [0.5, 0.6], 2e-5: [0.1, 0.2]}
    )
    file = (
        tmp_path / "tree" / evil.replace("/", "") / "SC" / "[b](u)" / "lr1e-05_sd0" / "results.json"
    )
    values = read_json(file)
    values["test"] |= {"collapsed": evil, "metrics": {"f1 | <b>": 0.5}}
    write_file(file, values)
    said = printed(capsys, tmp_path / "tree", "--output", tmp_path / "out.md")
    assert "\x1b" not in said and "\u202e" not in said and "[b](u)" in said
    printed(capsys, tmp_path / "tree", "--output", tmp_path / "out.csv")
    lines = (tmp_path / "out.md").read_text().splitlines()
    for line in lines:
        assert (
            "<" not in line
            and "\x1b" not in line
            and "\u202e" not in line
            and not re.search(r"(?<!\\)[`\[]", line)
        )
    tables = [line for line in lines if line.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {11, 6}
    read = list(csv.DictReader((tmp_path / "out.csv").open(newline="")))
    assert {row["model"] for row in read} == {evil.replace("/", "")}
