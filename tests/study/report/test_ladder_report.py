"""The report on a ladder: planted laws are found, and earlier points are read."""

import csv
import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from manifests import write
from run_directories import write_rows

from megaenc.errors import InputError
from megaenc.study.manifest.ladder import TRIED_RATES, count_parameters
from megaenc.study.manifest.schema import read_manifest
from megaenc.study.plan.training_cost import compute_training_cost
from megaenc.study.report.command import ReportConfig, build_report, write_report
from megaenc.study.report.ladder import build_ladder_tables, fit_ladder
from megaenc.study.results.evidence import Evidence
from megaenc.study.results.ladder import LadderRun, read_ladder_runs
from megaenc.study.results.pretrain_runs import read_runs

PPL = "pseudo_perplexity(passes=8)"
MASKED = "mlm(mask=0.15)"
LAWS = {
    "CLM": (1.7, 400.0, 410.0, 0.34, 0.28),
    "MLM 30 %": (1.6, 500.0, 900.0, 0.33, 0.30),
    "25 % CLM, then MLM 30 %": (1.6, 480.0, 700.0, 0.33, 0.29),
}
"""E, A, B, alpha and beta of each objective."""
MANIFEST = {
    "sizes": None,
    "models": None,
    "finetune": None,
    "pretrain": {"seq_length": 128, "untie_embeddings_and_output_weights": False},
    "corpus": {"demo": True, "vocab_size": 4096},
    "ladder": {
        "depths": [2, 3, 4, 6, 8, 12],
        "budgets": [1e15, 1e16, 1e17],
        "objectives": [{"clm_share": 1.0}, {"mask": 0.3}, {"clm_share": 0.25, "mask": 0.3}],
        "seeds": 2,
        "rate_factors": [0.5, 2],
    },
}


def recipe(model) -> str:
    """Return the label of a planned model's objective."""
    if model.key.clm_share == 1:
        return "CLM"
    return "25 % CLM, then MLM 30 %" if model.key.clm_steps else "MLM 30 %"


def loss_of(model, tokens: float) -> float:
    """Return the planted loss of a planned model, with noise of 0.2 %."""
    floor, size_factor, data_factor, alpha, beta = LAWS[recipe(model)]
    parameters = count_parameters(model.config.shape, 4096)
    noise = np.random.default_rng([model.steps, model.key.seed, parameters]).normal()
    loss = floor + size_factor / parameters**alpha + data_factor / tokens**beta
    penalty = 0.1 if model.group == TRIED_RATES else 0.0
    return (loss + penalty) * np.exp(0.002 * noise)


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    """A manifest, and a finished run of each of its models with the planted loss."""
    root = tmp_path_factory.mktemp("ladder")
    plant(root, MANIFEST)
    return root


def plant(root, contents):
    """Write a manifest, and finished runs with planted losses; return the manifest."""
    manifest = read_manifest(write(root, **contents))
    for model in manifest.models:
        directory = root / "runs" / model.name
        directory.mkdir(parents=True)
        tokens = model.steps * model.config.global_batch_size * 128
        row = {
            "step": model.steps,
            "objective": model.schedule,
            "phase": 0,
            "loss": 3.0,
            "tokens": tokens,
            "flops": compute_training_cost(manifest, model, 0, model.steps).flops,
            "step_seconds": 3600 / model.steps,
            "learning_rate": 1e-3,
        }
        loss = loss_of(model, tokens)
        losses = {"clm": loss, MASKED: loss, PPL: 0.9 * loss}
        scores = {
            name: {"loss": value, "accuracy": 0.1, "most_frequent": 0.1}
            for name, value in losses.items()
        }
        write_rows(directory / "metrics.jsonl", [row])
        write_rows(directory / "validation.jsonl", [{"step": model.steps, "objectives": scores}])
        facts = {"megaenc": "0.1.0", "parameters": 1, "identity": {"lr": 1e-3}}
        (directory / "run.json").write_text(json.dumps(facts))
    return manifest


def read_table(page, key):
    """Return the rows of a table of a report as dictionaries by column."""
    [table] = [table for table in page.tables if table.key == key]
    names = [f"{column.group} {column.name}".strip() for column in table.columns]
    return [dict(zip(names, row.cells, strict=True)) for row in table.rows]


