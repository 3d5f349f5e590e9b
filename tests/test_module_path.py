"""Files in the current directory that are named like modules are never imported."""

import os
import sys
from pathlib import Path

import pytest
import runs

from megaenc.processes import python_command, python_environment

HERE = Path(__file__).parent
THIRD_PARTY = (
    "megaenc",
    "numpy",
    "psutil",
    "rich",
    "submitit",
    "tokenizers",
    "torch",
    "transformers",
    "tyro",
    "yaml",
)
EARLY = (
    "collections",
    "functools",
    "keyword",
    "operator",
    "pkgutil",
    "re",
    "reprlib",
    "types",
    "typing",
    "warnings",
)
"""Modules that Python imports for -m after it has put the current directory first."""


@pytest.fixture
def planted(tmp_path) -> Path:
    """Return a directory with a module for each name of the standard library and more.

    Each notes its name in a file and raises ImportError.
    """
    directory = tmp_path / "planted"
    directory.mkdir()
    for name in {*sys.stdlib_module_names, *THIRD_PARTY} - {*sys.builtin_module_names}:
        lines = (
            "import sys",
            f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')",
            f"raise ImportError({name!r})",
        )
        (directory / f"{name}.py").write_text("\n".join(lines))
    return directory


def run_in(planted: Path, words: list[object], **how) -> str:
    """Run Python in the planted directory; return its output if nothing was imported."""
    marker = planted.parent / "imported"
    ended = runs.run([sys.executable, *map(str, words)], cwd=planted, expect=None, **how)
    imported = marker.read_text() if marker.exists() else ""
    assert (imported, ended.returncode) == ("", 0), (
        f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
    )
    return ended.stdout


def test_a_planted_module_is_imported_without_protection(planted):
    """Otherwise the tests below could not fail."""
    with pytest.raises(AssertionError, match="argparse"):
        run_in(planted, ["-c", "import argparse"])


def test_only_one_function_starts_python():
    package = Path(runs.ROOT, "megaenc")
    users = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "sys.executable" in path.read_text()
    ]
    assert users == ["processes.py"]
    for directory in ("benchmarks", "examples", "tools"):
        for path in Path(runs.ROOT, directory).rglob("*.py"):
            assert not any(f'sys.executable, "-{letter}"' in path.read_text() for letter in "cm"), (
                path
            )


def test_the_environment_of_a_child_keeps_the_users_module_path_and_no_empty_entry():
    assert python_command("-m", "megaenc") == [sys.executable, "-P", "-m", "megaenc"]
    for given in (
        {},
        {"PYTHONPATH": ""},
        {"PYTHONPATH": os.pathsep},
        {"PYTHONPATH": str(runs.ROOT)},
    ):
        assert python_environment(given) == {"PYTHONPATH": str(runs.ROOT), "PYTHONSAFEPATH": "1"}
    given = {"PYTHONPATH": os.pathsep.join(["", "/a", "", "b"]), "HOME": "/home"}
    expected = {
        "PYTHONPATH": os.pathsep.join([str(runs.ROOT), "/a", "b"]),
        "PYTHONSAFEPATH": "1",
        "HOME": "/home",
    }
    assert python_environment(given) == expected


def test_python_m_megaenc_leaves_the_current_directory_out(planted):
    for name in ("megaenc", *EARLY):
        (planted / f"{name}.py").unlink()
    assert run_in(planted, ["-m", "megaenc", "--version"]).startswith("megaenc ")


def test_workers_and_the_doctor(planted, small_corpus, tmp_path):
    flags = [
        "--input",
        small_corpus.text,
        "--output-prefix",
        tmp_path / "again",
        "--tokenizer",
        small_corpus.tokenizer,
    ]
    run_in(planted, [runs.ROOT / "tools" / "preprocess_data.py", *flags, "--workers", "5"])
    program = tmp_path / "program.py"
    program.write_text("from megaenc.cli import main\nmain()\n")
    assert "no problem" in run_in(
        planted, [program, "doctor", "--only", "machine", "variables", "--save", tmp_path]
    )


GRID = """
import runpy
import sys
from pathlib import Path
from fake_runs import make_model

make_model(Path(sys.argv[1]))
runpy.run_path(sys.argv.pop(), run_name="__main__")
"""


def test_the_fork_server_of_a_grid(planted, tmp_path):
    program = tmp_path / "grid.py"
    program.write_text(GRID)
    flags = [
        tmp_path / "toy",
        tmp_path / "results",
        "--datasets",
        "sc1",
        "--learning-rates",
        "2e-5",
        "--seeds",
        "1",
    ]
    run_in(
        planted, [program, *flags, runs.WORKERS / "grid_of_fakes.py"], packages=HERE / "finetune"
    )
    assert list((tmp_path / "results").rglob("results.json"))


STUDY = """
import sys
from pathlib import Path
from fake_stages import FakeStage
from megaenc.study.run.stage import megaenc_command
from megaenc.study.run.executor import execute_stages

class RealStage(FakeStage):
    def remaining_commands(self):
        return [] if self.is_done() else [megaenc_command(*sys.argv[2:], processes=self.processes)]

    def is_done(self):
        return (self.study / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").exists()

study = Path(sys.argv[1])
stage = RealStage("pretrain/run", study, processes=2)
failed = execute_stages([stage], study, ["", ""], max_attempts=1)
sys.exit(str(failed) if failed else 0)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_study_and_the_workers_of_its_torchrun(planted, small_corpus, tmp_path):
    flags = [
        *small_corpus.flags,
        *runs.STANDSTILL,
        "--global-batch-size",
        "2",
        "--no-bf16",
        "--save",
        tmp_path / "study" / "run",
    ]
    program = tmp_path / "study.py"
    program.write_text(STUDY)
    run_in(planted, [program, tmp_path / "study", "pretrain", *flags], packages=HERE / "study")
