"""Text to packs: sources, tokenizers, preprocessing, packing and order of packs."""
