"""Runs on two nodes (network namespaces) with faults of node, link and disk."""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import runs
from faults.agents import Agents
from faults.ends import differences
from faults.moments import FaultRun
from faults.processes import wait_until_gone

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.system]

HOSTS = {"node-0": "10.83.0.1", "node-1": "10.83.0.2"}
LAYOUT = ["--tensor-model-parallel-size", "2"]
# Seconds for a run: the machine may be busy. A test never waits for all of them.
PATIENCE = 1800
LATE = 10
FAULTY = str(runs.WORKERS / "fault_at_step.py")
# The name of the host, and the addresses of both, are of this node alone.
ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Network:
    """Two network namespaces that a cable joins; `link` cuts it.

    `directory`: that of the test.
    """

    def __init__(self, directory):
        self.directory = directory
        self.spaces = {host: f"megaenc-{os.getpid()}-{host}" for host in HOSTS}
        self.hosts_file = directory / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {host}" for host, address in HOSTS.items())]
        self.hosts_file.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def build(self):
        first, second = self.spaces.values()
        for space in self.spaces.values():
            self._ip("netns", "add", space)
        cable = ("link", "add", "eth0", "netns", first, "type", "veth")
        self._ip(*cable, "peer", "name", "eth0", "netns", second)
        for host, space in self.spaces.items():
            self._ip("-n", space, "address", "add", f"{HOSTS[host]}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "lo", "up")
            self.link(host, "up")

    def link(self, host, state):
        """Plug the cable in at a node (`up`), or pull it (`down`)."""
        self._ip("-n", self.spaces[host], "link", "set", "eth0", state)

    def inside(self, host, command):
        """Return `command` as one that runs on a node."""
        enter = ["unshare", "--uts", "sh", "-c", ENTER, host, str(self.hosts_file)]
        return ["ip", "netns", "exec", self.spaces[host], *enter, *command]

    def kill(self, host):
        """Kill all processes of a node at once."""
        for number in self._ip("netns", "pids", self.spaces[host]).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)

    def remove(self):
        for host, space in self.spaces.items():
            if space in self._ip("netns", "list").split():
                self.kill(host)
                self._ip("netns", "delete", space)

    def run(self, command):
        """Return the standard output of a short command; CalledProcessError if it fails."""
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def _ip(self, *words):
        return self.run(["ip", *words])


@pytest.fixture
def network(tmp_path):
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("no ip or no unshare: apt-get install iproute2 util-linux")
    network = Network(tmp_path)
    try:
        network.build()
        network.run(network.inside("node-0", ["true"]))
    except subprocess.CalledProcessError as error:
        network.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield network
    network.remove()


class TwoNodes(Agents):
    """Agents of torchrun with two ranks each, one agent on each node of `network`.

    `pause`: rank 0 waits for some seconds in step 12, and makes the file `paused` before.
    """

    def __init__(self, network, directory, run_flags, *launcher, pause=False):
        super().__init__(directory)
        self.network = network
        self.paused = directory.with_name("paused")
        script = [FAULTY, f"pause:0:12:{self.paused}"] if pause else [str(runs.PRETRAIN)]
        self.command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "node-0:29500"),
            *(*launcher, *script, *run_flags),
        ]

    def start(self, *hosts, attempt=""):
        for host in hosts:
            self.launch(host + attempt, self.network.inside(host, self.command))

    def ends(self, attempt=""):
        """Return the exit codes of both agents."""
        return [self.end(host + attempt, PATIENCE) for host in HOSTS]

    def errors(self):
        """Return the lines of errors of both nodes."""
        return [line for line in self.said().splitlines() if line.startswith("error:")]


def flags(small_corpus, directory, *more):
    """Flags of twenty float32 steps with a checkpoint each five."""
    return [
        *(*small_corpus.flags, *runs.SHORT_RUN, *LAYOUT, "--no-bf16", "--log-interval", "1"),
        *("--save", str(directory), "--save-interval", "5", *more),
    ]


