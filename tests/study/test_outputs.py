"""A refused command leaves nothing behind."""

import manifests
import pytest
from run_folders import write_run

from megaenc.finetune.results.summary import summary_main
from megaenc.study.plan import command as plan_command
from megaenc.study.report import command as report_command
from megaenc.study.run import command as run_command
from megaenc.study.run import status
from megaenc.viz import plot

REFUSED = [
    # a command whose input is wrong, with an output that does not exist yet
    (plot.main, ["run", "none", "--output", "new/deep/loss.png"]),
    (plan_command.main, ["none.yaml", "--picture", "new/deep/plan.png"]),
    (summary_main, ["none", "--output", "new/deep/all.json"]),
    (report_command.main, ["--results", "none", "--output", "new/deep"]),
    (report_command.main, ["--published", "--output", "taken"]),
    (run_command.main, ["study.yaml", "--output", "new/deep", "--processes", "3", "--jobs", "1"]),
    (run_command.main, ["study.yaml", "--output", "new/deep", "--slurm"]),
    (status.main, ["study.yaml", "--output", "taken"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    manifests.write(tmp_path)
    (tmp_path / "taken").write_text("a file where a folder is expected")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_refused_command_leaves_nothing_and_keeps_folders_of_others(folder, refusal):
    before = content(folder)
    for main, flags in REFUSED:
        refusal(main, flags)
        assert content(folder) == before
    (folder / "new").mkdir()
    for main, flags in REFUSED:
        refusal(main, flags)
        assert list((folder / "new").iterdir()) == []
