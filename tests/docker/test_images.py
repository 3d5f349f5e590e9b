"""The container images, as far as they can be checked without a network and without a Docker engine."""

import json
import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import runs

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
DEFINITIONS = sorted((ROOT / "docker").glob("*.def"))
SCRIPTS = [ROOT / "install.sh", ROOT / ".ci/run", *(ROOT / "docker").glob("*.sh"), *(ROOT / "docker/slurm").glob("*")]
each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
each_definition = pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda path: path.name)
each_accelerator = pytest.mark.parametrize("kind", ["cuda", "rocm"])


def steps(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, rest) of each, with continued lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def stages(dockerfile: Path) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, from its FROM on."""
    found = steps(dockerfile)
    starts = [number for number, (name, _) in enumerate(found) if name == "FROM"]
    return [found[start:stop] for start, stop in zip(starts, [*starts[1:], len(found)], strict=True)]


def travels(path: str) -> bool:
    """Whether .dockerignore lets a file travel: the last line that speaks of it or of a folder above it decides."""
    above = [str(place) for place in (Path(path), *Path(path).parents)]
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    matching = [line for line in lines if any(fnmatch(place, line.removeprefix("!").removeprefix("**/")) for place in above)]
    if any(line.startswith("**/") and line[3:] in Path(path).parts for line in lines):
        return False
    return not matching or matching[-1].startswith("!")


def sent_files() -> list[str]:
    """All files that are sent to a build, relative to the clone."""
    named = (ROOT / ".dockerignore").read_text()
    folders = [path for path in ROOT.iterdir() if path.is_dir() and f"!{path.name}" in named]
    inside = (path for folder in folders for path in folder.rglob("*"))
    files = (path.relative_to(ROOT).as_posix() for path in (*ROOT.iterdir(), *inside) if path.is_file())
    return [path for path in files if travels(path)]


@each_dockerfile
def test_every_copied_file_is_there_and_travels(dockerfile):
    copied = [rest.split() for name, rest in steps(dockerfile) if name == "COPY" and not rest.startswith("--from")]
    sources = {source for *some, _ in copied for source in some}
    assert sources.issuperset(("install.sh", "pyproject.toml", "constraints.txt", "megaenc/__init__.py", "."))
    assert not [source for source in sources - {"."} if not ((ROOT / source).is_file() and travels(source))]


def test_nothing_else_travels():
    sent = sent_files()
    tops = {path.split("/")[0] for path in sent}
    assert not tops & {".git", ".venv", "demo", ".ci"} and not any("__pycache__" in path for path in sent)
    assert {"megaenc/cli.py", "docker/rocm_env.sh", "docker/cuda_env.sh", "docker/health.sh"} <= set(sent)
    assert sorted(path for path in sent if path.startswith("tests")) == [
        "tests/conftest.py",
        "tests/runs.py",
        "tests/smoke/test_smoke.py",
    ]


@each_dockerfile
def test_the_base_is_an_argument_with_a_pinned_default(dockerfile):
    (first, base), *_ = steps(dockerfile)
    assert first == "ARG" and re.fullmatch(r"BASE=[a-z/]+:\S*\d+\.\d+\S*", base), base
    bases = [stage[0][1].partition(" AS ")[::2] for stage in stages(dockerfile)]
    arguments = {f"${{{rest.partition('=')[0]}}}" for name, rest in steps(dockerfile) if name == "ARG" and "BASE" in rest}
    assert {base for base, _ in bases} <= {name for _, name in bases} | arguments
    assert bases[-1][0] == "${BASE}"


@each_dockerfile
def test_the_script_installs_and_a_user_without_rights_works(dockerfile):
    last = stages(dockerfile)[-1]
    assert [
        rest
        for name, rest in steps(dockerfile)
        if name == "RUN" and re.search(r"EXTRAS=(''|\"\$EXTRAS\")", rest) and "./install.sh" in rest
    ]
    assert [rest for name, rest in last if name == "USER"][-1] == "10001"
    assert [rest for name, rest in last if name == "WORKDIR"][-1] == "/work"


@each_dockerfile
def test_the_image_says_what_it_is_and_can_be_asked_whether_it_is_well(dockerfile):
    lines = stages(dockerfile)[-1]
    label = next(rest for name, rest in lines if name == "LABEL")
    keys = {word.partition("=")[0].removeprefix("org.opencontainers.image.") for word in shlex.split(label)}
    assert keys == {"title", "description", "licenses", "revision"}
    health = next(rest for name, rest in lines if name == "HEALTHCHECK")
    assert health.endswith('CMD ["megaenc-health", "cpu"]')
    assert any("ln -s /opt/megaenc/docker/health.sh /usr/local/bin/megaenc-health" in rest for name, rest in lines)


@pytest.mark.parametrize("path", [*DOCKERFILES, ROOT / "docs/containers.md"], ids=lambda path: path.name)
def test_what_is_shown_can_be_trained_by_as_many_processes(path):
    from megaenc.training.config import parse_config

    shown = re.findall(r"torchrun --nproc-per-node (\d+) \S+/pretrain_encoder\.py (.*)", path.read_text())
    assert shown or path.suffix == ".cpu"
    for processes, words in shown:
        parse_config(shlex.split(words), prog="").check(world_size=int(processes))


@pytest.mark.system
def test_health_trains_two_steps_and_says_so():
    """With two processes, by a link of another name as in the images."""
    ran = subprocess.run(
        [ROOT / "docker/health.sh", "cpu"],
        env=runs.surroundings() | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NPROC": "2"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "healthy: two steps trained, 2 x processor\n"), ran.stderr


def test_health_says_what_is_wrong(tmp_path):
    (tmp_path / "megaenc").write_text("#!/bin/sh\necho 'error: no disk' >&2\nexit 2\n")
    (tmp_path / "megaenc").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NPROC": "1"}
    ran = subprocess.run([ROOT / "docker/health.sh"], env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines() == ["error: no disk", "error: two steps of training failed with exit code 2"]
    assert subprocess.run([ROOT / "docker/health.sh", "gpu"], capture_output=True, check=False).returncode == 2


# ---- settings of the accelerators ------------------------------------------------------------------------------------------


def environment_in_image(kind: str, **variables: str) -> dict[str, str]:
    """What a command sees that the entry point of the image starts."""
    (entry,) = (json.loads(rest) for name, rest in steps(ROOT / f"docker/Dockerfile.{kind}") if name == "ENTRYPOINT")
    command = [part.replace("/opt/megaenc", str(ROOT)) for part in entry] + ["env", "-0"]
    ran = subprocess.run(command, env={"PATH": os.defpath, **variables}, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in ran.stdout.split("\0") if line)


@pytest.mark.parametrize(
    ("kind", "values", "other", "taken_out"),
    [
        ("rocm", {"HSA_NO_SCRATCH_RECLAIM": "1", "NCCL_P2P_NET_CHUNKSIZE": "524288"}, "GPU_MAX_HW_QUEUES", "RCCL_MSCCL_ENABLE"),
        ("cuda", {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "WARN"}, "PYTORCH_ALLOC_CONF", "TORCH_NCCL_HIGH_PRIORITY"),
    ],
)
def test_settings_can_be_overridden_and_taken_out(kind, values, other, taken_out):
    settings = environment_in_image(kind)
    assert {name: settings.get(name) for name in values} == values
    assert not [name for name in settings if name.startswith(("NVTE", "megaenc"))]
    changed = environment_in_image(kind, **{other: "mine", taken_out: ""})
    assert changed.pop(other) == "mine" and settings.keys() - changed.keys() == {taken_out, other}


@each_accelerator
def test_each_setting_has_its_reason(kind):
    lines = (ROOT / f"docker/{kind}_env.sh").read_text().splitlines()
    set_at = [number for number, line in enumerate(lines) if line.startswith("megaenc_default ")]
    assert len(set_at) >= 5
    assert all(lines[number - 1].startswith("# ") for number in set_at)


# ---- Apptainer -------------------------------------------------------------------------------------------------------------


def sections(definition: Path) -> dict[str, list[str]]:
    """The lines of each %section, comments left out, continued ones joined."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in re.sub(r" *\\\n\s*", " ", definition.read_text()).splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
        elif line.strip() and not line.lstrip().startswith("#"):
            found.setdefault(name, []).append(line.strip())
    return found


