import pytest
from small_data import write_splits

from megaenc.errors import InputError
from megaenc.finetune.datasets.registry import find_dataset


@pytest.fixture
def directory(tmp_path):
    write_splits(tmp_path / "films", "jsonl", [{"text": "good", "label": "yes"}])
    return tmp_path / "films"


@pytest.mark.parametrize("given, message", [
    ("sst-2", "unknown data set `sst-2`, expected one of sst2, qqp, .*; did you mean `sst2`?"),
    ("demo_sq", "did you mean `demo_sc`?"),
    ("qqqqq_zzzz", "unknown data set `qqqqq_zzzz`, expected one of .* NAME=PATH$"),
    ("/runs/nowhere",
     "data set /runs/nowhere: found no file or directory /runs/nowhere, expected one with labelled "
     "data"),
    ("films=nowhere", "data set films=nowhere: found no file or directory nowhere"),
])  # fmt: skip
def test_unknown_names(given, message):
    with pytest.raises(InputError, match=message):
        find_dataset(given)


def test_a_set_is_called_as_its_directory_or_as_is_said(directory, monkeypatch):
    assert find_dataset(str(directory)).name == "films"
    assert find_dataset(f"cinema={directory}").name == "cinema"
    monkeypatch.chdir(directory)
    assert find_dataset(".").name == "films"
    monkeypatch.chdir(directory.parent)
    assert find_dataset("films").name == "films"
    odd = directory.rename(directory.with_name("a=b c"))
    with pytest.raises(
        InputError,
        match=r"name 'a=b c': expected letters, digits and . _ - \(NAME=PATH gives it another\)",
    ):
        find_dataset(str(odd))
    assert find_dataset(f"x={odd}").name == "x"


def test_names_of_the_study_come_before_directories_of_that_name(directory, monkeypatch):
    directory.rename(directory.with_name("sst2"))
    monkeypatch.chdir(directory.parent)
    assert find_dataset("sst2").labels == ("negative", "positive") and find_dataset(
        "./sst2"
    ).labels == ("yes",)
    assert find_dataset("sst2=sst2").labels == ("yes",)
