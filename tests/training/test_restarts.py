"""Under torchrun a run goes on by itself when a worker or a node is lost, and is not begun again when it was to stop."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import runs

from megaenc.errors import InputError
from megaenc.training.run_lock import RunLock

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FAULTY = str(runs.WORKERS / "fault_at_step.py")
ENDLESS = ["--train-iters", "100000", "--log-interval", "1", "--eval-interval", "0"]


def flags(small_corpus, folder, *more):
    """For the pretraining command: twenty float32 steps with a checkpoint each five."""
    return [*small_corpus.flags, *runs.SHORT_RUN, "--no-bf16", "--save", str(folder), "--save-interval", "5", *more]


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory):
    """The run of two processes that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.script(runs.PRETRAIN, flags(small_corpus, folder), processes=2)
    return folder


def assert_as_if_nothing_had_happened(folder, undisturbed):
    """Every step once with the same numbers, the same weights and optimizer bit by bit, and nobody left."""
    names = ("step", "loss", "accuracy", "grad_norm", "learning_rate", "tokens", "predicted_tokens", "flops")
    actual, expected = ([[row[name] for name in names] for row in runs.metrics(run)] for run in (folder, undisturbed))
    assert actual == expected
    assert runs.validations(folder) == runs.validations(undisturbed)
    actual, expected = (tensors(run, 20) for run in (folder, undisturbed))
    assert len(actual) == 2
    assert actual == expected
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    assert_nobody_works_in(folder)


