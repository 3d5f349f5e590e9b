"""`megaenc study report` from end to end: tables alone, published files, and a study of one's own."""

import csv
import io
import json
import os
import re
import shutil

import published_tree
import pytest
from study_folders import settings, write_results, write_runs

from megaenc.finetune.examples import TaskFamily
from megaenc.study.report import command as report_command
from megaenc.study.report import output_dir
from megaenc.study.report.command import ReportConfig, build_report
from megaenc.study.report.html import GENERATOR_TAG
from megaenc.study.results.evidence import AVERAGE
from megaenc.study.results.published import DATASET_NAMES, parse_model_key, read_published_rows

MANIFEST = """
title: A study of <five> shares
sizes: {mini: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4, num_query_groups: 2}}
pretrain: {seq_length: 128, global_batch_size: 16, lr_warmup_iters: 10, lr_wsd_decay_iters: 10}
corpus: {demo: true, vocab_size: 4096}
models:
  - {size: mini, steps: 300, clm_share: [0, 0.25, 0.5, 0.75, 1], mask: 0.4}
finetune: {datasets: [demo_sc, demo_qa], learning_rates: [2e-4, 1e-3], seeds: 3}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Results and runs of the models of the manifest, and what was noted beside them."""
    root = tmp_path_factory.mktemp("study")
    models = {name: one for name, one in settings().items() if one.decayed and one.steps == 300 and one.mask_ratio != 0.2}
    write_results(root / "results", models)
    write_runs(root / "runs", models)
    (root / "study.yaml").write_text(MANIFEST)
    (root / "study.json").write_text(json.dumps({"hardware": "two cores", "commit": "1a2b3c"}))
    return root


def test_every_published_cell_comes_back_from_result_files(tmp_path):
    published_tree.write(tmp_path / "results", examples=0)
    report = build_report(ReportConfig(results=str(tmp_path / "results")))
    made = {}
    for line in csv.DictReader(io.StringIO(report.scores)):
        made[tuple(list(line.values())[:8])] = (line["mean"], line["ci95"])
    cells = 0
    for row in read_published_rows():
        expected = (row["mean"], row["ci95"])
        if DATASET_NAMES[row["dataset"]] == AVERAGE and not published_tree.reachable(
            parse_model_key(row), TaskFamily(row["task"])
        ):
            continue  # no five scores of three sets have this average: what was rounded cannot be undone
        assert made[tuple(list(row.values())[:8])] == expected, row
        cells += 1
    assert cells == 800
    assert list(report.notices) == ["Reproduces 736 of 736 printed cells."]  # 64 stand in two tables
    [base] = [table for table in report.tables if table.key == "base"]
    pairs = list(zip(base.rows[::2], base.rows[1::2], strict=True))
    assert len(pairs) == 15 and all(theirs.light and theirs.cells[:3] == ours.cells[:3] for ours, theirs in pairs)
    assert sum(ours.cells[4:7] == theirs.cells[4:7] for ours, theirs in pairs) == 15
    drawn = [one.figure.key for one in report.figures if bool(one.figure.panels)]
    assert "learning-rates" in drawn and "efficiency-flops" in drawn
    assert {one.claim: one.verdict for one in report.published}[4] == "holds"


def test_the_printed_tables_alone(capsys):
    report = build_report(ReportConfig(published=True))
    assert [table.key for table in report.tables] == ["base", "efficiency", "pfs", "cpt"] and not report.published
    assert sum(bool(one.figure.panels) for one in report.figures) == 6
    assert "arXiv 2507.00994" in dict(report.facts)["Numbers"]


