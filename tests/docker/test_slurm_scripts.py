"""The sbatch files without Slurm: a torchrun, a scontrol and an srun that write down what they are asked stand in for them."""

import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker/slurm"
FILES = sorted(FOLDER.glob("*.sbatch"))
TRAINING = ["one", "many", "rocm-apptainer"]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_training = pytest.mark.parametrize("name", TRAINING)


def joined(text: str) -> str:
    """Lines that a backslash continues, as one."""
    return re.sub(r" *\\\n\s*", " ", text)


def headers(path: Path) -> dict[str, str]:
    """What #SBATCH lines ask for."""
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", path.read_text(), re.MULTILINE)
    assert len(found) == path.read_text().count("#SBATCH"), path
    return dict(found)


def test_what_there_is():
    assert [path.stem for path in FILES] == sorted([*TRAINING, "smoke"])


@each_file
def test_the_shell_can_read_it(path):
    subprocess.run(["bash", "-n", path], check=True)
    assert "bash" in path.read_text().splitlines()[0]


@each_file
def test_the_torchrun_line_is_the_readmes(path):
    """But for where the processes are and what the job is for, which come before."""
    readme = re.search(r"torchrun (--nproc-per-node) 4 (examples/\S+) --config", joined((ROOT / "README.md").read_text()))
    line = next(line for line in joined(path.read_text()).splitlines() if line.endswith(('"$@"', '"${@:2}"')) and "$code" in line)
    line = line.replace("${@:2}", "$@").replace('"$code/', "").replace('.py"', ".py")
    assert line.endswith(f'{readme[1]} "$NPROC" {readme[2]} "$@"'), line


@each_training
def test_a_job_saves_before_its_time_is_over_and_is_requeued(name):
    asked = headers(FOLDER / f"{name}.sbatch")
    assert "requeue" in asked and asked["open-mode"] == "append"
    warned = int(re.fullmatch(r"B:USR1@(\d+)", asked["signal"])[1])
    assert int(re.search(r"SAVE_SECONDS:-(\d+)", (FOLDER / "job.sh").read_text())[1]) < warned


@each_training
def test_torchrun_knows_what_it_is_asked(job, tmp_path, name):
    """Its own parser does, and what it makes of it is a launch that hands signals on and leaves time to save."""
    from torch.distributed.run import config_from_args, get_args_parser

    assert ended(job(name, "--save", "a", SAVE_SECONDS="77"))[0] == 0
    asked = get_args_parser().parse_args((tmp_path / "torchrun").read_text().splitlines())
    assert (
        environment_of_torchrun(tmp_path)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "77"
    )  # --shutdown-timeout, which torch 2.11 does not know
    launch, _, _ = config_from_args(asked)
    assert launch.signals_to_handle == "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1" and launch.nproc_per_node == 8
    assert asked.training_script.endswith("examples/pretrain_encoder.py") and asked.training_script_args == ["--save", "a"]


@each_training
@pytest.mark.parametrize(("minutes", "save", "code"), [("20", "540", 0), ("13", "540", 2), ("13", "60", 0), ("NONE", "540", 0)])
def test_a_job_too_short_to_save_is_refused(job, tmp_path, name, minutes, save, code):
    """It would be told to save before it has trained, again and again."""
    end = time.strftime("%FT%T", time.localtime(time.time() + 60 * int(minutes))) if minutes.isdigit() else minutes
    found, said = ended(job(name, ENDTIME=end, SAVE_SECONDS=save))
    assert found == code and ("error: --time: found 7" in said) == (code == 2)
    assert (tmp_path / "torchrun").exists() == (code == 0)


def test_every_variable_has_its_reason():
    lines = (FOLDER / "job.sh").read_text().splitlines()
    variables = [number for number, line in enumerate(lines) if re.match(r"[A-Z_]+=\$\{", line) and "BIND$" not in line]
    assert len(variables) == 9 and all(lines[number - 1].startswith("# ") for number in variables)
    told = (ROOT / "docs/clusters.md").read_text()
    for number in variables:
        assert f"`{lines[number].partition('=')[0]}`" in told


# ---- carried out with stand-ins --------------------------------------------------------------------------------------------

