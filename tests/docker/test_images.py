"""The container images, checked without a network and without a Docker engine."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import runs

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
DEFINITIONS = sorted((ROOT / "docker").glob("*.def"))
each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
each_definition = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda path: path.name)


def joined(path: Path) -> str:
    """Return the text without comments, and continued lines as one."""
    return re.sub(
        r"\s*\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    )


def steps(dockerfile: Path) -> list[tuple[str, str]]:
    """Return (instruction, rest) of each step."""
    return [tuple(line.split(" ", 1)) for line in joined(dockerfile).splitlines() if line.strip()]


def sent() -> list[str]:
    """Return the files and directories that .dockerignore lets pass."""
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    ]
    named = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert lines == ["*", *(f"!{name}" for name in named), "**/__pycache__"]
    return named


def travels(path: str) -> bool:
    return any(f"{path}/".startswith(f"{name}/") for name in sent())


def test_what_travels_is_there_and_little_else():
    assert all((ROOT / name).exists() for name in sent())
    assert [name for name in sent() if name.startswith(("tests", "."))] == [
        "tests/conftest.py",
        "tests/runs.py",
        "tests/smoke",
    ]


@each_dockerfile
def test_every_copied_file_is_there_and_travels(dockerfile):
    copied = [
        rest.split()[:-1]
        for name, rest in steps(dockerfile)
        if name == "COPY" and not rest.startswith("--from")
    ]
    sources = {source for some in copied for source in some}
    assert sources.issuperset(
        ("install.sh", "pyproject.toml", "constraints.txt", "megaenc/__init__.py", ".")
    )
    for source in sources - {"."}:
        assert (ROOT / source).is_file(), source
        assert travels(source), source


@each_dockerfile
def test_an_image_is_of_a_pinned_base_and_of_a_user_without_rights(dockerfile):
    """It also has labels, the way it was installed, and a health check."""
    found = steps(dockerfile)
    assert re.fullmatch(r"BASE=[a-z/]+:\S*\d+\.\d+\S*", found[0][1])
    last = max(number for number, step in enumerate(found) if step[0] == "FROM")
    assert found[last][1] == "${BASE}"
    image = dict(found[last:])  # of instructions of a kind, the last
    assert (image["USER"], image["WORKDIR"]) == ("10001", "/work")
    assert image["HEALTHCHECK"].endswith('CMD ["megaenc-health", "cpu"]')
    assert "ln -s /opt/megaenc/docker/health.sh /usr/local/bin/megaenc-health" in joined(dockerfile)
    label = {word.partition("=")[0] for word in shlex.split(image["LABEL"])}
    assert label == {
        f"org.opencontainers.image.{key}"
        for key in ("title", "description", "licenses", "revision")
    }
    installs = [rest for name, rest in found if name == "RUN" and "./install.sh" in rest]
    assert any(re.search(r"EXTRAS=(''|\"\$EXTRAS\")", rest) for rest in installs)


@pytest.mark.parametrize(
    "path", [*DOCKERFILES, ROOT / "docs/containers.md"], ids=lambda path: path.name
)
def test_what_is_shown_can_be_trained_by_as_many_processes(path):
    from megaenc.training.config import parse_config

    shown = re.findall(
        r"torchrun --nproc-per-node (\d+) \S+/pretrain_encoder\.py (.*)", path.read_text()
    )
    assert shown or path.suffix == ".cpu"
    for processes, words in shown:
        parse_config(shlex.split(words), prog="").check(world_size=int(processes))


@pytest.mark.system
def test_health_trains_two_steps_and_says_so():
    """It trains with two processes."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ran = subprocess.run(
        [ROOT / "docker/health.sh", "cpu"],
        env=runs.surroundings() | {"PATH": path, "NPROC": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "healthy: two steps trained, 2 x processor\n"), (
        ran.stderr
    )


def test_health_says_what_is_wrong(tmp_path):
    (tmp_path / "megaenc").write_text("#!/bin/sh\necho 'error: no disk' >&2\nexit 2\n")
    (tmp_path / "megaenc").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC": "1"}
    ran = subprocess.run(
        [ROOT / "docker/health.sh"], env=environment, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines() == [
        "error: no disk",
        "error: two steps of training failed with exit code 2",
    ]


# ---- settings of the accelerators ----------------------------------------------------------------


def environment_in_image(kind: str, **variables: str) -> dict[str, str]:
    """Return the environment of a command that the image's entry point starts."""
    (entry,) = (
        json.loads(rest)
        for name, rest in steps(ROOT / f"docker/Dockerfile.{kind}")
        if name == "ENTRYPOINT"
    )
    command = [part.replace("/opt/megaenc", str(ROOT)) for part in entry] + ["env", "-0"]
    ran = subprocess.run(
        command, env={"PATH": os.defpath, **variables}, capture_output=True, text=True, check=True
    )
    return dict(line.split("=", 1) for line in ran.stdout.split("\0") if line)


@pytest.mark.parametrize(
    ("kind", "values", "other", "taken_out"),
    [
        (
            "rocm",
            {"HSA_NO_SCRATCH_RECLAIM": "1", "NCCL_P2P_NET_CHUNKSIZE": "524288"},
            "GPU_MAX_HW_QUEUES",
            "RCCL_MSCCL_ENABLE",
        ),
        (
            "cuda",
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "WARN"},
            "PYTORCH_ALLOC_CONF",
            "TORCH_NCCL_HIGH_PRIORITY",
        ),
    ],
)
def test_settings_can_be_overridden_and_taken_out(kind, values, other, taken_out):
    settings = environment_in_image(kind)
    assert {name: settings.get(name) for name in values} == values
    assert not [name for name in settings if name.startswith(("NVTE", "megaenc"))]
    changed = environment_in_image(kind, **{other: "mine", taken_out: ""})
    assert changed.pop(other) == "mine" and settings.keys() - changed.keys() == {taken_out, other}


# ---- Apptainer -----------------------------------------------------------------------------------


@each_definition
def test_a_definition_makes_what_the_dockerfile_makes(definition):
    kind = definition.stem.removeprefix("megaenc-")
    dockerfile = joined(ROOT / f"docker/Dockerfile.{kind}")
    parts = re.split(r"^%(\w+)\n", joined(definition), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    base = re.search(r"BASE=\S+", found["arguments"])[0]
    assert f"ARG {base}\n" in dockerfile
    packages = re.search(r"--no-install-recommends (.*)", found["post"])[1].split()
    assert packages
    assert set(packages) <= set(dockerfile.split())
    assert "./install.sh" in found["post"]
    [check] = [line.strip() for line in found["post"].splitlines() if "is not built for" in line]
    assert check in dockerfile
    assert found["runscript"].split("\n")[:2] == [
        f"  . /opt/megaenc/docker/{kind}_env.sh",
        '  exec "$@"',
    ]
    for line in found["files"].strip().splitlines():
        source, target = line.split()
        assert travels(source)
        assert target.startswith("/opt/megaenc/")
