"""What a plan says of data sets without opening them is what fine-tuning finds and writes."""

import gzip

import pytest

from megaenc.errors import InputError
from megaenc.finetune.datasets import registry
from megaenc.finetune.datasets.local import DatasetConfig
from megaenc.finetune.grid.command import GridConfig
from megaenc.study.manifest.training_sets import dataset_result_name, plan_training_sets, resolve_dataset_path


@pytest.fixture
def data(tmp_path):
    """A folder with one file of labelled text, two small retrieval sets, and a link to one."""
    sets = tmp_path / "sets"
    sets.mkdir()
    with gzip.open(sets / "mine.jsonl.gz", "wt") as file:
        file.write('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n' * 20)
    texts = "".join(f'{{"_id": "{at}", "text": "text {at}"}}\n' for at in range(30))
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"{at}\t{at}\t1\n" for at in range(30))
    for name in ("one", "two"):
        (sets / name / "qrels").mkdir(parents=True)
        for file in ("corpus.jsonl", "queries.jsonl"):
            (sets / name / file).write_text(texts)
        for file in ("train.tsv", "test.tsv"):
            (sets / name / "qrels" / file).write_text(judged)
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
        resolve_dataset_path(dataset, data), train_on=resolve_dataset_path(train_on, data) if train_on else ""
    )
    assert (planned.datasets, planned.train_on) == ((training_sets.name,), training_sets.train_on)
    assert (
        planned.family in ("", training_sets.family)
        and dataset_result_name(resolve_dataset_path(dataset, data)) == training_sets.name
    )


def test_a_revision_of_the_hub_is_no_part_of_the_name(data):
    assert [one.datasets for one in plan_training_sets(GridConfig(datasets=("sst2@main",)), data)] == [("sst2",)]
    assert resolve_dataset_path("sst2@main", data) == "sst2@main"


def test_a_demo_set_can_be_trained_for_on_other_pairs(data):
    flags = DatasetConfig(train_on="sets/two")
    training_sets = plan_training_sets(GridConfig(datasets=("demo_sc", "demo_ir"), data=flags), data)
    assert [(one.datasets, one.family, one.train_on) for one in training_sets] == [
        (("demo_sc",), "SC", "demo_sc"),
        (("demo_ir",), "IR", "two"),
    ]


def test_a_training_set_has_one_family(data):
    flags = DatasetConfig(train_on="sst2=sets/two")
    with pytest.raises(InputError, match="found sst2 as a training set of 2 task families"):
        plan_training_sets(GridConfig(datasets=("sst2", "demo_ir"), data=flags), data)


def test_a_path_may_not_be_there_yet(data):
    assert [one.datasets for one in plan_training_sets(GridConfig(datasets=("later=sets/x", "sets/y")), data)] == [
        ("later",),
        ("y",),
    ]