@each_definition
def test_a_definition_makes_what_the_dockerfile_makes(definition):
    kind = definition.stem.removeprefix("megaenc-")
    dockerfile = (ROOT / f"docker/Dockerfile.{kind}").read_text()
    found = sections(definition)
    assert found["arguments"][0] in re.findall(r"^ARG (BASE=.*)$", dockerfile, re.MULTILINE)
    words = set(re.sub(r" *\\\n\s*", " ", dockerfile).split())
    packages = next(line for line in found["post"] if "apt-get install" in line).partition("--no-install-recommends ")[2].split()
    assert packages and set(packages) <= words
    assert any("./install.sh" in line for line in found["post"])
    checks = [line for line in found["post"] if "is not built for" in line]
    assert len(checks) == 1 and checks[0] in re.sub(r" *\\\n\s*", " ", dockerfile)
    assert found["runscript"] == [f". /opt/megaenc/docker/{kind}_env.sh", 'exec "$@"']
    for line in found["files"]:
        source, target = line.split()
        assert (ROOT / source).exists() and target.startswith("/opt/megaenc/"), line
        assert (ROOT / source).is_dir() or travels(source), line


def test_lint_sees_every_script_and_dockerfile():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    seen = {
        path for pattern in recipe.split() if "*" in pattern or "/" in pattern or "." in pattern for path in ROOT.glob(pattern)
    }
    assert {*SCRIPTS, *DOCKERFILES} <= seen
