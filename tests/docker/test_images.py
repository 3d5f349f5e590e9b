"""The installation and the container images, as far as they can be checked without a network and without a Docker engine."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
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


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docker/{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


language = load("dockerfile_language")  # before what imports it
interpreter = load("run_in_chroot")


def install(**variables: str) -> subprocess.CompletedProcess:
    """Run install.sh from elsewhere, with nothing set that it reads but `variables`."""
    names = ("PYTHON", "PYTHONPATH", "VENV", "EXTRAS", "TORCH_INDEX", "PIP_BREAK_SYSTEM_PACKAGES")
    env = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run([ROOT / "install.sh"], cwd="/", env={**env, **variables}, capture_output=True, text=True, check=False)


@pytest.fixture
def environment(tmp_path):
    """A virtual environment whose pip writes down what it is asked, with the packages of an image for ROCm."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "pip").mkdir()
    (packages / "pip/__main__.py").write_text(
        "import json, sys\n"
        "if '--version' not in sys.argv:\n"
        "    constraints = open(sys.argv[sys.argv.index('--constraint') + 1]).read()\n"
        f"    print(json.dumps([sys.argv[1:], constraints]), file=open({str(tmp_path / 'asked')!r}, 'a'))\n"
    )
    for name, version in (("torch", "2.12.0+rocm7.2.4"), ("triton", "3.7.0"), ("apex", "1.0+rocm7.2.4"), ("numpy", "1.26.4")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def asked_of_pip(environment: Path) -> list[tuple[list[str], list[str]]]:
    """(arguments, lines of the constraints) of each call."""
    calls = (json.loads(line) for line in (environment.parent / "asked").read_text().splitlines())
    return [(arguments[arguments.index("--constraint") + 2 :], constraints.splitlines()) for arguments, constraints in calls]


# ---- install.sh ------------------------------------------------------------------------------------------------------------


def test_help_names_every_variable():
    shown = subprocess.run([ROOT / "install.sh", "--help"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  ([A-Z_]+) ", shown, re.MULTILINE) == ["PYTHON", "VENV", "TORCH_INDEX", "EXTRAS"]


def test_into_a_virtual_environment_with_the_pinned_versions(environment):
    ran = install(VENV=str(environment), TORCH_INDEX="https://example.org/whl/cpu")
    assert ran.returncode == 0, ran.stderr
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    torch, package = asked_of_pip(environment)
    assert torch == (["--index-url", "https://example.org/whl/cpu", "torch"], pinned)
    assert package == (["--editable", ".[dev]"], pinned)


def test_tests_get_a_triton_where_torch_has_brought_none(environment):
    (own,) = environment.glob("lib/python*/site-packages/triton-*.dist-info")
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: pytorch-triton-rocm\nVersion: 3.7.0\n")
    assert install(VENV=str(environment)).returncode == 0
    shutil.rmtree(own)
    for extras in ("finetune,dev", "finetune"):
        assert install(VENV=str(environment), EXTRAS=extras).returncode == 0
    packages = [arguments[-1] for arguments, _ in asked_of_pip(environment)[1::2]]
    assert packages == [".[dev]", ".[finetune,dev,triton]", ".[finetune]"]


def test_a_torch_that_came_with_the_image_is_kept(environment):
    ran = install(PYTHON=str(environment / "bin/python"), VENV="", EXTRAS="")
    assert ran.returncode == 0, ran.stderr
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    expected = ["apex==1.0+rocm7.2.4", "torch==2.12.0+rocm7.2.4", "triton==3.7.0"]
    expected += [line for line in pinned if not line.startswith(("torch==", "triton=="))]
    assert asked_of_pip(environment) == [(["torch"], expected), (["--editable", "."], expected)]


def test_a_python_without_torch_gets_the_pinned_one(environment):
    for info in environment.glob("lib/python*/site-packages/*.dist-info"):
        shutil.rmtree(info)
    assert install(PYTHON=str(environment / "bin/python"), VENV="").returncode == 0
    assert asked_of_pip(environment)[0][1] == (ROOT / "constraints.txt").read_text().splitlines()


def refusal(**variables: str) -> str:
    ran = install(**variables)
    assert ran.returncode == 2 and not ran.stdout, (ran.returncode, ran.stdout)
    (line,) = ran.stderr.splitlines()
    return line


def test_refusals_are_one_line(tmp_path):
    assert refusal(PYTHON="no-such-python") == "error: PYTHON=no-such-python does not run"
    assert refusal(PYTHON=sys.executable, EXTRAS="dev,devv").startswith("error: EXTRAS: devv is not among cuda, rocm")

    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\ntest -z "$2"\n')  # says no to the first real question, which is its age
    old.chmod(0o755)
    assert refusal(PYTHON=str(old)) == f"error: PYTHON={old} is older than 3.11; name another, as in PYTHON=python3.12"

    (tmp_path / "ensurepip.py").write_text("raise ImportError")  # as where Debian's python3-venv is missing
    without_venv = refusal(PYTHON=sys.executable, PYTHONPATH=str(tmp_path), VENV=str(tmp_path / "venv"))
    assert "has no venv module" in without_venv and "python3-venv" in without_venv
    assert not (tmp_path / "venv").exists()

    venv.create(tmp_path / "bare", with_pip=False)
    assert refusal(VENV=str(tmp_path / "bare")) == f"error: {tmp_path / 'bare'}/bin/python has no pip"


def test_a_python_of_the_distribution_is_left_alone(tmp_path):
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    (tmp_path / "sysconfig.py").write_text(f"def get_path(name):\n    return {str(tmp_path)!r}\n")
    line = refusal(PYTHON=os.path.realpath(sys.executable), PYTHONPATH=str(tmp_path), VENV="")
    assert "belongs to the distribution" in line and "VENV=DIR" in line


def test_an_argument_is_refused():
    ran = subprocess.run([ROOT / "install.sh", "--venv"], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == ["error: --venv is not known; settings are variables: ./install.sh --help"]


def test_the_oldest_python_is_the_same_everywhere():
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in (ROOT / "install.sh").read_text()


def test_one_script_installs():
    recipe = re.search(r"^\$\(INSTALLED\): (.*)\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "install.sh" in recipe[1].split() and recipe[2].endswith("./install.sh")
    assert "`./install.sh`" in (ROOT / "README.md").read_text()
    for path in (ROOT / "Makefile", ROOT / "README.md", ROOT / "docs/containers.md", *DOCKERFILES, *DEFINITIONS):
        steps_without = re.sub(r"if \[ -[en] .*?;[\s\\]*fi\b", "", path.read_text(), flags=re.DOTALL)  # Transformer Engine's
        assert not re.search(r"pip3? install", steps_without), path


# ---- images ----------------------------------------------------------------------------------------------------------------


def steps(dockerfile: Path) -> list[tuple[str, str]]:
    return [(name, rest) for _, name, rest in language.instructions(dockerfile.read_text())]


@each_dockerfile
def test_every_copied_file_is_there_and_travels(dockerfile):
    sent = language.sent_files(ROOT)
    copied = [rest.split() for name, rest in steps(dockerfile) if name == "COPY" and not rest.startswith("--from")]
    assert copied
    targets = {target for *sources, target in copied for _, target in language.copies(sources, target, sent)}
    needed = ("./install.sh", "./pyproject.toml", "./constraints.txt", "megaenc/__init__.py", "./examples/pretrain_encoder.py")
    assert targets.issuperset(needed), sorted(targets)


def test_nothing_else_travels():
    sent = language.sent_files(ROOT)
    tops = {path.split("/")[0] for path in sent}
    assert not tops & {".git", ".venv", "demo", ".ci"} and not any("__pycache__" in path for path in sent)
    assert {"megaenc/cli.py", "docker/rocm_env.sh", "docker/cuda_env.sh", "docker/health.sh"} <= set(sent)
    assert [path for path in sent if path.startswith("tests")] == [
        "tests/conftest.py",
        "tests/runs.py",
        "tests/smoke/test_smoke.py",
    ]


@each_dockerfile
def test_the_base_is_an_argument_with_a_pinned_default(dockerfile):
    (first, base), *_ = steps(dockerfile)
    assert first == "ARG" and re.fullmatch(r"BASE=[a-z/]+:\S*\d+\.\d+\S*", base), base
    found, arguments = language.stages(dockerfile, {})
    names = {stage.name for stage in found}
    assert {stage.base for stage in found} <= names | {arguments["BASE"]}
    assert found[-1].base == arguments["BASE"]
    asked = language.stages(dockerfile, {"BASE": "mine:1"})[0]
    assert {stage.base for stage in asked} <= names | {"mine:1"}


@each_dockerfile
def test_the_script_installs_and_a_user_without_rights_works(dockerfile):
    last = language.stages(dockerfile, {})[0][-1]
    assert [rest for name, rest in steps(dockerfile) if name == "RUN" and "EXTRAS=''" in rest and "./install.sh" in rest]
    assert [rest for _, name, rest in last.lines if name == "USER"][-1] == "10001"
    assert [rest for _, name, rest in last.lines if name == "WORKDIR"][-1] == "/work"


@each_dockerfile
def test_the_image_says_what_it_is_and_can_be_asked_whether_it_is_well(dockerfile):
    lines = language.stages(dockerfile, {})[0][-1].lines
    label = next(rest for _, name, rest in lines if name == "LABEL")
    keys = {word.partition("=")[0].removeprefix("org.opencontainers.image.") for word in shlex.split(label)}
    assert keys == {"title", "description", "licenses", "revision"}
    health = next(rest for _, name, rest in lines if name == "HEALTHCHECK")
    assert health.endswith('CMD ["megaenc-health", "cpu"]')
    assert any("ln -s /opt/megaenc/docker/health.sh /usr/local/bin/megaenc-health" in rest for _, name, rest in lines)


@pytest.mark.parametrize("path", [*DOCKERFILES, ROOT / "docs/containers.md"], ids=lambda path: path.name)
def test_what_is_shown_can_be_trained_by_as_many_processes(path):
    from megaenc.training.settings import read_settings

    shown = re.findall(r"torchrun --nproc-per-node (\d+) \S+/pretrain_encoder\.py (.*)", path.read_text())
    assert shown or path.suffix == ".cpu"
    for processes, words in shown:
        read_settings(shlex.split(words), prog="").check(world_size=int(processes))


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
        ("rocm", {"HSA_NO_SCRATCH_RECLAIM": "1", "NCCL_P2P_NET_CHUNKSIZE": "524288"}, "GPU_MAX_HW_QUEUES", "NCCL_IB_GID_INDEX"),
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
        assert (ROOT / source).is_dir() or language.travels(source, language.ignore_rules(ROOT)), line


def test_lint_sees_every_script_and_dockerfile():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    seen = {
        path for pattern in recipe.split() if "*" in pattern or "/" in pattern or "." in pattern for path in ROOT.glob(pattern)
    }
    assert {*SCRIPTS, *DOCKERFILES} <= seen


# ---- the interpreter -------------------------------------------------------------------------------------------------------


def test_instructions_and_lines():
    text = "# a\nARG A=1\nRUN one \\\n # between\n && two\n\ncopy a b\n"
    assert list(language.instructions(text)) == [(2, "ARG", "A=1"), (3, "RUN", "one && two"), (7, "COPY", "a b")]


def test_the_last_line_of_dockerignore_that_matches_decides(tmp_path):
    (tmp_path / ".dockerignore").write_text("# c\n*\n!kept\n!deep/inside.txt\n**/cache\n*.log\n")
    rules = language.ignore_rules(tmp_path)
    assert [path for path in ("kept/a", "other", "deep/inside.txt", "deep/b", "kept/cache/x", "kept/a.log", "a.log", "cache")
            if language.travels(path, rules)] == ["kept/a", "deep/inside.txt", "kept/a.log"]  # fmt: skip


def built(tmp_path, text: str, target: str | None = None, **arguments: str):
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/of-the-base").touch()
    place = (tmp_path / "Dockerfile", tmp_path / "context", tmp_path / "base", tmp_path / "root")
    return interpreter.build(*place, arguments, target)


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_steps_without_commands(tmp_path):
    (tmp_path / "context/package").mkdir(parents=True)
    (tmp_path / "context/package/a.py").write_text("a")
    (tmp_path / "context/read.me").write_text("r")
    text = """
        ARG BASE=x:1
        FROM ${BASE}
        ARG FOLDER=src
        WORKDIR /opt/$FOLDER
        COPY read.me package/a.py ./
        COPY . .
        ENV PATH=/venv/bin:$PATH NOTE="two words"
        USER 7
        ENTRYPOINT ["sh"]
        CMD ["-c", "true"]
    """
    image = built(tmp_path, text, FOLDER="lib")
    assert files_of(tmp_path / "root") == ["of-the-base", "opt/lib/a.py", "opt/lib/package/a.py", "opt/lib/read.me"]
    assert files_of(tmp_path / "base") == ["of-the-base"]
    assert image.env["PATH"].startswith("/venv/bin:/usr/") and image.env["NOTE"] == "two words"
    assert (image.folder, image.user, image.entrypoint, image.command) == ("/opt/lib", "7", ["sh"], ["-c", "true"])
    assert interpreter.ids(tmp_path / "root", image.user) == "7:0"


STAGES = """
    ARG BASE=x:1
    ARG OTHER=${BASE}
    FROM ${OTHER} AS Build
    ARG OTHER
    WORKDIR /opt
    COPY made ./
    FROM build AS never
    COPY no-such-file ./
    FROM ${BASE}
    LABEL title="a thing" other=${OTHER}
    COPY --from=build /opt /srv/opt
    HEALTHCHECK --interval=1h CMD ["well"]
"""


def test_stages(tmp_path, capfd):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/made").write_text("m")
    image = built(tmp_path, STAGES, OTHER="y:2")
    assert files_of(tmp_path / "root") == ["of-the-base", "srv/opt/made"]
    assert (image.labels, image.health, image.folder) == ({"title": "a thing", "other": ""}, ["well"], "/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Dockerfile", "base", "context", "root"]
    said = capfd.readouterr().out
    assert "build, from y:2" in said and "2, from x:1" in said and "never" not in said


def test_a_stage_by_its_name(tmp_path):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/made").write_text("m")
    assert built(tmp_path, STAGES, target="build").folder == "/opt"
    assert files_of(tmp_path / "root") == ["of-the-base", "opt/made"]


def test_a_root_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(language.Refusal, match="root exists; remove it or name another --root"):
        built(tmp_path, "FROM x")


def test_a_stage_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(language.Refusal, match=r"--target later: .* has the stages build, 1"):
        built(tmp_path, "FROM x AS build\nFROM y", target="later")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LABEL a=b", ":1: LABEL before the first FROM"),
        ("FROM x AS", ":1: only FROM IMAGE [AS NAME] is known"),
        ("FROM x\nVOLUME /a", ":2: VOLUME is not known here"),
        ("FROM x\nHEALTHCHECK NONE", ":2: only HEALTHCHECK ... CMD as a list is known"),
        ("FROM x\nCOPY a b", ":2: COPY a: no such file among those that .dockerignore lets travel"),
        ("FROM x\nCOPY --from=y a b", ":2: only COPY --from=STAGE SOURCE DESTINATION is known"),
        ("FROM x\nCOPY --chown=1 a b", ":2: only COPY [--from=STAGE] SOURCE ... DESTINATION is known"),
        ('FROM x\nRUN ["a"]', ":2: only RUN with a command for the shell is known"),
        ("FROM x\nCMD megaenc", ":2: only CMD as a list is known"),
    ],
)
def test_what_the_interpreter_does_not_know_is_refused_with_its_line(tmp_path, text, expected):
    with pytest.raises(language.Refusal) as refused:
        built(tmp_path, text)
    assert str(refused.value) == f"{tmp_path}/Dockerfile{expected}"


def test_a_build_argument_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(language.Refusal, match=r"--build-arg X: .* has no such argument"):
        built(tmp_path, "ARG Y=1\nFROM x", X="2")
