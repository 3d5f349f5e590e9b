"""Conversion between megatron-core checkpoints and Hugging Face folders, by one parameter mapping for both directions."""
