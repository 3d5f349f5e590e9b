"""Transformer Engine's layers, as megatron-core wraps them, with the parameter names of megatron-core's own layers.

Extra state, which only delayed scaling needs, is left out of checkpoints, so that runs can switch between the two kinds.
"""

import functools
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megaenc.errors import InputError

_MIN_FP8_VERSION = "2.2.0"  # the first version with per-tensor current scaling


def check_transformer_engine(fp8_format: str | None) -> None:
    """Raise InputError if Transformer Engine is not installed or cannot compute in `fp8_format` (None: no float8)."""
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.utils import get_te_version, is_te_min_version

    if not extension.HAVE_TE:
        raise InputError(
            "--transformer-impl transformer_engine: transformer-engine is not installed; install it, or leave the flag out: "
            "nothing else needs it"
        )
    if not fp8_format:
        return
    if not is_te_min_version(_MIN_FP8_VERSION):
        raise InputError(
            f"--fp8-format {fp8_format}: found transformer-engine {get_te_version()}, expected {_MIN_FP8_VERSION} or later"
        )
    is_available, reason = extension.FP8GlobalStateManager.is_fp8_available()
    if not is_available:
        raise InputError(
            f"--fp8-format {fp8_format}: Transformer Engine has no float8 on this machine ({reason}); leave the flag out"
        )


def _spec_provider() -> Any:
    """Return megatron-core's provider of Transformer Engine classes, imported on use."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def linear_classes() -> tuple[type, type]:
    """Return Transformer Engine's column-parallel and row-parallel linear class, without extra state in checkpoints."""
    provider = _spec_provider()
    return _without_extra_state(provider.column_parallel_linear()), _without_extra_state(provider.row_parallel_linear())


@functools.cache
def _without_extra_state(linear: type) -> type:
    """Return a subclass of `linear` without extra state, which accepts any extra state of a checkpoint."""
    return type(linear.__name__, (linear,), {"get_extra_state": lambda self: None, "set_extra_state": lambda self, state: None})


class StatelessTENorm:
    """Factory of Transformer Engine's RMSNorm module: a call returns one whose state dict has only the weight."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = _spec_provider().layer_norm(rms_norm=True)(config=config, hidden_size=hidden_size, eps=eps)
        if type(norm).get_extra_state is not torch.nn.Module.get_extra_state:
            norm.register_state_dict_post_hook(_drop_extra_state)
            norm.register_load_state_dict_pre_hook(_allow_missing_extra_state)
        return norm


def _drop_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the extra state from a state dict; a post hook of `state_dict`."""
    del state[f"{prefix}_extra_state"]


def _allow_missing_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add an empty extra state to a state dict if it is missing; a pre hook of `load_state_dict`."""
    state.setdefault(f"{prefix}_extra_state")
