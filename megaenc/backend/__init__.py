"""Where it runs: cuda, rocm or cpu; process groups; the only two places that stand in for anything of megatron-core or torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaenc.backend.device import Backend, detect
    from megaenc.backend.kernels import Kernels
    from megaenc.backend.layout import Layout
    from megaenc.backend.megatron import prepare_megatron
    from megaenc.backend.process import start, stop

__all__ = ["Backend", "Kernels", "Layout", "detect", "prepare_megatron", "start", "stop"]

_MODULES = {"Backend": "device", "Kernels": "kernels", "Layout": "layout", "detect": "device", "prepare_megatron": "megatron"}


def __getattr__(name: str) -> Any:
    """Each when it is asked for: a `Layout` can be spoken of without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'process')}"), name)
