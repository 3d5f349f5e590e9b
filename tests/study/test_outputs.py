"""Places that cannot be written are refused before any work, and a refused command leaves nothing behind."""

import manifests
import pytest
from run_folders import write_run

from megaenc.finetune.results.summary import summary_main
from megaenc.study.plan import command as plan_command
from megaenc.study.report import command as report_command
from megaenc.study.run import command as run_command
from megaenc.study.run import status
from megaenc.viz import plot

COMMANDS = {
    # the command, its flags before the output, and the ending of that
    "plot": (plot.main, ["run", "--output"], ".png"),
    "plan": (plan_command.main, ["study.yaml", "--picture"], ".png"),
    "report": (report_command.main, ["--published", "--output"], ""),
    "run": (run_command.main, ["study.yaml", "--output"], ""),
}
REFUSED = [
    # a command whose input is wrong, with an output that does not exist yet
    (plot.main, ["run", "none", "--output", "new/deep/loss.png"]),
    (plan_command.main, ["none.yaml", "--picture", "new/deep/plan.png"]),
    (summary_main, ["none", "--output", "new/deep/all.json"]),
    (report_command.main, ["--results", "none", "--output", "new/deep"]),
    (run_command.main, ["study.yaml", "--output", "new/deep", "--processes", "3", "--jobs", "1"]),
    (run_command.main, ["study.yaml", "--output", "new/deep", "--slurm"]),
    (status.main, ["study.yaml", "--output", "taken"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_run(tmp_path / "run")
    manifests.write(tmp_path)
    (tmp_path / "taken.png").mkdir()
    (tmp_path / "taken").write_text("a file where a folder is expected")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_first(command, folder, monkeypatch, refusal):
    for module, work in ((plot, "draw_run"), (plan_command, "read_manifest"), (report_command, "build_report")):
        monkeypatch.setattr(module, work, lambda *given, **more: pytest.fail("the work was begun"))
    before = content(folder)
    main, flags, ending = COMMANDS[command]
    for place in ("/proc/x/out", "taken", "study.yaml/out", "x" * 300):
        line = refusal(main, [*flags, place + ending])
        assert "--output" in line or "--picture" in line
    assert content(folder) == before


def test_a_refused_command_leaves_nothing_and_keeps_folders_of_others(folder, refusal):
    before = content(folder)
    for main, flags in REFUSED:
        refusal(main, flags)
        assert content(folder) == before
    (folder / "new").mkdir()
    for main, flags in REFUSED:
        refusal(main, flags)
        assert list((folder / "new").iterdir()) == []