def test_a_study_with_its_manifest_is_written_whole(study, tmp_path, monkeypatch, capsys):
    output = tmp_path / "report"
    for name in ("tables", "figures"):
        (output / name).mkdir(parents=True)
        for file in ("of-before.csv", "own.csv", "notes.txt", ".of-before.csv.1-0a1b2c3d.tmp", ".own.csv.1-0a1b2c3d.tmp"):
            (output / name / file).touch()
    (output / "index.html").write_text(f"<head>{GENERATOR_TAG}</head>")
    (output / "files.txt").write_text(
        "# written by megaenc study report\ntables/of-before.csv\nfigures/of-before.csv\n../outside.csv\ntables/notes.txt\n"
    )
    (tmp_path / "outside.csv").touch()
    # One figure stands for all: the others are drawn by the same lines.
    every = report_command.build_figures
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [every(*given)[0], every(*given)[-1]])
    flags = [f"{study}/study.yaml", "--results", f"{study}/results", "--runs", f"{study}/runs", "--output", str(output)]
    report_command.main([*flags, "--about", "date=2026-11-22"])
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith(f"2 figures in {output}/figures, page: {output}/index.html")
    assert said[-15].startswith("1a MLM is above CLM on SC: ")
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert {"tables/base.csv", "tables/pfs.tex", "tables/pfs-standard.md", "tables/variance.csv", "tables/scores.csv"} <= files
    assert {"figures/objectives.png", "figures/objectives.svg", "figures/losses.png", "index.html"} <= files
    assert not [name for name in files if "of-before" in name] and (tmp_path / "outside.csv").exists()
    own = ("own.csv", "notes.txt", ".own.csv.1-0a1b2c3d.tmp")
    kept = {f"{name}/{file}" for name in ("tables", "figures") for file in own}
    assert kept <= files  # what somebody else put there
    assert set((output / "files.txt").read_text().splitlines()[1:]) == files - kept - {"index.html", "files.txt"}
    text = (output / "index.html").read_text()
    assert "<h1>A study of &lt;five&gt; shares</h1>" in text and str(study) not in text and "/made/elsewhere" not in text
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert facts["Hardware"] == "two cores" and facts["Date"] == "2026-11-22" and facts["Commit"] == "1a2b3c"
    assert facts["Models"] == "5 evaluated of 5 planned" and facts["Fine-tuning"] == "60 results, 0 failed runs"
    assert facts["Learning rates"] == "2e-04, 1e-03" and facts["Fine-tuning seeds"] == "0, 1, 2"
    assert facts["Pretraining"].startswith("5 runs, 1,050 steps") and facts["Software"] == "megaenc 0.1.0"
    assert facts["Time in fine-tuning"] == "0.1 hours, evaluation included"
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    report_command.main([*flags, "--about", "date=2026-11-22"])
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_a_study_that_is_half_done_says_so(study, tmp_path):
    """One model has fewer rates, another one fewer seeds at each, a third was never evaluated: none looks like a whole one."""
    shutil.copytree(study / "results", tmp_path / "results")
    for model, left in (("mini-mlm40-300", "lr1e-03_sd*"), ("mini-clm-300", "*_sd2")):
        for path in (tmp_path / "results" / model / "SC/demo_sc").glob(left):
            shutil.rmtree(path)
    shutil.rmtree(tmp_path / "results/mini-clm-150-mlm40-300")
    report = build_report(ReportConfig(manifest=f"{study}/study.yaml", results=f"{tmp_path}/results"))
    cells = {row.name: row.cells for table in report.tables if table.key == "base" for row in table.rows}
    assert cells["mini-mlm40-300"][3].endswith(" [3/6]") and not cells["mini-mlm40-300"][4].endswith("]")
    assert cells["mini-clm-300"][3] is None and cells["mini-clm-300"][4] is not None
    assert report.missing_scores == (
        "No score yet, which needs a learning rate with every seed finished: mini-clm-300 (SC demo_sc: 4 of 6 runs ended). "
        "No run yet: mini-clm-150-mlm40-300."
    )
    assert dict(report.facts)["Models"] == "4 evaluated of 5 planned"
    assert not report.notices and not {"missing-results", "reproduction"} & {table.key for table in report.tables}
    assert report.verdicts[0].verdict == "no data"  # CLM has no score there, and nothing else stands for it


