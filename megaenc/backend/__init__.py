"""Devices, process groups, parallel layout, and patches of megatron-core."""

import importlib
from typing import Any

_MODULES = {
    "Backend": "device",
    "detect_backend": "device",
    "KernelConfig": "parallel_config",
    "ParallelConfig": "parallel_config",
    "prepare_megatron": "megatron",
    "init_distributed": "initialize",
    "destroy_distributed": "initialize",
}


def __getattr__(name: str) -> Any:
    """Import a public name of this package on first use.

    `ParallelConfig` thus needs no torch.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
