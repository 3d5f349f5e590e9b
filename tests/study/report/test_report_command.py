"""`megaenc study report` from end to end: tables alone, and a study of one's own."""

import csv
import io
import itertools
import json
import re
import shutil

import numpy as np
import pytest
from study_directories import RATES, SEEDS, settings, write_result, write_results, write_runs

from megaenc.finetune.results.files import read_result_tree
from megaenc.finetune.results.summary import PAPER_METRIC, build_summary, format_interval
from megaenc.study.report import command as report_command
from megaenc.study.report import output_dir
from megaenc.study.report.command import ReportConfig, build_report
from megaenc.study.results.groups import METRIC_LABELS

MANIFEST = """
title: A study of <five> shares
sizes:
  mini: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_attention_heads: 4,
         num_query_groups: 2}
pretrain: {seq_length: 128, global_batch_size: 16, lr_warmup_iters: 10, lr_wsd_decay_iters: 10}
corpus: {demo: true, vocab_size: 4096}
models:
  - {size: mini, steps: 300, clm_share: [0, 0.25, 0.5, 0.75, 1], mask: 0.4}
finetune: {datasets: [demo_sc, demo_qa], learning_rates: [2e-4, 1e-3], seeds: 3}
"""
LIST = "# written by megaenc study report\n"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Results and runs of the models of the manifest, and what was noted beside them."""
    root = tmp_path_factory.mktemp("study")
    models = {
        name: key
        for name, key in settings().items()
        if key.decayed and key.steps == 300 and key.mask_ratio != 0.2
    }
    write_results(root / "results", models)
    write_runs(root / "runs", models)
    (root / "study.yaml").write_text(MANIFEST)
    (root / "study.json").write_text(json.dumps({"hardware": "two cores", "commit": "1a2b3c"}))
    return root


def content(directory) -> dict:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_the_printed_tables_alone():
    report = build_report(ReportConfig(published=True))
    assert [table.key for table in report.tables] == [
        "base",
        "efficiency",
        "pfs",
        "cpt",
    ] and not report.published
    assert "arXiv 2507.00994" in dict(report.facts)["Numbers"]


def test_a_study_with_its_manifest_is_written_whole(study, tmp_path, monkeypatch, capsys):
    output = tmp_path / "report"
    kept = set()
    for name in ("tables", "figures"):
        (output / name).mkdir(parents=True)
        for file in ("of-before.csv", "own.csv", "notes.txt"):
            (output / name / file).touch()
        kept |= {f"{name}/own.csv", f"{name}/notes.txt"}  # what somebody else put there
    (output / "files.txt").write_text(
        f"{LIST}tables/of-before.csv\nfigures/of-before.csv\n../outside.csv\ntables/notes.txt\n"
    )
    (tmp_path / "outside.csv").touch()
    # One figure stands for all: the others are drawn by the same lines.
    build_all = report_command.build_figures
    monkeypatch.setattr(
        report_command,
        "build_figures",
        lambda *given: [build_all(*given)[0], build_all(*given)[-1]],
    )
    flags = [
        f"{study}/study.yaml",
        "--results",
        f"{study}/results",
        "--runs",
        f"{study}/runs",
        "--output",
        str(output),
    ]
    report_command.main([*flags, "--about", "date=2026-11-22"])
    said = capsys.readouterr().out.splitlines()
    assert said[-1].endswith(f"2 figures in {output}/figures, page: {output}/index.html")
    assert said[-15].startswith("1a MLM is above CLM on SC: ")
    before = content(output)
    files = set(before)
    assert {
        "tables/base.csv",
        "tables/pfs.tex",
        "tables/pfs-standard.md",
        "tables/variance.csv",
        "tables/scores.csv",
    } <= files
    assert {
        "figures/objectives.png",
        "figures/objectives.svg",
        "figures/losses.png",
        "index.html",
    } <= files
    assert (
        kept <= files
        and (tmp_path / "outside.csv").exists()
        and not [name for name in files if "of-before" in name]
    )
    assert set((output / "files.txt").read_text().splitlines()[1:]) == files - kept - {
        "index.html",
        "files.txt",
    }
    text = (output / "index.html").read_text()
    assert (
        "<h1>A study of &lt;five&gt; shares</h1>" in text
        and str(study) not in text
        and "/made/elsewhere" not in text
    )
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert (
        facts["Hardware"] == "two cores"
        and facts["Date"] == "2026-11-22"
        and facts["Commit"] == "1a2b3c"
    )
    assert (
        facts["Models"] == "5 evaluated of 5 planned"
        and facts["Fine-tuning"] == "60 results, 0 failed runs"
    )
    assert facts["Learning rates"] == "2e-04, 1e-03" and facts["Fine-tuning seeds"] == "0, 1, 2"
    assert facts["Time in pretraining"] == f"{1050 * 2 / 3600:.2f} hours in training steps"
    assert (
        facts["Pretraining"].startswith("5 runs, 1,050 steps, 1.05M tokens")
        and facts["Software"] == "megaenc 0.1.0"
    )
    assert facts["Time in fine-tuning"] == "0.1 hours, evaluation included"
    report_command.main([*flags, "--about", "date=2026-11-22"])
    assert content(output) == before


def test_a_study_that_is_half_done_says_so(study, tmp_path):
    """One model has fewer seeds at each rate, another was never evaluated."""
    shutil.copytree(study / "results", tmp_path / "results")
    for path in (tmp_path / "results/mini-clm-300/SC/demo_sc").glob("*_sd2"):
        shutil.rmtree(path)
    shutil.rmtree(tmp_path / "results/mini-clm-150-mlm40-300")
    report = build_report(
        ReportConfig(manifest=f"{study}/study.yaml", results=f"{tmp_path}/results")
    )
    assert report.missing_scores == (
        "No score yet, which needs a learning rate with every seed finished: mini-clm-300 (SC "
        "demo_sc: 4 of 6 runs ended). "
        "No run yet: mini-clm-150-mlm40-300."
    )
    assert dict(report.facts)["Models"] == "4 evaluated of 5 planned"
    # CLM has no score there, and nothing else stands for it
    assert report.verdicts[0].verdict == "no data"


OTHER_TASKS = {
    "stsb": "regression",
    "sick": "regression",
    "tags": "multi_label",
    "mined": "reranking",
}


def test_other_tasks_are_in_the_tables_only(study, tmp_path):
    random = np.random.default_rng(0)
    shutil.copytree(study / "results", tmp_path / "results")
    for model in (tmp_path / "results").iterdir():
        for dataset, family in OTHER_TASKS.items():
            for rate, seed in itertools.product(RATES, range(SEEDS)):
                directory = model / family / dataset / f"lr{rate:.0e}_sd{seed}"
                if family == "regression":
                    pearson, spearman = random.uniform(-1, 0, size=2)
                    metrics = {"pearson": pearson, "spearman": spearman}
                elif family == "multi_label":
                    metrics = {"micro_f1": random.random(), "macro_f1": 0.1}
                else:
                    metrics = {"ndcg@10": random.random(), "mrr@10": 0.1}
                score = np.mean(list(metrics.values())[:2])
                baseline = {"score": 0.0, **dict.fromkeys(metrics, 0.0)}
                write_result(directory, score, metrics=metrics, baseline=baseline, scores_i=[])
    more = ", ".join(f"./{name}" for name in OTHER_TASKS)
    (tmp_path / "study.yaml").write_text(MANIFEST.replace("demo_qa", f"demo_qa, {more}"))

    before, after = (
        build_report(
            ReportConfig(
                manifest=f"{root}/study.yaml", results=f"{root}/results", runs=f"{study}/runs"
            )
        )
        for root in (study, tmp_path)
    )
    assert repr(after.verdicts) == repr(before.verdicts)
    assert repr(after.figures) == repr(before.figures)
    assert set(before.scores.splitlines()) < set(after.scores.splitlines())
    assert dict(after.facts)["In tables only"].startswith("regression, multi_label, reranking: ")
    assert [table.key for table in after.tables] == [table.key for table in before.tables]

    def cells_of(report) -> dict:
        return {
            (table.key.endswith("-standard"), row.name, column.group, column.name): cell
            for table in report.tables
            if table.key.startswith(("base", "pfs"))
            for row in table.rows
            for column, cell in zip(table.columns, row.cells, strict=True)
            if column.group and not row.light
        }

    cells = cells_of(after)
    shared = cells_of(before)
    assert shared == {place: cells[place] for place in shared}
    rows = build_summary(read_result_tree(tmp_path / "results")).rows
    expected = {}
    for row in rows:
        if row.family in OTHER_TASKS.values():
            is_standard = row.metric != PAPER_METRIC
            metric = METRIC_LABELS.get(row.metric, row.metric)
            group = f"{row.family}, {metric}" if is_standard else row.family
            dataset = "Average" if row.dataset.startswith("average") else row.dataset
            place = (is_standard, row.model, group, dataset)
            expected[place] = format_interval(row.mean, row.half)
    assert expected == {place: cells[place] for place in cells.keys() - shared.keys()}
    assert any(cell.startswith("-") for cell in expected.values())


def test_results_outside_of_the_manifests_grid_are_left_out_and_students_intervals_are_wider(
    study, tmp_path
):
    (tmp_path / "fewer.yaml").write_text(MANIFEST.replace("seeds: 3", "seeds: 2"))
    halves = []
    for kind in ("normal", "t"):
        report = build_report(
            ReportConfig(
                manifest=f"{tmp_path}/fewer.yaml", results=f"{study}/results", interval=kind
            )
        )
        rows = list(csv.DictReader(io.StringIO(report.scores)))
        assert {row["finetuning_seeds"] for row in rows} == {"2"}
        halves.append(float(rows[0]["ci95"]))
    assert halves[1] == pytest.approx(halves[0] * 12.71 / 1.96, rel=0.02)
    assert dict(report.facts)["Fine-tuning"].endswith(
        "20 with rates or seeds that the manifest does not plan are left out"
    )
    assert dict(report.facts)["Fine-tuning seeds"] == "0, 1"


FOREIGN = [
    # what is in the directory besides tables/base.csv, and what is said
    ({"index.html": "my own", "figures/photo.png": "my own"}, "contains figures and no report"),
    ({"files.txt": "my own list\n"}, "contains files.txt and no report"),
    ({"files.txt": f"{LIST}tables/raw.csv\n"}, "contains tables/base.csv, which no report wrote"),
]


@pytest.mark.parametrize(("files", "words"), FOREIGN)
def test_a_directory_that_no_report_wrote_is_left_alone(files, words, tmp_path, refusal):
    for name, text in {"tables/base.csv": "my own", **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = content(tmp_path)
    assert words in refusal(report_command.main, ["--published", "--output", tmp_path])
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["", "tables", "index.html"])
def test_links_are_refused(name, tmp_path, refusal):
    report = tmp_path / "report"
    outside = tmp_path / "outside"
    for directory in (report, outside):
        (directory / "tables").mkdir(parents=True)
        (directory / "index.html").touch()
        (directory / "files.txt").write_text(LIST)
    (report / name).rename(tmp_path / "moved")
    (report / name).symlink_to(outside / name)
    before = content(outside)
    assert "found a link" in refusal(report_command.main, ["--published", "--output", report])
    assert content(outside) == before


def test_a_list_that_names_other_files_removes_none_of_them(tmp_path):
    for name in ("report/tables", "outside"):
        (tmp_path / name).mkdir(parents=True)
    names = ["outside/base.csv", "report/notes.csv", "report/tables/stale.csv"]
    for name in names:
        (tmp_path / name).touch()
    listed = [
        "../outside/base.csv",
        "tables/../notes.csv",
        f"{tmp_path}/outside/base.csv",
        "tables/stale.csv",
        "tables",
    ]
    (tmp_path / "report/files.txt").write_text(LIST + "\n".join(listed))
    output_dir.remove_stale_files(
        tmp_path / "report", output_dir.check_report_dir(tmp_path / "report"), []
    )
    assert [(tmp_path / name).exists() for name in names] == [True, True, False]


def test_results_of_other_models_or_rates_than_the_manifests_are_one_line(study, tmp_path, refusal):
    flags = [tmp_path / "other.yaml", "--results", study / "results", "--output", tmp_path / "r"]
    (tmp_path / "other.yaml").write_text(MANIFEST.replace("mini", "tiny"))
    line = refusal(report_command.main, flags)
    assert (
        "found models mini-clm-150-mlm40-300" in line
        and "expected those of" in line
        and "tiny-mlm40-300" in line
    )
    (tmp_path / "other.yaml").write_text(MANIFEST.replace("[2e-4, 1e-3]", "[3e-4]"))
    line = refusal(report_command.main, flags)
    assert (
        "found rates 2e-04, 1e-03 with seeds 0, 1, 2, expected some of the grid of" in line
        and ": rates 3e-04 with" in line
    )
    assert not (tmp_path / "r").exists()
