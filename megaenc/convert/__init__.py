"""Conversion between megatron-core checkpoints and Hugging Face directories.

One parameter mapping serves both directions.
"""
