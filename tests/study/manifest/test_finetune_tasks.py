"""Data sets as a plan describes them unopened are those that fine-tuning reads."""

from dataclasses import replace

import pytest
import small_data

from megaenc.errors import InputError
from megaenc.finetune.config import FinetuneConfig
from megaenc.finetune.datasets import registry
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.grid.command import GridConfig
from megaenc.study.manifest.training_sets import (
    dataset_result_name,
    plan_training_sets,
    resolve_dataset_path,
)


@pytest.fixture
def data(tmp_path):
    """Return the path of labelled text, two small retrieval sets, a link to one."""
    sets = tmp_path / "sets"
    small_data.write_file(
        sets / "mine.jsonl.gz", 20 * [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    )
    judged = [(f"{at}", f"{at}", 1) for at in range(30)]
    texts = [f"{at}" for at in range(30)]
    files = small_data.beir_files(
        zip(texts, texts, texts, strict=True),
        zip(texts, texts, strict=True),
        train=judged,
        test=judged,
    )
    for name in ("one", "two"):
        small_data.write_files(sets / name, files)
    (sets / "latest").symlink_to("one")
    return tmp_path


@pytest.mark.parametrize(
    ("dataset", "train_on"),
    [
        ("named=sets/mine.jsonl.gz", ""),
        ("sets/latest", ""),
        ("ir=sets//one", "sets/two"),
        ("ir=sets/one", "pairs=sets/two"),
    ],
)
def test_names_are_those_that_fine_tuning_uses(dataset, train_on, data):
    flags = DatasetConfig(train_on=train_on)
    (planned,) = plan_training_sets(GridConfig(datasets=(dataset,), data=flags), data)
    training_sets = registry.find_dataset(
        resolve_dataset_path(dataset, data),
        train_on=resolve_dataset_path(train_on, data) if train_on else "",
    )
    assert (planned.datasets, planned.train_on) == ((training_sets.name,), training_sets.train_on)
    assert (
        planned.family in ("", training_sets.family)
        and dataset_result_name(resolve_dataset_path(dataset, data)) == training_sets.name
    )


def test_a_threshold_is_for_multi_label_data_only(tmp_path):
    small_data.write_splits(tmp_path / "rated", "jsonl", [{"text": "x", "label": 0.5}])
    small_data.write_splits(tmp_path / "topics", "jsonl", [{"text": "x", "labels": ["a", "b"]}])
    protocol = FinetuneConfig(threshold="auto")
    grid = GridConfig(datasets=("./topics", "later=./later"), protocol=protocol)
    names = [planned.train_on for planned in plan_training_sets(grid, tmp_path)]
    assert names == ["topics", "later"]
    message = "found auto, expected 0.5: ./rated is of the task regression, not multi_label"
    with pytest.raises(InputError, match=message):
        plan_training_sets(replace(grid, datasets=("./topics", "./rated")), tmp_path)


def test_a_training_set_has_one_family(data):
    flags = DatasetConfig(train_on="sst2=sets/two")
    with pytest.raises(InputError, match="found sst2 as a training set of 2 task families"):
        plan_training_sets(GridConfig(datasets=("sst2", "demo_ir"), data=flags), data)


def test_data_sets_have_names_of_their_own(tmp_path):
    with pytest.raises(InputError, match="found rated as the name of 2 data sets, expected one"):
        plan_training_sets(GridConfig(datasets=("a/rated", "./rated")), tmp_path)


@pytest.mark.parametrize(
    ("datasets", "train_on", "planned"),
    [
        # A revision of the Hub is no part of the name
        (
            ("sst2@main",),
            "",
            [("sst2", "SC", "sst2")],
        ),
        (
            ("demo_sc", "demo_ir"),
            "sets/two",
            [("demo_sc", "SC", "demo_sc"), ("demo_ir", "IR", "two")],
        ),
        # A path may not be there yet
        (
            ("later=sets/x", "sets/y"),
            "",
            [("later", "", "later"), ("y", "", "y")],
        ),
    ],
)
def test_sets_are_planned_with_family_and_pairs(datasets, train_on, planned, data):
    sets = plan_training_sets(
        GridConfig(datasets=datasets, data=DatasetConfig(train_on=train_on)), data
    )
    assert [(*one.datasets, one.family, one.train_on) for one in sets] == planned
    assert resolve_dataset_path("sst2@main", data) == "sst2@main"
