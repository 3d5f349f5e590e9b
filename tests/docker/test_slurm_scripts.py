"""The sbatch files with stand-ins for torchrun, scontrol and srun."""

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from waiting import wait_until

from megaenc import flags
from megaenc.backend.parallel_config import ParallelConfig
from megaenc.estimate import command as estimate
from megaenc.training.config import read_config_file

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "docker/slurm"
TRAINING = ["one", "many", "rocm-apptainer"]
each_training = pytest.mark.parametrize("name", TRAINING)


@each_training
def test_a_job_saves_before_its_time_is_over_and_is_requeued(name):
    asked = (DIRECTORY / f"{name}.sbatch").read_text()
    assert "#SBATCH --requeue\n" in asked
    assert "#SBATCH --open-mode=append\n" in asked
    warned = int(re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", asked, re.MULTILINE)[1])
    assert int(re.search(r"SAVE_SECONDS:-(\d+)", (DIRECTORY / "job.sh").read_text())[1]) < warned


@each_training
def test_torchrun_knows_what_it_is_asked(job, tmp_path, name):
    """Its parser accepts the call, which forwards signals and leaves time to save."""
    from torch.distributed.run import config_from_args, get_args_parser

    finish(job(name, "--save", "a", SAVE_SECONDS="77"))
    # --shutdown-timeout, which torch 2.11 does not know
    assert environment_of_torchrun(tmp_path)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "77"
    asked = get_args_parser().parse_args((tmp_path / "torchrun").read_text().splitlines())
    launch, _, _ = config_from_args(asked)
    assert (launch.signals_to_handle, launch.nproc_per_node) == (
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        8,
    )
    assert asked.training_script.endswith("examples/pretrain_encoder.py")
    assert asked.training_script_args == ["--save", "a"]


@pytest.mark.parametrize(
    ("minutes", "save", "code"),
    [("20", "540", 0), ("13", "540", 2), ("13", "60", 0), ("NONE", "540", 0)],
)
def test_a_job_too_short_to_save_is_refused(job, tmp_path, minutes, save, code):
    """Slurm would tell it to save before it has trained, again and again."""
    end = (
        time.strftime("%FT%T", time.localtime(time.time() + 60 * int(minutes)))
        if minutes.isdigit()
        else minutes
    )
    found, said = ended(job("one", ENDTIME=end, SAVE_SECONDS=save))
    assert found == code
    assert ("error: --time: found 7" in said) == (code == 2)
    assert (tmp_path / "torchrun").exists() == (code == 0)


def test_every_variable_is_explained():
    names = set(re.findall(r"^([A-Z_]+)=\$\{", (DIRECTORY / "job.sh").read_text(), re.MULTILINE))
    assert len(names) == 9
    told = (ROOT / "docs/clusters.md").read_text()
    assert all(f"`{name}`" in told for name in names)


# ---- carried out with stand-ins ------------------------------------------------------------------

# A torchrun: leaves the note of exit code NOTE as its processes do, waits where it is to, and ends
# as ENDS says.
TORCHRUN = """
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
SCONTROL = """
echo "$@" >>"$HERE/scontrol"
[ "$1 $2" != "show hostnames" ] || printf 'first\\nsecond\\n'
"""
SQUEUE = """
echo "$ENDTIME"
"""
SRUN = """
printf '%s\\n' "$@" >"$HERE/srun"
while [ "${1#-}" != "$1" ]; do shift; done
exec "$@"
"""
# An Apptainer: does as the image's runscript does, which reads the settings of the accelerator.
APPTAINER = """
printf '%s\\n' "$@" >"$HERE/apptainer"
while [ "$1" != torchrun ]; do shift; done
. "$HERE/docker/rocm_env.sh"
exec "$@"
"""


STAND_INS = {
    "torchrun": TORCHRUN,
    "scontrol": SCONTROL,
    "srun": SRUN,
    "apptainer": APPTAINER,
    "squeue": SQUEUE,
}


@pytest.fixture
def job(tmp_path):
    """Start a file as Slurm would, in a bare clone; return the process."""
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "docker").symlink_to(ROOT / "docker")
    (tmp_path / "megaenc-rocm.sif").touch()
    slurm = {
        "JOB_ID": "12345",
        "JOB_NAME": "megaenc",
        "JOB_NODELIST": "n[1-2]",
        "JOB_NUM_NODES": "2",
        "GPUS_ON_NODE": "8",
    }
    environment = {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{os.defpath}",
        "HERE": str(tmp_path),
        "VENV": "",
        "ENDS": "0",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = []

    def start(name: str, *arguments: str, **variables: str) -> subprocess.Popen:
        command = ["bash", DIRECTORY / f"{name}.sbatch", *arguments]
        started.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment | variables, **pipes)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, _ = process.communicate(timeout=30)
    return process.returncode, out


def finish(process: subprocess.Popen) -> None:
    assert ended(process)[0] == 0


def is_requeued(tmp_path) -> bool:
    return "requeue 12345" in (tmp_path / "scontrol").read_text().splitlines()


def asked_of_torchrun(tmp_path) -> dict[str, str]:
    words = (tmp_path / "torchrun").read_text().splitlines()
    return dict(itertools.pairwise(words))


@pytest.mark.parametrize(
    ("name", "ends", "note", "fewest", "code"),
    [
        ("one", "0", "", "", 0),
        ("one", "1", "75", "", 75),
        ("many", "1", "75", "", 75),
        ("rocm-apptainer", "1", "75", "", 75),
        ("many", "1", "2", "", 2),
        ("rocm-apptainer", "1", "", "", 1),
        ("one", "0", "75", "", 0),
        ("many", "1", "0", "1", 0),  # with a node less it ends as its run does
        ("many", "1", "75", "1", 75),
        ("many", "1", "", "1", 1),
    ],
)
def test_how_a_job_ends(job, tmp_path, name, ends, note, fewest, code):
    """Exit code 75 (stopped and saved) is requeued; errors are passed on."""
    assert ended(job(name, "--save", "a", ENDS=ends, NOTE=note, MIN_NODES=fewest))[0] == code
    if fewest:
        assert asked_of_torchrun(tmp_path)["--nnodes"] == "1:2"
        assert {"--no-kill", "--kill-on-bad-exit=0"} < set(
            (tmp_path / "srun").read_text().splitlines()
        )
    assert is_requeued(tmp_path) == (code == 75)
    assert not list((tmp_path / ".jobs").iterdir())  # no notes are left


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MIN_NODES": "0"}, "MIN_NODES: found 0, expected 1 to 2, the nodes of the job"),
        ({"MIN_NODES": "3"}, "MIN_NODES: found 3"),
        ({"VENV": ".venv"}, "VENV=.venv has no torchrun: ./install.sh makes .venv"),
        ({"SIF": "nothing.sif"}, "SIF=nothing.sif: no such image"),
    ],
)
def test_a_wrong_variable_is_one_line(job, tmp_path, variables, message):
    code, said = ended(job("many", **variables))
    assert code == 2
    assert said.startswith(f"error: {message}")
    assert not (tmp_path / "torchrun").exists()


@each_training
def test_that_time_is_nearly_over_reaches_torchrun(job, tmp_path, name):
    process = job(name, ENDS="1", NOTE="75", WAITS="yes")
    wait_until((tmp_path / "waiting").exists)
    process.send_signal(signal.SIGUSR1)
    code, said = ended(process)
    assert (code, (tmp_path / "told").read_text()) == (75, "USR1\n") and is_requeued(tmp_path)
    assert "time is nearly over, asking for a save" in said and "job 12345: ended with 75" in said


def test_a_job_that_is_being_ended_waits_for_the_save_and_is_not_requeued_by_itself(job, tmp_path):
    """Slurm signals all processes, and requeues the job itself if it should."""
    process = job("one", ENDS="1", NOTE="75", WAITS="yes")
    wait_until((tmp_path / "waiting").exists)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    (torchrun,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(torchrun), signal.SIGTERM)
    assert ended(process)[0] == 75 and not is_requeued(tmp_path)


def test_processes_and_where_they_meet(job, tmp_path):
    finish(job("one", "--lr", "1"))
    asked = asked_of_torchrun(tmp_path)
    assert (asked["--nproc-per-node"], asked["--save"], asked["--lr"]) == (
        "8",
        "runs/megaenc-12345",
        "1",
    )
    finish(job("many", "--save=mine", NPROC="4", MAX_RESTARTS="7"))
    asked = asked_of_torchrun(tmp_path)
    assert (asked["--nnodes"], asked["--nproc-per-node"], asked["--max-restarts"]) == (
        "2:2",
        "4",
        "7",
    )
    assert (asked["--rdzv-endpoint"], asked["--rdzv-id"]) == ("first:20345", "12345")
    assert "--save" not in asked
    finish(job("one", SLURM_GPUS_ON_NODE=""))
    assert asked_of_torchrun(tmp_path)["--nproc-per-node"] == "1"


def test_without_flags_the_steps_suit_the_processes(job, tmp_path):
    """As in the README, the command is sbatch and the file's name."""
    finish(job("many"))
    settings = parsed_by_training(tmp_path, world_size=16)
    assert (settings.micro_batch_size, settings.global_batch_size) == (2, 32)
    finish(job("one", "--global-batch-size", "8"))
    asked = asked_of_torchrun(tmp_path)
    assert asked["--global-batch-size"] == "8"
    assert "--micro-batch-size" not in asked


def parsed_by_training(tmp_path, world_size: int):
    """Return the training command's configuration from the last torchrun call."""
    from megaenc.training.config import parse_config

    words = (tmp_path / "torchrun").read_text().splitlines()
    settings = parse_config(words[words.index("./examples/pretrain_encoder.py") + 1 :], prog="")
    settings.check(world_size=world_size)
    return settings


def environment_of_torchrun(tmp_path) -> dict[str, str]:
    return dict(
        line.split("=", 1)
        for line in (tmp_path / "environment").read_text().splitlines()
        if "=" in line
    )


@pytest.mark.parametrize(
    ("name", "image", "variables", "bound"),
    [
        (
            "rocm-apptainer",
            "other.sif",
            {"BIND": "/data,/scratch", "TMPDIR": "/local/1"},
            ",/local/1,/data,/scratch",
        ),
        ("one", "megaenc-rocm.sif", {"TMPDIR": "/tmp/mine"}, ""),  # any file, in an image
    ],
)
def test_what_the_container_sees(job, tmp_path, name, image, variables, bound):
    (tmp_path / image).touch()
    finish(job(name, SIF=image, **variables))
    words = (tmp_path / "apptainer").read_text().splitlines()
    assert words[:6] == ["run", "--bind", f"{tmp_path}{bound}", "--pwd", str(tmp_path), image]
    assert "/opt/megaenc/examples/pretrain_encoder.py" in words


@pytest.mark.parametrize(
    ("name", "variables", "others"),
    [
        (
            "rocm-apptainer",
            {"RCCL_MSCCL_ENABLE": "", "NCCL_CROSS_NIC": "2"},
            {"NCCL_PXN_DISABLE": "1"},
        ),  # these come last
        (
            "many",
            {"CUDA_DEVICE_MAX_CONNECTIONS": "", "NCCL_DEBUG": "INFO"},
            {"TORCH_NCCL_HIGH_PRIORITY": "1"},
        ),
    ],
)
def test_what_is_taken_out_or_set_before_sbatch_stays_so(job, tmp_path, name, variables, others):
    """`RCCL_MSCCL_ENABLE= sbatch ...` also overrides an image's own settings."""
    finish(job(name, **variables))
    found = environment_of_torchrun(tmp_path)
    expected = variables | others
    assert {key: found.get(key, "") for key in expected} == expected


@pytest.mark.parametrize(
    ("processes", "given", "found"),
    [("1", {}, None), ("8", {}, "1"), ("1", {"OMP_NUM_THREADS": "3"}, "3")],
)
def test_one_process_has_all_cores(job, tmp_path, processes, given, found):
    """OMP_NUM_THREADS overrides this; several processes divide the cores."""
    finish(job("one", NPROC=processes, **given))
    assert environment_of_torchrun(tmp_path).get("OMP_NUM_THREADS") == found


@pytest.mark.parametrize(
    ("variables", "code", "runs"),
    [
        ({}, 0, 2),
        ({"NOTE": "0", "DIES_AT": "3"}, 1, 2),  # in the second run, which leaves no note
        ({"ENDS": "1", "NOTE": "2"}, 2, 1),
    ],
)
def test_the_smoke_job_trains_and_goes_on(job, tmp_path, variables, code, runs):
    found, said = ended(job("smoke", **variables))
    assert found == code
    assert said.splitlines()[-1] == (f"smoke: failed with {code}" if code else "smoke: ok")
    assert said.count("-- ten") == runs
    assert "-- doctor" in said
    settings = parsed_by_training(tmp_path, world_size=16)
    assert (settings.train_iters, settings.global_batch_size) == (20, 32)
    assert asked_of_torchrun(tmp_path)["--exit-interval"] == "10"


# ---- layouts -------------------------------------------------------------------------------------

LAYOUTS = sorted((ROOT / "configs/layout").glob("*.yaml"))
DEVICES = {"h100": 8, "mi300x": 8, "mi250x": 16}


def test_there_is_a_layout_for_each_machine_and_model():
    assert {path.stem for path in LAYOUTS} == {
        f"{gpu}-{model}" for gpu in DEVICES for model in ("210m", "610m", "1b")
    }


@pytest.mark.parametrize("path", LAYOUTS, ids=lambda path: path.stem)
def test_a_layout_changes_nothing_but_the_layout_and_fits(path, tmp_path):
    """It keeps the study's recipe, and the estimate says that it fits its devices."""
    gpu, model = path.stem.split("-")
    settings = flags.flatten(read_config_file(str(path)))
    recipe = flags.flatten(read_config_file(str(ROOT / f"configs/pretrain/encoder-{model}.yaml")))
    changed = {name for name, value in settings.items() if value != recipe[name]}
    assert changed <= {field.name for field in dataclasses.fields(ParallelConfig)} | {
        "micro_batch_size"
    }
    output = tmp_path / "said.json"
    estimate.main(
        [
            "--config",
            str(path),
            "--gpu",
            gpu,
            "--gpus",
            str(DEVICES[gpu]),
            "--no-suggest",
            "--output",
            str(output),
        ]
    )
    assert json.loads(output.read_text())["estimate"]["memory"]["fits"]