def interval(text: str) -> tuple[float, float, float]:
    """Return the estimate and the ends of a cell such as `0.3 (0.2 to 0.4)`."""
    estimate, _, rest = text.partition(" (")
    low, high = rest.removesuffix(")").split(" to ")
    return float(estimate), float(low), float(high)


@pytest.fixture(scope="module")
def page(ladder):
    config = ReportConfig(manifest=str(ladder / "study.yaml"), runs=str(ladder / "runs"))
    return build_report(config)


def test_planted_exponents_are_found(page):
    rows = read_table(page, "ladder-exponents")
    measures = {(row["Loss"], row["Objective"]) for row in rows}
    # CLM has its own loss only, the others those that both have
    assert measures == {("clm", "CLM")} | {
        (measure, name) for measure in (MASKED, PPL) for name in list(LAWS)[1:]
    }
    for row in rows:
        assert row["Runs"] == 18 + 3
        alpha, beta = LAWS[row["Objective"]][3:]
        for name, planted in (("alpha", alpha), ("beta", beta)):
            estimate, low, high = interval(row[f"L = E + A / N^alpha + B / D^beta {name}"])
            assert low - 0.01 <= planted <= high + 0.01
            assert abs(estimate - planted) < 0.06
        estimate, low, high = interval(row["a of optimal N ~ FLOPs^a law"])
        assert abs(estimate - beta / (alpha + beta)) < 0.06
        assert float(row["Residual (%)"]) < 0.3


def test_the_lower_objective_is_ahead(page):
    rows = read_table(page, "ladder-crossings")
    assert [row["Loss"] for row in rows] == [MASKED, PPL]
    for row in rows:
        assert row["Objectives"] == "MLM 30 % less 25 % CLM, then MLM 30 %"
        _, low, _ = interval(row["at the lowest FLOPs"])
        assert low > 0


def test_a_tried_rate_is_shown_beside_the_rules_and_not_fitted(page):
    rows = read_table(page, "ladder-rates")
    assert {row["Size"] for row in rows} == {"d2", "d4"}
    assert len(rows) == 2 * (1 + 2 + 2)
    for row in rows:
        cells = [row[f"peak rate over the rule's x {factor}"] for factor in ("0.5", "1", "2")]
        assert "lowest" in cells[1]
        assert float(cells[0]) - float(cells[1].split()[0]) > 0.05


def test_optimal_sizes_follow_from_the_law(page):
    for row in read_table(page, "ladder-optimum"):
        floor, size_factor, data_factor, alpha, beta = LAWS[row["Objective"]]
        scale = 0.9 if row["Loss"] == PPL else 1.0
        flops = float(row["FLOPs"])
        sizes = np.geomspace(1e5, 1e9, 2000)
        best = np.min(
            floor + size_factor / sizes**alpha + data_factor / (flops / 6 / sizes) ** beta
        )
        assert float(row["loss"]) == pytest.approx(scale * best, rel=0.05)


def test_the_page_of_a_ladder_alone(page, tmp_path):
    write_report(page, tmp_path / "report")
    text = (tmp_path / "report" / "index.html").read_text()
    for title in ("Scaling laws", "Loss over FLOPs", "IsoFLOP curves", "No claim was tested"):
        assert title in text
    assert (tmp_path / "report" / "figures" / "ladder-isoflop.svg").stat().st_size > 1000


def test_points_of_an_earlier_report_stand_in_for_runs(ladder, page, tmp_path):
    write_report(page, tmp_path / "first")
    points = tmp_path / "first" / "tables" / "ladder-points.csv"
    with open(points) as stream:
        assert len(list(csv.DictReader(stream))) == 63 + 12
    runs = tmp_path / "runs"
    for path in (ladder / "runs").glob("d[234]-*"):
        shutil.copytree(path, runs / path.name)
    # the runs of d12 are in the file only
    changed = MANIFEST["ladder"] | {"points": [str(points)], "depths": [2, 3, 4, 6, 8]}
    path = write(tmp_path, **MANIFEST | {"ladder": changed})
    again = build_report(ReportConfig(manifest=str(path), runs=str(runs)))
    for key in ("ladder-exponents", "ladder-rates"):
        assert read_table(again, key) == read_table(page, key)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Model,Objective\n", "found no column `Size`, expected tables/ladder-points.csv"),
        (None, "No such file or directory"),
    ],
)
def test_a_wrong_file_of_points(ladder, tmp_path, text, complaint):
    if text is not None:
        (tmp_path / "points.csv").write_text(text)
    path = write(tmp_path, **MANIFEST | {"ladder": MANIFEST["ladder"] | {"points": ["points.csv"]}})
    with pytest.raises(InputError, match=complaint):
        build_report(ReportConfig(manifest=str(path), runs=str(ladder / "runs")))


