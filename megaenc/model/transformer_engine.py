"""Transformer Engine's layers as megatron-core wraps them, under the names, and with the checkpoints, of megatron-core's own.

State besides weights is of delayed scaling, which is not used: left out of checkpoints, runs may change the kind of layer.
"""

import functools
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megaenc.errors import InputError

_MIN_FP8_VERSION = "2.2.0"  # scales found anew for each matrix


def check_transformer_engine(fp8_format: str | None) -> None:
    """Raise InputError where `--transformer-impl transformer_engine`, with this `--fp8-format`, cannot be had."""
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
    able, why = extension.FP8GlobalStateManager.is_fp8_available()
    if not able:
        raise InputError(f"--fp8-format {fp8_format}: Transformer Engine has none on this machine ({why}); leave the flag out")


def _spec_provider() -> Any:
    """Return megatron-core's own choice of classes; its imports are many, and wanted here alone."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def linear_classes() -> tuple[type, type]:
    """Return the layer that has shares of the output's columns, and the one of the input's."""
    provider = _spec_provider()
    return _without_extra_state(provider.column_parallel_linear()), _without_extra_state(provider.row_parallel_linear())


@functools.cache
def _without_extra_state(linear: type) -> type:
    """Like megatron-core's own layers, this has None for what there is besides weights, and takes whatever a checkpoint holds."""
    return type(linear.__name__, (linear,), {"get_extra_state": lambda self: None, "set_extra_state": lambda self, state: None})


class StatelessTENorm:
    """Makes Transformer Engine's RMSNorm, whose state dict has the weight alone."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        norm = _spec_provider().layer_norm(rms_norm=True)(config=config, hidden_size=hidden_size, eps=eps)
        if type(norm).get_extra_state is not torch.nn.Module.get_extra_state:
            norm.register_state_dict_post_hook(_drop_extra_state)
            norm.register_load_state_dict_pre_hook(_allow_missing_extra_state)
        return norm


def _drop_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    del state[f"{prefix}_extra_state"]


def _allow_missing_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.setdefault(f"{prefix}_extra_state")