@pytest.fixture(scope="module")
def on_one_node(small_corpus, tmp_path_factory):
    """Return a function from more flags to the run by four processes of a node."""

    @functools.cache
    def train(*more):
        directory = tmp_path_factory.mktemp("one_node") / "run"
        run_flags = flags(small_corpus, directory, *more)
        runs.script(runs.PRETRAIN, run_flags, processes=4, timeout=PATIENCE)
        return FaultRun(directory)

    return train


def assert_resumes(network, run_flags, run, reference, step):
    """Assert that the command resumes after `step` and ends as `reference`."""
    with TwoNodes(network, network.directory / "run", run_flags) as nodes:
        nodes.start(*HOSTS, attempt=" again")
        assert nodes.ends(" again") == [0, 0], nodes.said()
        assert f"resuming after step {step}" in nodes.said()
    assert differences(run, reference, 20) == []


@pytest.mark.parametrize("optimizer", [[], ["--use-distributed-optimizer"]], ids=["", "split"])
def test_two_nodes_equal_one_if_one_is_late_and_the_link_is_cut(
    optimizer, network, small_corpus, on_one_node, tmp_path
):
    """The node of the rendezvous comes last; the link is cut for ten seconds."""
    directory = tmp_path / "run"
    run_flags = flags(small_corpus, directory, *optimizer)
    with TwoNodes(network, directory, run_flags, pause=True) as nodes:
        nodes.start("node-1")
        time.sleep(LATE)
        nodes.start("node-0")
        nodes.wait_for(nodes.paused.exists, PATIENCE)
        network.link("node-1", "down")
        _, rows = FaultRun(directory).rows()
        time.sleep(10)
        assert FaultRun(directory).rows()[1] <= rows + 1
        network.link("node-1", "up")
        assert nodes.ends() == [0, 0], nodes.said()
        assert nodes.said().count("from new weights") == 1
        assert "resuming" not in nodes.said()
    assert differences(FaultRun(directory), on_one_node(*optimizer), 20) == []
    assert not wait_until_gone(str(directory), 10)


@pytest.mark.parametrize("lost", HOSTS)
def test_a_node_that_is_lost_ends_the_other_which_says_so(
    lost, network, small_corpus, on_one_node, tmp_path
):
    directory = tmp_path / "run"
    run_flags = flags(small_corpus, directory)
    [left] = HOSTS.keys() - {lost}
    with TwoNodes(network, directory, run_flags, pause=True) as nodes:
        nodes.start(*HOSTS)
        nodes.wait_for(nodes.paused.exists, PATIENCE)
        network.kill(lost)
        assert nodes.end(lost) == -signal.SIGKILL
        assert nodes.end(left, PATIENCE) == 1
        assert f"on {left}: lost the connection to another rank: " in nodes.errors()[0]
        assert "(exitcode: 2)" not in nodes.said(left)
    assert not wait_until_gone(str(directory), 10)
    assert_resumes(network, run_flags, FaultRun(directory), on_one_node(), 10)


def test_a_shared_disk_that_is_full_ends_both_nodes_with_one_line(
    network, small_corpus, on_one_node, small_disk, tmp_path
):
    """It is not tried again, and resumes when there is room."""
    directory = small_disk / "run"
    run_flags = flags(small_corpus, directory)
    with TwoNodes(network, tmp_path / "run", run_flags, "--max-restarts", "2") as nodes:
        nodes.start(*HOSTS)
        assert nodes.ends() == [1, 1]
        [line] = nodes.errors()
        full = "cannot be written to: No space left on device; step 10 is not saved, step 5 is: "
        assert full in line
        assert nodes.said().count("from new weights") == 1
        assert "(exitcode: 2)" in nodes.said("node-0")
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    assert_resumes(network, run_flags, FaultRun(directory), on_one_node(), 5)
