"""The tables that the package ships are the study's: whole, consistent with themselves, under the names of its artefacts."""

import tomllib
from pathlib import Path

from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.results.aggregate import STUDY_DATASETS
from megaenc.study.manifest.model_key import parse_model_name
from megaenc.study.results import published
from megaenc.study.results.evidence import AVERAGE


def test_all_cells_are_there_and_the_package_says_so():
    rows = published.read_published_rows()
    assert len(rows) == 800 and {row["setup"] for row in rows} == {"base", "efficiency", "pfs", "cpt"}
    found = published.published()
    assert len(found.model_keys()) == 46 and len(found.scores) == 46 * 16
    assert all(parse_model_name(one.model) == one.model_key for one in found.scores)
    packaged = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert packaged["megaenc.study.results"] == [published.TABLES]
    assert set(packaged["megaenc.study.report"]) == {"report.html.j2", "page.css"}


def test_averages_are_those_of_the_three_sets_in_the_order_of_the_study():
    found = published.published()
    expected = [(str(family), name) for family in TaskFamily for name in (*STUDY_DATASETS[family], AVERAGE)]
    assert found.datasets() == expected
    for setting in found.model_keys():
        for family in TaskFamily:
            means = [found.find(setting, dataset, family).mean for dataset in STUDY_DATASETS[family]]
            assert abs(sum(means) / 3 - found.find(setting, AVERAGE, family).mean) < 0.0001001  # each rounded to 0.0001
