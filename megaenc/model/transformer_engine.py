"""Layers of Transformer Engine, as megatron-core wraps them.

Their parameters have the names of megatron-core's own layers. Checkpoints hold no extra state,
which only delayed scaling needs, so that runs can switch between the two kinds.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megaenc.errors import InputError

_MIN_FP8_VERSION = "2.2.0"  # the first version with per-tensor current scaling


def check_transformer_engine(fp8_format: str | None) -> None:
    """Check that Transformer Engine is installed and computes in a float8 format.

    Args:
        fp8_format: Format of float8, whose name is not checked; None: no float8.

    Raises:
        InputError: It is not installed, or with `fp8_format` too old or without float8 on this
            machine.
    """
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.utils import get_te_version, is_te_min_version

    if not extension.HAVE_TE:
        raise InputError(
            "--transformer-impl transformer_engine: transformer-engine is not installed; "
            "install it, or leave the flag out: "
            "nothing else needs it"
        )
    if not fp8_format:
        return
    if not is_te_min_version(_MIN_FP8_VERSION):
        raise InputError(
            f"--fp8-format {fp8_format}: found transformer-engine {get_te_version()}, "
            f"expected {_MIN_FP8_VERSION} or later"
        )
    is_available, reason = extension.FP8GlobalStateManager.is_fp8_available()
    if not is_available:
        raise InputError(
            f"--fp8-format {fp8_format}: Transformer Engine has no float8 on this machine "
            f"({reason}); leave the flag out"
        )


def _spec_provider() -> Any:
    """Return megatron-core's provider of Transformer Engine classes, imported on use."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def linear_classes() -> tuple[type, type]:
    """Return megatron-core's two classes of Transformer Engine's linear layers.

    They are the column-parallel and the row-parallel one. The package must be installed
    (`check_transformer_engine`).
    """
    provider = _spec_provider()
    return provider.column_parallel_linear(), provider.row_parallel_linear()


class RMSNormFactory:
    """Class without instances, whose call returns Transformer Engine's RMSNorm.

    The class itself stands in a layer's specification, in which megatron-core does not call
    functions. `config`, `hidden_size` and `eps` are passed on; other arguments are ignored.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        return _spec_provider().layer_norm(rms_norm=True)(
            config=config, hidden_size=hidden_size, eps=eps
        )
