"""Device detection, process groups, the parallel layout, and the only two places that patch megatron-core or torch."""

import importlib
from typing import Any

_MODULES = {
    "Backend": "device",
    "detect_backend": "device",
    "KernelConfig": "parallel_config",
    "ParallelConfig": "parallel_config",
    "prepare_megatron": "megatron",
}
_MODULES |= {"init_distributed": "initialize", "destroy_distributed": "initialize"}


def __getattr__(name: str) -> Any:
    """Each when it is asked for: a `ParallelConfig` can be spoken of without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
