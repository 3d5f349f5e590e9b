"""Commands of setuptools that record the commit in what they build."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from megaenc.cli import read_commit  # noqa: E402, which needs only the standard library


def record_commit(directory: str) -> None:
    """Write megaenc/COMMIT below `directory`."""
    file = Path(directory, "megaenc", "COMMIT")
    file.unlink(missing_ok=True)  # it may be a link to that of a source distribution
    file.write_text(read_commit(ROOT / "megaenc") + "\n", encoding="utf-8")


class RecordingBuild(build_py):
    """Command that copies modules to a wheel, with the commit."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            record_commit(self.build_lib)


class RecordingDistribution(sdist):
    """Command that copies files to a source distribution, with the commit."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        record_commit(base_dir)


setup(cmdclass={"build_py": RecordingBuild, "sdist": RecordingDistribution})
