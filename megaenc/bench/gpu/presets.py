"""Sizes of the GPU benchmark's phases: for one accelerator, and in miniature for a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass

from megaenc.bench.synthetic_docs import BenchSetup
from megaenc.model.config import PRESETS, ModelConfig

TARGETS = {"1b": 0.60, "610m": 0.55, "210m": 0.48}  # model FLOPs utilization of the H100's dense bf16 peak
HF_TARGET = 3.0  # speedup over padded transformers
CLM, MLM = "clm", "mlm(mask=0.4)"


def _setups_by_head_dim(heads: int, groups: int, layers: int, vocab_size: int, seq_length: int) -> Mapping[str, BenchSetup]:
    """Return a model for each head dimension.

    Weights preserve the scale of activations, so that attention scores differ between tokens (see megaenc.bench.gpu.correctness).
    """
    setups = {}
    for width in (64, 96):
        hidden = heads * width
        shape = ModelConfig(layers, hidden, 8 * hidden // 3 // 16 * 16, heads, groups, init_method_std=hidden**-0.5)
        setups[str(width)] = BenchSetup(shape=shape, vocab_size=vocab_size, seq_length=seq_length)
    return setups


@dataclass(frozen=True)
class BenchPreset:
    """Sizes of a GPU benchmark: models by phase, packs, micro-batches, steps, documents, passes and seconds."""

    correctness: Mapping[str, BenchSetup]  # by head dimension
    parity: BenchSetup
    parity_packs: int  # per micro-batch; two micro-batches per step
    steps: int  # of the parity phase
    speed: Mapping[str, BenchSetup]
    compared_model: str  # key of `speed` for the peer and compare phases
    micro_batches: int  # per step
    packs: int  # per micro-batch; 0 fills the device memory
    seconds: float  # per objective
    documents: int  # of the peer phase
    passes: int


FULL = BenchPreset(
    correctness=_setups_by_head_dim(6, 2, 2, vocab_size=2000, seq_length=2048),  # not a multiple of 128, to test padding
    parity=BenchSetup(shape=PRESETS["tiny"], vocab_size=2000, seq_length=256, learning_rate=2e-3),
    parity_packs=4,
    steps=20,
    speed={name: BenchSetup(shape=PRESETS[name], vocab_size=128256, seq_length=2048, learning_rate=1e-6) for name in TARGETS},
    compared_model="610m",
    micro_batches=4,
    packs=0,
    seconds=8.0,
    documents=64,
    passes=3,
)
_MINIATURE = ModelConfig(2, 128, 256, 2, 1)
SMALL = BenchPreset(
    correctness=_setups_by_head_dim(3, 1, 1, vocab_size=500, seq_length=96),
    parity=BenchSetup(shape=_MINIATURE, vocab_size=500, seq_length=64, learning_rate=2e-3),
    parity_packs=1,
    steps=6,
    speed={"miniature": BenchSetup(shape=_MINIATURE, vocab_size=500, seq_length=128, learning_rate=1e-6)},
    compared_model="miniature",
    micro_batches=2,
    packs=2,
    seconds=0.5,
    documents=8,
    passes=1,
)
