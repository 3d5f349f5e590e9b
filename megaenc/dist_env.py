"""Which process of the run this is, from torchrun's environment: no torch needed to know."""

import os


def rank() -> int:
    """This process's number in the run; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's number on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Processes of the run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Processes of the run on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def several_nodes() -> bool:
    """Whether the run has processes on other machines too."""
    return world_size() > local_world_size()
