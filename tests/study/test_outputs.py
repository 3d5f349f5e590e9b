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

PLACES = {
    "below /proc": lambda folder, ending: f"/proc/x/out{ending}",
    "a folder": lambda folder, ending: folder / f"taken{ending}",
    "below a file": lambda folder, ending: folder / f"file/out{ending}",
    "a name of 300 letters": lambda folder, ending: folder / f"{'x' * 300}{ending}",
    "a folder name of 300 letters": lambda folder, ending: folder / ("x" * 300) / f"out{ending}",
}


def commands(folder):
    """By name, the command, its flags before the output, and the ending of that."""
    manifest = folder / "study.yaml"
    return {
        "plot": (plot.main, [folder / "run", "--output"], ".png"),
        "plan": (plan_command.main, [manifest, "--picture"], ".png"),
        "summary": (summary_main, [folder / "none", "--output"], ".json"),
        "report": (report_command.main, ["--published", "--output"], ""),
        "run": (run_command.main, [manifest, "--output"], ""),
        "status": (status.main, [manifest, "--output"], ""),
    }


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run")
    manifests.write(tmp_path)
    (tmp_path / "file").write_text("mine")
    for ending in (".png", ".json"):
        (tmp_path / f"taken{ending}").mkdir()
    (tmp_path / "taken").write_text("a file where a folder is expected")
    return tmp_path


def content(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", ["plot", "plan", "summary", "report", "run"])
def test_a_place_that_cannot_be_written_is_refused_first(command, place, folder, monkeypatch, refusal):
    for module, work in ((plot, "draw_run"), (plan_command, "read_manifest"), (report_command, "build_report")):
        monkeypatch.setattr(module, work, lambda *given, **more: pytest.fail("the work was begun"))
    before = content(folder)
    main, flags, ending = commands(folder)[command]
    line = refusal(main, [*flags, PLACES[place](folder, ending)])
    assert "--output" in line or "--picture" in line
    assert content(folder) == before


REFUSED = {
    # a command whose input is wrong, with an output that does not exist yet
    "plot": (plot.main, ["none", "--output", "new/deep/loss.png"]),
    "plot, several": (plot.main, ["run", "none", "--output", "new/deep/loss.png"]),
    "plan": (plan_command.main, ["none.yaml", "--picture", "new/deep/plan.png"]),
    "summary": (summary_main, ["none", "--output", "new/deep/all.json"]),
    "report": (report_command.main, ["--results", "none", "--output", "new/deep"]),
    "run without a manifest": (run_command.main, ["none.yaml", "--output", "new/deep"]),
    "run in a slot too few": (run_command.main, ["study.yaml", "--output", "new/deep", "--processes", "3", "--jobs", "1"]),
    "run without a cluster": (run_command.main, ["study.yaml", "--output", "new/deep", "--slurm"]),
    "run of a stage that is none": (run_command.main, ["study.yaml", "--output", "new/deep", "--only", "none"]),
    "status without a manifest": (status.main, ["none.yaml", "--output", "new/deep"]),
    "run in a file": (run_command.main, ["study.yaml", "--output", "file"]),
    "status of a file": (status.main, ["study.yaml", "--output", "file"]),
    "status of a name of 300 letters": (status.main, ["study.yaml", "--output", "x" * 300]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_command_leaves_nothing(case, folder, monkeypatch, refusal):
    monkeypatch.chdir(folder)
    before = content(folder)
    refusal(*REFUSED[case])
    assert content(folder) == before


def test_a_refused_command_keeps_folders_of_others(folder, monkeypatch, refusal):
    monkeypatch.chdir(folder)
    (folder / "new").mkdir()
    for case in ("plot", "plan", "summary", "report", "run in a slot too few"):
        refusal(*REFUSED[case])
        assert (folder / "new").is_dir() and not list((folder / "new").iterdir())
