"""Conversion between megatron-core checkpoints and Hugging Face folders.

One parameter mapping serves both directions.
"""
