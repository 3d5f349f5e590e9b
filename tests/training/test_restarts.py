"""Runs under torchrun that survive lost workers and nodes, and end when they must."""

import fcntl
import os
import signal
import socket
import sys
import threading

import pytest
import runs
from faults.agents import Agents
from faults.ends import differences
from faults.moments import FaultRun
from faults.processes import wait_until_gone

from megaenc.errors import InputError
from megaenc.training.run_lock import RunLock

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
STANDALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
FAULTY = str(runs.WORKERS / "fault_at_step.py")
ENDLESS = ["--train-iters", "100000", "--log-interval", "1", "--eval-interval", "0"]
LONGER = [
    "--train-iters",
    "40",
    "--lr",
    "1e-3",
    "--log-interval",
    "1",
    "--eval-interval",
    "20",
    "--save-interval",
    "10",
]


def flags(small_corpus, directory, *more):
    """Flags of twenty float32 steps with a checkpoint each five."""
    return [
        *small_corpus.flags,
        *runs.SHORT_RUN,
        "--no-bf16",
        "--save",
        str(directory),
        "--save-interval",
        "5",
        *more,
    ]


@pytest.fixture(scope="module")
def undisturbed(small_corpus, tmp_path_factory):
    """A run of two processes without a fault."""
    directory = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.script(runs.PRETRAIN, flags(small_corpus, directory), processes=2)
    return FaultRun(directory)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on(
    small_corpus, undisturbed, tmp_path
):
    directory = tmp_path / "run"
    result = runs.run(
        [*STANDALONE, FAULTY, f"die:1:12:{tmp_path / 'struck'}", *flags(small_corpus, directory)]
    )
    assert (tmp_path / "struck").exists()
    assert "from new weights" in result.stdout
    assert "resuming after step 10" in result.stdout
    assert differences(FaultRun(directory), undisturbed, 20) == []


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_that_was_to_stop_is_not_begun_again_by_its_launcher(small_corpus, tmp_path):
    directory = tmp_path / "run"
    command = [
        *STANDALONE,
        str(runs.PRETRAIN),
        *flags(small_corpus, directory, *ENDLESS, "--exit-duration-in-mins", "0.01"),
    ]
    result = runs.run(command, expect=1)
    assert result.stdout.count("stopped by --exit-duration-in-mins") == 1
    assert "going on after" not in result.stdout
    assert result.stderr.count("failed (exitcode: 75)") == 2  # the run, and one that leaves at once
    step = runs.metrics(directory)[-1]["step"]
    assert [row["step"] for row in runs.metrics(directory)] == list(range(1, step + 1))


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_wrong_input_is_said_once_and_not_tried_again(small_corpus, tmp_path):
    result = runs.run(
        [*STANDALONE, str(runs.PRETRAIN), *flags(small_corpus, tmp_path / "run", "--lr", "-1")],
        expect=1,
    )
    assert [line for line in result.stderr.splitlines() if line.startswith("error:")] == [
        "error: --lr: found -1.0, expected more than 0"
    ]


def test_the_lock_of_a_process_on_its_way_out_is_waited_for(tmp_path):
    held = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(InputError, match="another process is training in this directory"):
        RunLock(tmp_path, patience=0.2)
    threading.Timer(0.5, os.close, [held]).start()
    RunLock(tmp_path, patience=20).release()


class Nodes(Agents):
    """Agents of torchrun with one rank each, on `count` nodes; killed at the end.

    `store_outside`: a process of its own holds the rendezvous, instead of the first agent.
    """

    def __init__(self, directory, run_flags, count="2", store_outside=False):
        super().__init__(directory)
        self.flags = run_flags
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = free.getsockname()
        port = str(self.address[1])
        # Seconds; a node is lost after 8, and others are waited for as long.
        conf = "join_timeout=240,keep_alive_interval=2,keep_alive_max_attempt=4,last_call_timeout=8"
        if store_outside:
            self.launch(
                "store", [sys.executable, str(runs.ROOT / "examples" / "rendezvous_store.py"), port]
            )
            conf += ",is_host=0"
        where = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--local-addr",
            "127.0.0.1",
        ]
        self.launcher = [
            *TORCHRUN,
            "--nnodes",
            count,
            "--max-restarts",
            "2",
            *where,
            "--rdzv-conf",
            conf,
        ]

    def launch(self, name, command):
        super().launch(name, command)
        self.wait_for(self._listens)  # the first to come holds the rendezvous

    def _listens(self):
        with socket.socket() as probe:
            return probe.connect_ex(self.address) == 0

    def start(self, name, fault=""):
        script = (
            [FAULTY, f"{fault}:{self.directory.with_name('struck')}"]
            if fault
            else [str(runs.PRETRAIN)]
        )
        self.launch(name, [*self.launcher, *script, *self.flags])


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("lost", ["second", "first, which holds the rendezvous"])
def test_a_node_that_is_lost_is_started_again(lost, small_corpus, undisturbed, tmp_path):
    """The other one waits for it, or is started again too if it loses the rendezvous."""
    directory = tmp_path / "run"
    fault = "lose_launcher:any:12"
    with Nodes(directory, flags(small_corpus, directory)) as nodes:
        nodes.start("first", "" if lost == "second" else fault)
        nodes.start("second", fault if lost == "second" else "")
        if lost == "second":
            assert nodes.end("second") == -signal.SIGKILL
            again = ["first", "second again"]
        else:
            assert nodes.end("first") == -signal.SIGKILL
            assert nodes.end("second") == 1
            assert not wait_until_gone(str(directory), 10)
            nodes.start("first again")
            again = ["first again", "second again"]
        nodes.start("second again")
        assert [nodes.end(name) for name in again] == [0, 0], nodes.said()
        assert "resuming after step 10" in nodes.said()
    assert differences(FaultRun(directory), undisturbed, 20) == []
    assert not wait_until_gone(str(directory), 10)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_run_goes_on_without_a_lost_node_and_lets_it_join(small_corpus, tmp_path):
    """This holds for the first node too if the rendezvous is elsewhere."""
    directory = tmp_path / "run"
    reference = tmp_path / "undisturbed"
    runs.script(runs.PRETRAIN, flags(small_corpus, reference, *LONGER), processes=2)
    with Nodes(
        directory, flags(small_corpus, directory, *LONGER), "1:2", store_outside=True
    ) as nodes:
        nodes.start("first", "lose_launcher:any:12")
        nodes.start("second", "dawdle:any:12")
        assert nodes.end("first") == -signal.SIGKILL
        nodes.wait_for(lambda: "resuming after step 10" in nodes.said())
        nodes.start("again")
        assert [nodes.end("second"), nodes.end("again")] == [0, 0], nodes.said()
        assert "stopped by SIGTERM" in nodes.said()
    runs.assert_same_curve(directory, reference, tolerance=1e-6)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_stop_of_one_node_is_no_join(small_corpus, tmp_path):
    directory = tmp_path / "run"
    with Nodes(directory, flags(small_corpus, directory, *ENDLESS), "1:2") as nodes:
        nodes.start("first")
        nodes.start("second")
        nodes.wait_for(
            lambda: (directory / "metrics.jsonl").exists() and len(runs.metrics(directory)) > 3
        )
        nodes.agents["second"].terminate()
        assert 0 not in [nodes.end("first"), nodes.end("second")]
        said = nodes.said()
    assert said.count("stopped by SIGTERM") == 1
    assert "resuming after" not in said
