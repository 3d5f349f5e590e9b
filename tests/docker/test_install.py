"""install.sh with a pip that records its arguments."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def install(**variables: str) -> subprocess.CompletedProcess:
    """Run install.sh from elsewhere, with only `variables` set of those that it reads."""
    names = ("PYTHON", "PYTHONPATH", "VENV", "EXTRAS", "TORCH_INDEX", "PIP_BREAK_SYSTEM_PACKAGES")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [ROOT / "install.sh"],
        cwd="/",
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def environment(tmp_path):
    """A virtual environment as in a ROCm image, whose pip records its arguments."""
    directory = tmp_path / "environment"
    venv.create(directory, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(
        "import json, sys\n"
        "if '--version' not in sys.argv:\n"
        "    constraints = open(sys.argv[sys.argv.index('--constraint') + 1]).read()\n"
        "    print(json.dumps([sys.argv[1:], constraints]), "
        f"file=open({str(tmp_path / 'asked')!r}, 'a'))\n"
    )
    for name, version in (
        ("torch", "2.12.0+rocm7.2.4"),
        ("triton", "3.7.0"),
        ("apex", "1.0+rocm7.2.4"),
        ("numpy", "1.26.4"),
    ):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return directory


def asked_of_pip(environment: Path) -> list[tuple[list[str], list[str]]]:
    """Return (arguments, lines of the constraints) of each call."""
    calls = (json.loads(line) for line in (environment.parent / "asked").read_text().splitlines())
    return [
        (arguments[arguments.index("--constraint") + 2 :], constraints.splitlines())
        for arguments, constraints in calls
    ]


def test_help_names_every_variable_and_an_argument_is_refused():
    shown = subprocess.run(
        [ROOT / "install.sh", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"^  ([A-Z_]+) ", shown, re.MULTILINE) == [
        "PYTHON",
        "VENV",
        "TORCH_INDEX",
        "EXTRAS",
    ]
    ran = subprocess.run(
        [ROOT / "install.sh", "--venv"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr.splitlines()) == (
        2,
        ["error: --venv is not known; settings are variables: ./install.sh --help"],
    )


def test_into_a_virtual_environment_with_the_pinned_versions(environment):
    ran = install(VENV=str(environment), TORCH_INDEX="https://example.org/whl/cpu")
    assert ran.returncode == 0, ran.stderr
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    torch, package = asked_of_pip(environment)
    assert torch == (["--index-url", "https://example.org/whl/cpu", "torch"], pinned)
    assert package == (["--editable", ".[dev]"], pinned)


def test_tests_get_a_triton_where_torch_has_brought_none(environment):
    (own,) = environment.glob("lib/python*/site-packages/triton-*.dist-info")
    (own / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pytorch-triton-rocm\nVersion: 3.7.0\n"
    )
    assert install(VENV=str(environment)).returncode == 0
    shutil.rmtree(own)
    for extras in ("finetune,dev", "finetune"):
        assert install(VENV=str(environment), EXTRAS=extras).returncode == 0
    packages = [arguments[-1] for arguments, _ in asked_of_pip(environment)[1::2]]
    assert packages == [".[dev]", ".[finetune,dev,triton]", ".[finetune]"]


def test_a_torch_that_came_with_the_image_is_kept(environment):
    python = {"PYTHON": str(environment / "bin/python"), "VENV": "", "EXTRAS": ""}
    assert install(**python).returncode == 0
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    expected = ["apex==1.0+rocm7.2.4", "torch==2.12.0+rocm7.2.4", "triton==3.7.0"]
    expected += [line for line in pinned if not line.startswith(("torch==", "triton=="))]
    assert asked_of_pip(environment) == [(["torch"], expected), (["--editable", "."], expected)]
    for info in environment.glob("lib/python*/site-packages/*.dist-info"):
        shutil.rmtree(info)
    assert install(**python).returncode == 0
    assert asked_of_pip(environment)[-1] == (["--editable", "."], pinned)


def refusal(**variables: str) -> str:
    ran = install(**variables)
    assert ran.returncode == 2 and not ran.stdout, (ran.returncode, ran.stdout)
    (line,) = ran.stderr.splitlines()
    return line


def test_refusals_are_one_line(tmp_path):
    assert refusal(PYTHON="no-such-python") == "error: PYTHON=no-such-python does not run"
    assert refusal(PYTHON=sys.executable, EXTRAS="dev,devv").startswith(
        "error: EXTRAS: devv is not among cuda, flash, rocm"
    )

    old = tmp_path / "python3.9"
    # It fails at the first real question, which is its version.
    old.write_text('#!/bin/sh\ntest -z "$2"\n')
    old.chmod(0o755)
    assert (
        refusal(PYTHON=str(old))
        == f"error: PYTHON={old} is older than 3.11; name another, as in PYTHON=python3.12"
    )

    # Debian without python3-venv fails like this.
    (tmp_path / "ensurepip.py").write_text("raise ImportError")
    without_venv = refusal(
        PYTHON=sys.executable, PYTHONPATH=str(tmp_path), VENV=str(tmp_path / "venv")
    )
    assert "has no venv module" in without_venv and "python3-venv" in without_venv
    assert not (tmp_path / "venv").exists()

    venv.create(tmp_path / "bare", with_pip=False)
    assert (
        refusal(VENV=str(tmp_path / "bare")) == f"error: {tmp_path / 'bare'}/bin/python has no pip"
    )


def test_a_python_of_the_distribution_is_left_alone(tmp_path):
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    (tmp_path / "sysconfig.py").write_text(f"def get_path(name):\n    return {str(tmp_path)!r}\n")
    line = refusal(PYTHON=os.path.realpath(sys.executable), PYTHONPATH=str(tmp_path), VENV="")
    assert "belongs to the distribution" in line and "VENV=DIR" in line


def test_the_oldest_python_is_the_same_everywhere():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "requires-python"
    ].removeprefix(">=")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in (ROOT / "install.sh").read_text()


@pytest.fixture
def path_with(tmp_path):
    """Return a function that makes a PATH with Pythons of given names and versions.

    Each is this interpreter, but tells another version; None is one that does not run.
    """

    def make(**versions: tuple[int, int] | None) -> str:
        directory = tmp_path / "bin"
        directory.mkdir()
        for name, version in versions.items():
            program = directory / name.replace("_", ".")
            body = "exit 127"
            if version is not None:
                module = tmp_path / program.name
                module.mkdir()
                (module / "sitecustomize.py").write_text(
                    f"import sys\nsys.version_info = (*{version}, 0, 'final', 0)\n"
                    f"sys.stderr.write('{program.name} runs\\n')\n"
                )
                body = f'PYTHONPATH={module} exec {sys.executable} "$@"'
            program.write_text(f"#!/bin/sh\n{body}\n")
            program.chmod(0o755)
        for program in ("dirname", "cat", "sh"):
            (directory / program).symlink_to(shutil.which(program))
        return str(directory)

    return make


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        ({"python3": (3, 12), "python3_13": (3, 13)}, "python3"),
        ({"python3": (3, 10), "python3_13": None, "python3_12": (3, 12)}, "python3.12"),
        ({"python3": (3, 14), "python3_11": (3, 11)}, "python3.11"),
        ({"python3_13": (3, 13), "python3_12": (3, 12)}, "python3.13"),
    ],
)
def test_an_interpreter_that_works_is_found(path_with, tmp_path, versions, chosen):
    ran = install(PATH=path_with(**versions), VENV=str(tmp_path / "venv"), EXTRAS="none")
    *_, runs, refused = ran.stderr.splitlines()
    assert (runs, refused.partition(" is not")[0]) == (f"{chosen} runs", "error: EXTRAS: none")


def test_without_an_interpreter_that_works_one_line_says_how_to_get_one(path_with, tmp_path):
    path = path_with(python3=(3, 10), python3_13=None)
    line = refusal(PATH=path, VENV=str(tmp_path / "venv"))
    assert line.startswith("error: none of python3, python3.13, python3.12 and python3.11 is")
    assert "`uv python install 3.12`" in line
    assert not (tmp_path / "venv").exists()
    assert "PYTHON=python3.13 does not run" in refusal(PATH=path, PYTHON="python3.13")


def add_dependencies(name: str, extras: frozenset[str], found: set) -> None:
    """Add a package with extras, and all that it needs here, to `found`."""
    if (canonicalize_name(name), extras) in found:
        return
    found.add((canonicalize_name(name), extras))
    for requirement in map(Requirement, metadata.requires(name) or []):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            add_dependencies(requirement.name, frozenset(requirement.extras), found)


def test_every_dependency_of_the_tests_has_a_pinned_version():
    """Except those of torch, whose own index has other versions."""
    found = set()
    add_dependencies("megaenc", frozenset({"dev"}), found)
    of_torch = set()
    add_dependencies("torch", frozenset(), of_torch)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    names = [canonicalize_name(name) for name, _ in pins]
    assert sorted(names) == sorted(set(names))
    # pip brings setuptools with a new environment, or takes the newest to build.
    unpinned = {"megaenc", "setuptools"} | {name for name, _ in of_torch} - {"torch"}
    assert {name for name, _ in found} - unpinned <= set(names)
    assert not {"filelock", "fsspec", "networkx"} & set(names)
