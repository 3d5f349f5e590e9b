"""study.json: where, when and with what a study was done."""

import subprocess

import pytest

from megaenc.errors import InputError
from megaenc.study.run import provenance

HERE = {
    "hardware": "2 cores of one",
    "date": "2026-11-22",
    "commit": "1a2b3c",
    "libraries": "torch 2.13.0",
}


@pytest.fixture
def at(monkeypatch):
    """Set what is true of this machine and day."""

    def change(**facts):
        monkeypatch.setattr(provenance, "current_environment", lambda: HERE | facts)

    change()
    return change


def test_what_is_new_comes_behind_what_was_true_before(at, tmp_path):
    provenance.record_environment(tmp_path)
    written = (tmp_path / "study.json").read_bytes()
    assert provenance.read_provenance(tmp_path / "study.json") == HERE
    provenance.record_environment(tmp_path)
    assert (tmp_path / "study.json").read_bytes() == written, (
        "the same machine on the same day adds nothing"
    )
    at(date="2026-11-23", hardware="4 x H100")
    provenance.record_environment(tmp_path)
    entries = provenance.read_provenance(tmp_path / "study.json")
    assert (entries["date"], entries["hardware"]) == (
        "2026-11-22, then 2026-11-23",
        "2 cores of one, then 4 x H100",
    )
    assert entries["commit"] == "1a2b3c"
    (tmp_path / "study.json").write_text('{"electricity": "hydro", "hardware": "the big one"}')
    provenance.record_environment(tmp_path)
    entries = provenance.read_provenance(tmp_path / "study.json")
    assert (entries["electricity"], entries["hardware"]) == ("hydro", "the big one, then 4 x H100")


def test_a_broken_file_is_left_alone_and_named_by_the_report(at, tmp_path):
    file = tmp_path / "study.json"
    file.write_text("[1]")
    provenance.record_environment(tmp_path)
    assert file.read_text() == "[1]"
    with pytest.raises(InputError, match=r"study\.json: .*expected an object of texts"):
        provenance.read_provenance(file)


def test_an_empty_object_is_filled(at, tmp_path):
    file = tmp_path / "study.json"
    file.write_text("{}")
    provenance.record_environment(tmp_path)
    assert provenance.read_provenance(file) == HERE


def test_this_machine_and_the_commit_of_the_checkout_that_the_code_is_in(tmp_path):
    entries = provenance.current_environment()
    assert " of " in entries["hardware"] and entries["hardware"].endswith("GiB of memory")
    assert "torch 2." in entries["libraries"] and "missing" not in entries["libraries"]

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(
            ["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit():
        return provenance._describe_commit.__wrapped__(tmp_path)

    code = tmp_path / "code.py"
    code.write_text("")
    assert commit().startswith("megaenc 0."), "an installed package"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    assert commit() == git("rev-parse", "HEAD")[:12]
    code.write_text("changed = True\n")
    assert commit() == git("rev-parse", "HEAD")[:12] + " with changes"
