"""The sbatch files under a real Slurm with its own configuration, ports and keys.

Needs root and Debian's slurm-wlm and munge: apt-get install slurm-wlm munge. Two nodes of 8 GPUs
each are counted and do not exist; the jobs that run ask for none.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import runs
from waiting import wait_until

ROOT = runs.ROOT
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
MISSING = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd needs root"),
]

STEPS = 40
# Some steps a second at most, so that the job can be met in the middle.
TRAINING = [
    *(
        "--num-layers",
        "4",
        "--hidden-size",
        "128",
        "--ffn-hidden-size",
        "320",
        "--num-attention-heads",
        "4",
    ),
    *(
        "--num-query-groups",
        "2",
        "--seq-length",
        "128",
        "--micro-batch-size",
        "4",
        "--global-batch-size",
        "16",
    ),
    *(
        "--train-iters",
        str(STEPS),
        "--objective-schedule",
        "clm:0.5,mlm:0.5",
        "--lr",
        "3e-3",
        "--eval-interval",
        "0",
    ),
    *("--save-interval", str(STEPS), "--log-interval", "1", "--no-bf16"),
]
LONG = 400  # seconds for what takes ten on a machine that has nothing else to do


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configuration(directory: Path) -> str:
    host = socket.gethostname().partition(".")[0]
    controller, *nodes = free_ports(3)
    # cred_expire is how long a requeued job waits before it may begin again; Slurm takes no less
    # than 5 seconds.
    lines = f"""
        ClusterName=tests
        SlurmctldHost={host}(127.0.0.1)
        SlurmctldPort={controller}
        AuthType=auth/munge
        CredType=cred/munge
        AuthInfo=socket={directory}/munge.socket,cred_expire=6
        SlurmUser=root
        SlurmdUser=root
        StateSaveLocation={directory}/state
        SlurmdSpoolDir={directory}/spool-%n
        SlurmctldPidFile={directory}/slurmctld.pid
        SlurmdPidFile={directory}/slurmd-%n.pid
        SlurmctldLogFile={directory}/slurmctld.log
        SlurmdLogFile={directory}/slurmd-%n.log
        SwitchType=switch/none
        MpiDefault=none
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        JobAcctGatherType=jobacct_gather/none
        SelectType=select/cons_tres
        SelectTypeParameters=CR_CPU
        SchedulerParameters=bf_interval=1,sched_interval=1,requeue_delay=1
        SlurmdParameters=config_overrides
        GresTypes=gpu
        ReturnToService=2
        KillWait=200
        PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
    """
    node = (
        f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=4000 Gres=gpu:8 State=UNKNOWN"
    )
    lines += "".join(
        f"NodeName=n{number} Port={port} {node}\n" for number, port in enumerate(nodes, 1)
    )
    return re.sub(r"(?m)^ +", "", lines)


def started(stack: contextlib.ExitStack, command: list[str], environment: dict[str, str]) -> None:
    """A daemon in the foreground, ended with the stack."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    stack.callback(end)


