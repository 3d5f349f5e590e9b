"""Files of flags and manifests that come with the package, found by name."""

import os
from pathlib import Path

import pytest

from megaenc.errors import InputError
from megaenc.flags import find_config_file, list_packaged_files, suggest_config_names
from megaenc.study.manifest.schema import read_manifest
from megaenc.training.config import read_config_file

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """Be in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_every_file_has_a_name():
    names = {str(path.relative_to(CONFIGS))[: -len(".yaml")] for path in CONFIGS.rglob("*.yaml")}
    assert set(list_packaged_files()) == names and "recipes/tiny/modernbert" in names


@pytest.mark.parametrize("name", ["study/mini", "configs/study/mini.yaml", "configs/study/mini"])
def test_a_name_and_the_path_in_a_clone_name_the_same_file(name):
    assert find_config_file(name).samefile(CONFIGS / "study/mini.yaml")


@pytest.mark.parametrize(
    "name", ["mini", "study/mini.yaml", "../configs/study/mini.yaml", "study/", "\0", "x" * 5000]
)
def test_other_names_are_paths(name):
    assert find_config_file(name) == Path(name)


@pytest.mark.parametrize("name", ["recipes/modernbert", "configs/recipes/modernbert.yaml"])
def test_a_file_wins_and_a_directory_does_not(name):
    os.makedirs(name)
    assert read_config_file(name).model == "modernbert-base"
    os.rmdir(name)
    write(name, "model: tiny")
    assert read_config_file(name).model == "tiny"


def test_a_packaged_file_builds_on_packaged_ones():
    write("configs/recipes/modernbert.yaml", "seed: 99")
    settings = read_config_file("recipes/tiny/modernbert")
    assert (settings.shape.hidden_size, settings.seed) == (128, 17)


def test_a_file_of_the_user_builds_on_a_packaged_one():
    write("mine/run.yaml", "config: recipes/neobert\nseed: 3")
    settings = read_config_file("mine/run.yaml")
    assert (settings.model, settings.seed) == (read_config_file("recipes/neobert").model, 3)
    write("mine/recipes/neobert", "model: tiny")
    assert read_config_file("mine/run.yaml").model == "tiny"


def test_other_paths_of_packaged_files_start_in_the_current_directory(directory):
    write("core/encoder/config.yaml", "model: tiny\nvocab_size: 77")
    assert read_config_file("recipes/dapt").shape.vocab_size == 77
    assert read_manifest("study/small").data_dir == directory
    write("a/study.yaml", (CONFIGS / "study/small.yaml").read_text())
    assert read_manifest("a/study.yaml").data_dir == directory / "a"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("modernbert", "; did you mean `recipes/modernbert` or `recipes/tiny/modernbert`?"),
        ("mini.yaml", "; did you mean `study/mini`?"),
        ("study/minni", "; did you mean `study/mini`?"),
        ("nothing/like/it", "; `megaenc --help` lists the packaged files"),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(name, hint):
    assert suggest_config_names(name) == hint
    with pytest.raises(InputError) as error:
        read_config_file(name)
    assert str(error.value) == (
        f"--config {name}: No such file or directory; expected a YAML file of flags{hint}"
    )
