"""Fingerprint of a model's directory: bytes of weights, read once while unchanged."""

import hashlib
import os

import pytest
from fake_runs import make_model

from megaenc.errors import InputError
from megaenc.finetune.model import fingerprint
from megaenc.finetune.model.fingerprint import (
    FINGERPRINT_FILE,
    check_model_directory,
    compute_model_fingerprints,
    save_fingerprints,
)


def compute_and_save(directories: list[str], results: str) -> list[str]:
    """The fingerprints, which are then also in `results`."""
    fingerprints = compute_model_fingerprints(directories, results)
    save_fingerprints(results)
    return fingerprints


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The directories whose weights were read, in order."""
    found = []
    digest = fingerprint._hash_files
    monkeypatch.setattr(
        fingerprint,
        "_hash_files",
        lambda directory, *more: found.append(directory.name) or digest(directory, *more),
    )
    return found


def test_weights_are_read_once(tmp_path, reads):
    directories = [str(make_model(tmp_path / name)) for name in ("one", "two")]
    first = compute_and_save(directories[:1], str(tmp_path))
    both = compute_and_save(directories, str(tmp_path))
    assert reads == ["one", "two"] and both[0] == first[0] != both[1]
    assert compute_and_save(directories[::-1], str(tmp_path)) == both[::-1] and reads == [
        "one",
        "two",
    ]


def test_the_fingerprint_is_of_names_and_bytes(tmp_path):
    model = make_model(tmp_path / "one")
    whole = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        whole.update(name.encode() + b"\0" + hashlib.sha256((model / name).read_bytes()).digest())
    assert compute_and_save([str(model)], str(tmp_path)) == [whole.hexdigest()]


def test_weights_that_change_behind_their_time_are_read_again(tmp_path, reads):
    """Other bytes of the same length, name and time of change, as after a copy."""
    model = make_model(tmp_path / "one")
    weights = model / "model.safetensors"
    before = compute_and_save([str(model)], str(tmp_path))
    at = weights.stat()
    weights.write_bytes(weights.read_bytes()[::-1])
    os.utime(weights, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert weights.stat().st_mtime_ns == at.st_mtime_ns
    assert compute_and_save([str(model)], str(tmp_path)) != before and reads == ["one", "one"]


@pytest.mark.parametrize("content", ["", '{"a": 1}'])
def test_a_file_of_fingerprints_that_says_nothing_is_made_again_and_no_directory_for_it(
    tmp_path, content
):
    model = str(make_model(tmp_path / "one"))
    whole = compute_and_save([model], str(tmp_path))
    (tmp_path / FINGERPRINT_FILE).write_text(content)
    assert (
        compute_and_save([model], str(tmp_path))
        == whole
        == compute_and_save([model], str(tmp_path / "new"))
    )
    assert (
        list(tmp_path.glob(".*")) == [tmp_path / FINGERPRINT_FILE]
        and not (tmp_path / "new").exists()
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: not JSON"),
        (
            "config.json",
            None,
            r"no config\.json, expected config\.json, \*\.safetensors and tokenizer\.json",
        ),
        ("model.safetensors", None, r"no \*\.safetensors, expected"),
        ("tokenizer.json", None, r"no tokenizer\.json, expected"),
    ],
)
def test_what_is_missing_is_named(tmp_path, name, content, message):
    model = make_model(tmp_path / "one")
    (model / "pytorch_model.bin").touch()  # neither of these is loaded
    (model / "vocab.txt").touch()
    check_model_directory(str(model))
    (model / name).unlink() if content is None else (model / name).write_text(content)
    with pytest.raises(InputError, match=message):
        check_model_directory(str(model))


def test_a_name_of_the_hub_is_told_how_to_become_a_directory():
    with pytest.raises(
        InputError,
        match=(
            r"--model bert-base-uncased: no such directory; .* `hf download NAME --local-dir "
            r"DIRECTORY`"
        ),
    ):
        check_model_directory("bert-base-uncased")
