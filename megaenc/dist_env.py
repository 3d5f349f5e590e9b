"""Which process of the run this is, from torchrun's environment: no torch needed to know."""

import os


def get_rank() -> int:
    """This process's number in the run; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def get_local_rank() -> int:
    """This process's number on its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_size() -> int:
    """Processes of the run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def get_local_world_size() -> int:
    """Processes of the run on this machine; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_multi_node() -> bool:
    """Whether the run has processes on other machines too."""
    return get_world_size() > get_local_world_size()