# A torchrun: leaves the note of exit code NOTE as its processes do, waits where it is to, and ends as ENDS says.
TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$HERE/torchrun"
env >"$HERE/environment"
while [ $# -gt 0 ]; do [ "$1" = --log-dir ] && logs=$2; shift; done
trap 'told=USR1' USR1
trap 'told=TERM' TERM
echo call >>"$HERE/calls"
[ "$(wc -l <"$HERE/calls")" != "$DIES_AT" ] || exit 1
if [ -n "$WAITS" ]; then touch "$HERE/waiting"; until [ -n "$told" ]; do sleep 0.05; done; fi
echo "$told" >"$HERE/told"
mkdir -p "$logs/none_abc/attempt_0"
[ -z "$NOTE" ] || echo "$NOTE" >"$logs/none_abc/attempt_0/megaenc_exit_code"
exit "$ENDS"
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$HERE/scontrol"
[ "$1 $2" != "show hostnames" ] || printf 'first\\nsecond\\n'
"""
SQUEUE = """#!/bin/bash
echo "$ENDTIME"
"""
SRUN = """#!/bin/bash
printf '%s\\n' "$@" >"$HERE/srun"
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
# An Apptainer: does as the image's runscript does, which reads the settings of the accelerator.
APPTAINER = """#!/bin/bash
printf '%s\\n' "$@" >"$HERE/apptainer"
while [ "$1" != torchrun ]; do shift; done
. "$HERE/docker/rocm_env.sh"
exec "$@"
"""


@pytest.fixture
def job(tmp_path):
    """Start a file as Slurm would, in a clone with nothing in it but what it reads; returns the process."""
    for name, text in (
        ("torchrun", TORCHRUN),
        ("scontrol", SCONTROL),
        ("srun", SRUN),
        ("apptainer", APPTAINER),
        ("squeue", SQUEUE),
    ):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "docker").symlink_to(ROOT / "docker")
    (tmp_path / "megaenc-rocm.sif").touch()
    started = []

    def start(name: str, *arguments: str, **variables: str) -> subprocess.Popen:
        env = {
            "PATH": f"{tmp_path / 'bin'}:{os.defpath}",
            "HERE": str(tmp_path),
            "VENV": "",
            "WAITS": "",
            "NOTE": "",
            "DIES_AT": "",
            "ENDS": "0",
        }
        env |= {"SLURM_JOB_ID": "12345", "SLURM_JOB_NAME": "megaenc", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
        started.append(
            subprocess.Popen(
                ["bash", FOLDER / f"{name}.sbatch", *arguments],
                cwd=tmp_path, env=env | {"SLURM_GPUS_ON_NODE": "8"} | variables, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


def requeued(tmp_path) -> bool:
    return "requeue 12345" in (tmp_path / "scontrol").read_text().splitlines()


def asked_of_torchrun(tmp_path) -> dict[str, str]:
    words = (tmp_path / "torchrun").read_text().splitlines()
    return dict(itertools.pairwise(words))


@each_training
@pytest.mark.parametrize(
    ("ends", "note", "code", "again"),
    [("0", "", 0, False), ("1", "75", 75, True), ("1", "2", 2, False), ("1", "", 1, False), ("0", "75", 0, False)],
)
def test_how_a_job_ends(job, tmp_path, name, ends, note, code, again):
    """75, stopped and saved, is requeued; what went wrong is passed on and is not."""
    process = job(name, "--save", "a", ENDS=ends, NOTE=note)
    assert ended(process)[0] == code
    assert requeued(tmp_path) == again
    assert not list((tmp_path / ".jobs").iterdir())  # no notes are left


@pytest.mark.parametrize(("ends", "note", "code"), [("1", "0", 0), ("1", "75", 75), ("1", "", 1), ("0", "0", 0)])
def test_with_a_node_less_a_job_ends_as_its_run_does(job, tmp_path, ends, note, code):
    assert ended(job("many", MIN_NODES="1", ENDS=ends, NOTE=note))[0] == code
    assert asked_of_torchrun(tmp_path)["--nnodes"] == "1:2"
    assert {"--no-kill", "--kill-on-bad-exit=0"} < set((tmp_path / "srun").read_text().splitlines())


@pytest.mark.parametrize("count", ["0", "3", "two"])
def test_too_many_nodes_are_one_line(job, count):
    code, said = ended(job("many", MIN_NODES=count))
    assert code == 2 and said.startswith(f"error: MIN_NODES: found {count}, expected 1 to 2, the nodes of the job")


@each_training
def test_that_time_is_nearly_over_reaches_torchrun(job, tmp_path, name):
    process = job(name, ENDS="1", NOTE="75", WAITS="yes")
    wait_for(tmp_path / "waiting")
    process.send_signal(signal.SIGUSR1)
    code, said = ended(process)
    assert (code, (tmp_path / "told").read_text()) == (75, "USR1\n") and requeued(tmp_path)
    assert "time is nearly over, asking for a save" in said and "job 12345: ended with 75" in said


def test_a_job_that_is_being_ended_waits_for_the_save_and_is_not_requeued_by_itself(job, tmp_path):
    """Slurm tells all processes, and requeues the job itself where it is to be."""
    process = job("one", ENDS="1", NOTE="75", WAITS="yes")
    wait_for(tmp_path / "waiting")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    (torchrun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(torchrun), signal.SIGTERM)
    assert ended(process)[0] == 75 and not requeued(tmp_path)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def test_processes_and_where_they_meet(job, tmp_path):
    assert ended(job("one", "--lr", "1"))[0] == 0
    asked = asked_of_torchrun(tmp_path)
    assert asked["--nproc-per-node"] == "8" and asked["--save"] == "runs/megaenc-12345" and asked["--lr"] == "1"
    assert ended(job("many", "--save=mine", NPROC="4", MAX_RESTARTS="7"))[0] == 0
    asked = asked_of_torchrun(tmp_path)
    assert (asked["--nnodes"], asked["--nproc-per-node"], asked["--max-restarts"]) == ("2:2", "4", "7")
    assert asked["--rdzv-endpoint"] == "first:20345" and asked["--rdzv-id"] == "12345" and "--save" not in asked
    assert ended(job("one", SLURM_GPUS_ON_NODE=""))[0] == 0
    assert asked_of_torchrun(tmp_path)["--nproc-per-node"] == "1"


def test_without_flags_the_steps_suit_the_processes(job, tmp_path):
    """As the README has it: sbatch and the file's name."""
    from megaenc.training.config import parse_config

    assert ended(job("many"))[0] == 0
    asked = asked_of_torchrun(tmp_path)
    assert (asked["--micro-batch-size"], asked["--global-batch-size"]) == ("2", "32")
    assert asked["--save"] == "runs/megaenc-12345" and "--config" not in asked
    words = (tmp_path / "torchrun").read_text().splitlines()
    parse_config(words[words.index("./examples/pretrain_encoder.py") + 1 :], prog="").check(world_size=16)
    assert ended(job("one", "--global-batch-size", "8"))[0] == 0
    assert asked_of_torchrun(tmp_path)["--global-batch-size"] == "8" and "--micro-batch-size" not in asked_of_torchrun(tmp_path)


def test_a_clone_without_its_environment_is_refused(job, tmp_path):
    code, said = ended(job("one", VENV=".venv"))
    assert code == 2 and said.startswith("error: VENV=.venv has no torchrun: ./install.sh makes .venv")
    assert not (tmp_path / "torchrun").exists()


def environment_of_torchrun(tmp_path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines() if "=" in line)


def test_what_the_container_sees(job, tmp_path):
    (tmp_path / "other.sif").touch()
    assert ended(job("rocm-apptainer", SIF="other.sif", BIND="/data,/scratch", TMPDIR="/local/1"))[0] == 0
    words = (tmp_path / "apptainer").read_text().splitlines()
    assert words[:6] == ["run", "--bind", f"{tmp_path},/local/1,/data,/scratch", "--pwd", str(tmp_path), "other.sif"]
    assert "/opt/megaenc/examples/pretrain_encoder.py" in words
    assert ended(job("one", SIF="megaenc-rocm.sif", TMPDIR="/tmp/mine"))[0] == 0  # any file, in an image
    words = (tmp_path / "apptainer").read_text().splitlines()
    assert words[:6] == ["run", "--bind", str(tmp_path), "--pwd", str(tmp_path), "megaenc-rocm.sif"]
    code, said = ended(job("rocm-apptainer", SIF="nothing.sif"))
    assert code == 2 and said.startswith("error: SIF=nothing.sif: no such image")


def test_what_is_taken_out_before_sbatch_stays_out(job, tmp_path):
    """`RCCL_MSCCL_ENABLE= sbatch ...`, in an image too, whose own settings come last."""
    assert ended(job("rocm-apptainer", RCCL_MSCCL_ENABLE="", NCCL_CROSS_NIC="2"))[0] == 0
    found = environment_of_torchrun(tmp_path)
    assert "RCCL_MSCCL_ENABLE" not in found and found["NCCL_CROSS_NIC"] == "2" and found["NCCL_PXN_DISABLE"] == "1"
    assert ended(job("many", CUDA_DEVICE_MAX_CONNECTIONS="", NCCL_DEBUG="INFO"))[0] == 0
    found = environment_of_torchrun(tmp_path)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found and found["NCCL_DEBUG"] == "INFO"


def test_one_process_has_all_cores(job, tmp_path):
    """Unless it is told otherwise; several share them out by themselves."""
    for processes, given, found in (("1", {}, None), ("8", {}, "1"), ("1", {"OMP_NUM_THREADS": "3"}, "3")):
        assert ended(job("one", NPROC=processes, **given))[0] == 0
        assert environment_of_torchrun(tmp_path).get("OMP_NUM_THREADS") == found


def test_the_smoke_job_trains_and_goes_on(job, tmp_path):
    code, said = ended(job("smoke"))
    assert code == 0 and said.splitlines()[-1] == "smoke: ok"
    assert said.count("-- ten") == 2 and "-- doctor" in said and asked_of_torchrun(tmp_path)["--global-batch-size"] == "32"
    (tmp_path / "calls").unlink()
    code, said = ended(job("smoke", NOTE="0", DIES_AT="3"))  # in the second run, which leaves no note
    assert code == 1 and said.splitlines()[-1] == "smoke: failed with 1" and said.count("-- ten") == 2
    code, said = ended(job("smoke", ENDS="1", NOTE="2"))
    assert code == 2 and said.splitlines()[-1] == "smoke: failed with 2" and said.count("-- ten") == 1


# ---- layouts ---------------------------------------------------------------------------------------------------------------

LAYOUTS = sorted((ROOT / "configs/layout").glob("*.yaml"))
DEVICES = {"h100": 8, "mi300x": 8, "mi250x": 16}


def test_there_is_a_layout_for_each_machine_and_model():
    assert {path.stem for path in LAYOUTS} == {f"{gpu}-{model}" for gpu in DEVICES for model in ("210m", "610m", "1b")}


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_a_layout_changes_nothing_but_the_layout_and_fits(path, tmp_path, monkeypatch):
    """It is the study's recipe; on as many devices as it is for it can be laid out, and the estimate says that it fits."""
    import dataclasses

    from megaenc import flags
    from megaenc.backend.parallel_config import ParallelConfig
    from megaenc.estimate import command
    from megaenc.training.config import read_config_file

    gpu, model = path.stem.split("-")
    settings, recipe = (read_config_file(str(file)) for file in (path, ROOT / f"configs/pretrain/encoder-{model}.yaml"))
    layout_only = {field.name for field in dataclasses.fields(ParallelConfig)} | {"micro_batch_size"}
    there, here = flags.flatten(recipe), flags.flatten(settings)
    assert {name for name in here if here[name] != there[name]} <= layout_only
    on_host = dataclasses.replace(settings.layout, overlap_grad_reduce=False, overlap_param_gather=False)
    for nodes in (1, 2, 4):
        dataclasses.replace(settings, layout=on_host).check(world_size=DEVICES[gpu] * nodes)

    flags_ = ["--config", str(path), "--gpu", gpu, "--gpus", str(DEVICES[gpu]), "--output", str(tmp_path / "said.json")]
    command.main(flags_)
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["estimate"]["memory"]["fits"] is True