def tensors(folder, step):
    """The checksums of the files of a checkpoint that hold its tensors."""
    files = json.loads((folder / "checkpoints" / f"iter_{step:07d}" / "state.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in files.items() if name.endswith(".distcp")}


def assert_nobody_works_in(folder):
    deadline = time.monotonic() + 10  # what dies with its launcher may be on its way
    while running := [line for line in map(command_line, psutil.process_iter()) if str(folder) in line]:
        assert time.monotonic() < deadline, running
        time.sleep(0.1)


def command_line(process):
    """Empty for a process that has gone."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.multiprocess
def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on(small_corpus, undisturbed, tmp_path):
    folder = tmp_path / "run"
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", FAULTY]
    result = runs.run([*command, f"die:1:12:{tmp_path / 'struck'}", *flags(small_corpus, folder)])
    assert (tmp_path / "struck").exists()
    assert "from new weights" in result.stdout
    assert "resuming after step 10" in result.stdout
    assert_as_if_nothing_had_happened(folder, undisturbed)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_that_was_to_stop_is_not_begun_again_by_its_launcher(small_corpus, tmp_path):
    folder = tmp_path / "run"
    run_flags = flags(small_corpus, folder, *ENDLESS, "--exit-duration-in-mins", "0.01")
    command = [*TORCHRUN, "--standalone", "--max-restarts", "2", "--nproc-per-node"]
    result = runs.run([*command, "2", str(runs.PRETRAIN), *run_flags], expect=1)
    assert result.stdout.count("stopped by --exit-duration-in-mins") == 1
    assert "going on after" not in result.stdout
    assert result.stderr.count("failed (exitcode: 75)") == 3  # the run, and two that leave at once
    step = runs.metrics(folder)[-1]["step"]
    assert [row["step"] for row in runs.metrics(folder)] == list(range(1, step + 1))

    another = runs.run([*command, "1", str(runs.PRETRAIN), *run_flags], expect=1)
    assert f"resuming after step {step}" in another.stdout
    assert runs.metrics(folder)[-1]["step"] > step


@pytest.mark.multiprocess
def test_a_wrong_input_is_said_once_and_not_tried_again(small_corpus, tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", str(runs.PRETRAIN)]
    result = runs.run([*command, *flags(small_corpus, tmp_path / "run", "--lr", "-1")], expect=1)
    assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [
        "error: --lr: found -1.0, expected a number above 0"
    ]


def test_the_lock_of_a_process_on_its_way_out_is_waited_for(tmp_path):
    import fcntl

    held = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another process is training in this directory"):
        RunLock(tmp_path, patience=0.2)
    threading.Timer(0.5, os.close, [held]).start()
    RunLock(tmp_path, patience=20).release()


class Nodes:
    """Agents of torchrun that make up one run on two nodes; killed at the end, whatever happens.

    `count` and `processes`: for --nnodes and --nproc-per-node. `store_outside`: a process of its own holds the rendezvous,
    instead of the first agent.
    """

    def __init__(self, folder, run_flags, count="2", processes=1, store_outside=False):
        self.folder, self.given, self.count, self.processes = folder, run_flags, count, processes
        self.agents, self.store_outside = {}, store_outside
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if store_outside:
            self._open("store", [sys.executable, str(runs.ROOT / "examples" / "rendezvous_store.py"), str(self.port)])
            self.wait_for(self._listens, "the store does not listen")

    def _open(self, name, command):
        """Start a process; what it says goes to a file of its name."""
        environment = runs.surroundings() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/faults.md
        with open(self.folder.with_name(name), "w") as out:
            self.agents[name] = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def start(self, name, fault=""):
        """Start an agent."""
        # Seconds; a node is lost after 8, and others are waited for as long.
        conf = "join_timeout=240,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=8"
        conf += ",is_host=0" if self.store_outside else ""
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--local-addr", "127.0.0.1"]
        size = ["--nnodes", self.count, "--nproc-per-node", str(self.processes), "--max-restarts", "2"]
        script = [FAULTY, f"{fault}:{self.folder.with_name('struck')}"] if fault else [str(runs.PRETRAIN)]
        self._open(name, [*TORCHRUN, *size, *where, "--rdzv-conf", conf, *script, *self.given])
        self.wait_for(self._listens, "the first agent holds no rendezvous")

    def _listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_for(self, condition, otherwise="in vain", seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{otherwise}\n{self.said()}"
            time.sleep(0.1)

    def end(self, name):
        """The exit code of an agent."""
        self.wait_for(lambda: self.agents[name].poll() is not None, f"{name} does not end")
        return self.agents[name].returncode

    def said(self):
        """Everything that all agents and workers have printed."""
        return "".join(self.folder.with_name(name).read_text() for name in self.agents)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for agent in self.agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)  # its worker dies with it
            agent.wait()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_node_that_is_lost_and_comes_back_is_joined_by_the_other(small_corpus, undisturbed, tmp_path):
    folder = tmp_path / "run"
    with Nodes(folder, flags(small_corpus, folder)) as nodes:
        nodes.start("first")
        nodes.start("second", fault="lose_launcher:any:12")
        assert nodes.end("second") == -signal.SIGKILL
        nodes.start("second again")
        assert [nodes.end("first"), nodes.end("second again")] == [0, 0], nodes.said()
        assert "resuming after step 10" in nodes.said()
    assert_as_if_nothing_had_happened(folder, undisturbed)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_the_node_that_holds_the_rendezvous_is_lost_and_both_are_started_again(small_corpus, undisturbed, tmp_path):
    folder = tmp_path / "run"
    with Nodes(folder, flags(small_corpus, folder)) as nodes:
        nodes.start("first", fault="lose_launcher:any:12")
        nodes.start("second")
        assert nodes.end("first") == -signal.SIGKILL
        assert nodes.end("second") == 1
        assert_nobody_works_in(folder)
        nodes.start("first again")
        nodes.start("second again")
        assert [nodes.end("first again"), nodes.end("second again")] == [0, 0], nodes.said()
        assert "resuming after step 10" in nodes.said()
    assert_as_if_nothing_had_happened(folder, undisturbed)


LONGER = ["--train-iters", "40", "--lr", "1e-3", "--log-interval", "1", "--eval-interval", "20", "--save-interval", "10"]


@pytest.fixture(scope="module")
def of_four(small_corpus, tmp_path_factory):
    """The undisturbed run of four processes."""
    folder = tmp_path_factory.mktemp("of_four") / "run"
    runs.script(runs.PRETRAIN, flags(small_corpus, folder, *LONGER), processes=4)
    return folder


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(("lost", "store_outside"), [("second", False), ("first", True)])
def test_a_run_goes_on_without_a_lost_node_and_lets_it_join(lost, store_outside, small_corpus, of_four, tmp_path):
    folder = tmp_path / "run"
    [stays] = {"first", "second"} - {lost}
    with Nodes(folder, flags(small_corpus, folder, *LONGER), "1:2", 2, store_outside) as nodes:
        for name in ("first", "second"):
            nodes.start(name, fault="lose_launcher:any:12" if name == lost else "dawdle:any:12")
        assert nodes.end(lost) == -signal.SIGKILL
        nodes.wait_for(lambda: "resuming after step 10" in nodes.said())
        nodes.start("again")
        assert [nodes.end(stays), nodes.end("again")] == [0, 0], nodes.said()
        assert "stopped by SIGTERM" in nodes.said()
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in runs.metrics(folder)] == pytest.approx(
            [row[name] for row in runs.metrics(of_four)], rel=1e-6
        )


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("told", ["first", "second"])
def test_a_stop_of_one_node_is_no_join(told, small_corpus, tmp_path):
    folder = tmp_path / "run"
    with Nodes(folder, flags(small_corpus, folder, *ENDLESS), "1:2", 2) as nodes:
        nodes.start("first")
        nodes.start("second")
        nodes.wait_for(lambda: (folder / "metrics.jsonl").exists() and len(runs.metrics(folder)) > 3)
        nodes.agents[told].terminate()
        assert 0 not in [nodes.end("first"), nodes.end("second")]
        said = nodes.said()
    assert said.count("stopped by SIGTERM") == 1
    assert "resuming after" not in said