class Slurm:
    """The commands of one Slurm."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = runs.surroundings() | {
            "SLURM_CONF": str(directory / "slurm.conf"),
            "VENV": str(Path(sys.executable).parents[1]),
        }

    def ask(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command,
            env=self.environment | variables,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def submit(self, log: Path, options: list[str], flags: list[str], **variables: str) -> str:
        """Submit a job of a process on each node, without GPUs; return its number."""
        options = ["--parsable", "--gpus-per-node=0", "--output", str(log), *options]
        asked = self.ask(
            "sbatch",
            *options,
            str(ROOT / "docker/slurm/many.sbatch"),
            *flags,
            NPROC="1",
            **variables,
        )
        assert asked.returncode == 0, asked.stderr
        return asked.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        words = self.ask("scontrol", "--oneliner", "show", "job", job).stdout.split()
        return dict(word.partition("=")[::2] for word in words)

    def wait(self, job: str, log: Path, seconds: float = LONG) -> dict[str, str]:
        """Return Slurm's fields of the job once it has ended for good."""

        def over() -> dict[str, str] | None:
            found = self.show(job)
            return (
                found
                if found.get("JobState")
                in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
                else None
            )

        return wait_until(over, seconds, log=log, pause=0.2)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with contextlib.ExitStack() as stack:
        # The path is short, for a socket lies in it.
        directory = Path(tempfile.mkdtemp(prefix="megaenc-slurm-", dir="/tmp"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o755)
        (directory / "slurm.conf").write_text(configuration(directory))
        (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-7]\n")
        for number in range(8):  # a GPU has to be a device: each is a second /dev/null
            os.mknod(directory / f"gpu{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (directory / "munge.key").write_bytes(os.urandom(1024))
        (directory / "munge.key").chmod(0o400)
        (directory / "state").mkdir()
        here = Slurm(directory)
        names = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={directory}/munge.{name.partition('-')[0]}" for name in names]
        started(stack, ["munged", "--foreground", "--force", *files], here.environment)
        wait_until((directory / "munge.socket").exists)
        started(stack, ["slurmctld", "-D", "-f", str(directory / "slurm.conf")], here.environment)
        for node in ("n1", "n2"):
            started(
                stack,
                ["slurmd", "-D", "-N", node, "-f", str(directory / "slurm.conf")],
                here.environment,
            )
        stack.callback(
            lambda: (here.ask("scancel", "--user=root", "--signal=KILL", "--full"), time.sleep(1))
        )
        ready = "--states=idle"
        controller = directory / "slurmctld.log"
        wait_until(
            lambda: here.ask("sinfo", "--noheader", ready, "--format=%D").stdout.strip() == "2",
            log=controller,
            pause=0.2,
        )
        yield here


def test_slurm_accepts_every_file_as_it_is(slurm):
    """It refuses more GPUs than exist, so files are accepted for their requests."""
    for path in sorted((ROOT / "docker/slurm").glob("*.sbatch")):
        asked = slurm.ask("sbatch", "--test-only", str(path))
        nodes = re.search(r"--nodes=(\d+)", path.read_text())[1]
        assert asked.returncode == 0, asked.stderr
        assert re.search(
            rf"to start at \S+ using {16 * int(nodes)} processors on nodes n", asked.stderr
        ), asked.stderr
        assert slurm.ask("sbatch", "--test-only", "--gpus-per-node=9", str(path)).returncode != 0


def steps(directory: Path) -> int:
    return len(runs.metrics(directory)) if (directory / "metrics.jsonl").exists() else 0


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory) -> Path:
    """The run without Slurm, by two processes as well."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    flags = [*small_corpus.flags, *TRAINING, "--save", str(directory)]
    runs.script(runs.PRETRAIN, flags, processes=2, timeout=LONG)
    return directory


def assert_completed(found: dict[str, str], restarts: str, log: Path) -> None:
    ended = (found["JobState"], found["ExitCode"], found["Restarts"])
    assert ended == ("COMPLETED", "0:0", restarts), log.read_text()[-3000:]


@pytest.mark.multiprocess
def test_a_job_that_is_stopped_and_preempted_becomes_the_undisturbed_run(
    slurm, small_corpus, undisturbed, tmp_path
):
    """First Slurm signals the end of time, then it requeues the job while it trains.

    Two nodes run a process each.
    """
    directory = tmp_path / "run"
    log = tmp_path / "job.log"
    flags = [*small_corpus.flags, *TRAINING, "--save", str(directory)]
    job = slurm.submit(log, ["--nodes=2"], flags, MASTER_ADDR="127.0.0.1")
    wait_until(lambda: steps(directory) >= 5, LONG, log=log, pause=0.2)

    # --signal=B:USR1@600 does this.
    assert slurm.ask("scancel", "--batch", "--signal=USR1", job).returncode == 0
    wait_until(lambda: slurm.show(job)["Restarts"] == "1", LONG, log=log, pause=0.2)
    saved = steps(directory)
    assert 5 <= saved < STEPS
    assert "ended with 75" in log.read_text()

    wait_until(lambda: steps(directory) >= saved + 5, LONG, log=log, pause=0.2)
    assert slurm.ask("scontrol", "requeue", job).returncode == 0  # what a preemption does
    assert_completed(slurm.wait(job, log), "2", log)
    assert steps(directory) == STEPS
    assert runs.curve(directory) == runs.curve(undisturbed)
    runs.assert_same_weights(directory, undisturbed, STEPS)
    said = log.read_text()
    assert [said.count(f"start {number}:") for number in (1, 2, 3)] == [1, 1, 1]


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def torchrun(job: str, node: str) -> psutil.Process:
    """The launcher of a job on a node."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            is_there = (environment.get("SLURM_JOB_ID"), environment.get("SLURMD_NODENAME")) == (
                job,
                node,
            )
            if (
                is_there
                and "--rdzv-endpoint" in process.cmdline()
                and process.parent().name().startswith("slurmstepd")
            ):
                return process
    raise LookupError(node)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_goes_on_without_a_node_that_fails(slurm, small_corpus, undisturbed, tmp_path):
    """The nodes meet outside; the script runs on the first one."""
    directory = tmp_path / "run"
    log = tmp_path / "job.log"
    [port] = free_ports(1)
    flags = [*small_corpus.flags, *TRAINING, "--save-interval", "5", "--save", str(directory)]
    options = ["--nodes=2", "--no-kill", "--signal=B:USR1@60"]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MIN_NODES": "1"}
    with contextlib.ExitStack() as stack:
        started(
            stack,
            [sys.executable, str(ROOT / "examples/rendezvous_store.py"), str(port)],
            slurm.environment,
        )
        wait_until(lambda: is_listening(port))  # or a node would hold the rendezvous
        job = slurm.submit(log, options, flags, **meeting)
        wait_until(lambda: steps(directory) >= 7, LONG, log=log, pause=0.2)
        slurmstepd = torchrun(job, "n2").parent()
        for process in (slurmstepd, *slurmstepd.children(recursive=True)):
            process.kill()
        assert (
            slurm.ask("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=lost").returncode
            == 0
        )
        found = slurm.wait(job, log)
        slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert_completed(found, "0", log)
    assert "resuming after step 5" in log.read_text()
    losses = [row["loss"] for row in runs.metrics(directory)]
    expected = [row["loss"] for row in runs.metrics(undisturbed)]
    assert losses == pytest.approx(expected, rel=1e-4)  # sums of one rank and of two
