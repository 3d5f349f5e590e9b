"""Encoder, built from megatron-core's layers.

Its attention mask comes with each batch.

`config` imports nothing heavy; the other modules need `megaenc.backend.prepare_megatron()` first.
"""

from megaenc.model.config import PRESETS, ModelConfig, padded_vocab_size

__all__ = ["PRESETS", "ModelConfig", "padded_vocab_size"]
