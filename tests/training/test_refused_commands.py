"""Refused commands, which leave the disk as it was."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from checkpoint_helpers import flip_a_bit
from training_helpers import plan_of

from megaenc.convert.command import main as convert
from megaenc.errors import InputError
from megaenc.training.command import main
from megaenc.training.run_dir import RunDir


def contents(directory: Path) -> dict[str, bytes | None]:
    """Return everything below a directory: the content of files, None for directories."""
    return {
        str(path): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


@pytest.fixture
def refused(short_run, tmp_path, refusal):
    """Return the error of a command that must change nothing in `tmp_path`."""

    def give(*flags) -> str:
        before = contents(tmp_path)
        line = refusal(main, [*short_run, *flags])
        assert contents(tmp_path) == before
        return line

    return give


@pytest.fixture
def copy(saved_run, tmp_path):
    """A copy of the run, to be damaged."""
    return shutil.copytree(saved_run, tmp_path / "run")


def test_a_parent_whose_weights_are_damaged(refused, copy, tmp_path):
    """The damage is found after the new run's directories were made."""
    flip_a_bit(sorted((copy / "checkpoints" / "iter_0000012").glob("*.distcp"))[0])
    save = tmp_path / "new" / "deeper" / "run"
    assert "its content changed" in refused("--init-from", copy, "--save", save)
    assert "its content changed" in refused(
        "--branch-from", copy, "--branch-at", "12", "--save", save
    )


def test_a_run_without_a_whole_checkpoint(refused, copy):
    """Its config.yaml stays as it was, too."""
    for step in (4, 8, 12):
        flip_a_bit(copy / "checkpoints" / f"iter_{step:07d}" / "common.pt")
    line = refused("--save", copy, "--micro-batch-size", "4", "--keep-last", "7")
    assert "its content changed" in line and "no other is left" in line


def test_rows_that_no_run_writes(refused, copy):
    rows = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join([*rows[:3], '{"step": "x"}\n', *rows[4:]]))
    assert "metrics.jsonl: line 4: found" in refused("--save", copy)


def from_another(run: Path, directory: Path) -> list[list]:
    """Return the flags of a branch and of a start from weights."""
    return [
        ["--branch-from", run, "--branch-at", "8", "--save", directory / "b"],
        ["--init-from", run, "--save", directory / "i"],
    ]


@pytest.mark.parametrize(
    "content",
    [b"\xff", b"null", 100_000 * b"[", b'{"identity": []}'],
    ids=["text", "null", "deep", "list"],
)
def test_a_run_json_that_no_run_wrote(content, refused, copy, tmp_path):
    (copy / "run.json").write_bytes(content)
    for flags in (["--save", copy], *from_another(copy, tmp_path)):
        assert f"{copy / 'run.json'}: " in refused(*flags)


CHANGES = {
    "step of the start": {"start": {"at": "x"}},
    "its runs": {"start": {"before": [5]}},
    "no pack": {"skip_packs": [5]},
    "rewinds": {"rewinds": 5},
    "learning rate": {"identity": {"lr": "x"}},
    "packages": {"identity": {"objective_packages": 3}},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_field_of_run_json_that_no_run_wrote(change, refused, copy, tmp_path):
    facts = json.loads((copy / "run.json").read_text())
    [(name, value)] = change.items()
    facts[name] = facts[name] | value if isinstance(value, dict) else value
    (copy / "run.json").write_text(json.dumps(facts))
    refused(*(["--save", copy] if name == "rewinds" else from_another(copy, tmp_path)[0]))


@pytest.mark.parametrize("number", [None, 0, 2, "1", True])
def test_a_run_of_another_format(number, refused, copy, tmp_path, refusal):
    facts = json.loads((copy / "run.json").read_text())
    assert facts.pop("format") == 1
    facts |= {} if number is None else {"format": number}
    (copy / "run.json").write_text(json.dumps(facts))
    found = "none" if number is None else number
    line = (
        f"{copy / 'run.json'}: field `format`: found {found}, expected 1; "
        "another version of megaenc wrote this run"
    )
    for flags in (["--save", copy], *from_another(copy, tmp_path)):
        assert line in refused(*flags)
    assert line in refusal(convert, ["to-hf", "--load", copy, "--output", tmp_path / "hf"])
    assert sorted(tmp_path.iterdir()) == [copy]


def test_a_run_json_that_is_a_pipe(refused, copy, tmp_path, monkeypatch):
    (copy / "run.json").unlink()
    os.mkfifo(copy / "run.json")
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"")
    for flags in (["--save", copy], *from_another(copy, tmp_path)):
        assert "not a regular file" in refused(*flags)


def test_a_disk_that_is_full_at_any_moment_of_the_start(short_run, small_disk):
    """From no free block to enough of them: one line, and nothing new is left."""
    run = small_disk / "new" / "run"
    plan = plan_of(*short_run)
    size = 64 << 10
    subprocess.run(["mount", "-o", f"remount,size={size}", str(small_disk)], check=True)
    filler = small_disk / "filler"
    complaints = set()
    for free in range(0, size, 4096):
        with open(filler, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, size - free)
        try:
            with RunDir(run, plan) as directory:
                directory.begin(plan, {}, step=-1)
        except InputError as error:
            assert "No space left on device" in str(error) and "\n" not in str(error)
            complaints.add(str(error).partition(":")[0].rpartition("/")[2])
            assert sorted(small_disk.iterdir()) == [filler]
        else:
            assert sorted(path.name for path in run.iterdir()) == [
                ".lock",
                "config.yaml",
                "run.json",
                "tokenizer",
            ]
            break
    else:
        pytest.fail("there was never room enough")
    assert complaints == {"run"}
