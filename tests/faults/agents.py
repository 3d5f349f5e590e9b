"""Agents of torchrun on several nodes, watched from outside and killed at the end."""

import os
import signal
import time
from pathlib import Path

from faults.processes import start


class Agents:
    """Commands of the run in `directory`, whose output goes to files next to it.

    They and what they have started bear the mark `directory` (`faults.processes`).
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.agents = {}

    def launch(self, name: str, command: list[str]) -> None:
        """Start an agent whose output goes to a file of its name."""
        command = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *command]  # see docs/faults.md
        self.agents[name] = start(command, str(self.directory), self.directory.with_name(name))

    def wait_for(self, condition, seconds=240):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def end(self, name: str, seconds: float = 240) -> int:
        """Return the exit code of an agent."""
        self.wait_for(lambda: self.agents[name].poll() is not None, seconds)
        return self.agents[name].returncode

    def said(self, *names: str) -> str:
        """Return the output of the agents `names` and their workers; none: of all."""
        return "".join(self.directory.with_name(name).read_text() for name in names or self.agents)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for agent in self.agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)  # its workers die with it
            agent.wait()
