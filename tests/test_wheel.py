"""The sdist and the wheel that is built from it, without a network."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import runs

from megaenc.flags import list_packaged_files
from megaenc.processes import python_command

BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)

OWN_FILES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml")


def build(kind: str, source: Path, output: Path) -> Path:
    """Build `sdist` or `wheel` of `source`; return the file, the only one in `output`."""
    subprocess.run(
        python_command("-c", BUILD, f"build_{kind}", str(output)),
        cwd=source,
        capture_output=True,
        check=True,
    )
    (path,) = output.iterdir()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The unpacked sdist of a copy of this repository."""
    clone = tmp_path_factory.mktemp("clone")
    for name in ("configs", "megaenc"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(runs.ROOT / name, clone / name, symlinks=True, ignore=ignored)
    for name in (*OWN_FILES, "install.sh", "tests/test_wheel.py"):
        (clone / name).parent.mkdir(exist_ok=True)
        shutil.copy(runs.ROOT / name, clone / name)
    sdist = build("sdist", clone, tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (directory,) = unpacked.iterdir()
    return directory


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The unpacked wheel."""
    path = build("wheel", source, tmp_path_factory.mktemp("wheel"))
    directory = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(directory)
    return directory


def list_files(directory: Path) -> set[str]:
    return {
        str(path.relative_to(directory))
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def list_package_files() -> set[str]:
    configs = {f"megaenc/configs/{name}.yaml" for name in list_packaged_files()}
    return configs | {f"megaenc/{path}" for path in list_files(runs.ROOT / "megaenc")}


def test_the_sdist_has_the_package_and_what_builds_it(source):
    files = {path for path in list_files(source) if not path.startswith("megaenc.egg-info/")}
    assert files == {*OWN_FILES, "PKG-INFO", "setup.cfg"} | list_package_files()


def test_the_wheel_has_the_package_and_its_data(wheel):
    (information,) = wheel.glob("megaenc-*.dist-info")
    files = {path for path in list_files(wheel) if not path.startswith(information.name)}
    assert files == list_package_files()
    assert (information / "licenses/LICENSE").is_file()
    requirements = (information / "METADATA").read_text()
    assert 'Requires-Dist: backports.zstd; python_version < "3.14"' in requirements


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("estimate --config layout/h100-1b --gpu h100 --gpus 8", "device hours"),
        ("study plan study/mini", "The study in miniature"),
        ("study plan configs/study/paper.yaml", "critical path"),
        ("--help", "recipes/: bidirlm, clm-detour, dapt, ettin"),
    ],
)
def test_commands_of_the_wheel_find_their_files_by_name(wheel, tmp_path, command, printed):
    code = "from megaenc import cli; cli.main(); print(cli.__file__)"
    ran = runs.run(
        [sys.executable, "-P", "-c", code, *command.split()],
        cwd=tmp_path,
        environment={"PYTHONPATH": str(wheel)},
    )
    assert printed in ran.stdout and ran.stdout.splitlines()[-1].startswith(str(wheel))
