"""Rank and world size of this process, from torchrun's environment variables and without importing torch."""

import os
import socket

LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
"""Environment variables of torchrun that hold whole numbers."""


def _read_number(name: str, default: int) -> int:
    """Return the number in an environment variable.

    It is `default` if the variable is unset, empty or no number.
    """
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


def is_launched() -> bool:
    """Return whether a launcher such as torchrun has given this process a rank."""
    return bool(os.environ.get("RANK"))


def get_rank() -> int:
    """Return this process's rank among all processes of the run, from RANK; 0 without torchrun."""
    return _read_number("RANK", 0)


def get_local_rank() -> int:
    """Return this process's rank among the run's processes on its node, from LOCAL_RANK; 0 without torchrun."""
    return _read_number("LOCAL_RANK", 0)


def get_world_size() -> int:
    """Return the number of processes of the run on all nodes, from WORLD_SIZE; 1 without torchrun."""
    return _read_number("WORLD_SIZE", 1)


def get_local_world_size() -> int:
    """Return the number of processes of the run on this node, from LOCAL_WORLD_SIZE; 1 without torchrun."""
    return _read_number("LOCAL_WORLD_SIZE", 1)


def store_poll_interval(seconds: float) -> float:
    """Return the seconds between a rank's requests to the store: `seconds`, more for many ranks, as one process answers all."""
    return max(seconds, get_world_size() / 2048)


def is_multi_node() -> bool:
    """Return whether the run has more processes in all than on this node; False without torchrun."""
    return get_world_size() > get_local_world_size()


def build_rank_variables(count: int) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for each of `count` ranks on this machine, with a free port; none for one."""
    if count == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
