"""The encoder of the study on megatron-core's layers: a decoder stack whose attention mask belongs to the batch.

`config` imports nothing heavy; the other modules need `megaenc.backend.prepare_megatron()` first.
"""

from megaenc.model.config import PRESETS, ModelConfig, padded_vocab_size

__all__ = ["PRESETS", "ModelConfig", "padded_vocab_size"]
