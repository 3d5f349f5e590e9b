"""How much each phase does: what one accelerator is given, and the same in miniature for a machine that has none."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaenc.model.config import PRESETS, ModelConfig

TARGETS = {"1b": 0.55, "610m": 0.50, "210m": 0.40}
"""Of the device's dense bf16 peak, by executed operations."""
PEER_TARGET = 3.0
"""Times the padded peer's tokens a second."""
CLM, MLM = "clm", "mlm(mask=0.4)"


@dataclass(frozen=True)
class Sizes:
    """Of everything."""

    widths: Mapping[str, ModelConfig]
    """correctness, by the width of a head"""
    length: int
    """tokens of its packs, as of the longest document"""
    vocab_size: int
    """of it and of parity"""
    parity: ModelConfig
    parity_length: int
    parity_packs: int
    """of a micro-batch; an update has two"""
    updates: int
    """of parity"""
    speed: Mapping[str, ModelConfig]
    speed_length: int
    speed_vocab_size: int
    compared: str
    """which of `speed` the peer and other kernels are compared on"""
    micro_batches: int
    """of an update"""
    packs: int
    """of a micro-batch; 0: what fills the card"""
    seconds: float
    """that an objective is timed"""
    documents: int
    """of the comparison with the peer"""
    passes: int

    def model(self, name: str) -> dict[str, Any]:
        """Fields of a model of `speed`."""
        return dataclasses.asdict(self.speed[name])


def _head(width: int, heads: int, groups: int, layers: int) -> ModelConfig:
    # Weights that keep the size of what they multiply, so that scores tell tokens apart: see megaenc.bench.gpu.correctness.
    hidden = heads * width
    return ModelConfig(layers, hidden, 8 * hidden // 3 // 16 * 16, heads, groups, init_method_std=hidden**-0.5)


FULL = Sizes(
    widths={"64": _head(64, 6, 2, 2), "96": _head(96, 6, 2, 2)},
    length=2048,
    vocab_size=2000,  # no multiple of 128: padding takes part
    parity=PRESETS["tiny"],
    parity_length=256,
    parity_packs=4,
    updates=20,
    speed={name: PRESETS[name] for name in ("1b", "610m", "210m")},
    speed_length=2048,
    speed_vocab_size=128256,
    compared="610m",
    micro_batches=4,
    packs=0,
    seconds=8.0,
    documents=64,
    passes=3,
)
_MINIATURE = ModelConfig(2, 128, 256, 2, 1)
SMALL = Sizes(
    widths={"64": _head(64, 3, 1, 1), "96": _head(96, 3, 1, 1)},
    length=96,
    vocab_size=500,
    parity=_MINIATURE,
    parity_length=64,
    parity_packs=1,
    updates=6,
    speed={"miniature": _MINIATURE},
    speed_length=128,
    speed_vocab_size=500,
    compared="miniature",
    micro_batches=2,
    packs=2,
    seconds=0.5,
    documents=8,
    passes=1,
)
