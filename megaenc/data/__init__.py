"""Text to packs: sources, tokenizers, preprocessing to `.bin`/`.idx`, packing and the order of packs."""