def test_results_outside_of_the_manifests_grid_are_left_out(study, tmp_path):
    (tmp_path / "fewer.yaml").write_text(MANIFEST.replace("seeds: 3", "seeds: 2"))
    report = build_report(ReportConfig(manifest=f"{tmp_path}/fewer.yaml", results=f"{study}/results"))
    assert dict(report.facts)["Fine-tuning"].endswith("20 with rates or seeds that the manifest does not plan are left out")
    assert dict(report.facts)["Fine-tuning seeds"] == "0, 1"
    assert {line["finetuning_seeds"] for line in csv.DictReader(io.StringIO(report.scores))} == {"2"}


def test_a_folder_that_no_report_wrote_is_left_alone(tmp_path, refusal):
    site = tmp_path / "site"
    for name in ("index.html", "thesis.tex", "figures/photo.png", "tables/raw.csv", "tables/base.csv"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("my own")

    def refused(*names):
        (tmp_path / "copy").mkdir()
        for name in names:
            (tmp_path / "copy" / name).parent.mkdir(exist_ok=True)
            (tmp_path / "copy" / name).write_text((site / name).read_text())
        said = refusal(report_command.main, ["--published", "--output", tmp_path / "copy"])
        assert all((tmp_path / "copy" / name).read_text() == (site / name).read_text() for name in names)
        shutil.rmtree(tmp_path / "copy")
        return said

    assert "contains figures and no report" in refused("index.html", "thesis.tex", "figures/photo.png", "tables/raw.csv")
    assert "contains tables and no report" in refused("tables/raw.csv")
    (site / "files.txt").write_text("my own list\n")
    assert "contains files.txt and no report" in refused("files.txt")
    (site / "index.html").write_text(GENERATOR_TAG)
    assert "contains files.txt and no report" in refused("index.html", "files.txt")
    (site / "files.txt").write_text("# written by megaenc study report\ntables/raw.csv\n")
    assert "contains tables/base.csv, which no report wrote" in refused("index.html", "files.txt", "tables/base.csv")


LINKS = {
    "the folder itself": lambda report, outside: (shutil.rmtree(report), report.symlink_to(outside)),
    "the folder itself, leading nowhere": lambda report, outside: (shutil.rmtree(report), report.symlink_to(outside / "none")),
    "tables": lambda report, outside: (shutil.rmtree(report / "tables"), (report / "tables").symlink_to(outside)),
    "figures": lambda report, outside: (shutil.rmtree(report / "figures"), (report / "figures").symlink_to(outside)),
    "the page": lambda report, outside: (
        (report / "index.html").unlink(),
        (report / "index.html").symlink_to(outside / "base.csv"),
    ),
    "the list": lambda report, outside: (
        (report / "files.txt").rename(outside / "list.txt"),
        (report / "files.txt").symlink_to(outside / "list.txt"),
    ),
    "a file that is replaced, by a folder": lambda report, outside: (
        (report / "tables/base.csv").unlink(),
        (report / "tables/base.csv").mkdir(),
    ),
    "a file that is replaced, by a link": lambda report, outside: (
        (report / "tables/base.csv").unlink(),
        (report / "tables/base.csv").symlink_to(outside / "base.csv"),
    ),
    "the page, by a FIFO": lambda report, outside: ((report / "index.html").unlink(), os.mkfifo(report / "index.html")),
    "the list, by a FIFO": lambda report, outside: ((report / "files.txt").unlink(), os.mkfifo(report / "files.txt")),
}
"""Things that stand in the place of an old report's folders and files; `outside` holds files of the same names."""


@pytest.fixture(scope="module")
def old_report(tmp_path_factory):
    """A report of the published tables, without figures, with a list that names more than it wrote."""
    folder = tmp_path_factory.mktemp("old") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_command, "build_figures", lambda *given: [])
        report_command.main(["--published", "--output", str(folder)])
    (folder / "tables/stale.csv").write_text("stale")
    hostile = (
        "../outside/victim.csv",
        "tables/../../outside/victim.csv",
        "/etc/hostname",
        "tables/stale.csv",
        "tables",
        "figures",
    )
    with open(folder / "files.txt", "a") as stream:
        stream.write("".join(f"{name}\n" for name in hostile))
    return folder


