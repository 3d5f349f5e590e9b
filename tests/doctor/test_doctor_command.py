"""`megaenc doctor` alone, with planted faults, on two ranks, with a broken torch."""

import errno
import json
import sys
from pathlib import Path

import pytest
import runs

from megaenc.doctor import command
from megaenc.doctor.checks import SUBJECTS
from megaenc.doctor.report import WIDTH
from megaenc.doctor.result import ok

HERE = Path(__file__).parent
DOCTOR = [sys.executable, "-m", "megaenc", "doctor"]
TWO = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "megaenc",
    "doctor",
]


def levels(file: Path) -> dict[tuple[str, str], str]:
    return {
        (row["subject"], row["what"]): row["level"]
        for row in json.loads(file.read_text())["findings"]
    }


@pytest.mark.slow
def test_a_sound_machine_has_no_problem(tmp_path):
    ended = runs.run([*DOCTOR, "--save", str(tmp_path), "--json", str(tmp_path / "found.json")])
    findings = json.loads((tmp_path / "found.json").read_text())
    assert findings["worst"] != "problem"
    assert {subject for subject, _ in levels(tmp_path / "found.json")} == set(SUBJECTS)
    [rank] = findings["ranks"]
    assert rank["findings"] == findings["findings"]
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1].startswith("no problem: ")
    assert [line for line in lines if line in SUBJECTS] == list(SUBJECTS)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_torch_that_cannot_be_imported_is_a_finding_and_not_a_traceback(tmp_path):
    flags = ["--save", str(tmp_path), "--json", str(tmp_path / "found.json")]
    ended = runs.run([*DOCTOR, *flags], expect=1, packages=HERE / "broken_torch")
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "libcudart.so.12: cannot open shared object file" in " ".join(
        ended.stdout.split("problems: ")[1].split()
    )
    findings = levels(tmp_path / "found.json")
    assert (
        findings["versions", "torch"] == "problem"
        and findings["attention", "attention backends"] == "problem"
    )
    assert (
        findings["versions", "tokenizers"]
        == findings["disk", "locks"]
        == findings["machine", "memory"]
        == "ok"
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_try_what_is_between_them(tmp_path):
    """The second rank has another transformers, and its attention crashes."""
    subjects = ["versions", "ranks", "collectives", "attention", "disk"]
    flags = ["--only", *subjects, "--save", str(tmp_path), "--json", str(tmp_path / "found.json")]
    planted = {"PLANTED": "odd version on rank 1,attention dies on rank 1"}
    ended = runs.run([*TWO, *flags], expect=1, packages=HERE / "planted", environment=planted)
    findings = levels(tmp_path / "found.json")
    problems = {label for (_, label), level in findings.items() if level == "problem"}
    assert problems == {"transformers elsewhere", "sdpa elsewhere"}
    output = " ".join(ended.stdout.split())
    assert "5.99.0 on rank 1" in output
    assert "its process was killed by SIGSEGV" in output
    names = ("all-reduce", "reduce-scatter", "all-gather", "send and receive")
    assert [findings["collectives", f"{name}, gloo"] for name in names] == ["ok"] * 4
    assert findings["attention", "sdpa"] == findings["disk", "shared by ranks"] == "ok"
    assert ended.stdout.count("2 problems: ") == 1, "rank 0 alone prints"
    assert len(json.loads((tmp_path / "found.json").read_text())["ranks"]) == 2


THEIRS = json.dumps({"host": "host", "findings": []}).encode()


@pytest.mark.parametrize(
    ("rank", "contents", "failure", "words"),
    [
        (0, {3: THEIRS}, "", "ranks, missing: no findings from rank 1-2, 4 within 600 s"),
        (0, {1: b"\x80\x04."}, "", "ranks, malformed, rank 1: its findings: not UTF-8"),
        (0, None, "no answer in 240 s", "ranks, comparing: no answer in 240 s"),
        (
            1,
            None,
            "no answer in 240 s",
            "ranks, comparing: no answer in 240 s",
        ),  # and ends well: torchrun would kill rank 0
    ],
)
def test_ranks_that_hand_nothing_in_are_named_and_each_tells_what_it_has(
    rank, contents, failure, words, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("RANK", str(rank))

    def call(runner, function, *arguments, seconds):
        return (
            (contents, failure) if function.endswith("gather_findings") else ([ok("x", "seen")], "")
        )

    monkeypatch.setattr(command.CheckRunner, "call", call)
    code = 0
    try:
        command.main(["--only", "variables"])
    except SystemExit as ended:
        code = ended.code
    assert code == (1 if rank == 0 else 0)
    output = " ".join(capsys.readouterr().out.split())
    assert output.startswith("rank 1 on ") == (rank == 1)
    assert "seen" in output and words in output


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_what_was_found_before_a_stop_is_printed(stop, code, monkeypatch, capsys):
    def stopped(runner, function, *arguments, seconds):
        if function.endswith("check_interfaces"):
            raise stop
        return [ok("network cards", "seen")], ""

    monkeypatch.setattr(command.CheckRunner, "call", stopped)
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", "network"])
    assert ended.value.code == code
    output = capsys.readouterr().out
    assert (
        "network cards" in output and "1 problem: " in output and "before all checks ran" in output
    )


def test_what_was_found_is_printed_also_where_its_file_cannot_be_written(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "atomic_write", full)
    with pytest.raises(SystemExit) as stop:
        command.main(["--only", "variables", "--json", "found.json"])
    output = capsys.readouterr()
    assert stop.value.code == 2
    assert (
        "variables\n" in output.out
        and output.err == "error: --json found.json: cannot be written: No space left on device\n"
    )
