import pytest
from small_data import write_splits

from megaenc.errors import InputError
from megaenc.finetune.datasets.registry import find_dataset


@pytest.fixture
def folder(tmp_path):
    write_splits(tmp_path / "films", "jsonl", [{"text": "good", "label": "yes"}])
    return tmp_path / "films"


@pytest.mark.parametrize("given, message", [
    ("sst-2", "unknown data set `sst-2`, expected one of sst2, qqp, .*; did you mean `sst2`?"),
    ("demo_sq", "did you mean `demo_sc`?"),
    ("qqqqq_zzzz", "unknown data set `qqqqq_zzzz`, expected one of .* NAME=PATH$"),
    ("/runs/nowhere",
     "data set /runs/nowhere: found no file or folder /runs/nowhere, expected one with labelled "
     "data"),
    ("films=nowhere", "data set films=nowhere: found no file or folder nowhere"),
])  # fmt: skip
def test_unknown_names(given, message):
    with pytest.raises(InputError, match=message):
        find_dataset(given)


def test_a_set_is_called_as_its_folder_or_as_is_said(folder, monkeypatch):
    assert find_dataset(str(folder)).name == "films"
    assert find_dataset(f"cinema={folder}").name == "cinema"
    monkeypatch.chdir(folder)
    assert find_dataset(".").name == "films"
    monkeypatch.chdir(folder.parent)
    assert find_dataset("films").name == "films"
    odd = folder.rename(folder.with_name("a=b c"))
    with pytest.raises(
        InputError,
        match=r"name 'a=b c': expected letters, digits and . _ - \(NAME=PATH gives it another\)",
    ):
        find_dataset(str(odd))
    assert find_dataset(f"x={odd}").name == "x"


def test_names_of_the_study_come_before_folders_of_that_name(folder, monkeypatch):
    folder.rename(folder.with_name("sst2"))
    monkeypatch.chdir(folder.parent)
    assert find_dataset("sst2").labels == ("negative", "positive") and find_dataset(
        "./sst2"
    ).labels == ("yes",)
    assert find_dataset("sst2=sst2").labels == ("yes",)
