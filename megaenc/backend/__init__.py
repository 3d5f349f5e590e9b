"""Device detection, process groups, parallel layout, and the patches of megatron-core and torch."""

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
    """Import a public name of this package on first use, so that `ParallelConfig` needs no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
