"""How much each phase does: what one accelerator is given, and the same in miniature for a machine that has none."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megaenc.model.config import PRESETS, ModelConfig

TARGETS = {"1b": 0.55, "610m": 0.50, "210m": 0.40}
"""Of the device's dense bf16 peak, by executed operations."""
PEER_TARGET = 3.0
"""Times the padded peer's tokens a second."""
CLM, MLM = "clm", "mlm(mask=0.4)"


def _by_width(heads: int, groups: int, layers: int) -> Mapping[str, ModelConfig]:
    """Return a model for each width of a head.

    Its weights keep the size of what they multiply, so that scores tell tokens apart: see megaenc.bench.gpu.correctness.
    """
    sizes = {width: heads * width for width in (64, 96)}
    return {
        str(width): ModelConfig(layers, hidden, 8 * hidden // 3 // 16 * 16, heads, groups, init_method_std=hidden**-0.5)
        for width, hidden in sizes.items()
    }


@dataclass(frozen=True)
class Sizes:
    """Of everything."""

    widths: Mapping[str, ModelConfig] = field(default_factory=lambda: _by_width(6, 2, 2))
    """correctness, by the width of a head"""
    length: int = 2048
    """tokens of its packs, as of the longest document"""
    vocab_size: int = 2000
    """of it and of parity; no multiple of 128, so that padding takes part"""
    parity: ModelConfig = PRESETS["tiny"]
    parity_length: int = 256
    parity_packs: int = 4
    """of a micro-batch; an update has two"""
    updates: int = 20
    """of parity"""
    speed: Mapping[str, ModelConfig] = field(default_factory=lambda: {name: PRESETS[name] for name in TARGETS})
    speed_length: int = 2048
    speed_vocab_size: int = 128256
    compared: str = "610m"
    """which of `speed` the peer and other kernels are compared on"""
    micro_batches: int = 4
    """of an update"""
    packs: int = 0
    """of a micro-batch; 0: what fills the card"""
    seconds: float = 8.0
    """that an objective is timed"""
    documents: int = 64
    """of the comparison with the peer"""
    passes: int = 3


FULL = Sizes()
_MINIATURE = ModelConfig(2, 128, 256, 2, 1)
SMALL = Sizes(
    widths=_by_width(3, 1, 1),
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