@pytest.mark.parametrize("changed", LINKS)
def test_nothing_outside_of_the_report_is_changed(changed, old_report, tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [])
    report, outside = tmp_path / "report", tmp_path / "outside"
    shutil.copytree(old_report, report)
    shutil.copytree(old_report / "tables", outside)
    (outside / "victim.csv").touch()
    LINKS[changed](report, outside)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    assert "--output" in refusal(report_command.main, ["--published", "--output", report])
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


def test_a_list_that_names_other_files_removes_none_of_them(old_report, tmp_path, monkeypatch):
    monkeypatch.setattr(report_command, "build_figures", lambda *given: [])
    report, outside = tmp_path / "report", tmp_path / "outside"
    shutil.copytree(old_report, report)
    outside.mkdir()
    (outside / "victim.csv").touch()
    report_command.main(["--published", "--output", str(report)])
    assert (outside / "victim.csv").exists() and not (report / "tables/stale.csv").exists()


def test_a_subfolder_that_becomes_a_link_meanwhile_is_left_alone(old_report, tmp_path):
    """Removal does not follow a link that was put there after the check."""
    outside = tmp_path / "outside"
    shutil.copytree(old_report / "tables", outside)
    (tmp_path / "tables").symlink_to(outside)
    output_dir._unlink_files(tmp_path / "tables", [tmp_path / "tables/stale.csv"])
    assert (outside / "stale.csv").exists()


PLACES = {
    "a name of 300 letters": lambda folder: folder / ("x" * 300),
    "below /proc": lambda folder: "/proc/x/report",
    "below a file": lambda folder: folder / "file/report",
    "a file": lambda folder: folder / "file",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(place, tmp_path, monkeypatch, refusal):
    monkeypatch.setattr(report_command, "build_report", lambda settings: pytest.fail("the work was begun"))
    (tmp_path / "file").write_text("mine")
    assert "--output" in refusal(report_command.main, ["--published", "--output", PLACES[place](tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_a_refused_report_leaves_no_folder(tmp_path, refusal):
    (tmp_path / "kept").mkdir()
    for output in ("new/deep/report", "kept/report", "kept"):
        refusal(report_command.main, ["--results", tmp_path / "none", "--output", tmp_path / output])
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]


def test_intervals_of_student_are_wider(study):
    given = {"manifest": f"{study}/study.yaml", "results": f"{study}/results"}
    halves = []
    for kind in ("normal", "t"):
        report = build_report(ReportConfig(**given, interval=kind))
        [line, *_] = csv.DictReader(io.StringIO(report.scores))
        halves.append(float(line["ci95"]))
    assert halves[1] == pytest.approx(halves[0] * 4.303 / 1.96, rel=0.02)
    assert not next(one.figure for one in report.figures if one.figure.key == "losses").panels


def test_wrong_input_is_one_line(study, tmp_path, refusal):
    def said(*flags):
        return refusal(report_command.main, flags)

    assert "--results: missing, expected a results directory (or --published" in said("--output", tmp_path / "r")
    assert "--published: found together with results; it reports the published tables only" in said(
        "--published", "--results", study
    )
    assert "holds no results" in said("--results", tmp_path, "--output", tmp_path / "r")
    assert "--about hardware: expected NAME=TEXT" in said("--results", study / "results", "--about", "hardware")
    (tmp_path / "notes.txt").touch()
    assert "contains notes.txt and no report" in said("--published", "--output", tmp_path)
    assert "is a file, expected a directory" in said("--published", "--output", tmp_path / "notes.txt")
    (tmp_path / "other.yaml").write_text(MANIFEST.replace("mini", "tiny"))
    line = said(tmp_path / "other.yaml", "--results", study / "results", "--output", tmp_path / "r")
    assert "found models mini-clm-150-mlm40-300" in line and "expected those of" in line and "tiny-mlm40-300" in line
    (tmp_path / "rates.yaml").write_text(MANIFEST.replace("[2e-4, 1e-3]", "[3e-4]"))
    line = said(tmp_path / "rates.yaml", "--results", study / "results", "--output", tmp_path / "r")
    assert "found rates 2e-04, 1e-03 with seeds 0, 1, 2, expected some of the grid of" in line and ": rates 3e-04 with" in line
    assert not (tmp_path / "r").exists()