def test_a_loss_that_is_no_number(ladder, tmp_path):
    manifest = read_manifest(write(tmp_path, **MANIFEST))
    names = "Model,Objective,Size,Seed,Rate over the rule's,Fitted,Parameters,Tokens,FLOPs,Hours"
    (tmp_path / "points.csv").write_text(f"{names},clm\nd2,CLM,d2,1,1,yes,5,6,7,8,low\n")
    changed = MANIFEST["ladder"] | {"points": ["points.csv"]}
    manifest = read_manifest(write(tmp_path, **MANIFEST | {"ladder": changed}))
    with pytest.raises(InputError, match=r"points.csv, line 2: .*'low'; expected a number"):
        read_ladder_runs(manifest, {}, Evidence([]))


def test_labels_and_factors_do_not_depend_on_rounded_steps_and_rates(tmp_path):
    changes = {
        "objectives": [{"clm_share": 0.125, "mask": 0.3}, {"mask": 0.4, "rate_factor": 2}],
        "budgets": [1e13, 3e13],
        "rate_factors": [0.777],
    }
    manifest = plant(tmp_path, MANIFEST | {"ladder": MANIFEST["ladder"] | changes})
    shares = {model.key.clm_share for model in manifest.models}
    assert len(shares) > 2
    runs = read_ladder_runs(manifest, read_runs(tmp_path / "runs"), Evidence([]))
    assert {(run.objective, run.rate_factor) for run in runs} == {
        ("12.5 % CLM, then MLM 30 %", 1),
        ("12.5 % CLM, then MLM 30 %", 0.777),
        ("MLM 40 %", 2),
        ("MLM 40 %", 1.554),
    }


def test_losses_without_a_law_give_no_warning(recwarn):
    random = np.random.default_rng(0)
    sizes = [1e6, 2e6, 4e6]
    runs = [
        LadderRun(
            name=f"{size:g}-{flops:g}",
            objective="CLM",
            size=f"{size:g}",
            seed=1,
            rate_factor=1,
            is_fitted=True,
            parameters=size,
            tokens=flops / 6 / size,
            flops=flops,
            hours=1,
            losses={
                "clm": (1e3 / size**0.4 + 1e4 / (flops / size) ** 0.4) * random.uniform(0.5, 2)
            },
        )
        for size in sizes
        for flops in (1e15, 1e16, 1e17)
    ]
    tables = build_ladder_tables(runs, fit_ladder(runs))
    assert tables[-1].key == "ladder-points"
    assert not recwarn.list


def test_an_error_of_0_is_left_out(ladder):
    manifest = read_manifest(ladder / "study.yaml")
    runs = read_runs(ladder / "runs")
    evidence = Mock(spec=Evidence)
    evidence.datasets.return_value = [("SC", "demo_sc")]
    evidence.find.return_value.mean = 1.0
    assert "error on SC" not in read_ladder_runs(manifest, runs, evidence)[0].losses
    evidence.find.return_value.mean = 0.9
    error = read_ladder_runs(manifest, runs, evidence)[0].losses["error on SC"]
    assert error == pytest.approx(0.1)


def test_a_ladder_without_a_finished_run(ladder, tmp_path):
    shutil.copytree(next((ladder / "runs").glob("d2-mlm30-*")), tmp_path / "runs" / "d2-mlm30-9")
    for runs in ("", str(tmp_path / "runs")):
        with pytest.raises(InputError, match="--runs: found no finished run of the ladder of"):
            build_report(ReportConfig(manifest=str(ladder / "study.yaml"), runs=runs))


def test_a_study_without_a_ladder_needs_results(tmp_path):
    with pytest.raises(InputError, match="--results: missing"):
        build_report(ReportConfig(manifest=str(write(tmp_path))))


def test_too_few_runs_have_points_but_no_fit(ladder, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    for path in (ladder / "runs").glob("d2-mlm30-*"):
        shutil.copytree(path, runs / path.name)
    config = ReportConfig(manifest=str(ladder / "study.yaml"), runs=str(runs))
    page = build_report(config)
    assert any("No fit of MLM 30 %" in notice for notice in page.notices)
    assert read_table(page, "ladder-points")
