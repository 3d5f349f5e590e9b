"""Where it runs: cuda, rocm or cpu; process groups; the only two places that stand in for anything of megatron-core or torch."""

from megaenc.backend.device import Backend, detect
from megaenc.backend.layout import Layout
from megaenc.backend.megatron import prepare_megatron
from megaenc.backend.process import start, stop

__all__ = ["Backend", "Layout", "detect", "prepare_megatron", "start", "stop"]
